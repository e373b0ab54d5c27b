"""Examples to learn from without sampling: preferences, judged answers, steps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import grain

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data import chat, packing
from jaxrl_post.data.lengths import Lengths, written
from jaxrl_post.data.preferences import Judged, Preference
from jaxrl_post.data.steps import Solution, judged_tokens
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.data.unpaired import answers_to_others
from jaxrl_post.envs.env import Split
from jaxrl_post.examples.tasks import SPLITS, left_out
from jaxrl_post.examples.texts import shortened
from jaxrl_post.types import TokenBatch

__all__ = [
    "Examples",
    "Judgements",
    "Mismatched",
    "Pairs",
    "Solutions",
    "batches",
    "fitting",
    "packed",
]

# Pairs, answers or solutions from whose texts a preset's tokenizer is learned.
TEXTS = 2000


@runtime_checkable
class Examples(Protocol):
    """A data set of token sequences; those of one example share a packed row."""

    def size(self, split: Split) -> int:
        """Number of examples."""
        ...

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The text of each sequence of an example, which bounds its tokens."""
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
class Pairs:
    """Preference pairs: a prompt with its chosen answer, then with its rejected one.

    What tells them apart in a packed row is their order, chosen first. The advantages
    of a chosen answer are the pair's margin, those of a rejected one 0.

    Attributes:
        train: to learn from.
        eval: held out.
        margin: times the difference of a pair's scores, its margin.
    """

    train: Sequence[Preference]
    eval: Sequence[Preference]
    margin: float = 0.0

    def size(self, split: Split) -> int:
        """Number of pairs."""
        return len(_of(self, split))

    def texts(self) -> list[str]:
        """Of the first pairs."""
        return shortened(
            text
            for pair in self.train[:TEXTS]
            for text in (
                *(message.content for message in pair.messages),
                pair.chosen,
                pair.rejected,
            )
        )

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The texts of both sequences."""
        pair = _of(self, split)[index]
        answers = pair.chosen, pair.rejected
        return tuple(written(tokenizer, pair.messages, each) for each in answers)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """Two sequences, chosen and rejected."""
        pair = _of(self, split)[index]
        margin = self.margin * (pair.margin or 0.0)

        def sequence(answer: str, advantage: float) -> packing.Sequence:
            prompt, target = chat.answered(tokenizer, pair.messages, answer)
            return packing.Sequence.of(prompt, target, advantage=advantage)

        return sequence(pair.chosen, margin), sequence(pair.rejected, 0.0)

    def fitting(self, tokenizer: Tokenizer, max_tokens: int) -> "Pairs":
        """Leaves out the pairs with an answer that is too long, and says how many.

        Args:
            tokenizer: of the model.
            max_tokens: longest prompt plus answer.

        Raises:
            ConfigError: of a split nothing is left.
        """
        train, held_out = (
            _kept(self, _of(self, split), split, tokenizer, max_tokens, "pairs")
            for split in SPLITS
        )
        return replace(self, train=train, eval=held_out)

    def imitated(self) -> "Judgements":
        """The chosen answers, for supervised fine-tuning."""
        train, held_out = (
            [Judged(p.messages, p.chosen, True, p.group) for p in _of(self, split)]
            for split in SPLITS
        )
        return Judgements(train, held_out)


@dataclass(frozen=True)
class Judgements:
    """Judged answers: the advantages of one are 1 if it is desirable, else -1.

    Attributes:
        train: to learn from.
        eval: held out.
    """

    train: Sequence[Judged]
    eval: Sequence[Judged]

    def size(self, split: Split) -> int:
        """Number of answers."""
        return len(_of(self, split))

    def texts(self) -> list[str]:
        """Of the first answers."""
        return shortened(
            text
            for each in self.train[:TEXTS]
            for text in (*(message.content for message in each.messages), each.answer)
        )

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The text of the prompt and the answer."""
        each = _of(self, split)[index]
        return (written(tokenizer, each.messages, each.answer),)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """One sequence: the prompt and the answer."""
        each = _of(self, split)[index]
        prompt, target = chat.answered(tokenizer, each.messages, each.answer)
        label = 1.0 if each.desirable else -1.0
        return (packing.Sequence.of(prompt, target, advantage=label),)

    def fitting(self, tokenizer: Tokenizer, max_tokens: int) -> "Judgements":
        """Leaves out the answers that are too long; as `Pairs.fitting`."""
        train, held_out = (
            _kept(self, _of(self, split), split, tokenizer, max_tokens, "answers")
            for split in SPLITS
        )
        return Judgements(train, held_out)

    def imitated(self) -> "Judgements":
        """The desirable answers, for supervised fine-tuning."""
        train, held_out = (
            [each for each in _of(self, split) if each.desirable] for split in SPLITS
        )
        return Judgements(train, held_out)

    def mismatched(self, max_tokens: int) -> "Mismatched":
        """The same prompts, each with an answer to another one.

        Args:
            max_tokens: of prompt plus answer; what is beyond is cut off.

        Raises:
            ConfigError: a prompt has more than half of a split's answers.
        """
        try:
            answers = [answers_to_others(_of(self, split)) for split in SPLITS]
        except ValueError as error:
            raise ConfigError(
                f"--data.path: {error}; give answers to more prompts, or another "
                "--data.eval-share"
            ) from error
        return Mismatched(self, dict(zip(SPLITS, answers, strict=True)), max_tokens)


@dataclass(frozen=True)
class Mismatched:
    """The prompts of judged answers, each with an answer to another one.

    Attributes:
        judgements: give the prompts.
        answers: of each split, in the order of its prompts.
        max_tokens: of prompt plus answer; what is beyond is cut off.
    """

    judgements: Judgements
    answers: Mapping[Split, Sequence[str]]
    max_tokens: int

    def size(self, split: Split) -> int:
        """Number of answers."""
        return self.judgements.size(split)

    def texts(self) -> list[str]:
        """As the judged answers."""
        return self.judgements.texts()

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The text of the prompt and the whole of the other answer."""
        messages = _of(self.judgements, split)[index].messages
        return (written(tokenizer, messages, self.answers[split][index]),)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """One sequence: the prompt and as much of the other answer as fits."""
        messages = _of(self.judgements, split)[index].messages
        answer = self.answers[split][index]
        prompt, target = chat.answered(tokenizer, messages, answer)
        return (packing.Sequence.of(prompt, target[: self.max_tokens - len(prompt)]),)


@dataclass(frozen=True)
class Solutions:
    """Solutions in steps: the advantage at the last token of each is its label.

    Attributes:
        train: to learn from.
        eval: held out.
        separator: after each step; at its last token the step is judged.
    """

    train: Sequence[Solution]
    eval: Sequence[Solution]
    separator: str

    def size(self, split: Split) -> int:
        """Number of solutions."""
        return len(_of(self, split))

    def texts(self) -> list[str]:
        """Of the first solutions."""
        return shortened(
            text
            for each in self.train[:TEXTS]
            for text in (
                *(message.content for message in each.messages),
                *(step + self.separator for step in each.steps),
            )
        )

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The text of the prompt and the steps, each with its separator."""
        each = _of(self, split)[index]
        steps = "".join(step + self.separator for step in each.steps)
        return (written(tokenizer, each.messages) + steps,)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """One sequence: the prompt and the steps, of which the ends are judged."""
        each = _of(self, split)[index]
        sequence = judged_tokens(
            tokenizer, each.messages, each.steps, each.labels, self.separator
        )
        return (sequence,)

    def fitting(self, tokenizer: Tokenizer, max_tokens: int) -> "Solutions":
        """Leaves out the solutions that are too long; as `Pairs.fitting`."""
        train, held_out = (
            _kept(self, _of(self, split), split, tokenizer, max_tokens, "solutions")
            for split in SPLITS
        )
        return replace(self, train=train, eval=held_out)


def packed(
    examples: Examples,
    tokenizer: Tokenizer,
    split: Split,
    indices: Iterable[int],
    *,
    row_tokens: int,
    row_multiple: int,
) -> TokenBatch:
    """Packs some of the examples.

    Args:
        examples: the data set.
        tokenizer: of the model; its end-of-sequence id ends an answer.
        split: of which.
        indices: which.
        row_tokens: length of a row.
        row_multiple: the batch's rows are a multiple of this.

    Raises:
        ConfigError: as the data set's `encode`.
    """
    chosen = [examples.encode(tokenizer, split, index) for index in indices]
    return packing.pack(chosen, row_tokens, row_multiple)


def batches(
    examples: Examples,
    tokenizer: Tokenizer,
    indices: grain.DatasetIterator,
    *,
    count: int,
    row_tokens: int,
    row_multiple: int,
) -> Iterator[TokenBatch]:
    """Packs training examples, for ever; arguments and errors as `packed`.

    Args:
        examples: the data set.
        tokenizer: of the model.
        indices: iterator over training examples.
        count: examples of a batch.
        row_tokens: length of a row.
        row_multiple: the batch's rows are a multiple of this.
    """
    while True:
        yield packed(
            examples,
            tokenizer,
            "train",
            [int(next(indices)) for _ in range(count)],
            row_tokens=row_tokens,
            row_multiple=row_multiple,
        )


@runtime_checkable
class _InTwo[Item](Protocol):
    """What is learned from, and what is held out."""

    @property
    def train(self) -> Sequence[Item]: ...

    @property
    def eval(self) -> Sequence[Item]: ...


def _of[Item](examples: _InTwo[Item], split: Split) -> Sequence[Item]:
    return examples.train if split == "train" else examples.eval


def _kept[Item](
    examples: "Pairs | Judgements | Solutions",
    items: Sequence[Item],
    split: Split,
    tokenizer: Tokenizer,
    max_tokens: int,
    noun: str,
) -> list[Item]:
    """Those of a split that are not too long."""
    kept = fitting(examples, split, tokenizer, max_tokens, noun)
    return [items[index] for index in kept]


def fitting(
    examples: Examples,
    split: Split,
    tokenizer: Tokenizer,
    max_tokens: int,
    noun: str,
    option: str = "--max-tokens",
) -> list[int]:
    """Indices of the examples of a split that are not too long.

    All are measured, most of them by their characters alone. What is left out is
    logged.

    Args:
        examples: the data set.
        split: of which.
        tokenizer: of the model.
        max_tokens: of each sequence of an example.
        noun: for examples, in messages.
        option: of `max_tokens`, for messages.

    Raises:
        ConfigError: nothing is left.
    """
    lengths, total = Lengths.of(tokenizer), examples.size(split)

    def fits(index: int) -> bool:
        texts = examples.written(tokenizer, split, index)
        known = [lengths.fits(text, max_tokens) for text in texts]
        if False in known:
            return False
        return None not in known or all(
            len(sequence.tokens) <= max_tokens
            for sequence in examples.encode(tokenizer, split, index)
        )

    kept = [index for index in range(total) if fits(index)]
    if total and not kept:
        raise ConfigError(
            f"{option}: all {total} {split} {noun} have a prompt plus answer of more "
            f"than {max_tokens} tokens; raise the option"
        )
    left_out(
        total - len(kept),
        total,
        f"{split} {noun}",
        f"prompt plus answer of more than {option} {max_tokens}",
    )
    return kept
