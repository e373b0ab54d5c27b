"""Questions over SQLite data bases: the reward is for what the query returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

from jaxrl_post.conversations import text_of
from jaxrl_post.envs.env import Message, Split, Step, Task, TaskSequence, response
from jaxrl_post.envs.tasks.blocks import last_block
from jaxrl_post.envs.tasks.held_out import rows_of_split, split_of
from jaxrl_post.envs.tasks.ranges import (
    require_integer,
    require_path_options,
    require_share,
)
from jaxrl_post.envs.tasks.sql.execution import (
    KINDS,
    Database,
    Executor,
    Rows,
    SqlError,
)
from jaxrl_post.envs.tasks.sql.questions import LEVELS, Question, ask
from jaxrl_post.envs.tasks.sql.results import equal, is_ordered
from jaxrl_post.envs.tasks.sql.shipped import DOMAINS, VARIANTS, content
from jaxrl_post.jsonl import BadRowError, OnBadRow, require_on_bad_row
from jaxrl_post.tables import listed

__all__ = ["Text2SQL"]

# How a prompt shows the tables of a data base.
type Tables = Literal["create", "columns"]

# Options that only the generated questions have.
_GENERATED = ("level", "slips", "seed", "train_size", "eval_size")
_LONGEST_VALUE = 40
_TABLES = (
    "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL "
    "AND type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
)


@dataclass(frozen=True)
class Text2SQL:
    r"""Questions over SQLite data bases; a query is judged by the rows it returns.

    The prompt has the tables (their CREATE statements, and a few rows) and a question.
    The query is the last fenced block of the response, or all of it without one. The
    reward is 1 if the query returns the rows of the right query, in any order unless
    the right query ends with ORDER BY; see `results.equal`.

    The query runs in a process of its own that can read the data base and nothing else
    (`execution.Executor`). A query that would write, attach, or load anything is
    refused, and so are several statements, and what depends on the clock or on chance;
    time, rows and memory are limited.

    Without `path`, questions over small data bases are generated, in four levels of
    difficulty (`questions.ask`). No question of "eval" is one of "train".

    Args:
        path: .jsonl or .json with one object a line, or .parquet (extra `parquet`):
            "question", "query", the right one, and "database", the path of a SQLite
            file relative to this file, or "schema", statements that create and fill a
            data base.
        eval_path: the evaluation rows; without it, one question in ten of `path` is
            held out by a hash of its text.
        on_bad_row: "fail" raises at a bad row, "skip" drops it and logs a warning.
        check: whether right queries are tried when the file is read: one that fails or
            returns no row makes a bad row, because any query without a row would be
            right. Without, the first is found when an answer is judged.
        level: of generated questions: from all levels up to this one, in [1, 4].
        slips: share of the demonstrations, in [0, 1], that select all columns, as of
            a model that does not read what is asked for; for generated questions.
        seed: of the generated data bases and questions.
        train_size: number of generated training questions.
        eval_size: number of generated evaluation questions.
        tables: how the prompt shows the tables: "create", their CREATE statements, or
            "columns", a line each, such as "loans(id, reader, days)".
        rows: how many rows of each table the prompt shows, in [0, 20].
        seconds: processor time of a query; twice that must be well below the deadline
            of a judgement, which is on the clock.
        max_rows: a query that returns more rows fails.
        executed_reward: reward of a query that runs but returns other rows, in [0, 1).
            A little helps a model that rarely writes valid SQL to begin; it also pays
            for `SELECT 1`, so set it back to 0 once queries run.
        instruction: text after the question and an empty line.

    Raises:
        ValueError: an option is outside its range, or does not fit `path`.

    >>> environment = Text2SQL(level=1, rows=0)
    >>> task = environment.tasks("train")[3]
    >>> print(task.messages[0].content.partition("Question: ")[2])
    List the name of every author whose country is Chile.
    <BLANKLINE>
    Write one SQLite query that answers the question. Put it into one fenced block.
    >>> task.reference
    "SELECT name FROM authors WHERE country = 'Chile'"
    >>> answer = "```sql\nSELECT a.name FROM authors a WHERE country LIKE 'chile'\n```"
    >>> step = environment.step(task, (*task.messages, Message("assistant", answer)))
    >>> step.reward
    1.0
    """

    path: str | None = None
    eval_path: str | None = None
    on_bad_row: OnBadRow = "fail"
    check: bool = True
    level: int = LEVELS
    slips: float = 0.0
    seed: int = 0
    train_size: int = 10_000
    eval_size: int = 200
    tables: Tables = "create"
    rows: int = 3
    seconds: float = 2.0
    max_rows: int = 10_000
    executed_reward: float = 0.0
    instruction: str = (
        "Write one SQLite query that answers the question. Put it into one fenced "
        "block."
    )

    def __post_init__(self) -> None:
        require_on_bad_row(self.on_bad_row)
        require_integer("level", self.level, 1, LEVELS)
        require_share("slips", self.slips)
        if self.tables not in get_args(Tables.__value__):
            raise ValueError(
                f"tables must be 'create' or 'columns', got {self.tables!r}"
            )
        require_integer("rows", self.rows, 0, 20)
        require_integer("max_rows", self.max_rows, 1, 1_000_000)
        for name in ("train_size", "eval_size"):
            require_integer(name, getattr(self, name), 1, 2**30)
        if type(self.check) is not bool:
            raise ValueError(f"check must be true or false, got {self.check!r}")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be positive, got {self.seconds!r}")
        if not 0 <= self.executed_reward < 1:
            raise ValueError(
                f"executed_reward must be in [0, 1), got {self.executed_reward!r}"
            )
        require_path_options(self, _GENERATED)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "text2sql"

    def tasks(self, split: Split) -> Sequence[Task]:
        """The questions of a split.

        Raises:
            ValueError: at a bad row under "fail", or if the split is empty.
            ModuleNotFoundError: for .parquet without the extra.
            OSError: if the file cannot be read.
        """
        if self.path is None:
            size = self.train_size if split == "train" else self.eval_size
            return TaskSequence(size, lambda index: self._generated(split, index))
        separate = split == "eval" and self.eval_path is not None
        path = self.eval_path if separate and self.eval_path else self.path
        rows = rows_of_split(
            split,
            self.path,
            self.eval_path,
            partial(self._row, Path(path).parent),
            lambda row: row.question.text,
            on_bad_row=self.on_bad_row,
        )
        return tuple(
            self._task(index, row.question, row.database)
            for index, row in enumerate(rows)
        )

    def prepare(self) -> None:
        """Starts the process that runs queries."""
        self._executor.run(Database(schema=""), "SELECT 1")

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Runs the query of the response, and compares its rows.

        Returns:
            The last step, with the metrics `solved`, `executed` (whether the query ran
            to its end), and one of `error/refused`, `error/time`, `error/size` and
            `error/invalid` if it did not.

        Raises:
            RuntimeError: the right query fails.
        """
        database = Database(task.data["path"], task.data["schema"])
        kind = None
        solved = False
        try:
            found = self._executor.run(database, last_block(response(conversation)))
        except SqlError as error:
            kind = error.kind
        else:
            ordered = is_ordered(task.reference)
            expected = self._expected(database, task.reference)
            solved = equal(found, expected, ordered=ordered)
        metrics = {"solved": float(solved), "executed": float(kind is None)}
        metrics |= {f"error/{each}": float(each == kind) for each in KINDS}
        reward = 1.0 if solved else self.executed_reward if kind is None else 0.0
        return Step(reward, True, metrics=metrics)

    def demonstration(self, task: Task) -> str:
        """The right query, in a fenced block; for a share `slips` of all columns."""
        query = task.reference
        if Random(f"{self.seed} {task.id} {query} slip").random() < self.slips:
            query = "SELECT * FROM " + query.partition(" FROM ")[2]
        return f"```sql\n{query}\n```"

    @property
    def _executor(self) -> Executor:
        return _executor(self.seconds, self.max_rows)

    def _told(self, database: Database) -> str:
        return _told(self._executor, database, self.tables, self.rows)

    def _expected(self, database: Database, query: str) -> Rows:
        try:
            return _rows(self.seconds, self.max_rows, database, query)
        except SqlError as error:
            raise RuntimeError(
                f"the right query fails ({error.kind}: {error}): {query[:200]}"
            ) from error

    def _generated(self, split: Split, index: int) -> Task:
        rng = Random(f"{self.seed} {split} {index}")
        while True:
            about = content(
                self.seed, rng.randrange(len(DOMAINS)), rng.randrange(VARIANTS)
            )
            question = ask(rng, about, rng.randint(1, self.level))
            # Only the question decides: it is held out from all data bases.
            if split_of(question.text) == split:
                return self._task(index, question, Database(schema=about.schema))

    def _task(self, index: int, question: Question, database: Database) -> Task:
        parts = [self._told(database), f"Question: {question.text}"]
        prompt = "\n\n".join(
            [*parts, *([self.instruction] if self.instruction else [])]
        )
        data = {"path": database.path, "schema": database.schema}
        return Task(index, (Message("user", prompt),), question.query, data)

    def _row(self, folder: Path, row: Mapping[str, Any]) -> list[_Row]:
        for name in ("question", "query"):
            if name not in row:
                raise BadRowError(f"no field {name!r} (fields: {listed(row)})")
            if not text_of(row[name], f"field {name!r}").strip():
                raise BadRowError(f"field {name!r} is empty")
        given = [name for name in ("database", "schema") if row.get(name) is not None]
        if len(given) != 1:
            raise BadRowError(
                "exactly one of the fields 'database' and 'schema' must be given, got "
                f"{listed(given)}"
            )
        text = text_of(row[given[0]], f"field {given[0]!r}")
        database = Database(schema=text)
        if given == ["database"]:
            path = folder / text
            if not path.is_file():
                raise BadRowError(f"field 'database': there is no file {str(path)!r}")
            database = Database(path=str(path.absolute()))
        question = Question(row["question"].strip(), row["query"].strip())
        try:
            self._told(database)
        except SqlError as error:
            raise BadRowError(f"field {given[0]!r} is no data base: {error}") from None
        if self.check:
            limits = (self.seconds, self.max_rows)
            reason = _wrong_with(*limits, database, question.query)
            if reason is not None:
                told = f"field 'query' {reason}: {question.query[:80]!r}"
                raise BadRowError(told)
        return [_Row(question, database)]


@dataclass(frozen=True)
class _Row:
    question: Question
    database: Database


@lru_cache(maxsize=4)
def _executor(seconds: float, max_rows: int) -> Executor:
    # One for the life of the process; it ends with it.
    return Executor(seconds, max_rows)


@lru_cache(maxsize=1024)
def _rows(seconds: float, max_rows: int, database: Database, query: str) -> Rows:
    # Samples of one prompt have one right query.
    return _executor(seconds, max_rows).run(database, query)


@lru_cache(maxsize=1 << 16)
def _wrong_with(
    seconds: float, max_rows: int, database: Database, query: str
) -> str | None:
    """Says why a reference query is unusable; cached, as both splits read the file."""
    try:
        found = _rows(seconds, max_rows, database, query)
    except SqlError as error:
        return f"fails ({error.kind}): {error}"
    return None if found.rows else "returns no row, as any wrong query may"


@lru_cache(maxsize=1024)
def _told(executor: Executor, database: Database, tables: Tables, rows: int) -> str:
    """The tables of a data base, as the prompt shows them."""
    parts = []
    for name, statement in executor.run(database, _TABLES).rows:
        if tables == "create":
            parts.append(f"{statement.strip()};")
            if not rows:
                continue
        shown = executor.run(database, f"SELECT * FROM {_quoted(name)} LIMIT {rows}")
        if tables == "columns":
            table, *columns = (
                each if each.isidentifier() else _quoted(each)
                for each in (name, *shown.columns)
            )
            parts.append(f"{table}({', '.join(columns)})")
        if rows:
            lines = [" | ".join(map(_literal, row)) for row in shown.rows]
            parts += [f"-- {line}" for line in [f"First rows of {name}:", *lines]]
    if not parts:
        raise SqlError("invalid", "it has no table")
    return "\n".join(parts)


def _quoted(name: str) -> str:
    """Quotes a name for SQL; it may have any characters."""
    return '"' + name.replace('"', '""') + '"'


def _literal(value: Any) -> str:
    """A value as SQL writes it, on one line, shortened."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return "x'...'"
    if not isinstance(value, str):
        return str(value)
    text = " ".join(value.split())
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}..."
    return "'" + text.replace("'", "''") + "'"
