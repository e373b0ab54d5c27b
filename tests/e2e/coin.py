"""An environment that an untrained model solves about half of the time."""

import os
import random
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from jaxrl_post.envs import Answer, Message, Step, Task, TaskSequence, response


@dataclass(frozen=True)
class Coin:
    """Pays 1 for half of all answers; one task in three pays nothing.

    Which answers is a matter of a hash, so there is nothing to learn: some groups have
    rewards that differ and some have not, however long the training.

    Attributes:
        size: tasks of a split.
        hopeless: whether no task pays anything.
        broken: judging the tasks before this one raises.
    """

    size: int = 40
    hopeless: bool = False
    broken: int = 0
    name: str = "coin"

    def tasks(self, split: str) -> TaskSequence:
        def make(index: int) -> Task:
            return Task(index, (Message("user", f"{split} {index}="),), "")

        return TaskSequence(self.size, make)

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        if task.id < self.broken:
            raise RuntimeError("out of order")
        answer = response(conversation)
        heads = zlib.crc32(f"{task.id} {answer}".encode()) % 2 == 0
        pays = heads and task.id % 3 > 0 and not self.hopeless
        return Step(float(pays), done=True, metrics={"length": len(answer)})

    def demonstration(self, task: Task) -> str:
        return f"{task.id}"


def record(event):
    """A callback that writes what it is told, and in which process."""
    with (event.run_dir.parent / "events.txt").open("a") as file:
        file.write(f"{event.kind} {event.step} {os.getpid()}\n")


@dataclass(frozen=True)
class LateCoin(Coin):
    """A coin that takes another time to fall in every process."""

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        # From this worker's own number, so that no two processes wait alike.
        time.sleep(random.Random(f"{os.getpid()} {task.id}").uniform(0, 0.2))
        return super().step(task, conversation)


@dataclass(frozen=True)
class PacedCoin(Coin):
    """A coin that falls only while there is a file.

    Attributes:
        pace: the file.
    """

    pace: str = ""

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        parent = os.getppid()
        while not Path(self.pace).exists():
            # No process waits for the worker of a trainer that was killed.
            if os.getppid() != parent:
                raise SystemExit
            time.sleep(0.005)
        return super().step(task, conversation)


@dataclass(frozen=True)
class Relay:
    """At most three turns, each of which pays 1 for half of all answers.

    What is said in between, what a turn pays, and whether it is the last, depends on
    all turns so far.
    """

    size: int = 40
    name: str = "relay"

    def tasks(self, split: str) -> TaskSequence:
        return Coin(self.size).tasks(split)

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        turns = [m.content for m in conversation if m.role == "assistant"]
        return relayed(task, turns)

    def demonstration(self, task: Task) -> str:
        return f"{task.id}"


def relayed(task: Task, turns: list[str]) -> Step:
    """Relay's answer to the last of an episode's turns."""
    number = zlib.crc32(f"{task.id} {turns}".encode())
    again = (Message("user", f"{number % 10}="),)
    done = len(turns) == 3 or number % 4 == 0
    return Step(float(number % 2), done, () if done else again)


@dataclass
class RelaySession:
    """Remembers the turns, which Relay is told again each time."""

    task: Task
    turns: list[str]

    def step(self, turn: Answer) -> Step:
        self.turns.append(turn.content)
        return relayed(self.task, self.turns)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class StatefulRelay:
    """Relay with a session for every episode."""

    size: int = 40
    name: str = "relay"

    def tasks(self, split: str) -> TaskSequence:
        return Coin(self.size).tasks(split)

    def open(self, task: Task) -> RelaySession:
        return RelaySession(task, [])

    def demonstration(self, task: Task) -> str:
        return f"{task.id}"


def forty_percent(task: Task, conversation: tuple[Message, ...]) -> float:
    """A partial credit that every answer gets."""
    return 0.4


def brevity(task: Task, conversation: tuple[Message, ...]) -> float:
    """Shorter answers get more."""
    return -float(len(response(conversation)))
