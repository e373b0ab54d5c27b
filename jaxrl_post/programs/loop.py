"""The training loop of every run: steps, evaluations, metrics, checkpoints."""

import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import grain
import jax

from jaxrl_post.learner.checkpoint import Checkpoints, abstract_state
from jaxrl_post.learner.learner import DivergenceError
from jaxrl_post.learner.state import TrainState
from jaxrl_post.programs.agreement import check_same_state
from jaxrl_post.programs.run import Run
from jaxrl_post.records.sinks import NoLog, Progress, SampleLog, tell_missing
from jaxrl_post.sharding import processes

__all__ = ["Training", "train"]

# Of a checkpoint's meta: the metrics of a step whose evaluation is still due, and what
# the logs held.
PENDING, LOGS = "evaluation_due", "logs"


@runtime_checkable
class Training(Protocol):
    """What a program implements so that `train` can run its steps."""

    @property
    def indices(self) -> grain.DatasetIterator:
        """Iterator over the training examples; a checkpoint holds its position."""
        ...

    @property
    def layout(self) -> TrainState:
        """Shardings of `snapshot`."""
        ...

    def logs(self, resume_step: int) -> SampleLog | NoLog:
        """Opens what is logged beside metrics, cut back to a step; -1 for a new run."""
        ...

    def snapshot(self) -> TrainState:
        """All arrays that a checkpoint holds."""
        ...

    def meta(self, *, due: bool) -> dict[str, Any]:
        """Everything else that a checkpoint holds, as JSON values.

        Args:
            due: whether a resumed run evaluates the last step, and logs its samples.
        """
        ...

    def restore(self, snapshot: TrainState, meta: dict[str, Any]) -> None:
        """Restores `snapshot` and `meta`; `train` restores `indices` itself."""
        ...

    def step(self, number: int) -> dict[str, float]:
        """Takes step `number`, counted from 1; returns its metrics."""
        ...

    def evaluate(self, number: int) -> dict[str, float]:
        """Held-out metrics after step `number`; 0 is before the first step."""
        ...


def train(
    run: Run,
    training: Training,
    *,
    should_stop: Callable[[], bool],
    log_every: int = 1,
) -> tuple[int, dict[str, float]]:
    """Trains until a run's last step, from its newest checkpoint if there is one.

    Args:
        run: from `open_run`.
        training: what is trained; afterwards its state is that of the last step.
        should_stop: called after each step; True saves and ends the loop.
        log_every: steps between rows of metrics; an evaluation and the last step have
            rows of their own.

    Returns:
        The last step's number and metrics; no metrics if no step was left.
    """
    config, checkpoints = run.config, run.checkpoints
    latest, meta = checkpoints.latest(), dict[str, Any]()
    if latest is not None:
        abstract = abstract_state(jax.eval_shape(training.snapshot), training.layout)
        snapshot, meta = checkpoints.restore(latest, abstract, training.indices)
        training.restore(snapshot, meta)
        run.resumed(latest, snapshot)
    step, stopped = latest or 0, False
    # Of a run that was stopped when an evaluation was due: the metrics of that step.
    pending = meta.get(PENDING)
    # What was logged of that step is logged again, with the evaluation.
    kept = step if pending is None else step - 1
    kept = -1 if latest is None else kept
    metrics: dict[str, float] = {}
    with (
        run.open_metrics(kept) as metrics_log,
        training.logs(kept) as samples,
        Progress(run.console, total_steps=config.steps) as progress,
    ):
        if step < config.steps:
            run.describe()
        logged = metrics_log.counts() | samples.counts()
        tell_missing(step, meta.get(LOGS, {}), logged)
        if latest is None:
            metrics_log.write(0, training.evaluate(0))
        if pending is not None:
            metrics_log.write(step, pending | training.evaluate(step))
        saving = 0.0
        while step < config.steps and not stopped:
            step += 1
            metrics = _taken(training, step, checkpoints) | {"time/checkpoint": saving}
            if processes.count() > 1:
                position = training.indices.get_state()
                check_same_state(f"after step {step}", metrics, position)
            # A signal may reach only one of several processes.
            stopped = any(processes.exchange("stop", should_stop()))
            evaluates = config.eval.due(step, config.steps)
            # A signal ends the run soon: an evaluation waits until it is resumed, but
            # for the last one, after which nothing is.
            due = evaluates and stopped and step < config.steps
            waits = {PENDING: metrics} if due else {}
            # Without the row of this step, which is written again.
            logged = metrics_log.counts() | samples.counts()
            if evaluates and not due:
                metrics |= training.evaluate(step)
                told = processes.exchange("stop after an evaluation", should_stop())
                stopped = stopped or any(told)
            last = step == config.steps or stopped
            # Row before checkpoint: if the run dies in between, resuming cuts it off.
            if step % log_every == 0 or evaluates or last:
                metrics_log.write(step, metrics, awaits_more=due)
            progress.update(step, metrics)
            begin = time.perf_counter()
            if step % config.checkpoint.every == 0 or last:
                if not due:
                    logged = metrics_log.counts() | samples.counts()
                meta = training.meta(due=due) | waits | {LOGS: logged}
                checkpoints.save(step, training.snapshot(), training.indices, meta)
            saving = time.perf_counter() - begin
        checkpoints.wait()
    return step, metrics


def _taken(training: Training, step: int, checkpoints: Checkpoints) -> dict[str, float]:
    """Takes a step; an error of one that diverged says where the run can go on."""
    try:
        return training.step(step)
    except DivergenceError as error:
        checkpoints.wait()
        steps = ", ".join(map(str, checkpoints.steps()))
        told = "There is no checkpoint yet"
        if steps:
            told = f"Checkpoints in {checkpoints.directory} are of the steps {steps}"
        raise DivergenceError(f"{error}. {told}") from error
