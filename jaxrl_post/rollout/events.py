"""Telling a log what happens in a run, for code that knows no log."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["Tell", "silent", "told"]

# Called from any thread, with the name of an event and its fields: JSON values.
type Tell = Callable[[str, Mapping[str, Any]], None]


def silent(event: str, fields: Mapping[str, Any]) -> None:
    """Tells no log."""


@contextmanager
def told(tell: Tell, work: str, fields: Mapping[str, Any]) -> Iterator[None]:
    """Tells when the work of a block begins, and when it ends without an error.

    Args:
        tell: gets the events `begin` and `end`.
        work: what is done, such as "sample".
        fields: of both events.

    >>> with told(lambda event, fields: print(event, fields), "update", {"step": 3}):
    ...     print("...")
    begin {'work': 'update', 'step': 3}
    ...
    end {'work': 'update', 'step': 3}
    """
    tell("begin", {"work": work, **fields})
    yield
    tell("end", {"work": work, **fields})
