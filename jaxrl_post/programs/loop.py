"""The loop of every run: steps, evaluations, rows of metrics, checkpoints."""

import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import grain
import jax

from jaxrl_post.learner.checkpoint import abstract_state
from jaxrl_post.learner.state import TrainState
from jaxrl_post.programs.run import Run
from jaxrl_post.records.sinks import Progress

__all__ = ["Training", "train"]


@runtime_checkable
class Training(Protocol):
    """What a program trains, as the loop sees it."""

    @property
    def indices(self) -> grain.DatasetIterator:
        """Of the training examples; a checkpoint holds its place."""
        ...

    @property
    def layout(self) -> TrainState:
        """Shardings of `snapshot`."""
        ...

    def snapshot(self) -> TrainState:
        """All arrays that a checkpoint holds."""
        ...

    def meta(self) -> dict[str, Any]:
        """What else a checkpoint holds: JSON values."""
        ...

    def restore(self, snapshot: TrainState, meta: dict[str, Any]) -> None:
        """Takes up what `snapshot` and `meta` gave; `indices` is in its place."""
        ...

    def step(self, number: int) -> dict[str, float]:
        """Takes one step, from 1; returns its metrics."""
        ...

    def evaluate(self, number: int) -> dict[str, float]:
        """Metrics on held-out data after a step, 0 before the first."""
        ...


def train(
    run: Run,
    training: Training,
    *,
    should_stop: Callable[[], bool],
    log_every: int = 1,
) -> tuple[int, dict[str, float]]:
    """Takes a run's steps, from its newest checkpoint where it has one.

    Args:
        run: opened.
        training: likewise; its state is that of the last step afterwards.
        should_stop: asked after each step; True saves and ends the loop.
        log_every: steps between rows of metrics; an evaluation and the last step have
            rows of their own.

    Returns:
        The last step's number and metrics; no metrics where no step was left to take.
    """
    config, checkpoints = run.config, run.checkpoints
    latest = checkpoints.latest()
    if latest is not None:
        abstract = abstract_state(jax.eval_shape(training.snapshot), training.layout)
        snapshot, meta = checkpoints.restore(latest, abstract, training.indices)
        training.restore(snapshot, meta)
        run.resumed(latest, snapshot)
    step, stopped = latest or 0, False
    if step < config.steps:
        run.describe()
    metrics: dict[str, float] = {}
    with (
        run.open_metrics(latest) as metrics_log,
        Progress(run.console, total_steps=config.steps) as progress,
    ):
        if latest is None:
            metrics_log.write(0, training.evaluate(0))
        saving = 0.0
        while step < config.steps and not stopped:
            step += 1
            metrics = training.step(step) | {"time/checkpoint": saving}
            stopped = should_stop()
            last = step == config.steps or stopped
            # Whoever sends a signal does not wait for an evaluation.
            evaluates = not stopped and config.eval.due(step, config.steps)
            if evaluates:
                metrics |= training.evaluate(step)
            # The row first: a run that dies before the checkpoint drops it again.
            if step % log_every == 0 or evaluates or last:
                metrics_log.write(step, metrics)
            progress.update(step, metrics)
            begin = time.perf_counter()
            if step % config.checkpoint.every == 0 or last:
                checkpoints.save(
                    step, training.snapshot(), training.indices, training.meta()
                )
            saving = time.perf_counter() - begin
        checkpoints.wait()
    return step, metrics
