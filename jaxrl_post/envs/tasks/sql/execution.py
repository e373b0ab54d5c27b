"""Runs the queries that a model wrote, in a process of their own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KINDS", "Database", "Executor", "Rows", "SqlError"]

# Why a query has no rows: it may not be run (it writes, or is several statements), it
# took too long, it or its result is too large, or SQLite says that it is wrong.
KINDS = ("refused", "time", "size", "invalid")

_INSIDE = Path(__file__).with_name("inside.py")


class SqlError(Exception):
    """A query has no rows.

    Attributes:
        kind: one of `KINDS`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Database:
    """Source of a data base; exactly one of both is given.

    Attributes:
        path: of a SQLite file.
        schema: statements that create and fill one, in the time of a query.
    """

    path: str | None = None
    schema: str | None = None


@dataclass(frozen=True)
class Rows:
    """Rows that a query returned.

    Attributes:
        rows: values are None, int, float, str or bytes.
        columns: names of the columns, also of no rows.
    """

    rows: tuple[tuple[Any, ...], ...]
    columns: tuple[str, ...]


class Executor:
    """Runs queries one after the other; a data base is never changed.

    The process is started at the first query, and again after a query that ended it.

    Args:
        seconds: processor time of a query.
        most_rows: of a result.
        clock_seconds: after which an answer is no longer waited for. A query does not
            wait, so the machine is then too busy to judge it.

    >>> executor = Executor()
    >>> database = Database(schema="CREATE TABLE t (a); INSERT INTO t VALUES (1), (2);")
    >>> executor.run(database, "SELECT sum(a) FROM t").rows
    ((3,),)
    >>> try:
    ...     executor.run(database, "DELETE FROM t")
    ... except SqlError as error:
    ...     print(error.kind, error)
    refused not authorized
    >>> executor.close()
    """

    def __init__(
        self,
        seconds: float = 2.0,
        most_rows: int = 10_000,
        clock_seconds: float = 60.0,
    ) -> None:
        self._seconds = seconds
        self._clock_seconds = clock_seconds
        self._most_rows = most_rows
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Executor] | None = None

    def run(self, database: Database, query: str) -> Rows:
        """Runs a query.

        Raises:
            SqlError: it returned no rows that can be compared.
            TimeoutError: no answer came in time on the clock, which says nothing of
                the query.
        """
        request = {
            "path": database.path,
            "schema": database.schema,
            "query": query,
            "seconds": self._seconds,
            "rows": self._most_rows,
        }
        answer = self._asked(json.dumps(request).encode("ascii") + b"\n")
        if "kind" in answer:
            raise SqlError(answer["kind"], answer["message"])
        rows = tuple(tuple(map(_value, row)) for row in answer["rows"])
        return Rows(rows, tuple(answer["columns"]))

    def close(self) -> None:
        """Ends the process."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _asked(self, request: bytes) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:
            # It was ended while it had nothing to do, which is no query's fault.
            self.close()
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None, "it was started above"
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = _line(process.stdout.fileno(), self._clock_seconds)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            self.close()
            raise
        if not line.endswith(b"\n"):
            self.close()
            if process.returncode == -getattr(signal, "SIGXCPU", 0):
                raise SqlError("time", f"it took longer than {self._seconds:g} s")
            # Nothing else ends it but a lack of memory.
            raise SqlError("size", "it ended the process that ran it")
        return json.loads(line)

    def _start(self) -> None:
        # Isolated, and without the site's packages: it starts in 20 ms.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_INSIDE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._end = weakref.finalize(self, _ended, self._process)


def _ended(process: subprocess.Popen[bytes]) -> None:
    # Dead already if it ended itself: its status then stays what it was.
    if process.poll() is None:
        process.kill()
    process.communicate()


def _line(descriptor: int, seconds: float) -> bytes:
    """A line, or what there is before the end of the file.

    Raises:
        TimeoutError: it did not come within so many seconds on the clock.
    """
    until = time.monotonic() + seconds
    parts: list[bytes] = []
    while not (parts and parts[-1].endswith(b"\n")):
        left = until - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise TimeoutError(
                f"a query had no answer after {seconds:g} s on the clock: the machine "
                "is too busy to judge it"
            )
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def _value(value: Any) -> Any:
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value
