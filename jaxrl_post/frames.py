"""Frames over a socket: a length, then so many bytes."""

from __future__ import annotations

import socket
import struct
import time

__all__ = ["LARGEST_FRAME", "receive_frame", "send_frame"]

_HEADER = struct.Struct("!Q")
# Bytes. Limits the memory that the other side can make this one allocate.
LARGEST_FRAME = 2**28


def send_frame(
    connection: socket.socket, payload: bytes, *, expires: float | None
) -> None:
    """Sends one frame: the length of the payload and the payload.

    Args:
        connection: a stream socket.
        payload: at most 256 MiB.
        expires: `time.monotonic()` at which to give up; None waits without limit.

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
    """Receives a frame that `send_frame` sent.

    Args:
        connection: a stream socket.
        expires: `time.monotonic()` at which to give up; None waits without limit.

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


def _remaining(expires: float | None) -> float | None:
    if expires is None:
        return None
    remaining = expires - time.monotonic()
    # A timeout of 0 would make the socket non-blocking, with another exception.
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
