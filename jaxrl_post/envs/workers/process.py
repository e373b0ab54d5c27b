"""One worker process, seen from the parent: start it, ask it, end it.

Workers are new interpreters, not forks: a fork of a process with jax's threads may
deadlock. multiprocessing's spawn would import the caller's `__main__`, and so jax, in
each worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, Literal

from jaxrl_post.envs.env import Step
from jaxrl_post.envs.workers.wire import Reply, decode_step, receive_reply, send_frame

__all__ = ["Outcome", "WorkerProcess", "WorkerSettings", "WorkerStartError"]

type OutcomeKind = Literal["ok", "raised", "timeout", "invalid", "crashed", "ended"]

# The worker gets this process's sys.path, so that it can import the same modules.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from jaxrl_post.envs.workers.worker import main; main()"
)
# A worker ends itself at its deadline and writes where it hung. If it cannot, because
# it is stopped or gets no CPU time, the parent kills it so many seconds later.
_SELF_END_GRACE_S = 2.0
_EXIT_GRACE_S = 1.0
_KILL_WAIT_S = 5.0
_LAST_OUTPUT_WAIT_S = 1.0
_KEPT_OUTPUT_BYTES = 8192
_SHOWN_LINES = 12


class WorkerStartError(RuntimeError):
    """A worker process did not become ready; the message holds its output."""


@dataclass(frozen=True)
class Outcome:
    """The result of asking an environment for the answer to one turn.

    Args:
        step: the step if `kind` is "ok", else None.
        error: the error message; None if `kind` is "ok" or "ended".
        kind: "ok"; "raised" (step raised); "invalid" (step returned no `Step`, or a
            number that is not finite); "timeout" (the deadline passed); "crashed" (the
            process died, or could not be started again); "ended" (a session was closed,
            no turn was answered).
        seconds: time from sending the request to the worker until the result.

    >>> Outcome(Step(1.0, done=True), None, "ok", 0.01).kind
    'ok'
    """

    step: Step | None
    error: str | None
    kind: OutcomeKind
    seconds: float


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of a worker process.

    Args:
        environment: the pickled environment.
        deadline_s: maximum seconds of one step.
        start_timeout_s: maximum seconds of importing and preparing.
        memory_bytes: limit on the address space, or None.
    """

    environment: bytes
    deadline_s: float
    start_timeout_s: float
    memory_bytes: int | None


class WorkerProcess:
    """A worker process, its socket and the end of its output.

    Not thread-safe, except `kill`, which any thread may call.

    Args:
        settings: the settings of each process that `start` starts.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._output: _Tail | None = None
        self._killed = False
        self._asked = 0
        # Held while the process is started and waited for: after the wait, its process
        # id may belong to another program, which `kill` must not hit.
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process can be asked; may be True after an unnoticed death."""
        return self._connection is not None

    def start(self) -> None:
        """Starts a process and waits until it is ready.

        Raises:
            WorkerStartError: if it does not become ready in time; with its output.
        """
        settings = self._settings
        preamble = {
            "deadline_s": settings.deadline_s,
            "start_timeout_s": settings.start_timeout_s,
            "memory_bytes": settings.memory_bytes,
        }
        connection = self._launch()
        expires = time.monotonic() + settings.start_timeout_s + _SELF_END_GRACE_S
        try:
            send_frame(connection, json.dumps(preamble).encode(), expires=expires)
            send_frame(connection, settings.environment, expires=expires)
            reply = receive_reply(connection, expires=expires)
        except TimeoutError:
            reply = {"error": f"not ready after {settings.start_timeout_s:g} s"}
        except (EOFError, OSError, ValueError) as error:
            reply = {"error": f"it ended before it was ready ({error})"}
        if reply.get("kind") != "ready":
            connection.close()
            self._reap()
            raise WorkerStartError(
                f"a worker process did not start: {reply.get('error')}"
                f"{_main_hint(str(reply))}{self._shown_output()}"
            )
        self._connection, self._asked = connection, 0

    def ask(self, request: bytes, calls: int = 1) -> Outcome:
        """Sends a request and waits for the answer.

        After the outcomes "timeout" and "crashed" the process is dead.

        Args:
            request: a pickled `Ask`.
            calls: maximum calls of the environment, each with its own deadline.

        Returns:
            The outcome.
        """
        assert self._connection is not None, "start() comes before ask()"
        began = time.monotonic()
        allowed_s = self._settings.deadline_s * calls
        expires = began + allowed_s + _SELF_END_GRACE_S
        self._asked += 1
        try:
            send_frame(self._connection, request, expires=expires)
            reply = receive_reply(self._connection, expires=expires)
            if reply.get("number") != self._asked:
                raise ValueError(
                    f"reply {reply.get('number')} came to request {self._asked}"
                )
            return _outcome(reply, time.monotonic() - began)
        except (EOFError, OSError):
            return self._autopsy(began, allowed_s)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.end(grace_s=0.0)
            text = f"the worker process sent what is no reply ({error})"
            return Outcome(None, text, "crashed", time.monotonic() - began)

    def end(self, *, grace_s: float = _EXIT_GRACE_S) -> None:
        """Ends the process and all processes that it started in its process session.

        Args:
            grace_s: seconds to wait for a normal exit, which runs exit handlers.
        """
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
                # The stream ends when the process exits. Unlike `wait`, reading it
                # keeps the process id reserved for the kill below.
                expires = time.monotonic() + grace_s
                while (left := expires - time.monotonic()) > 0:
                    self._connection.settimeout(left)
                    if not self._connection.recv(2**16):
                        break
            self._connection.close()
            self._connection = None
        self._reap()

    def kill(self) -> None:
        """Kills the process and prevents another start. Thread-safe."""
        with self._lock:
            self._killed = True
            self._kill_session()

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        # -P: ignore a json.py in the working directory. -u: a crash loses no output.
        command = [sys.executable, "-P", "-u", "-c", _BOOTSTRAP, path]
        try:
            with self._lock:
                if self._killed:
                    raise WorkerStartError("the worker pool is closed")
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    start_new_session=True,
                )
        except (OSError, WorkerStartError) as error:
            ours.close()
            raise WorkerStartError(
                f"a worker process did not start: {error}"
            ) from error
        finally:
            theirs.close()
        assert self._process.stdout is not None, "it was asked for"
        self._output = _Tail(self._process.stdout)
        return ours

    def _autopsy(self, began: float, allowed_s: float) -> Outcome:
        """Finds out why a process did not reply: "timeout" or "crashed"."""
        seconds = time.monotonic() - began
        self.end(grace_s=0.0)
        _, marker, stack = self._written().rpartition("Timeout (")
        # With several calls, the watchdog of one call writes its marker before their
        # total time is over. A process that is stopped writes no marker.
        if seconds < self._settings.deadline_s or not (marker or seconds >= allowed_s):
            text = f"the worker process {self._exit_reason()}{self._shown_output()}"
            return Outcome(None, text, "crashed", seconds)
        text = f"step took longer than its deadline of {self._settings.deadline_s:g} s"
        if marker:
            lines = stack.splitlines()[2 : 2 + _SHOWN_LINES]
            text += "; it was in (innermost first):\n" + "\n".join(lines)
        return Outcome(None, text, "timeout", seconds)

    def _reap(self) -> None:
        with self._lock:
            self._kill_session()
            if self._process is not None:
                # A process that survives SIGKILL for so long is stuck in the kernel.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=_KILL_WAIT_S)

    def _kill_session(self) -> None:
        if self._process is not None and self._process.returncode is None:
            # A group has its leader's id. macOS raises PermissionError for a zombie.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _exit_reason(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "vanished"
        if code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def _written(self) -> str:
        return self._output.text() if self._output is not None else ""

    def _shown_output(self) -> str:
        lines = self._written().strip().splitlines()[-_SHOWN_LINES:]
        return "; the last that it wrote:\n" + "\n".join(lines) if lines else ""


class _Tail:
    """Keeps the end of a process's output; reads all of it, so the pipe never fills."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._kept = b""
        self._thread = threading.Thread(
            target=self._follow, args=(stream,), daemon=True
        )
        self._thread.start()

    def text(self) -> str:
        """The last 8 KiB of the output; call it after the process has ended."""
        # A child process outside the session may hold the pipe open: limit the wait.
        self._thread.join(_LAST_OUTPUT_WAIT_S)
        return self._kept.decode("utf-8", errors="replace")

    def _follow(self, stream: IO[bytes]) -> None:
        with stream:
            while chunk := stream.read(4096):
                self._kept = (self._kept + chunk)[-_KEPT_OUTPUT_BYTES:]


def _outcome(reply: Reply, seconds: float) -> Outcome:
    match reply["kind"]:
        case "ok":
            return Outcome(decode_step(reply["step"]), None, "ok", seconds)
        case "ended":
            return Outcome(None, None, "ended", seconds)
        case "raised" | "invalid" as kind:
            return Outcome(None, str(reply["error"]), kind, seconds)
        case kind:
            raise ValueError(f"unknown kind {kind!r}")


def _main_hint(error: str) -> str:
    if "__main__" not in error:
        return ""
    return (
        "\nA worker does not have the caller's __main__: define the environment, and "
        "the functions that it holds, in a module."
    )
