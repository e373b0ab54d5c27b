"""Resumes a run; evaluates, watches, logs and saves after its steps; stops it."""

import abc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import grain
import jax

from jaxrl_post.files import taken_wait
from jaxrl_post.learner.best import BEST
from jaxrl_post.learner.checkpoint import abstract_state
from jaxrl_post.learner.learner import DivergenceError, UpdateError
from jaxrl_post.learner.state import TrainState
from jaxrl_post.programs.agreement import check_same_state
from jaxrl_post.programs.run import Run
from jaxrl_post.programs.watching.guard import (
    Acting,
    AlarmError,
    Guard,
    acting_of,
    guarding,
)
from jaxrl_post.records.callbacks import CallbackError, Event, tell
from jaxrl_post.records.progress import Progress
from jaxrl_post.records.sinks import (
    MetricsLog,
    NoLog,
    tell_missing,
)
from jaxrl_post.sharding import processes
from jaxrl_post.watch.alarms import RAISED

__all__ = ["RunJournal", "Training"]

# Seconds between two looks at whether a pause is over.
PAUSE_POLL_S = 1.0
# Keys of a checkpoint's meta: the metrics of a step whose evaluation is still due, and
# what the logs held.
PENDING, LOGS = "evaluation_due", "logs"


class Training(abc.ABC):
    """Interface of a run's trainer for the journal."""

    @property
    @abc.abstractmethod
    def indices(self) -> grain.DatasetIterator:
        """Iterator over the training examples; a checkpoint holds its position."""

    @property
    @abc.abstractmethod
    def layout(self) -> TrainState:
        """Shardings of `snapshot`."""

    @abc.abstractmethod
    def logs(self, resume_step: int, step: int) -> AbstractContextManager[Any]:
        """Opens the logs other than metrics, and cuts them back.

        Args:
            resume_step: the last step that logs of evaluations keep; -1 for a new run.
            step: of the restored checkpoint, which logs of training keep; -1 for a new
                run. It is one more where the evaluation of that step is due.
        """

    def counts(self) -> dict[str, int]:
        """The number of rows, or of files, in these logs, by their names."""
        return {}

    @abc.abstractmethod
    def snapshot(self) -> TrainState:
        """All arrays that a checkpoint holds."""

    @abc.abstractmethod
    def meta(self, *, due: bool = False) -> dict[str, Any]:
        """Everything else that a checkpoint holds, as JSON values.

        Args:
            due: whether a resumed run evaluates the last step, and logs its samples.
        """

    @abc.abstractmethod
    def restore(self, snapshot: TrainState, meta: dict[str, Any]) -> None:
        """Restores `snapshot` and `meta`; the journal restores `indices` itself."""

    @abc.abstractmethod
    def keep(self, folder: Path) -> None:
        """Writes the batch of the last step, for a person.

        Args:
            folder: to write to.
        """

    @property
    @abc.abstractmethod
    def held_out_size(self) -> int:
        """Number of examples that `measure` evaluates; 0 if there are none."""

    @abc.abstractmethod
    def measure(self, number: int) -> dict[str, float]:
        """Held-out metrics after step `number`; 0 is before the first step."""


class RunJournal:
    """Begins or resumes a run, and ends each of its steps.

    Args:
        run: from `open_run`.
        training: what is trained.
        should_stop: called after each step; True saves and ends the run.
        log_every: steps between rows of metrics; an evaluation and the last step have
            rows of their own.

    Attributes:
        step: the last step that was taken.
        metrics: of that step; empty if none was taken here.
    """

    def __init__(
        self,
        run: Run,
        training: Training,
        should_stop: Callable[[], bool],
        log_every: int = 1,
    ) -> None:
        self.step = 0
        self.metrics: dict[str, float] = {}
        self._run, self._training = run, training
        self._should_stop, self._log_every = should_stop, log_every
        self._stopped, self._saving = False, 0.0
        self._stack = ExitStack()
        # Process 0 watches, for all.
        self._guard: Guard | None = None

    def __enter__(self) -> Self:
        with self._stack:
            self._begin()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            with self._stack:
                self._run.checkpoints.wait()
            return
        if self._guard is not None and isinstance(error, UpdateError):
            # The step has no row, but its alarms say what is wrong.
            self._guard.look(self.step + 1, error.metrics)
        self._stack.__exit__(kind, error, trace)
        if isinstance(error, DivergenceError):
            raise self._told(error) from error

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps that are left, until the run is stopped."""
        first = True
        while self.step < self._run.config.steps and not self._stopped:
            if first:
                self._progress.phase(f"step {self.step + 1}, which compiles programs")
            yield self.step + 1
            first = False

    def end(self, step: int, metrics: dict[str, float]) -> None:
        """Ends a step: looks for signals, evaluates, watches, logs, saves.

        A signal ends the run, and so do an evaluation after which `Best.ended` and an
        alarm whose rule says so.
        """
        config, training = self._run.config, self._training
        self.step = step
        self.metrics = metrics = metrics | {"time/checkpoint": self._saving}
        if processes.count() > 1:
            position = training.indices.get_state()
            check_same_state(f"after step {step}", metrics, position)
        # The machine of process 0.
        metrics |= {} if self._guard is None else self._guard.host()
        if waited := taken_wait():
            metrics["retries/disk_s"] = waited
        # A signal may reach only one of several processes.
        self._stopped = any(processes.exchange("stop", self._should_stop()))
        evaluates = config.eval.due(step, config.steps)
        # A signal ends the run soon: an evaluation waits until it is resumed, but
        # for the last one, after which nothing is.
        due = evaluates and self._stopped and step < config.steps
        waits = {PENDING: dict(metrics)} if due else {}
        # Without the row of this step, which is written again.
        logged = self._counts()
        events, gained = [self._event("step", metrics)], False
        if evaluates and not due:
            found = self._measured(step)
            metrics |= found
            gained = self._judged(step, found)
            events.append(self._event("evaluation", found))
            told = processes.exchange("stop after an evaluation", self._should_stop())
            self._stopped = self._stopped or any(told)
        failed: Exception | None = self._tell(*events)
        acting = self._watched(step, metrics)
        self._stopped = self._stopped or (acting is not None and acting.stops)
        last = step == config.steps or self._stopped
        # Row before checkpoint: if the run dies in between, resuming cuts it off.
        if step % self._log_every == 0 or evaluates or last or acting:
            self._rows.write(step, metrics, awaits_more=due)
        self._progress.update(step, metrics)
        begin = time.perf_counter()
        if step % config.checkpoint.every == 0 or last or gained or acting:
            # These are waited for at once: of a full disk while the state is here.
            whole = last or gained or acting is not None or failed is not None
            held = logged if due else self._counts()
            self._save(step, waits, held, whole=whole)
        if acting is not None:
            self._evidence(acting)
            failed = failed or self._acted(acting)
        if evaluates and not due:
            self._keep(gained)
        self._saving = time.perf_counter() - begin
        if failed is not None:
            self._run.checkpoints.wait()
            raise failed

    def _begin(self) -> None:
        """Restores the newest checkpoint, opens the logs, evaluates what is due."""
        run, training = self._run, self._training
        latest, meta = run.checkpoints.latest(), dict[str, Any]()
        gained = False
        if latest is not None:
            abstract = abstract_state(
                jax.eval_shape(training.snapshot), training.layout
            )
            snapshot, meta = run.checkpoints.restore(latest, abstract, training.indices)
            training.restore(snapshot, meta)
            gained = run.best.restore(meta.get(BEST), latest)
            self._stopped = run.best.ended
            run.resumed(latest, snapshot)
        self.step = latest or 0
        # The metrics of a step whose evaluation was due when the run was stopped.
        pending = meta.get(PENDING)
        # That step is logged again, with the evaluation.
        kept = self.step if pending is None else self.step - 1
        kept = -1 if latest is None else kept
        enter = self._stack.enter_context
        self._rows: MetricsLog | NoLog = enter(run.open_metrics(kept))
        began = -1 if latest is None else latest
        enter(training.logs(kept, began))
        if not processes.index():
            shapes = jax.tree.leaves(jax.eval_shape(training.snapshot))
            size = sum(each.size * each.dtype.itemsize for each in shapes)
            self._guard = enter(
                guarding(
                    run.watch,
                    run.config.watch,
                    run.directory,
                    resume_step=kept,
                    checkpoint_bytes=size,
                )
            )
        self._progress = enter(Progress(run.console, total_steps=run.config.steps))
        if self.step < run.config.steps and not self._stopped:
            run.describe()
        tell_missing(self.step, meta.get(LOGS, {}), self._counts())
        events, acting = [self._event("start", {})], None
        if latest is None or pending is not None:
            found = self._measured(self.step)
            if latest is None:
                run.best.require(found)
            row = (pending or {}) | found
            if row:
                acting = self._watched(self.step, row)
            self._rows.write(self.step, row)
            if latest is None and found:
                self._progress.update(0, found)
            events.append(self._event("evaluation", found))
            gained = self._judged(self.step, found)
        self._keep(gained)
        failed: Exception | None = self._tell(*events)
        if acting is not None and failed is None:
            failed = self._acted(acting)
        if failed is not None:
            raise failed

    def _acted(self, acting: Acting) -> AlarmError | None:
        """Pauses or stops for an alarm; returns the error that ends the run."""
        ends = acting.stops or (acting.pauses and not self._paused(acting))
        if not ends:
            return None
        self._stopped = True
        return AlarmError(acting.ended(self.step, self._run.directory.path))

    def _watched(self, step: int, metrics: dict[str, float]) -> Acting | None:
        """Holds a step against the rules; returns what all processes have to do.

        Args:
            step: number of the step.
            metrics: of the step, to which the number of raised rules is added.
        """
        acting = list[Acting]()
        if (guard := self._guard) is not None:
            alarms = guard.look(step, metrics)
            metrics[RAISED] = float(len(guard.watch.raised))
            acting = [acting_of(alarms[0])] if alarms else []
        told = processes.exchange("alarms", acting)[0]
        return Acting(*told[0]) if told and told[0][1] != "warn" else None

    def _evidence(self, acting: Acting) -> None:
        """Keeps the checkpoint and the batch of a step with an alarm."""
        self._run.checkpoints.wait()
        if self._guard is not None:
            checkpoint = self._run.checkpoints.directory / str(self.step)
            self._guard.keep(acting, self.step, checkpoint, self._training.keep)

    def _paused(self, acting: Acting) -> bool:
        """Waits for a person, `watch.pause_s` at most; whether the run continues."""
        if self._guard is not None:
            self._guard.begin_pause(acting, self.step)
        until = time.monotonic() + self._run.config.watch.pause_s
        while True:
            waits = self._guard is None or self._guard.waits()
            over = self._should_stop() or time.monotonic() >= until
            told = processes.exchange("pause", [waits, over])
            if any(over for _, over in told):
                if self._guard is not None:
                    self._guard.end_pause()
                return False
            if not told[0][0]:
                return True
            time.sleep(PAUSE_POLL_S)

    def _measured(self, step: int) -> dict[str, float]:
        """Evaluates, and says so."""
        if count := self._training.held_out_size:
            self._progress.phase(f"evaluating {count:,} held-out examples")
        return self._training.measure(step)

    def _judged(self, step: int, found: Mapping[str, float]) -> bool:
        """Whether an evaluation is the best; says so if the run ends with it."""
        run, best = self._run, self._run.best
        gained = best.judge(step, found)
        if best.ended and step < run.config.steps:
            self._stopped = True
            told = f"the run {best.told_end(step, run.config.steps)}"
            run.console.print(told, markup=False, highlight=False)
        return gained

    def _save(
        self,
        step: int,
        waits: Mapping[str, Any],
        logged: Mapping[str, int],
        *,
        whole: bool,
    ) -> None:
        """Begins to save a checkpoint, perhaps with an evaluation that waits."""
        training = self._training
        meta = training.meta(due=bool(waits)) | dict(waits) | {LOGS: logged}
        meta |= self._run.best.meta()
        self._run.checkpoints.save(
            step, training.snapshot(), training.indices, meta, whole=whole
        )

    def _keep(self, gained: bool) -> None:
        """Saves the best model if it is the present one, and its record."""
        if not gained:
            self._run.best.note()
            return
        # A checkpoint is behind every best model but the one before the first step.
        self._run.checkpoints.wait()
        self._run.best.save(self._run.model, self._training.snapshot().params)

    def _event(
        self, kind: Literal["start", "step", "evaluation"], metrics: Mapping[str, float]
    ) -> Event:
        config = self._run.config
        return Event(kind, self.step, config.steps, metrics, self._run.directory.path)

    def _tell(self, *events: Event) -> CallbackError | None:
        """Calls the callbacks, in process 0; all processes stop if one raises."""
        names, failed = self._run.config.callbacks, None
        if not names:
            return None
        try:
            for event in events if not processes.index() else ():
                tell(names, event)
        except CallbackError as error:
            failed = error
        told = processes.exchange("callbacks", failed is not None)
        self._stopped = self._stopped or any(told)
        return failed

    def _counts(self) -> dict[str, int]:
        """Rows in the logs."""
        return self._rows.counts() | self._training.counts()

    def _told(self, error: DivergenceError) -> DivergenceError:
        """The error of a step that diverged, with the steps that have checkpoints."""
        checkpoints = self._run.checkpoints
        checkpoints.wait()
        steps = ", ".join(map(str, checkpoints.steps()))
        told = "There is no checkpoint yet"
        if steps:
            told = f"Checkpoints in {checkpoints.directory} are of the steps {steps}"
        return DivergenceError(f"{error}. {told}")
