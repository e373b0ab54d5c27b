"""Rewards from worker processes: each answer has a deadline, and none can end the run.

Workers are fresh interpreters, not forks: a fork of a process that runs jax's threads may
deadlock, and multiprocessing's spawn would import the caller's `__main__`, and jax with
it, once a worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from jaxrl_post.envs.env import Environment, Message, Step, Task
from jaxrl_post.envs.wire import (
    Reply,
    decode_step,
    receive_reply,
    send_frame,
)

__all__ = ["Outcome", "WorkerPool", "WorkerStartError"]

type Kind = Literal["ok", "raised", "timeout", "invalid", "crashed"]

# The worker sees the modules that this process sees; -P keeps its own "" out of the way.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from jaxrl_post.envs.worker import main; main()"
)
# A worker ends itself at the deadline and says where it hung; if it cannot (stopped, or
# starved of CPU), it is killed so many seconds later.
_SELF_END_GRACE_S = 2.0
_EXIT_GRACE_S = 1.0
_KILL_WAIT_S = 5.0
_POLL_S = 0.1
_STDERR_TAIL_BYTES = 8192
_SHOWN_LINES = 12


class WorkerStartError(RuntimeError):
    """A worker process did not become ready; the message holds what it wrote."""


@dataclass(frozen=True)
class Outcome:
    """What became of one call of `Environment.step`.

    Args:
        step: the step, if `kind` is "ok".
        error: what went wrong, if it is not.
        kind: "ok"; "raised" (step raised), "invalid" (what it returned is no step, or
            has a number that is not finite), "timeout" (the deadline passed), "crashed"
            (the process died, or could not be started again).
        seconds: how long the worker had the request.

    >>> Outcome(Step(1.0, done=True), None, "ok", 0.01).step.reward
    1.0
    """

    step: Step | None
    error: str | None
    kind: Kind
    seconds: float


class WorkerPool:
    """Processes that run `environment.step`, each on one request at a time.

    `submit` never raises for a bad reward function: the future resolves to an `Outcome`
    that says what happened. In asyncio, `await asyncio.wrap_future(pool.submit(...))`.
    A worker that hangs or dies is replaced; one that dies too often is not, for a while,
    and its requests fail at once with the reason.

    A step runs in its worker's main thread, in a session of its own, so that a Ctrl-C in
    the terminal reaches the caller alone. Whatever it prints is kept, the last 8 KiB of
    it, for error messages. Workers end when the pool is closed or the caller dies.

    Args:
        environment: what to run; must pickle, and be importable by the worker, which has
            the same `sys.path`. A class defined in `__main__` is not.
        num_workers: number of processes, at least 1.
        deadline_s: seconds that one step may take, from when a worker starts on it.
        start_timeout_s: seconds that a worker may take to import and prepare.
        memory_limit_gib: limit on a worker's address space; a step that exceeds it
            raises MemoryError. None sets no limit.
        max_crashes_per_minute: once so many workers of the pool have died in a minute
            (timeouts do not count), none is restarted before that minute is over.

    Raises:
        ValueError: if an argument is out of range, or the environment does not pickle.
        WorkerStartError: if a worker does not start, with what it wrote.

    >>> from jaxrl_post.envs.arithmetic import Arithmetic
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
    ) -> None:
        _require_positive("num_workers", num_workers)
        _require_positive("deadline_s", deadline_s)
        _require_positive("start_timeout_s", start_timeout_s)
        _require_positive("max_crashes_per_minute", max_crashes_per_minute)
        memory_bytes = None
        if memory_limit_gib is not None:
            _require_positive("memory_limit_gib", memory_limit_gib)
            memory_bytes = int(memory_limit_gib * 2**30)
        launch = _Launch(
            environment=_pickled(f"environment {environment.name!r}", environment),
            deadline_s=deadline_s,
            start_timeout_s=start_timeout_s,
            memory_bytes=memory_bytes,
        )
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._crashes = _CrashLog(max_crashes_per_minute)
        self._closing = threading.Event()
        self._submitting = threading.Lock()
        self._workers = [_Worker(launch) for _ in range(num_workers)]
        starts: list[Future[None]] = [Future() for _ in self._workers]
        self._threads = [
            threading.Thread(
                target=self._serve, args=pair, name=f"env-worker-{i}", daemon=True
            )
            for i, pair in enumerate(zip(self._workers, starts, strict=True))
        ]
        for thread in self._threads:
            thread.start()
        try:
            for start in starts:
                # The thread keeps the deadline; this one is there in case it cannot.
                start.result(timeout=start_timeout_s + 2 * _KILL_WAIT_S)
        except BaseException:
            self.close(deadline_s=0.0)
            raise

    def submit(
        self, task: Task, conversation: tuple[Message, ...]
    ) -> Future[Outcome]:
        """Queues one call of `environment.step`.

        Args:
            task: the task that the conversation began with.
            conversation: the messages so far; ends with the assistant's turn.

        Returns:
            A future that resolves to the outcome; it can be cancelled until a worker
            starts on it.

        Raises:
            ValueError: if the task does not pickle.
            RuntimeError: if the pool is closed.
        """
        request = _pickled(f"task {task.id}", (task, conversation))
        job = _Job(request, Future())
        # With the lock, no job can be queued behind the ones that `close` cancels.
        with self._submitting:
            if self._closing.is_set():
                raise RuntimeError("the worker pool is closed")
            self._jobs.put(job)
        return job.future

    def close(self, *, deadline_s: float = 5.0) -> None:
        """Cancels what is queued, waits for what is running, ends the processes.

        Args:
            deadline_s: seconds to wait for running steps; then they are killed, and
                their outcome is "crashed".
        """
        with self._submitting:
            self._closing.set()
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        expires = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, expires - time.monotonic()))
        for worker, thread in zip(self._workers, self._threads, strict=True):
            if thread.is_alive():
                worker.kill()
        expires = time.monotonic() + _KILL_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, expires - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self, worker: _Worker, started: Future[None]) -> None:
        """The thread of one worker: the only one that starts, asks and ends it."""
        try:
            worker.start()
        except WorkerStartError as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while (job := self._next_job(worker)) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            outcome = worker.ask(job.request)
            if outcome.kind == "crashed":
                self._crashes.record(outcome.error or "")
            job.future.set_result(outcome)
        worker.end(grace_s=_EXIT_GRACE_S)

    def _next_job(self, worker: _Worker) -> _Job | None:
        """The next job for a worker that lives, reviving it first; None at the end."""
        while not worker.alive and not self._closing.is_set():
            if self._crashes.may_restart():
                try:
                    worker.start()
                except WorkerStartError as error:
                    self._crashes.record(str(error))
            elif any(other.alive for other in self._workers):
                self._closing.wait(_POLL_S)
            else:
                self._fail_one_job()
        return None if self._closing.is_set() else self._jobs.get()

    def _fail_one_job(self) -> None:
        try:
            job = self._jobs.get(timeout=_POLL_S)
        except queue.Empty:
            return
        if job is not None and job.future.set_running_or_notify_cancel():
            error = self._crashes.describe()
            job.future.set_result(Outcome(None, error, "crashed", 0.0))


@dataclass(frozen=True)
class _Job:
    request: bytes
    future: Future[Outcome]


@dataclass(frozen=True)
class _Launch:
    environment: bytes
    deadline_s: float
    start_timeout_s: float
    memory_bytes: int | None

    @property
    def settings(self) -> bytes:
        return json.dumps(
            {
                "deadline_s": self.deadline_s,
                "start_timeout_s": self.start_timeout_s,
                "memory_bytes": self.memory_bytes,
            }
        ).encode()


class _Worker:
    """One process at a time, the socket to it, and the end of what it wrote."""

    def __init__(self, launch: _Launch) -> None:
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._output = _Tail()
        # Guards the process's id against a kill from the closing thread after the
        # process was waited for, when the id may already be another's.
        self._lock = threading.Lock()
        self._killed = False
        self.alive = False
