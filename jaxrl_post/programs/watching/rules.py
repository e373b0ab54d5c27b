"""Warns of steps that train on nothing."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxrl_post.records.metric_table import TRUNCATED

__all__ = ["RULES", "Rule", "Warnings"]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule:
    """A warning about a metric.

    Attributes:
        metric: name.
        is_bad: whether a value is.
        steps: consecutive steps with bad values until the warning is given.
        text: of the warning; {share} is the mean of the values, as a percentage.
    """

    metric: str
    is_bad: Callable[[float], bool]
    steps: int
    text: str


RULES = (
    Rule(
        TRUNCATED,
        lambda share: share >= 0.5,
        3,
        "{share} of the answers were cut at a limit of tokens or turns. Raise "
        "--rollout.max-tokens, or ask for shorter answers; --rollout.truncated says "
        "which reward a cut answer gets",
    ),
    Rule(
        "advantage/std",
        lambda spread: spread == 0,
        3,
        "all advantages were 0, so the rewards trained nothing: within each group all "
        "samples had the same reward. See reward/mean, rollout/truncated_fraction and "
        "samples.jsonl; choose tasks that the model solves sometimes, take more "
        "--rollout.samples-per-prompt, or check the grader",
    ),
)


@dataclass
class Warnings:
    """Logs a warning, once, for each rule that the metrics of a run break.

    >>> watch = Warnings((Rule("a", lambda value: value > 1, 2, "a is high"),))
    >>> [watch(step, {"a": value}) for step, value in ((1, 2.0), (2, 0.0), (3, 2.0))]
    [None, None, None]
    """

    rules: tuple[Rule, ...] = RULES
    _bad: dict[str, list[float]] = field(default_factory=dict, init=False)
    _told: set[str] = field(default_factory=set, init=False)

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Looks at the metrics of a step; a rule without its metric stays as it was."""
        for rule in self.rules:
            if rule.metric not in metrics or rule.metric in self._told:
                continue
            value = metrics[rule.metric]
            bad = self._bad.setdefault(rule.metric, [])
            if not rule.is_bad(value):
                bad.clear()
                continue
            bad.append(value)
            if len(bad) == rule.steps:
                self._told.add(rule.metric)
                share = f"{100 * sum(bad) / len(bad):.0f} %"
                steps = f"{step - rule.steps + 1} to {step}"
                _LOGGER.warning("steps %s: %s", steps, rule.text.format(share=share))
