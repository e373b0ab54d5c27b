"""Verdicts on an evaluation: its constraints, and a comparison with a baseline."""

import collections
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.files.suite import MetricConstraint
from jaxrl_post.jsonl import json_file
from jaxrl_post.programs.intervals import interval_over_tasks
from jaxrl_post.programs.scores import solves
from jaxrl_post.rollout.episode import Episode, Group
from jaxrl_post.watch.paired import Paired, interval_of_mean, paired

__all__ = [
    "Baseline",
    "Compared",
    "ConstraintVerdict",
    "compared",
    "judged",
    "read_baseline",
    "solved_by_task",
]


@dataclass(frozen=True)
class ConstraintVerdict:
    """A constraint, held against an evaluation.

    Attributes:
        constraint: the bounds.
        value: of the metric; None if no sample has it.
        interval: 95 % confidence interval of `value`; None without a value.
        verdict: "held" if the whole interval keeps the bounds, "broken" if it lies
            beyond one of them, else "undecided". A metric that no sample has breaks it.
        known: metrics that there are, if this one is none.
    """

    constraint: MetricConstraint
    value: float | None
    interval: tuple[float, float] | None
    verdict: str
    known: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the constraint counts as broken."""
        undecided = self.constraint.strict and self.verdict == "undecided"
        return undecided or self.verdict == "broken"


def judged(
    constraint: MetricConstraint, groups: Sequence[Group], *, solved_reward: float
) -> ConstraintVerdict:
    """Holds a constraint against the samples of an evaluation.

    The interval of a rate, a metric that is 0 or 1 in every sample, is
    `interval_over_tasks`; the one of another metric is a bootstrap over tasks,
    `interval_of_mean`. The value is the mean over the tasks.

    Args:
        constraint: the bounds.
        groups: one per task.
        solved_reward: a sample with at least this reward solves its task.
    """
    by_task = _values(constraint.metric, groups, solved_reward)
    flat = [value for values in by_task for value in values]
    if not flat:
        own = {name for g in groups for e in g.episodes for name in _own(e)}
        known = tuple(sorted({*_OF_ALL, *_OF_JUDGED, *own}))
        return ConstraintVerdict(constraint, None, None, "broken", known)
    means = [float(np.mean(values)) for values in by_task]
    if {*flat} <= {0.0, 1.0}:
        interval = interval_over_tasks(means, len(flat))
    else:
        interval = interval_of_mean(means)
    low, high = interval
    least, most = constraint.at_least, constraint.at_most
    if (least is not None and high < least) or (most is not None and low > most):
        verdict = "broken"
    elif (least is None or low >= least) and (most is None or high <= most):
        verdict = "held"
    else:
        verdict = "undecided"
    return ConstraintVerdict(constraint, float(np.mean(means)), interval, verdict)


# Metrics of every sample, and of the samples that have a reward.
_OF_ALL: Mapping[str, Callable[[Episode, float], bool]] = {
    "accuracy": solves,
    "failed": lambda episode, _: episode.reward is None,
}
_OF_JUDGED: Mapping[str, Callable[[Episode], float | None]] = {
    "mean_reward": lambda episode: episode.reward,
    "mean_tokens": lambda episode: episode.num_sampled,
    "stopped": lambda episode: episode.stopped,
}


def _own(episode: Episode) -> Mapping[str, float]:
    """The environment's metrics, and the parts of the reward."""
    if episode.reward is None:
        return {}
    return {**episode.metrics, **episode.rewards}


def _values(
    metric: str, groups: Sequence[Group], solved_reward: float
) -> list[list[float]]:
    """Values of a metric in the samples of each task that have it."""

    def value(episode: Episode) -> float | None:
        if metric in _OF_ALL:
            return _OF_ALL[metric](episode, solved_reward)
        if metric in _OF_JUDGED:
            return None if episode.reward is None else _OF_JUDGED[metric](episode)
        return _own(episode).get(metric)

    found = ([value(episode) for episode in group.episodes] for group in groups)
    kept = [[float(each) for each in values if each is not None] for values in found]
    return [values for values in kept if values]


@dataclass(frozen=True)
class Baseline:
    """The results of an earlier evaluation.

    Attributes:
        file: that holds them.
        by_task: of each part, whether the samples of each task solved it, 0 or 1, by
            the hash of its prompt. An evaluation without a suite has one part, "".
        sampling: of each part, how its completions were drawn.
    """

    file: str
    by_task: Mapping[str, Mapping[str, Sequence[float]]]
    sampling: Mapping[str, Mapping[str, Any]]

    def check(self, tasks: Mapping[str, Sequence[str]]) -> None:
        """Refuses evaluations that have nothing in common with the baseline.

        Args:
            tasks: the hashes of the prompts of each part.

        Raises:
            ConfigError: a part of the baseline is missing, or none of a part's tasks is
                in the baseline.
        """
        common = [name for name in tasks if name in self.by_task]
        if not common:
            raise ConfigError(
                f"--against: {self.file} has {_named(self.by_task)}, and this "
                f"evaluation has {_named(tasks)}; compare results of the same suite"
            )
        missing = [name for name in self.by_task if name not in tasks]
        if missing:
            # Under another name, or left out, it might have regressed unseen.
            raise ConfigError(
                f"--against: {self.file} has {_named(missing)}, and this evaluation "
                f"has {_named(tasks)}; evaluate what is missing too, or take results "
                "of the same suite as the baseline"
            )
        for name in common:
            if not self.by_task[name].keys() & {*tasks[name]}:
                raise ConfigError(
                    f"--against: {self.file} has {len(self.by_task[name])} tasks"
                    f"{f' of part {name}' if name else ''}, and none has the prompt of "
                    f"one of the {len(tasks[name])} tasks here; compare evaluations of "
                    "the same tasks"
                )

    def alone(self, parts: Collection[str]) -> Iterator[str]:
        """Yields a line for each part that the baseline lacks.

        Args:
            parts: the names of the parts that are evaluated.
        """
        for name in parts:
            if name not in self.by_task:
                yield f"part {name} is not in {self.file}, so it is not compared"


@dataclass(frozen=True)
class Compared:
    """A part of an evaluation, compared with a baseline by task.

    Attributes:
        paired: the differences; "better", "worse" or "same" is its `verdict`.
        regressed: whether the accuracy fell by more than is allowed.
        differs: sampling parameters that are not the baseline's.
    """

    paired: Paired
    regressed: bool
    differs: tuple[str, ...]


def read_baseline(file: str) -> Baseline:
    """Reads the results of an earlier evaluation.

    Raises:
        ConfigError: the file cannot be read, or lacks the scores of each task.
    """
    try:
        content = json_file(Path(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--against: cannot read {file}: {error}") from error
    rows = content.get("parts", [content]) if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(map(_has_scores, rows)):
        raise ConfigError(
            f"--against: {file} has no by_task with scores of 0 and 1 for each task; "
            "results of earlier versions lack it: evaluate the baseline again with "
            "--output, and give that file"
        )
    names = [row.get("name", "") for row in rows]
    if len({*names}) < len(names):
        raise ConfigError(
            f"--against: {file} has two parts of one name, in {_named(names)}; it was "
            "changed by hand: evaluate the baseline again with --output"
        )
    named = dict(zip(names, rows, strict=True))
    return Baseline(
        file,
        {name: row["by_task"] for name, row in named.items()},
        {name: row.get("sampling", {}) for name, row in named.items()},
    )


def compared(
    name: str,
    scores: Mapping[str, Sequence[float]],
    sampling: Mapping[str, Any],
    baseline: Baseline,
    *,
    margin: float = 0.0,
) -> Compared | None:
    """Compares a part of an evaluation with a baseline; None if that lacks the part.

    The part regressed if the whole 95 % interval of the difference of its accuracy on
    the tasks of both lies below -`margin`.

    Args:
        name: of the part.
        scores: as `Baseline.by_task` has them; at least one task is the baseline's.
        sampling: how its completions were drawn.
        baseline: of an earlier evaluation.
        margin: drop of accuracy that is allowed, in [0, 1].
    """
    before = baseline.by_task.get(name)
    if before is None:
        return None
    found = paired(before, scores)
    then = baseline.sampling[name]
    # Stop ids are the tokenizer's.
    keys = sorted({*sampling, *then} - {"stop_ids"})
    differs = tuple(key for key in keys if sampling.get(key) != then.get(key))
    return Compared(found, found.interval[1] < -margin, differs)


def solved_by_task(
    hashes: Sequence[str], groups: Sequence[Group], *, solved_reward: float
) -> dict[str, list[int]]:
    """Whether the samples of each task solved it, 0 or 1, by the hash of its prompt.

    Args:
        hashes: of the prompts, by prompt id.
        groups: one per task.
        solved_reward: a sample with at least this reward solves its task.
    """
    found: dict[str, list[int]] = collections.defaultdict(list)
    for episode in (e for group in groups for e in group.episodes):
        found[hashes[episode.prompt_id]].append(int(solves(episode, solved_reward)))
    return dict(found)


def _has_scores(row: Any) -> bool:
    """Whether results have at least one score of each task, all of them 0 or 1."""
    scores = row.get("by_task") if isinstance(row, dict) else None
    return (
        isinstance(scores, dict)
        and bool(scores)
        and isinstance(row.get("name", ""), str)
        and isinstance(row.get("sampling", {}), dict)
        and all(
            isinstance(each, list) and each and all(value in (0, 1) for value in each)
            for each in scores.values()
        )
    )


def _named(parts: Iterable[str]) -> str:
    names = ", ".join(name for name in parts if name)
    return f"the parts {names}" if names else "no suite"
