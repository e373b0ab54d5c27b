"""What a response is worth beside an answer: graders by name, or a function."""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.envs.tasks.math_answers import (
    Extraction,
    equal,
    final_answer,
    require_extraction,
)
from jaxrl_post.jsonl import is_unicode

__all__ = ["GRADERS", "Grade", "Grader"]

GRADERS = ("exact", "math", "regex")


@dataclass(frozen=True)
class Grade:
    """The reward of a response, and what is reported beside it."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Grader:
    """A way to grade; `envs.prompt_answers.PromptAnswers` says which there are.

    Attributes:
        name: "exact", "math", "regex", or "module:name" of a function.
        extract: a regular expression for what of a response is graded.
        extraction: of "math".

    >>> Grader("regex").grade("It is 72.", r".*\\b72\\b.*").reward
    1.0
    >>> Grader("exact", extract="<answer>(.*?)</answer>").grade(
    ...     "Hm. <answer> B </answer>", "B"
    ... ).reward
    1.0
    """

    name: str
    extract: str | None = None
    extraction: Extraction = "strict"

    def check(self) -> None:
        """Refuses (ValueError) what does not exist or does not go together."""
        require_extraction(self.extraction)
        if self.extraction != "strict" and self.name != "math":
            raise ValueError(
                f"extraction is for the grader 'math' alone, got {self.extraction!r} "
                f"with {self.name!r}"
            )
        if self.name not in GRADERS:
            _function(self.name)
            if self.extract is not None:
                raise ValueError(
                    f"extract is for the graders {', '.join(GRADERS)}; the function "
                    f"{self.name!r} gets the whole response"
                )
        if self.extract is not None:
            try:
                re.compile(self.extract)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"extract must be a regular expression, got {self.extract!r}: "
                    f"{error}"
                ) from None

    def prepare(self) -> None:
        """Imports what the first grade would have to wait for."""
        if self.name == "math":
            equal("1", "1")
        elif self.name not in GRADERS:
            _function(self.name)

    def wrong_with(self, answer: Any) -> str | None:
        """Why an answer of a file cannot be graded against, None where it can."""
        if self.name not in GRADERS:
            return None
        if type(answer) not in (str, int, float):
            return f"must be a text or a number, got {type(answer).__name__}"
        text = _text(answer).strip()
        if not text:
            return "is empty"
        if not is_unicode(text):
            return "holds half of a surrogate pair"
        if self.name == "regex":
            try:
                re.compile(text)
            except re.error as error:
                return f"must be a regular expression, got {text!r}: {error}"
        return None

    def reference(self, answer: Any) -> str:
        """The answer as a text."""
        text = _text(answer).strip()
        if self.name != "math":
            return text
        # As in GSM8K's files, whose answers end with "#### 72".
        return final_answer(text) or text.strip("$")

    def shown(self, reference: str) -> str | None:
        """A response that is right, None where a grader leaves that open."""
        if self.extract is not None:
            return None
        return {"exact": reference, "math": f"#### {reference}"}.get(self.name)

    def grade(self, response: str, answer: Any) -> Grade:
        """Grades a response.

        Args:
            response: of the policy.
            answer: as the file has it.

        Raises:
            ValueError: a function returned something else than a finite number.
            ModuleNotFoundError: "math" without the extra.
        """
        if self.name not in GRADERS:
            return Grade(_finite(self.name, _function(self.name)(response, answer)))
        said = self._said(response)
        correct = said is not None and self._is_right(said, self.reference(answer))
        metrics = {"correct": float(correct), "answered": float(said is not None)}
        return Grade(float(correct), metrics)

    def _said(self, response: str) -> str | None:
        """What of a response is graded."""
        if self.extract is not None:
            matches = list(re.finditer(self.extract, response, re.DOTALL))
            if not matches:
                return None
            last = matches[-1]
            found = last[1] if last.re.groups else last[0]
            return None if found is None else found.strip()
        if self.name == "math":
            return final_answer(response, extraction=self.extraction)
        return response.strip()

    def _is_right(self, said: str, reference: str) -> bool:
        if self.name == "math":
            return equal(reference, said)
        if self.name == "regex":
            return re.fullmatch(reference, said, re.DOTALL) is not None
        return said == reference


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


def _finite(name: str, value: Any) -> float:
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise ValueError(f"grader {name!r} must return a finite number, got {value!r}")
    return float(value)


@functools.cache
def _function(name: str) -> Callable[[str, Any], Any]:
    """The function that "module:name" names."""
    module, colon, attribute = name.partition(":")
    known = f"{', '.join(GRADERS)}, <module>:<function>"
    if not colon:
        raise ValueError(f"there is no grader {name!r}; there are {known}")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        # A module that exists and misses a dependency of its own is another matter.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no grader {name!r}: there is no module {error.name!r} on "
            f"sys.path. There are {known}"
        ) from error
    if not callable(found):
        raise ValueError(
            f"there is no grader {name!r}: {module!r} has no function {attribute!r}"
        )
    return found
