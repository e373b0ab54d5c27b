"""The open sessions of one worker process, one session per episode."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise

from jaxrl_post.envs.env import (
    BASE_URL,
    AgentEnvironment,
    Answer,
    Environment,
    Message,
    Repeats,
    Session,
    StatefulEnvironment,
    StatelessEnvironment,
    Step,
    Task,
)

__all__ = ["SessionError", "Sessions"]


class SessionError(RuntimeError):
    """A session answered a replayed turn differently than the first time."""


@dataclass
class _Open:
    session: Session
    turns: int = 0


class Sessions:
    """Answers turns, each in the session of its episode.

    If the session of an episode is not in this process (its worker died, or the run was
    resumed), `step` opens a new session and replays the earlier turns. The replayed
    answers must equal the messages of the conversation.

    Args:
        environment: opens the sessions; if it is stateless, its `step` is called.
        watched: a context for every call of a session, which enforces the deadline.

    >>> from jaxrl_post.envs.tasks.guess import Guess
    >>> environment = Guess(size=7)
    >>> task = environment.tasks("eval")[0]
    >>> sessions = Sessions(environment)
    >>> said = Answer("assistant", task.reference)
    >>> sessions.step(("episode", 1), task, (*task.messages, said)).reward
    1.0
    >>> sessions.end(("episode", 1))
    >>> len(sessions)
    0
    """

    def __init__(
        self,
        environment: Environment,
        watched: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._environment = environment
        self._watched = watched
        self._open: dict[Hashable, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def step(
        self, key: Hashable, task: Task, conversation: tuple[Message, ...]
    ) -> Step:
        """Answers the turn that ends a conversation.

        Args:
            key: identifies the episode.
            task: the task that the conversation began with.
            conversation: the messages so far.

        Raises:
            SessionError: earlier turns had to be replayed, and an answer differed.
        """
        environment = self._environment
        if isinstance(environment, StatelessEnvironment):
            with self._watched():
                return _of_one(environment.step(task, conversation))
        if isinstance(environment, AgentEnvironment):
            with self._watched():
                return environment.run(task, task.data[BASE_URL])
        assert isinstance(environment, StatefulEnvironment), "checked by the pool"
        *before, last = turns_of(task, conversation)
        opened = self._open.get(key)
        if opened is None or opened.turns != len(before):
            self.end(key)
            with self._watched():
                opened = self._open[key] = _Open(environment.open(task))
            self._replay(opened, conversation, before)
        opened.turns += 1
        with self._watched():
            return _of_one(opened.session.step(_answer(conversation[last])))

    def end(self, key: Hashable) -> None:
        """Closes the session of an episode, if it is open."""
        opened = self._open.pop(key, None)
        if opened is not None:
            with self._watched():
                opened.session.close()

    def close(self) -> None:
        """Closes all sessions; ignores exceptions, as the process is about to end."""
        for key in list(self._open):
            with suppress(Exception):
                self.end(key)

    def _replay(
        self, opened: _Open, conversation: tuple[Message, ...], turns: Sequence[int]
    ) -> None:
        session = opened.session
        last = len(conversation) - 1
        for number, (turn, following) in enumerate(pairwise([*turns, last]), 1):
            answer = _answer(conversation[turn])
            said = conversation[turn + 1 : following]
            with self._watched():
                if isinstance(session, Repeats):
                    step = session.repeat(answer, said)
                else:
                    step = session.step(answer)
            opened.turns += 1
            if step.done or step.messages != said:
                raise SessionError(
                    f"{self._environment.name}: turn {number} was answered otherwise "
                    "when it was taken again in a new session (the worker of the first "
                    "had died, or the run was resumed): what a session does must "
                    f"depend on its task and turns alone; got {step}, and the "
                    f"conversation continues with {said}"
                )


def turns_of(task: Task, conversation: tuple[Message, ...]) -> list[int]:
    """Indices of the policy's turns in a conversation.

    Raises:
        ValueError: the conversation does not end with the policy's turn.
    """
    first = len(task.messages)
    turns = [
        index
        for index, message in enumerate(conversation[first:], first)
        if message.role == "assistant"
    ]
    if not turns or turns[-1] != len(conversation) - 1:
        raise ValueError("conversation must end with the policy's turn")
    return turns


def _answer(message: Message) -> Answer:
    if isinstance(message, Answer):
        return message
    return Answer("assistant", message.content, tool_calls=message.tool_calls)


def _of_one(step: Step) -> Step:
    """A step of one policy alone; what is no step at all is refused later.

    Raises:
        ValueError: it rewards players.
    """
    if isinstance(step, Step) and step.players:
        raise ValueError(
            f"players: only episodes of agents have players; got {dict(step.players)}. "
            "Return a reward alone, or write the game as an AgentEnvironment"
        )
    return step
