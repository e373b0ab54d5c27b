"""Writes files so that they outlive a crash of the machine, and says what failed.

What is written is first on the disk itself (fsync), then gets its name, and the name is
on the disk before the next thing happens. A file system may otherwise keep the name and
lose the content.
"""

import errno
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "WriteError",
    "free_bytes",
    "make_folder",
    "move",
    "named",
    "replace_file",
    "settle",
    "sync",
    "writing",
]

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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
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
