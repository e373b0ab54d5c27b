"""Environments of the library verifiers, which another Python has."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxrl_post.envs.env import Message, Split, Step, Task
from jaxrl_post.envs.tasks.held_out import split_of
from jaxrl_post.envs.tasks.ranges import require_integer

__all__ = ["Verifiers"]

_INSIDE = Path(__file__).with_name("verifiers_inside.py")
# Seconds for an environment to load, and to end.
_START = 120.0
_END = 15.0
# Characters of its log that an error shows.
_TOLD = 1500


@dataclass(frozen=True)
class Verifiers:
    """Tasks and episodes of an environment of verifiers, as they are.

    The library is not installed here, as it needs other versions of packages: a process
    of the Python that has it plays the episodes, one for each worker process. An
    episode is an agent's (`AgentEnvironment`): the environment's own program calls the
    model, and its own rewards judge what it did.

    Args:
        python: a Python that has verifiers, 0.4 or later, and the environment.
        config: a file of JSON, the block `env` of verifiers' own configuration, with
            the id of the taskset.
        most: so many tasks are taken, or all if there are fewer; one in ten is held
            out, by a hash of all that makes it but its number and name.

    Raises:
        ValueError: an argument is outside its range, or there is no such file.

    >>> Verifiers("python", "no such file.json")
    Traceback (most recent call last):
    ValueError: config must be a file of JSON, there is no 'no such file.json'
    """

    python: str
    config: str
    most: int = 1000

    def __post_init__(self) -> None:
        require_integer("most", self.most, 1, 1_000_000)
        if not Path(self.config).is_file():
            raise ValueError(
                f"config must be a file of JSON, there is no {self.config!r}"
            )

    @property
    def name(self) -> str:
        """A short name for logs."""
        return f"verifiers({Path(self.config).stem})"

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, in the environment's order.

        Args:
            split: "train" or "eval".

        Raises:
            RuntimeError: the environment cannot be loaded.
            ValueError: the split is empty.
        """
        found = [
            Task(number, (Message("user", prompt),), "", {"task": index})
            for number, (index, prompt) in enumerate(
                (index, prompt)
                for index, (prompt, problem) in enumerate(_prompts(self))
                if split_of(problem) == split
            )
        ]
        if not found:
            raise ValueError(
                f"{self.config}: no task falls into {split!r}; take more of them, by "
                "the option 'most'"
            )
        return tuple(found)

    def prepare(self) -> None:
        """Loads the environment, in the other Python's process.

        Raises:
            RuntimeError: it cannot be loaded.
        """
        _player(self)

    def demonstration(self, task: Task) -> None:
        """None: the environment tells no answers."""
        del task

    def run(self, task: Task, base_url: str) -> Step:
        """Has the environment carry out an episode.

        Raises:
            RuntimeError: it failed, or has no reward.
        """
        try:
            answer = _player(self).play(task.data["task"], base_url)
        except RuntimeError:
            # The next episode gets another process.
            _player.cache_clear()
            raise
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        parts = answer["parts"]
        rewards = parts if len(parts) > 1 else {}
        return Step(answer["reward"], done=True, rewards=rewards)


class _Player:
    """The process that has verifiers."""

    def __init__(self, environment: Verifiers) -> None:
        self._name = environment.name
        arguments = [environment.config, str(environment.most)]
        with contextlib.ExitStack() as stack:
            # Its log is shown if it ends, and not read before.
            self._log = stack.enter_context(tempfile.TemporaryFile())
            try:
                # In a session of its own it sees the end of its input when this process
                # is killed with its group, and can end what an episode has started.
                self._process = subprocess.Popen(
                    [environment.python, "-P", str(_INSIDE), *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    start_new_session=True,
                )
            except OSError as error:
                raise RuntimeError(
                    f"{self._name}: {environment.python!r} cannot be run: {error}"
                ) from error
            stack.callback(_ended, self._process)
            self._end = weakref.finalize(self, stack.pop_all().close)
        # The prompt of each task, and a hash of all that makes it.
        self.tasks: list[list[str]] = self._answer(_START)["tasks"]

    def play(self, task: int, base_url: str) -> dict[str, Any]:
        """Carries out an episode, for as long as it takes: the pool has the deadline.

        Raises:
            RuntimeError: the process ended.
        """
        asked = json.dumps({"task": task, "base_url": base_url}).encode() + b"\n"
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(asked)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        return self._answer(math.inf)

    def close(self) -> None:
        """Ends the process."""
        self._end()

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None, "it is a pipe"
        descriptor = self._process.stdout.fileno()
        until = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            wait = None if left == math.inf else max(left, 0)
            if not select.select([descriptor], [], [], wait)[0]:
                raise self._failure(f"did not load within {seconds:g} s")
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise self._failure("ended")
            line += part
        return json.loads(line)

    def _failure(self, what: str) -> RuntimeError:
        _ended(self._process)
        self._log.seek(0)
        log = self._log.read().decode("utf-8", "replace").strip()
        self.close()
        return RuntimeError(
            f"{self._name}: the process of verifiers {what}; it said: {log[-_TOLD:]}"
        )


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, which first ends what an episode has started."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@lru_cache(maxsize=1)
def _player(environment: Verifiers) -> _Player:
    # One for the life of a worker process.
    return _Player(environment)


@lru_cache(maxsize=1)
def _prompts(environment: Verifiers) -> tuple[tuple[str, str], ...]:
    """The prompts of all tasks, and what copies of a task have in common.

    Of prompts that are equal, all have their number.
    """
    player = _Player(environment)
    player.close()
    times = Counter(prompt for prompt, _ in player.tasks)
    return tuple(
        (prompt if times[prompt] == 1 else f"Task {index}.\n\n{prompt}", problem)
        for index, (prompt, problem) in enumerate(player.tasks)
    )
