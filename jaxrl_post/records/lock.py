"""One process at a time in a run directory: two would write into each other's logs."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.paths import naming

__all__ = ["run_lock"]

_log = logging.getLogger(__name__)

NAME = "lock"

# What a file system without locks answers.
UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, as the lock's file says it to others.

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
    """Holds a run directory; makes it, and removes it if nothing came into it.

    The lock is the kernel's (flock), on the file `lock` of the directory, so a process
    that is killed leaves none behind. What the file says is for people alone. A file
    system without locks is warned of, and nothing is held there.

    Args:
        directory: of the run.
        command: the command line, for the process that is refused.

    Raises:
        ConfigError: another process holds it, or it can be no directory.

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
            # While the lock is held: whoever opened this file sees that it is gone.
            (directory / NAME).unlink()
        if file is not None:
            os.close(file)
        with suppress(OSError):  # Not empty: there is a run now.
            for folder in made:
                folder.rmdir()


def _make(directory: Path) -> list[Path]:
    """Makes a directory; returns those that were missing, the innermost first."""
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    if not made and not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    return made


def _take(path: Path) -> int | None:
    """Opens and locks a file; None where the file system has no locks."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, file):
                return file
        except BlockingIOError:
            os.close(file)
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
    """Whether a path names an open file: its last holder may have removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _tell(file: int, command: str) -> None:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    holder = Holder(os.getpid(), socket.gethostname(), since, command)
    with suppress(OSError):  # On a full disk the lock holds, without a name.
        os.ftruncate(file, 0)
        os.write(file, json.dumps(asdict(holder)).encode())


def _holder(path: Path) -> str:
    try:
        return str(Holder(**json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):  # It is only just taking the lock.
        return "another process"
