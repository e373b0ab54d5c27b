"""Several graders of one response: the reward is the weighted sum of their values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.envs.tasks.graders import GRADERS, Grader
from jaxrl_post.envs.tasks.grading_functions import Grade
from jaxrl_post.envs.tasks.mathematics.answers import Extraction

__all__ = ["WeightedGraders"]


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
