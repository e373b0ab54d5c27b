"""Holds the metrics of every step against the rules of a run."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_post.specs import check_takes, imported, raised
from jaxrl_post.watch.bounds import Condition, RuleError, Series, pattern_of, worst
from jaxrl_post.watch.rule import ACTIONS, Rule

__all__ = ["NOT_FINITE", "RAISED", "Alarm", "Finding", "RunWatch"]

# Metrics that the watch adds to the metrics of a step: how many of them are not finite,
# and how many rules stand raised.
NOT_FINITE, RAISED = "watch/not_finite", "watch/alarms"

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """The values that crossed a bound.

    Attributes:
        metric: its name.
        values: one for each step.
        bound: the last one, in words.
    """

    metric: str
    values: tuple[float, ...]
    bound: str


@dataclass(frozen=True)
class Alarm:
    """A rule whose bounds were crossed in several steps in a row.

    Attributes:
        rule: the rule.
        first: the first of these steps.
        step: the last of them, after which the alarm was raised.
        findings: of each condition.
    """

    rule: Rule
    first: int
    step: int
    findings: tuple[Finding, ...]

    @property
    def evidence(self) -> str:
        """The values and the bounds that they crossed."""
        return "; ".join(
            f"{each.metric} {', '.join(f'{value:.4g}' for value in each.values)}, "
            f"{each.bound}"
            for each in self.findings
        )

    @property
    def where(self) -> str:
        """The steps in words."""
        if self.first == self.step:
            return f"step {self.step}"
        return f"steps {self.first} to {self.step}"

    def told(self) -> str:
        """The alarm and its runbook, in one line each."""
        rule = self.rule
        lines = [f"{rule.name}, {self.where}: {rule.means}", self.evidence]
        lines += [f"usual causes: {rule.causes}"] if rule.causes else []
        lines += [f"look at: {rule.look}"] if rule.look else []
        return "\n  ".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The content of a row of alarms.jsonl."""
        rule = self.rule
        return {
            "step": self.step,
            "first": self.first,
            "rule": rule.name,
            "action": rule.action,
            "means": rule.means,
            "causes": rule.causes,
            "look": rule.look,
            "evidence": self.evidence,
            "findings": [dataclasses.asdict(each) for each in self.findings],
        }


class RunWatch:
    """The rules of a run with the past values of their metrics.

    A raised rule raises no further alarm until its bounds were kept for as many steps
    as it takes to raise it.

    Args:
        rules: of the run.
        options: of the run, by their whole names; rules that ask for others are left
            out, and bounds may name one.

    Raises:
        RuleError: a function cannot be imported, or an option that is a bound is no
            number.

    >>> from jaxrl_post.watch.rule import Rule
    >>> high = Rule("high", (Condition("a", "above", 1.0),), "a is high.", steps=2)
    >>> watch = RunWatch([high])
    >>> alarms = [watch.look(step, {"a": 2.0}) for step in (1, 2, 3)]
    >>> [[alarm.where for alarm in found] for found in alarms]
    [[], ['steps 1 to 2'], []]
    """

    def __init__(
        self, rules: Sequence[Rule], options: Mapping[str, Any] | None = None
    ) -> None:
        self._rules = [
            _Followed(
                rule,
                [_Read(each, rule.name, options or {}) for each in rule.conditions],
            )
            for rule in rules
            if rule.applies(options or {})
        ]

    @property
    def rules(self) -> list[Rule]:
        """The rules that apply to the run."""
        return [each.rule for each in self._rules]

    @property
    def raised(self) -> list[str]:
        """The names of the rules whose bounds are crossed at present."""
        return [each.rule.name for each in self._rules if each.raised]

    @property
    def longest_past(self) -> int:
        """The most values that a condition looks back over."""
        reads = [read for each in self._rules for read in each.reads]
        return max((read.condition.past for read in reads), default=1)

    def never_measured(self) -> dict[str, list[str]]:
        """The metrics of each rule that no step has had so far."""
        found = {
            each.rule.name: [
                read.condition.metric for read in each.reads if not read.seen
            ]
            for each in self._rules
        }
        return {name: metrics for name, metrics in found.items() if metrics}

    def look(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Adds the metrics of a step; returns the alarms that they raise.

        Args:
            step: number of the step.
            metrics: by name; values that are not finite count for `NOT_FINITE` alone.
        """
        missing = sum(not math.isfinite(value) for value in metrics.values())
        finite = {k: v for k, v in metrics.items() if math.isfinite(v)}
        finite[NOT_FINITE] = float(missing)
        found = [each.look(step, finite) for each in self._rules]
        alarms = [alarm for alarm in found if alarm is not None]
        return sorted(alarms, key=lambda each: -ACTIONS.index(each.rule.action))


class _Measured(NamedTuple):
    """The value of a condition in a step."""

    metric: str
    value: float
    crossed: bool
    bound: str


class _Read:
    """A condition with its past values."""

    def __init__(self, condition: Condition, rule: str, options: Mapping[str, Any]):
        bound = condition.bound
        if isinstance(bound, str):
            value = options.get(bound)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise RuleError(
                    f"rule {rule}: {condition.kind} must be a number or the name of an "
                    f"option that is one, such as mismatch.warn; got {bound!r}, which "
                    f"is {value!r}"
                )
            condition = dataclasses.replace(condition, bound=float(value))
        self.condition, self.rule, self.seen = condition, rule, False
        self.broken = False
        self.function: Callable[[Mapping[str, float]], Any] | None = None
        if condition.function:
            try:
                self.function = imported(condition.function, "function")
                check_takes(self.function, ("metrics",), condition.function)
            except ValueError as error:
                raise RuleError(f"rule {rule}: function: {error}") from error
        self._pattern = None
        if "<" in condition.metric:
            self._pattern = pattern_of(condition.metric)
        # A series for each metric, if `metric` stands for several.
        self._series: dict[str, Series] = {}

    def value(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The values by name; none if the step does not have the metrics."""
        condition, pattern = self.condition, self._pattern
        if self.function is not None:
            values = self._called(metrics)
        elif pattern is not None:
            values = {k: v for k, v in metrics.items() if pattern.fullmatch(k)}
        else:
            values = {k: metrics[k] for k in (condition.metric,) if k in metrics}
        if condition.per:
            whole = metrics.get(condition.per)
            values = (
                {f"{k} / {condition.per}": v / whole for k, v in values.items()}
                if whole
                else {}
            )
        self.seen = self.seen or bool(values)
        return values

    def _called(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The value of the function; none after it has raised, which is told."""
        if self.broken or self.function is None:
            return {}
        try:
            found = self.function(MappingProxyType(dict(metrics)))
            return {} if found is None else {self.condition.metric: float(found)}
        # A user's function must not end the run.
        except Exception as error:
            self.broken = True
            _LOGGER.warning(
                "rule %s: its function %s raised %s; the rule is left out from here on",
                self.rule,
                self.condition.function,
                raised(error),
            )
            return {}

    def look(self, metrics: Mapping[str, float]) -> _Measured | None:
        """Adds the value of a step; None if the step does not have it."""
        values = self.value(metrics)
        if not values:
            return None
        crossing, told = {}, {}
        for name, value in values.items():
            series = self._series.setdefault(name, Series(self.condition))
            told[name] = series.told()
            if series.crossed(value):
                crossing[name] = value
        name, value = worst(self.condition.kind, crossing or values)
        return _Measured(name, value, bool(crossing), told[name])


@dataclass
class _Followed:
    """A rule with its conditions' values, and whether it is raised."""

    rule: Rule
    reads: list[_Read]
    raised: bool = field(default=False, init=False)
    _bad: list[tuple[int, list[_Measured]]] = field(default_factory=list, init=False)
    _kept: int = field(default=0, init=False)

    def look(self, step: int, metrics: Mapping[str, float]) -> Alarm | None:
        found = [each.look(metrics) for each in self.reads]
        measured = [each for each in found if each is not None]
        if len(measured) < len(self.reads):
            return None
        if not all(each.crossed for each in measured):
            self._bad.clear()
            self._kept += 1
            self.raised = self.raised and self._kept < self.rule.steps
            return None
        self._kept = 0
        if self.raised:
            return None
        self._bad.append((step, measured))
        if len(self._bad) < self.rule.steps:
            return None
        self.raised = True
        findings = []
        for place in range(len(self.reads)):
            names = {each[place].metric for _, each in self._bad}
            # A `<word>` may have stood for another name in each step.
            name = (
                names.pop() if len(names) == 1 else self.reads[place].condition.metric
            )
            values = tuple(each[place].value for _, each in self._bad)
            findings.append(Finding(name, values, measured[place].bound))
        alarm = Alarm(self.rule, self._bad[0][0], step, tuple(findings))
        self._bad.clear()
        return alarm
