"""Puts one fault after the other into a copy of the package, and sees who notices.

    python -m tests.mutations.check                every fault, two at a time
    python -m tests.mutations.check GAE "k3 is"    those whose names hold one of these

A fault is killed when the tests that it names fail, and survives when they pass. The
exit status is 1 when one survives, or when the tests do not even pass without a fault.
What takes longer than its deadline is killed: a program that hangs is noticed too.
"""

import argparse
import concurrent.futures
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.mutations.fault import ROOT, Fault
from tests.mutations.faults import FAULTS

DEADLINE_S = 300
COPIED = ("jaxrl_post", "launch", "tests", "pyproject.toml", "notebooks")
# Runs of pytest, which an end of the check ends too.
_RUNNING: set[subprocess.Popen] = set()
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not all"]


def main() -> int:
    """Runs the check; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of faults")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    options = parser.parse_args()
    wanted = [
        fault
        for fault in FAULTS
        if not options.names or any(name in fault.name for name in options.names)
    ]
    if not wanted:
        parser.error(f"no fault is named like {', '.join(options.names)}")
    # As Ctrl-C does: the tests that are running are ended below. In the background, a
    # shell has Ctrl-C ignored, also by the tests of it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    workers = concurrent.futures.ThreadPoolExecutor(options.jobs)
    try:
        return _checked(workers, wanted)
    finally:
        workers.shutdown(wait=False, cancel_futures=True)
        for process in list(_RUNNING):
            _end(process)


def _checked(
    workers: concurrent.futures.ThreadPoolExecutor, wanted: list[Fault]
) -> int:
    survivors: list[str] = []
    broken = [tests for tests in workers.map(_passing, _suites(wanted)) if tests]
    if broken:
        print("fail without a fault:", *broken, sep="\n  ")
        return 1
    for fault, killer, seconds in workers.map(_tried, wanted):
        said = f"killed by {killer}" if killer else "SURVIVES"
        print(f"{seconds:5.0f} s  {fault.name}: {said}", flush=True)
        if not killer:
            survivors.append(fault.name)
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} faults are killed")
    return 1 if survivors else 0


def _suites(faults: list[Fault]) -> list[str]:
    return sorted({file for fault in faults for file in fault.tests.split()})


def _passing(tests: str) -> str:
    """The tests, where they do not pass as the package is; "" where they do."""
    with _copy() as copy:
        return tests if _killer(copy, tests) else ""


def _tried(fault: Fault) -> tuple[Fault, str, float]:
    begin = time.monotonic()
    with _copy() as copy:
        (copy / "jaxrl_post" / fault.file).write_text(fault.source())
        return fault, _killer(copy, fault.tests), time.monotonic() - begin


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    """A copy of what the tests need."""
    with tempfile.TemporaryDirectory(prefix="fault-") as name:
        copy = Path(name)
        for each in COPIED:
            source = ROOT / each
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, copy / each, ignore=ignored)
            else:
                shutil.copy(source, copy / each)
        # Programs that are compiled already need not be compiled again.
        (ROOT / "build").mkdir(exist_ok=True)
        (copy / "build").symlink_to(ROOT / "build")
        yield copy


def _killer(directory: Path, tests: str) -> str:
    """The first test that fails there; "" where all pass."""
    files = [f"tests/{file}" for file in tests.split()]
    process = subprocess.Popen(
        [*PYTEST, "-p", "no:cacheprovider", *files],
        cwd=directory,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _RUNNING.add(process)
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f"the deadline of {DEADLINE_S} s"
    finally:
        _end(process)
        _RUNNING.discard(process)
    if process.returncode == 0:
        return ""
    lines = output.splitlines()
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not named:
        return f"pytest's status {process.returncode}: {output[-300:]}"
    return named[0].split(" ")[1]


def _end(process: subprocess.Popen) -> None:
    """Ends a run of pytest, with the workers that its tests started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
