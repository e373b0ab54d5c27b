"""Answers names of options that another framework, or another program here, has.

The rows are in names.toml, which the docs page of the names reads too.
"""

import dataclasses
import functools
import importlib
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from launch import topics

__all__ = [
    "PROGRAMS",
    "Name",
    "answers",
    "check_names",
    "names",
    "options_of",
    "program_of",
]

PROGRAMS = (
    "grpo", "ppo", "distill", "sft", "dpo", "reward", "evaluate", "convert", "serve",
    "chat", "report", "watch", "plan", "redteam", "doctor",
)  # fmt: skip

# Most lines about a word that is only a part of names.
MANY = 12
# A key of Hydra, such as actor_rollout_ref.rollout.n=8 or +trainer.seed=1.
_HYDRA = re.compile(r"[+~]{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)*)=")


@dataclasses.dataclass(frozen=True)
class Name:
    """An option of another framework.

    Attributes:
        framework: that has it.
        name: as it is written there.
        to: options of programs here; none if there is no counterpart.
        note: what differs, or what to do instead; may be empty.
    """

    framework: str
    name: str
    to: tuple[str, ...] = ()
    note: str = ""

    @functools.cached_property
    def parts(self) -> list[str]:
        """The parts of the name, spelled as `_parts` spells them."""
        return _parts(self.name)


@functools.cache
def names() -> tuple[Name, ...]:
    """Returns all rows of names.toml, in its order."""
    text = (resources.files(__package__) / "names.toml").read_text(encoding="utf-8")
    return tuple(
        Name(framework, name, tuple(row.get("to", ())), row.get("note", ""))
        for framework, rows in tomllib.loads(text).items()
        for name, row in rows.items()
    )


def program_of(name: str) -> Any:
    """Returns the `cli.Program` of launch.NAME."""
    return importlib.import_module(f"launch.{name}").PROGRAM


def options_of(config: Any, prefix: str = "--") -> set[str]:
    """The options of a configuration, as they are written on a command line.

    Args:
        config: a dataclass of options, and of sections of them.
        prefix: of the options' names.
    """
    found: set[str] = set()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{field.name}".replace("_", "-")
        if dataclasses.is_dataclass(value):
            found |= options_of(value, f"{name}.")
            continue
        found.add(name)
        if field.type is bool or isinstance(value, bool):
            head, dot, last = name.rpartition(".")
            found.add(f"{head}.no-{last}" if dot else f"--no-{name[2:]}")
    return found


def check_names(arguments: Sequence[str], program: str, own: Collection[str]) -> None:
    """Refuses options that the program lacks, if one of them is known from elsewhere.

    Args:
        arguments: of the command line.
        program: its name, such as "launch.grpo".
        own: its options.

    Raises:
        ValueError: says what each of these options is here.
    """
    words = [word for word in _words(arguments) if word.replace("_", "-") not in own]
    told = {word: answers(word, program, own) or topics.told(word) for word in words}
    if not any(told.values()):
        return
    unknown = ["there is no such option; --help WORD finds those that mention a word"]
    raise ValueError(
        "\n".join(f"{word}: {'; '.join(told[word] or unknown)}" for word in told)
    )


def answers(
    word: str, program: str, own: Collection[str], *, within: bool = False
) -> list[str]:
    """Says what an option of another framework, or of another program, is here.

    Args:
        word: the option, in any spelling: --num-generations, grpo.num_generations.
        program: the program that is asked, such as "launch.grpo".
        own: its options.
        within: also finds longer names, in which the word stands.

    Returns:
        A line for each answer; empty for a name that is not known.

    >>> options = options_of(program_of("grpo").default([]))
    >>> answers("--num-generations", "launch.grpo", options)
    ["TRL's num_generations is --rollout.samples-per-prompt"]
    """
    asked = _parts(word)
    found = [each for each in names() if each.parts == asked]
    here = [each for each in found if any(option in own for option in each.to)]
    if not here:
        option = f"--{'.'.join(asked)}".replace("_", "-")
        if option not in own and (where := _having(option)):
            near = [each for each in sorted(own) if _is_end(asked, _parts(each))]
            other = _listed(near) if near else "none"
            return [f"an option of {_listed(where)}; {program} has {other}"]
    found = here or found or _alike(asked, own)
    found = [e for e in found if any(option in own for option in e.to)] or found
    if not found and asked[-1].startswith("no_"):
        return answers(".".join([*asked[:-1], asked[-1][3:]]), program, own)
    if not found and within:
        text = ".".join(asked)
        found = [each for each in names() if text in ".".join(each.parts)]
    lines = _lines(found, program, own)
    more = len(lines) - MANY
    return [*lines[:MANY], *([f"and {more} more"] if more > 0 else [])]


def _words(arguments: Sequence[str]) -> Iterator[str]:
    """The names of options, also of those that are written as keys of Hydra.

    A key without dots counts only before all options: later it may be the value of one,
    such as NAME=VALUE.
    """
    before = ""
    leading = True
    for argument in arguments:
        key = _HYDRA.match(argument)
        if argument.startswith("@") and not before.startswith("--"):
            yield "@"
        elif argument.startswith("--") and len(argument) > 2:
            leading = False
            yield argument.partition("=")[0]
        elif key is not None and not Path(argument).exists():
            is_value = before.startswith("--") and "=" not in before
            if leading or ("." in key[1] and not is_value):
                yield key[1]
        before = argument


def _alike(asked: list[str], own: Collection[str]) -> list[Name]:
    """The names that end as the word does, or with which the word ends."""
    longer = [each for each in names() if _is_end(each.parts, asked)]
    if longer:
        most = max(len(each.parts) for each in longer)
        return [each for each in longer if len(each.parts) == most]
    # The program's own option of this name is what was meant.
    if any(_parts(option)[-1] == asked[-1] for option in own):
        return []
    return [each for each in names() if _is_end(asked, each.parts)]


def _lines(found: Iterable[Name], program: str, own: Collection[str]) -> list[str]:
    """One line for each answer; frameworks with the same name and answer share it."""
    alike: dict[tuple[tuple[str, ...], str], list[Name]] = {}
    for each in found:
        alike.setdefault((each.to, each.note), []).append(each)
    lines = []
    for (to, note), (first, *others) in alike.items():
        owners = [first, *(each for each in others if each.name == first.name)]
        here = [option for option in to if option in own]
        told = f"{_listed([f"{each.framework}'s" for each in owners])} {first.name} "
        told += f"is {_listed(here or to)}" if to else "has no counterpart"
        if to and not here:
            where = _listed(dict.fromkeys(p for each in to for p in _having(each)))
            told += f" of {where}, and {program} has none"
        lines.append(told + (f": {note}" if note else ""))
    return lines


def _having(option: str) -> list[str]:
    """The programs that have an option."""
    return [f"launch.{name}" for name, own in _owned().items() if option in own]


@functools.cache
def _owned() -> Mapping[str, set[str]]:
    """The options of every program."""
    made = ((name, program_of(name)) for name in PROGRAMS)
    return {name: options_of(program.default([])) for name, program in made}


def _parts(name: str) -> list[str]:
    """The parts of a name, in one spelling.

    >>> _parts("--grpo.Num-Generations")
    ['grpo', 'num_generations']
    """
    return name.lstrip("-+~").lower().replace("-", "_").split(".")


def _is_end(end: Sequence[str], whole: Sequence[str]) -> bool:
    return len(end) <= len(whole) and list(whole[-len(end) :]) == list(end)


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
