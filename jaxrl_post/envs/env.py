"""The contract between a policy and what it is trained on: tasks, turns and rewards.

An environment speaks messages, never token ids, and knows nothing of jax. It answers
turns in a worker process of `jaxrl_post.envs.workers.pool`, which owns the deadline:
by a pure function of the whole conversation (`StatelessEnvironment`), or in a session
that is opened for an episode and keeps state between its turns (`StatefulEnvironment`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, overload, runtime_checkable

from jaxrl_post.messages import Message

__all__ = [
    "Answer",
    "Environment",
    "Message",
    "NeedsPreparation",
    "Session",
    "Split",
    "StatefulEnvironment",
    "StatelessEnvironment",
    "Step",
    "Task",
    "TaskSequence",
    "response",
]

type Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Answer(Message):
    """The policy's turn, as it was sampled: what ends a conversation that is judged.

    Args:
        role: "assistant".
        content: the text.
        finish_reason: "stop" where the policy ended it, "length" where it was cut at
            the most tokens that it may have.
        num_tokens: that were sampled, the stop token included.

    >>> Answer("assistant", "22", finish_reason="length", num_tokens=2).truncated
    True
    """

    finish_reason: str = "stop"
    num_tokens: int = 0

    @property
    def truncated(self) -> bool:
        """Whether it was cut: nobody knows how it would have ended."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Task:
    """One problem.

    Args:
        id: index of the task within its split, in [0, 2**32): it seeds the sampling.
        messages: the conversation that the policy is asked to continue.
        reference: the expected answer; empty when there is no single one.
        data: whatever else `step` needs. Must pickle: it travels to a worker process.

    >>> Task(0, (Message("user", "7+15="),), reference="22").reference
    '22'
    """

    id: int
    messages: tuple[Message, ...]
    reference: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """What an environment answers to an assistant's turn.

    Args:
        reward: a finite number, credited to the turn that was just taken.
        done: whether the episode ends here.
        messages: what is appended to the conversation before the policy's next turn.
        metrics: finite numbers to be averaged over episodes.
        rewards: the parts of the reward by name, each before its weight; empty where
            there is only one. GDPO normalises each by itself.

    >>> Step(reward=1.0, done=True).messages
    ()
    """

    reward: float
    done: bool
    messages: tuple[Message, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """A source of tasks, a small picklable value; one of the next two answers turns."""

    @property
    def name(self) -> str:
        """A short name for logs."""
        ...

    def tasks(self, split: Split) -> Sequence[Task]:
        """Deterministic, random-access tasks of a split, made when they are asked for.

        Args:
            split: "train" or "eval"; no problem belongs to both.
        """
        ...

    def demonstration(self, task: Task) -> str | None:
        """An answer worth imitating, for supervised warm starts; None if unknown."""
        ...


@runtime_checkable
class StatelessEnvironment(Environment, Protocol):
    """An environment whose answer is a pure function of the conversation."""

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Answers the assistant's turn that ends `conversation`. Pure.

        Runs in the main thread of a worker process, under the pool's deadline.

        Args:
            task: the task that the conversation began with.
            conversation: `task.messages` and every turn since; ends with the
                assistant's, which is an `Answer`: it says how it ended.
        """
        ...


@runtime_checkable
class Session(Protocol):
    """The environment of one episode. It lives in one worker process to its end.

    What it answers must depend on its task and the turns so far alone: when its worker
    dies, or a run is resumed, the turns are taken again in a new session, and one that
    answers otherwise fails its episode.
    """

    def step(self, turn: Answer) -> Step:
        """Answers the policy's next turn.

        Runs in the main thread of the worker process, under the pool's deadline.
        """
        ...

    def close(self) -> None:
        """Lets go of what the session holds. Called once, however the episode ended."""
        ...


@runtime_checkable
class StatefulEnvironment(Environment, Protocol):
    """An environment with state: a game, a sandbox, a simulated user."""

    def open(self, task: Task) -> Session:
        """Begins an episode, in the worker process that will take all its turns."""
        ...


@runtime_checkable
class NeedsPreparation(Protocol):
    """An environment that loads something before its first step.

    Each worker process calls `prepare` once, before the deadline of any step begins to
    run. So a slow import is not charged to the first answer, and a missing library
    stops the run at its start instead of failing every reward.
    """

    def prepare(self) -> None:
        """Imports and loads what `step` needs."""
        ...


@dataclass(frozen=True)
class TaskSequence(Sequence[Task]):
    """Tasks that are made one at a time, when they are asked for.

    Args:
        size: number of tasks.
        make: from an index in [0, size) to its task; deterministic.

    >>> tasks = TaskSequence(3, lambda i: Task(i, (), reference=str(i)))
    >>> len(tasks), tasks[-1].reference, [task.id for task in tasks[:2]]
    (3, '2', [0, 1])
    """

    size: int
    make: Callable[[int], Task]

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskSequence: ...
    def __getitem__(self, index: int | slice) -> Task | TaskSequence:
        # `range` has the semantics of indices (negative, slices, errors) already.
        chosen = range(self.size)[index]
        if isinstance(chosen, range):
            return TaskSequence(len(chosen), lambda i: self.make(chosen[i]))
        return self.make(operator.index(chosen))


def response(conversation: Sequence[Message]) -> str:
    """The assistant's turn that ends a conversation.

    Args:
        conversation: messages, the last of them the assistant's.

    Returns:
        The content of the last message.

    Raises:
        ValueError: if the conversation does not end with the assistant's turn.

    >>> response((Message("user", "7+15="), Message("assistant", "22")))
    '22'
    """
    if not conversation or conversation[-1].role != "assistant":
        last = conversation[-1].role if conversation else "nothing"
        raise ValueError(
            f"conversation must end with an assistant message, got {last}: append the "
            "policy's turn before calling step"
        )
    return conversation[-1].content
