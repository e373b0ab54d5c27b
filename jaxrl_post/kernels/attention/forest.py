"""Checks on the host that packed rows are forests."""

import numpy as np

from jaxrl_post.types import HostOrDevice, Int

__all__ = ["require_forest"]


def require_forest(ends: Int[HostOrDevice, "rows length"]) -> None:
    """Raises ValueError unless every row is a forest in depth-first order.

    The tokens from index j to `ends[j]` follow the token at j. The ranges of two tokens
    are nested or disjoint; a padding token's is empty.

    Args:
        ends: int32 [rows, length], as `TokenBatch.ends`. It takes O(length log length)
            time for a row.

    >>> require_forest(np.array([[5, 5, 3, 5, 5, 0]]))
    >>> require_forest(np.array([[3, 4, 3, 4]]))
    Traceback (most recent call last):
    ValueError: ends: row 0 is no forest in depth-first order: the tokens that follow
    index 0 end at 3, and the range of one of them ends later; see TokenBatch.ends
    """
    rows = np.asarray(ends)
    length = rows.shape[1]
    index = np.arange(length)
    wrong = (rows > length) | (rows < 0) | ((rows > 0) & (rows <= index))
    if wrong.any():
        row, at = (int(each) for each in np.argwhere(wrong)[0])
        raise ValueError(
            f"ends: row {row}, index {at} must be 0, for padding, or in [{at + 1}, "
            f"{length}], got {rows[row, at]}; see TokenBatch.ends"
        )
    for row, each in enumerate(rows):
        until = np.maximum(each, index + 1)
        crossed = np.flatnonzero(_latest(each, until) > until)
        if len(crossed):
            at = int(crossed[0])
            raise ValueError(
                f"ends: row {row} is no forest in depth-first order: the tokens that "
                f"follow index {at} end at {each[at]}, and the range of one of them "
                "ends later; see TokenBatch.ends"
            )


def _latest(ends: np.ndarray, until: np.ndarray) -> np.ndarray:
    """For each index i the largest entry of ends[i:until[i]]."""
    # The largest entries of 1, 2, 4, ... from each index on; two of them cover a span.
    spans = [ends]
    while 2 ** len(spans) <= len(ends):
        half = 2 ** (len(spans) - 1)
        shifted = np.pad(spans[-1][half:], (0, half))
        spans.append(np.maximum(spans[-1], shifted))
    index = np.arange(len(ends))
    level = np.frexp(until - index)[1] - 1
    largest = np.stack(spans)
    return np.maximum(largest[level, index], largest[level, until - 2**level])
