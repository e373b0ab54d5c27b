"""Writes files so that they outlive a crash of the machine, and says what failed.

What is written is first on the disk itself (fsync), then gets its name, and the name is
on the disk before the next thing happens. A file system may otherwise keep the name and
lose the content. A run waits for room on a full disk (`patient`), and for nothing else.
"""

import errno
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrl_post.patience import Patience

__all__ = [
    "WriteError",
    "free_bytes",
    "is_full",
    "make_folder",
    "move",
    "named",
    "patient",
    "replace_file",
    "retried",
    "settle",
    "sync",
    "taken_wait",
    "waits",
    "writing",
]

_log = logging.getLogger(__name__)

# Errors that end when a person makes room.
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Seconds between two tries on a full disk, at first and at most.
_FIRST_S, _LONGEST_S = 1.0, 10.0

# Remedies for errors of the system, by number.
REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "the user's quota there is used up: free space, or raise it",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (sysctl fs.file-max)",
    errno.EACCES: "make the place writable for this user",
    errno.EPERM: "make the place writable for this user",
    errno.EROFS: "mount the file system for writing",
    errno.EIO: "check the disk",
}


class WriteError(OSError):
    """A file could not be written; the message has the path and what to do.

    Attributes:
        cause: the error of the system.
    """

    cause: OSError


def named(error: OSError, path: Path, consequence: str) -> WriteError:
    """Returns an error with the path, a consequence, and a remedy in its message.

    Args:
        error: of the system, or a `WriteError` of a part of the path.
        path: what could not be written.
        consequence: what is still there, and what is not.

    >>> named(OSError(errno.EFBIG, "File too large"), Path("a"), "row 1 is whole")
    WriteError(27, "File too large; row 1 is whole; raise the limit of a file's size
    (ulimit -f), and run the same command again")
    """
    if isinstance(error, WriteError):
        error = error.cause
    cause = str(error.strerror or error)
    if error.filename not in (None, str(path)):
        cause += f" ({error.filename})"
    message = f"{cause}; {consequence}"
    if error.errno in REMEDIES:
        if error.errno in _FULL:
            message += f"; {free_bytes(path) / 1e6:,.1f} MB are free"
        message += f"; {REMEDIES[error.errno]}, and run the same command again"
    told = WriteError(error.errno, message, str(path))
    told.cause = error
    return told


@contextmanager
def writing(path: Path, consequence: str) -> Iterator[None]:
    """Turns the OSErrors of a block that writes a path into the errors of `named`.

    Args:
        path: a file or folder that the block writes.
        consequence: what is still there, and what is not.

    Raises:
        WriteError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise named(error, path, consequence) from error


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or its cause, tells of a full disk or a used up quota.

    >>> is_full(OSError(errno.ENOSPC, "")), is_full(OSError(errno.EACCES, ""))
    (True, False)
    """
    while error is not None:
        # Libraries in other languages have the system's words alone.
        told = not isinstance(error, OSError) and str(error)
        if told and any(os.strerror(number) in told for number in _FULL):
            return True
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


class _Room:
    """State of the waits for room, of the whole process: threads share a disk."""

    patience = Patience()
    # Seconds that `taken_wait` has not returned.
    waited = 0.0
    # Whether a thread is within a call of `retried`.
    within = threading.local()


@contextmanager
def patient(patience: Patience) -> Iterator[None]:
    """Lets `retried` wait for room on a full disk, in all threads of the process.

    Args:
        patience: how long; no second outside such a block.
    """
    before, _Room.patience = _Room.patience, patience
    try:
        yield
    finally:
        _Room.patience = before


def waits() -> bool:
    """Whether a write waits for room on a full disk."""
    return _Room.patience.seconds > 0


def taken_wait() -> float:
    """The seconds that writes have waited for room since the last call; >= 0."""
    waited, _Room.waited = _Room.waited, 0.0
    return waited


def retried[Found](
    write: Callable[[], Found],
    path: Path,
    *,
    together: Callable[[bool], bool] = lambda more: more,
) -> Found:
    """Calls a function that writes all or nothing, again while the disk is full.

    Within such a call another one tries once: the outer one tries the whole again.

    Args:
        write: leaves nothing half written behind when it raises.
        path: what it writes, for messages.
        together: given whether this process has time left, returns whether all have.

    Raises:
        Exception: as `write`; of a full disk when the time of `patient` is used up.
    """
    if getattr(_Room.within, "one", False):
        return write()
    _Room.within.one = True
    try:
        return _retried(write, path, together)
    finally:
        _Room.within.one = False


def _retried[Found](
    write: Callable[[], Found], path: Path, together: Callable[[bool], bool]
) -> Found:
    patience = _Room.patience
    pauses, waited = patience.pauses(_FIRST_S, _LONGEST_S), 0.0
    tries = 0
    while True:
        try:
            found = write()
        except Exception as error:
            if not (is_full(error) and patience.seconds):
                raise
            if not tries:
                _log.warning(
                    "%s: the disk is full, %s MB are free; waiting up to %g s for room "
                    "(--retries.disk-s)",
                    path,
                    f"{free_bytes(path) / 1e6:,.1f}",
                    patience.seconds,
                )
            begin = patience.clock()
            after = next(pauses, None)
            _Room.waited += patience.clock() - begin
            if not together(after is not None):
                raise
            waited, tries = after or 0.0, tries + 1
        else:
            if tries:
                _log.warning("%s: written after %.0f s", path, waited)
            return found


def free_bytes(path: Path) -> float:
    """The free space where a path is or would be; infinite if it is not known."""
    there = (each for each in (path, *path.absolute().parents) if each.exists())
    disk = shutil.disk_usage(next(there))
    # Some file systems have no size and report 0 for both.
    return disk.free if disk.total else math.inf


def make_folder(folder: Path) -> list[Path]:
    """Makes a folder and its parents; returns the new ones, the innermost first."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync(each.parent)
    return made


def settle(place: Path) -> None:
    """Waits until a file, or a folder with all that is in it, is on the disk itself."""
    if place.is_symlink():
        return
    if place.is_dir():
        for each in sorted(place.iterdir()):
            settle(each)
    sync(place)


def move(source: Path, target: Path) -> None:
    """Renames a file or folder that is on the disk; its new name is there afterwards.

    Args:
        source: a file or folder, see `settle`.
        target: on the same file system, and free.
    """
    source.rename(target)
    sync(target.parent)


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a small file atomically: a reader sees the old content or the new one.

    Args:
        path: the file; its folder is made when missing.
        content: a text is written as UTF-8; a lone surrogate becomes `?`.

    Raises:
        WriteError: the disk is full or fails; what was there before is unchanged.
    """
    retried(lambda: _replace_file(path, content), path)


def _replace_file(path: Path, content: str | bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with writing(path, "what was there before is unchanged"):
        make_folder(path.parent)
        try:
            if isinstance(content, str):
                content = content.encode("utf-8", "replace")
            partial.write_bytes(content)
            settle(partial)
            partial.replace(path)
            sync(path.parent)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def sync(place: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk itself."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do this for folders, and need it for none.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
