"""Packs sequences of different lengths into rows of fixed length."""

from collections.abc import Sequence as Collection
from dataclasses import dataclass

import numpy as np

from jaxrl_post.tokens import Tokens
from jaxrl_post.types import TokenBatch

__all__ = ["Sequence", "pack"]

# Arrays of a sequence that may be missing, and their names in a batch.
_OPTIONAL = {"rewards": "token_rewards", "labels": "labels", "margins": "margins"}


@dataclass(frozen=True)
class Sequence:
    """One sequence to train on; arrays have one entry per token, at least one.

    Attributes:
        tokens: ids, and the sampler's log-probs and versions; `tokens.sampled` is the
            loss mask.
        advantages: float32 [tokens].
        rewards: float32 [tokens], for algorithms that compute advantages per token;
            None for other algorithms.
        labels: float32 [tokens], as `TokenBatch.labels`; None without labels.
        margins: float32 [tokens], as `TokenBatch.margins`; None without margins.
        truncated: whether the end was cut off; None if the algorithm does not need it.
    """

    tokens: Tokens
    advantages: np.ndarray
    rewards: np.ndarray | None = None
    labels: np.ndarray | None = None
    margins: np.ndarray | None = None
    truncated: bool | None = None

    def __post_init__(self) -> None:
        sizes = {"tokens": len(self.tokens), "advantages": len(self.advantages)}
        for name in _OPTIONAL:
            if (array := getattr(self, name)) is not None:
                sizes[name] = len(array)
        if len(set(sizes.values())) > 1 or not len(self.tokens):
            raise ValueError(
                f"Sequence: all arrays must have one entry a token, at least one; "
                f"got {sizes}"
            )

    @property
    def ids(self) -> np.ndarray:
        """int32 token ids."""
        return self.tokens.ids

    @property
    def loss_mask(self) -> np.ndarray:
        """bool, True for the tokens that are trained on."""
        return self.tokens.sampled

    @classmethod
    def of(
        cls,
        prompt: Collection[int],
        completion: Collection[int],
        *,
        behavior_logprobs: Collection[float] | None = None,
        advantage: float = 0.0,
    ) -> "Sequence":
        """Makes a sequence of a masked prompt and a completion to train on."""
        after = len(completion)
        logprobs = [0.0] * after if behavior_logprobs is None else behavior_logprobs
        answer = Tokens.generated(list(completion), list(logprobs), version=0)
        advantages = np.full(len(prompt) + after, advantage, np.float32)
        advantages[: len(prompt)] = 0.0
        return cls(Tokens.context(prompt) + answer, advantages)


def pack(
    sequences: Collection[Sequence | tuple[Sequence, ...]],
    length: int,
    row_multiple: int,
) -> TokenBatch:
    """Packs sequences into rows with the first-fit-decreasing heuristic.

    Deterministic: sequences of equal length keep their order.

    Args:
        sequences: each of 1 .. length tokens; the sequences of a tuple stay in one row,
            side by side in their order, and have 1 .. length tokens together.
        length: tokens per row.
        row_multiple: empty rows pad the number of rows to a multiple of this.

    Returns:
        NumPy arrays [rows, length], at least `row_multiple` rows.

    Raises:
        ValueError: a sequence, or a tuple of sequences, is longer than a row, or only
            some sequences have labels.

    >>> one = Sequence.of([5], [6, 7])
    >>> pack([one, one], length=8, row_multiple=1).segment_ids
    array([[1, 1, 1, 2, 2, 2, 0, 0]], dtype=int32)
    """
    units = [unit if isinstance(unit, tuple) else (unit,) for unit in sequences]
    sizes = [sum(len(sequence.tokens) for sequence in unit) for unit in units]
    order = sorted(range(len(units)), key=lambda i: -sizes[i])
    rows: list[list[int]] = []
    free: list[int] = []
    for index in order:
        size = sizes[index]
        if size > length:
            raise ValueError(
                f"pack: sequence {index} has {size} tokens, a row only {length}; raise "
                "the row length to at least prompt plus completion"
            )
        row = next((r for r, space in enumerate(free) if space >= size), None)
        if row is None:
            rows.append([])
            free.append(length)
            row = len(rows) - 1
        rows[row].append(index)
        free[row] -= size
    height = max(1, -(-len(rows) // row_multiple)) * row_multiple
    batch = _empty(height, length)
    members = [sequence for unit in units for sequence in unit]
    given: dict[str, np.ndarray] = {
        field: np.zeros((height, length), np.float32)
        for name, field in _OPTIONAL.items()
        if any(getattr(each, name) is not None for each in members)
    }
    if "labels" in given and any(each.labels is None for each in members):
        raise ValueError("pack: all sequences must have labels, or none of them")
    if any(each.truncated is not None for each in members):
        given["truncated"] = np.zeros((height, length), np.bool_)
    batch = batch.replace(**given)  # type: ignore[attr-defined]
    for row, chosen in enumerate(rows):
        _fill(batch, row, [sequence for index in chosen for sequence in units[index]])
    return batch


def _empty(rows: int, length: int) -> TokenBatch:
    integers = lambda: np.zeros((rows, length), np.int32)  # noqa: E731
    floats = lambda: np.zeros((rows, length), np.float32)  # noqa: E731
    return TokenBatch(
        tokens=integers(),
        positions=integers(),
        segment_ids=integers(),
        loss_mask=np.zeros((rows, length), np.bool_),
        advantages=floats(),
        behavior_logprobs=floats(),
        versions=integers() - 1,
    )


def _fill(batch: TokenBatch, row: int, members: list[Sequence]) -> None:
    start = 0
    for number, sequence in enumerate(members, 1):
        size = len(sequence.tokens)
        span = slice(start, start + size)
        batch.tokens[row, span] = sequence.ids
        batch.positions[row, span] = np.arange(size)
        batch.segment_ids[row, span] = number
        batch.loss_mask[row, span] = sequence.loss_mask
        # The first token of a segment has no predecessor to be predicted from.
        batch.loss_mask[row, start] = False
        batch.advantages[row, span] = sequence.advantages
        batch.behavior_logprobs[row, span] = sequence.tokens.logprobs
        batch.versions[row, span] = sequence.tokens.versions
        for name, field in _OPTIONAL.items():
            if (array := getattr(sequence, name)) is not None:
                getattr(batch, field)[row, span] = array
        if batch.truncated is not None:
            batch.truncated[row, start + size - 1] = bool(sequence.truncated)
        start += size
