"""Runs programs under hidden tests in the sandbox."""

from __future__ import annotations

import json
import math
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from jaxrl_post.envs.env import Step
from jaxrl_post.envs.sandbox import (
    Limits,
    Outcome,
    Place,
    Sandbox,
    check_requirement,
    find,
)

__all__ = ["MOST_OUTPUT", "HiddenTests"]

# Bytes that a program may print in a test, its result included.
MOST_OUTPUT = 4 << 20

# Relative difference of numbers that are equal; absolute, where 0 is expected.
_CLOSE = 1e-6
_TINY = 1e-9


@dataclass(frozen=True)
class HiddenTests:
    """Hidden tests of programs; `code.Code` defines a test.

    Args:
        reward: "all" is 1 for a program that passes all tests and 0 otherwise; "share"
            is the share of the tests that it passes.
        sandbox: as `sandbox.find`: "auto", "require:NAME" or "unsafe".
        seconds: processor time of one test, at most.
        total_seconds: processor time of all tests; those that are left then count as
            failed.
        clock_seconds: of all tests on the clock. Then the judgement has failed, and is
            no 0: the program waits for something, or the machine is busy.
        python: an interpreter whose packages programs may import; None for one without
            packages.

    Raises:
        ValueError: an option has no such value.
    """

    reward: Literal["all", "share"] = "all"
    sandbox: str = "auto"
    seconds: float = 2.0
    total_seconds: float = 6.0
    python: str | None = None
    clock_seconds: float = 8.0

    def __post_init__(self) -> None:
        if self.reward not in ("all", "share"):
            raise ValueError(f"reward must be 'all' or 'share', got {self.reward!r}")
        check_requirement(self.sandbox)
        for name in ("seconds", "total_seconds", "clock_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")

    def prepare(self) -> None:
        """Finds the sandbox.

        Raises:
            SandboxError: none is available as required.
        """
        self._found()

    def run(
        self, program: str, tests: Sequence[Mapping[str, Any]], entry_point: str | None
    ) -> Step:
        """Tests a program.

        Returns:
            The last step of an episode, with the metrics `passed`, the share of tests
            passed (for the reward "share"), `solved`, and `out_of_time`, whether a test
            took too long.

        Raises:
            SandboxError: a place cannot be opened.
            TimeoutError: the tests were not over in time on the clock.
        """
        passed, late = 0, False
        until = time.monotonic() + self.clock_seconds
        candidate = _Candidate(self._found(), program, entry_point, until)
        with candidate:
            for test in tests:
                left = self.total_seconds - candidate.spent
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

    def _found(self) -> Sandbox:
        clock, total = self.clock_seconds, self.total_seconds
        return _sandbox(self.sandbox, clock, total, self.python)


class _Candidate:
    """A program under test, in places of the sandbox.

    Attributes:
        spent: seconds of processor time so far.
    """

    def __init__(
        self, sandbox: Sandbox, program: str, entry: str | None, until: float
    ) -> None:
        self.spent = 0.0
        self._until = until
        self._sandbox = sandbox
        self._program = program
        self._entry = entry
        self._place: Place | None = None

    def __enter__(self) -> _Candidate:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def verdict(self, test: Mapping[str, Any], seconds: float) -> bool | None:
        """Whether a test is passed; None if it took too much processor time.

        Raises:
            TimeoutError: it was not over in time on the clock.
        """
        if "input" in test:
            return self._printed(test, seconds)
        return self._returned(test, seconds)

    def _printed(self, test: Mapping[str, Any], seconds: float) -> bool | None:
        # A place of its own: a test must not find what an earlier one left.
        with self._sandbox.open() as place:
            place.write("program.py", self._program.encode("utf-8", "replace"))
            command = (self._sandbox.python, "-I", "program.py")
            outcome = place.run(
                command,
                stdin=test["input"].encode("utf-8"),
                seconds=self._left(),
                processor=seconds,
            )
        if self._is_late(outcome):
            return None
        said, expected = _lines(outcome.stdout), _lines(test["output"])
        return outcome.succeeded and not outcome.truncated and said == expected

    def _returned(self, test: Mapping[str, Any], seconds: float) -> bool | None:
        if self._place is None:
            self._place = self._sandbox.open()
            loaded = self._place.python(
                self._program, seconds=self._left(), processor=seconds
            )
            if self._is_late(loaded):
                self._close()
                return None
            if not loaded.succeeded:
                self._close()
                return False
            # The time to open a place is not the program's.
            seconds = max(0.0, seconds - loaded.processor)
        # A mark that the program has not seen tells its output from its result. A
        # program that guesses it still does not know what is expected.
        mark = secrets.token_hex(8)
        arguments = json.dumps(test["arguments"])
        star = "*" if isinstance(test["arguments"], list) else "**"
        outcome = self._place.python(
            f"import json as _json\n_found = {self._entry}({star}_json.loads("
            f"{arguments!r}))\nprint('\\n{mark}' + _json.dumps(_found))",
            seconds=self._left(),
            processor=seconds,
        )
        if not outcome.succeeded:
            # Names may be gone, or not be what they were.
            self._close()
        if self._is_late(outcome):
            return None
        _, found, said = outcome.stdout.rpartition(f"\n{mark}")
        if not (outcome.succeeded and found):
            return False
        try:
            return _equal(json.loads(said), test["result"])
        except (ValueError, RecursionError):
            return False

    def _left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def _is_late(self, outcome: Outcome) -> bool:
        self.spent += outcome.processor
        if outcome.ended == "time":
            raise TimeoutError(
                "a program was not over in time on the clock (clock_seconds): its last "
                f"call took {outcome.seconds:.1f} s and "
                f"{outcome.processor:.1f} s of processor time: the program waits, or "
                "the machine is busy"
            )
        if outcome.ended == "signal":
            return outcome.status == signal.SIGXCPU
        return outcome.ended == "processor"

    def _close(self) -> None:
        if self._place is not None:
            self._place.close()
            self._place = None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _equal(said: Any, expected: Any) -> bool:
    """Whether two JSON values are equal, numbers up to rounding."""
    if isinstance(said, bool) or isinstance(expected, bool):
        return said is expected
    if isinstance(said, int | float) and isinstance(expected, int | float):
        if isinstance(said, int) and isinstance(expected, int):
            return said == expected
        return _is_close(said, expected)
    if isinstance(said, list) and isinstance(expected, list):
        return len(said) == len(expected) and all(map(_equal, said, expected))
    if isinstance(said, dict) and isinstance(expected, dict):
        return said.keys() == expected.keys() and all(
            _equal(value, expected[key]) for key, value in said.items()
        )
    return said == expected


def _is_close(said: float, expected: float) -> bool:
    if said == expected or math.isinf(expected):
        return said == expected
    try:
        return abs(said - expected) <= (_CLOSE * abs(expected) or _TINY)
    except OverflowError:
        # A whole number that no float can hold, compared with a float.
        return False


@lru_cache(maxsize=8)
def _sandbox(
    requirement: str, clock: float, total: float, python: str | None
) -> Sandbox:
    # One for the life of the worker process. A warm place is started while the one
    # before it is in use.
    limits = Limits(
        wall_seconds=clock,
        cpu_seconds=math.ceil(total) + 1,
        output_bytes=MOST_OUTPUT,
    )
    return find(requirement, limits=limits, warm=1, python=python)
