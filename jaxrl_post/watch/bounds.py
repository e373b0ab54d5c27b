"""Bounds on the values of a metric: absolute, or against the run's own past."""

import math
import re
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "BOUNDS",
    "FIRST",
    "READ",
    "Condition",
    "RuleError",
    "Series",
    "check",
    "pattern_of",
    "worst",
]

# Kinds of bounds, and how a crossed one is told.
BOUNDS = {
    "above": "above {bound}",
    "below": "below {bound}",
    "equals": "equal to {bound}",
    "times": "above {bound} times the median of the {past} values before, {centre}",
    "share": "below {bound} of the median of the {past} values before, {centre}",
    "rises": "{bound} robust standard deviations or more above the median of the "
    "{past} values before, {centre}",
    "falls": "{bound} robust standard deviations or more below the median of the "
    "{past} values before, {centre}",
    "gains": "by {bound} or more above the mean of the first {known} values, {first}",
    "loses": "by {bound} or more below the mean of the first {known} values, {first}",
    "climbs": "rising: the later half of {past} values has a mean {bound} standard "
    "errors or more above the mean of the earlier half",
    "sinks": "falling: the later half of {past} values has a mean {bound} standard "
    "errors or more below the mean of the earlier half",
}
# Bounds that compare with earlier values, and those that compare two halves.
RELATIVE, TRENDS = ("times", "share", "rises", "falls"), ("climbs", "sinks")
# Bounds that compare with the beginning of the run.
FIRST = ("gains", "loses")
# For which the smallest of several values is the worst.
LOW = ("below", "share", "falls", "loses", "sinks")
# Keys that only some kinds of bounds read.
READ = {
    "least": (*RELATIVE, *TRENDS),
    "past": (*RELATIVE, *TRENDS),
    "known": (*RELATIVE, *FIRST),
}
# Most values that a bound looks back over, and the largest bound.
MOST, LARGEST = 100_000, 1e300
# A normal distribution's standard deviation in median absolute deviations.
ROBUST = 1.4826


class RuleError(ValueError):
    """A rule that cannot be used; the message names the file, the rule and the key."""


@dataclass(frozen=True)
class Condition:
    """A bound on a metric, or on something made of the metrics of a step.

    Attributes:
        metric: its name; `<word>` in it stands for any name there, `<one|other>` for
            these; the worst value counts. With `function` only a name for messages.
        kind: of the bound, a key of `BOUNDS`.
        bound: its value; for "above" and "below" also the name of an option, such as
            "mismatch.warn".
        per: metric by which the value is divided; "" for none.
        function: <module>:<function> of the metrics of a step that returns the value,
            or None where it has none; "" for `metric` itself.
        least: for the bounds against the past: smallest difference that counts, in the
            metric's unit, >= 0.
        past: number of values that make the median, or both halves of a trend.
        known: fewest values before the bound is used; for the bounds against the
            beginning, how many values it has.
        after: first values of the run that are left out.
    """

    metric: str
    kind: str
    bound: float | str
    per: str = ""
    function: str = ""
    least: float = 0.0
    past: int = 50
    known: int = 10
    after: int = 0


def check(condition: Condition, where: str) -> None:
    """Refuses bounds that make no sense.

    Args:
        condition: of a rule.
        where: file and rule, for the message.

    Raises:
        RuleError: names the key.
    """
    bound, kind = condition.bound, condition.kind
    if isinstance(bound, str):
        if kind not in ("above", "below"):
            raise RuleError(f"{where}: {kind} must be a number; got {bound!r}")
    elif isinstance(bound, bool) or not isinstance(bound, int | float):
        raise RuleError(f"{where}: {kind} must be a number; got {bound!r}")
    elif abs(bound) > LARGEST:
        raise RuleError(f"{where}: {kind} must be at most {LARGEST:g} in size")
    elif not math.isfinite(bound):
        raise RuleError(f"{where}: {kind} must be finite; got {bound}")
    elif kind == "times" and bound <= 1:
        raise RuleError(f"{where}: times must be greater than 1; got {bound:g}")
    elif kind == "share" and not 0 < bound < 1:
        raise RuleError(f"{where}: share must be in (0, 1); got {bound:g}")
    elif kind in ("rises", "falls", *FIRST, *TRENDS) and bound <= 0:
        raise RuleError(f"{where}: {kind} must be greater than 0; got {bound:g}")
    for key, low in (("past", 1), ("known", 1), ("after", 0), ("least", 0)):
        if (value := getattr(condition, key)) < low:
            raise RuleError(f"{where}: {key} must be at least {low}; got {value:g}")
    for key in ("past", "known", "after"):
        if getattr(condition, key) > MOST:
            raise RuleError(f"{where}: {key} must be at most {MOST:,}")
    if kind in RELATIVE and condition.known > condition.past:
        raise RuleError(
            f"{where}: known must be at most past, {condition.past}, or the bound is "
            f"never used; got {condition.known}"
        )
    if "<" in condition.per:
        raise RuleError(f"{where}: per must name one metric; got {condition.per!r}")
    if re.fullmatch(r"(?:[^<>]|<[\w|]+>)+", condition.metric) is None:
        raise RuleError(
            f"{where}: metric may have <word> or <one|other> in its name; got "
            f"{condition.metric!r}"
        )
    if kind in TRENDS and condition.past < 4:
        raise RuleError(f"{where}: past must be at least 4; got {condition.past}")


@dataclass
class Series:
    """The past values of a condition in a run.

    >>> series = Series(Condition("a", "times", 2.0, known=3))
    >>> [series.crossed(value) for value in (1.0, 1.0, 1.2, 1.9, 2.5)]
    [False, False, False, False, True]
    """

    condition: Condition
    _count: int = field(default=0, init=False)
    _past: deque[float] = field(init=False)
    # The first `known` values, for the bounds that compare with them.
    _first: list[float] = field(default_factory=list, init=False)
    # The latest values that crossed the bound, which are no part of the past yet.
    _crossing: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._past = deque(maxlen=self.condition.past)
        self._crossing = deque(maxlen=self.condition.past)

    def crossed(self, value: float) -> bool:
        """Adds the value of a step, and says whether it crosses the bound.

        A value that crosses a bound against the past is kept apart from it, so that a
        fault does not become the measure. After `past` of them in a row it does.
        """
        condition = self.condition
        self._count += 1
        if self._count <= condition.after or not math.isfinite(value):
            return False
        if condition.kind in TRENDS:
            self._past.append(value)
            return self._moves()
        if condition.kind in FIRST:
            return self._apart(value)
        crossed = self._crosses(value)
        if condition.kind in RELATIVE:
            if crossed:
                self._crossing.append(value)
                if len(self._crossing) == condition.past:
                    self._past, self._crossing = (
                        self._crossing,
                        deque(maxlen=condition.past),
                    )
            else:
                self._crossing.clear()
                self._past.append(value)
        return crossed

    def _apart(self, value: float) -> bool:
        """Whether the value lies apart from the first ones."""
        condition = self.condition
        assert not isinstance(condition.bound, str)
        if len(self._first) < condition.known:
            self._first.append(value)
            return False
        apart = value - statistics.fmean(self._first)
        apart = apart if condition.kind == "gains" else -apart
        return apart >= condition.bound

    def told(self) -> str:
        """The bound in words."""
        first = f"{statistics.fmean(self._first):.4g}" if self._first else "none"
        centre = f"{statistics.median(self._past):.4g}" if self._past else "none"
        bound = self.condition.bound
        number = bound if isinstance(bound, str) else f"{bound:g}"
        text = BOUNDS[self.condition.kind]
        return text.format(
            bound=number,
            past=len(self._past),
            centre=centre,
            known=self.condition.known,
            first=first,
        )

    def _crosses(self, value: float) -> bool:
        condition, bound = self.condition, self.condition.bound
        assert not isinstance(bound, str)
        match condition.kind:
            case "above":
                return value > bound
            case "below":
                return value < bound
            case "equals":
                return value == bound
        if len(self._past) < condition.known:
            return False
        centre = statistics.median(self._past)
        apart = (
            value - centre if condition.kind in ("times", "rises") else centre - value
        )
        if apart <= condition.least:
            return False
        match condition.kind:
            case "times":
                # For negative values too: further above by so many times their size.
                return apart > (bound - 1) * abs(centre)
            case "share":
                return apart > (1 - bound) * abs(centre)
        spread = ROBUST * statistics.median(abs(each - centre) for each in self._past)
        return apart > bound * spread

    def _moves(self) -> bool:
        """Whether the later half of the values lies above or below the earlier one."""
        condition, values = self.condition, list(self._past)
        if len(values) < condition.past:
            return False
        assert not isinstance(condition.bound, str)
        half = len(values) // 2
        before, after = values[:half], values[-half:]
        apart = statistics.fmean(after) - statistics.fmean(before)
        apart = apart if condition.kind == "climbs" else -apart
        error = math.sqrt((_variance(before) + _variance(after)) / half)
        return apart > max(condition.least, condition.bound * error)


def _variance(values: Sequence[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0


def pattern_of(metric: str) -> re.Pattern[str]:
    """The names for which a metric with a `<word>` stands, or with `<one|other>`.

    >>> bool(pattern_of("time/<rollout|train>").fullmatch("time/train"))
    True
    >>> bool(pattern_of("reward/<part>").fullmatch("reward/player/one"))
    False
    """
    parts = re.split(r"<([\w|]+)>", metric)
    # Every second part is a word.
    made = [
        (f"(?:{part})" if "|" in part else "[^/]+") if place % 2 else re.escape(part)
        for place, part in enumerate(parts)
    ]
    return re.compile("".join(made))


def worst(kind: str, values: Mapping[str, Any]) -> tuple[str, float]:
    """The name and value, of several, that is nearest to crossing a bound."""
    choose = min if kind in LOW else max
    return choose(values.items(), key=lambda each: each[1])
