"""Integer arithmetic in as few characters as possible: "7+15=" and "22".

A randomly initialised character-level model learns this task in minutes, so the task
shows on a laptop whether a training loop learns at all.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.envs.env import Message, Split, Step, Task, TaskSequence, response
from jaxrl_post.envs.tasks.ranges import require_integer, require_share

__all__ = ["LEVELS", "Arithmetic"]

LEVELS: Mapping[int, Mapping[str, Any]] = {
    0: {"operations": ">", "terms": 3, "digits": 2},
    1: {"operations": "+", "terms": 2, "digits": 1},
    2: {"operations": "+-", "terms": 2, "digits": 1},
    3: {"operations": "+-", "terms": 2, "digits": 2},
    4: {"operations": "+-", "terms": 3, "digits": 2},
    5: {"operations": "+-*", "terms": 3, "digits": 3},
}

# One problem in ten is held out. The hash uses the text alone, so a held-out problem is
# held out at every level, size and seed, and a curriculum never trains on it.
_HELD_OUT_ONE_IN = 10

# With at most so many problems, all are listed and shuffled, so that none repeats. With
# more, problems are drawn at random: a list would be long, and repetitions are rare.
_LISTED_SPACE = 100_000


@dataclass(frozen=True)
class Arithmetic:
    """Sums, differences, products and maxima of small non-negative integers.

    Operands are uniform in [0, 10**digits), operations uniform in `operations`. The
    maximum of two numbers is written "a>b" ("7>83>64=" has the answer 83). A product
    binds tighter than a sum, and a sum tighter than a maximum. The reward is 1 if the
    answer, stripped of white space, is the canonical decimal integer ("22", "-3", "0"),
    and 0 otherwise: "+22", "022" and "22." are wrong, so that a problem has exactly one
    right string to learn.

    A hash of its text assigns one problem in ten to "eval", the others to "train". If
    at most 100,000 problems exist, each appears once, and a split is clipped to its
    number of problems (level 1 has 100 in all). Otherwise task i is drawn by a
    counter-based generator from (seed, split, i) alone, and problems may repeat.

    Args:
        operations: distinct characters out of "+-*>".
        terms: number of operands, in [2, 8].
        digits: largest number of digits of an operand, in [1, 9].
        seed: chooses and orders the problems.
        slips: share of the demonstrations, in [0, 1], that are wrong: the first number
            of the problem instead of its value. A model that imitates them makes the
            same mistakes, so RL has something left to improve.
        train_size: number of training tasks, before clipping.
        eval_size: number of evaluation tasks, before clipping.

    Raises:
        ValueError: if an argument is outside its range.

    >>> environment = Arithmetic(operations="+-", terms=2, digits=2)
    >>> task = environment.tasks("train")[0]
    >>> task.messages[0].content, task.reference
    ('41+21=', '62')
    >>> turn = (*task.messages, Message("assistant", "62"))
    >>> environment.step(task, turn).reward
    1.0
    """

    operations: str = "+-"
    terms: int = 2
    digits: int = 2
    seed: int = 0
    train_size: int = 10_000
    eval_size: int = 200
    slips: float = 0.0

    def __post_init__(self) -> None:
        if (
            not self.operations
            or not set(self.operations) <= set("+-*>")
            or len(set(self.operations)) != len(self.operations)
        ):
            raise ValueError(
                "operations must be distinct characters out of '+-*>', got "
                f"{self.operations!r}"
            )
        for argument, low, high in (
            ("terms", 2, 8),
            ("digits", 1, 9),
            ("train_size", 1, 2**32),
            ("eval_size", 1, 2**32),
        ):
            require_integer(argument, getattr(self, argument), low, high)
        require_share("slips", self.slips)
        if not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")

    @classmethod
    def at_level(
        cls,
        level: int,
        *,
        seed: int = 0,
        train_size: int = 10_000,
        eval_size: int = 200,
        slips: float = 0.0,
    ) -> Arithmetic:
        """The environment of a numbered difficulty.

        Level 0 is the largest of three numbers up to 99, which a model learns fastest;
        level 1 is "+" of two one-digit numbers (100 problems); 2 adds "-" (200); 3 has
        numbers up to 99; 4 has three such numbers; 5 has three up to 999, and "*".

        Args:
            level: one of `LEVELS`.
            seed: as in `Arithmetic`.
            train_size: as in `Arithmetic`.
            eval_size: as in `Arithmetic`.
            slips: as in `Arithmetic`.

        Raises:
            ValueError: if the level does not exist.

        >>> Arithmetic.at_level(1).tasks("train")[0].messages[0].content
        '6+5='
        """
        if level not in LEVELS:
            raise ValueError(f"level must be one of {list(LEVELS)}, got {level!r}")
        return cls(
            **LEVELS[level],
            seed=seed,
            train_size=train_size,
            eval_size=eval_size,
            slips=slips,
        )

    @property
    def name(self) -> str:
        """A short name for logs."""
        return f"arithmetic({self.operations},{self.terms}x{self.digits})"

    def tasks(self, split: Split) -> TaskSequence:
        """The problems of a split; all distinct if at most 100,000 problems exist.

        Args:
            split: "train" or "eval".
        """
        size = self.train_size if split == "train" else self.eval_size
        if self._space > _LISTED_SPACE:
            return TaskSequence(size, lambda i: self._task(i, self._drawn(split, i)))
        listed = _shuffled(self.operations, self.terms, self.digits, self.seed, split)
        return TaskSequence(min(size, len(listed)), lambda i: self._task(i, listed[i]))

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Rewards the exact integer with 1 and any other answer with 0.

        Args:
            task: the task that the conversation began with.
            conversation: the messages so far; ends with the assistant's answer.

        Returns:
            The last step, with the metrics `correct` and `well_formed` (whether the
            answer is a canonical integer).
        """
        answer = response(conversation).strip()
        correct = float(answer == task.reference)
        metrics = {"correct": correct, "well_formed": float(_is_canonical(answer))}
        return Step(reward=correct, done=True, metrics=metrics)

    def demonstration(self, task: Task) -> str:
        """The right answer or, for a share `slips` of the problems, a wrong one."""
        text = task.messages[0].content
        if _uniform(10**6, "slip", text) < self.slips * 10**6:
            return re.findall(r"\d+", text)[0]
        return task.reference

    @property
    def _space(self) -> int:
        return _space(self.operations, self.terms, self.digits)

    def _drawn(self, split: Split, index: int) -> int:
        for attempt in range(2**32):
            problem = _uniform(self._space, self.seed, split, index, attempt)
            text = _text(self.operations, self.terms, self.digits, problem)
            if _split_of(text) == split:
                return problem
        raise AssertionError("unreachable: one problem in ten is held out")

    def _task(self, index: int, problem: int) -> Task:
        text = _text(self.operations, self.terms, self.digits, problem)
        prompt = (Message("user", f"{text}="),)
        return Task(index, prompt, reference=str(_value(text)))


def _space(operations: str, terms: int, digits: int) -> int:
    return 10 ** (digits * terms) * len(operations) ** (terms - 1)


@functools.lru_cache(maxsize=32)
def _shuffled(
    operations: str, terms: int, digits: int, seed: int, split: Split
) -> tuple[int, ...]:
    problems = (
        problem
        for problem in range(_space(operations, terms, digits))
        if _split_of(_text(operations, terms, digits, problem)) == split
    )
    return tuple(sorted(problems, key=lambda p: (_uniform(2**64, seed, p), p)))


def _uniform(bound: int, *counter: object) -> int:
    """A hash of the counter as an integer in [0, bound); bias below 2**-64."""
    num_bytes = bound.bit_length() // 8 + 9
    digest = hashlib.shake_256(repr(counter).encode()).digest(num_bytes)
    return int.from_bytes(digest) % bound


def _split_of(text: str) -> Split:
    held_out = _uniform(_HELD_OUT_ONE_IN, "arithmetic", text) == 0
    return "eval" if held_out else "train"


def _text(operations: str, terms: int, digits: int, problem: int) -> str:
    """The text of a problem, whose number encodes operands, then operations."""
    operands: list[str] = []
    for _ in range(terms):
        problem, operand = divmod(problem, 10**digits)
        operands.append(str(operand))
    text = operands[0]
    for operand in operands[1:]:
        problem, operation = divmod(problem, len(operations))
        text += operations[operation] + operand
    return text


def _value(text: str) -> int:
    return max(_sum(side) for side in text.split(">"))


def _sum(text: str) -> int:
    total = 0
    for term in text.replace("-", "+-").split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor)
        total += product
    return total


def _is_canonical(answer: str) -> bool:
    magnitude = answer.removeprefix("-")
    if not (magnitude.isascii() and magnitude.isdecimal()):
        return False
    return answer == "0" or not magnitude.startswith("0")
