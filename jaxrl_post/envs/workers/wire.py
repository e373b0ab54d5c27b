"""The protocol between a pool and its worker processes: frames over a socket.

Requests are pickled, because the process that owns the run is trusted. Replies are
JSON: a worker handles text of a model, so unpickling its replies could run code here.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_post.envs.env import Message, Step, Task
from jaxrl_post.envs.real_number import real_number, shown
from jaxrl_post.frames import receive_frame

__all__ = [
    "LARGEST_PICTURES",
    "LONGEST_MESSAGES",
    "Ask",
    "Reply",
    "decode_step",
    "encode_step",
    "receive_reply",
]

type Reply = dict[Literal["kind", "error", "step", "number"], Any]


@dataclass(frozen=True)
class Ask:
    """A request of a pool to a worker.

    Attributes:
        session: identifies the episode; None if the environment has no sessions.
        task: the task that the conversation began with.
        conversation: the messages, the last one to be answered; None ends the session.
    """

    session: Hashable
    task: Task
    conversation: tuple[Message, ...] | None


# Characters in an environment's answer to one turn. More does not help a policy, and
# the training process would have to tokenise all of it.
LONGEST_MESSAGES = 2**20
# Bytes of the files of an answer's pictures.
LARGEST_PICTURES = 2**25


def receive_reply(connection: socket.socket, *, expires: float | None) -> Reply:
    """Receives a frame that holds a JSON object.

    Args:
        connection: a stream socket.
        expires: `time.monotonic()` at which to give up; None waits without limit.

    Raises:
        ValueError: if the frame is too large, or no JSON object with a "kind".
        EOFError, TimeoutError, OSError: as `receive_frame`.
    """
    try:
        reply = json.loads(receive_frame(connection, expires=expires))
    except RecursionError as error:
        raise ValueError("a reply must not be nested so deep") from error
    if not isinstance(reply, dict) or not isinstance(reply.get("kind"), str):
        raise ValueError("a reply must be a JSON object with a 'kind'")
    return reply


def encode_step(step: object) -> dict[str, Any]:
    """Checks a step that an environment returned, and encodes it as a JSON object.

    Args:
        step: the value that `step` of the environment or session returned.

    Returns:
        The fields of the step, with every number as a float.

    Raises:
        ValueError: if `step` is no `Step`, one of its numbers is no number or not
            finite, or its messages have more than 2**20 characters, or pictures of
            more than 2**25 bytes.

    >>> encode_step(Step(reward=1.0, done=True))
    {'reward': 1.0, 'done': True, 'messages': [], 'metrics': {}, 'rewards': {}}
    >>> encode_step(Step(reward=float("nan"), done=True))
    Traceback (most recent call last):
    jaxrl_post.envs.real_number.NumberError: reward must be a finite number, got nan
    """
    if not isinstance(step, Step):
        raise ValueError(
            f"step, or an agent's run, must return a Step, got {type(step).__name__}"
        )
    if not isinstance(step.done, bool):
        raise ValueError(f"done must be a bool, got {shown(step.done)}")
    for message in step.messages:
        if not (isinstance(message, Message) and isinstance(message.content, str)):
            raise ValueError(f"messages must be Messages of text, got {shown(message)}")
    size = sum(len(message.content) for message in step.messages)
    if size > LONGEST_MESSAGES:
        raise ValueError(
            f"messages must have at most {LONGEST_MESSAGES} characters together, got "
            f"{size}: shorten what a tool returns"
        )
    weight = sum(len(each) for message in step.messages for each in message.pictures)
    if weight > LARGEST_PICTURES:
        raise ValueError(
            f"messages must have pictures of at most {LARGEST_PICTURES:,} bytes "
            f"together, got {weight:,}: make them smaller"
        )
    players = {
        str(name): real_number(f"reward of player {name!r}", value)
        for name, value in step.players.items()
    }
    fields = {
        "reward": real_number("reward", step.reward),
        "done": step.done,
        "messages": [message.to_json() for message in step.messages],
        "metrics": {
            str(name): real_number(f"metric {name!r}", value)
            for name, value in step.metrics.items()
        },
        "rewards": {
            str(name): real_number(f"reward {name!r}", value)
            for name, value in step.rewards.items()
        },
    }
    return fields | ({"players": players} if players else {})


def decode_step(fields: dict[str, Any]) -> Step:
    """The step that `encode_step` encoded.

    Args:
        fields: a JSON object.

    Raises:
        ValueError, TypeError, KeyError: if the object does not encode a step.

    >>> decode_step(encode_step(Step(reward=0.5, done=False))).reward
    0.5
    """
    return Step(
        reward=real_number("reward", fields["reward"]),
        done=bool(fields["done"]),
        messages=tuple(map(Message.from_json, fields["messages"])),
        metrics={
            name: real_number(name, value) for name, value in fields["metrics"].items()
        },
        rewards={
            name: real_number(name, value) for name, value in fields["rewards"].items()
        },
        players={
            name: real_number(name, value)
            for name, value in fields.get("players", {}).items()
        },
    )
