"""Programming problems, judged by hidden tests in the sandbox."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from jaxrl_post.conversations import prompt_of, text_of
from jaxrl_post.envs.env import Message, Split, Step, Task, response
from jaxrl_post.envs.sandbox import Limits, Place, Sandbox, check_requirement, find
from jaxrl_post.envs.tasks.blocks import last_block
from jaxrl_post.envs.tasks.held_out import rows_of_split
from jaxrl_post.jsonl import BadRowError, OnBadRow, require_on_bad_row
from jaxrl_post.tables import listed

__all__ = ["Code"]

_PROMPTS = ("prompt", "messages")
# Relative difference of numbers that are equal.
_CLOSE = 1e-6


@dataclass(frozen=True)
class Code:
    r"""Programming problems from a JSON Lines or Parquet file, with hidden tests.

    The program is the last fenced block of the response, or all of it without one. It
    runs in the sandbox. A test has one of two forms:

    - {"input": "2 3\n", "output": "5\n"}: the program reads standard input, and its
      standard output is compared line by line, without white space at the ends;
    - {"arguments": [2, 3], "result": 5}: the function that the row's field
      "entry_point" names is called, and what it returns is compared as JSON.

    The expected values never enter the sandbox: the comparison is made outside, so a
    program cannot declare itself right. A number is right if it differs by no more than
    one part in a million.

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
        seconds: of one test, at most.
        total_seconds: of all tests; those that are left then count as failed. With
            `seconds` it must stay below the deadline of a judgement.
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
    instruction: str = "Write a Python program. Put it into one fenced block."

    def __post_init__(self) -> None:
        require_on_bad_row(self.on_bad_row)
        if self.reward not in ("all", "share"):
            raise ValueError(f"reward must be 'all' or 'share', got {self.reward!r}")
        check_requirement(self.sandbox)
        for name in ("seconds", "total_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "code"

    def tasks(self, split: Split) -> tuple[Task, ...]:
        """The problems of a split, in the file's order.

        Raises:
            ValueError: at a bad row under "fail", or if the split is empty.
            ModuleNotFoundError: for .parquet without the extra.
            OSError: if the file cannot be read.
        """
        rows = rows_of_split(
            split,
            self.path,
            self.eval_path,
            self._row,
            lambda row: row.text,
            on_bad_row=self.on_bad_row,
        )
        return tuple(self._task(index, row) for index, row in enumerate(rows))

    def prepare(self) -> None:
        """Finds the sandbox.

        Raises:
            SandboxError: none can be had as required.
        """
        self._found()

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Runs the tests of the response's program.

        Returns:
            The last step, with the metrics `passed`, the share of tests passed,
            `solved`, and `out_of_time`, whether a test took too long.

        Raises:
            SandboxError: a place cannot be opened.
        """
        program = last_block(response(conversation))
        tests, entry = task.data["tests"], task.data["entry_point"]
        until = time.monotonic() + self.total_seconds
        passed, late = 0, False
        with _Candidate(self._found(), program, entry) as candidate:
            for test in tests:
                left = until - time.monotonic()
                if left <= 0:
                    late = True
                    break
                verdict = candidate.verdict(test, min(left, self.seconds))
                late |= verdict is None
                passed += verdict is True
                # One failure decides; the other tests would only take time.
                if verdict is not True and self.reward == "all":
                    break
        share = passed / len(tests)
        solved = float(passed == len(tests))
        metrics = {"solved": solved, "out_of_time": float(late)}
        if self.reward == "share":
            metrics["passed"] = share
        metrics[f"sandbox/{self._found().mechanism}"] = 1.0
        return Step(solved if self.reward == "all" else share, True, metrics=metrics)

    def demonstration(self, task: Task) -> str | None:
        """The row's solution, in a fenced block; None if it has none."""
        solution = task.data["solution"]
        return None if solution is None else f"```python\n{solution.strip()}\n```"

    def _found(self) -> Sandbox:
        return _sandbox(self.sandbox, self.seconds, self.python)

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
    elif {"arguments", "result"} <= set(test):
        if entry is None:
            raise BadRowError(f"{where} calls a function: name it in 'entry_point'")
        if not isinstance(test["arguments"], list | dict):
            raise BadRowError(f"{where}: 'arguments' must be a list or an object")
    else:
        raise BadRowError(
            f"{where} needs 'input' and 'output', or 'arguments' and 'result'; it has "
            f"{listed(test)}"
        )


class _Candidate:
    """A program under test, in places of the sandbox."""

    def __init__(self, sandbox: Sandbox, program: str, entry: str | None) -> None:
        self._sandbox = sandbox
        self._program = program
        self._entry = entry
        self._place: Place | None = None

    def __enter__(self) -> _Candidate:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def verdict(self, test: Mapping[str, Any], seconds: float) -> bool | None:
        """Whether a test is passed; None if it took too long."""
        if "input" in test:
            return self._printed(test, seconds)
        return self._returned(test, seconds)

    def _printed(self, test: Mapping[str, Any], seconds: float) -> bool | None:
        # A place of its own: a test must not find what an earlier one left.
        with self._sandbox.open() as place:
            place.write("program.py", self._program.encode("utf-8", "replace"))
            command = (self._sandbox.python, "-I", "program.py")
            outcome = place.run(
                command, stdin=test["input"].encode("utf-8"), seconds=seconds
            )
        if outcome.ended == "time":
            return None
        said, expected = _lines(outcome.stdout), _lines(test["output"])
        return outcome.succeeded and not outcome.truncated and said == expected

    def _returned(self, test: Mapping[str, Any], seconds: float) -> bool | None:
        if self._place is None:
            self._place = self._sandbox.open()
            loaded = self._place.python(self._program, seconds=seconds)
            if loaded.ended == "time":
                self._close()
                return None
            if not loaded.succeeded:
                self._close()
                return False
            # The time to open a place is not the program's.
            seconds = max(0.0, seconds - loaded.seconds)
        # What the program prints is told from its result by a mark that it has not
        # seen. A program that guesses it still does not know what is expected.
        mark = secrets.token_hex(8)
        arguments = json.dumps(test["arguments"])
        star = "*" if isinstance(test["arguments"], list) else "**"
        outcome = self._place.python(
            f"import json as _json\n_found = {self._entry}({star}_json.loads("
            f"{arguments!r}))\nprint('\\n{mark}' + _json.dumps(_found))",
            seconds=seconds,
        )
        if not outcome.succeeded:
            # Names may be gone, or not be what they were.
            self._close()
        if outcome.ended == "time":
            return None
        _, found, said = outcome.stdout.rpartition(f"\n{mark}")
        if not (outcome.succeeded and found):
            return False
        try:
            return _equal(json.loads(said), test["result"])
        except (ValueError, RecursionError):
            return False

    def _close(self) -> None:
        if self._place is not None:
            self._place.close()
            self._place = None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _equal(said: Any, expected: Any) -> bool:
    """Whether two JSON values are equal, numbers but for rounding."""
    if isinstance(said, bool) or isinstance(expected, bool):
        return said is expected
    if isinstance(said, int | float) and isinstance(expected, int | float):
        if isinstance(said, int) and isinstance(expected, int):
            return said == expected
        return math.isclose(said, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
    if isinstance(said, list) and isinstance(expected, list):
        return len(said) == len(expected) and all(map(_equal, said, expected))
    if isinstance(said, dict) and isinstance(expected, dict):
        return said.keys() == expected.keys() and all(
            _equal(value, expected[key]) for key, value in said.items()
        )
    return said == expected


@lru_cache(maxsize=8)
def _sandbox(requirement: str, seconds: float, python: str | None) -> Sandbox:
    # One for the life of the worker process. A warm place is started while the one
    # before it is in use.
    limits = Limits(wall_seconds=seconds, cpu_seconds=max(1, math.ceil(seconds)))
    return find(requirement, limits=limits, warm=1, python=python)
