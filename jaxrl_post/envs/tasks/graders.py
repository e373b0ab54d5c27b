"""Graders: compare a response with the answer, and compute the reward."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.envs.tasks.blocks import last_block
from jaxrl_post.envs.tasks.grading_functions import Grade, GradingFunction
from jaxrl_post.envs.tasks.json_schema import (
    SchemaError,
    is_valid,
    json_of,
    require_library,
    require_schema,
)
from jaxrl_post.envs.tasks.mathematics.answers import (
    Extraction,
    final_answer,
    is_number,
    require_extraction,
)
from jaxrl_post.envs.tasks.mathematics.reading import equal
from jaxrl_post.envs.tasks.mathematics.text import cleaned
from jaxrl_post.envs.tasks.token_f1 import token_f1, words
from jaxrl_post.jsonl import is_unicode

__all__ = ["GRADERS", "Grader", "WeightedGraders"]

GRADERS = ("exact", "f1", "math", "regex", "schema")


@dataclass(frozen=True)
class Grader:
    """One way to grade; `envs.tasks.prompt_answers.PromptAnswers` documents all.

    Attributes:
        name: "exact", "f1", "math", "regex", "schema", or "module:name" of a function.
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
        if ":" in self.name and self.extract is not None:
            raise ValueError(
                f"extract is for the graders {', '.join(GRADERS)}; the function "
                f"{self.name!r} gets the whole response"
            )
        _ = self._function
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
        elif self.name == "schema":
            require_library()
        else:
            _ = self._function

    @property
    def needs_answer(self) -> bool:
        """Whether it cannot do without an answer."""
        function = self._function
        return function is None or "answer" in function.needs

    def takes(self, name: str) -> bool:
        """Whether it is a function that asks for one of `grading_functions.NAMES`."""
        function = self._function
        return function is not None and function.takes(name)

    def wrong_with(self, answer: Any) -> str | None:
        """Says why an answer of a file cannot be a reference; None if it can.

        Raises:
            ModuleNotFoundError: "schema" without the extra.
        """
        if self.name not in GRADERS:
            return None
        if self.name == "schema":
            try:
                require_schema(answer)
            except SchemaError as error:
                return str(error)
            return None
        if self.name == "f1" and isinstance(answer, list):
            if not answer:
                return "is an empty list"
            reasons = (self._wrong_with_text(each) for each in answer)
            return next((reason for reason in reasons if reason is not None), None)
        return self._wrong_with_text(answer)

    def _wrong_with_text(self, answer: Any) -> str | None:
        if type(answer) not in (str, int, float):
            return f"must be a text or a number, got {type(answer).__name__}"
        text = _text(answer).strip()
        if not text:
            return "is empty"
        if not is_unicode(text):
            return "holds half of a surrogate pair"
        if self.name == "f1" and not words(text):
            return f"has no word but articles and punctuation, got {text!r}"
        if self.name == "math" and r"\boxed" in self.reference(answer):
            return f"has no box that closes at its end, got {text[-80:]!r}"
        if self.name == "regex":
            try:
                re.compile(text)
            except re.error as error:
                return f"must be a regular expression, got {text!r}: {error}"
        return None

    def reference(self, answer: Any) -> str:
        """The answer as text; of several accepted texts the first."""
        if self.name == "f1":
            return _accepted(answer)[0].strip()
        text = _text(answer).strip()
        if self.name != "math":
            return text
        # In GSM8K's files, an answer is a whole solution that ends with "#### 72".
        return final_answer(text) or cleaned(text)

    def shown(self, reference: str) -> str | None:
        """A right response for a reference; None if the grader does not define one."""
        if self.extract is not None:
            return None
        if self.name == "math":
            mark = "#### {}" if is_number(reference) else r"\boxed{{{}}}"
            return mark.format(reference)
        return reference if self.name in ("exact", "f1") else None

    def grade(self, response: str, answer: Any) -> Grade:
        """Grades a response by the answer alone; see `graded`.

        Args:
            response: the policy's response.
            answer: the answer as it is in the file.
        """
        return self.graded({"response": response, "answer": answer})

    def graded(self, given: Mapping[str, Any]) -> Grade:
        """Grades a response.

        Args:
            given: "response", "answer", and the other `grading_functions.NAMES` that a
                function asks for.

        Raises:
            NumberError: a function returned no finite real numbers.
            TimeoutError: "math" took too much processor time.
            ModuleNotFoundError: "math" without the extra.
        """
        if (function := self._function) is not None:
            return function.grade(given)
        response, answer = given["response"], given["answer"]
        said = self._said(response)
        if self.name == "schema":
            return _valid(said, answer)
        if said is None:
            reward, correct = 0.0, False
        elif self.name == "f1":
            reward, correct = token_f1(said, _accepted(answer))
        else:
            correct = self._is_right(said, self.reference(answer))
            reward = float(correct)
        answered = said is not None
        return _graded(reward, correct=correct, answered=answered)

    @property
    def _function(self) -> GradingFunction | None:
        """The function that a name with a module names; None for a built-in grader."""
        if self.name in GRADERS:
            return None
        known = f"{', '.join(GRADERS)}, <module>:<function>"
        return GradingFunction.named(self.name, known)

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
        if self.name == "schema":
            return last_block(response)
        return response.strip()

    def _is_right(self, said: str, reference: str) -> bool:
        if self.name == "math":
            return equal(reference, said)
        if self.name == "regex":
            return re.fullmatch(reference, said, re.DOTALL) is not None
        return said == reference


@dataclass(frozen=True)
class WeightedGraders:
    """Graders, each with the factor of its value in the reward.

    >>> graders = WeightedGraders.parse("exact,f1", "1,0.5")
    >>> grade = graders.grade({"response": "red fox", "answer": "fox red"})
    >>> grade.reward, grade.parts
    (0.5, {'exact': 0.0, 'f1': 1.0})
    """

    graders: tuple[Grader, ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(
        cls,
        names: str,
        weights: str | float = "",
        extract: str | None = None,
        extraction: Extraction = "strict",
    ) -> WeightedGraders:
        """Reads the options, and checks them.

        Args:
            names: of graders, with commas between.
            weights: as many numbers, with commas between; "" for 1 each.
            extract: for all graders but functions.
            extraction: for the grader "math".

        Raises:
            ValueError: a grader does not exist or is given twice, an option does not
                fit them, or there is not one finite weight for each.
        """
        found = [name.strip() for name in names.split(",")]
        again = [name for name, count in Counter(found).items() if count > 1]
        if again:
            raise ValueError(f"grader {again[0]!r} is given twice; drop one of the two")
        # An option that fits no grader goes to all of them, which refuse it.
        cut = {*found}.intersection(GRADERS) or found
        read = ("math",) if "math" in found else found
        graders = tuple(
            Grader(
                name,
                extract if name in cut else None,
                extraction if name in read else "strict",
            )
            for name in found
        )
        for each in graders:
            each.check()
        return cls(graders, _weights(weights, found))

    @property
    def has_functions(self) -> bool:
        """Whether a grader is a function of the user."""
        return any(each.name not in GRADERS for each in self.graders)

    @property
    def needs_answer(self) -> bool:
        """Whether a grader cannot do without an answer."""
        return any(each.needs_answer for each in self.graders)

    def takes(self, name: str) -> bool:
        """Whether a grader asks for one of `grading_functions.NAMES`."""
        return any(each.takes(name) for each in self.graders)

    def prepare(self) -> None:
        """Imports what the graders need; raises ModuleNotFoundError."""
        for each in self.graders:
            each.prepare()

    def wrong_with(self, answer: Any) -> str | None:
        """Says why one of the graders cannot use an answer; None if all can."""
        told = (each.wrong_with(answer) for each in self.graders)
        return next((reason for reason in told if reason is not None), None)

    def reference(self, answer: Any) -> str:
        """The answer as text, as the first grader of the package reads it."""
        return self._first.reference(answer)

    def shown(self, reference: str) -> str | None:
        """A response that this grader calls right; None if it defines none."""
        return self._first.shown(reference)

    def grade(self, given: Mapping[str, Any]) -> Grade:
        """Grades a response.

        Args:
            given: values by `grading_functions.NAMES`; functions are called with
                these.

        Returns:
            The weighted sum. Of several graders, the parts are their values by name,
            the parts of a function's value are metrics NAME/PART, and of metrics with
            one name the first grader's counts.

        Raises:
            NumberError, TimeoutError, ModuleNotFoundError: as `Grader.grade`.
        """
        grades = [each.graded(given) for each in self.graders]
        reward = sum(w * g.reward for w, g in zip(self.weights, grades, strict=True))
        if len(grades) == 1:
            return Grade(reward, grades[0].metrics, grades[0].parts)
        metrics: dict[str, float] = {}
        for name, each in zip(self._names, grades, strict=True):
            own = {f"{name}/{part}": value for part, value in each.parts.items()}
            metrics = {**each.metrics, **own, **metrics}
        values = [each.reward for each in grades]
        return Grade(reward, metrics, dict(zip(self._names, values, strict=True)))

    @property
    def _first(self) -> Grader:
        own = (each for each in self.graders if each.name in GRADERS)
        return next(own, self.graders[0])

    @property
    def _names(self) -> list[str]:
        """The functions' own names; with their modules, where two would be the same."""
        names = [each.name.rpartition(":")[2] for each in self.graders]
        return [
            name if names.count(name) == 1 else each.name.replace(":", ".")
            for name, each in zip(names, self.graders, strict=True)
        ]


def _valid(said: str | None, schema: Any) -> Grade:
    """Grades JSON; a text that is none counts as no answer."""
    try:
        value = json_of("" if said is None else said)
    except ValueError:
        return _graded(0.0, correct=False, answered=False)
    valid = is_valid(schema, value)
    return _graded(float(valid), correct=valid, answered=True)


def _graded(reward: float, *, correct: bool, answered: bool) -> Grade:
    metrics = {"correct": float(correct), "answered": float(answered)}
    return Grade(reward, metrics)


def _accepted(answer: Any) -> list[str]:
    return [_text(each) for each in (answer if isinstance(answer, list) else [answer])]


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, default=str)


def _weights(text: str | float, names: list[str]) -> tuple[float, ...]:
    if text == "":
        return (1.0,) * len(names)
    try:
        found = tuple(map(float, str(text).split(",")))
    except ValueError:
        found = ()
    if len(found) != len(names) or not all(map(math.isfinite, found)):
        raise ValueError(
            "weights must be one finite number for each grader, with commas between; "
            f"got {text!r} for {', '.join(names)}"
        )
    return found
