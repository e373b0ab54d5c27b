"""Programs that try to leave a sandbox, and what of the machine they must not touch.

Runs with the standard library alone, as any user:

    python -m tests.envs.sandbox.hostile require:bubblewrap 0/4

writes a line of JSON for each program of a part, here every fourth one from the first:
its name, and what went wrong, if anything did.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jaxrl_post.envs.sandbox import Limits, Place, Sandbox, find
from jaxrl_post.envs.sandbox.limits import Ended
from tests.envs.sandbox.hostile_programs import PRELUDE, PROGRAMS, SECRET

LIMITS = Limits(
    wall_seconds=10.0,
    cpu_seconds=5,
    memory_bytes=400 << 20,
    processes=24,
    file_bytes=8 << 20,
    directory_bytes=24 << 20,
    files=3000,
    open_files=64,
    output_bytes=10_000,
)
# A call, the grace for its answer, a look of the keeper, and a slow machine.
LATEST = LIMITS.wall_seconds + 10.0

# Programs that do not end, and get a second.
ENDLESS = {
    "stops its parents",
    "ignores signals",
    "becomes another program",
    "forks",
    "forks in a shell",
    "starts threads",
    "prints for ever",
    "prints errors for ever",
    "sleeps",
    "loops",
    "matches for ever",
    "counts too far",
}
# How some must end.
ENDINGS: dict[str, set[Ended]] = {
    "ignores signals": {"time"},
    "becomes another program": {"time"},
    "prints for ever": {"time"},
    "prints errors for ever": {"time"},
    "sleeps": {"time"},
    "loops": {"time"},
    "matches for ever": {"time"},
    # Where signals are refused, it runs to its end.
    "stops its parents": {"time", "exit"},
    "forks": {"time", "processes"},
    "takes memory in many processes": {"memory"},
    # 64 files of 12 processes, of 208 KiB each, are less than the memory of a place;
    # with their own memory they may be more.
    "fills pairs of sockets": {"memory", "time"},
    "reads address 0": {"signal"},
}
# Programs that an error ends; the output of others counts only if they finish.
RAISES = {
    "closes every descriptor",
    "takes memory",
    "takes memory bit by bit",
    "takes shared memory",
    "writes a large file",
    "makes a file with a hole",
    "recurses",
    "unpacks a bomb",
}
# These reach gVisor's own devices, and the process that obeys the calls.
INSIDE_GVISOR = {
    "opens devices",
    "writes to the system",
    "reads another's memory",
    "takes another's files",
    "asks for priority",
}


class Machine:
    """Things that a program may not reach."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.open = folder / "open"
        self.open.mkdir()
        self.open.chmod(0o777)
        self.kept = self.open / "kept"
        self.kept.write_text("kept")
        self.kept.chmod(0o666)
        self.before = self._state()
        self.path = str(folder / "socket")
        self.abstract = f"sandbox-test-{os.getpid()}"
        self.sockets = [
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        ]
        self.port = self.sockets[0].getsockname()[1]
        self.sockets[1].bind(self.path)
        self.sockets[2].bind("\0" + self.abstract)
        self.sockets[3].bind(self.path + ".datagrams")
        self.sockets[4].bind(("127.0.0.1", self.port))
        for name in (self.path, self.path + ".datagrams"):
            os.chmod(name, 0o777)
        for each in self.sockets[1:3]:
            each.listen(8)
        self.victim = subprocess.Popen(
            ["sleep", "3600"], env={"SECRET": SECRET}, start_new_session=True
        )

    def _state(self) -> tuple[object, ...]:
        found = self.kept.stat()
        return (
            self.kept.read_text(),
            found.st_mode,
            found.st_uid,
            found.st_mtime,
            os.listxattr(self.kept),
            sorted(path.name for path in self.open.iterdir()),
        )

    def harm(self) -> list[str]:
        """Traces that a program has left on the machine."""
        found = []
        try:
            state: object = self._state()
        except OSError as error:
            state = error
        if state != self.before:
            found.append(f"files: {state} instead of {self.before}")
        reached, _, _ = select.select(self.sockets, [], [], 0)
        for each in reached:
            found.append(f"network: {each}")
            with contextlib.suppress(OSError):
                if each.type == socket.SOCK_DGRAM:
                    each.recv(100)
                else:
                    each.accept()[0].close()
        status = Path(f"/proc/{self.victim.pid}/stat").read_text().split()[2]
        if self.victim.poll() is not None or status not in "SDR":
            found.append(f"process: {self.victim.returncode}, state {status}")
        return found

    def close(self) -> None:
        """Ends the process and closes the sockets."""
        self.victim.kill()
        self.victim.wait()
        for each in self.sockets:
            each.close()


def processes_below(process: int) -> set[int]:
    """The descendants of a process that have not ended."""
    found, waiting = set(), [process]
    while waiting:
        with contextlib.suppress(OSError):
            number = waiting.pop()
            for task in os.listdir(f"/proc/{number}/task"):
                text = Path(f"/proc/{number}/task/{task}/children").read_text()
                for child in map(int, text.split()):
                    found.add(child)
                    waiting.append(child)
    return found


def faults(sandbox: Sandbox, machine: Machine, name: str) -> list[str]:
    """Runs a program; what it did that it should not have been able to do."""
    names = {
        "secret": str(machine.secret),
        "folder": str(machine.open),
        "port": machine.port,
        "path": machine.path,
        "abstract": machine.abstract,
        "victim": machine.victim.pid,
    }
    begin = time.monotonic()
    found: list[str] = []
    own = processes_below(os.getpid())
    place = sandbox.open()
    try:
        text = "\n".join(f"{key} = {value!r}" for key, value in names.items())
        ready = place.python(PRELUDE + text)
        if not ready.succeeded:
            return [f"was not run: {ready}"]
        seconds = 1.0 if name in ENDLESS else None
        outcome = place.python(PROGRAMS[name], seconds=seconds)
        if outcome.seconds > LATEST:
            found.append(f"took {outcome.seconds} s")
        if len(outcome.stdout) > LIMITS.output_bytes + 10:
            found.append(f"printed {len(outcome.stdout)}")
        text = outcome.stdout + outcome.stderr
        inner = sandbox.mechanism == "gvisor" and name in INSIDE_GVISOR
        if ("ESCAPED" in text and not inner) or SECRET in text:
            found.append(f"escaped: {text[:2000]}")
        if outcome.status and outcome.ended == "exit" and name not in RAISES:
            found.append(f"did not come to its end: {text[-2000:]}")
        if outcome.ended not in ENDINGS.get(name, {outcome.ended}):
            found.append(f"ended by {outcome}")
        found += after(place)
    finally:
        place.close()
    until = time.monotonic() + 10
    left = processes_below(os.getpid()) - own
    while left and time.monotonic() < until:
        time.sleep(0.005)
        left = processes_below(os.getpid()) - own
    if left:
        found.append(f"left processes {left}")
    home = Path(place.home)
    if home != Path("/tmp") and home.exists():
        found.append(f"left {home}")
    if time.monotonic() - begin > 2 * LATEST:
        found.append(f"all took {time.monotonic() - begin} s")
    return found + machine.harm()


def after(place: Place) -> list[str]:
    """State of a place after a hostile call; it may have ended, but not stall."""
    if not place.alive:
        return []
    begin = time.monotonic()
    outcome = place.python("print(6 * 7)")
    if outcome.ended == "exit" and outcome.stdout.endswith("42\n"):
        return []
    if time.monotonic() - begin > LATEST:
        return [f"stalled afterwards: {outcome}"]
    return []


def check(
    requirement: str, names: list[str], version: int | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Runs programs, one after the other."""
    os.environ["SECRET"] = SECRET
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(requirement, version) as sandbox,
    ):
        machine = Machine(Path(folder))
        try:
            for name in names:
                yield name, faults(sandbox, machine, name)
        finally:
            machine.close()


def opened(requirement: str, version: int | None) -> Sandbox:
    """The sandbox that is asked for, with an older Landlock if a version is given."""
    if version is None:
        return find(requirement, limits=LIMITS)
    from jaxrl_post.envs.sandbox.mechanisms import Landlock, interpreters

    mechanism = Landlock(version=version)
    usable = [one for one in interpreters(None) if mechanism.accepts(one)]
    return Sandbox(mechanism, usable[0], limits=LIMITS)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    asked, part, *older = sys.argv[1:]
    first, parts = map(int, part.split("/"))
    chosen = [*PROGRAMS][first::parts]
    for program, problems in check(asked, chosen, int(older[0]) if older else None):
        sys.stdout.write(json.dumps([program, problems]) + "\n")
        sys.stdout.flush()
