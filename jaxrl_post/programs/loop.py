"""The training loop. A step of a run that samples is

    sampler = weights.publish()            # the policy, where the sampler reads it
    producer.feed(buffer, sampler, step)   # rollouts, until the buffer has a batch
    batch = buffer.take()                  # the groups that the step trains on
    update = updater.update(batch, step)   # credit, minibatches, optimizer

and a step of a run on a data set is `take` and `update` alone. After each step the
journal evaluates, watches, logs and saves.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import jax

from jaxrl_post.learner.learner import Update
from jaxrl_post.programs.journal import RunJournal, Training
from jaxrl_post.programs.run import Run
from jaxrl_post.records.tracing import Tracing

__all__ = [
    "BatchSource",
    "BatchUpdater",
    "Producer",
    "Trainer",
    "Weights",
    "train",
]


@runtime_checkable
class Weights[Sampler](Protocol):
    """Hands the trained parameters to the sampler, a `sampler.port.Sampler`."""

    def publish(self) -> Sampler:
        """Returns the sampler with the current parameters bound."""
        ...

    def metrics(self) -> dict[str, float]:
        """Returns what publishing and sampling took since the last call."""
        ...

    def close(self, *, completed: bool) -> None:
        """Ends the samplers; says whether the run is complete."""
        ...


@runtime_checkable
class Producer[Buffer, Sampler](Protocol):
    """Fills a buffer, in turns with the updates."""

    def feed(self, buffer: Buffer, sampler: Sampler, number: int) -> dict[str, float]:
        """Samples until the buffer has the batch of a step; returns metrics."""
        ...


@runtime_checkable
class BatchSource[Batch](Protocol):
    """Has what the steps train on, such as `rollout.buffer.Buffer`."""

    def take(self) -> Batch:
        """Removes and returns the batch of a step."""
        ...


@runtime_checkable
class BatchUpdater[Batch](Protocol):
    """Takes the optimizer steps of a batch, such as `learner.updater.Updater`."""

    def update(self, batch: Batch, number: int) -> Update:
        """Trains on a batch."""
        ...


@dataclass
class Trainer[Batch](Training):
    """Takes the steps of a run.

    Attributes:
        buffer: has what the steps train on.
        updater: trains on it.
        weights: None if the run never samples.
        producer: fills the buffer with rollouts; None if a data set does.
    """

    buffer: BatchSource[Batch]
    updater: BatchUpdater[Batch]
    weights: Weights | None = field(default=None, kw_only=True)
    producer: Producer | None = field(default=None, kw_only=True)

    def step(self, number: int) -> tuple[dict[str, float], Batch]:
        """Takes a step.

        Args:
            number: of the step, from 1.

        Returns:
            Scalar metrics, and what was trained on.

        Raises:
            DivergenceError: a loss or gradient is not finite; that optimizer step
                changed nothing.
            FailedRolloutsError: too many episodes failed.
            RolloutTimeoutError: the episodes took too long.
        """
        begin, metrics = time.perf_counter(), dict[str, float]()
        if self.producer is not None and self.weights is not None:
            with jax.profiler.TraceAnnotation("rollout"):
                sampler = self.weights.publish()
                metrics |= self.producer.feed(self.buffer, sampler, number)
        batch = self.buffer.take()
        update = self.update(batch, number)
        seconds = time.perf_counter() - begin
        metrics |= update.metrics | (self.weights.metrics() if self.weights else {})
        metrics["time/step"] = seconds
        metrics["throughput/tokens_per_second"] = update.tokens / seconds
        return metrics, batch

    def update(self, batch: Batch, number: int) -> Update:
        """Trains on the batch of a step."""
        return self.updater.update(batch, number)


def train(
    run: Run,
    trainer: Trainer,
    *,
    should_stop: Callable[[], bool],
    log_every: int = 1,
) -> tuple[int, dict[str, float]]:
    """Trains until a run's last step, from its newest checkpoint if there is one.

    Args:
        run: from `open_run`.
        trainer: has the state of the last step afterwards.
        should_stop: called after each step; True saves and ends the loop.
        log_every: steps between rows of metrics; an evaluation and the last step have
            rows of their own.

    Returns:
        The last step's number and metrics; no metrics if no step was left.
    """
    with (
        RunJournal(run, trainer, should_stop, log_every) as journal,
        Tracing(run.config, run.directory.path / "profile", journal.step) as tracing,
    ):
        for step in journal.steps():
            with tracing.step(step):
                metrics, _ = trainer.step(step)
            journal.end(step, metrics)
    return journal.step, journal.metrics
