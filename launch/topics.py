"""Answers words that no option has, such as speculative or slurm, with a page.

The rows are in topics.toml: what people look for under names from elsewhere, and the
things that there are not.
"""

import functools
import tomllib
from importlib import resources
from typing import NamedTuple

__all__ = ["Topic", "told", "topics"]


class Topic(NamedTuple):
    """Words for one thing.

    Attributes:
        words: each in lower case, with hyphens.
        say: what it is here, or that it is not here and what to do instead.
        page: a file of the repository, with a heading behind # or without one.
    """

    words: tuple[str, ...]
    say: str
    page: str


@functools.cache
def topics() -> tuple[Topic, ...]:
    """Returns all rows of topics.toml, in its order."""
    text = (resources.files(__package__) / "topics.toml").read_text(encoding="utf-8")
    return tuple(
        Topic(tuple(words.split()), say, page)
        for page, rows in tomllib.loads(text).items()
        for words, say in rows.items()
    )


def told(word: str) -> list[str]:
    """Says what a word is about here, with the page that explains it.

    >>> told("--usage_stats")
    ['none is collected (see docs/reference/what-there-is-not.md#runs)']
    """
    asked = word.lstrip("-+~").lower().replace("_", "-").replace(" ", "-")
    return [f"{e.say} (see {e.page})" for e in topics() if asked in e.words]
