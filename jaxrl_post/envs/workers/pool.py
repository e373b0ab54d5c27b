"""A pool of workers that run an environment, with deadlines and restarts."""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

from jaxrl_post.envs.env import (
    AgentEnvironment,
    Environment,
    Message,
    StatefulEnvironment,
    StatelessEnvironment,
    Task,
)
from jaxrl_post.envs.workers.interface import (
    Judgement,
    MakeWorker,
    OutcomeKind,
    WorkerLostError,
    WorkerSettings,
    WorkerStartError,
)
from jaxrl_post.envs.workers.process import WorkerProcess
from jaxrl_post.envs.workers.sessions import turns_of
from jaxrl_post.envs.workers.wire import Ask
from jaxrl_post.frames import LARGEST_FRAME

__all__ = ["Judgement", "WorkerPool", "WorkerStartError"]

logger = logging.getLogger(__name__)

_POLL_S = 0.1
# Before another try to start a worker for which there was no machine.
_LOST_WAIT_S = 1.0
_KILL_WAIT_S = 10.0
_CRASH_WINDOW_S = 60.0
# Workers that one request may lose, with their machines, before it fails.
_MOST_LOSSES = 3


class WorkerPool:
    """Workers that answer the policy's turns, one turn per worker at a time.

    `submit` does not raise if a reward function fails: the future resolves to an
    `Judgement` with the error. In asyncio: `asyncio.wrap_future(pool.submit(...))`.
    A worker that hangs or dies is replaced. After too many crashes no worker is
    replaced for a while; once no worker is left, requests fail at once with the reason.

    All turns of an episode of a `StatefulEnvironment` go to the worker that answered
    the first turn. If that worker dies, the turn that it was answering fails. The other
    episodes with a session in it continue in another worker, which replays their
    earlier turns.

    If a worker is lost with its machine, the environment is not the cause. Then another
    worker answers the turn too, unless the turn has lost three workers. An agent is not
    run again: what it was served is recorded, and would be recorded twice.

    A step runs in the main thread of its worker. Each worker is in a process session of
    its own, so Ctrl-C in the terminal interrupts only the caller. The last 8 KiB of a
    worker's output are kept for error messages. Workers end when the pool is closed or
    the caller dies.

    Args:
        environment: the environment to run; must pickle, and its class must be
            importable with the caller's `sys.path`, so not be defined in `__main__`.
        num_workers: number of processes, at least 1.
        deadline_s: maximum seconds of one step, from when a worker starts it.
        start_timeout_s: maximum seconds that a worker takes to import and prepare.
        memory_limit_gib: limit on a worker's address space, over which a step raises
            MemoryError; None for no limit.
        max_crashes_per_minute: number of crashes of the pool's workers within a minute,
            timeouts not counted, after which no worker is replaced in that minute.
        make_worker: makes each worker; by default a process of this machine. `hosts`
            has the others.

    Raises:
        ValueError: if an argument is out of range, or the environment does not pickle
            or has neither `step` nor `open`.
        WorkerStartError: if a worker does not start; with the worker's output.
        WorkerLostError: if no machine has room for a worker.

    >>> from jaxrl_post.envs.tasks.arithmetic import Arithmetic
    >>> environment = Arithmetic()
    >>> task = environment.tasks("train")[0]
    >>> conversation = (*task.messages, Message("assistant", task.reference))
    >>> with WorkerPool(environment) as pool:
    ...     outcome = pool.submit(task, conversation).result(timeout=60)
    >>> outcome.kind, outcome.step.reward
    ('ok', 1.0)
    """

    def __init__(
        self,
        environment: Environment,
        num_workers: int = 1,
        *,
        deadline_s: float = 10.0,
        start_timeout_s: float = 60.0,
        memory_limit_gib: float | None = None,
        max_crashes_per_minute: int = 30,
        make_worker: MakeWorker = WorkerProcess,
    ) -> None:
        for argument, value in (
            ("num_workers", num_workers),
            ("deadline_s", deadline_s),
            ("start_timeout_s", start_timeout_s),
            ("memory_limit_gib", memory_limit_gib),
            ("max_crashes_per_minute", max_crashes_per_minute),
        ):
            if value is not None and not value > 0:
                raise ValueError(f"{argument} must be positive, got {value}")
        kinds = StatelessEnvironment | StatefulEnvironment | AgentEnvironment
        if not isinstance(environment, kinds):
            raise ValueError(
                f"environment {environment.name!r} must have `step` (stateless), "
                "`open` (sessions) or `run` (agents), got none of them"
            )
        self._stateful = isinstance(environment, StatefulEnvironment)
        self._most_losses = _MOST_LOSSES
        if isinstance(environment, AgentEnvironment):
            self._most_losses = 1
        memory_bytes = None
        if memory_limit_gib is not None:
            memory_bytes = int(memory_limit_gib * 2**30)
        settings = WorkerSettings(
            environment=_pickled(f"environment {environment.name!r}", environment),
            deadline_s=deadline_s,
            start_timeout_s=start_timeout_s,
            memory_bytes=memory_bytes,
        )
        self._start_timeout_s = start_timeout_s
        self._jobs = _Jobs(num_workers)
        self._crashes = _CrashLog(max_crashes_per_minute)
        self._closing = threading.Event()
        self._workers = [make_worker(settings) for _ in range(num_workers)]
        self._threads: list[threading.Thread] = []
        self._start_all()

    def submit(
        self,
        task: Task,
        conversation: tuple[Message, ...],
        session: Hashable = None,
    ) -> Future[Judgement]:
        """Queues the turn that ends a conversation for an answer. Thread-safe.

        Args:
            task: the task that the conversation began with.
            conversation: the messages so far; ends with the assistant's turn.
            session: identifies the episode, e.g. (prompt id, sample index); required by
                stateful environments. One turn of a session at a time.

        Returns:
            A future of the outcome; it can be cancelled until a worker starts on it.

        Raises:
            ValueError: if the task does not pickle, or `session` is None for a stateful
                environment.
            RuntimeError: if the pool is closed.
        """
        calls = 1
        if self._stateful:
            if session is None:
                raise ValueError(
                    "session must tell the episode, as the environment keeps state; "
                    "got None"
                )
            # The worker may have to open the session and replay the earlier turns.
            calls = 1 + len(turns_of(task, conversation))
        else:
            session = None
        request = _pickled(f"task {task.id}", Ask(session, task, conversation))
        job = _Job(request, Future(), session, calls)
        if not self._jobs.put(job):
            raise RuntimeError("the worker pool is closed: submit before close()")
        return job.future

    def end(self, session: Hashable) -> None:
        """Closes the session of an episode, if it has one. Does not wait."""
        if self._stateful and self._jobs.knows(session):
            task = Task(0, (), "")
            request = _pickled("session", Ask(session, task, None))
            self._jobs.put(_Job(request, Future(), session, 1, ends=True))

    def close(self, *, deadline_s: float = 5.0) -> None:
        """Cancels queued requests, waits for running steps, ends the processes.

        Args:
            deadline_s: seconds to wait for running steps; workers with longer steps are
                killed, and the outcome of these steps is "crashed".
        """
        self._closing.set()
        self._jobs.close()
        self._join(deadline_s)
        for worker, thread in zip(self._workers, self._threads, strict=True):
            if thread.is_alive():
                worker.kill()
        self._join(_KILL_WAIT_S)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start_all(self) -> None:
        starts: list[Future[None]] = [Future() for _ in self._workers]
        # Daemon threads: a caller that forgot to close the pool can still exit.
        self._threads = [
            threading.Thread(target=self._serve, args=pair, daemon=True)
            for pair in enumerate(starts)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for worker, start in zip(self._workers, starts, strict=True):
                # `start` enforces the deadline; this one is a backup.
                start.result(timeout=worker.start_limit_s + _KILL_WAIT_S)
        except BaseException:
            self.close(deadline_s=0.0)
            raise

    def _join(self, timeout_s: float) -> None:
        expires = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, expires - time.monotonic()))

    def _serve(self, index: int, started: Future[None]) -> None:
        """Runs in the thread of one worker, the only thread that starts or asks it."""
        worker = self._workers[index]
        try:
            worker.start()
        except WorkerStartError as error:
            worker.end(grace_s=0.0)
            started.set_exception(error)
            return
        started.set_result(None)
        while (job := self._next_job(index)) is not None:
            if not job.begin():
                continue
            try:
                outcome = worker.ask(job.request, job.calls)
            except WorkerLostError as error:
                self._jobs.leave(index)
                self._ask_another(job, error)
                continue
            # The boundary of the thread: the caller waits for the future in any case.
            except Exception as error:
                worker.end(grace_s=0.0)
                self._jobs.leave(index)
                job.future.set_exception(error)
                continue
            if outcome.kind == "crashed" and outcome.error is not None:
                self._crashes.record(outcome.error)
            if not worker.alive:
                self._jobs.leave(index)
            if job.ends and outcome.error is not None:
                logger.warning("a session did not close: %s", outcome.error)
            job.future.set_result(outcome)
        worker.end()

    def _ask_another(self, job: _Job, error: WorkerLostError) -> None:
        """Queues a job again whose worker was lost."""
        logger.warning("a worker was lost: %s", error)
        job.losses += 1
        if job.losses == self._most_losses:
            workers = f"{job.losses} workers, the last one so"
            lost = "its worker" if job.losses == 1 else workers
            job.fail(f"it lost {lost}: {error}", "unreachable")
        elif not self._jobs.put(job):
            job.fail(f"the worker pool was closed, and the worker was lost: {error}")

    def _next_job(self, index: int) -> _Job | None:
        """Restarts the worker if it is dead, then waits for a job; None at the end."""
        worker = self._workers[index]
        died = time.monotonic()
        while not worker.alive and not self._closing.is_set():
            if self._crashes.may_restart():
                try:
                    worker.start()
                except WorkerLostError as error:
                    self._without_room(error, time.monotonic() - died)
                except WorkerStartError as error:
                    self._crashes.record(str(error))
            elif self._any_alive():
                # Other workers can run the jobs.
                self._closing.wait(_POLL_S)
            else:
                self._fail_one_job()
        # No deadline: an idle worker waits for a job, or for the None from `close`.
        return None if self._closing.is_set() else self._jobs.take(index)

    def _without_room(self, error: WorkerLostError, dead_s: float) -> None:
        """Fails the waiting jobs if no worker is left and none could be placed."""
        if not self._any_alive() and dead_s >= self._start_timeout_s:
            while (job := self._jobs.unassigned()) is not None:
                if job.begin():
                    job.fail(f"no worker is left: {error}", "unreachable")
        self._closing.wait(_LOST_WAIT_S)

    def _any_alive(self) -> bool:
        return any(worker.alive for worker in self._workers)

    def _fail_one_job(self) -> None:
        job = self._jobs.unassigned()
        if job is None:
            self._closing.wait(_POLL_S)
        elif job.begin():
            job.fail(self._crashes.describe())


@dataclass(eq=False)
class _Job:
    request: bytes
    future: Future[Judgement]
    session: Hashable
    # Maximum number of calls of the environment, each with its own deadline.
    calls: int
    ends: bool = False
    # Workers that were lost while they answered.
    losses: int = 0

    def begin(self) -> bool:
        """Whether a worker may answer: False if the caller has cancelled the future."""
        # A future is set running only once; after a loss it is running already.
        return self.losses > 0 or self.future.set_running_or_notify_cancel()

    def fail(self, error: str, kind: OutcomeKind = "crashed") -> None:
        """Resolves the future of a job that was begun."""
        self.future.set_result(Judgement(None, error, kind, 0.0))

    def drop(self, reason: str) -> None:
        """Cancels the future; if the job was begun, fails it."""
        if not self.future.cancel():
            self.fail(reason)


class _Jobs:
    """Assigns jobs: a session's jobs to its worker, other jobs to any idle worker.

    Args:
        workers: number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._backlog: deque[_Job] = deque()
        self._inboxes: list[queue.SimpleQueue[_Job | None]] = [
            queue.SimpleQueue() for _ in range(workers)
        ]
        self._idle: set[int] = set()
        # The worker of each open session.
        self._homes: dict[Hashable, int] = {}

    def knows(self, session: Hashable) -> bool:
        """Whether a worker has been assigned to a session."""
        return session in self._homes

    def put(self, job: _Job) -> bool:
        """Queues a job; returns False after `close`."""
        with self._lock:
            if self._closed:
                return False
            self._assign(job)
        return True

    def take(self, worker: int) -> _Job | None:
        """Waits for the next job of a worker; None after `close`."""
        inbox = self._inboxes[worker]
        with self._lock:
            if inbox.empty() and not self._closed:
                if self._backlog:
                    self._give(self._backlog.popleft(), worker)
                else:
                    self._idle.add(worker)
        return inbox.get()

    def unassigned(self) -> _Job | None:
        """Removes and returns a job without a worker; None if there is none."""
        with self._lock:
            return self._backlog.popleft() if self._backlog else None

    def leave(self, worker: int) -> None:
        """Drops the sessions of a worker that died, and assigns its jobs again."""
        with self._lock:
            self._idle.discard(worker)
            self._homes = {k: v for k, v in self._homes.items() if v != worker}
            for job in self._drained(worker):
                self._assign(job)

    def close(self) -> None:
        """Cancels waiting jobs; the next `take` of each worker returns None."""
        with self._lock:
            self._closed = True
            waiting = [*self._backlog]
            self._backlog.clear()
            for worker, inbox in enumerate(self._inboxes):
                waiting += self._drained(worker)
                inbox.put(None)
        for job in waiting:
            job.drop("the worker pool was closed")

    def _assign(self, job: _Job) -> None:
        home = self._homes.get(job.session)
        if home is not None:
            self._give(job, home)
        elif job.ends:
            job.drop("the session died with its worker")
        elif self._idle:
            self._give(job, min(self._idle))
        else:
            self._backlog.append(job)

    def _give(self, job: _Job, worker: int) -> None:
        self._idle.discard(worker)
        if job.ends:
            self._homes.pop(job.session, None)
        elif job.session is not None:
            self._homes[job.session] = worker
        self._inboxes[worker].put(job)

    def _drained(self, worker: int) -> list[_Job]:
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._inboxes[worker].get_nowait()) is not None:
                    found.append(job)
        return found


class _CrashLog:
    """Counts the crashes of the last minute, to stop endless restarts."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: deque[float] = deque()
        self._last_error = ""
        self._lock = threading.Lock()

    def record(self, error: str) -> None:
        """Records a crash that happened now."""
        with self._lock:
            self._times.append(time.monotonic())
            self._last_error = error

    def may_restart(self) -> bool:
        """Whether the last minute had fewer crashes than the limit."""
        with self._lock:
            while self._times and self._times[0] < time.monotonic() - _CRASH_WINDOW_S:
                self._times.popleft()
            return len(self._times) < self._limit

    def describe(self) -> str:
        """The error message while no worker is restarted."""
        with self._lock:
            return (
                f"no worker process is left: {len(self._times)} died within a minute "
                f"(max_crashes_per_minute={self._limit}), and none is started before "
                f"that minute is over. The last error: {self._last_error}"
            )


def _pickled(name: str, value: object) -> bytes:
    try:
        pickled = pickle.dumps(value)
    # pickle raises one of these three, depending on the object.
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{name} must pickle, to be sent to a worker process, got: {error}. Use "
            "functions and classes from the top level of a module"
        ) from error
    if len(pickled) > LARGEST_FRAME:
        raise ValueError(
            f"{name} must pickle to at most {LARGEST_FRAME} bytes, got {len(pickled)}"
        )
    return pickled
