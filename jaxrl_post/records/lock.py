"""The lock of a run directory: two processes would mix up their logs."""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.paths import naming
from jaxrl_post.files import make_folder
from jaxrl_post.jsonl import json_file

__all__ = ["holder_of", "run_lock"]

_log = logging.getLogger(__name__)

NAME = "lock"

# How often a run tries to take the lock, and the seconds in between.
LOOKS, LOOK_S = 5, 0.02

# Errors of a file system that has no locks.
UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as the lock file names it.

    Attributes:
        pid: of the process, on `host`.
        host: name of the machine.
        since: when the lock was taken, ISO 8601 with the offset from UTC.
        command: the process's command line.
    """

    pid: int
    host: str
    since: str
    command: str

    def __str__(self) -> str:
        told = f"process {self.pid} on host {self.host} since {self.since}"
        return f"{told} ({self.command})" if self.command else told


@contextmanager
def run_lock(directory: Path, command: str) -> Iterator[None]:
    """Locks a run directory; makes it, and removes it if it stays empty.

    The lock is an flock on the file `lock` of the directory: the kernel releases it
    when the process ends, even if killed. The file's content is only for messages. On a
    file system without locks a warning is logged, and the directory is not locked.

    Args:
        directory: of the run.
        command: the command line, shown to a process that is refused.

    Raises:
        ConfigError: another process holds the lock, or the directory cannot be made.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp()) / "run"
    >>> with run_lock(directory, "python -m launch.sft"), run_lock(directory, ""):
    ...     pass
    Traceback (most recent call last):
    jaxrl_post.config.errors.ConfigError: --run-dir: ... is in use by process ...
    """
    with naming("--run-dir"):
        made = _make(directory)
        file = _take(directory / NAME)
    try:
        if file is not None:
            _tell(file, command)
        yield
    finally:
        with suppress(OSError):
            # Unlink before unlocking: `_take` of another process then sees it is gone.
            (directory / NAME).unlink()
        if file is not None:
            os.close(file)
        with suppress(OSError):  # Not empty: it holds a run.
            for folder in made:
                folder.rmdir()


def holder_of(directory: Path) -> tuple[str, bool] | None:
    """The process that a lock names, and whether it holds the lock still.

    Args:
        directory: of the run.

    Returns:
        None if there is no lock, as after a run that ended by itself.

    Raises:
        OSError: the lock cannot be read, such as one of another user.
    """
    path = directory / NAME
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        # Shared, so that one who looks is not taken for a holder by another.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return _holder(path), False
    except BlockingIOError:
        return _holder(path), True
    finally:
        os.close(file)


def _make(directory: Path) -> list[Path]:
    """Makes a directory and its parents; returns the new ones, innermost first."""
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(directory))
    return make_folder(directory)


def _take(path: Path) -> int | None:
    """Opens and locks a file; None where the file system has no locks."""
    looks = 0
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, file):
                return file
        except BlockingIOError:
            os.close(file)
            looks += 1
            if looks < LOOKS:  # `holder_of` of another process holds it for an instant.
                time.sleep(LOOK_S)
                continue
            raise ConfigError(
                f"--run-dir: {path.parent} is in use by {_holder(path)}; wait for it, "
                "stop it, or choose another --run-dir"
            ) from None
        except OSError as error:
            os.close(file)
            if error.errno not in UNSUPPORTED:
                raise
            _log.warning(
                "--run-dir: the file system of %s has no locks (%s); make sure that no "
                "second process writes there",
                path.parent,
                error.strerror,
            )
            return None
        os.close(file)


def _is_still(path: Path, file: int) -> bool:
    """Whether a path still names an open file, which its holder may have removed."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _tell(file: int, command: str) -> None:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = Holder(os.getpid(), socket.gethostname(), since, command)
    with suppress(OSError):  # On a full disk the lock holds, but its file is empty.
        os.ftruncate(file, 0)
        os.write(file, json.dumps(asdict(holder)).encode())


def _holder(path: Path) -> str:
    try:
        return str(Holder(**json_file(path)))
    except (OSError, ValueError, TypeError):  # The holder has not written it yet.
        return "another process"
