"""The alarms of a run, for the page: by rule, with their steps and values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Alarms", "Raised", "alarms_of"]

MAX_ALARMS = 50  # Most alarms that a page shows.


@dataclass(frozen=True)
class Raised:
    """The alarms of one rule.

    Attributes:
        rule: its name.
        action: of the run, such as "warn".
        runbook: texts of the rule by heading; those without a text are left out.
        count: number of all its alarms.
        shown: steps in words and evidence, of the first ones.
    """

    rule: str
    action: str
    runbook: Mapping[str, str]
    count: int
    shown: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Alarms:
    """The alarms of a run.

    Attributes:
        rules: those with alarms, in the order of their first ones.
        left: number of alarms that are not shown.
    """

    rules: list[Raised]
    left: int


def alarms_of(rows: Sequence[Mapping[str, Any]]) -> Alarms:
    """Groups the rows of alarms.jsonl by rule.

    Args:
        rows: in the order of the file. If there are more than fit, the first alarm of
            every rule comes before the second of any, and so on.

    >>> row = {"step": 4, "first": 2, "action": "warn", "evidence": "a 2, above 1"}
    >>> row |= {"means": "a is high.", "causes": "", "look": ""}
    >>> [found] = alarms_of([{"rule": "high", **row}]).rules
    >>> found.shown, found.runbook
    ([('2 to 4', 'a 2, above 1')], {'Meaning': 'a is high.'})
    """
    count = Counter[str]()
    places = list[int]()
    for row in rows:
        places.append(count[row["rule"]])
        count[row["rule"]] += 1
    order = sorted(range(len(rows)), key=lambda at: (places[at], at))[:MAX_ALARMS]
    rules: dict[str, Raised] = {}
    for row in (rows[at] for at in sorted(order)):
        name = row["rule"]
        if name not in rules:
            texts = {
                "Meaning": row["means"],
                "Usual causes": row["causes"],
                "Look at": row["look"],
            }
            runbook = {heading: text for heading, text in texts.items() if text}
            rules[name] = Raised(name, row["action"], runbook, count[name])
        first, last = row["first"], row["step"]
        steps = f"{last}" if first == last else f"{first} to {last}"
        rules[name].shown.append((steps, row["evidence"]))
    return Alarms(list(rules.values()), len(rows) - len(order))
