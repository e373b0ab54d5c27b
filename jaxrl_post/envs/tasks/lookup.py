"""Numbers that only a tool knows: the smallest task about calling tools."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from jaxrl_post.envs.env import (
    Message,
    Split,
    Step,
    Task,
    TaskSequence,
    ToolCall,
    response,
)
from jaxrl_post.envs.tasks.held_out import split_of
from jaxrl_post.envs.tasks.ranges import require_integer, require_share
from jaxrl_post.envs.tools import Tool, ToolEnvironment, ToolError

__all__ = ["Table", "lookup"]

# The answer of a model that does not know.
UNKNOWN = "?"

_TOOL = Tool(
    "look",
    "Looks up a key of four digits; returns a value of two digits, or another key.",
    {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "Four digits."}},
        "required": ["key"],
    },
)
# Share of the keys above the last level that lead to another key.
_REDIRECTED = 0.7


def lookup(
    slips: float = 0.8,
    depth: int = 2,
    seed: int = 0,
    train_size: int = 5000,
    eval_size: int = 200,
) -> ToolEnvironment:
    """The value of a key, which only the tool `look` can tell.

    The prompt is a key, as in "4821?". The tool's result is the value, two digits, or
    another key to look up. The reward is 1 for an answer that is the value, and 0
    otherwise. Nothing in the prompt tells the value, so a model that does not call the
    tool, with the right key, and again with the key that it was told, is right once in
    a hundred tasks. Prompts of training tasks may hold the first calls already.

    Args:
        slips: share of the first turns, in [0, 1], whose demonstration is "?", as of
            a model that does not know and does not look.
        depth: most keys on the way to a value, in [1, 8].
        seed: seeds keys and values.
        train_size: number of training tasks.
        eval_size: number of held-out tasks; their keys are not in training.

    Raises:
        ValueError: an argument is outside its range.

    >>> from jaxrl_post.envs import Answer
    >>> environment = lookup(depth=2)
    >>> task = environment.tasks("eval")[9]
    >>> task.messages[0].content, task.reference
    ('5993?', '06')
    >>> session = environment.open(task)
    >>> call = ToolCall("look", '{"key": "5993"}', "0")
    >>> session.step(Answer("assistant", "", tool_calls=(call,))).messages[0].content
    '4369'
    >>> session.step(Answer("assistant", "06")).reward
    1.0
    """
    tasks = _Keys(slips, depth, seed, train_size, eval_size)
    return ToolEnvironment(tasks, (Table(seed, depth),))


@dataclass(frozen=True)
class Table:
    """The tool: a table of all keys, computed from a seed.

    Args:
        seed: of the keys and values.
        depth: most keys on the way to a value.
    """

    seed: int = 0
    depth: int = 2

    def tools(self) -> Sequence[Tool]:
        """One tool, `look`."""
        return (_TOOL,)

    def open(self, task: Task) -> Table:
        """This table: it keeps no state."""
        del task
        return self

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the table's entry for a key.

        Raises:
            ToolError: the argument is no key.
        """
        del name
        key = arguments.get("key")
        if not (isinstance(key, str) and len(key) == 4 and key.isdecimal()):
            told = "key must be a text of four digits"
            raise ToolError(told, kind="bad_arguments")
        return self.find(key)

    def find(self, key: str) -> str:
        """The value of a key, or the key that it leads to."""
        rng = Random(f"{self.seed} {key}")
        # Keys of one level lead to the next alone, so every way ends.
        level = self.level(key)
        if level + 1 < self.depth and rng.random() < _REDIRECTED:
            while True:
                other = f"{rng.randrange(10_000):04d}"
                if self.level(other) == level + 1:
                    return other
        return f"{rng.randrange(100):02d}"

    def level(self, key: str) -> int:
        """Index of a key on the way to its value."""
        digest = hashlib.blake2b(f"{self.seed} {key}".encode(), digest_size=2).digest()
        return int.from_bytes(digest) % self.depth

    def way(self, key: str) -> list[str]:
        """The results from a key to its value."""
        found = [self.find(key)]
        while len(found[-1]) == 4:
            found.append(self.find(found[-1]))
        return found

    def close(self) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class _Keys:
    """The tasks, and the reward of an answer."""

    slips: float
    depth: int
    seed: int
    train_size: int
    eval_size: int

    def __post_init__(self) -> None:
        require_share("slips", self.slips)
        require_integer("depth", self.depth, 1, 8)
        for name in ("train_size", "eval_size"):
            require_integer(name, getattr(self, name), 1, 2**30)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return f"lookup({self.depth})"

    def tasks(self, split: Split) -> TaskSequence:
        """The tasks of a split; no key belongs to both."""

        def make(index: int) -> Task:
            rng = Random(f"{self.seed} {split} {index}")
            while True:
                key = f"{rng.randrange(10_000):04d}"
                if split_of(key) == split:
                    break
            way = self._table.way(key)
            messages = [Message("user", f"{key}?")]
            if split == "train":
                for number in range(rng.randint(0, len(way))):
                    asked = key if number == 0 else way[number - 1]
                    call = _call(asked, number)
                    messages += [
                        Message("assistant", "", tool_calls=(call,)),
                        Message("tool", way[number], tool_call_id=call.id, name="look"),
                    ]
            return Task(index, tuple(messages), way[-1], {"key": key})

        size = self.train_size if split == "train" else self.eval_size
        return TaskSequence(size, make)

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Compares the answer with the value."""
        right = response(conversation).strip() == task.reference
        return Step(float(right), done=True)

    def demonstration(self, task: Task) -> str | Message:
        """The next call or the value; for a share `slips` of first turns "?"."""
        rng = Random(f"{self.seed} {task.id} {task.data['key']} slip")
        last = task.messages[-1].content
        if len(task.messages) == 1 and rng.random() < self.slips:
            return UNKNOWN
        if len(last) == 2:
            return last
        asked = last.removesuffix("?")
        return Message("assistant", "", tool_calls=(_call(asked, 0),))

    @property
    def _table(self) -> Table:
        return Table(self.seed, self.depth)


def _call(key: str, number: int) -> ToolCall:
    return ToolCall("look", json.dumps({"key": key}), f"{number:04d}00000")
