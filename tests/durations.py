"""A committed record of the tests' durations, and the reasons of slow tests.

`make test ARGS=--record-durations` writes the record again, on a machine that does
nothing else. What is checked is the record and not the clock of a run, so that no test
fails on a slow machine: a test above `SLOW_S` in it says why by
`pytest.mark.slow("why")`.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

__all__ = ["RECORD", "SLOW_S", "Recorder", "unexplained"]

RECORD = Path(__file__).with_name("durations.json")
SLOW_S = 10.0
# Tests that take less are in the sum of their file alone.
LISTED_S = 5.0


class Recorder:
    """A plugin of the process that hands out the tests; writes a record at the end."""

    def __init__(self, record: Path = RECORD) -> None:
        self._record = record
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the seconds of a test's setup, call or teardown."""
        self._tests[report.nodeid] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Writes the record, if all tests passed."""
        if exitstatus == pytest.ExitCode.OK:
            text = json.dumps(recorded(self._tests), indent=1, sort_keys=True)
            self._record.write_text(text + "\n")


def recorded(tests: dict[str, float]) -> dict[str, dict[str, float]]:
    """A record: seconds by file, and by test for those that take long."""
    files: Counter[str] = Counter()
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds
    return {
        "files": {name: round(seconds, 1) for name, seconds in files.items()},
        "tests": {
            name: round(seconds, 1)
            for name, seconds in tests.items()
            if seconds >= LISTED_S
        },
    }


def unexplained(
    tests: dict[str, float], collected: dict[str, pytest.Mark | None]
) -> list[str]:
    """Faults in the marks of collected tests, by a record's seconds."""
    wrong = []
    for name, mark in collected.items():
        if mark is not None and not (mark.args and isinstance(mark.args[0], str)):
            wrong.append(f'{name}: slow must say why, as in slow("starts a cluster")')
        elif mark is None and tests.get(name, 0) > SLOW_S:
            wrong.append(
                f"{name} takes {tests[name]} s, by {RECORD.name}: make it cheaper, or "
                'say why it takes so long, by pytest.mark.slow("...")'
            )
    return wrong
