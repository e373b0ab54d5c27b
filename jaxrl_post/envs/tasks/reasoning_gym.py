"""The procedural tasks of the reasoning-gym library, scored by the library itself.

References:
    Stojanovski et al., "Reasoning Gym: Reasoning Environments for Reinforcement
    Learning with Verifiable Rewards", arXiv:2505.24760.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from jaxrl_post.envs.env import Message, Split, Step, Task, TaskSequence, response
from jaxrl_post.envs.processor_time import processor_time
from jaxrl_post.envs.tasks.blocks import after_thoughts
from jaxrl_post.envs.tasks.held_out import split_of
from jaxrl_post.envs.tasks.plain_answers import harmless
from jaxrl_post.extras import install

__all__ = ["ReasoningGym"]

# The library seeds problem i of a dataset with seed + i, so datasets of neighbouring
# seeds share nearly all problems. No training index reaches the evaluation seeds.
_EVAL_OFFSET = 2**30

# One problem in five is held out. The hash uses the text alone, so a held-out problem
# is held out at every size and seed. One in ten would be too few for tasks with some
# hundred problems, and the search for held-out problems would take twice as long.
_HELD_OUT_ONE_IN = 5

# After so many problems of the other split in a row, the task counts as one whose
# problems all belong to that split.
_ATTEMPTS = 200

# After so many repeated problems in a row, the search assumes that all have been seen.
_PATIENCE = 100

# Seconds of processor time of a scorer. sympy may look for a simpler form of a short
# formula for minutes.
_SCORING_S = 4.0


@dataclass(frozen=True)
class ReasoningGym:
    """Any task of reasoning-gym, with the library's own `score_answer`.

    The scorer sees the response after its thoughts, stripped of white space. Most
    scorers give partial credit, also for a text that has the answer among others; with
    `reward="solved"` only a score of 1 has a reward. If the scorer raises on a response
    that it cannot parse (three of the library's scorers did on text that is no number,
    or JSON of another shape), the reward is 0 and the metric `scorer_raised` is 1.

    Nothing that a model wrote is executed. Where a scorer evaluates the response, only
    plain data or a plain formula is shown to it (`plain_answers.harmless`), and
    anything else scores as an empty answer does. A scorer that takes more than 4
    seconds of processor time is stopped, and the judgement has failed.

    A hash of its text assigns one problem in five to "eval", the others to "train".
    Problem i of "train" is the library's problem of seed `seed + i`; if that is held
    out, the one of `seed + train_size + i`, and so on; problems may repeat. The "eval"
    problems are the first distinct held-out ones from seed `2**30 + seed` on: the
    search generates about five times as many, and a task with few distinct problems
    has fewer than `eval_size`.

    The problems of a few tasks (isomorphic_strings, ransom_note,
    polynomial_multiplication, word_ladder) depend on Python's string hash: they differ
    between processes unless PYTHONHASHSEED is set. Scoring is still right, because each
    `Task` carries its library entry. Needs the extra `envs`.

    Args:
        task: the library's name of the task, such as "chain_sum".
        options: fields of the task's configuration, such as {"max_terms": 2}.
        seed: in [0, 2**30 - max(train_size, eval_size)].
        train_size: number of training tasks, at least 1.
        eval_size: maximum number of evaluation tasks, at least 1.
        reward: "score" for the library's score, or "solved" for 1 where that is 1 and 0
            elsewhere.

    Raises:
        ModuleNotFoundError: if the extra `envs` is not installed.
        ValueError: if the library does not have the task, the task does not have an
            option, or a value is out of range.

    >>> ReasoningGym("chain_sum", options={"seed": 1})
    Traceback (most recent call last):
    ValueError: options must not hold 'seed': it is an argument of ReasoningGym itself
    """

    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    train_size: int = 10_000
    eval_size: int = 200
    reward: Literal["score", "solved"] = "score"

    def __post_init__(self) -> None:
        if self.reward not in ("score", "solved"):
            raise ValueError(f"reward must be 'score' or 'solved', got {self.reward!r}")
        for argument in ("train_size", "eval_size"):
            value = getattr(self, argument)
            if not isinstance(value, int) or not 1 <= value < _EVAL_OFFSET:
                raise ValueError(
                    f"{argument} must be an integer in [1, 2**30), got {value!r}"
                )
        last = _EVAL_OFFSET - max(self.train_size, self.eval_size)
        if not isinstance(self.seed, int) or not 0 <= self.seed <= last:
            raise ValueError(
                f"seed must be an integer in [0, {last}], got {self.seed!r}"
            )
        if "seed" in self.options:
            raise ValueError(
                "options must not hold 'seed': it is an argument of ReasoningGym itself"
            )
        if "size" in self.options:
            raise ValueError(
                "options must not hold 'size': pass train_size and eval_size instead"
            )
        _require_known(self.task, self.options)
        self._dataset("eval")

    @property
    def name(self) -> str:
        """A short name for logs."""
        return f"reasoning-gym:{self.task}"

    def prepare(self) -> None:
        """Imports the library and loads the task's data.

        Raises:
            ModuleNotFoundError: if the extra `envs` is not installed.
        """
        self._dataset("eval")

    def tasks(self, split: Split) -> TaskSequence:
        """The problems of a split; "train" problems are generated on access.

        Args:
            split: "train" or "eval".

        Raises:
            ValueError: all problems of the task belong to the other split.
        """
        if split == "train":
            # An empty split raises here, before the run starts.
            self._training_task(0)
            return TaskSequence(self.train_size, self._training_task)
        places = _held_out(
            self.task, pickle.dumps(dict(self.options)), self.seed, self.eval_size
        )
        return TaskSequence(
            len(places), lambda i: _task(i, self._entry("eval", *places[i]))
        )

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Rewards the response by the library's score, usually in [0, 1].

        Args:
            task: a task of this environment.
            conversation: the messages so far; ends with the assistant's answer.

        Returns:
            The last step, with the metrics `score` and `scorer_raised`.

        Raises:
            TimeoutError: the scorer took too much processor time.
        """
        answer = after_thoughts(response(conversation)).strip()
        # Scorers read the configuration, never the seed: both splits score alike.
        dataset = self._dataset("eval")
        entry = task.data["entry"]
        # A composite scores an entry with the task that the entry comes from.
        scorer = entry["metadata"].get("source_dataset", self.task)
        shown = harmless(answer, scorer, entry)
        with processor_time(_SCORING_S, f"the scorer of {scorer}"):
            try:
                score = float(dataset.score_answer(shown or "", entry))
                raised = 0.0
            # These errors are not the answer's fault.
            except (ImportError, MemoryError):
                raise
            # Third-party scorers convert the model's text without checking it first, so
            # any exception is possible, and it means that the text is no answer.
            except Exception:
                score, raised = 0.0, 1.0
        metrics = {"score": score, "scorer_raised": raised}
        reward = score if self.reward == "score" else float(score >= 1.0)
        return Step(reward=reward, done=True, metrics=metrics)

    def demonstration(self, task: Task) -> str | None:
        """The library's answer; None for a task with many right answers."""
        return task.reference or None

    def _training_task(self, index: int) -> Task:
        for attempt in range(_ATTEMPTS):
            # Another index each time: some tasks depend on the index, not on the seed.
            entry = self._entry("train", attempt, (index + attempt) % self.train_size)
            if not _is_held_out(entry["question"]):
                return _task(index, entry)
        raise ValueError(
            f"reasoning-gym: of {_ATTEMPTS} problems of {self.task!r} all are held "
            "out, so that none is left to train on; choose options with more problems"
        )

    def _entry(self, split: Split, attempt: int, index: int) -> Any:
        return self._dataset(split, attempt)[index]

    def _dataset(self, split: Split, attempt: int = 0) -> Any:
        """The library's dataset of a split; each attempt has seeds of its own."""
        size = self.eval_size if split == "eval" else self.train_size
        begin = self.seed + (_EVAL_OFFSET if split == "eval" else 0)
        options = pickle.dumps(dict(self.options))
        return _dataset(self.task, options, begin + attempt * size, size)


def _task(index: int, entry: Any) -> Task:
    prompt = (Message("user", entry["question"]),)
    # The library's answer is None for tasks with many right answers.
    reference = "" if entry["answer"] is None else str(entry["answer"])
    return Task(index, prompt, reference, data={"entry": entry})


def _is_held_out(question: str) -> bool:
    return split_of(question, one_in=_HELD_OUT_ONE_IN) == "eval"


@functools.lru_cache(maxsize=16)
def _held_out(
    task: str, pickled_options: bytes, seed: int, size: int
) -> tuple[tuple[int, int], ...]:
    """The (attempt, index) pairs of the first `size` distinct held-out problems."""
    found: dict[str, tuple[int, int]] = {}
    seen, repeated = set[str](), 0
    begin = seed + _EVAL_OFFSET
    # Stops when `size` problems are found, or when only known problems come for long.
    for attempt, index in itertools.product(range(_ATTEMPTS), range(size)):
        dataset = _dataset(task, pickled_options, begin + attempt * size, size)
        question = dataset[index]["question"]
        repeated = repeated + 1 if question in seen else 0
        seen.add(question)
        if _is_held_out(question):
            found.setdefault(question, (attempt, index))
        if len(found) == size or repeated == max(size, _PATIENCE):
            break
    if not found:
        raise ValueError(
            f"reasoning-gym: none of {len(seen)} distinct problems of {task!r} is held "
            "out, so that none is left to evaluate on; choose options with more "
            "problems"
        )
    return tuple(found.values())


@functools.lru_cache(maxsize=32)
def _dataset(task: str, pickled_options: bytes, seed: int, size: int) -> Any:
    """A dataset of the library; cached, because some load word lists of megabytes."""
    options = pickle.loads(pickled_options)
    try:
        return _library().create_dataset(task, seed=seed, size=size, **options)
    # The library checks its configurations with assert.
    except (AssertionError, TypeError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"reasoning-gym rejects the options {options} and size {size} of {task!r}: "
            f"{reason}"
        ) from error


def _library() -> ModuleType:
    try:
        # Not at the top: the library takes most of a second to import.
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"ReasoningGym needs reasoning-gym, and there is no module {error.name!r}: "
            f"{install('envs')}",
            name=error.name,
        ) from error
    return reasoning_gym


def _require_known(task: str, options: Mapping[str, Any]) -> None:
    datasets = _library().factory.DATASETS
    if task not in datasets:
        close = difflib.get_close_matches(task, datasets, n=5, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "see its gallery"
        raise ValueError(
            f"reasoning-gym has no task {task!r} among its {len(datasets)}: {hint}"
        )
    configuration = datasets[task][1]
    known = {each.name for each in dataclasses.fields(configuration)} - {"seed", "size"}
    for option in options:
        if option not in known:
            raise ValueError(
                f"task {task!r} of reasoning-gym has no option {option!r}; it has "
                f"{', '.join(sorted(known))}"
            )
