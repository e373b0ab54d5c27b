"""Examples to learn from without sampling: demonstrations and preferences."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import grain

from jaxrl_post.data import chat, packing
from jaxrl_post.data.preferences import Preference
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Environment
from jaxrl_post.envs.env import Split
from jaxrl_post.train.config import ConfigError
from jaxrl_post.train.session import environment_texts
from jaxrl_post.types import TokenBatch

__all__ = ["Demonstrations", "Examples", "Pairs", "batches"]

logger = logging.getLogger(__name__)


@runtime_checkable
class Examples(Protocol):
    """A data set of token sequences; those of one example share a packed row."""

    def size(self, split: Split) -> int:
        """Number of examples."""
        ...

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """The sequences of an example."""
        ...

    def texts(self) -> list[str]:
        """Texts from which a preset's tokenizer is learned."""
        ...


@dataclass(frozen=True)
class Demonstrations:
    """Prompts of an environment with their demonstrations.

    Attributes:
        environment: gives both.
        max_tokens: longest prompt plus demonstration.
    """

    environment: Environment
    max_tokens: int

    def size(self, split: Split) -> int:
        """Number of tasks."""
        return len(self.environment.tasks(split))

    def texts(self) -> list[str]:
        """Of the first tasks."""
        return environment_texts(self.environment)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """One sequence: the prompt, and the demonstration to learn.

        Raises:
            ConfigError: a task without a demonstration, or one that is too long.
        """
        task = self.environment.tasks(split)[index]
        answer = self.environment.demonstration(task)
        if answer is None:
            raise ConfigError(
                f"--env: {self.environment.name} has no demonstration of task "
                f"{task.id}; supervised fine-tuning needs one for every task"
            )
        prompt = chat.render(tokenizer, task.messages)
        target = (*tokenizer.encode(answer), tokenizer.eos_id)
        if len(prompt) + len(target) > self.max_tokens:
            raise ConfigError(
                f"--max-tokens: task {task.id} of {self.environment.name} with its "
                f"demonstration has {len(prompt) + len(target)} tokens, more than "
                f"{self.max_tokens}; raise the option"
            )
        return (packing.Sequence.of(prompt, target),)


@dataclass(frozen=True)
class Pairs:
    """Preference pairs: a prompt with its chosen answer, then with its rejected one.

    Chosen answers have an advantage of 1, rejected ones of -1: what tells them apart
    in a packed row is their order, chosen first.

    Attributes:
        train: to learn from.
        eval: held out.
        only_chosen: leaves the rejected answers out, for supervised fine-tuning.
    """

    train: Sequence[Preference]
    eval: Sequence[Preference]
    only_chosen: bool = False

    def size(self, split: Split) -> int:
        """Number of pairs."""
        return len(self._of(split))

    def texts(self) -> list[str]:
        """Of the first pairs."""
        return [
            text
            for pair in self.train[:2000]
            for text in (
                *(message.content for message in pair.messages),
                pair.chosen,
                pair.rejected,
            )
        ]

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """Two sequences, or the chosen one alone."""
        pair = self._of(split)[index]
        prompt = chat.render(tokenizer, pair.messages)

        def sequence(answer: str, label: float) -> packing.Sequence:
            target = (*tokenizer.encode(answer), tokenizer.eos_id)
            return packing.Sequence.of(prompt, target, advantage=label)

        chosen = sequence(pair.chosen, 1.0)
        if self.only_chosen:
            return (chosen,)
        return chosen, sequence(pair.rejected, -1.0)

    def fitting(self, tokenizer: Tokenizer, max_tokens: int) -> "Pairs":
        """Leaves out the pairs with an answer that is too long, and says how many.

        Args:
            tokenizer: of the model.
            max_tokens: longest prompt plus answer.

        Raises:
            ConfigError: of a split nothing is left.
        """
        kept: dict[Split, list[Preference]] = {}
        for split in ("train", "eval"):
            every = self._of(split)
            fits = [
                max(len(s.tokens) for s in self.encode(tokenizer, split, index))
                <= max_tokens
                for index in range(len(every))
            ]
            kept[split] = [pair for pair, fit in zip(every, fits, strict=True) if fit]
            long = len(every) - len(kept[split])
            if not kept[split]:
                raise ConfigError(
                    f"--max-tokens: all {len(every)} {split} pairs have a prompt plus "
                    f"answer of more than {max_tokens} tokens; raise the option"
                )
            if long:
                logger.warning(
                    "%d of %d %s pairs left out: prompt plus answer of more than "
                    "--max-tokens %d",
                    *(long, len(every), split, max_tokens),
                )
        return Pairs(kept["train"], kept["eval"], self.only_chosen)

    def _of(self, split: Split) -> Sequence[Preference]:
        return self.train if split == "train" else self.eval


def batches(
    examples: Examples,
    tokenizer: Tokenizer,
    indices: grain.DatasetIterator,
    *,
    count: int,
    row_tokens: int,
    row_multiple: int,
) -> Iterator[TokenBatch]:
    """Packs training examples, for ever.

    Args:
        examples: the data set.
        tokenizer: of the model; its end-of-sequence id ends an answer.
        indices: iterator over training examples.
        count: examples of a batch.
        row_tokens: length of a row.
        row_multiple: the batch's rows are a multiple of this.

    Raises:
        ConfigError: as the data set's `encode`.
    """
    while True:
        chosen = [
            examples.encode(tokenizer, "train", int(next(indices)))
            for _ in range(count)
        ]
        yield packing.pack(chosen, row_tokens, row_multiple)
