"""Small data bases that are generated, so that text2sql needs no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

__all__ = ["DOMAINS", "VARIANTS", "Content", "Domain", "Table", "content"]

# Data bases of each domain: their rows differ, their tables do not.
VARIANTS = 8

# A row of a table: integers and texts.
type Row = tuple[Any, ...]


@dataclass(frozen=True)
class Table:
    """A table: an identifier, a reference to the table before, and columns.

    Attributes:
        name: of the table, a plural.
        one: the same in the singular.
        text: name and meaning of a column of texts.
        texts: its values; of a `unique` column one for each row.
        numbers: name, meaning, least and greatest value of each column of integers.
            The values of a column differ from row to row.
    """

    name: str
    one: str
    text: tuple[str, str]
    texts: tuple[str, ...]
    numbers: tuple[tuple[str, str, int, int], ...]


@dataclass(frozen=True)
class Domain:
    """Three tables: a row of `many` belongs to one of `one`, and one of `events` to it.

    Attributes:
        one: its text is a unique name.
        group: name, meaning and values of a column of `one` with repeated texts.
        many: its text is a unique name.
        events: its text is a repeated one.
    """

    one: Table
    group: tuple[str, str, tuple[str, ...]]
    many: Table
    events: Table


@dataclass(frozen=True)
class Content:
    """A data base.

    Attributes:
        domain: what it is about.
        schema: the statements that create and fill it.
        one: rows (id, name, group, number) of the first table.
        many: rows (id, name, id of one, number, number) of the second.
        events: rows (id, id of many, text, number) of the third.
    """

    domain: Domain
    schema: str
    one: tuple[Row, ...]
    many: tuple[Row, ...]
    events: tuple[Row, ...]


_PEOPLE = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kim",
    "Leo", "Mia", "Ned", "Olga", "Pia", "Rex", "Sue", "Tom", "Una", "Vera", "Will",
    "Xenia", "Yves", "Zoe",
)  # fmt: skip
_MONTHS = ("January", "March", "May", "July", "October")

DOMAINS = (
    Domain(
        Table("authors", "author", ("name", "name"), _PEOPLE,
              (("born", "year of birth", 1900, 1990),)),
        ("country", "country", ("Chile", "Ghana", "India", "Norway")),
        Table("books", "book", ("title", "title"),
              ("Ash", "Birch", "Cedar", "Dunes", "Embers", "Ferns", "Gates", "Harbour",
               "Islands", "Jade", "Kites", "Lanterns", "Mirrors", "Needles", "Orchids"),
              (("pages", "number of pages", 80, 900),
               ("year", "year", 1950, 2020))),
        Table("loans", "loan", ("reader", "reader"), _PEOPLE[:6],
              (("days", "number of days", 1, 60),)),
    ),
    Domain(
        Table("makers", "maker", ("name", "name"),
              ("Acme", "Borealis", "Corvus", "Delta", "Elm", "Fjord", "Granite"),
              (("founded", "founding year", 1850, 2015),)),
        ("city", "city", ("Lima", "Oslo", "Turin")),
        Table("products", "product", ("name", "name"),
              ("anvil", "bench", "clock", "drill", "easel", "fan", "glove", "hammer",
               "iron", "jug", "kettle", "lamp", "mug", "needle", "oven", "pan"),
              (("price", "price", 2, 300), ("stock", "stock", 1, 200))),
        Table("sales", "sale", ("month", "month"), _MONTHS,
              (("amount", "amount", 1, 90),)),
    ),
    Domain(
        Table("teachers", "teacher", ("name", "name"), _PEOPLE[:12],
              (("age", "age", 25, 66),)),
        ("subject", "subject", ("art", "biology", "history", "physics")),
        Table("students", "student", ("name", "name"), _PEOPLE[8:],
              (("height", "height", 120, 199), ("distance", "distance to school",
                                                1, 60))),
        Table("marks", "mark", ("term", "term"), ("autumn", "spring", "summer"),
              (("points", "number of points", 10, 100),)),
    ),
    Domain(
        Table("clubs", "club", ("name", "name"),
              ("Arrows", "Bears", "Comets", "Dragons", "Eagles", "Foxes", "Giants"),
              (("founded", "founding year", 1870, 2010),)),
        ("city", "city", ("Accra", "Bergen", "Cork")),
        Table("players", "player", ("name", "name"), _PEOPLE,
              (("shirt", "shirt number", 1, 99), ("caps", "number of caps", 0, 150))),
        Table("matches", "match", ("place", "place"), ("away", "home", "neutral"),
              (("minutes", "number of minutes", 5, 120),)),
    ),
    Domain(
        Table("rivers", "river", ("name", "name"),
              ("Alder", "Brook", "Clear", "Deep", "Elder", "Frost", "Grey"),
              (("length", "length", 40, 3000),)),
        ("region", "region", ("east", "north", "west")),
        Table("bridges", "bridge", ("name", "name"),
              ("Abbey", "Baker", "Castle", "Dock", "East", "Ferry", "Guild", "Hill",
               "Iron", "King", "Long", "Mill", "New", "Old"),
              (("span", "span", 20, 900), ("opened", "opening year", 1800, 2020))),
        Table("repairs", "repair", ("firm", "firm"), ("Hale", "Moss", "Tarn"),
              (("cost", "cost", 1, 500),)),
    ),
)  # fmt: skip


@lru_cache(maxsize=len(DOMAINS) * VARIANTS)
def content(seed: int, domain: int, variant: int) -> Content:
    """A data base; the same arguments make the same one.

    Args:
        seed: of the rows.
        domain: index in `DOMAINS`.
        variant: in [0, `VARIANTS`).

    >>> content(0, 1, 0).schema.splitlines()[0]
    'CREATE TABLE makers ('
    """
    about = DOMAINS[domain]
    rng = Random(f"{seed} {domain} {variant}")
    names = rng.sample(about.one.texts, rng.randint(4, 6))
    groups = _some_twice(rng, about.group[2], len(names))
    ones = tuple(
        _numbered(names, groups, *_columns(rng, about.one, len(names))),
    )
    titles = rng.sample(about.many.texts, rng.randint(8, 12))
    # The last row has none, so that questions about rows without any have an answer.
    owners = [ones[i % 2][0] for i in range(3)]
    owners += [rng.choice(ones[:-1])[0] for _ in titles[3:]]
    rng.shuffle(owners)
    many = tuple(_numbered(titles, owners, *_columns(rng, about.many, len(titles))))
    size = rng.randint(12, 16)
    # The last row again has none.
    of = [rng.choice(many[:-1])[0] for _ in range(size)]
    texts = _some_twice(rng, about.events.texts, size)
    events = tuple(_numbered(of, texts, *_columns(rng, about.events, size)))
    schema = "\n".join(_statements(about, ones, many, events))
    return Content(about, schema, ones, many, events)


def _numbered(*columns: Sequence[Any]) -> list[Row]:
    """Rows of columns, with identifiers from 1 before them."""
    return [(number, *row) for number, row in enumerate(zip(*columns, strict=True), 1)]


def _columns(rng: Random, table: Table, size: int) -> list[list[int]]:
    return [rng.sample(range(low, high + 1), size) for _, _, low, high in table.numbers]


def _some_twice(rng: Random, values: Sequence[str], size: int) -> list[str]:
    """Draws texts, the first of them at least twice, in any order."""
    chosen = [values[0], *(rng.choice(values) for _ in range(size - 2)), values[0]]
    rng.shuffle(chosen)
    return chosen


def _statements(
    about: Domain,
    ones: Sequence[Row],
    many: Sequence[Row],
    events: Sequence[Row],
) -> list[str]:
    one, more, event = about.one, about.many, about.events
    columns = {
        one: [
            f"{one.text[0]} TEXT NOT NULL",
            f"{about.group[0]} TEXT NOT NULL",
            *_integers(one),
        ],
        more: [f"{more.text[0]} TEXT NOT NULL", _reference(one), *_integers(more)],
        event: [
            _reference(more),
            f"{event.text[0]} TEXT NOT NULL",
            *_integers(event),
        ],
    }
    statements = []
    for table, rows in ((one, ones), (more, many), (event, events)):
        inner = ",\n".join(
            f"  {column}" for column in ["id INTEGER PRIMARY KEY", *columns[table]]
        )
        statements.append(f"CREATE TABLE {table.name} (\n{inner}\n);")
        values = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)
        statements.append(f"INSERT INTO {table.name} VALUES {values};")
    return statements


def _integers(table: Table) -> list[str]:
    return [f"{name} INTEGER NOT NULL" for name, *_ in table.numbers]


def _reference(table: Table) -> str:
    return f"{table.one}_id INTEGER NOT NULL REFERENCES {table.name} (id)"


def _literal(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
