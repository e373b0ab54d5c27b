"""Environments that do what the assistant's turn tells them, good or bad."""

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxrl_post.envs.env import Answer, Message, Split, Step, Task
from jaxrl_post.envs.scratch import make_directory as make_scratch
from jaxrl_post.envs.workers.wire import encode_step
from jaxrl_post.frames import send_frame

PROMPT = (Message("user", "do something"),)
# The prompts of `Counter`.
COUNT = Task(3, (Message("user", "count"),), "")


def said(*turns: str) -> tuple[Message, ...]:
    """An episode of the counter so far: its answers, and a last turn."""
    messages = [*COUNT.messages]
    for number, turn in enumerate(turns, 1):
        messages.append(Answer("assistant", turn, "stop", 2))
        if number < len(turns):
            messages.append(Message("user", f"{number}"))
    return tuple(messages)


def reply(reward: object = 1.0, **metrics: object) -> Step:
    # A step that a careless environment builds; the annotations of Step are not
    # enforced.
    return Step(reward=reward, done=True, metrics=metrics)  # type: ignore[arg-type]


def innermost_hang(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)


def raise_in_depth(depth: int) -> Step:
    if depth:
        return raise_in_depth(depth - 1)
    raise ZeroDivisionError("at the bottom")


def flood() -> Step:
    for stream in (sys.stdout, sys.stderr):
        stream.write("noise " * 100_000)
    os.write(1, b"\x00" * 200_000)
    return reply()


def read_input() -> Step:
    return reply(float(input()))


def use_alarm() -> Step:
    rang = threading.Event()
    previous = signal.signal(signal.SIGALRM, lambda *_: rang.set())
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while not rang.wait(0.01):
        pass
    signal.signal(signal.SIGALRM, previous)
    return reply(main_thread=threading.current_thread() is threading.main_thread())


def meet(directory: str, me: str, other: str) -> Step:
    Path(directory, me).touch()
    while not Path(directory, other).exists():
        time.sleep(0.01)
    return reply()


def node() -> float:
    """Tells the nodes of a Ray cluster apart."""
    return float(os.environ.get("RAY_RAYLET_PID", 0))


def echo(number: str) -> Step:
    return reply(float(number), node=node())


def hang_with_child(path: str) -> Step:
    child = subprocess.Popen(["sleep", "100"])
    Path(path).write_text(str(child.pid))
    return hang()


def hang_in_a_directory(path: str) -> Step:
    directory = make_scratch("sandbox-")
    (directory / "file").write_text("left behind")
    Path(path).write_text(str(directory.parent))
    return hang()


def leave_slowly(path: str) -> Step:
    """Has something done when the interpreter ends that takes a while."""
    directory = make_scratch("sandbox-")

    def leave() -> None:
        time.sleep(0.2)
        directory.rmdir()
        Path(path).write_text(str(directory.parent))

    atexit.register(leave)
    return reply()


def hang() -> Step:
    innermost_hang(100)
    return reply()


def hang_holding_the_lock() -> Step:
    # A regular expression never gives up the interpreter lock.
    re.match(r"(a+)+$", "a" * 60 + "b")
    return reply()


def stop_oneself() -> Step:
    os.kill(os.getpid(), signal.SIGSTOP)
    return reply()


def die(by: int) -> Step:
    os.kill(os.getpid(), by)
    return reply()


def exit_at_once() -> Step:
    sys.stdout.write("last words\n")
    os._exit(7)


def write_junk_to_the_socket() -> Step:
    for descriptor in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, (3).to_bytes(8) + b"[1]")
        except OSError:
            continue
    return reply()


def announce_a_huge_reply() -> Step:
    for descriptor in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, b"\xff" * 8)
        except OSError:
            continue
    return reply()


def talk() -> Step:
    return Step(
        reward=-0.5,
        done=False,
        messages=(Message("tool", "é \ud800 ∞"), Message("user", "go on")),
        metrics={"turns": 3.0},
    )


SCRIPTS = {
    "announce a huge reply": announce_a_huge_reply,
    "be too honest": lambda: reply(True),
    "count modules": lambda: reply(
        jax="jax" in sys.modules, numpy="numpy" in sys.modules
    ),
    "exit": exit_at_once,
    "exit politely": lambda: sys.exit("goodbye"),
    "flood": flood,
    "hang": hang,
    "hang holding the lock": hang_holding_the_lock,
    "infinite": lambda: reply(float("-inf")),
    "metric nan": lambda: reply(1.0, speed=float("nan")),
    "metric text": lambda: reply(1.0, speed="fast"),
    "nan": lambda: reply(float("nan")),
    "no message": lambda: Step(1.0, done=False, messages=("hello",)),  # type: ignore[arg-type]
    "none": lambda: None,
    "pid": lambda: reply(pid=os.getpid()),
    "raise": lambda: raise_in_depth(50),
    "read input": read_input,
    "reward none": lambda: reply(None),
    "reward text": lambda: reply("1.0"),
    "say hello": lambda: Step(-0.5, False, (Message("user", "hello"),), {"turns": 3.0}),
    "segfault": lambda: die(signal.SIGSEGV),
    "stop oneself": stop_oneself,
    "take memory": lambda: reply(len(bytearray(8 * 2**30))),
    "talk": talk,
    "too large": lambda: reply(10**400),
    "use alarm": use_alarm,
    "write junk": write_junk_to_the_socket,
}
WITH_ARGUMENTS = {
    "echo": echo,
    "meet": meet,
    "hang in a directory": hang_in_a_directory,
    "hang with child": hang_with_child,
    "leave slowly": leave_slowly,
}


@dataclass(frozen=True)
class Scripted:
    name: str = "scripted"

    def tasks(self, split: Split) -> Sequence[Task]:
        return (Task(0, PROMPT, ""),)

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        script, *arguments = conversation[-1].content.split("|")
        if arguments:
            return WITH_ARGUMENTS[script](*arguments)
        return SCRIPTS[script]()  # type: ignore[return-value]

    def demonstration(self, task: Task) -> str | None:
        return None


@dataclass(frozen=True)
class Unprepared(Scripted):
    how: str = "raise"

    def prepare(self) -> None:
        if self.how == "raise":
            raise ModuleNotFoundError("no module 'grader': pip install grader")
        if self.how == "exit":
            sys.stderr.write("cannot go on\n")
            os._exit(3)
        innermost_hang(100)


@dataclass(frozen=True)
class PreparedOnce(Scripted):
    """Starts the first time only: what happens when a restart fails."""

    marker: str = ""

    def prepare(self) -> None:
        if Path(self.marker).exists():
            raise RuntimeError("the second start fails")
        Path(self.marker).touch()


class NoEnvironment:
    name = "none"


def build(size: int, *, name: str = "built") -> Scripted:
    assert size > 0
    return Scripted(name)


def build_nothing() -> None:
    return None


def brevity(task: Task, conversation: tuple[Message, ...]) -> float:
    return 1.0 / len(conversation[-1].content)


def graded_right_or_none(response, answer):
    """Forgets what a wrong answer earns."""
    return 1.0 if response == str(answer) else None


def graded_none(response, answer):
    """A grader that forgets to return."""


def scored_none(task, conversation):
    """A criterion that forgets to return."""


def scored_raising(task, conversation):
    """A criterion that cannot judge anything."""
    raise LookupError(task.reference)


def graded_share(response, answer):
    """A grader whose number is of NumPy's."""
    import numpy

    return numpy.float32(len(response) > 0)


def length_share(response: str, answer: dict[str, int]) -> float:
    """A grader: as long as the answer asks for."""
    return len(response) / answer["length"]


@dataclass
class Count:
    """A session that counts its turns, and can be told to misbehave."""

    environment: "Counter"
    born: float
    turns: int = 0
    stuck: bool = False

    def step(self, turn: Answer) -> Step:
        self.turns += 1
        said, content = turn.content, str(self.turns)
        if said == "hang":
            return hang()
        if said == "exit":
            os._exit(3)
        if said == "slow":
            time.sleep(1.5)
        if said == "stuck":
            self.stuck = True
        if said == "allocate":
            bytearray(2**31)
        if said == "flood":
            content = "x" * 100_000_000
        if said == "two replies":
            answer_twice({"kind": "ok", "number": 1, "step": encode_step(reply())})
        if said == "another number":
            answer_twice({"kind": "ok", "number": 99, "step": encode_step(reply())})
        metrics = {"pid": float(os.getpid()), "born": self.born, "node": node()}
        return Step(0.5, said == "done", (Message("user", content),), metrics)

    def close(self) -> None:
        if self.stuck:
            innermost_hang(100)
        if self.environment.directory:
            name = f"closed-{os.getpid()}-{time.monotonic_ns()}"
            Path(self.environment.directory, name).touch()


def answer_twice(reply: dict) -> None:
    """Writes a reply of its own into the connection to the pool."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                connection = socket.socket(fileno=os.dup(int(number)))
                send_frame(connection, json.dumps(reply).encode(), expires=None)
                connection.close()


@dataclass(frozen=True)
class Counter:
    """Has a session for every episode."""

    directory: str = ""
    name: str = "counter"

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(i, PROMPT, "") for i in range(8)]

    def open(self, task: Task) -> Count:
        return Count(self, time.perf_counter())

    def demonstration(self, task: Task) -> str | None:
        return None


@dataclass(frozen=True)
class TasksAlone:
    name: str = "tasks-alone"

    def tasks(self, split: Split) -> Sequence[Task]:
        return []

    def demonstration(self, task: Task) -> str | None:
        return None
