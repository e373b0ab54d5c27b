"""Processes that a test starts or looks at."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

# For waits that end at once unless something is broken.
PATIENCE_S = 120.0

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="needs Linux's /proc"
)


def is_running(pid: int) -> bool:
    # A zombie that has not been waited for yet is no running process.
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends_within(pid: int, seconds: float) -> bool:
    expires = time.monotonic() + seconds
    while is_running(pid):
        if time.monotonic() > expires:
            return False
        time.sleep(0.02)
    return True


def run_program(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(program)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
