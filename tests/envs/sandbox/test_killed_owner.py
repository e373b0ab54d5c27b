"""A place leaves nothing when the process that opened it is killed."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.envs.sandbox import available, hostile

PROJECT = Path(__file__).parents[3]
# For an exit that the kernel announces; a slow machine takes longer than others.
PATIENCE = 120.0
# Opens places, tells when their programs run, and waits to be killed.
OWNER = """
import sys, time
from jaxrl_post.envs.sandbox import find
way, count, program = sys.argv[1:]
with find(way) as found:
    places = [found.open() for _ in range(int(count))]
    for place in places:
        print(place.python(program), flush=True)
    time.sleep(600)
"""
# Children that ignore signals and the end of their parents, twice over.
DAEMONS = """
import ctypes, os, signal, time
os.makedirs("some/files")
open("some/files/of", "w").write("the place")
for _ in range(4):
    ready, told = os.pipe()
    if os.fork() == 0:
        for _ in range(2):
            os.setsid()
            if os.fork(): os._exit(0)
        for number in range(1, 60):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        os.write(told, b"1")
        while True: time.sleep(600)
    assert os.read(ready, 1) == b"1"
"""


def left_by_a_killed_owner(way, places, folder):
    """Kills an owner; the number of processes below it, and of those that stay.

    Args:
        way: the sandbox.
        places: how many it opens.
        folder: in which it makes directories.
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, available.require(way), str(places), DAEMONS],
        cwd=PROJECT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    handles = []
    try:
        with owner:
            assert owner.stdout is not None
            for _ in range(places):
                assert "ended='exit', status=0" in owner.stdout.readline()
            handles = [*map(os.pidfd_open, hostile.processes_below(owner.pid))]
            owner.kill()
        waiting = select.poll()
        for handle in handles:
            waiting.register(handle, select.POLLIN)
        left = len(handles)
        until = time.monotonic() + PATIENCE
        while left and time.monotonic() < until:
            for handle, _ in waiting.poll(1e3 * max(0.0, until - time.monotonic())):
                waiting.unregister(handle)
                left -= 1
        return len(handles), left
    finally:
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


@pytest.fixture
def folder():
    """A directory through which any user gets."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        yield Path(name)


@pytest.mark.processes
@pytest.mark.parametrize("way", ["landlock", "bubblewrap", "gvisor", "unsafe"])
def test_a_killed_owner_leaves_no_process_and_no_directory(way, folder):
    # Where no namespace holds the processes together, it is tried ten times.
    times, places = (2, 5) if way == "landlock" else (1, 1)
    for _ in range(times):
        count, left = left_by_a_killed_owner(way, places, folder)
        # The daemons, and the place's processes; in gVisor, all are in one process.
        assert count >= (3 if way == "gvisor" else 6) * places
        assert left == 0
        # The files that gVisor reads stay; no process of ours is there to remove it.
        assert way == "gvisor" or list(folder.iterdir()) == []
