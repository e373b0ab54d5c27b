"""One session of an OpenEnv server: messages over a WebSocket."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from jaxrl_post.envs.servers import ServerError, SlowServerError, UnreachableError
from jaxrl_post.extras import install

__all__ = ["OpenEnvClient", "RefusalError", "Result", "load_library"]

# Seconds in which a server may answer that a connection is to be closed.
_CLOSE = 1.0
# WebSocket's code of a message that is too large.
_TOO_LARGE = 1009
# Errors of a session's turn that are due to the action.
_REFUSALS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
_CAPACITY = "CAPACITY_REACHED"


class RefusalError(Exception):
    """A server did not carry an action out, and says why."""


class Result(NamedTuple):
    """Result of a reset or of an action.

    Attributes:
        observation: a JSON object.
        reward: finite; 0 where the server gives none.
        done: whether the episode has ended.
    """

    observation: Any
    reward: float
    done: bool


class OpenEnvClient:
    """A connection; the server makes an environment for it, and ends it with it.

    Args:
        url: of the WebSocket, such as "ws://127.0.0.1:8001/ws".
        until: instant of `time.monotonic()` at which the connection must be there.
        most_bytes: of a message.

    Raises:
        ModuleNotFoundError: the package websockets is not installed.
        UnreachableError: the server is not there.
        ServerError: it is there, but speaks no WebSocket at that path.
    """

    def __init__(self, url: str, until: float, most_bytes: int) -> None:
        client, errors = load_library()
        self._url = url
        self._most_bytes = most_bytes
        self._closed = errors.ConnectionClosed
        self._ended = ExitStack()
        left = max(until - time.monotonic(), 1e-3)
        try:
            self._connection: Any = self._ended.enter_context(
                client.connect(
                    url,
                    # A server of the cluster is not reached through the proxy for the
                    # outside.
                    proxy=None,
                    compression=None,
                    open_timeout=left,
                    close_timeout=_CLOSE,
                    # A server that computes an answer may not answer pings meanwhile.
                    ping_interval=None,
                    max_size=most_bytes,
                )
            )
        except errors.InvalidStatus as error:
            status = error.response.status_code
            if status in (502, 503, 504):
                raise UnreachableError(f"{url}: status {status}") from error
            raise ServerError(
                f"{url}: status {status} instead of a WebSocket; OpenEnv has it at /ws"
            ) from error
        except (OSError, errors.InvalidHandshake, errors.ConnectionClosed) as error:
            raise UnreachableError(f"{url}: {error or type(error).__name__}") from error

    def reset(self, seed: int, until: float) -> Result:
        """Begins an episode.

        Raises:
            UnreachableError: the connection broke, or the server is full.
            ServerError: the server failed, or does not answer in time.
        """
        try:
            return self._asked("reset", {"seed": seed}, until)
        except RefusalError as error:
            raise ServerError(f"{self._url}: reset failed: {error}") from error

    def step(self, action: dict[str, Any], until: float) -> Result:
        """Carries an action out.

        Raises:
            RefusalError: it does not fit, or the environment failed with it.
            UnreachableError, ServerError: as `reset`.
        """
        return self._asked("step", action, until)

    def close(self) -> None:
        """Ends the session."""
        with suppress(self._closed, OSError):
            self._connection.send(json.dumps({"type": "close"}))
        with suppress(OSError):
            self._ended.close()

    def _asked(self, kind: str, data: dict[str, Any], until: float) -> Result:
        try:
            # A server that is full says so before it is asked, and closes.
            with suppress(self._closed):
                self._connection.send(json.dumps({"type": kind, "data": data}))
            left = max(until - time.monotonic(), 1e-3)
            text = self._connection.recv(timeout=left)
        except TimeoutError as error:
            raise SlowServerError(
                f"{self._url}: no answer to {kind!r} in time"
            ) from error
        except self._closed as error:
            if error.sent is not None and error.sent.code == _TOO_LARGE:
                raise ServerError(
                    f"{self._url}: an answer to {kind!r} of more than "
                    f"{self._most_bytes} bytes"
                ) from error
            raise UnreachableError(f"{self._url}: {error}") from error
        except OSError as error:
            raise UnreachableError(f"{self._url}: {error}") from error
        return self._read(text, kind)

    def _read(self, text: str | bytes, kind: str) -> Result:
        try:
            message = json.loads(text)
            name, data = message["type"], message["data"]
            if name == "error":
                code, told = str(data.get("code")), _told(data)
            else:
                observation, reward = data["observation"], data["reward"]
                done = data["done"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{self._url}: no answer of OpenEnv to {kind!r}: {text!r:.200}"
            ) from error
        if name == "error":
            if code in _REFUSALS:
                raise RefusalError(told)
            if code == _CAPACITY:
                raise UnreachableError(
                    f"{self._url}: {told}; the server must allow as many sessions "
                    "(max_concurrent_envs) as there are episodes at a time"
                )
            raise ServerError(f"{self._url}: error {code}: {told}")
        if name != "observation" or not isinstance(done, bool):
            raise ServerError(
                f"{self._url}: {kind!r} must be answered with an observation and done, "
                f"got type {name!r} and done {done!r}"
            )
        return Result(observation, self._number(reward), done)

    def _number(self, reward: Any) -> float:
        if reward is None:
            return 0.0
        number = isinstance(reward, int | float) and not isinstance(reward, bool)
        # False for NaN, and for an integer that is too large for a float.
        if not number or not abs(reward) < 1e300:
            raise ServerError(
                f"{self._url}: the reward must be a finite number, got {reward!r:.80}"
            )
        return float(reward)


def _told(data: dict[str, Any]) -> str:
    """The message of an error, with the fields that do not fit."""
    told = str(data.get("message"))
    details = [
        f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}"
        for each in data.get("errors") or ()
    ]
    return f"{told}: {'; '.join(details)}" if details else told


def load_library() -> tuple[Any, Any]:
    """The modules of websockets with its client and with its errors.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    try:
        from websockets import exceptions
        from websockets.sync import client
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"environments of OpenEnv need the package websockets: {install('openenv')}"
        ) from error
    return client, exceptions
