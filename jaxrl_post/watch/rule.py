"""Rules of a run as data: a metric, a bound, an action, and a runbook."""

import dataclasses
import difflib
import functools
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jaxrl_post.jsonl import json_file
from jaxrl_post.watch.bounds import BOUNDS, READ, Condition, RuleError
from jaxrl_post.watch.bounds import check as check_bound

__all__ = ["ACTIONS", "ALL", "Rule", "default_rules", "read_rules"]

# From the mildest to the strongest.
ACTIONS = ("warn", "keep", "pause", "stop")
# For `off`: every rule.
ALL = "all"


@dataclass(frozen=True)
class Rule:
    """A rule that the metrics of every step are held against.

    A watch rule is a bound on a metric with an action: warn, keep, pause or stop.

    A step is bad if all conditions hold in it. The rule raises an alarm after `steps`
    bad steps in a row; a step that does not measure a metric of it counts as none.

    Attributes:
        name: of the rule, such as "reward-collapse".
        conditions: of a bad step, at least one.
        means: says in a sentence what has happened.
        causes: the usual ones.
        look: says what to look at, and what to change.
        steps: bad steps in a row until the alarm, >= 1.
        action: "warn"; "keep", to save a checkpoint and the batch too; "pause", to wait
            for a person; "stop", to save and to end the run.
        options: values of options without which the rule is not used, by whole names.
    """

    name: str
    conditions: tuple[Condition, ...]
    means: str
    causes: str = ""
    look: str = ""
    steps: int = 3
    action: str = "warn"
    options: Mapping[str, Any] = field(default_factory=dict)

    def applies(self, options: Mapping[str, Any]) -> bool:
        """Whether a run with these options, by their whole names, uses the rule.

        A program that lacks an option of a bound lacks the metric too.
        """
        bounds = (each.bound for each in self.conditions)
        return all(
            name in options and options[name] == value
            for name, value in self.options.items()
        ) and all(name in options for name in bounds if isinstance(name, str))


@functools.cache
def _defaults() -> Mapping[str, Mapping[str, Any]]:
    text = (resources.files(__package__) / "rules.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def default_rules() -> tuple[Rule, ...]:
    """Returns the rules that every run has, in the order of rules.toml.

    >>> "reward-collapse" in [rule.name for rule in default_rules()]
    True
    """
    return tuple(_rule(name, row, "rules.toml") for name, row in _defaults().items())


def read_rules(file: str | None = None, off: tuple[str, ...] = ()) -> tuple[Rule, ...]:
    """Returns the default rules and the rules of a file, without the ones that are off.

    A table of the file has the name of a rule. If the rule exists, its keys replace the
    ones of that name; another bound replaces the bound.

    Args:
        file: TOML, or JSON if the name ends in .json; None for the default rules.
        off: names of rules, or "all" for all of them, the file's included.

    Raises:
        RuleError: the file cannot be read, a rule in it is wrong, or `off` names none.
    """
    tables = {name: dict(row) for name, row in _defaults().items()}
    for name, row in (_read(Path(file)) if file is not None else {}).items():
        if not isinstance(row, dict):
            raise RuleError(
                f"{file}: {name} must be a table of a rule's keys; got {row!r:.80}"
            )
        before = tables.get(name, {})
        if any(key in row for key in BOUNDS):
            # Another bound does not read the keys of the bound before.
            left = {*BOUNDS, *READ}
            before = {key: item for key, item in before.items() if key not in left}
        tables[name] = before | row
    for name in off:
        if name != ALL and name not in tables:
            raise RuleError(_unknown("there is no rule", name, tables))
    left = {} if ALL in off else {k: v for k, v in tables.items() if k not in off}
    return tuple(_rule(name, row, file or "rules.toml") for name, row in left.items())


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.suffix.lower() == ".json":
            found = json_file(file, strict=True)
        else:
            found = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise RuleError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise RuleError(f"{file} must hold a table for each rule; got {found!r:.80}")
    return found


# Keys of a condition, also of one in `also`.
OF_CONDITION = {each.name for each in dataclasses.fields(Condition)} - {
    "kind",
    "bound",
} | set(BOUNDS)
OF_RULE = {each.name for each in dataclasses.fields(Rule)} - {"name", "conditions"}


def _rule(name: str, row: Mapping[str, Any], file: str) -> Rule:
    """Makes a rule of its table.

    Raises:
        RuleError: names the file, the rule and the key.
    """
    where = f"{file}: rule {name}"
    if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", name) is None:
        raise RuleError(
            f"{file}: a rule's name has letters, digits, -, _ and dots, 64 at most; "
            f"got {name!r:.80}"
        )
    known = OF_CONDITION | OF_RULE | {"also"}
    for key in row:
        if key not in known:
            raise RuleError(_unknown(f"{where}: unknown key", key, known))
    also = row.get("also", [])
    if not isinstance(also, list) or not all(isinstance(each, dict) for each in also):
        raise RuleError(f"{where}: also must be a list of tables; got {also!r:.80}")
    first = {key: item for key, item in row.items() if key in OF_CONDITION}
    conditions = [_condition(first, where)]
    conditions += [_condition(each, f"{where}, also") for each in also]
    own = {key: item for key, item in row.items() if key in OF_RULE}
    _check_types(Rule, own, where)
    if not own.get("means"):
        raise RuleError(f"{where}: means must say what has happened; got none")
    if own.get("steps", 1) < 1:
        raise RuleError(f"{where}: steps must be at least 1; got {own['steps']}")
    if own.get("action", "warn") not in ACTIONS:
        raise RuleError(
            f"{where}: action must be one of {', '.join(ACTIONS)}; got "
            f"{own['action']!r}"
        )
    return Rule(name=name, conditions=tuple(conditions), **own)


def _condition(row: Mapping[str, Any], where: str) -> Condition:
    for key in row:
        if key not in OF_CONDITION:
            raise RuleError(_unknown(f"{where}: unknown key", key, OF_CONDITION))
    kinds = [key for key in row if key in BOUNDS]
    if len(kinds) != 1:
        raise RuleError(
            f"{where}: needs one bound among {', '.join(BOUNDS)}; got "
            f"{' and '.join(kinds) or 'none'}. `also` takes further conditions"
        )
    for key, readers in READ.items():
        if key in row and kinds[0] not in readers:
            raise RuleError(
                f"{where}: {key} is read by {', '.join(readers)}, not by {kinds[0]}; "
                "drop it"
            )
    own = {key: item for key, item in row.items() if key not in BOUNDS}
    _check_types(Condition, own, where)
    if not own.get("metric"):
        raise RuleError(f"{where}: needs a metric, such as reward/mean; got none")
    made = Condition(kind=kinds[0], bound=row[kinds[0]], **own)
    check_bound(made, where)
    return made


def _check_types(kind: type, values: Mapping[str, Any], where: str) -> None:
    hints = get_type_hints(kind)
    for key, item in values.items():
        hint = hints[key]
        wanted = get_args(hint) or (hint,)
        if hint not in (int, float, str):
            wanted, hint = (Mapping,), "a table"
        fits = isinstance(item, float | int if float in wanted else wanted)
        if not fits or isinstance(item, bool):
            named = hint if isinstance(hint, str) else hint.__name__
            raise RuleError(
                f"{where}: {key} must be {named}; got {json.dumps(item, default=str)}"
            )
        if isinstance(item, float) and not math.isfinite(item):
            raise RuleError(f"{where}: {key} must be finite; got {item}")


def _unknown(told: str, name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    return f"{told} {name!r}; {hint or 'known: ' + ', '.join(sorted(known))}"
