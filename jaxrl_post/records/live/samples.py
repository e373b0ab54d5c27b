"""Finds rows of samples.jsonl by reward, length and text, in a file of any size."""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxrl_post.records.live.follow import LogTail

__all__ = ["Found", "Order", "Query", "SampleIndex", "texts_of", "turns_of"]

# Newest rows that are indexed, 36 bytes each.
MAX_ROWS = 2_000_000
# Finish reasons that are told apart; there are few, unless a file is damaged.
MAX_REASONS, OTHERS = 200, "any other"
# Bytes that are read at a time.
CHUNK = 2**22
# Rows that two evaluations are compared by.
MAX_PAIRS = 5000

type Order = Literal["newest", "oldest", "highest", "lowest", "longest", "shortest"]
type Row = dict[str, Any]

COLUMNS = np.dtype(
    [
        ("offset", np.int64),
        ("size", np.int32),
        ("step", np.int32),
        ("reward", np.float64),  # NaN for none.
        ("tokens", np.int32),  # -1 for none, as in runs of older versions.
        ("ended", np.int16),  # Number of the finish reason.
        ("held_out", np.bool_),
        ("failed", np.bool_),
    ]
)


@dataclass(frozen=True)
class Query:
    """Rows that are looked for; a bound that is None does not bound.

    Attributes:
        split: "train" or "eval"; "" for both.
        steps: first and last step.
        rewards: smallest and largest reward.
        tokens: smallest and largest number of tokens.
        ended: finish reason; "" for any.
        failed: only rows with an error.
        text: that stands in the prompt, the completion, the conversation or the error,
            in any case.
        task: id of the task; "" for any.
        order: of the answer.
    """

    split: str = ""
    steps: tuple[float | None, float | None] = (None, None)
    rewards: tuple[float | None, float | None] = (None, None)
    tokens: tuple[float | None, float | None] = (None, None)
    ended: str = ""
    failed: bool = False
    text: str = ""
    task: str = ""
    order: Order = "newest"


@dataclass(frozen=True)
class Found:
    """Rows that were found.

    Attributes:
        rows: with their `offset` in the file.
        after: offset to continue after; None if all of the index was searched.
        candidates: rows that fit but for the text and the task, of all the index.
    """

    rows: list[Row]
    after: int | None
    candidates: int


@dataclass
class SampleIndex:
    """The numbers of samples.jsonl in memory; its texts stay in the file.

    The newest rows are indexed first, and rows that are appended are followed. Rows
    that cannot be read are counted and left out.

    Attributes:
        path: of samples.jsonl, which may not be there yet.
        damaged: number of lines that are no rows.
        generation: how often the file was cut or replaced; offsets count within one.
    """

    path: Path
    damaged: int = 0
    generation: int = 0
    _blocks: list[np.ndarray] = field(default_factory=list)
    _joined: np.ndarray | None = None
    _reasons: dict[str, int] = field(default_factory=dict)
    _tail: LogTail | None = None
    # Offset of the first line of the index; None before anything was read.
    _begin: int | None = None
    # One thread advances, others find.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self) -> bool:
        """Indexes one more piece of the file; returns whether there may be more.

        Raises:
            OSError: the file cannot be read.
        """
        if self._tail is None:
            try:
                begin = _last_line_end(self.path)
            except FileNotFoundError:
                return False
            self._tail, self._begin = LogTail(self.path, begin), begin
        read = self._tail.read(CHUNK)
        if read.again:
            with self._lock:
                self._blocks, self._joined = [], None
            self._tail = self._begin = None
            self.generation += 1
            return True
        self._add(read.lines, read.offsets, newest=True)
        return self._advance_backward() or self._tail.behind

    def _advance_backward(self) -> bool:
        """Indexes the piece before what is indexed; returns whether more is left."""
        end = self._begin
        if not end or self.rows >= MAX_ROWS:
            return False
        with self.path.open("rb") as file:
            size = CHUNK
            while True:
                begin = max(0, end - size)
                file.seek(begin)
                data = file.read(end - begin)
                # The first line of a piece is torn, but at the file's beginning; the
                # last newline ends the last line.
                skip = 0 if begin == 0 else data.find(b"\n", 0, -1) + 1
                if skip or begin == 0:
                    break
                size *= 2
        lines, offsets, place = data[skip:].split(b"\n")[:-1], [], begin + skip
        for line in lines:
            offsets.append(place)
            place += len(line) + 1
        self._add(lines, offsets, newest=False)
        self._begin = begin + skip
        return bool(self._begin) and self.rows < MAX_ROWS

    def _add(
        self, lines: Sequence[bytes], offsets: Sequence[int], *, newest: bool
    ) -> None:
        found = [
            (offset, len(line), *numbers)
            for line, offset in zip(lines, offsets, strict=True)
            if (numbers := self._numbers(line)) is not None
        ]
        if found:
            block = np.array(found, COLUMNS)
            with self._lock:
                self._blocks.insert(len(self._blocks) if newest else 0, block)
                self._joined = None

    def _numbers(self, line: bytes) -> tuple[Any, ...] | None:
        row = _row(line)
        if row is None:
            self.damaged += 1
            return None
        reward, tokens = row["reward"], row.get("tokens")
        reason = str(row.get("finish_reason", ""))
        if reason not in self._reasons and len(self._reasons) >= MAX_REASONS:
            reason = OTHERS
        return (
            row["step"],
            np.nan if reward is None else float(reward),
            -1 if tokens is None else tokens,
            self._reasons.setdefault(reason, len(self._reasons)),
            row["split"] == "eval",
            bool(row.get("error")),
        )

    @property
    def rows(self) -> int:
        """Number of rows in the index."""
        with self._lock:
            return sum(map(len, self._blocks))

    @property
    def reasons(self) -> list[str]:
        """The finish reasons that occur."""
        return [*self._reasons]

    @property
    def share(self) -> float:
        """Share of the file that is indexed, by bytes, in [0, 1]."""
        if self._tail is None or not self._tail.size:
            return 1.0
        unread = self._begin or 0
        if self._tail.behind:
            unread += self._tail.size - self._tail.end
        return 1.0 - unread / self._tail.size

    def table(self) -> np.ndarray:
        """The index, in the order of the file, as a structured array of `COLUMNS`."""
        with self._lock:
            if self._joined is None:
                joined = np.concatenate([np.zeros(0, COLUMNS), *self._blocks])
                self._joined = joined[-MAX_ROWS:]
                self._blocks = [self._joined]
            return self._joined

    def evaluations(self) -> list[int]:
        """Steps with held-out rows, ascending."""
        table = self.table()
        return np.unique(table["step"][table["held_out"]]).tolist()

    def find(
        self,
        query: Query,
        *,
        after: int | None = None,
        most: int = 50,
        seconds: float = 1.0,
    ) -> Found:
        """Finds rows; a search for a text reads the file, for a bounded time.

        Args:
            query: the rows to find.
            after: `Found.after` of the search to continue.
            most: number of rows.
            seconds: that it may read.

        Raises:
            OSError: the file cannot be read.
        """
        until = time.monotonic() + seconds
        table = self.table()
        chosen = self._ordered(table[self._fits(table, query)], query.order)
        begin = 0
        if after is not None:
            places = np.flatnonzero(chosen["offset"] == after)
            begin = int(places[0]) + 1 if len(places) else 0
        rows, place = list[Row](), begin
        if len(chosen) > begin:
            with self.path.open("rb") as file:
                for place in range(begin, len(chosen)):
                    entry = chosen[place]
                    row = _at(file.fileno(), entry, query)
                    if row is not None:
                        rows.append(row)
                    if len(rows) == most or time.monotonic() > until:
                        break
        more = place + 1 < len(chosen)
        offset = int(chosen["offset"][place]) if more else None
        return Found(rows, offset, len(chosen))

    def _fits(self, table: np.ndarray, query: Query) -> np.ndarray:
        fits = np.ones(len(table), bool)
        if query.split:
            fits &= table["held_out"] == (query.split == "eval")
        for name, bounds in (
            ("step", query.steps), ("reward", query.rewards), ("tokens", query.tokens)
        ):  # fmt: skip
            low, high = bounds
            # Comparisons with NaN are false: a bound leaves out what has no reward.
            if low is not None:
                fits &= table[name] >= low
            if high is not None:
                fits &= table[name] <= high
            if name == "tokens" and (low, high) != (None, None):
                fits &= table[name] >= 0
        if query.ended:
            fits &= table["ended"] == self._reasons.get(query.ended, -1)
        if query.failed:
            fits &= table["failed"]
        return fits

    def _ordered(self, table: np.ndarray, order: Order) -> np.ndarray:
        table = table[::-1]
        if order == "newest":
            return table
        if order == "oldest":
            return table[::-1]
        name = "reward" if order in ("highest", "lowest") else "tokens"
        values = table[name].astype(float)
        values[values == -1 if name == "tokens" else np.isnan(values)] = np.nan
        if order in ("highest", "longest"):
            values = -values
        return table[np.argsort(values, kind="stable")]  # NaN comes last.

    def row(self, offset: int) -> Row | None:
        """The row at an offset; None if no row begins there.

        Raises:
            OSError: the file cannot be read.
        """
        table = self.table()
        places = np.flatnonzero(table["offset"] == offset)
        if not len(places):
            return None
        with self.path.open("rb") as file:
            return _at(file.fileno(), table[places[0]], Query())

    def pairs(self, before: int, after: int) -> list[tuple[Row, Row]]:
        """First samples of the tasks that two evaluations have in common.

        Args:
            before: step of an evaluation.
            after: step of another one.

        Raises:
            OSError: the file cannot be read.
        """
        first, second = (self._first_samples(step) for step in (before, after))
        return [(first[task], second[task]) for task in first if task in second]

    def _first_samples(self, step: int) -> Mapping[str, Row]:
        table = self.table()
        chosen = table[table["held_out"] & (table["step"] == step)][:MAX_PAIRS]
        found: dict[str, Row] = {}
        if len(chosen):
            with self.path.open("rb") as file:
                for entry in chosen:
                    row = _at(file.fileno(), entry, Query())
                    if row is not None:
                        found.setdefault(str(row["task_id"]), row)
        return found


def _last_line_end(path: Path) -> int:
    """Offset after the last newline of a file."""
    with path.open("rb") as file:
        place = file.seek(0, os.SEEK_END)
        while place:
            begin = max(0, place - CHUNK)
            file.seek(begin)
            at = file.read(place - begin).rfind(b"\n")
            if at >= 0:
                return begin + at + 1
            place = begin
        return 0


def _row(line: bytes) -> Row | None:
    """A row with the types of a sample; None for a line that is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    number = (int, float)
    fits = (
        type(row.get("step")) is int
        and row.get("split") in ("train", "eval")
        and isinstance(row.get("prompt"), str)
        and isinstance(row.get("completion"), str)
        and isinstance(row.get("reward", ""), (*number, type(None)))
        and isinstance(row.get("tokens"), (int, type(None)))
        and abs(row["step"]) < 2**31
        and abs(row.get("tokens") or 0) < 2**31
        and not abs(row["reward"] or 0) >= 2**1000
    )
    return row if fits else None


def _at(file: int, entry: Any, query: Query) -> Row | None:
    """Reads the row of an entry, if it has the query's text and task.

    The bytes are searched first, since most lines do not have the text.
    """
    line = os.pread(file, int(entry["size"]), int(entry["offset"]))
    text = query.text
    # JSON escapes what is not ASCII, and then upper case cannot be told from lower.
    if text.isascii() and json.dumps(text)[1:-1].lower().encode() not in line.lower():
        return None
    row = _row(line)
    if row is None:  # The file was cut since it was indexed.
        return None
    if query.task and str(row.get("task_id")) != query.task:
        return None
    wanted = text.casefold()
    if text and not any(wanted in each.casefold() for each in texts_of(row)):
        return None
    return {**row, "offset": int(entry["offset"])}


def texts_of(row: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a row: prompt, completion, error and conversation."""
    yield row["completion"]
    yield row["prompt"]
    yield str(row.get("error", ""))
    yield from _texts(turns_of(row))


def turns_of(row: Mapping[str, Any]) -> Sequence[Any]:
    """The turns of a row's conversation; none if it has none, or is damaged."""
    conversation = row.get("conversation")
    turns = conversation.get("turns") if isinstance(conversation, Mapping) else None
    return turns if isinstance(turns, list) else []


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts(each)
