"""The log timeline.jsonl: the events of a run, and when each happened."""

import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.records.directory import AppendedFile, json_rows

__all__ = ["Timeline", "read_timeline"]


class Timeline:
    """Writes each event to timeline.jsonl when it is told; any thread may tell it.

    A row is `{"time": 1767225600.0, "at": 3.25, "event": "begin", "work": "sample",
    "step": 2}`, with `time` in Unix seconds, and `at` in seconds since `open` by a
    monotonic clock. It is written whole, and outlives a kill of the process. `open`
    writes the row `start`, so a run that was resumed has several.

    Samples of later steps are drawn while a step trains, so the rows are not in the
    order of steps: a checkpoint has the number of rows before it, and a resumed run
    keeps as many. They are the events that it will not tell again.

    Args:
        path: of the file.

    Attributes:
        count: number of rows; before `open`, the number that `open` keeps.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "timeline.jsonl")
    >>> timeline = Timeline(path)
    >>> timeline.open()
    >>> timeline.tell("save", {"step": 3})
    >>> [row["event"] for row in read_timeline(path)], timeline.settle()
    (['start', 'save'], 2)
    """

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0
        self._lock, self._began = threading.Lock(), 0.0
        self._file: AppendedFile | None = None

    def open(self) -> None:
        """Begins to write: keeps the first `count` rows, and drops the others.

        Raises:
            WriteError: the disk is full, or fails.
            ValueError: the file was damaged.
        """
        file = AppendedFile(self.path)
        try:
            rows = itertools.islice(_rows(self.path), self.count)
            ends = [end for _, end in rows]
            file.keep(max(ends, default=0))
        except BaseException:
            file.close()
            raise
        self._file, self._began, self.count = file, time.monotonic(), len(ends)
        self.tell("start", {})

    def tell(self, event: str, fields: Mapping[str, Any]) -> None:
        """Writes a row; does nothing before `open` and after `close`.

        Args:
            event: what happened.
            fields: JSON values.

        Raises:
            WriteError: the disk is full, or fails. The rows before are whole.
        """
        with self._lock:
            if self._file is None:
                return
            head = {
                "time": round(time.time(), 3),
                "at": round(time.monotonic() - self._began, 6),
                "event": event,
            }
            line = json.dumps(head | dict(fields), allow_nan=False) + "\n"
            self._file.put(line.encode("ascii"), durable=False)
            self.count += 1

    def settle(self) -> int:
        """Waits until the rows are on the disk itself; returns their number.

        Raises:
            WriteError: the disk fails.
        """
        with self._lock:
            if self._file is not None:
                self._file.put(b"")
            return self.count

    def counts(self) -> dict[str, int]:
        """The number of rows, by the file's name; nothing if it is not open."""
        return {} if self._file is None else {self.path.name: self.count}

    def close(self) -> None:
        """Closes the file; closing twice is fine."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None


def read_timeline(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a timeline, without the torn last line of a killed run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line before the last is no row.
    """
    return (row for row, _ in _rows(path))


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    return json_rows(path, "event", str)
