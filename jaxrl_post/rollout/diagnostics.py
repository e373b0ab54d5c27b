"""Distributions of a step's advantages and values, for plots."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_post.types import TokenBatch

__all__ = ["diagnostics"]

# Bars of the histogram, most places along the answers, and groups of values.
BINS, PLACES, VALUES = 40, 20, 10
# Shares of the advantages below and above the histogram, which its end bars count.
OUTSIDE = 0.001


def diagnostics(pieces: Sequence[TokenBatch]) -> dict[str, Any]:
    """Summarizes the trained tokens of a step.

    Args:
        pieces: packed minibatches on the host, with their final advantages and, if
            there is a critic, `values_before` and `returns`.

    Returns:
        JSON. `advantages`: `low`, `high` and the `counts` of a histogram. `places`, by
        how many tokens of the answer come before: the `width` of a place in tokens,
        and of each place `count`, `mean` and `std` of the advantages, and with a critic
        `value` and `return`; null where there is no token. With a critic `calibration`:
        tokens in the order of their values, in groups of equal size, each with the
        means `value` and `return`, which are equal if the critic is right on average.

    >>> batch = TokenBatch(
    ...     tokens=np.zeros((1, 4), np.int32),
    ...     positions=np.arange(4, dtype=np.int32)[None],
    ...     ends=np.full((1, 4), 4, np.int32),
    ...     loss_mask=np.array([[False, True, True, False]]),
    ...     advantages=np.array([[0.0, 1.0, -1.0, 0.0]], np.float32),
    ...     behavior_logprobs=np.zeros((1, 4), np.float32),
    ...     versions=np.zeros((1, 4), np.int32),
    ... )
    >>> found = diagnostics([batch])
    >>> found["advantages"]["low"], sum(found["advantages"]["counts"])
    (-1.0, 2)
    >>> found["places"]["mean"]
    [1.0, -1.0]
    """
    masks = [np.asarray(piece.loss_mask) for piece in pieces]

    def trained(name: str) -> np.ndarray | None:
        arrays = [getattr(piece, name) for piece in pieces]
        if any(each is None for each in arrays):
            return None
        pairs = zip(arrays, masks, strict=True)
        kept = [np.asarray(each)[mask] for each, mask in pairs]
        return np.concatenate(kept).astype(np.float64)

    advantages = trained("advantages")
    assert advantages is not None
    if not len(advantages):
        return {}
    shares = (OUTSIDE, 1 - OUTSIDE)
    low, high = map(float, np.quantile(advantages, shares, method="nearest"))
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts, _ = np.histogram(np.clip(advantages, low, high), BINS, (low, high))
    found: dict[str, Any] = {
        "advantages": {"low": low, "high": high, "counts": counts.tolist()}
    }
    offsets = np.concatenate(
        [_offsets(piece)[mask] for piece, mask in zip(pieces, masks, strict=True)]
    )
    width = int(offsets.max()) // PLACES + 1
    values, returns = trained("values_before"), trained("returns")
    places = offsets // width
    found["places"] = {"width": width, **_by(places, advantages)}
    if values is not None and returns is not None:
        for name, each in (("value", values), ("return", returns)):
            found["places"][name] = _by(places, each)["mean"]
        order = np.argsort(values, kind="stable")
        parts = [part for part in np.array_split(order, VALUES) if len(part)]
        found["calibration"] = {
            "value": [_rounded(values[part].mean()) for part in parts],
            "return": [_rounded(returns[part].mean()) for part in parts],
        }
    return found


def _by(places: np.ndarray, numbers: np.ndarray) -> dict[str, Any]:
    """Count, mean and standard deviation of the numbers at each place."""
    counts = np.bincount(places)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.bincount(places, numbers) / counts
        squares = np.bincount(places, (numbers - means[places]) ** 2) / counts
    return {
        "count": counts.tolist(),
        "mean": [*map(_rounded, means)],
        "std": [*map(_rounded, np.sqrt(squares))],
    }


def _rounded(number: float) -> float | None:
    return float(f"{number:.6g}") if np.isfinite(number) else None


def _offsets(piece: TokenBatch) -> np.ndarray:
    """int32 [rows, length]: tokens of the path since its first trained one."""
    found = np.zeros(piece.loss_mask.shape, np.int32)
    for row in range(len(found)):
        mask, positions = piece.loss_mask[row], piece.positions[row]
        # Nodes that are open, innermost last: their ends, and the position at which
        # training began on their paths, or None.
        path = list[tuple[int, int | None]]()
        for begin, end, until in _nodes(piece.ends[row]):
            while path and path[-1][0] <= begin:
                path.pop()
            first = path[-1][1] if path else None
            if first is None:
                own = np.flatnonzero(mask[begin:end])
                first = int(positions[begin + own[0]]) if len(own) else None
            path.append((until, first))
            if first is not None:
                found[row, begin:end] = positions[begin:end] - first
    return np.maximum(found, 0)


def _nodes(ends: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields begin, end and the number of `ends` of each run of equal ones."""
    starts = np.flatnonzero(np.diff(ends, prepend=-1))
    for begin, end in zip(starts, [*starts[1:], len(ends)], strict=True):
        if ends[begin]:
            yield int(begin), int(end), int(ends[begin])
