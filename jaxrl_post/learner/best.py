"""Keeps the model of the best evaluation, and ends a run that no longer improves.

A new best model has a checkpoint of its own step, which is whole before the model gets
its name. So a run that resumes never finds a best model of a later step than its own,
and one that was killed in between writes the model from the checkpoint.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.run import RunConfig
from jaxrl_post.files import replace_file
from jaxrl_post.learner.model import Model, save_model
from jaxrl_post.records import notation
from jaxrl_post.records.directory import RunDirectory, read_rows
from jaxrl_post.records.hub.card import run_cards
from jaxrl_post.records.metric_table import better, rows
from jaxrl_post.sharding import processes
from jaxrl_post.types import PyTree

__all__ = ["BEST", "BEST_ADAPTER", "Best", "Standing", "check_metric"]

_LOGGER = logging.getLogger(__name__)

# The directories of the best model and of its adapter.
BEST, BEST_ADAPTER = "best", "best_adapter"
OPTION = "--checkpoint.keep-best"


def check_metric(config: RunConfig, measured: Sequence[str], *, own: bool) -> None:
    """Refuses a metric that no evaluation of a program has, or that has no best value.

    What only the evaluations of some tasks or losses have is checked at the first one
    (`Best.require`).

    Args:
        config: of a training program.
        measured: what its evaluations have in any case.
        own: whether tasks, or a loss of the user's, may have metrics of any name.

    Raises:
        ConfigError: names what there is.
    """
    metric = config.checkpoint.keep_best
    if metric is None:
        return
    name = metric.removeprefix("eval/")
    of_others = metric in rows() and metric not in measured
    known = own or any(each.endswith(f"/{name}") for each in rows())
    if of_others or not known:
        raise ConfigError(_unknown(metric, measured))
    if config.checkpoint.best_is == "auto" and not better(metric):
        raise ConfigError(
            "--checkpoint.best-is: the table of metrics does not say whether the "
            f"highest or the lowest {metric} is the best one; give highest or lowest"
        )


def _unknown(metric: str, names: Sequence[str]) -> str:
    there = f"there are {', '.join(names)}" if names else "it has no held-out examples"
    return f"{OPTION}: the evaluations of this run have no {metric}; {there}"


@dataclass(frozen=True)
class Standing:
    """The best value so far, and how long it has been the best.

    Attributes:
        measure: the metric, whether its lowest value is the best, and the options of
            the evaluations: values of another measure cannot be compared.
        step: with the best value; None before an evaluation had a finite one.
        value: of that step.
        waited: evaluations in a row, after training, that were not better.
    """

    measure: Mapping[str, Any]
    step: int | None = None
    value: float | None = None
    waited: int = 0

    def after(self, step: int, value: float, min_delta: float = 0.0) -> "Standing":
        """The standing after an evaluation; of equal values the earlier one stays.

        Args:
            step: that was evaluated.
            value: NaN and infinite ones are never the best.
            min_delta: a value waits no longer only if it is better by more than this.

        >>> first = Standing({"lowest": True}).after(0, 2.0).after(5, 2.0)
        >>> first.step, first.waited, first.after(9, 1.5).step
        (0, 1, 9)
        """
        gain = -math.inf
        if math.isfinite(value):
            gain = math.inf if self.value is None else value - self.value
            if self.value is not None and self.measure["lowest"]:
                gain = -gain
        # The model before the first step was not trained.
        waited = 0 if gain > min_delta or not step else self.waited + 1
        if gain > 0:
            return replace(self, step=step, value=value, waited=waited)
        return replace(self, waited=waited)


class Best:
    """The best model of a run: its standing, and its files.

    Args:
        config: of the run; without `checkpoint.keep_best` nothing is kept or ended.
        directory: of the run.

    Attributes:
        standing: after the last evaluation, which a checkpoint holds.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        options = config.checkpoint
        self.metric, self.patience = options.keep_best, options.patience
        self._min_delta, self._directory = options.min_delta, directory
        self._adapter, self._model = bool(config.lora.rank), config.model
        is_lowest = options.best_is == "lowest"
        if self.metric is not None and options.best_is == "auto":
            is_lowest = better(self.metric) == "lower"
        measure = {
            "metric": self.metric,
            "lowest": is_lowest,
            "num_tasks": config.eval.num_tasks,
            "solved_reward": config.eval.solved_reward,
        }
        self.standing = Standing(measure)
        # The standing in the checkpoint from which the run resumed.
        self._saved: Mapping[str, Any] | None = None
        # Whether the model of the standing is gone, so that best.json cannot name it.
        self._is_lost = False

    @property
    def ended(self) -> bool:
        """Whether the run ends, since no evaluation was better for long enough."""
        patience = self.patience if self.metric is not None else None
        return patience is not None and self.standing.waited >= patience

    def require(self, found: Mapping[str, float]) -> None:
        """Refuses a metric that the first evaluation does not have.

        Raises:
            ConfigError: names what there is.
        """
        if self.metric is not None and self.metric not in found:
            names = sorted(each for each in found if each.startswith("eval/"))
            raise ConfigError(_unknown(self.metric, names))

    def judge(self, step: int, found: Mapping[str, float]) -> bool:
        """Takes the metrics of an evaluation; returns whether its model is the best."""
        if self.metric is None:
            return False
        value = found.get(self.metric, math.nan)
        # As in process 0: all processes must save, or none.
        value = processes.agree(f"{self.metric} of step {step}", value)
        if not math.isfinite(value):
            what = "no" if math.isnan(value) else "an infinite"
            _LOGGER.warning(
                "%s %s: %s value at step %d, which is not the best",
                OPTION,
                self.metric,
                what,
                step,
            )
        self.standing = self.standing.after(step, value, self._min_delta)
        return self.standing.step == step

    def save(self, model: Model, params: PyTree) -> None:
        """Writes the best model, then its record; all processes call it.

        Args:
            model: as for `learner.model.save_model`.
            params: of the step that the standing names.

        Raises:
            WriteError: the disk is full or fails; the best model before is whole.
        """
        told = f"Of all evaluations up to then, its {self.told()} was the best."
        cards = run_cards(self._directory, self._model, told)
        named = {"model": BEST, "adapter": BEST_ADAPTER}
        save_model(
            self._directory.path / BEST,
            model,
            params,
            adapter=BEST_ADAPTER,
            cards={named[part]: cards[part] for part in named if part in cards},
            consequence="the best model before it, if there was one, is unchanged",
        )
        self._is_lost = False
        self.note()

    def note(self) -> None:
        """Writes best.json, if there is a best model."""
        measure, standing = self.standing.measure, self.standing
        if self.metric is None or standing.step is None or self._is_lost:
            return
        if processes.index():
            return
        record = {
            "step": standing.step,
            "metric": self.metric,
            "value": standing.value,
            "better": "lower" if measure["lowest"] else "higher",
            "evaluations_since": standing.waited,
        }
        replace_file(self._directory.best, json.dumps(record, indent=2) + "\n")

    def meta(self) -> dict[str, Any]:
        """Returns the standing for a checkpoint, as JSON values."""
        # A run that is resumed without the option, and then with it, compares on.
        saved = self._saved if self.metric is None else asdict(self.standing)
        return {} if saved is None else {BEST: saved}

    def restore(self, saved: Mapping[str, Any] | None, step: int) -> bool:
        """Restores the standing of a checkpoint.

        Args:
            saved: what `meta` had for the checkpoint; None if nothing.
            step: of the checkpoint.

        Returns:
            Whether the best model must be saved: it is the checkpoint's, and the
            process that wrote it ended before the model was whole.
        """
        self._saved = saved
        if self.metric is None:
            return False
        if saved is None or saved["measure"] != self.standing.measure:
            self._require_logged()
        if saved is None:
            return False
        before = Standing(**saved)
        if before.measure != self.standing.measure:
            _LOGGER.warning(
                "%s: what is compared has changed: the best %s so far counts no more, "
                "and the next evaluation is the best one",
                OPTION,
                before.measure["metric"],
            )
            return False
        self.standing = before
        if before.step is None:
            return False
        there, whole = processes.agree("best model", self._found(before))
        if whole or before.step == step:
            return not whole
        self._is_lost = True
        if there > before.step:
            # The checkpoint of that step is lost, and the step is taken again.
            self.standing = Standing(before.measure, waited=before.waited)
        if there != step:
            _LOGGER.warning(
                "%s: %s is not of step %d, which had the best value; the next better "
                "model is kept",
                OPTION,
                self._directory.path / BEST,
                before.step,
            )
        return False

    def _require_logged(self) -> None:
        """Refuses a metric that the run's evaluations before did not have."""
        names: list[str] = []
        if self._directory.metrics.exists():
            for row in read_rows(self._directory.metrics):
                found = [each for each in row["metrics"] if each.startswith("eval/")]
                names = sorted(found) or names
        names = processes.agree("metrics of evaluations", names)
        if names:
            self.require(dict.fromkeys(names, 0.0))

    def _found(self, standing: Standing) -> tuple[int, bool]:
        """The step of the model on the disk, -1 for none, and whether it is whole."""
        record = self._directory.read_best() or {"step": -1, "value": None}
        folders = [BEST, BEST_ADAPTER] if self._adapter else [BEST]
        is_same = (record["step"], record["value"]) == (standing.step, standing.value)
        whole = all((self._directory.path / each).is_dir() for each in folders)
        return record["step"], is_same and whole

    @property
    def place(self) -> Path | None:
        """Directory of the best model; None if there is none."""
        is_there = self.metric is not None and self._found(self.standing)[1]
        return self._directory.path / BEST if is_there else None

    def told(self) -> str:
        """The best value and its step, for messages."""
        value, step = self.standing.value, self.standing.step
        if value is None:
            return f"no finite {self.metric}"
        return f"{self.metric} of {notation.number(value)} at step {step}"

    def told_end(self, step: int, steps: int) -> str:
        """Says why a run ended at a step, before all of its steps."""
        by = f" by more than {self._min_delta:g}" if self._min_delta else ""
        return (
            f"ended at step {step} of {steps}: {self.standing.waited} evaluations in a "
            f"row were not better{by} (--checkpoint.patience {self.patience}); the "
            f"best one is {self.told()}"
        )
