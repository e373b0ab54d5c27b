"""Ragged sequences to rows of fixed length."""

from collections.abc import Sequence as Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_post.types import TokenBatch

__all__ = ["Sequence", "pack"]


@dataclass(frozen=True)
class Sequence:
    """One token sequence; arrays are 1-D, of equal length >= 1, aligned to the tokens.

    Attributes:
        tokens: int32 ids.
        loss_mask: bool, True where the policy produced the token.
        behavior_logprobs: float32, 0 where the mask is False.
        advantages: float32.
        versions: int32, -1 where the mask is False.
        truncated: whether its end was cut off; None where nobody asks.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    advantages: np.ndarray
    versions: np.ndarray
    truncated: bool | None = None

    def __post_init__(self) -> None:
        arrays = {
            name: value for name, value in vars(self).items() if name != "truncated"
        }
        sizes = {name: len(values) for name, values in arrays.items()}
        if len(set(sizes.values())) > 1 or not len(self.tokens):
            raise ValueError(
                f"Sequence: all arrays must have one entry a token, at least one; "
                f"got {sizes}"
            )

    @classmethod
    def of(
        cls,
        prompt: Collection[int],
        completion: Collection[int],
        *,
        behavior_logprobs: Collection[float] | None = None,
        advantage: float = 0.0,
        versions: Collection[int] | None = None,
    ) -> "Sequence":
        """Makes a prompt that is not trained on and a completion that is."""
        before, after = len(prompt), len(completion)

        def aligned(values: Any, fill: int, dtype: type) -> np.ndarray:
            return np.concatenate(
                [np.full(before, fill, dtype), np.asarray(values, dtype)]
            )

        return cls(
            tokens=np.asarray([*prompt, *completion], np.int32),
            loss_mask=aligned(np.ones(after), 0, np.bool_),
            behavior_logprobs=aligned(
                np.zeros(after) if behavior_logprobs is None else behavior_logprobs,
                0,
                np.float32,
            ),
            advantages=aligned(np.full(after, advantage), 0, np.float32),
            versions=aligned(
                np.zeros(after) if versions is None else versions, -1, np.int32
            ),
        )


def pack(
    sequences: Collection[Sequence | tuple[Sequence, ...]],
    length: int,
    row_multiple: int,
) -> TokenBatch:
    """Lays sequences side by side into as few rows as first-fit-decreasing finds.

    Deterministic: what is equally long keeps its order.

    Args:
        sequences: each of 1 .. length tokens; those of a tuple lie side by side in one
            row, in their order, and have 1 .. length tokens together.
        length: tokens of a row.
        row_multiple: empty rows are added up to a multiple of this.

    Returns:
        NumPy arrays [rows, length], at least `row_multiple` rows.

    Raises:
        ValueError: a sequence, or a tuple of some, is longer than a row.

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
    if any(each.truncated is not None for unit in units for each in unit):
        batch = batch.replace(truncated=np.zeros((height, length), np.bool_))  # type: ignore[attr-defined]
    for row, members in enumerate(rows):
        _fill(batch, row, [sequence for index in members for sequence in units[index]])
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
        batch.tokens[row, span] = sequence.tokens
        batch.positions[row, span] = np.arange(size)
        batch.segment_ids[row, span] = number
        batch.loss_mask[row, span] = sequence.loss_mask
        # The first token of a segment has no predecessor to be predicted from.
        batch.loss_mask[row, start] = False
        batch.advantages[row, span] = sequence.advantages
        batch.behavior_logprobs[row, span] = sequence.behavior_logprobs
        batch.versions[row, span] = sequence.versions
        if batch.truncated is not None:
            batch.truncated[row, start + size - 1] = bool(sequence.truncated)
        start += size
