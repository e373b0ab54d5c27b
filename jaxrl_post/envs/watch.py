"""Notices that a server has ended, even if another one has taken its place."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

from jaxrl_post.envs.servers import UnreachableError

__all__ = ["Watch"]

_PORTS = {"http": 80, "https": 443}
# Bytes that are read at a time, and how often at a look.
_CHUNK, _READS = 1 << 16, 64


class Watch:
    """An idle connection that breaks when the server ends.

    While it is open, the process that accepted it lives. A server may also close it
    because it is idle, so the contrary does not follow.

    Args:
        url: of the server.
        until: instant of `time.monotonic()` at which the connection must be there.

    Raises:
        UnreachableError: the server is not there.
    """

    def __init__(self, url: str, until: float) -> None:
        parts = urlsplit(url)
        address = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        left = max(until - time.monotonic(), 1e-3)
        try:
            self._socket = socket.create_connection(address, timeout=left)
        except OSError as error:
            raise UnreachableError(f"{url}: {error}") from error
        self._socket.setblocking(False)

    @property
    def open(self) -> bool:
        """Whether the connection is open still."""
        try:
            # Unasked messages of a server do not matter, such as one that it stops
            # waiting; the end comes after them, and is read as nothing.
            return all(self._socket.recv(_CHUNK) for _ in range(_READS))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Ends the connection."""
        with suppress(OSError):
            self._socket.close()
