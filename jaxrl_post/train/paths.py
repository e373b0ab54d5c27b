"""Errors of the file system, with the option that held the path."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxrl_post.train.config import ConfigError

__all__ = ["naming"]


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
    jaxrl_post.train.config.ConfigError: --config: no/such.json: No such file or ...
    """
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        where = "" if error.filename is None else f"{error.filename}: "
        raise ConfigError(f"{option}: {where}{what}") from error
