"""The interface of environments: tasks, turns and rewards.

An episode is one sample with all of its turns. A turn is one answer of the policy, with
the messages that the environment replies. A judge is a process that runs the
environment's side of turns and returns rewards.

An environment handles messages, never token ids, and does not use jax. It runs in a
worker process of `jaxrl_post.envs.workers.pool`, which enforces the deadline. It
answers a turn with a pure function of the whole conversation (`StatelessEnvironment`),
or with a session that keeps state during one episode (`StatefulEnvironment`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, overload, runtime_checkable

from jaxrl_post.messages import Message, ToolCall

__all__ = [
    "BASE_URL",
    "AgentEnvironment",
    "Answer",
    "Environment",
    "Message",
    "NeedsPreparation",
    "NeedsTrial",
    "NeedsTurns",
    "Session",
    "Split",
    "StatefulEnvironment",
    "StatelessEnvironment",
    "Step",
    "Task",
    "TaskSequence",
    "ToolCall",
    "player_url",
    "require_player",
    "response",
]

# Where `Task.data` has the base URL of an agent's episode.
BASE_URL = "openai_base_url"

# The name of a player, which is a part of a path.
_PLAYER = re.compile(r"[A-Za-z0-9_-]{1,64}")

type Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Answer(Message):
    """A turn that the policy sampled; the last message of a conversation to be judged.

    Args:
        role: "assistant".
        content: the text.
        finish_reason: "stop" if the policy ended the turn, "length" if the turn was cut
            at the maximum number of tokens.
        num_tokens: number of sampled tokens, including the stop token.
        broken_calls: of a task with tools, number of tool calls that could not be read;
            they stay in `content`. The others are in `tool_calls`.

    >>> Answer("assistant", "22", finish_reason="length", num_tokens=2).truncated
    True
    """

    finish_reason: str = "stop"
    num_tokens: int = 0
    broken_calls: int = field(default=0, kw_only=True)

    @property
    def truncated(self) -> bool:
        """Whether the turn was cut at the maximum number of tokens."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Task:
    """One problem that the policy is asked to solve.

    A prompt is the text that the sampler continues: the rendered messages of a task, or
    in later turns of the conversation so far.

    Args:
        id: index of the task within its split, in [0, 2**32); seeds the sampling.
        messages: the conversation that the policy is asked to continue.
        reference: the expected answer; empty if there is no single expected answer.
        data: other data that `step` needs; must pickle, to be sent to worker processes.
        tools: the functions that the policy may call, as JSON schemas of OpenAI's chat
            API. Its answers are then read as its chat template writes calls: content,
            `reasoning` and `tool_calls` of an `Answer` are apart.
        part: of a mixture, the name of the environment that has the task; "" otherwise.
            Its rewards are measured apart.

    >>> Task(0, (Message("user", "7+15="),), reference="22").reference
    '22'
    """

    id: int
    messages: tuple[Message, ...]
    reference: str
    data: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    part: str = ""


@dataclass(frozen=True)
class Step:
    """The environment's answer to one turn of the policy.

    Args:
        reward: a finite number, credited to the turn that was just taken.
        done: whether the episode ends here.
        messages: messages to append to the conversation before the policy's next turn.
        metrics: finite numbers to be averaged over episodes.
        rewards: the unweighted parts of the reward by name; empty if the reward has
            only one part. GDPO normalises each part separately.
        players: of an agent whose episode has players (`player_url`), rewards by
            player, finite numbers; each is credited to that player's last turn. With
            several players `reward` must be 0, and `rewards` empty.

    >>> Step(reward=1.0, done=True).messages
    ()
    """

    reward: float
    done: bool
    messages: tuple[Message, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    players: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """A source of tasks, small and picklable; its subtypes below answer turns."""

    @property
    def name(self) -> str:
        """A short name for logs."""
        ...

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split: deterministic, random access, generated on access.

        Args:
            split: "train" or "eval"; no problem belongs to both.
        """
        ...

    def demonstration(self, task: Task) -> str | Message | None:
        """A good answer for a supervised warm start; None if none is known.

        Of a task with tools it may be a message that calls them.
        """
        ...


@runtime_checkable
class StatelessEnvironment(Environment, Protocol):
    """An environment that answers with a pure function of the conversation."""

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Answers the assistant's turn that ends `conversation`; has no side effects.

        Runs in the main thread of a worker process, under the pool's deadline.

        Args:
            task: the task that the conversation began with.
            conversation: `task.messages` and all later messages; the last one is the
                policy's turn, an `Answer`, which tells whether the turn was cut.
        """
        ...


@runtime_checkable
class Session(Protocol):
    """The state of one episode; a session stays in one worker process until it ends.

    Its answers must depend only on the task and the turns so far. If its worker dies or
    the run is resumed, the earlier turns are replayed in a new session; a session that
    then answers differently fails its episode.
    """

    def step(self, turn: Answer) -> Step:
        """Answers the policy's next turn.

        Runs in the main thread of the worker process, under the pool's deadline.
        """
        ...

    def close(self) -> None:
        """Releases the session's resources. Called once, even if the episode failed."""
        ...


@runtime_checkable
class Repeats(Session, Protocol):
    """A session that is told the earlier answer when it takes a turn again.

    So what depended on the clock, such as an answer that did not come in time, can stay
    as it was.
    """

    def repeat(self, turn: Answer, said: tuple[Message, ...]) -> Step:
        """Takes an earlier turn again, in the place of `step`.

        Args:
            turn: of the policy.
            said: the messages with which it was answered. Another answer than these
                fails the episode.
        """
        ...


@runtime_checkable
class StatefulEnvironment(Environment, Protocol):
    """An environment with state: a game, a sandbox, a simulated user."""

    def open(self, task: Task) -> Session:
        """Starts an episode, in the worker process that will answer all its turns."""
        ...


@runtime_checkable
class AgentEnvironment(Environment, Protocol):
    """An environment whose episodes are carried out by a program that calls the model.

    The program may be anything that speaks OpenAI's chat API: a client, an agent
    framework, a harness. It needs no change: what it is served is recorded.
    """

    def run(self, task: Task, base_url: str) -> Step:
        """Carries out an episode, and judges it.

        Runs in the main thread of a worker process, under the pool's deadline, which
        then bounds a whole episode. What it starts must end with it.

        Args:
            task: the problem.
            base_url: of the episode, such as "http://127.0.0.1:8000/episodes/3-0/v1",
                for one agent; POST .../reward in place of .../v1 credits single turns.
                `player_url` has one for each of several players.

        Returns:
            The reward of the episode, or rewards by player, and metrics; `messages`
            are not read.
        """
        ...


@runtime_checkable
class NeedsPreparation(Protocol):
    """An environment that loads something before its first step.

    Each worker process calls `prepare` once, before its first step. So a slow import
    does not count against the deadline of the first step, and a missing library stops
    the run at its start instead of failing every reward.
    """

    def prepare(self) -> None:
        """Imports and loads what `step` needs."""
        ...


@runtime_checkable
class NeedsTrial(Protocol):
    """An environment that may contain a user's functions, which are tried at the start.

    So a function that raises or returns no number stops the run before it begins
    (`envs.workers.trial`).
    """

    def trials(self, split: Split) -> Sequence[tuple[StatelessEnvironment, Task]]:
        """Environments with such functions, each with a task of a split."""
        ...


@runtime_checkable
class NeedsTurns(Protocol):
    """An environment of agents whose episodes fail if they may not call often enough.

    A run with a smaller `--rollout.max-turns` is refused before it begins.
    """

    @property
    def most_calls(self) -> int:
        """The most calls that an episode may need, at least 1."""
        ...


@dataclass(frozen=True)
class TaskSequence(Sequence[Task]):
    """A sequence of tasks that are generated one at a time, on access.

    Args:
        size: number of tasks.
        make: returns the task of an index in [0, size); deterministic.

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
        # `range` already implements negative indices, slices and index errors.
        chosen = range(self.size)[index]
        if isinstance(chosen, range):
            return TaskSequence(len(chosen), lambda i: self.make(chosen[i]))
        return self.make(operator.index(chosen))


def require_player(name: object) -> None:
    """Refuses a name that no player may have.

    Raises:
        ValueError: unless it is 1 to 64 letters, digits, dashes and underscores.
    """
    if not isinstance(name, str) or not _PLAYER.fullmatch(name):
        raise ValueError(
            "a player's name must be 1 to 64 letters, digits, dashes and underscores; "
            f"got {name!r:.80}"
        )


def player_url(base_url: str, name: str) -> str:
    """The base URL of one player of an agent's episode.

    What is served under it is recorded as this player's: conversations continue only
    the same player's, and rewards are compared with the same player's.

    Args:
        base_url: of the episode, as `AgentEnvironment.run` gets it; ends with /v1.
        name: of the player, 1 to 64 letters, digits, dashes and underscores.

    Raises:
        ValueError: the name has other characters, or the URL does not end with /v1.

    >>> player_url("http://127.0.0.1:8000/episodes/3-0/v1", "first")
    'http://127.0.0.1:8000/episodes/3-0/players/first/v1'
    """
    require_player(name)
    episode, found, rest = base_url.rstrip("/").rpartition("/v1")
    if not found or rest or "/players/" in episode:
        raise ValueError(
            f"base_url must be an episode's, and end with /v1; got {base_url!r:.200}"
        )
    return f"{episode}/players/{name}/v1"


def response(conversation: Sequence[Message]) -> str:
    """The text of the assistant's turn that ends a conversation.

    Args:
        conversation: messages; the last one is the assistant's.

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
