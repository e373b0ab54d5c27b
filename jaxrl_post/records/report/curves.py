"""Metrics over a run of any length, in bounded memory."""

import itertools
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxrl_post.records.report.charts import Point, Run

__all__ = ["Curve", "Curves"]

# Blocks of neighbouring rows of a curve; as long as there are fewer rows, a block is a
# row, and a curve is exact. Both are even.
MAX_BLOCKS = 2**14
# Values that wait to be put into blocks.
MAX_WAITING = 2**13
MAX_MISSING = 1000
# Larger values overflow in a chart; such a run has diverged.
LARGEST = 1e100
NUMBERS = {float, int, bool, type(None)}
LATEST = 2**37  # The year 6325.


def _no_values() -> np.ndarray:
    return np.zeros(0)


def _no_numbers() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Curve:
    """A metric over the run.

    A value stands for a row, or in a long run for a block of neighbouring rows.

    Attributes:
        steps: int64 [n], ascending; the last step of each block.
        values: float64 [n], the means of the blocks.
        lows: float64 [n], the smallest values; `values` itself if blocks are rows.
        highs: float64 [n], the largest values.
        total: the sum of all values.
        missing: first and last steps of runs of values that are not finite, ascending.
    """

    steps: np.ndarray = field(default_factory=_no_numbers)
    values: np.ndarray = field(default_factory=_no_values)
    lows: np.ndarray = field(default_factory=_no_values)
    highs: np.ndarray = field(default_factory=_no_values)
    total: float = 0.0
    missing: tuple[Run, ...] = ()

    @cached_property
    def points(self) -> list[Point]:
        """Steps and values."""
        return [*zip(self.steps.tolist(), self.values.tolist(), strict=True)]

    @cached_property
    def extremes(self) -> list[Point]:
        """Steps and values, with two values for a block of several rows."""
        if self.lows is self.values:
            return self.points
        steps = np.repeat(self.steps, 2).tolist()
        both = np.stack([self.lows, self.highs], axis=1).reshape(-1).tolist()
        return [*zip(steps, both, strict=True)]

    def within(self, first: float, last: float) -> "Curve":
        """The part of the curve between two steps, both included.

        >>> curve = Curves.of({"a": [1.0, 2.0, 3.0]})["a"]
        >>> curve.within(2, 9).points
        [(2, 2.0), (3, 3.0)]
        """
        low, high = np.searchsorted(self.steps, [first, last + 0.5])
        exact = self.lows is self.values
        values = self.values[low:high]
        return Curve(
            self.steps[low:high],
            values,
            values if exact else self.lows[low:high],
            values if exact else self.highs[low:high],
            float(values.sum()),
            tuple(run for run in self.missing if run[0] <= last and run[1] >= first),
        )

    def median(self) -> float:
        """Median of the values; there must be one."""
        return float(np.median(self.values))


class Curves(Mapping[str, Curve]):
    """All metrics of a run by name; a row may be added at any time.

    Attributes:
        rows: number of rows.
        first, last: steps of the first and the last row.
        began, ended: Unix times in seconds of the same rows.

    >>> curves = Curves.of({"a": [1.0, None, 3.0]})
    >>> curves["a"].points, curves["a"].missing
    ([(1, 1.0), (3, 3.0)], ((2, 2),))
    """

    def __init__(self) -> None:
        self.rows, self.first, self.last = 0, 0, 0
        self.began, self.ended = 0.0, 0.0
        self._width = 1
        self._steps = _Blocks()
        self._blocks: dict[str, _Blocks] = {}
        self._missing: dict[str, list[list[int]]] = {}
        self._made: dict[str, Curve] = {}

    @classmethod
    def of(cls, metrics: Mapping[str, list[float | None]]) -> "Curves":
        """Curves whose steps are 1, 2, ..., for tests and examples."""
        curves = cls()
        for step, values in enumerate(zip(*metrics.values(), strict=True), start=1):
            row = dict(zip(metrics, values, strict=True))
            curves.add({"step": step, "time": float(step), "metrics": row})
        return curves

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row of metrics.jsonl, whose step is not before the last one.

        Raises:
            KeyError: it has no step, time or metrics; nothing is added.
            TypeError: they have other types.
        """
        step, when, metrics = row["step"], row["time"], row["metrics"]
        if type(step) is not int or abs(step) >= 2**53:
            raise TypeError(f"step must be an integer, got {step!r:.80}")
        if not isinstance(when, int | float) or not 0 <= when < LATEST:
            raise TypeError(f"time must be in Unix seconds, got {when!r:.80}")
        if not isinstance(metrics, dict):
            raise TypeError(f"metrics must be an object, got {metrics!r:.80}")
        if not {*map(type, metrics.values())} <= NUMBERS:
            name, value = next(e for e in metrics.items() if type(e[1]) not in NUMBERS)
            raise TypeError(f"{name} must be a number, got {value!r:.80}")
        if not self.rows:
            self.first, self.began = step, when
        self.last, self.ended = step, when
        if self.rows == self._width * MAX_BLOCKS:
            self._width *= 2
            for blocks in (self._steps, *self._blocks.values()):
                blocks.fold(self._width)
        number = self.rows
        self.rows += 1
        self._steps.add(number, step, self._width)
        for name, value in metrics.items():
            if value is None or value != value:  # It is NaN.
                self._miss(name, step)
                continue
            blocks = self._blocks.get(name)
            if blocks is None:
                blocks = self._blocks[name] = _Blocks()
            if not -LARGEST < value < LARGEST:
                value = max(-LARGEST, min(LARGEST, value))
            blocks.add(number, value, self._width)
        if self._made:
            self._made = {}

    def _miss(self, name: str, step: int) -> None:
        runs = self._missing.setdefault(name, [])
        if runs and step <= runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
        if len(runs) > 2 * MAX_MISSING:  # Neighbours cannot be told apart in a chart.
            pairs = itertools.batched(runs, 2)
            self._missing[name] = [[pair[0][0], pair[-1][1]] for pair in pairs]

    def __getitem__(self, name: str) -> Curve:
        if name not in self._made:
            self._made[name] = self._curve(name)
        return self._made[name]

    def _curve(self, name: str) -> Curve:
        missing = tuple((first, last) for first, last in self._missing.get(name, ()))
        blocks = self._blocks.get(name)
        if blocks is None:
            if not missing:
                raise KeyError(name)
            return Curve(missing=missing)
        steps, found = (each.fold(self._width) for each in (self._steps, blocks))
        places = np.searchsorted(steps.ids, found.ids)
        means = found.sums / found.counts
        exact = self._width == 1
        return Curve(
            steps.highs[places].astype(np.int64),
            means,
            means if exact else found.lows,
            means if exact else found.highs,
            float(found.sums.sum()),
            missing,
        )

    def __iter__(self) -> Iterator[str]:
        return iter({**self._blocks, **self._missing})

    def __len__(self) -> int:
        return len({**self._blocks, **self._missing})


@dataclass
class _Blocks:
    """The values of a metric, by numbers of blocks: row // width.

    Attributes:
        ids: int64, ascending.
        sums, lows, highs: float64.
        counts: int64, values in each block.
    """

    ids: np.ndarray = field(default_factory=_no_numbers)
    sums: np.ndarray = field(default_factory=_no_values)
    lows: np.ndarray = field(default_factory=_no_values)
    highs: np.ndarray = field(default_factory=_no_values)
    counts: np.ndarray = field(default_factory=_no_numbers)
    width: int = 1
    waiting_rows: array = field(default_factory=lambda: array("q"))
    waiting: array = field(default_factory=lambda: array("d"))

    def add(self, row: int, value: float, width: int) -> None:
        self.waiting_rows.append(row)
        self.waiting.append(value)
        if len(self.waiting) >= MAX_WAITING:
            self.fold(width)

    def fold(self, width: int) -> "_Blocks":
        """Puts what waits into blocks, and joins blocks that are too small."""
        if not self.waiting and width == self.width:
            return self
        values = np.array(self.waiting)
        ids = [self.ids // (width // self.width), np.array(self.waiting_rows) // width]
        self.width = width
        ids = np.concatenate(ids).astype(np.int64)
        # A step may have several rows only where a file was changed by hand.
        starts = np.flatnonzero(np.diff(ids, prepend=-1))
        for name, join, new in (
            ("sums", np.add, values),
            ("lows", np.minimum, values),
            ("highs", np.maximum, values),
            ("counts", np.add, np.ones(len(values), np.int64)),
        ):
            both = np.concatenate([getattr(self, name), new])
            joined = join.reduceat(both, starts) if len(starts) else both
            setattr(self, name, joined)
        self.ids = ids[starts]
        self.waiting_rows, self.waiting = array("q"), array("d")
        return self
