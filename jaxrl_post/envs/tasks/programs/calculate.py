"""Problems of arithmetic that the policy solves with the tool `python`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from jaxrl_post.envs.env import (
    Message,
    Split,
    Step,
    Task,
    TaskSequence,
    ToolCall,
    response,
)
from jaxrl_post.envs.tasks.mathematics.answers import final_answer
from jaxrl_post.envs.tasks.programs.formulas import asked
from jaxrl_post.envs.tasks.ranges import require_integer, require_share
from jaxrl_post.envs.tools import Interpreter, ToolEnvironment

__all__ = ["calculate"]


def calculate(
    operations: int = 2,
    digits: int = 2,
    slips: float = 0.0,
    seed: int = 0,
    train_size: int = 5000,
    eval_size: int = 200,
    sandbox: str = "auto",
) -> ToolEnvironment:
    """Arithmetic in words, with Python at hand.

    The policy may call the tool `python`, which runs in the sandbox, before it answers.
    The reward is 1 if the last number of the answer is the value, and 0 otherwise. One
    problem in ten is held out by a hash of its text. Prompts of training tasks may hold
    the call and its result already.

    Args:
        operations: of a problem, in [2, 6]: sums, differences and products.
        digits: most digits of a number, in [1, 6]; the numbers are at least 2.
        slips: share of the demonstrations, in [0, 1], that call Python without the
            parentheses that the problem needs.
        seed: chooses the problems.
        train_size: number of training tasks.
        eval_size: number of held-out tasks.
        sandbox: as `envs.sandbox.find`: "auto", "require:NAME" or "unsafe".

    Raises:
        ValueError: an argument is outside its range.

    >>> environment = calculate()
    >>> task = environment.tasks("eval")[0]
    >>> task.messages[0].content, task.reference
    ('What is the product of 96 and the sum of 12 and 83?', '9120')
    >>> environment.demonstration(task).tool_calls[0].arguments
    '{"code": "96*(12+83)"}'
    """
    tasks = _Problems(operations, digits, slips, seed, train_size, eval_size)
    return ToolEnvironment(tasks, (Interpreter(sandbox),))


@dataclass(frozen=True)
class _Problems:
    """The problems, and the reward of an answer."""

    operations: int
    digits: int
    slips: float
    seed: int
    train_size: int
    eval_size: int

    def __post_init__(self) -> None:
        require_integer("operations", self.operations, 2, 6)
        require_integer("digits", self.digits, 1, 6)
        require_share("slips", self.slips)
        for name in ("train_size", "eval_size"):
            require_integer(name, getattr(self, name), 1, 2**30)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "calculate"

    def tasks(self, split: Split) -> TaskSequence:
        """The problems of a split; no text belongs to both."""

        def make(index: int) -> Task:
            rng = Random(f"{self.seed} {split} {index}")
            question, formula, shown = asked(
                rng,
                lambda: str(rng.randrange(2, 10**self.digits)),
                self.operations,
                "What is {}?".format,
                split,
                self.slips,
                self.seed,
            )
            value = str(formula.value({}))
            messages = [Message("user", question)]
            if split == "train" and rng.random() < 0.5:
                call = _call(formula.python())
                messages += [
                    Message("assistant", "", tool_calls=(call,)),
                    Message("tool", value, tool_call_id=call.id, name="python"),
                ]
            return Task(index, tuple(messages), value, {"shown": shown})

        size = self.train_size if split == "train" else self.eval_size
        return TaskSequence(size, make)

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Compares the last number of the answer with the value."""
        answer = final_answer(response(conversation), extraction="flexible")
        return Step(float(answer == task.reference), done=True)

    def demonstration(self, task: Task) -> str | Message:
        """The call, for a share `slips` without parentheses, or the value."""
        if len(task.messages) > 1:
            return task.reference
        return Message("assistant", "", tool_calls=(_call(task.data["shown"]),))


def _call(code: str) -> ToolCall:
    return ToolCall("python", json.dumps({"code": code}), "000000000")
