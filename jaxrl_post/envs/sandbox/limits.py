"""Limits of a program in the sandbox, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

__all__ = ["Ended", "Limits", "Outcome", "SandboxError"]

type Ended = Literal[
    "exit", "signal", "time", "processor", "memory", "processes", "files", "lost"
]


class SandboxError(RuntimeError):
    """No sandbox is available as requested, or the place of a call has ended."""


@dataclass(frozen=True)
class Limits:
    """Resources that one place of the sandbox may use.

    Args:
        wall_seconds: a call's time on the clock; the call's processes are then killed.
        cpu_seconds: processor time of one process.
        memory_bytes: address space of one process, and memory of all processes of the
            place together with what their sockets can hold, which is measured ten times
            a second.
        processes: processes and threads at the same time.
        file_bytes: size of one file.
        directory_bytes: size of all files together.
        files: number of files and directories.
        open_files: open files of one process.
        output_bytes: standard output and standard error that a call returns, each;
            further output is dropped while the program runs on.

    Raises:
        ValueError: if a limit is not positive.

    >>> Limits(wall_seconds=2).processes
    32
    >>> Limits(processes=0)
    Traceback (most recent call last):
    ValueError: Limits.processes must be positive, got 0
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 32
    file_bytes: int = 64 << 20
    directory_bytes: int = 64 << 20
    files: int = 10_000
    open_files: int = 128
    output_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"Limits.{field.name} must be positive, got {value}")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call: how it ended, and its output.

    All of it was in the program's hands: it may print what it likes and end with any
    status. A verdict about a program is made outside of the sandbox, from values that
    the program was asked for.

    Args:
        ended: "exit" with `status`; "signal", whose number is `status`; "time", on the
            clock, "processor" (time), "memory", "processes" or "files" if that limit
            was reached; "lost" if the place broke.
        status: exit status or signal number; 0 for the other endings.
        stdout: standard output, decoded; bytes that are not UTF-8 become U+FFFD.
        stderr: standard error, likewise.
        truncated: whether output was dropped.
        seconds: time on the clock.
        processor: seconds of processor time of the program's first process, as far as
            they were seen while it ran.

    >>> Outcome("exit", 0, "4\\n", "", False, 0.01).succeeded
    True
    """

    ended: Ended
    status: int
    stdout: str
    stderr: str
    truncated: bool
    seconds: float
    processor: float = 0.0

    @property
    def succeeded(self) -> bool:
        """Whether the program ended by itself with status 0."""
        return self.ended == "exit" and self.status == 0
