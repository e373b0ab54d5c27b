"""What a pool and its worker processes say to each other, one frame at a time.

Requests are pickled: they come from the process that owns the run. Replies are JSON:
a worker has handled what a model wrote, and unpickling a reply could run it here.
"""

from __future__ import annotations

import json
import math
import numbers
import socket
import struct
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_post.envs.env import Message, Step, Task

__all__ = [
    "LARGEST_FRAME",
    "LONGEST_MESSAGES",
    "Ask",
    "Reply",
    "decode_step",
    "encode_step",
    "receive_frame",
    "receive_reply",
    "send_frame",
]

type Reply = dict[Literal["kind", "error", "step", "number"], Any]


@dataclass(frozen=True)
class Ask:
    """What a pool asks of a worker.

    Attributes:
        session: of which episode; None where the environment has no sessions.
        task: that the conversation began with.
        conversation: whose last turn is to be answered; None to end the session.
    """

    session: Hashable
    task: Task
    conversation: tuple[Message, ...] | None


_HEADER = struct.Struct("!Q")
# A worker must not be able to make its parent allocate whatever it says.
LARGEST_FRAME = 2**28
# Characters that an environment may answer a turn with. More is no use to a policy, and
# all of it would be tokenised in the process that trains.
LONGEST_MESSAGES = 2**20


def send_frame(
    connection: socket.socket, payload: bytes, *, expires: float | None
) -> None:
    """Sends a payload after its length.

    Args:
        connection: a stream socket.
        payload: at most 256 MiB.
        expires: `time.monotonic()` at which to give up; None waits for the other side.

    Raises:
        ValueError: if the payload is too large.
        TimeoutError: if the other side did not read it in time.
        OSError: if the other side is gone.

    >>> ours, theirs = socket.socketpair()
    >>> send_frame(ours, b"ping", expires=time.monotonic() + 1)
    >>> receive_frame(theirs, expires=time.monotonic() + 1)
    b'ping'
    >>> ours.close(), theirs.close()
    (None, None)
    """
    if len(payload) > LARGEST_FRAME:
        raise ValueError(
            f"payload must be at most {LARGEST_FRAME} bytes, got {len(payload)}"
        )
    connection.settimeout(_remaining(expires))
    connection.sendall(_HEADER.pack(len(payload)) + payload)


def receive_frame(connection: socket.socket, *, expires: float | None) -> bytes:
    """Receives a payload that `send_frame` sent.

    Args:
        connection: a stream socket.
        expires: `time.monotonic()` at which to give up; None waits for the other side.

    Returns:
        The payload.

    Raises:
        EOFError: if the other side closed the connection.
        ValueError: if the announced length is over 256 MiB.
        TimeoutError: if the payload did not come in time.
        OSError: if the other side is gone.
    """
    (size,) = _HEADER.unpack(_receive_exactly(connection, _HEADER.size, expires))
    if size > LARGEST_FRAME:
        raise ValueError(f"a frame has at most {LARGEST_FRAME} bytes, got {size}")
    return _receive_exactly(connection, size, expires)


def receive_reply(connection: socket.socket, *, expires: float | None) -> Reply:
    """Receives a frame that holds a JSON object.

    Args:
        connection: a stream socket.
        expires: `time.monotonic()` at which to give up.

    Raises:
        ValueError: if the frame is too large or holds something else.
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
    """The JSON object of a step that an environment returned.

    Args:
        step: what `Environment.step` returned, whatever it is.

    Returns:
        Its fields, every number a float.

    Raises:
        ValueError: if it is no `Step`, a number in it is none or is not finite, or its
            messages have more than 2**20 characters.

    >>> encode_step(Step(reward=1.0, done=True))
    {'reward': 1.0, 'done': True, 'messages': [], 'metrics': {}, 'rewards': {}}
    >>> encode_step(Step(reward=float("nan"), done=True))
    Traceback (most recent call last):
    ValueError: reward must be a finite number, got nan
    """
    if not isinstance(step, Step):
        raise ValueError(f"step must return a Step, got {type(step).__name__}")
    if not isinstance(step.done, bool):
        raise ValueError(f"done must be a bool, got {_shown(step.done)}")
    for message in step.messages:
        if not (isinstance(message, Message) and isinstance(message.content, str)):
            raise ValueError(
                f"messages must be Messages of text, got {_shown(message)}"
            )
    size = sum(len(message.content) for message in step.messages)
    if size > LONGEST_MESSAGES:
        raise ValueError(
            f"messages must have at most {LONGEST_MESSAGES} characters together, got "
            f"{size}: shorten what a tool returns"
        )
    return {
        "reward": _finite("reward", step.reward),
        "done": step.done,
        "messages": [[message.role, message.content] for message in step.messages],
        "metrics": {
            str(name): _finite(f"metric {name!r}", value)
            for name, value in step.metrics.items()
        },
        "rewards": {
            str(name): _finite(f"reward {name!r}", value)
            for name, value in step.rewards.items()
        },
    }


def decode_step(fields: dict[str, Any]) -> Step:
    """The step that `encode_step` encoded.

    Args:
        fields: a JSON object.

    Raises:
        ValueError, TypeError, KeyError: if it is none of a step's.

    >>> decode_step(encode_step(Step(reward=0.5, done=False))).reward
    0.5
    """
    messages = (Message(role, str(content)) for role, content in fields["messages"])
    return Step(
        reward=_finite("reward", fields["reward"]),
        done=bool(fields["done"]),
        messages=tuple(messages),
        metrics={
            name: _finite(name, value) for name, value in fields["metrics"].items()
        },
        rewards={
            name: _finite(name, value) for name, value in fields["rewards"].items()
        },
    )


def _finite(name: str, value: object) -> float:
    # Real, so that NumPy's float32 and int64 are numbers too.
    if isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise ValueError(f"{name} must be a finite number, got {_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return repr(value)
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _remaining(expires: float | None) -> float | None:
    if expires is None:
        return None
    remaining = expires - time.monotonic()
    # A socket reads a timeout of 0 as "do not block", which is another error.
    if remaining <= 0:
        raise TimeoutError("timed out")
    return remaining


def _receive_exactly(
    connection: socket.socket, size: int, expires: float | None
) -> bytes:
    received = bytearray()
    while len(received) < size:
        connection.settimeout(_remaining(expires))
        chunk = connection.recv(min(size - len(received), 2**20))
        if not chunk:
            raise EOFError("the other side closed the connection")
        received += chunk
    return bytes(received)
