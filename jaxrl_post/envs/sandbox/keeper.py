"""The thread that starts the processes of places, and watches what they use.

A place dies with the thread that started it (the kernel's parent-death signal goes by
threads), so one thread that lives as long as the sandbox starts all of them.
"""

from __future__ import annotations

import marshal
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxrl_post.envs.sandbox.inside import LENGTH
from jaxrl_post.envs.sandbox.limits import Ended, Limits
from jaxrl_post.envs.sandbox.mechanisms import Start

__all__ = ["Keeper", "Process", "framed", "remove_directory"]

# Seconds between two looks at what places use.
_INTERVAL = 0.1
# Most bytes that a socket has sent and its other end has not received.
_SOCKET_BYTES = Path("/proc/sys/net/core/wmem_default")
# Seconds for killed processes to be gone; a kernel that takes longer hangs.
_GONE = 30.0


class Process:
    """The processes of one place, from outside."""

    def __init__(self, start: Start, limits: Limits) -> None:
        self._start = start
        self._limits = limits
        self.popen = subprocess.Popen(
            start.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )
        assert self.popen.stdin is not None
        with suppress(BrokenPipeError):  # It ended at once; `wait` tells why.
            os.write(self.popen.stdin.fileno(), framed(dict(start.settings)))
        self.used = False
        self.reason: Ended | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._gone = False

    def kill(self, reason: Ended | None = None) -> None:
        """Ends all processes of the place; returns when its first one is gone.

        Args:
            reason: why; the first call's counts.

        Raises:
            subprocess.TimeoutExpired: if the kernel does not end them within 30 s.
            OSError: if its directory cannot be removed. Another call tries again.
        """
        with self._lock:
            if self._gone:
                return
            if not self._closed:
                self._closed = True
                self.reason = reason
            # The number of a process that was waited for may be another's by now.
            if self.popen.returncode is None:
                if self._start.settings["owner"]:
                    # `guard` in inside.py ends after all others.
                    self.popen.terminate()
                else:
                    # All of a process namespace end with the first.
                    with suppress(ProcessLookupError):
                        os.killpg(self.popen.pid, signal.SIGKILL)
                self.popen.wait(_GONE)
            if self._start.directory is not None:
                remove_directory(self._start.directory)
            self._gone = True

    def close_streams(self) -> None:
        """Closes this side of the pipes; may be repeated."""
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if stream is not None:
                # No process is left to read what is still to be written.
                with suppress(OSError):
                    stream.close()

    @property
    def closed(self) -> bool:
        """Whether it was killed."""
        return self._closed

    def exceeds(self) -> Ended | None:
        """The limit that the place is over, if any."""
        limits = self._limits
        processes = list(_tree(self.popen.pid))
        # The place's own four: its guard, the process of the calls, the interpreter,
        # and one that has just been forked.
        if not self._start.namespace and len(processes) > limits.processes + 4:
            return "processes"
        most = limits.memory_bytes - _socket_bytes(processes)
        # Pages that a fork shares are counted once the second time, which takes longer.
        if sum(map(_resident_bytes, processes)) > most and (
            sum(map(_proportional_bytes, processes)) > most
        ):
            return "memory"
        directory = self._start.directory
        if directory is None:
            # The first one is outside of the sandbox.
            for inner in processes[2:3]:
                with suppress(OSError):
                    usage = os.statvfs(f"/proc/{inner}/root{self._start.home}")
                    if usage.f_files - usage.f_ffree > limits.files:
                        return "files"
        elif not self._start.namespace:
            files, size = _usage(directory, limits.files)
            size += sum(map(_unlinked_bytes, processes))
            if files > limits.files or size > limits.directory_bytes:
                return "files"
        return None


def framed(value: Any) -> bytes:
    """A value as `inside.py` reads it: its length, and its marshalled form."""
    body = marshal.dumps(value, 2)
    return LENGTH.pack(len(body)) + body


class Keeper:
    """Starts places' processes, and ends those that are over their limits."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[
            tuple[Start, Limits, Future[Process]] | None
        ] = queue.SimpleQueue()
        self._processes: set[Process] = set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = False

    def start(self, start: Start, limits: Limits) -> Future[Process]:
        """Starts a place's processes, soon."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="sandbox", daemon=True
                )
                self._thread.start()
        future: Future[Process] = Future()
        self._requests.put((start, limits, future))
        return future

    def close(self) -> None:
        """Ends all places."""
        self._closing = True
        self._requests.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * _GONE)

    def _work(self) -> None:
        looked = time.monotonic()
        while True:
            pause = _INTERVAL if self._processes else None
            try:
                request = self._requests.get(timeout=pause)
            except queue.Empty:
                pass
            else:
                if request is None or self._closing:
                    break
                start, limits, future = request
                try:
                    process = Process(start, limits)
                except Exception as error:  # The caller handles the error.
                    if start.directory is not None:
                        remove_directory(start.directory)
                    future.set_exception(error)
                else:
                    self._processes.add(process)
                    future.set_result(process)
            if time.monotonic() - looked >= _INTERVAL:
                self._processes = {p for p in self._processes if not p.closed}
                for process in self._processes:
                    reason = process.exceeds() if process.used else None
                    if reason is not None:
                        _try_to_kill(process, reason)
                looked = time.monotonic()
        for process in self._processes:
            _try_to_kill(process)
            process.close_streams()


def _try_to_kill(process: Process, reason: Ended | None = None) -> None:
    # A failure must not end the thread that watches the other places; closing the place
    # tries again, and reports it.
    with suppress(OSError, subprocess.TimeoutExpired):
        process.kill(reason)


def _tree(first: int) -> Iterator[int]:
    """A process and its descendants; those that end meanwhile may be missing."""
    waiting = [first]
    while waiting:
        process = waiting.pop()
        yield process
        with suppress(OSError):
            for task in os.listdir(f"/proc/{process}/task"):
                text = Path(f"/proc/{process}/task/{task}/children").read_text()
                waiting.extend(map(int, text.split()))


def _resident_bytes(process: int) -> int:
    """Memory of a process that is no file's."""
    return _kilobytes(f"/proc/{process}/status", "RssAnon:", "RssShmem:") * 1024


def _proportional_bytes(process: int) -> int:
    """The same, with shared pages divided by those who share them."""
    name = f"/proc/{process}/smaps_rollup"
    found = _kilobytes(name, "Pss_Anon:", "Pss_Shmem:") * 1024
    return found or _resident_bytes(process)


def _kilobytes(path: str, *names: str) -> int:
    try:
        text = Path(path).read_text()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) for line in text.splitlines() if line.startswith(names)
    )


def _socket_bytes(processes: list[int]) -> int:
    """Bytes that the sockets of processes can hold, in the kernel's memory."""
    found = set()
    for process in processes:
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    name = os.readlink(entry.path)
                    if name.startswith("socket:"):
                        found.add(name)
    try:
        each = int(_SOCKET_BYTES.read_text())
    except OSError:
        each = 212_992  # The kernel's default.
    return len(found) * each


def _unlinked_bytes(process: int) -> int:
    """Bytes of open files that have no name any more."""
    total = 0
    with suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                found = os.stat(f"/proc/{process}/fd/{name}")
                if not found.st_nlink:
                    total += found.st_blocks * 512
    return total


def _usage(directory: Path, most: int) -> tuple[int, int]:
    """Number and bytes of the files of a directory, counted up to `most` files."""
    count = size = 0
    waiting = [str(directory)]
    while waiting and count <= most:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                count += 1
                if count > most:
                    break
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    size += found.st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return count, size


def remove_directory(directory: Path) -> None:
    """Removes a directory that a hostile program has filled.

    Directories may be nested more deeply than a path can name, and closed to reading:
    each is moved up before it is emptied.
    """
    waiting, count, mark = [str(directory)], 0, secrets.token_hex(8)
    while waiting:
        path = waiting[-1]
        with suppress(OSError):
            os.chmod(path, 0o700)
        below = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.path)
                    else:
                        os.unlink(entry.path)
            if path == str(directory):
                for inner in below:
                    waiting.append(inner)
            else:
                for inner in below:
                    count += 1
                    moved = f"{directory}/{mark}-{count}"
                    os.chmod(inner, 0o700)
                    os.rename(inner, moved)
                    waiting.append(moved)
            if not below:
                os.rmdir(waiting.pop())
        except FileNotFoundError:
            waiting.pop()
        except NotADirectoryError:
            os.unlink(waiting.pop())
