"""One worker process of this machine: start it, ask it, end it."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from pathlib import Path

from jaxrl_post.envs import scratch
from jaxrl_post.envs.sandbox.keeper import remove_directory
from jaxrl_post.envs.workers.child import Child
from jaxrl_post.envs.workers.interface import (
    Judgement,
    WorkerSettings,
    WorkerStartError,
)
from jaxrl_post.envs.workers.wire import Reply, decode_step, receive_reply
from jaxrl_post.frames import send_frame

__all__ = ["WorkerProcess"]

logger = logging.getLogger(__name__)

# A worker ends itself at its deadline and writes where it hung. If it cannot, because
# it is stopped or gets no CPU time, the parent kills it so many seconds later.
_SELF_END_GRACE_S = 2.0
_EXIT_GRACE_S = 1.0
_SHOWN_FRAMES = 12
# Seconds for the processes of a killed worker's sandbox to end, and the time between
# two looks.
_LEFT_BEHIND_S = 5.0
_LOOK_S = 0.05


class WorkerProcess:
    """A worker process, its socket and the end of its output: a `Worker`.

    Args:
        settings: the settings of each process that `start` starts.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._child: Child | None = None
        # Folder in which the process makes directories, such as a sandbox's.
        self._scratch = scratch.name()
        self._ready = False
        self._killed = False
        self._asked = 0
        # Held while a process is started, so that `kill` does not miss it.
        self._lock = threading.Lock()

    @property
    def start_limit_s(self) -> float:
        """Maximum seconds that `start` takes."""
        return self._settings.start_timeout_s + _SELF_END_GRACE_S

    @property
    def alive(self) -> bool:
        """Whether the process can be asked; may be True after an unnoticed death."""
        return self._ready

    def start(self) -> None:
        """Starts a process and waits until it is ready.

        Raises:
            WorkerStartError: if it does not become ready in time; with its output.
        """
        settings = self._settings
        child = self._launched()
        expires = time.monotonic() + self.start_limit_s
        try:
            limits = {**settings.limits, "scratch": str(self._scratch)}
            preface = json.dumps(limits).encode()
            send_frame(child.connection, preface, expires=expires)
            send_frame(child.connection, settings.environment, expires=expires)
            reply = receive_reply(child.connection, expires=expires)
        except TimeoutError:
            reply = {"error": f"not ready after {settings.start_timeout_s:g} s"}
        except (EOFError, OSError, ValueError) as error:
            reply = {"error": f"it ended before it was ready ({error})"}
        if reply.get("kind") != "ready":
            self._reap(child)
            raise WorkerStartError(
                f"a worker process did not start: {reply.get('error')}"
                f"{_main_hint(str(reply))}{child.shown_output()}"
            )
        self._ready, self._asked = True, 0

    def ask(self, request: bytes, calls: int = 1) -> Judgement:
        """Sends a request and waits for the answer.

        After the outcomes "timeout" and "crashed" the process is dead.

        Args:
            request: a pickled `Ask`.
            calls: maximum calls of the environment, each with its own deadline.

        Returns:
            The outcome.
        """
        assert self._child is not None, "start() comes before ask()"
        assert self._ready, "start() comes before ask()"
        connection = self._child.connection
        began = time.monotonic()
        allowed_s = self._settings.deadline_s * calls
        expires = began + allowed_s + _SELF_END_GRACE_S
        self._asked += 1
        try:
            send_frame(connection, request, expires=expires)
            reply = receive_reply(connection, expires=expires)
            if reply.get("number") != self._asked:
                raise ValueError(
                    f"reply {reply.get('number')} came to request {self._asked}"
                )
            return _outcome(reply, time.monotonic() - began)
        except (EOFError, OSError):
            return self._autopsy(self._child, began, allowed_s)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.end(grace_s=0.0)
            text = f"the worker process sent what is no reply ({error})"
            return Judgement(None, text, "crashed", time.monotonic() - began)

    def end(self, *, grace_s: float = _EXIT_GRACE_S) -> None:
        """Ends the process and all processes that it started in its process session.

        Args:
            grace_s: seconds to wait for a normal exit, which runs exit handlers.
        """
        if self._child is None:
            return
        if self._ready:
            self._ready = False
            connection = self._child.connection
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                # The stream ends when the process exits. Unlike `wait`, reading it
                # keeps the process id reserved for the kill below.
                expires = time.monotonic() + grace_s
                while (left := expires - time.monotonic()) > 0:
                    connection.settimeout(left)
                    if not connection.recv(2**16):
                        break
        self._reap(self._child)

    def kill(self) -> None:
        """Kills the process and prevents another start. Thread-safe."""
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()

    def _launched(self) -> Child:
        try:
            with self._lock:
                if self._killed:
                    raise WorkerStartError("the worker pool is closed")
                self._child = Child("jaxrl_post.envs.workers.worker")
                return self._child
        except (OSError, WorkerStartError) as error:
            raise WorkerStartError(
                f"a worker process did not start: {error}"
            ) from error

    def _reap(self, child: Child) -> None:
        child.reap()
        _remove(self._scratch)

    def _autopsy(self, child: Child, began: float, allowed_s: float) -> Judgement:
        """Finds out why a process did not reply: "timeout" or "crashed"."""
        seconds = time.monotonic() - began
        self.end(grace_s=0.0)
        _, marker, stack = child.written().rpartition("Timeout (")
        # With several calls, the watchdog of one call writes its marker before their
        # total time is over. A process that is stopped writes no marker.
        if seconds < self._settings.deadline_s or not (marker or seconds >= allowed_s):
            text = f"the worker process {child.exit_reason()}{child.shown_output()}"
            return Judgement(None, text, "crashed", seconds)
        text = f"step took longer than its deadline of {self._settings.deadline_s:g} s"
        if marker:
            lines = stack.splitlines()[2 : 2 + _SHOWN_FRAMES]
            text += "; it was in (innermost first):\n" + "\n".join(lines)
        return Judgement(None, text, "timeout", seconds)


def _remove(place: Path) -> None:
    """Removes what a process left behind that could not clean up."""
    expires = time.monotonic() + _LEFT_BEHIND_S
    while place.exists():
        try:
            return remove_directory(place)
        except OSError as error:
            # Its sandbox ends after it does, and may still be writing.
            if time.monotonic() > expires:
                logger.warning("a worker's directory was not removed: %s", error)
                return None
        time.sleep(_LOOK_S)
    return None


def _outcome(reply: Reply, seconds: float) -> Judgement:
    match reply["kind"]:
        case "ok":
            return Judgement(decode_step(reply["step"]), None, "ok", seconds)
        case "ended":
            return Judgement(None, None, "ended", seconds)
        case "raised" | "unreachable" | "invalid" as kind:
            return Judgement(None, str(reply["error"]), kind, seconds)
        case kind:
            raise ValueError(f"unknown kind {kind!r}")


def _main_hint(error: str) -> str:
    if "__main__" not in error:
        return ""
    return (
        "\nA worker does not have the caller's __main__: define the environment, and "
        "the functions that it holds, in a module."
    )
