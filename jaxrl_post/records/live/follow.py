"""Reads what is appended to a file of lines, and notices when its end was replaced."""

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["LogTail", "Read"]

# Bytes of the last line that are compared, to notice a file that was cut.
COMPARED = 4096


class Read(NamedTuple):
    """Lines that were read.

    Attributes:
        lines: whole lines without their newlines, in order.
        offsets: of their first bytes.
        again: whether the file was cut or replaced, so that what was read before does
            not count any more.
    """

    lines: list[bytes]
    offsets: list[int]
    again: bool


class LogTail:
    """Reads a growing file of lines, piece by piece.

    A run that resumes cuts its logs off after the step of its checkpoint and continues
    them. The tail then begins again.

    Args:
        path: of the file, which may not be there yet.
        begin: offset of the first line; 0 if the file is not there.

    Attributes:
        end: offset up to which the file was read.
        size: bytes of the file when it was read last.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> tail = LogTail(path)
    >>> _ = path.write_text('{"step": 1}\\n{"ste')
    >>> tail.read(100).lines, tail.read(100).lines
    ([b'{"step": 1}'], [])
    """

    def __init__(self, path: Path, begin: int = 0) -> None:
        self.path, self.end, self.size = path, begin, begin
        self._begin, self._last = begin, b""
        if begin:
            with path.open("rb") as file:
                file.seek(max(0, begin - COMPARED))
                self._last = file.read(min(begin, COMPARED))

    def read(self, most_bytes: int) -> Read:
        """Reads whole lines after those that were read before.

        Args:
            most_bytes: bytes to read, >= 1; a line that is longer is read whole.

        Raises:
            OSError: the file cannot be read; one that is not there is empty.
        """
        try:
            file = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            again = self.end > self._begin
            self._reset()
            return Read([], [], again)
        try:
            self.size = os.fstat(file).st_size
            before = os.pread(file, len(self._last), self.end - len(self._last))
            again = self.size < self.end or before != self._last
            if again:
                self._reset()
                self.size = os.fstat(file).st_size
            data = os.pread(file, most_bytes, self.end)
            while b"\n" not in data and self.end + len(data) < self.size:
                data += os.pread(file, most_bytes, self.end + len(data))
        finally:
            os.close(file)
        data = data[: data.rfind(b"\n") + 1]
        offsets, place = list[int](), self.end
        lines = data.split(b"\n")[:-1]
        for line in lines:
            offsets.append(place)
            place += len(line) + 1
        if data:
            self.end, self._last = place, data[-COMPARED:]
        return Read(lines, offsets, again)

    def _reset(self) -> None:
        self.end, self.size, self._begin, self._last = 0, 0, 0, b""
