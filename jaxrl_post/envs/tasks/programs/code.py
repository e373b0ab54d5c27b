"""Programming problems, judged by hidden tests in the sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_post.conversations import prompt_of, text_of
from jaxrl_post.envs.env import Message, Step, Task, response
from jaxrl_post.envs.tasks.blocks import last_block
from jaxrl_post.envs.tasks.held_out import TasksOfFiles
from jaxrl_post.envs.tasks.programs.hidden_tests import MOST_OUTPUT, HiddenTests
from jaxrl_post.jsonl import BadRowError, OnBadRow, require_on_bad_row
from jaxrl_post.tables import listed

__all__ = ["Code"]

_PROMPTS = ("prompt", "messages")


@dataclass(frozen=True)
class Code(TasksOfFiles["_Row"]):
    r"""Programming problems from a JSON Lines or Parquet file, with hidden tests.

    The program is the last fenced block of the response, or all of it without one. It
    runs in the sandbox. A test has one of two forms:

    - {"input": "2 3\n", "output": "5\n"}: the program reads standard input, and its
      standard output is compared line by line, without white space at the ends;
    - {"arguments": [2, 3], "result": 5}: the function that the row's field
      "entry_point" names is called, and what it returns is compared as JSON.

    The expected values never enter the sandbox: the comparison is made outside, so a
    program cannot declare itself right. A number is right if it differs by no more than
    one part in a million of the expected one, or by 1e-9 where 0 is expected; two whole
    numbers must be equal.

    Args:
        path: .jsonl or .json with one object a line, or .parquet (extra `parquet`):
            the prompt, "tests", perhaps "entry_point" and "solution".
        eval_path: the evaluation rows; without it, one prompt in ten of `path` is held
            out by a hash of its text.
        on_bad_row: "fail" raises at a bad row, "skip" drops it and logs a warning.
        prompt: the field of the prompt, a text or a list of {"role", "content"}; the
            default is "prompt", or "messages" in a row without the field "prompt".
        reward: "all" is 1 for a program that passes all tests and 0 otherwise; "share"
            is the share of the tests that it passes.
        sandbox: as `sandbox.find`: "auto", "require:NAME" or "unsafe".
        seconds: processor time of one test, at most.
        total_seconds: processor time of all tests; those that are left then count as
            failed.
        clock_seconds: of all tests on the clock, below the deadline of a judgement.
            Then the judgement has failed, and is no 0: the program waits for something,
            or the machine is busy.
        python: an interpreter whose packages programs may import; None for one without
            packages.
        instruction: text after the prompt and an empty line.

    Raises:
        ValueError: an option has no such value.
    """

    path: str
    eval_path: str | None = None
    on_bad_row: OnBadRow = "fail"
    prompt: str | None = None
    reward: Literal["all", "share"] = "all"
    sandbox: str = "auto"
    seconds: float = 2.0
    total_seconds: float = 6.0
    python: str | None = None
    clock_seconds: float = 8.0
    instruction: str = "Write a Python program. Put it into one fenced block."

    def __post_init__(self) -> None:
        require_on_bad_row(self.on_bad_row)
        self._tests()  # Checks their options.

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "code"

    def _text(self, row: _Row) -> str:
        return row.text

    def prepare(self) -> None:
        """Finds the sandbox.

        Raises:
            SandboxError: none is available as required.
        """
        self._tests().prepare()

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Runs the tests of the response's program.

        Returns:
            The last step, with the metrics `passed`, the share of tests passed,
            `solved`, and `out_of_time`, whether a test took too long.

        Raises:
            SandboxError: a place cannot be opened.
            TimeoutError: the tests were not over in time on the clock.
        """
        program = last_block(response(conversation))
        return self._tests().run(program, task.data["tests"], task.data["entry_point"])

    def demonstration(self, task: Task) -> str | None:
        """The row's solution, in a fenced block; None if it has none."""
        solution = task.data["solution"]
        return None if solution is None else f"```python\n{solution.strip()}\n```"

    def _tests(self) -> HiddenTests:
        return HiddenTests(
            self.reward,
            self.sandbox,
            self.seconds,
            self.total_seconds,
            self.python,
            self.clock_seconds,
        )

    def _task(self, index: int, row: _Row) -> Task:
        *before, last = row.messages
        if self.instruction:
            last = Message(last.role, f"{last.content}\n\n{self.instruction}")
        data = {
            "tests": row.tests,
            "entry_point": row.entry_point,
            "solution": row.solution,
        }
        return Task(index, (*before, last), "", data)

    def _row(self, row: Mapping[str, Any]) -> list[_Row]:
        prompt = self.prompt or next((n for n in _PROMPTS if n in row), _PROMPTS[0])
        for name in (prompt, "tests"):
            if name not in row:
                raise BadRowError(f"no field {name!r} (fields: {listed(row)})")
        entry = row.get("entry_point")
        if entry is not None and not (isinstance(entry, str) and entry.isidentifier()):
            raise BadRowError(
                f"field 'entry_point' must name a function, got {entry!r}"
            )
        solution = row.get("solution")
        if solution is not None:
            solution = text_of(solution, "field 'solution'")
        tests = row["tests"]
        if isinstance(tests, str):
            # Parquet has no values of any form; such columns hold JSON.
            try:
                tests = json.loads(tests)
            except ValueError:
                raise BadRowError("field 'tests' is no JSON") from None
        if not isinstance(tests, list) or not tests:
            raise BadRowError("field 'tests' must be a list of at least one test")
        for number, test in enumerate(tests, 1):
            _require_test(test, number, entry)
        return [_Row(prompt_of(row[prompt], prompt), tests, entry, solution)]


@dataclass(frozen=True)
class _Row:
    messages: tuple[Message, ...]
    tests: list[Mapping[str, Any]] = field(repr=False)
    entry_point: str | None
    solution: str | None

    @property
    def text(self) -> str:
        return "\n\n".join(message.content for message in self.messages)


def _require_test(test: Any, number: int, entry: str | None) -> None:
    where = f"field 'tests', test {number}"
    if not isinstance(test, dict):
        raise BadRowError(f"{where} must be an object, got {type(test).__name__}")
    if {"input", "output"} <= set(test):
        for name in ("input", "output"):
            text_of(test[name], f"{where}: {name!r}")
        expected = test["output"]
    elif {"arguments", "result"} <= set(test):
        if entry is None:
            raise BadRowError(f"{where} calls a function: name it in 'entry_point'")
        if not isinstance(test["arguments"], list | dict):
            raise BadRowError(f"{where}: 'arguments' must be a list or an object")
        expected = json.dumps(test["result"])
    else:
        raise BadRowError(
            f"{where} needs 'input' and 'output', or 'arguments' and 'result'; it has "
            f"{listed(test)}"
        )
    if (size := len(expected.encode("utf-8", "replace"))) > MOST_OUTPUT // 2:
        raise BadRowError(
            f"{where} expects {size:,} bytes; a program may print {MOST_OUTPUT:,}, "
            "half of them white space and other text"
        )
