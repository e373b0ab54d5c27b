"""Errors of the file system, with the option that held the path."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxrl_post.config.errors import ConfigError

__all__ = ["check_output", "check_paths", "naming"]

FILES = ("data.path", "data.eval_path")
MODELS = (
    "model", "input", "base", "algorithm.reference", "critic.model", "loss.reference",
)  # fmt: skip
# Of files that are fetched.
REMOTE = "hf://"


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Puts the option that held a path in front of what the system says of the path.

    Args:
        option: as it is written, such as "--run-dir".

    Raises:
        ConfigError: in the place of an OSError.

    >>> with naming("--config"):
    ...     open("no/such.json")
    Traceback (most recent call last):
    jaxrl_post.config.errors.ConfigError: --config: no/such.json: No such file or ...
    """
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        where = "" if error.filename is None else f"{error.filename or "''"}: "
        raise ConfigError(f"{option}: {where}{what}") from error


def check_paths(config: Any) -> None:
    """Refuses data files that cannot be read, and paths that the system refuses.

    What else may be wrong with the path of a model is known when it is opened: it may
    be a preset, or a name on the hub.

    Args:
        config: of any program.

    Raises:
        ConfigError: naming the option and the path.
    """
    for name in (*FILES, *MODELS):
        path = _value(config, name)
        if not isinstance(path, str):
            continue
        option = f"--{name.replace('_', '-')}"
        if name in MODELS:
            with naming(option):
                _stat_if_there(path)
        elif not path.startswith(REMOTE):
            with naming(option):
                _check_readable(path)


def check_output(path: Path, option: str) -> None:
    """Refuses a path that nothing can be written to, before the work is done.

    Raises:
        ConfigError: there is something already, or the folder can hold nothing.
    """
    with naming(option):
        if path.exists():
            raise ConfigError(
                f"{option}: {path} is already there; remove it or write elsewhere"
            )
        folder = next(each for each in path.absolute().parents if each.exists())
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder))
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))


def _stat_if_there(path: str) -> None:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return


def _check_readable(path: str) -> None:
    os.stat(path)
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, "Permission denied", path)


def _value(config: Any, name: str) -> Any:
    """The value of an option, None where the program has no such option."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config
