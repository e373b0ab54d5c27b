"""Graders: compare a response with the answer and compute the reward."""

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
    """The reward of a response, and metrics to report."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Grader:
    """One way to grade; `envs.tasks.prompt_answers.PromptAnswers` documents all.

    Attributes:
        name: "exact", "math", "regex", or "module:name" of a function.
        extract: a regular expression for the part of a response to grade.
        extraction: "strict" or "flexible", for the grader "math".

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
        """Raises ValueError for an unknown grader or options that do not fit it."""
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
        """Imports the grader's library or function, so that the first grade is fast."""
        if self.name == "math":
            equal("1", "1")
        elif self.name not in GRADERS:
            _function(self.name)

    def wrong_with(self, answer: Any) -> str | None:
        """Why an answer of a file cannot be used as a reference; None if it can."""
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
        """The answer as text, as responses are compared with it."""
        text = _text(answer).strip()
        if self.name != "math":
            return text
        # In GSM8K's files, an answer is a whole solution that ends with "#### 72".
        return final_answer(text) or text.strip("$")

    def shown(self, reference: str) -> str | None:
        """A right response for a reference; None if the grader does not define one."""
        if self.extract is not None:
            return None
        return {"exact": reference, "math": f"#### {reference}"}.get(self.name)

    def grade(self, response: str, answer: Any) -> Grade:
        """Grades a response.

        Args:
            response: the policy's response.
            answer: the answer as it is in the file.

        Raises:
            ValueError: a grading function returned no finite number.
            ModuleNotFoundError: "math" without the extra.
        """
        if self.name not in GRADERS:
            return Grade(_finite(self.name, _function(self.name)(response, answer)))
        said = self._said(response)
        correct = said is not None and self._is_right(said, self.reference(answer))
        metrics = {"correct": float(correct), "answered": float(said is not None)}
        return Grade(float(correct), metrics)

    def _said(self, response: str) -> str | None:
        """The part of a response to grade; None if there is none."""
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
        # The module exists, but an import inside it failed: keep that error.
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
