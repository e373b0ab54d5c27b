"""The tasks of a run: reads them once, separates the splits, drops long prompts."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxrl_post.config.data import OnOverlap, OnUnwritten
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data import chat
from jaxrl_post.data.learned import added_tokens, unwritten
from jaxrl_post.data.lengths import Lengths, written
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.data.tools import no_tools
from jaxrl_post.envs import Environment, Message, Task, TaskSequence
from jaxrl_post.envs.env import Split
from jaxrl_post.examples.rendered import Rendered
from jaxrl_post.messages import identity
from jaxrl_post.pictures import PictureError
from jaxrl_post.specs import raised

__all__ = [
    "SPLITS",
    "TaskSets",
    "check_tools",
    "distinct",
    "dropped",
    "fitting_prompts",
    "fully_written",
    "left_out",
    "open_tasks",
    "prompt_hash",
]

logger = logging.getLogger(__name__)

SPLITS: tuple[Split, ...] = ("train", "eval")

# For tasks that are generated on access: up to KEPT_TASKS are generated once and kept
# in memory; more than MOST_TASKS are an error.
KEPT_TASKS, MOST_TASKS = 100_000, 1_000_000


@dataclass(frozen=True)
class TaskSets:
    """The tasks of an environment, read once and kept.

    Attributes:
        environment: the environment of the tasks.
        train: training tasks.
        eval: held-out tasks.
    """

    environment: Environment
    train: Sequence[Task]
    eval: Sequence[Task]

    @classmethod
    def of(cls, environment: Environment) -> "TaskSets":
        """Reads all tasks of an environment.

        Raises:
            ConfigError: a split generates more than 1,000,000 tasks on access.
        """
        if isinstance(environment, TaskSets):
            return environment
        return cls(environment, *(_listed(environment, split) for split in SPLITS))

    @property
    def name(self) -> str:
        """The name of the environment."""
        return self.environment.name

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split."""
        return self.train if split == "train" else self.eval

    def size(self, split: Split) -> int:
        """Number of tasks of a split."""
        return len(self.tasks(split))

    def demonstration(self, task: Task) -> str | Message | None:
        """The environment's demonstration of a task."""
        found = _from(self.environment, "demonstration", task)
        if not isinstance(found, str | Message | None):
            raise ConfigError(
                f"--env: {self.name}: demonstration must return a text, a Message or "
                f"None, got {found!r:.80}"
            )
        return found

    def only(self, split: Split, kept: Sequence[int]) -> "TaskSets":
        """A copy with only some tasks of a split.

        Args:
            split: "train" or "eval".
            kept: indices of the tasks to keep, in order.
        """
        tasks = self.tasks(split)
        if len(kept) == len(tasks):
            return self
        if isinstance(tasks, TaskSequence):
            chosen = TaskSequence(len(kept), lambda i: tasks[kept[i]])
        else:
            chosen = tuple(tasks[i] for i in kept)
        if split == "train":
            return replace(self, train=chosen)
        return replace(self, eval=chosen)


def open_tasks(environment: Environment, on_overlap: OnOverlap) -> TaskSets:
    """Reads the tasks of an environment; no prompt is both trained on and held out.

    Of equal held-out prompts only the first is kept: with copies, a confidence interval
    of the accuracy would be too narrow.

    Args:
        environment: the environment; its tasks are read once.
        on_overlap: what to do with training tasks whose prompt is held out: "fail",
            "drop" them, or "allow" them.

    Raises:
        ConfigError: an empty split, an overlap under "fail", nothing left under "drop",
            or too many tasks.

    >>> from jaxrl_post.envs.tasks.arithmetic import Arithmetic
    >>> tasks = open_tasks(Arithmetic.at_level(1), "fail")
    >>> len(tasks.train), len(tasks.eval)
    (86, 14)
    """
    tasks = TaskSets.of(environment)
    for split in SPLITS:
        if not len(tasks.tasks(split)):
            raise ConfigError(
                f"--env: {environment.name} has no {split} tasks; the data set is empty"
            )
    kept = distinct(tasks.eval)
    left_out(
        len(tasks.eval) - len(kept),
        len(tasks.eval),
        f"eval tasks of {environment.name}",
        "an earlier one has the same prompt",
    )
    tasks = tasks.only("eval", kept)
    if on_overlap == "allow":
        return tasks
    held_out = {prompt_hash(task) for task in tasks.eval}
    apart = [
        i for i, task in enumerate(tasks.train) if prompt_hash(task) not in held_out
    ]
    shared, total = len(tasks.train) - len(apart), len(tasks.train)
    if shared and on_overlap == "fail":
        raise ConfigError(
            f"--data.on-overlap: {shared} of {total} train tasks of {environment.name} "
            "have the prompt of a held-out task; choose other files or options of "
            "--env, or leave these tasks out with --data.on-overlap drop"
        )
    if not apart:
        raise ConfigError(
            f"--data.on-overlap: all {total} train tasks of {environment.name} have "
            "the prompt of a held-out task, so that none is left; choose other files "
            "or options of --env"
        )
    left_out(
        shared,
        total,
        f"train tasks of {environment.name}",
        "their prompts are held out (--data.on-overlap drop)",
    )
    return tasks.only("train", apart)


def distinct(tasks: Sequence[Task], most: int | None = None) -> list[int]:
    """Indices of the first task of each prompt.

    Args:
        tasks: in any order.
        most: maximum number of indices; None for all.
    """
    known, kept = set[bytes](), []
    for index, task in enumerate(tasks):
        if most is not None and len(kept) >= most:
            break
        digest = prompt_hash(task)
        if digest not in known:
            known.add(digest)
            kept.append(index)
    return kept


def fitting_prompts(
    tasks: TaskSets,
    tokenizer: Tokenizer,
    limit: int,
    option: str,
    *,
    context: int,
    on_unwritten: OnUnwritten = "fail",
) -> tuple[TaskSets, int]:
    """Drops tasks whose prompt is too long, and logs their number.

    All prompts are measured, most of them by their characters, without tokenising. The
    result depends only on the arguments, so a resumed run draws the same tasks.

    Args:
        tasks: the tasks of both splits.
        tokenizer: the model's tokenizer.
        limit: maximum tokens of a prompt; 0 for no limit other than `context`.
        option: the option that sets the limit, for messages; for a limit of 0, that
            which leaves so little of the model's context.
        context: tokens of the longest prompt that the model could continue.
        on_unwritten: as for `dropped`.

    Returns:
        The tasks, and the limit; for a limit of 0, the tokens of the longest prompt.

    Raises:
        ConfigError: a split would be empty, a prompt cannot be rendered, or the chat
            template leaves something out of it.
    """
    for split in SPLITS:
        kept = fully_written(
            tasks.tasks(split), tokenizer, split, tasks.name, on_unwritten
        )
        tasks = tasks.only(split, kept)
    lengths, longest, rendered = Lengths.of(tokenizer), 0, Rendered(tokenizer)
    for split in SPLITS:
        each = tasks.tasks(split)
        measure = partial(_prompt, tokenizer, split, tasks.name)
        kept: list[int] = []
        for index, task in enumerate(each):
            rendered.look(message.content for message in task.messages)
            text = measure(task, written)
            shown = measure(task, partial(_added, text))
            fits = lengths.fits(text, (limit or context) - shown)
            most = (lengths.at_most(text) or 0) + shown
            # Tokenise a prompt only if its length is unclear or may be the longest.
            if fits is None or (fits and not limit and most > longest):
                size = len(measure(task, chat.render))
                fits = size <= (limit or context)
                longest = max(longest, size if fits else 0)
            if fits:
                kept.append(index)
        rendered.warn(f"{split} tasks of {tasks.name}")
        if not kept:
            raise ConfigError(
                f"{option}: all {len(each)} {split} tasks of {tasks.name} have a "
                f"prompt of more than {limit or context} tokens"
                + (
                    "; raise the option"
                    if limit
                    else ", which is left of the model's context; lower the option, or "
                    "choose a model with a longer context"
                )
            )
        because = (
            f"{option} {limit}"
            if limit
            else f"{context}, which {option} leaves of the model's context"
        )
        left_out(
            len(each) - len(kept),
            len(each),
            f"{split} tasks of {tasks.name}",
            f"a prompt of more tokens than {because}",
        )
        tasks = tasks.only(split, kept)
    return tasks, limit or longest


def left_out(count: int, total: int, what: str, why: str) -> None:
    """Logs how many examples a run leaves out; logs nothing if `count` is 0.

    Args:
        count: number of examples that are left out.
        total: number of all examples.
        what: name of the examples, such as "train tasks of gsm8k".
        why: the reason, written after a colon.
    """
    if count:
        logger.warning("%d of %d %s left out: %s", count, total, what, why)


def check_tools(tasks: Sequence[Task], tokenizer: Tokenizer, what: str) -> None:
    """Refuses tasks with tools for a model whose chat template does not write them.

    Args:
        tasks: any.
        tokenizer: the model's.
        what: the tasks, for the message.

    Raises:
        ConfigError: says why the model cannot be given tools.
    """
    if not any(task.tools for task in tasks):
        return
    reason = no_tools(tokenizer)
    if reason is not None:
        raise ConfigError(
            f"--env: the {what} have tools, and {reason}; choose a model that was "
            "trained to call tools, or an environment without them"
        )


def fully_written(
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    split: Split,
    name: str,
    on_unwritten: OnUnwritten,
) -> list[int]:
    """Indices of the tasks that are taken, of those whose chat template writes all.

    Args:
        tasks: any.
        tokenizer: the model's.
        split: of the tasks, for messages.
        name: of their environment, for messages.
        on_unwritten: as for `dropped`.

    Raises:
        ConfigError: as `check_tools` and `dropped`; a prompt cannot be rendered.
    """
    what = f"{split} tasks of {name}"
    check_tools(tasks, tokenizer, what)
    missing: dict[int, tuple[str, ...]] = {}
    eyes = tokenizer.eyes
    seen = None if eyes is None else tokenizer.backend.id_to_token(eyes.image_token)
    for index, task in enumerate(tasks):
        options = chat.with_tools(task.tools)
        texts = [_prompt(tokenizer, split, name, task, written)]
        if seen and texts[0].endswith(seen):
            raise ConfigError(
                f"--env: {split} task {task.id} of {name}: {chat.NO_TEXT_AFTER}"
            )
        missing[index] = unwritten(
            tokenizer, task.messages, options, learned="none", texts=texts
        )
    out = dropped(missing, what, on_unwritten)
    return [index for index in missing if index not in out]


def dropped(
    missing: Mapping[int, Sequence[str]], what: str, on_unwritten: OnUnwritten
) -> set[int]:
    """Indices of the examples to leave out because a template does not write them.

    Args:
        missing: by example, what the chat template leaves out of it, as `unwritten`.
        what: the examples, such as "train tasks of gsm8k".
        on_unwritten: "fail" raises if anything is left out; "drop" leaves such examples
            out; "allow" takes them. Both log how many there are.

    Raises:
        ConfigError: something is left out under "fail", or of every example under
            "drop".
    """
    found = {index for index, nouns in missing.items() if nouns}
    if not found:
        return set()
    counts = Counter(noun for nouns in missing.values() for noun in nouns)
    listed = ", ".join(f"{noun} ({count})" for noun, count in counts.items())
    why = (
        f"of {len(found)} of {len(missing)} {what} the chat template leaves something "
        f"out: {listed}"
    )
    drops = on_unwritten == "drop"
    if on_unwritten == "fail" or (drops and len(found) == len(missing)):
        raise ConfigError(
            f"--data.on-unwritten: {why}; the first is number {min(found) + 1}. Choose "
            "a model or a chat template that writes it, take what is written with "
            "--data.on-unwritten allow"
            + ("" if drops else ", or leave these out with --data.on-unwritten drop")
        )
    logger.warning("%s (--data.on-unwritten %s)", why, on_unwritten)
    return found if drops else set()


def _prompt[Found](
    tokenizer: Tokenizer,
    split: Split,
    name: str,
    task: Task,
    render: Callable[..., Found],
) -> Found:
    try:
        return render(tokenizer, task.messages, options=chat.with_tools(task.tools))
    except (TokenizerError, PictureError) as error:
        raise ConfigError(
            f"--env: {split} task {task.id} of {name}: {error}"
        ) from error


def _added(
    text: str, tokenizer: Tokenizer, messages: chat.Messages, options: chat.Options
) -> int:
    """Number of tokens that pictures add to a prompt, which was written as a text."""
    del options
    return added_tokens(tokenizer, messages, [text])


def _listed(environment: Environment, split: Split) -> Sequence[Task]:
    tasks = _from(environment, "tasks", split)
    if not (hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")):
        raise ConfigError(
            f"--env: {environment.name}: tasks({split!r}) must return a sequence of "
            f"Tasks, such as a list, got {type(tasks).__name__}"
        )
    for number, task in enumerate(tasks if isinstance(tasks, list | tuple) else ()):
        _check_task(task, f"{environment.name}: {split} task {number}")
    if isinstance(tasks, list | tuple):
        return tasks
    if len(tasks) > MOST_TASKS:
        raise ConfigError(
            f"--env: {environment.name} has {len(tasks):,} {split} tasks; a run can "
            f"check at most {MOST_TASKS:,} before it begins; ask for fewer, as in "
            f"'?{split}_size={MOST_TASKS}'"
        )
    return tuple(tasks) if len(tasks) <= KEPT_TASKS else tasks


def _from(environment: Environment, method: str, argument: Any) -> Any:
    """Calls a method of an environment; names it if one from outside raises.

    Raises:
        ConfigError: an environment that is not of the package raises.
    """
    try:
        return getattr(environment, method)(argument)
    except Exception as error:
        if type(environment).__module__.startswith("jaxrl_post."):
            raise
        raise ConfigError(
            f"--env: {environment.name}: {method}: {raised(error)}"
        ) from error


def _check_task(task: object, where: str) -> None:
    """Refuses what is no task; one would fail where its prompt is read, far from here.

    Raises:
        ConfigError: it, or a message of it, is of another type.
    """
    if not isinstance(task, Task):
        raise ConfigError(f"--env: {where} must be a Task, got {task!r:.80}")
    texts = isinstance(task.messages, tuple | list) and all(
        isinstance(each, Message) and isinstance(each.content, str)
        for each in task.messages
    )
    if not texts:
        raise ConfigError(
            f"--env: {where}: messages must be a tuple of Messages of text, got "
            f"{task.messages!r:.80}"
        )


def prompt_hash(task: Task) -> bytes:
    """A hash of the prompt, 16 bytes: of roles, texts and pictures."""
    digest = hashlib.blake2b(digest_size=16)
    for message in task.messages:
        text = identity(message.content, message.pictures)
        content = text.encode("utf-8", errors="surrogatepass")
        digest.update(f"{message.role} {len(content)} ".encode())
        digest.update(content)
    return digest.digest()
