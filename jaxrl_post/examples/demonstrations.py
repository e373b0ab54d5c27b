"""Demonstrations of an environment's tasks, for supervised fine-tuning."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxrl_post.config.data import OnUnwritten
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data import chat, learned, packing
from jaxrl_post.data.learned import unwritten
from jaxrl_post.data.lengths import written
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Environment, Message, Task
from jaxrl_post.envs.env import Split
from jaxrl_post.examples.packed import fitting
from jaxrl_post.examples.tasks import SPLITS, TaskSets, check_tools
from jaxrl_post.examples.texts import environment_texts

__all__ = ["Demonstrations"]


@dataclass(frozen=True)
class Demonstrations:
    """Prompts of an environment with their demonstrations.

    Attributes:
        environment: provides tasks and demonstrations; its tasks are read once.
        max_tokens: maximum tokens of prompt plus demonstration.
        on_unwritten: what to do about demonstrations if the chat template leaves out a
            part of them, as for `examples.tasks.dropped`.
    """

    environment: Environment
    max_tokens: int
    on_unwritten: OnUnwritten = "fail"

    def size(self, split: Split) -> int:
        """Number of tasks."""
        return self._tasks.size(split)

    def texts(self) -> list[str]:
        """Texts of the first tasks, to train a preset's tokenizer."""
        return environment_texts(self._tasks)

    def fitting(
        self, tokenizer: Tokenizer, option: str = "--max-tokens"
    ) -> "Demonstrations":
        """Drops tasks whose prompt plus demonstration is too long.

        Args:
            tokenizer: the model's tokenizer.
            option: the option that sets `max_tokens`, for messages.

        Raises:
            ConfigError: a split would be empty, a task has no demonstration, or the
                chat template leaves something out.
        """
        tasks = self._tasks
        for split in SPLITS:
            noun = f"tasks of {self.environment.name}"
            check_tools(tasks.tasks(split), tokenizer, f"{split} {noun}")
            limit = self.max_tokens
            kept = fitting(
                self, split, tokenizer, limit, noun, self.on_unwritten, option
            )
            tasks = tasks.only(split, kept)
        return replace(self, environment=tasks)

    def contents(self, split: Split, index: int) -> Iterable[str]:
        """The texts of the prompt and its demonstration."""
        task = self._tasks.tasks(split)[index]
        answer = self._demonstration(task)
        said = answer.content if isinstance(answer, Message) else answer
        return (*(message.content for message in task.messages), said)

    def messages(self, split: Split, index: int) -> chat.Messages:
        """The prompt of a task."""
        return self._tasks.tasks(split)[index].messages

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The text of the prompt and its demonstration."""
        task = self._tasks.tasks(split)[index]
        options = chat.with_tools(task.tools)
        answer = self._demonstration(task)
        return (written(tokenizer, task.messages, answer, options=options),)

    def unwritten(
        self, tokenizer: Tokenizer, split: Split, index: int, texts: Sequence[str]
    ) -> tuple[str, ...]:
        """Lists what the template leaves out of a prompt and its demonstration."""
        task = self._tasks.tasks(split)[index]
        answer = self._demonstration(task)
        if isinstance(answer, str):
            answer = Message("assistant", answer)
        options = chat.with_tools(task.tools)
        messages = [*task.messages, answer]
        return unwritten(tokenizer, messages, options, learned="last", texts=texts)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """One sequence: the prompt, and the demonstration to learn.

        Raises:
            ConfigError: the task has no demonstration.
        """
        task = self._tasks.tasks(split)[index]
        prompt, target = learned.answered(
            tokenizer,
            task.messages,
            self._demonstration(task),
            chat.with_tools(task.tools),
        )
        return (packing.Sequence.of(prompt, target),)

    @functools.cached_property
    def _tasks(self) -> TaskSets:
        # Cached: `Environment.tasks` may read a file at each call.
        return TaskSets.of(self.environment)

    def _demonstration(self, task: Task) -> str | Message:
        answer = self.environment.demonstration(task)
        if answer is None:
            raise ConfigError(
                f"--env: {self.environment.name} has no demonstration of task "
                f"{task.id}; supervised steps need one of every task. "
                "--warm-start.steps 0 leaves a warm start out"
            )
        return answer
