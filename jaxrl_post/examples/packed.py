"""Data sets for training without sampling: preferences, judged answers, steps."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import grain
import numpy as np

from jaxrl_post.config.data import OnUnwritten
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data import learned, packing
from jaxrl_post.data.chat import Messages
from jaxrl_post.data.learned import unwritten
from jaxrl_post.data.lengths import Lengths, written
from jaxrl_post.data.preferences import JudgedAnswer, Preference
from jaxrl_post.data.steps import Solution, judged_tokens
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.data.unpaired import answers_to_others
from jaxrl_post.envs.env import Message, Split
from jaxrl_post.examples.rendered import Rendered
from jaxrl_post.examples.tasks import SPLITS, dropped, left_out
from jaxrl_post.examples.texts import shortened
from jaxrl_post.pictures import PictureError
from jaxrl_post.types import TokenBatch

__all__ = [
    "Examples",
    "JudgedExamples",
    "Mismatched",
    "Pairs",
    "Solutions",
    "batches",
    "fitting",
    "packed",
]

# Number of examples whose texts train a preset's tokenizer.
TEXTS = 2000


@runtime_checkable
class Examples(Protocol):
    """A data set of token sequences.

    The sequences of an example that are compared with each other, as their labels say,
    stay side by side in a packed row.
    """

    def size(self, split: Split) -> int:
        """Number of examples."""
        ...

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The text of each sequence of an example, to bound its number of tokens."""
        ...

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """The sequences of an example."""
        ...

    def texts(self) -> list[str]:
        """Texts to train a preset's tokenizer."""
        ...

    def contents(self, split: Split, index: int) -> Iterable[str]:
        """The texts of an example's turns, as the data has them."""
        ...


@runtime_checkable
class Checked(Examples, Protocol):
    """Examples whose parts a chat template may leave out."""

    def unwritten(
        self, tokenizer: Tokenizer, split: Split, index: int, texts: Sequence[str]
    ) -> tuple[str, ...]:
        """Lists what the template leaves out of an example; `written` are its texts."""
        ...

    def messages(self, split: Split, index: int) -> Messages:
        """The messages of an example that may show pictures."""
        ...


@dataclass(frozen=True)
class Splits[Item: Preference | JudgedAnswer | Solution](Checked):
    """Training and held-out items, one example each.

    Attributes:
        train: training items.
        eval: held-out items.
        on_unwritten: what to do about items if the chat template leaves out a part of
            them, as for `examples.tasks.dropped`.
    """

    train: Sequence[Item]
    eval: Sequence[Item]
    on_unwritten: OnUnwritten = field(default="fail", kw_only=True)

    noun: ClassVar[str]

    def items(self, split: Split) -> Sequence[Item]:
        """The items of a split."""
        return self.train if split == "train" else self.eval

    def size(self, split: Split) -> int:
        """Number of items."""
        return len(self.items(split))

    def texts(self) -> list[str]:
        """Texts of the first training items, to train a preset's tokenizer."""
        return shortened(
            text for item in self.train[:TEXTS] for text in self.texts_of(item)
        )

    def contents(self, split: Split, index: int) -> Iterable[str]:
        """The texts of an item."""
        return self.texts_of(self.items(split)[index])

    def messages(self, split: Split, index: int) -> Messages:
        """The prompt of an item."""
        return self.items(split)[index].messages

    @abstractmethod
    def said_of(self, item: Item) -> Iterable[str]:
        """The texts of the assistant in an item."""

    def texts_of(self, item: Item) -> Iterable[str]:
        """The texts of the prompt and of what the assistant said."""
        return (*(message.content for message in item.messages), *self.said_of(item))

    def unwritten(
        self, tokenizer: Tokenizer, split: Split, index: int, texts: Sequence[str]
    ) -> tuple[str, ...]:
        """Lists what the chat template leaves out of the prompt and the answers."""
        item = self.items(split)[index]
        missing: dict[str, None] = {}
        for answer, text in zip(self.said_of(item), texts, strict=True):
            messages = [*item.messages, Message("assistant", answer)]
            found = unwritten(tokenizer, messages, learned="last", texts=[text])
            missing |= dict.fromkeys(found)
        return tuple(missing)

    def fitting[Same: "Splits[Any]"](
        self: Same, tokenizer: Tokenizer, max_tokens: int
    ) -> Same:
        """Drops items with a prompt plus answer that is too long; logs their number.

        Args:
            tokenizer: the model's tokenizer.
            max_tokens: maximum tokens of prompt plus answer.

        Raises:
            ConfigError: a split would be empty.
        """
        train, held_out = (
            [
                self.items(split)[index]
                for index in fitting(
                    self, split, tokenizer, max_tokens, self.noun, self.on_unwritten
                )
            ]
            for split in SPLITS
        )
        return replace(self, train=train, eval=held_out)


@dataclass(frozen=True)
class Pairs(Splits[Preference]):
    """Preference pairs: a prompt with its chosen answer, then with its rejected one.

    The rejected answer comes right after the chosen one, and the labels, 1 and -1, tell
    them apart.

    Attributes:
        margin: factor; times the difference of a pair's scores, it gives the margin.
    """

    noun: ClassVar[str] = "pairs"

    margin: float = 0.0

    def said_of(self, item: Preference) -> Iterable[str]:
        """Both answers."""
        return (item.chosen, item.rejected)

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The texts of both sequences."""
        pair = self.items(split)[index]
        answers = pair.chosen, pair.rejected
        return tuple(written(tokenizer, pair.messages, each) for each in answers)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """Two sequences, chosen and rejected."""
        pair = self.items(split)[index]
        chosen, rejected = (
            _labelled(*learned.answered(tokenizer, pair.messages, answer), label)
            for answer, label in ((pair.chosen, 1.0), (pair.rejected, -1.0))
        )
        if self.margin:
            margin = self.margin * (pair.margin or 0.0)
            chosen = replace(chosen, margins=_everywhere(margin, chosen))
        return chosen, rejected

    def imitated(self) -> "JudgedExamples":
        """The chosen answers, for supervised fine-tuning."""
        train, held_out = (
            [
                JudgedAnswer(p.messages, p.chosen, True, p.group)
                for p in self.items(split)
            ]
            for split in SPLITS
        )
        return JudgedExamples(train, held_out)


@dataclass(frozen=True)
class JudgedExamples(Splits[JudgedAnswer]):
    """Judged answers, with the labels 1 for desirable answers and -1 for others."""

    noun: ClassVar[str] = "answers"

    def said_of(self, item: JudgedAnswer) -> Iterable[str]:
        """The answer."""
        return (item.answer,)

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The text of the prompt and the answer."""
        each = self.items(split)[index]
        return (written(tokenizer, each.messages, each.answer),)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """One sequence: the prompt and the answer."""
        each = self.items(split)[index]
        prompt, target = learned.answered(tokenizer, each.messages, each.answer)
        return (_labelled(prompt, target, 1.0 if each.desirable else -1.0),)

    def imitated(self) -> "JudgedExamples":
        """The desirable answers, for supervised fine-tuning."""
        train, held_out = (
            [each for each in self.items(split) if each.desirable] for split in SPLITS
        )
        return JudgedExamples(train, held_out)

    def mismatched(self, max_tokens: int) -> "Mismatched":
        """The same prompts, each with an answer to another prompt.

        Args:
            max_tokens: maximum tokens of prompt plus answer; longer answers are cut.

        Raises:
            ConfigError: a prompt has more than half of a split's answers.
        """
        try:
            answers = [answers_to_others(self.items(split)) for split in SPLITS]
        except ValueError as error:
            raise ConfigError(
                f"--data.path: {error}; give answers to more prompts, or another "
                "--data.eval-share"
            ) from error
        return Mismatched(self, dict(zip(SPLITS, answers, strict=True)), max_tokens)


@dataclass(frozen=True)
class Mismatched:
    """The prompts of judged answers, each with an answer to another prompt.

    Attributes:
        judgements: the judged answers, whose prompts are used.
        answers: the answers of each split, in the order of its prompts.
        max_tokens: maximum tokens of prompt plus answer; longer answers are cut.
    """

    judgements: JudgedExamples
    answers: Mapping[Split, Sequence[str]]
    max_tokens: int

    def size(self, split: Split) -> int:
        """Number of answers."""
        return self.judgements.size(split)

    def texts(self) -> list[str]:
        """The texts of the judged answers."""
        return self.judgements.texts()

    def contents(self, split: Split, index: int) -> Iterable[str]:
        """The texts of the prompt, and the other answer."""
        prompt = self.judgements.items(split)[index].messages
        return (*(message.content for message in prompt), self.answers[split][index])

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The text of the prompt and the uncut other answer."""
        messages = self.judgements.items(split)[index].messages
        return (written(tokenizer, messages, self.answers[split][index]),)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """One sequence: the prompt and the other answer, cut to `max_tokens`."""
        messages = self.judgements.items(split)[index].messages
        answer = self.answers[split][index]
        prompt, target = learned.answered(tokenizer, messages, answer)
        return (packing.Sequence.of(prompt, target[: self.max_tokens - len(prompt)]),)


@dataclass(frozen=True)
class Solutions(Splits[Solution]):
    """Solutions in steps; each step has its label at its last token.

    Attributes:
        separator: text after each step; the step is judged at its last token.
    """

    noun: ClassVar[str] = "solutions"

    separator: str

    def texts_of(self, item: Solution) -> Iterable[str]:
        """The texts of the prompt and the steps."""
        prompt = (message.content for message in item.messages)
        return (*prompt, *(step + self.separator for step in item.steps))

    def said_of(self, item: Solution) -> Iterable[str]:
        """The steps, each with its separator, as one text."""
        return ("".join(step + self.separator for step in item.steps),)

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The text of the prompt and the steps, each with its separator."""
        each = self.items(split)[index]
        (steps,) = self.said_of(each)
        return (written(tokenizer, each.messages) + steps,)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """One sequence: the prompt and the steps, each judged at its last token."""
        each = self.items(split)[index]
        sequence = judged_tokens(
            tokenizer, each.messages, each.steps, each.labels, self.separator
        )
        return (sequence,)


def packed(
    examples: Examples,
    tokenizer: Tokenizer,
    split: Split,
    indices: Iterable[int],
    *,
    microbatch_tokens: int,
    rows: int,
    trees: bool = True,
) -> TokenBatch:
    """Packs examples of a split into one batch.

    Args:
        examples: the data set.
        tokenizer: the model's tokenizer; a stop token of it ends an answer.
        split: "train" or "eval".
        indices: indices of the examples within the split.
        microbatch_tokens: most tokens of a microbatch, padding included.
        rows: rows of a microbatch.
        trees: whether examples that begin alike share that (`packing.trees`).

    Raises:
        ConfigError: as the data set's `encode`.
    """
    units: list[packing.Unit] = []
    for index in indices:
        found = examples.encode(tokenizer, split, index)
        # The turns of a chat are not compared, and may share more than their beginning.
        units += [found] if found[0].labels is not None else found
    units = packing.trees(units) if trees else units
    return packing.pack_microbatches(units, microbatch_tokens, rows)


def batches(
    examples: Examples,
    tokenizer: Tokenizer,
    indices: grain.DatasetIterator,
    *,
    count: int,
    microbatch_tokens: int,
    rows: int,
    trees: bool = True,
) -> Iterator[TokenBatch]:
    """Yields batches of training examples without end; raises as `packed` does.

    Args:
        examples: the data set.
        tokenizer: the model's tokenizer.
        indices: iterator over the indices of training examples.
        count: number of examples per batch.
        microbatch_tokens: most tokens of a microbatch, padding included.
        rows: rows of a microbatch.
        trees: whether examples that begin alike share that (`packing.trees`).
    """
    while True:
        yield packed(
            examples,
            tokenizer,
            "train",
            [int(next(indices)) for _ in range(count)],
            microbatch_tokens=microbatch_tokens,
            rows=rows,
            trees=trees,
        )


def _labelled(
    prompt: Sequence[int], target: Sequence[int], label: float
) -> packing.Sequence:
    made = packing.Sequence.of(prompt, target)
    return replace(made, labels=_everywhere(label, made))


def _everywhere(value: float, sequence: packing.Sequence) -> np.ndarray:
    return np.full(len(sequence.tokens), value, np.float32)


def fitting(
    examples: Checked,
    split: Split,
    tokenizer: Tokenizer,
    max_tokens: int,
    noun: str,
    on_unwritten: OnUnwritten,
    option: str = "--max-tokens",
) -> list[int]:
    """Indices of the examples of a split that are written whole, and not too long.

    All examples are measured, most of them by their characters, without tokenising. How
    many are left out is logged.

    Args:
        examples: the data set.
        split: "train" or "eval".
        tokenizer: the model's tokenizer.
        max_tokens: maximum tokens of each sequence of an example.
        noun: word for the examples, for messages.
        on_unwritten: as for `examples.tasks.dropped`.
        option: the option that sets `max_tokens`, for messages.

    Raises:
        ConfigError: no example is left, or as `examples.tasks.dropped`.
    """
    lengths, total = Lengths.of(tokenizer), examples.size(split)
    rendered = Rendered(tokenizer)
    missing: dict[int, tuple[str, ...]] = {}

    def fits(index: int) -> bool:
        rendered.look(examples.contents(split, index))
        try:
            texts = examples.written(tokenizer, split, index)
        except ConfigError:
            # Perhaps because of what the template leaves out, which can be counted.
            missing[index] = examples.unwritten(tokenizer, split, index, ())
            if missing[index] and on_unwritten != "allow":
                return False
            raise
        missing[index] = examples.unwritten(tokenizer, split, index, texts)
        shown = added(index, texts)
        known = [lengths.fits(text, max_tokens - shown) for text in texts]
        # A conversation of several sequences shows some pictures in each.
        if False in known and not (shown and len(known) > 1):
            return False
        return all(known) or all(
            len(sequence.tokens) <= max_tokens
            for sequence in examples.encode(tokenizer, split, index)
        )

    def added(index: int, texts: Sequence[str]) -> int:
        try:
            messages = examples.messages(split, index)
            return learned.added_tokens(tokenizer, messages, texts)
        except (PictureError, TokenizerError) as error:
            raise ConfigError(
                f"--data.path: number {index} of the {split} {noun}, from 0: {error}"
            ) from error

    kept = [index for index in range(total) if fits(index)]
    rendered.warn(f"{split} {noun}")
    out = dropped(missing, f"{split} {noun}", on_unwritten)
    kept, total = [index for index in kept if index not in out], total - len(out)
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
