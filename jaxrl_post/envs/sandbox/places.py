"""One place of the sandbox: a directory, a Python that keeps its names, and calls."""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from jaxrl_post.envs.sandbox import inside
from jaxrl_post.envs.sandbox.keeper import Process, framed
from jaxrl_post.envs.sandbox.limits import Ended, Limits, Outcome, SandboxError
from jaxrl_post.envs.sandbox.mechanisms import Start

__all__ = ["Place"]

# Seconds for a place to start, and for an answer beyond the time of its call.
_START = 30.0
_GRACE = 2.0
# Most bytes of a call's input: a place has less memory than the machine.
_CALL_BYTES = 64 << 20
_REASONS: Mapping[int, Ended] = {
    inside.EXIT: "exit",
    inside.SIGNAL: "signal",
    inside.TIME: "time",
    inside.PROCESSOR: "processor",
}


class _Answer(NamedTuple):
    """Answer of `inside.py`: how a call ended, and the output."""

    kind: int
    status: int
    seconds: float
    processor: float
    stdout: bytes
    stderr: bytes
    truncated: bool


class Place:
    """A closed-off place with a directory of its own, from `Sandbox.open`.

    Files stay from call to call, and so do the names of `python`, until the place is
    closed or a call breaks it: see `alive`. Calls are made one at a time.

    Args:
        process: its processes, soon.
        start: how they were started.
        mechanism: how it is closed off.
        limits: what it may use.
    """

    def __init__(
        self, process: Future[Process], start: Start, mechanism: str, limits: Limits
    ) -> None:
        self._future = process
        self._process: Process | None = None
        self._closed = False
        self._limits = limits
        self._alone = bool(start.settings["alone"])
        self.home = start.home
        self.mechanism = mechanism

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether calls can be made: no limit of the place was passed, none broke it.

        A call that runs out of time is ended and leaves the place alive where its
        processes can be told from others, as they can except with old kernels.
        """
        return not (
            self._closed or (self._process is not None and self._process.closed)
        )

    def python(
        self, code: str, *, seconds: float | None = None, processor: float = math.inf
    ) -> Outcome:
        """Runs Python, in the place's one interpreter, and prints what it evaluates to.

        Names stay for the next call, unless the interpreter ends: by `sys.exit`, by a
        signal or by the time limit.

        Args:
            code: statements; if the last one is an expression whose value is not None,
                its value is printed.
            seconds: time on the clock, at most `Limits.wall_seconds`, the default.
            processor: processor time, which a busy machine does not change.

        Returns:
            What it printed, with status 1 and a traceback if it raised.

        Raises:
            SandboxError: if the place is not alive.
        """
        seconds = self._seconds(seconds)
        return self._call(("python", code, (seconds, processor)), seconds)

    def run(
        self,
        arguments: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        seconds: float | None = None,
        processor: float = math.inf,
    ) -> Outcome:
        """Runs a program, such as ("sh", "-c", "ls").

        Args:
            arguments: the program and its arguments.
            stdin: its standard input.
            environment: further variables; a place has PATH, HOME, TMPDIR and LANG.
            seconds: time on the clock, at most `Limits.wall_seconds`, the default.
            processor: processor time, which a busy machine does not change.

        Returns:
            What it printed; status 127 if there is no such program, 126 if it cannot be
            run.

        Raises:
            SandboxError: if the place is not alive.
            ValueError: if `arguments` is empty.
        """
        if not arguments:
            raise ValueError("run: arguments must name a program, got none")
        seconds = self._seconds(seconds)
        most = (seconds, processor)
        call = ("run", list(arguments), dict(environment or {}), stdin, most)
        return self._call(call, seconds)

    def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Writes a file, with the place's own rights.

        Args:
            path: relative to the place's directory; its folders are made.
            data: the content.
            executable: whether it can be run as a program.

        Raises:
            SandboxError: if it could not be written, or the place is not alive.
        """
        mode = 0o755 if executable else 0o644
        outcome = self._call(("write", path, data, mode), self._limits.wall_seconds)
        if not outcome.succeeded:
            raise SandboxError(
                f"sandbox: writing {path!r} of {len(data)} bytes failed: "
                f"{outcome.stderr or outcome.ended}"
            )

    def read(self, path: str, *, most: int = 1 << 20) -> bytes:
        """Reads a file, with the place's own rights.

        Args:
            path: relative to the place's directory.
            most: number of bytes.

        Returns:
            The content, cut after `most` bytes.

        Raises:
            SandboxError: if it could not be read, or the place is not alive.
        """
        call = ("read", path, most)
        answer = self._exchange(call, self._limits.wall_seconds, most)
        if isinstance(answer, Outcome):
            raise SandboxError(f"sandbox: reading {path!r} failed: {answer.ended}")
        if answer.kind != inside.EXIT:
            reason = answer.stderr.decode("utf-8", "replace")
            raise SandboxError(f"sandbox: reading {path!r} failed: {reason}")
        return answer.stdout

    def close(self) -> None:
        """Ends the processes, and removes the directory; may be repeated."""
        if self._closed:
            return
        self._closed = True
        process = self._process
        if process is None:
            with suppress(Exception):  # It never started: there is nothing to end.
                process = self._future.result(_START)
        if process is not None:
            process.kill()
            process.close_streams()

    def wait(self) -> None:
        """Waits until the place has started.

        Raises:
            SandboxError: if it does not; the message tells why.
        """
        if self._process is not None:
            return
        try:
            process = self._future.result(_START)
        except (OSError, TimeoutError) as error:
            raise SandboxError(
                f"sandbox {self.mechanism}: no start: {error}"
            ) from error
        self._process = process
        assert process.popen.stdin is not None
        assert process.popen.stdout is not None
        os.set_blocking(process.popen.stdin.fileno(), False)
        os.set_blocking(process.popen.stdout.fileno(), False)
        answer = self._receive(process, b"", time.monotonic() + _START, 0)
        if isinstance(answer, str):
            process.kill("lost")
            error = b""
            if process.popen.stderr is not None:
                os.set_blocking(process.popen.stderr.fileno(), False)
                error = process.popen.stderr.read(4096) or b""
            text = error.decode("utf-8", "replace").strip()
            self.close()
            raise SandboxError(f"sandbox {self.mechanism}: no start: {text or answer}")
        process.used = True

    def _seconds(self, asked: float | None) -> float:
        most = self._limits.wall_seconds
        return most if asked is None else max(0.0, min(asked, most))

    def _call(self, call: tuple[object, ...], seconds: float) -> Outcome:
        answer = self._exchange(call, seconds, self._limits.output_bytes)
        if isinstance(answer, Outcome):
            return answer
        ended = _REASONS.get(answer.kind)
        if ended is None and call[0] != "write":
            # Such as when earlier programs have left no room for another process.
            ended = "lost"
        if ended == "lost" or (ended in ("time", "processor") and not self._alone):
            self.close()
        return Outcome(
            ended or "lost",
            answer.status,
            answer.stdout.decode("utf-8", "replace"),
            answer.stderr.decode("utf-8", "replace"),
            answer.truncated,
            answer.seconds,
            answer.processor,
        )

    def _exchange(
        self, call: tuple[object, ...], seconds: float, most: int
    ) -> _Answer | Outcome:
        if not self.alive:
            raise SandboxError(
                "sandbox: the place has ended; open another one for more calls"
            )
        self.wait()
        process = self._process
        assert process is not None
        begin = time.monotonic()
        until = begin + seconds + _GRACE
        answer = self._receive(process, _framed(call), until, most)
        if not isinstance(answer, str):
            return answer
        # The place's answer no longer counts: it ends, with all its processes.
        took = time.monotonic() - begin
        late = took >= seconds
        process.kill("time" if late else "lost")
        ended = process.reason or ("time" if late else "lost")
        self.close()
        return Outcome(ended, 0, "", f"sandbox: {answer}", False, took)

    def _receive(
        self, process: Process, data: bytes, until: float, most: int
    ) -> _Answer | str:
        """Sends a call and receives the answer; text tells why there is none."""
        stdin, stdout = process.popen.stdin, process.popen.stdout
        assert stdin is not None
        assert stdout is not None
        received = b""
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        if data:
            poll.register(stdin, select.POLLOUT)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                return "no answer in time"
            events = dict(poll.poll(1e3 * left))
            try:
                if stdin.fileno() in events and data:
                    data = data[os.write(stdin.fileno(), data[: 1 << 16]) :]
                    if not data:
                        poll.unregister(stdin)
                if stdout.fileno() not in events:
                    continue
                part = os.read(stdout.fileno(), 1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                part = b""
            if not part:
                return "its first process has ended"
            received += part
            if len(received) < inside.ANSWER.size:
                continue
            kind, status, took, spent, dropped, out, err = inside.ANSWER.unpack(
                received[: inside.ANSWER.size]
            )
            size = inside.ANSWER.size + out + err
            # A program that took over the process of the calls may say anything.
            if max(out, err) > max(most, 4096) or not (
                0 <= took < 1e9 and 0 <= spent < 1e9
            ):
                return "its answer is not one"
            if len(received) > size:
                return "its answer is too long"
            if len(received) == size:
                text = received[inside.ANSWER.size :]
                parts = text[:out], text[out:], bool(dropped)
                return _Answer(kind, status, took, spent, *parts)


def _framed(call: object) -> bytes:
    data = framed(call)
    if len(data) > _CALL_BYTES:
        raise SandboxError(
            f"sandbox: a call of {len(data)} bytes is too long; the most is "
            f"{_CALL_BYTES}"
        )
    return data
