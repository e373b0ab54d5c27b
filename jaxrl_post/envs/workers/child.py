"""A new interpreter that runs a function of ours, and the end of what it writes.

It is no fork: a fork of a process with jax's threads may deadlock. multiprocessing's
spawn would import the caller's `__main__`, and so jax, in each child.
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
from typing import IO

__all__ = ["Child", "ignore_stop_signals", "take_connection"]

# The child gets this process's sys.path, so that it can import the same modules.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from {module} import main; main()"
)
_KILL_WAIT_S = 5.0
_LAST_OUTPUT_WAIT_S = 1.0
_KEPT_OUTPUT_BYTES = 8192
_SHOWN_LINES = 12


class Child:
    """A child process in a process session of its own, with a socket as its input.

    `kill` may be called from any thread.

    Args:
        module: name of the module whose function `main` the process runs.

    Attributes:
        connection: our end of the socket.

    Raises:
        OSError: if the process cannot be started.
    """

    def __init__(self, module: str) -> None:
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        bootstrap = _BOOTSTRAP.format(module=module)
        # -P: ignore a json.py in the working directory. -u: a crash loses no output.
        command = [sys.executable, "-P", "-u", "-c", bootstrap, path]
        self.connection, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()
        assert self._process.stdout is not None, "it was asked for"
        self._output = _Tail(self._process.stdout)
        # Held while the process is waited for: afterwards its process id may belong to
        # another program, which `kill` must not hit.
        self._lock = threading.Lock()

    def kill(self) -> None:
        """Kills the process and all that it started in its process session."""
        with self._lock:
            self._kill_session()

    def reap(self) -> None:
        """Closes the connection, kills the process, and waits until it is gone."""
        self.connection.close()
        with self._lock:
            self._kill_session()
            # A process that survives SIGKILL for so long is stuck in the kernel.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_KILL_WAIT_S)

    def exit_reason(self) -> str:
        """Describes how the process ended; call it after `reap`."""
        code = self._process.returncode
        if code is None:
            return "vanished"
        if code >= 0:
            return f"exited with code {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    def written(self) -> str:
        """The last 8 KiB of the output; call it after `reap`."""
        return self._output.text()

    def shown_output(self) -> str:
        """The last lines of the output, for the end of an error message."""
        lines = self.written().strip().splitlines()[-_SHOWN_LINES:]
        return "; the last that it wrote:\n" + "\n".join(lines) if lines else ""

    def _kill_session(self) -> None:
        if self._process.returncode is None:
            # A group has its leader's id. macOS raises PermissionError for a zombie.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def take_connection() -> socket.socket:
    """In the child: moves the socket away from descriptor 0, which `input()` reads."""
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return connection


def ignore_stop_signals() -> None:
    """In the child: ignores SIGINT and SIGTERM, so that only the parent stops it.

    A cluster may send SIGTERM to every process of a job while the trainer still needs
    rewards for its last step. The handler is an empty function, not SIG_IGN: programs
    that an environment starts would inherit SIG_IGN and could not be terminated.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


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
