"""Slow tests say why, and the record of durations is what it says."""

import json

import pytest

from tests import durations

WHY = pytest.mark.slow("starts a cluster").mark


def test_a_slow_test_says_why():
    tests = {"a.py::slow": 10.1, "a.py::quick": 9.9}
    names = [*tests, "a.py::new"]
    assert durations.unexplained(tests, dict.fromkeys(names, WHY)) == []
    [told] = durations.unexplained(tests, dict.fromkeys(names))
    assert told.startswith("a.py::slow takes 10.1 s, by durations.json: make it ")


def test_a_mark_without_a_reason_is_refused():
    [told] = durations.unexplained({}, {"a.py::slow": pytest.mark.slow.mark})
    assert told.startswith("a.py::slow: slow must say why")


def report(name: str, seconds: float) -> pytest.TestReport:
    return pytest.TestReport(
        name, ("a.py", 0, name), {}, "passed", None, "call", (), seconds
    )


@pytest.mark.parametrize("status", [pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED])
def test_a_run_that_passes_is_recorded(tmp_path, status):
    record = tmp_path / "durations.json"
    recorder = durations.Recorder(record)
    for name, seconds in (("a.py::one", 4.0), ("a.py::one", 2.0), ("a.py::two", 1.0)):
        recorder.pytest_runtest_logreport(report(name, seconds))
    recorder.pytest_sessionfinish(status)
    if status:
        assert not record.exists()
    else:
        assert json.loads(record.read_text()) == {
            "files": {"a.py": 7.0}, "tests": {"a.py::one": 6.0}
        }  # fmt: skip


def test_every_slow_test_says_why(request):
    """Every one that this run has collected."""
    record = json.loads(durations.RECORD.read_text())
    assert set(record) == {"files", "tests"}
    assert all(seconds >= durations.LISTED_S for seconds in record["tests"].values())
    marks = {
        item.nodeid: item.get_closest_marker("slow") for item in request.session.items
    }
    assert durations.unexplained(record["tests"], marks) == []
