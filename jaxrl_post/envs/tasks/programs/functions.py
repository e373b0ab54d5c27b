"""Functions of a few integers to write, judged by hidden tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from jaxrl_post.envs.env import Message, Split, Step, Task, TaskSequence, response
from jaxrl_post.envs.tasks.blocks import last_block
from jaxrl_post.envs.tasks.programs.formulas import Formula, asked
from jaxrl_post.envs.tasks.programs.hidden_tests import HiddenTests
from jaxrl_post.envs.tasks.ranges import require_integer, require_share

__all__ = ["Functions"]

_NAMES: tuple[str, ...] = ("a", "b", "c")
# Operands of a function out of ten that are numbers.
_NUMBERS = 3
# Tests of a program, and the largest argument.
_TESTS = 3
_LARGEST = 99


@dataclass(frozen=True)
class Functions:
    """Functions of three integers that are described in words.

    The program is the last fenced block of the response, or all of it without one. It
    runs in the sandbox, and must define `f`, which is called with random arguments. The
    reward is 1 if every result is right, and 0 otherwise; see
    `envs.tasks.programs.Code`. One function in ten is held out by a hash of its text.

    Args:
        operations: of a function, in [2, 6]: sums, differences and products.
        slips: share of the demonstrations, in [0, 1], without the parentheses that the
            function needs.
        seed: chooses the functions.
        train_size: number of training tasks.
        eval_size: number of held-out tasks.
        sandbox: as `envs.sandbox.find`: "auto", "require:NAME" or "unsafe".

    Raises:
        ValueError: an argument is outside its range.

    >>> environment = Functions()
    >>> task = environment.tasks("eval")[0]
    >>> task.messages[0].content
    'Write f(a, b, c): the difference of a and the difference of 3 and c.'
    >>> environment.demonstration(task)
    'def f(a, b, c): return a-(3-c)'
    """

    operations: int = 2
    slips: float = 0.0
    seed: int = 0
    train_size: int = 5000
    eval_size: int = 200
    sandbox: str = "auto"

    def __post_init__(self) -> None:
        require_integer("operations", self.operations, 2, 6)
        require_share("slips", self.slips)
        for name in ("train_size", "eval_size"):
            require_integer(name, getattr(self, name), 1, 2**30)
        self._hidden_tests()  # Checks its options.

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "functions"

    def tasks(self, split: Split) -> TaskSequence:
        """The functions of a split; no text belongs to both."""

        def make(index: int) -> Task:
            rng = Random(f"{self.seed} {split} {index}")
            text, formula, shown = asked(
                rng,
                lambda: _operand(rng),
                self.operations,
                f"Write f({', '.join(_NAMES)}): {{}}.".format,
                split,
                self.slips,
                self.seed,
            )
            tests = [_test(rng, formula) for _ in range(_TESTS)]
            data = {"tests": tests, "shown": shown}
            return Task(index, (Message("user", text),), "", data)

        size = self.train_size if split == "train" else self.eval_size
        return TaskSequence(size, make)

    def prepare(self) -> None:
        """Finds the sandbox.

        Raises:
            SandboxError: none is available as required.
        """
        self._hidden_tests().prepare()

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Runs the tests of the response's program."""
        program = last_block(response(conversation))
        return self._hidden_tests().run(program, task.data["tests"], "f")

    def demonstration(self, task: Task) -> str:
        """A function of one line, for a share `slips` without parentheses."""
        return f"def f({', '.join(_NAMES)}): return {task.data['shown']}"

    def _hidden_tests(self) -> HiddenTests:
        return HiddenTests(sandbox=self.sandbox)


def _operand(rng: Random) -> str:
    number = rng.randrange(10) < _NUMBERS
    return str(rng.randrange(2, 10)) if number else rng.choice(_NAMES)


def _test(rng: Random, formula: Formula) -> Mapping[str, Any]:
    arguments = [rng.randint(2, _LARGEST) for _ in _NAMES]
    values = dict(zip(_NAMES, arguments, strict=True))
    return {"arguments": arguments, "result": formula.value(values)}
