"""Checks of the paths in options; errors name the option."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxrl_post.config.errors import ConfigError

__all__ = [
    "CONTINUED",
    "FILES",
    "MAIN_MODELS",
    "MODELS",
    "REPOSITORY",
    "check_output",
    "check_paths",
    "check_repository",
    "naming",
    "value_of",
]

FILES = ("data.path", "data.eval_path")
# Options that name a model; --revision applies to MAIN_MODELS. The adapter that a run
# continues comes first, because it may name the model.
MAIN_MODELS = ("model", "input")
CONTINUED = "lora.path"
MODELS = (
    CONTINUED,
    *MAIN_MODELS,
    "base",
    "algorithm.reference",
    "critic.model",
    "prm.model",
    "loss.reference",
    "reward.model",
    "rollout.draft",
)
# Name of a repository on the hub.
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Prefix of files on the hub.
REMOTE = "hf://"
# Suffix of llama.cpp's model files.
GGUF = ".gguf"


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Turns an OSError into a ConfigError that names the option with the path.

    Args:
        option: as it is written, such as "--run-dir".

    Raises:
        ConfigError: instead of an OSError.

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

    A GGUF file is no model directory; only the `--input` of a conversion takes it.
    Other errors in a model's name are found when the model is opened, because the name
    may be a preset or a name on the hub.

    Args:
        config: of any program.

    Raises:
        ConfigError: names the option and the path.
    """
    _check_cache(value_of(config, "compile_cache.path"))
    for name in (*FILES, *MODELS):
        path = value_of(config, name)
        if not isinstance(path, str):
            continue
        option = f"--{name.replace('_', '-')}"
        if name in MODELS:
            with naming(option):
                _stat_if_there(path)
            if path.endswith(GGUF) and name != "input":
                raise ConfigError(
                    f"{option}: {path} is no model directory; make one of it with "
                    f"`python -m launch.convert --input {path} --output DIRECTORY`"
                )
        elif not path.startswith(REMOTE):
            with naming(option):
                _check_readable(path)


def check_repository(name: str | None, *, public: bool) -> None:
    """Refuses a name of `--push-to-hub` that cannot be one, before any work.

    Raises:
        ConfigError: it is not ORG/NAME, or `public` is given without it.
    """
    if name is None and public:
        raise ConfigError(
            "--push-public: without --push-to-hub nothing is uploaded; drop the "
            "option, or give the other"
        )
    if name is not None and not REPOSITORY.fullmatch(name):
        raise ConfigError(
            f"--push-to-hub: must be ORG/NAME, or USER/NAME, on the hub; got {name!r}"
        )


def check_output(path: Path, option: str) -> None:
    """Refuses an output path that exists or cannot be written, before any work.

    Raises:
        ConfigError: the path exists, or its folder is not writable.
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


def _check_cache(path: str | None) -> None:
    """Refuses what is no local directory; one that fails only ends the caching."""
    if path == "":
        raise ConfigError(
            "--compile-cache.path: is empty; give a directory, auto or off"
        )
    if path is not None and "://" in path:
        raise ConfigError(
            "--compile-cache.path: must be a directory of the file system, auto or "
            f"off; got {path!r}. Drop the option and set JAX_COMPILATION_CACHE_DIR to "
            "have JAX use this place"
        )


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


def value_of(config: Any, name: str) -> Any:
    """The value of an option, None where the program has no such option.

    Args:
        config: of any program.
        name: of the option's field, such as "data.path".
    """
    for part in name.split("."):
        config = getattr(config, part, None)
    return config
