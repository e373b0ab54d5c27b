"""A tool that finds passages of a local corpus by their words.

The index is FTS5 of SQLite, which Python brings: it ranks by BM25 with k1 = 1.2 and
b = 0.75, and takes words of one stem as equal (Porter).

References:
    Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond",
    Foundations and Trends in Information Retrieval 3(4), 2009.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxrl_post.conversations import text_of
from jaxrl_post.envs.env import Task
from jaxrl_post.envs.tasks.ranges import require_integer
from jaxrl_post.envs.tools.toolset import Tool, ToolError
from jaxrl_post.jsonl import BadRowError, OnBadRow, require_on_bad_row
from jaxrl_post.tables import Layout, listed, read_table

__all__ = ["Search"]

_LOGGER = logging.getLogger(__name__)

# Words of a query that are looked up; the others are dropped.
_MOST_WORDS = 64
# Words for which an index remembers whether they are common.
_MOST_KNOWN = 1 << 14

_TABLE = """
CREATE VIRTUAL TABLE passages USING fts5(
    title, text, tokenize = 'porter unicode61 remove_diacritics 2'
)
"""
_COUNT = """
SELECT count(*) FROM (SELECT 1 FROM passages WHERE passages MATCH ? LIMIT ?)
"""
_BEST = """
SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?
"""


@dataclass(frozen=True)
class Search:
    r"""The tool `search`: the passages of a corpus that fit a query best, by BM25.

    A passage fits if it has a word of the query, in any order and case, and better the
    rarer the words are in the corpus. Passages that fit equally well stand in the
    file's order. The index is built once in every worker process, and its episodes
    share it.

    Args:
        corpus: .jsonl or .json with one object a line, or .parquet (extra `parquet`),
            with the field "text", perhaps "title"; other fields are ignored. In Python
            also the passages themselves, each a title, which may be "", and a text.
        on_bad_row: "fail" raises at a bad row, "skip" drops it and logs a warning.
        passages: how many are returned where a call does not say, in [1, 50].
        max_passages: the most that a call may ask for, in [1, 50].
        max_chars: a passage's text is cut to this many characters, in [1, 65536].

    Raises:
        ValueError: an argument is outside its range.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory, "passages.jsonl")
    ...     _ = path.write_text('{"title": "Paris", "text": "A city of France."}\n')
    ...     found = Search(str(path)).open(Task(0, (), ""))
    ...     print(found.call("search", {"query": "French cities, in France"}))
    [1] Paris
    A city of France.
    """

    corpus: str | tuple[tuple[str, str], ...]
    on_bad_row: OnBadRow = "fail"
    passages: int = 3
    max_passages: int = 10
    max_chars: int = 2000

    def __post_init__(self) -> None:
        if not isinstance(self.corpus, str | tuple) or not self.corpus:
            raise ValueError(
                f"corpus must be a path, or a tuple of passages, got {self.corpus!r}"
            )
        require_on_bad_row(self.on_bad_row)
        require_integer("max_passages", self.max_passages, 1, 50)
        require_integer("passages", self.passages, 1, self.max_passages)
        require_integer("max_chars", self.max_chars, 1, 65536)

    def tools(self) -> Sequence[Tool]:
        """One tool, `search`."""
        query = {"type": "string", "description": "Words to look for."}
        limit = {
            "type": "integer",
            "description": f"How many passages, {self.passages} by default.",
            "minimum": 1,
            "maximum": self.max_passages,
        }
        return (
            Tool(
                "search",
                "Searches a collection of passages by words; returns the best ones.",
                {
                    "type": "object",
                    "properties": {"query": query, "limit": limit},
                    "required": ["query"],
                },
                concurrent=True,
            ),
        )

    def prepare(self) -> None:
        """Reads the corpus and builds the index.

        Raises:
            ValueError: at a bad row under "fail", or if there is no passage.
            ModuleNotFoundError: for .parquet without the extra.
            OSError: the file cannot be read.
            RuntimeError: the SQLite of this Python has no FTS5.
        """
        self._index()

    def open(self, task: Task) -> Search:
        """This toolset: it keeps no state."""
        del task
        return self

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Searches.

        Raises:
            ToolError: the arguments do not fit the schema, or the query has no word.
        """
        unknown = sorted(set(arguments) - {"query", "limit"})
        if unknown:
            told = f"{name} takes query and limit, got {listed(unknown)}"
            raise ToolError(told, kind="bad_arguments")
        query = arguments.get("query")
        if not isinstance(query, str):
            told = "query must be a text, such as 'capital of France'"
            raise ToolError(told, kind="bad_arguments")
        words = _words(query)
        if not words:
            told = f"query has no word to look for, got {query[:80]!r}"
            raise ToolError(told, kind="bad_arguments")
        limit, index = self._limit(arguments.get("limit")), self._index()
        rare = index.rare(words)
        found = index.best(rare, limit)
        if not found:
            shown = ", ".join(rare[:10])
            told = f"No passage has any of these words: {shown}. "
            left = [word for word in words if word not in rare]
            if left:
                told += f"Most have: {', '.join(left[:10])}. "
            return told + "Try others."
        return "\n\n".join(
            f"[{number}] {title}\n{self._cut(text)}" if title else
            f"[{number}] {self._cut(text)}"
            for number, (title, text) in enumerate(found, 1)
        )  # fmt: skip

    def close(self) -> None:
        """Does nothing."""

    def _limit(self, value: Any) -> int:
        if value is None:
            return self.passages
        # Models write numbers as texts, too.
        if isinstance(value, str) and value.isdecimal() and len(value) < 10:
            value = int(value)
        if type(value) is not int or not 1 <= value <= self.max_passages:
            raise ToolError(
                f"limit must be an integer from 1 to {self.max_passages}, got "
                f"{value!r:.80}",
                kind="bad_arguments",
            )
        return value

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_chars:
            return text
        # At the end of a word, unless it is the only one.
        kept = text[: self.max_chars]
        return f"{kept.rsplit(None, 1)[0]} [...]"

    def _index(self) -> _Index:
        return _index(self.corpus, self.on_bad_row)


class _Index:
    """The passages of a corpus, in a data base in memory."""

    def __init__(self, passages: Sequence[tuple[str, str]]) -> None:
        # Held by a cache of the process, so any thread of it may ask; one at a time.
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._database.close)
        try:
            self._database.execute(_TABLE)
        except sqlite3.OperationalError as error:
            raise RuntimeError(
                f"search needs SQLite with FTS5, and this Python's has none: {error}"
            ) from error
        self._database.executemany(
            "INSERT INTO passages (rowid, title, text) VALUES (?, ?, ?)",
            ((number, *passage) for number, passage in enumerate(passages)),
        )
        self._database.commit()
        # A word of a single passage is not common, even where there is no other one.
        self._half = max(len(passages) // 2, 1)
        # Whether a word stands in most passages; for words that were looked up.
        self._common: dict[str, bool] = {}

    def rare(self, words: Sequence[str]) -> Sequence[str]:
        """The words that most passages lack; all words if there are none.

        A word of most passages adds nothing to BM25, but makes all of them fit.
        """
        with self._lock:
            return [word for word in words if not self._is_common(word)] or words

    def best(self, words: Sequence[str], limit: int) -> list[tuple[str, str]]:
        """Title and text of the passages that fit best."""
        query = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            return self._database.execute(_BEST, (query, limit)).fetchall()

    def _is_common(self, word: str) -> bool:
        if word not in self._common:
            if len(self._common) >= _MOST_KNOWN:
                self._common.clear()
            # The index knows the word by its stem, and "a_b" as two words.
            found = self._database.execute(_COUNT, (f'"{word}"', self._half + 1))
            self._common[word] = found.fetchone()[0] > self._half
        return self._common[word]


@lru_cache(maxsize=2)
def _index(corpus: str | tuple[tuple[str, str], ...], on_bad_row: OnBadRow) -> _Index:
    if not isinstance(corpus, str):
        return _Index(corpus)
    passages, report = read_table(corpus, [Layout((), _row)], on_bad_row=on_bad_row)
    if report.num_bad:
        _LOGGER.warning("%s", report)
    return _Index(passages)


def _row(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "text" not in row:
        raise BadRowError(f"no field 'text' (fields: {listed(row)})")
    text = text_of(row["text"], "field 'text'").strip()
    if not text:
        raise BadRowError("field 'text' is empty")
    title = row.get("title")
    if title is not None:
        title = " ".join(text_of(title, "field 'title'").split())
    return [(title or "", text)]


def _words(query: str) -> list[str]:
    """The different words of a query, in order."""
    found = dict.fromkeys(re.findall(r"\w+", query.lower()))
    return [word for word in found if word.strip("_")][:_MOST_WORDS]
