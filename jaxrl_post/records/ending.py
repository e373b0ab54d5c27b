"""Records how a run ended, for a diagnosis afterwards."""

import errno
import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxrl_post.files import WriteError, is_full, patient, replace_file
from jaxrl_post.jsonl import json_file
from jaxrl_post.patience import Patience
from jaxrl_post.records.directory import RunDirectory

__all__ = ["Ending", "ending_recorded", "read_ending"]

MOST_FRAMES = 12


@dataclass(frozen=True)
class Ending:
    """The end of a run's last process: content of ending.json.

    Attributes:
        time: Unix time in seconds.
        error: class of the error that ended it, such as "DivergenceError"; "" for none.
        told: its message.
        errno: number of the system's error; None for other errors.
        frames: the last lines of its traceback.
    """

    time: float
    error: str = ""
    told: str = ""
    errno: int | None = None
    frames: tuple[str, ...] = ()


@contextmanager
def ending_recorded(directory: RunDirectory) -> Iterator[None]:
    """Writes ending.json when the block ends, also by an error.

    A process that is killed leaves none, and neither does a run that has no files.

    Args:
        directory: of the run.
    """
    with suppress(OSError):
        directory.ending.unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        cause = error.cause if isinstance(error, WriteError) else error
        number = errno.ENOSPC if is_full(error) else None
        if isinstance(cause, OSError):
            number = cause.errno
        frames = traceback.format_exception(error)[-MOST_FRAMES:]
        told = Ending(
            time.time(), type(error).__name__, str(error), number, tuple(frames)
        )
        _write(directory, told)
        raise
    _write(directory, Ending(time.time()))


def _write(directory: RunDirectory, ending: Ending) -> None:
    if not directory.config.exists():
        return
    # On a full disk the run's own error matters more, which has waited for room.
    with suppress(OSError), patient(Patience()):
        replace_file(directory.ending, json.dumps(asdict(ending), indent=2).encode())


def read_ending(path: Path) -> Ending | None:
    """Reads ending.json; None if it is not there, or nothing that a run wrote."""
    try:
        found = Ending(**json_file(path))
    except (OSError, ValueError, TypeError):
        return None
    return found
