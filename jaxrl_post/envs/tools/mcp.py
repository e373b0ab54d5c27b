"""Tools of a server of the Model Context Protocol (MCP)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from typing import Any

from jaxrl_post.envs.env import Task
from jaxrl_post.envs.tools.toolset import Tool, ToolError

__all__ = ["McpServer"]

# Seconds for a server to start and to tell its tools, and to end.
_START = 30.0
_END = 5.0


class McpServer:
    """The tools of an MCP server, over stdio or HTTP; needs the extra `tools`.

    The server is asked for its tools when this object is made. Each episode has a
    connection of its own, with `command` also a process of its own, opened at its first
    call: about a second. With `shared`, the episodes of a worker process share one, for
    servers without state. A server that has gone is connected to again at the next
    call, without the state that it had.

    Args:
        command: a program and its arguments, which speaks MCP over stdio.
        url: of a server that speaks MCP over HTTP.
        seconds: of a call, at most.
        shared: whether episodes share a connection.

    Raises:
        ModuleNotFoundError: the package mcp is not installed.
        ValueError: not exactly one of `command` and `url` is given, or the server does
            not tell its tools.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        url: str | None = None,
        seconds: float = 3.0,
        shared: bool = False,
    ) -> None:
        if (command is None) == (url is None) or command == [] or url == "":
            raise ValueError(
                f"mcp needs a command or a url, one of them; got command={command!r}, "
                f"url={url!r}"
            )
        if isinstance(command, str) or not seconds > 0:
            raise ValueError(
                'mcp: command must be a list, such as ["python", "server.py"], and '
                f"seconds positive; got {command!r} and {seconds!r}"
            )
        self._command = None if command is None else tuple(command)
        self._url = url
        self._seconds = seconds
        self._shared = shared
        connection = _Connection(self._server, self._where)
        try:
            self._tools = connection.tools()
        finally:
            connection.close()

    def tools(self) -> Sequence[Tool]:
        """The tools that the server has told."""
        return self._tools

    def open(self, task: Task) -> OpenMcp:
        """The tools of an episode."""
        del task
        return OpenMcp(self._connect, self._seconds, shared=self._shared)

    def _connect(self) -> _Connection:
        if self._shared:
            return _shared_connection(self._command, self._url)
        return _Connection(self._server, self._where)

    @property
    def _where(self) -> str:
        return self._url or " ".join(self._command or ())

    def _server(self) -> Any:
        return _server(self._command, self._url)


class OpenMcp:
    """The connection of one episode; from `McpServer.open`."""

    def __init__(
        self, connect: Callable[[], _Connection], seconds: float, *, shared: bool
    ) -> None:
        self._connect = connect
        self._seconds = seconds
        self._shared = shared
        self._connection: _Connection | None = None

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool.

        Raises:
            ToolError: the server says that the call failed, or does not answer.
        """
        if self._connection is not None and self._connection.lost:
            self.close()
        if self._connection is None:
            self._connection = self._connect()
        return self._connection.call(name, arguments, self._seconds)

    def close(self) -> None:
        """Ends the connection, unless others share it."""
        if self._connection is not None and not self._shared:
            self._connection.close()
        self._connection = None


class _Connection:
    """A client that lives in the thread of `_loop`, from its making to `close`."""

    def __init__(self, server: Callable[[], Any], where: str) -> None:
        self._where = where
        # Whether a call got no answer because the server has gone.
        self.lost = False
        self._client: Any = None
        self._stop: asyncio.Event | None = None
        ready: Future[None] = Future()
        # A client has to be left in the task that entered it.
        self._life = _submit(self._live(server, ready))
        try:
            ready.result(_START)
        except TimeoutError as error:
            self.close()
            raise ValueError(f"mcp {where}: no answer within {_START:g} s") from error
        except Exception as error:  # Whatever the program or the network did.
            raise ValueError(f"mcp {where}: {_first(error)}") from error

    def tools(self) -> tuple[Tool, ...]:
        """What the server offers."""
        found = _submit(self._client.list_tools()).result(_START)
        return tuple(
            Tool(each.name, each.description or "", each.input_schema)
            for each in found.tools
        )

    def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        """Calls a tool; see `OpenMcp.call`."""
        pending = _submit(self._client.call_tool(name, dict(arguments)))
        try:
            result = pending.result(seconds)
        except TimeoutError as error:
            pending.cancel()
            raise ToolError(f"no answer within {seconds:g} s") from error
        except Exception as error:
            self.lost = True
            raise ToolError(f"the server gave no answer: {_first(error)}") from error
        texts = [getattr(each, "text", f"[{each.type}]") for each in result.content]
        text = "\n".join(texts)
        if result.is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """Leaves the client, which ends the server's process."""
        if self._stop is not None:
            _loop().call_soon_threadsafe(self._stop.set)
        else:
            self._life.cancel()
        with suppress(Exception):
            self._life.result(_END)

    async def _live(self, server: Callable[[], Any], ready: Future[None]) -> None:
        try:
            from mcp import Client

            async with Client(server()) as client:
                self._client, self._stop = client, asyncio.Event()
                ready.set_result(None)
                await self._stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise


def _server(command: Sequence[str] | None, url: str | None) -> Any:
    """What a client of the package mcp takes as its server."""
    try:
        from mcp import StdioServerParameters
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tools of MCP servers need the package mcp: pip install 'jaxrl_post[tools]'"
        ) from error
    if url is not None:
        return url
    assert command is not None, "one of both is given"
    return StdioServerParameters(command=command[0], args=list(command[1:]))


# The connections that episodes of this process share.
_shared: dict[tuple[tuple[str, ...] | None, str | None], _Connection] = {}


def _shared_connection(command: tuple[str, ...] | None, url: str | None) -> _Connection:
    found = _shared.get((command, url))
    if found is not None and found.lost:
        found.close()
        found = None
    if found is None:
        where = url or " ".join(command or ())
        found = _Connection(lambda: _server(command, url), where)
        _shared[command, url] = found
    return found


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all connections of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def _submit[Found](work: Coroutine[Any, Any, Found]) -> Future[Found]:
    return asyncio.run_coroutine_threadsafe(work, _loop())


def _first(error: BaseException) -> str:
    """The first error of a group, as a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
