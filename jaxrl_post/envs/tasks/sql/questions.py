"""Questions over the generated data bases, with the queries that answer them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from jaxrl_post.envs.tasks.sql.shipped import Content

__all__ = ["LEVELS", "Question", "ask"]

LEVELS = 4


@dataclass(frozen=True)
class Question:
    """A question and the query that answers it."""

    text: str
    query: str


def ask(rng: Random, about: Content, level: int) -> Question:
    """A question of a level.

    Level 1 selects rows of one table; 2 aggregates, sorts and groups them; 3 joins
    tables; 4 joins groups, compares them, or looks for what is absent.

    Args:
        rng: chooses the question and its names and numbers.
        about: the data base.
        level: in [1, `LEVELS`].

    >>> from jaxrl_post.envs.tasks.sql.shipped import content
    >>> ask(Random(1), content(0, 0, 0), 2).text
    'What is the average year of all books?'
    """
    return rng.choice(_BY_LEVEL[level])(rng, about)


def _count(rng: Random, about: Content) -> Question:
    table = rng.choice((about.domain.one, about.domain.many, about.domain.events))
    return Question(
        f"How many {table.name} are there?", f"SELECT COUNT(*) FROM {table.name}"
    )


def _one_value(rng: Random, about: Content) -> Question:
    table = about.domain.many
    place = rng.randrange(2)
    row = rng.choice(about.many)
    column, meaning, *_ = table.numbers[place]
    return Question(
        f"What is the {meaning} of the {table.one} {row[1]}?",
        f"SELECT {column} FROM {table.name} WHERE {table.text[0]} = '{row[1]}'",
    )


def _above(rng: Random, about: Content) -> Question:
    table = about.domain.many
    place = rng.randrange(2)
    column, meaning, *_ = table.numbers[place]
    values = [row[3 + place] for row in about.many]
    # The greatest value is above any of these, so the answer is never empty.
    value = rng.randrange(min(values), max(values))
    return Question(
        f"List the {table.text[1]} of every {table.one} whose {meaning} is greater "
        f"than {value}.",
        f"SELECT {table.text[0]} FROM {table.name} WHERE {column} > {value}",
    )


def _between(rng: Random, about: Content) -> Question:
    table = about.domain.many
    place = rng.randrange(2)
    column, meaning, least, greatest = table.numbers[place]
    # Around the value of a row, so the answer is never empty.
    value = rng.choice(about.many)[3 + place]
    low, high = rng.randint(least, value), rng.randint(value, greatest)
    return Question(
        f"List the {table.text[1]} of every {table.one} whose {meaning} is between "
        f"{low} and {high}.",
        f"SELECT {table.text[0]} FROM {table.name} WHERE {column} BETWEEN {low} "
        f"AND {high}",
    )


def _in_group(rng: Random, about: Content) -> Question:
    table, (column, meaning, _) = about.domain.one, about.domain.group
    value = rng.choice(about.one)[2]
    return Question(
        f"List the {table.text[1]} of every {table.one} whose {meaning} is {value}.",
        f"SELECT {table.text[0]} FROM {table.name} WHERE {column} = '{value}'",
    )


def _aggregate(rng: Random, about: Content) -> Question:
    table = rng.choice((about.domain.many, about.domain.events))
    column, meaning, *_ = rng.choice(table.numbers)
    choices = [("average", "AVG"), ("smallest", "MIN"), ("largest", "MAX")]
    if table is about.domain.events:
        # Amounts, which have a sum; years and heights have none that means anything.
        choices.append(("total", "SUM"))
    word, function = rng.choice(choices)
    return Question(
        f"What is the {word} {meaning} of all {table.name}?",
        f"SELECT {function}({column}) FROM {table.name}",
    )


def _extreme(rng: Random, about: Content) -> Question:
    table = rng.choice((about.domain.one, about.domain.many))
    column, meaning, *_ = rng.choice(table.numbers)
    word, direction = rng.choice((("smallest", "ASC"), ("largest", "DESC")))
    return Question(
        f"Which {table.one} has the {word} {meaning}? Give the {table.text[1]}.",
        f"SELECT {table.text[0]} FROM {table.name} "
        f"ORDER BY {column} {direction} LIMIT 1",
    )


def _sorted(rng: Random, about: Content) -> Question:
    table = rng.choice((about.domain.one, about.domain.many))
    column, meaning, *_ = rng.choice(table.numbers)
    text = table.text
    said, direction = rng.choice((("smallest", "ASC"), ("largest", "DESC")))
    return Question(
        f"List the {text[1]} and the {meaning} of all {table.name}, the {said} "
        f"{meaning} first.",
        f"SELECT {text[0]}, {column} FROM {table.name} ORDER BY {column} {direction}",
    )


def _per_text(rng: Random, about: Content) -> Question:
    if rng.random() < 0.5:
        table, (column, meaning, _) = about.domain.one, about.domain.group
    else:
        table = about.domain.events
        column, meaning = table.text
    return Question(
        f"How many {table.name} are there for each {meaning}? Give the {meaning} and "
        "the number.",
        f"SELECT {column}, COUNT(*) FROM {table.name} GROUP BY {column}",
    )


def _different(rng: Random, about: Content) -> Question:
    del rng
    table = about.domain.events
    return Question(
        f"How many different values of {table.text[1]} do the {table.name} have?",
        f"SELECT COUNT(DISTINCT {table.text[0]}) FROM {table.name}",
    )


def _belonging(rng: Random, about: Content) -> Question:
    one, many = about.domain.one, about.domain.many
    owner = _owner(rng, about)
    return Question(
        f"List the {many.text[1]} of every {many.one} of the {one.one} {owner}.",
        f"SELECT m.{many.text[0]} FROM {many.name} AS m {_joined(about)} "
        f"WHERE o.{one.text[0]} = '{owner}'",
    )


def _owner_of(rng: Random, about: Content) -> Question:
    one, many = about.domain.one, about.domain.many
    title = rng.choice(about.many)[1]
    column, meaning, _ = about.domain.group
    return Question(
        f"What is the {meaning} of the {one.one} of the {many.one} {title}?",
        f"SELECT o.{column} FROM {many.name} AS m {_joined(about)} "
        f"WHERE m.{many.text[0]} = '{title}'",
    )


def _largest_of_owner(rng: Random, about: Content) -> Question:
    one, many = about.domain.one, about.domain.many
    owner = _owner(rng, about)
    column, meaning, *_ = rng.choice(many.numbers)
    return Question(
        f"What is the largest {meaning} of all {many.name} of the {one.one} {owner}?",
        f"SELECT MAX(m.{column}) FROM {many.name} AS m {_joined(about)} "
        f"WHERE o.{one.text[0]} = '{owner}'",
    )


def _events_of(rng: Random, about: Content) -> Question:
    many, events = about.domain.many, about.domain.events
    text = rng.choice(about.events)[2]
    column, meaning = events.text
    return Question(
        f"List the {many.text[1]} of every {many.one} that has a {events.one} whose "
        f"{meaning} is {text}, each once, in alphabetical order.",
        f"SELECT DISTINCT m.{many.text[0]} FROM {many.name} AS m "
        f"JOIN {events.name} AS e ON e.{many.one}_id = m.id "
        f"WHERE e.{column} = '{text}' ORDER BY m.{many.text[0]}",
    )


def _number_each(rng: Random, about: Content) -> Question:
    del rng
    one, many = about.domain.one, about.domain.many
    return Question(
        f"How many {many.name} does each {one.one} have? Give the {one.text[1]} and "
        f"the number, also for those that have none.",
        f"SELECT o.{one.text[0]}, COUNT(m.id) FROM {one.name} AS o "
        f"LEFT JOIN {many.name} AS m ON m.{one.one}_id = o.id GROUP BY o.id",
    )


def _without(rng: Random, about: Content) -> Question:
    domain = about.domain
    table, other = rng.choice(((domain.one, domain.many), (domain.many, domain.events)))
    return Question(
        f"List the {table.text[1]} of every {table.one} that has no {other.one}.",
        f"SELECT {table.text[0]} FROM {table.name} WHERE id NOT IN "
        f"(SELECT {table.one}_id FROM {other.name})",
    )


def _at_least(rng: Random, about: Content) -> Question:
    del rng
    one, many = about.domain.one, about.domain.many
    owners = [row[2] for row in about.many]
    least = max(owners.count(each) for each in owners)
    number = max(least - 1, 2)
    return Question(
        f"List the {one.text[1]} of every {one.one} that has at least {number} "
        f"{many.name}.",
        f"SELECT o.{one.text[0]} FROM {many.name} AS m {_joined(about)} "
        f"GROUP BY o.id HAVING COUNT(*) >= {number}",
    )


def _above_average(rng: Random, about: Content) -> Question:
    many = about.domain.many
    column, meaning, *_ = rng.choice(many.numbers)
    return Question(
        f"List the {many.text[1]} of every {many.one} whose {meaning} is greater than "
        f"the average {meaning} of all {many.name}.",
        f"SELECT {many.text[0]} FROM {many.name} WHERE {column} > "
        f"(SELECT AVG({column}) FROM {many.name})",
    )


def _totals(rng: Random, about: Content) -> Question:
    one, many, events = about.domain.one, about.domain.many, about.domain.events
    column, meaning, *_ = rng.choice(events.numbers)
    return Question(
        f"What is the total {meaning} of the {events.name} of each {one.one}'s "
        f"{many.name}? Give the {one.text[1]} and the total, the largest total first "
        f"and equal totals by {one.text[1]}, and leave out those without any "
        f"{events.one}.",
        f"SELECT o.{one.text[0]}, SUM(e.{column}) AS total FROM {many.name} AS m "
        f"{_joined(about)} JOIN {events.name} AS e ON e.{many.one}_id = m.id "
        f"GROUP BY o.id ORDER BY total DESC, o.{one.text[0]}",
    )


def _owner(rng: Random, about: Content) -> str:
    """The name of a row of the first table to which rows of the second belong."""
    owner = rng.choice(about.many)[2]
    return next(row[1] for row in about.one if row[0] == owner)


def _joined(about: Content) -> str:
    one = about.domain.one
    return f"JOIN {one.name} AS o ON o.id = m.{one.one}_id"


_BY_LEVEL: dict[int, tuple[Callable[[Random, Content], Question], ...]] = {
    1: (_count, _one_value, _one_value, _above, _between, _in_group),
    2: (_aggregate, _aggregate, _extreme, _sorted, _per_text, _different),
    3: (_belonging, _owner_of, _largest_of_owner, _events_of, _number_each),
    4: (_without, _at_least, _above_average, _totals),
}
