"""Grading functions of a user: what they are called with, and what they may return."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from jaxrl_post.envs.real_number import NumberError, real_number, shown
from jaxrl_post.specs import imported

__all__ = ["NAMES", "Grade", "GradingFunction"]

# The values that a grading function may ask for, by the names of its parameters.
NAMES = (
    "response", "answer", "prompt", "row", "finish_reason", "num_tokens", "task",
)  # fmt: skip


@dataclass(frozen=True)
class Grade:
    """The reward of a response, and what to report.

    Attributes:
        reward: a finite number.
        metrics: by name.
        parts: the unweighted parts of the reward, by name; empty if it has only one.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GradingFunction:
    """A function of a user, and what it is called with.

    Attributes:
        name: "module:name".
        call: the function.
        by_position: the values that it takes by position alone, in order.
        by_name: the values that it takes by name.
        needs: of both, those without a default.
    """

    name: str
    call: Callable[..., Any]
    by_position: tuple[str, ...]
    by_name: tuple[str, ...]
    needs: frozenset[str]

    @classmethod
    def named(cls, name: str, known: str) -> GradingFunction:
        """Imports a function, and reads the names of its parameters.

        Args:
            name: "module:name" of a function, or of an object that can be called.
            known: the names of other graders, for error messages.

        Raises:
            ValueError: there is none; it is async or a generator; its parameters are
                unknown, or ask for something that no grader gets.
        """
        function = imported(name, "grader", known)
        what, gets = f"grader {name!r}", ", ".join(NAMES)
        if isinstance(function, type):
            raise ValueError(
                f"{what} is a class; name a function, or an object of the class that "
                "can be called"
            )
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{what}: its parameters are unknown ({error}); name a function that "
                "is written in Python"
            ) from error
        # Arguments that functools.partial has bound stay bound.
        bound = function.keywords if isinstance(function, functools.partial) else {}
        by_position, by_name, needs = list[str](), list[str](), set[str]()
        passed_over = False
        for each in signature.parameters.values():
            alone = each.kind is each.POSITIONAL_ONLY
            if each.kind is each.VAR_KEYWORD:
                taken = {*by_position, *by_name, *bound}
                by_name += [own for own in NAMES if own not in taken]
            elif each.kind is each.VAR_POSITIONAL or each.name in bound:
                continue
            elif each.name in NAMES and not (alone and passed_over):
                (by_position if alone else by_name).append(each.name)
                if each.default is each.empty:
                    needs.add(each.name)
            elif each.default is each.empty:
                raise ValueError(
                    f"{what}: it has the parameter {each.name!r} without a default, "
                    f"and a grader gets {gets}; rename it, or give it a default"
                )
            else:
                passed_over = True
        if not by_position and not by_name:
            raise ValueError(f"{what} must take at least one of {gets}; it takes none")
        return cls(name, function, tuple(by_position), tuple(by_name), frozenset(needs))

    def takes(self, name: str) -> bool:
        """Whether it is called with one of `NAMES`."""
        return name in self.by_position or name in self.by_name

    def grade(self, given: Mapping[str, Any]) -> Grade:
        """Calls the function.

        Args:
            given: values by `NAMES`; one that is absent is left to its default.

        Raises:
            NumberError: it returned neither a finite real number nor a dictionary of
                such numbers by name.
        """
        first = [
            given[each] for each in takewhile(given.__contains__, self.by_position)
        ]
        rest = {each: given[each] for each in self.by_name if each in given}
        return _graded(f"what grader {self.name!r} returns", self.call(*first, **rest))


def _graded(what: str, value: Any) -> Grade:
    if not isinstance(value, Mapping):
        return Grade(real_number(what, value))
    if not value:
        raise NumberError(f"{what} must be a number or name parts, got {shown(value)}")
    parts: dict[str, float] = {}
    for name, part in value.items():
        if not isinstance(name, str) or not name:
            raise NumberError(
                f"{what}: the name of a part must be a text, got {shown(name)}"
            )
        parts[name] = real_number(f"part {name!r} of {what}", part)
    return Grade(real_number(f"the sum of {what}", sum(parts.values())), parts=parts)
