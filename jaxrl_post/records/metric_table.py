"""Meaning of every metric of a run: unit, normal values, and what to do otherwise.

The rows are in metrics.toml, which the report and the docs page of the metrics read.
"""

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

__all__ = [
    "ACCURACY",
    "MISMATCH",
    "REWARD",
    "TOKENS_PER_SECOND",
    "TRUNCATED",
    "UNSTEADY",
    "Row",
    "better",
    "row_of",
    "rows",
]

# The metrics that a person looks at first.
REWARD = "reward/mean"
ACCURACY = "eval/accuracy"
TRUNCATED = "rollout/truncated_fraction"
MISMATCH = "mismatch/token_mult_prob_error"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
# Beginnings of the names of metrics that depend on the machine and its load: two equal
# runs share all others.
UNSTEADY = ("time/", "throughput/", "host/", "watch/", "retries/")


@dataclass(frozen=True)
class Row:
    """Description of a metric.

    Attributes:
        unit: of its values, in words; on a chart too.
        meaning: what is measured.
        normal: values of a healthy run.
        remedy: what to look at or to change if it is otherwise.
        zero: if the metric may be 0 by construction, `options` with the values that
            make it so, and `why`.
        better: "higher" or "lower" values; "" where neither is better by itself.
    """

    unit: str
    meaning: str
    normal: str
    remedy: str
    zero: Mapping[str, Any] = field(default_factory=dict)
    better: str = ""

    def why_zero(self, options: Mapping[str, Any]) -> str:
        """Says why a run with these options has only zeros; "" if it need not.

        Args:
            options: by their whole names, such as "update.epochs".
        """
        needed = self.zero.get("options", {})
        # A run of an earlier version lacks a later option, which did nothing then.
        known = [name for name in needed if name in options]
        fits = known and all(options[name] == needed[name] for name in known)
        return self.zero["why"] if fits else ""


@functools.cache
def rows() -> Mapping[str, Row]:
    """Returns all rows by name; `<word>` in a name stands for any name there."""
    text = (resources.files(__package__) / "metrics.toml").read_text(encoding="utf-8")
    return {name: Row(**row) for name, row in tomllib.loads(text).items()}


def row_of(metric: str) -> Row | None:
    """Returns the row of a metric; None for a metric that no row describes.

    >>> row_of("policy/entropy").unit, row_of("mine/own")
    ('nats per token', None)
    >>> row_of("rollout/failed/timeout") is rows()["rollout/failed/<kind>"]
    True
    """
    if metric in rows():
        return rows()[metric]
    return next((row for each, row in _placed() if each.fullmatch(metric)), None)


def better(metric: str) -> str:
    """Says whether "higher" or "lower" values of an evaluation's metric are better.

    The metric's own row says it, else the row of the environment's or the loss's metric
    with this name, and for a part of a mixture the row of the whole. "" if none does,
    as for a metric that only a user's environment has.

    >>> better("eval/loss"), better("eval/passed"), better("eval/divergence")
    ('lower', 'higher', 'lower')
    >>> better("eval/gsm8k/accuracy"), better("eval/mine")
    ('higher', '')
    """
    name = metric.removeprefix("eval/")
    names = [metric, f"env/{name}", f"eval/{name.rpartition('/')[2]}"]
    names += [each for each in rows() if each.endswith(f"/{name}")]
    found = (row_of(each) for each in names)
    return next((row.better for row in found if row and row.better), "")


@functools.cache
def _placed() -> list[tuple[re.Pattern[str], Row]]:
    """The rows whose names hold a `<word>`, with patterns of these names."""
    return [
        (re.compile(re.sub(r"<\w+>", ".+", name)), row)
        for name, row in rows().items()
        if "<" in name
    ]
