"""No program that a model may write leaves the sandbox, stalls it, or stays in it."""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrl_post.envs.sandbox import find
from tests.envs.sandbox import available, hostile
from tests.tiers import daily

PROJECT = Path(__file__).parents[3]
# Tests that are marked `all`: each of the first two guards the other way in one of the
# tests, test_places.py runs in gVisor too, and the filter of Landlock is the same for
# each of its versions.
WAYS = ["bubblewrap", "landlock", "landlock 1", "gvisor"]


# Many programs wait until they are stopped: so many run at a time.
PARTS = 4


def run(way: str, command: Callable[[int], list[str]]) -> dict[str, list[str]]:
    """Runs all programs, and returns what each did wrong.

    Each part of them has a process of its own, which `command` begins.
    """
    requirement = available.require(way.split()[0])
    older = way.split()[1:]

    def ran(part: int) -> dict[str, list[str]]:
        arguments = [requirement, f"{part}/{PARTS}", *older]
        done = subprocess.run(
            [*command(part), "tests.envs.sandbox.hostile", *arguments],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(map(json.loads, done.stdout.splitlines()))

    with concurrent.futures.ThreadPoolExecutor(PARTS) as threads:
        parts = [*threads.map(ran, range(PARTS))]
    found = {name: faults for each in parts for name, faults in each.items()}
    assert len(found) == sum(map(len, parts))
    return found


def mounts() -> list[str]:
    """Begins a command with its own table of mounts; skips where none is to be had."""
    begin = ["unshare", "--mount"]
    if os.geteuid() or not (shutil.which("unshare") and shutil.which("setpriv")):
        pytest.skip("only root starts the process of another user, with util-linux")
    tried = subprocess.run(
        [*begin, "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"unshare --mount: {tried.stderr}")
    return begin


def test_there_are_many_programs():
    assert len(hostile.PROGRAMS) >= 60


@pytest.mark.processes
@pytest.mark.parametrize("way", daily(WAYS, ["bubblewrap"]))
@pytest.mark.slow("a hundred programs, twelve of which are stopped after a second")
def test_no_program_does_harm(way):
    found = run(way, lambda _: [sys.executable, "-m"])
    assert set(found) == set(hostile.PROGRAMS)
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.processes
@pytest.mark.parametrize("way", daily(WAYS, ["landlock"]))
@pytest.mark.slow("a hundred programs, twelve of which are stopped after a second")
def test_no_program_of_an_ordinary_user_does_harm(way, tmp_path):
    script = str(Path(__file__).with_name("ordinary_user.sh"))
    python = str(Path(sys._base_executable).resolve())
    begin = mounts()

    def command(part: int) -> list[str]:
        folder = tmp_path / str(part)
        folder.mkdir()
        return [
            *begin,
            "sh",
            script,
            # Another one in each worker of pytest, too.
            str(1_000_000_000 + os.getpid() * PARTS + part),
            str(folder),
            python,
            sys.base_prefix,
            str(PROJECT),
        ]

    found = run(way, command)
    assert set(found) == set(hostile.PROGRAMS)
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "reads a file",
        "writes a file",
        "overwrites a file",
        "deletes a file",
        "connects",
        "sends datagrams",
        "connects to an abstract socket",
        "stops a process",
        "asks for pairs of sockets that can be sent anywhere",
    ],
)
@pytest.mark.slow("a program that is not stopped waits for ten seconds")
def test_the_programs_do_harm_where_nothing_holds_them(name, tmp_path):
    # So that the tests above can fail.
    machine = hostile.Machine(tmp_path)
    try:
        with find("unsafe", limits=hostile.LIMITS) as sandbox:
            assert hostile.faults(sandbox, machine, name)
    finally:
        machine.close()
