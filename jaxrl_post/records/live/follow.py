"""Reads what is appended to a file of lines, and notices when its end was replaced."""

import errno
import os
import stat
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
        end: offset after the last whole line that was read.
        size: bytes of the file when it was read last.
        behind: whether there is more to read; a line that has no end yet is not.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> tail = LogTail(path)
    >>> _ = path.write_text('{"step": 1}\\n{"ste')
    >>> tail.read(100).lines, tail.read(100).lines
    ([b'{"step": 1}'], [])
    """

    def __init__(self, path: Path, begin: int = 0) -> None:
        self.path, self.end, self.size, self.behind = path, begin, begin, False
        self._begin, self._last, self._looked = begin, b"", begin
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
            # Opening a pipe would otherwise wait for one who writes.
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            again = self.end > self._begin
            self._reset()
            return Read([], [], again)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(self.path))
            self.size = found.st_size
            before = os.pread(file, len(self._last), self.end - len(self._last))
            again = self.size < self.end or before != self._last
            if again:
                self._reset()
                self.size = found.st_size
            if self._looked == self.size and self._looked > self.end:
                self.behind = False  # The last line has not grown.
                return Read([], [], again)
            data = os.pread(file, most_bytes, self.end)
            while b"\n" not in data and self.end + len(data) < self.size:
                more = os.pread(file, most_bytes, self.end + len(data))
                if not more:  # It was cut since.
                    break
                data += more
        finally:
            os.close(file)
        self._looked = self.end + len(data)
        self.behind = self._looked < self.size
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
        self._looked, self.behind = 0, False
