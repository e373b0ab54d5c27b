"""The places of packed sequences, for tests that lay rows out or read them."""

from collections.abc import Iterator

import numpy as np

from jaxrl_post.types import TokenBatch

__all__ = ["ends_of", "sequences_in"]


def sequences_in(batch: TokenBatch) -> Iterator[tuple[int, np.ndarray]]:
    """The row and the places, in order, of every sequence of a packed batch.

    >>> from jaxrl_post.data.packing import Sequence, pack, trees
    >>> answers = [Sequence.of([5], [6, 7]), Sequence.of([5], [8])]
    >>> batch = pack(trees(answers), 6, 1)
    >>> [batch.tokens[row][places].tolist() for row, places in sequences_in(batch)]
    [[5, 6, 7], [5, 8]]
    """
    ends = np.asarray(batch.ends)
    index = np.arange(ends.shape[1])
    for row, last in zip(*np.nonzero(ends == index + 1), strict=True):
        yield int(row), np.flatnonzero((index <= last) & (last < ends[row]))


def ends_of(segments) -> np.ndarray:
    """`TokenBatch.ends` of rows whose sequences are numbered 1.. (0: padding).

    >>> ends_of([[1, 1, 2, 0]]).tolist()
    [[2, 2, 3, 0]]
    """
    segments = np.asarray(segments)
    ends = np.zeros(segments.shape, np.int32)
    for row, numbers in enumerate(segments):
        for number in set(numbers.tolist()) - {0}:
            places = np.flatnonzero(numbers == number)
            ends[row, places] = places[-1] + 1
    return ends
