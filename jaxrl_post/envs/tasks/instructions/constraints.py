"""One verifiable instruction: its kind and parameters, checked when it is made."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.envs.env import Message, Task, response
from jaxrl_post.envs.tasks.instructions.checks import KINDS, UNSUPPORTED, Type
from jaxrl_post.jsonl import is_unicode

__all__ = ["Constraint"]

_RELATIONS = ("at least", "less than")


@dataclass(frozen=True)
class Constraint:
    """An instruction that a program can verify.

    It is also a reward function, for `Criterion`: 1.0 if the response fulfils it, 0.0
    otherwise.

    Args:
        kind: such as "punctuation:no_comma"; see `checks.KINDS`.
        parameters: of the kind, such as {"num_words": 50, "relation": "less than"}.
            Those that are None are dropped.

    Raises:
        ValueError: there is no such kind, or the parameters do not fit it.

    >>> short = Constraint(
    ...     "length_constraints:number_words", {"num_words": 3, "relation": "less than"}
    ... )
    >>> short.holds("Two words."), short.holds("Three more words.")
    (True, False)
    >>> from jaxrl_post.envs.rubric import Criterion, Rubric
    >>> from jaxrl_post.envs.tasks.arithmetic import Arithmetic
    >>> rubric = Rubric(Arithmetic(), {"short": Criterion(short, weight=0.1)})
    """

    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind in UNSUPPORTED:
            raise ValueError(
                f"{self.kind!r} is not supported: {UNSUPPORTED[self.kind]}"
            )
        if self.kind not in KINDS:
            close = difflib.get_close_matches(str(self.kind), KINDS, n=1)
            hint = (
                f"did you mean {close[0]!r}?" if close else f"there are {list(KINDS)}"
            )
            raise ValueError(f"there is no kind of instruction {self.kind!r}; {hint}")
        given = {k: v for k, v in self.parameters.items() if v is not None}
        wanted = KINDS[self.kind].parameters
        if set(given) != set(wanted):
            raise ValueError(
                f"{self.kind} takes {sorted(wanted) or 'no parameters'}, got "
                f"{sorted(given) or 'none'}"
            )
        for name, type_ in wanted.items():
            given[name] = _checked(name, given[name], type_)
        nth, of = given.get("nth_paragraph"), given.get("num_paragraphs", 0)
        if nth is not None and not 1 <= nth <= of:
            raise ValueError(
                f"nth_paragraph must be from 1 to num_paragraphs, {of}, got {nth}"
            )
        object.__setattr__(self, "parameters", given)

    def holds(self, text: str) -> bool:
        """Whether a text fulfils it; an empty text fulfils nothing."""
        return bool(text.strip()) and KINDS[self.kind].check(text, **self.parameters)

    def __call__(self, task: Task, conversation: tuple[Message, ...]) -> float:
        """1.0 if the response that ends a conversation fulfils it, otherwise 0.0."""
        del task
        return float(self.holds(response(conversation)))


def _checked(name: str, value: Any, type_: Type) -> Any:
    match type_:
        case "count":
            # Parquet makes floats of integers where other rows have none.
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if type(value) is int and 0 <= value <= 100_000:
                return value
            wanted = "an integer in [0, 100000]"
        case "relation":
            if value in _RELATIONS:
                return value
            wanted = "'at least' or 'less than'"
        case "texts":
            if isinstance(value, list | tuple) and value and all(map(_is_text, value)):
                return tuple(value)
            wanted = "a list of texts"
        case "text":
            if _is_text(value):
                return value
            wanted = "a text"
    raise ValueError(f"{name} must be {wanted}, got {value!r:.80}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and is_unicode(value)
