"""Tools of a server of the Model Context Protocol (MCP)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from typing import Any

from jaxrl_post.envs.env import Task
from jaxrl_post.envs.servers import Retries, ServerError, UnreachableError
from jaxrl_post.envs.tools.journal import Journal
from jaxrl_post.envs.tools.mcp_http import BARRED, refused_status, transport
from jaxrl_post.envs.tools.toolset import Tool, ToolError, slow_call
from jaxrl_post.envs.watch import Watch
from jaxrl_post.extras import install

__all__ = ["McpServer"]

# Seconds for a server to start and to tell its tools, and to end.
_START = 30.0
_END = 5.0
# Seconds for a connection that watches a server.
_WATCH = 1.0
# Errors of the package mcp for a server that has gone, or that a proxy cannot reach.
_CLOSED = -32000
_GONE = ("Session terminated", "Server returned an error response")
# Its error for status 404 without a session, with the code of an unknown method.
_NOT_FOUND = (-32601, "Not Found")


class McpServer:
    """The tools of an MCP server, over stdio or HTTP; needs the extra `tools`.

    The server is asked for its tools when this object is made. Each episode has a
    connection of its own, with `command` also a process of its own, opened at its first
    call: about a second. With `shared`, the episodes of a worker process share one, for
    servers without state.

    A server that has gone is connected to again within the same call: one of `command`
    is started again once, one of a `url` is tried for `seconds`. Unless it is `shared`,
    it gets the episode's earlier calls again first, and must answer them as it did. If
    it stays away, the episode fails. A call that was running is made again, so tools
    should do no harm when they are called twice.

    That a server of a `url` was started again between two calls is noticed by a second
    connection, on which nothing is said (`envs.watch`). A server or a proxy that closes
    idle connections looks the same, and gets the earlier calls again, too; one without
    state had better be `shared`.

    A status from 400 to 500 of a `url`, such as 413 of a call that is too large, is
    told to the policy. Of these, 401, 403, 405 and 407 fail the episode at once, and
    404, 408, 425 and 429 mean a server that has gone, and so does a status above 500.

    Args:
        command: a program and its arguments, which speaks MCP over stdio.
        url: of a server that speaks MCP over HTTP.
        seconds: of a call, at most; as long a `url` that has gone is tried again.
        shared: whether episodes share a connection.
        concurrent: whether calls of a turn are made at the same time; then `seconds`
            must be enough for all of them. None: only calls of tools that the server
            marks as read-only (`readOnlyHint`).

    Raises:
        ModuleNotFoundError: the package mcp is not installed.
        ValueError: not exactly one of `command` and `url` is given, `concurrent` is no
            boolean, or the server does not tell its tools.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        url: str | None = None,
        seconds: float = 3.0,
        shared: bool = False,
        concurrent: bool | None = None,
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
        if concurrent is not None and type(concurrent) is not bool:
            raise ValueError(
                f"mcp: concurrent must be true, false or null, got {concurrent!r}"
            )
        self._command = None if command is None else tuple(command)
        self._url = url
        self._seconds = seconds
        self._shared = shared
        try:
            connection = _Connection(self._server, self._where, _START)
        except (UnreachableError, ServerError) as error:
            raise ValueError(str(error)) from error
        try:
            self._tools = connection.tools(concurrent)
        finally:
            connection.close()

    def tools(self) -> Sequence[Tool]:
        """The tools that the server has told."""
        return self._tools

    def open(self, task: Task) -> OpenMcp:
        """The tools of an episode."""
        del task
        if self._command is None:
            retries = Retries(self._seconds)
        else:
            # The time to start counts too.
            retries = Retries(self._seconds + _START, most=2)
        return OpenMcp(
            self._connect,
            self._where,
            self._seconds,
            retries,
            shared=self._shared,
            watched=None if self._shared else self._url,
        )

    def _connect(self, until: float) -> _Connection:
        if self._shared:
            return _shared_connection(self._command, self._url, until)
        return _Connection(self._server, self._where, _left(until))

    @property
    def _where(self) -> str:
        return f"mcp {self._url or ' '.join(self._command or ())}"

    def _server(self) -> Any:
        return _server(self._command, self._url)


class OpenMcp:
    """The connection of one episode; from `McpServer.open`."""

    def __init__(
        self,
        connect: Callable[[float], _Connection],
        where: str,
        seconds: float,
        retries: Retries,
        *,
        shared: bool,
        watched: str | None,
    ) -> None:
        self._connect = connect
        self._seconds = seconds
        self._retries = retries
        self._shared = shared
        self._journal = Journal(where)
        self._where = where
        self._connection: _Connection | None = None
        self._watched = watched
        self._watch: Watch | None = None
        # Calls of several threads make one connection.
        self._connecting = threading.Lock()

    @property
    def lost(self) -> float:
        """Seconds of the episode in which the server was away."""
        return self._retries.lost

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Calls a tool.

        Raises:
            ToolError: the server says that the call failed, or is too slow.
            ServerError: the server has gone, and did not come back, or came back with
                other answers; or it refuses all clients.
        """
        if self._shared:
            return self._made(name, arguments)
        return self._journal.make(name, arguments, self._made)

    def _made(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._retries(
            lambda until: self._connected(until).call(name, arguments, self._seconds)
        )

    def _connected(self, until: float) -> _Connection:
        with self._connecting:
            if self._connection is not None and self._connection.lost:
                self.close()
            if self._watch is not None and not self._watch.open:
                # Another server may listen already, which knows nothing of the episode.
                self.close()
            if self._connection is None:
                if time.monotonic() > until:
                    # Another call has tried for all the time that this one has.
                    raise UnreachableError(f"{self._where}: no connection in time")
                # An attempt that failed may have left its watch.
                self.close()
                if self._watched is not None:
                    # Opened before the connection, so that it sees every end of the
                    # server.
                    self._watch = _watch(self._watched, until)
                self._connection = self._connect(until)
                self._replay(self._connection)
            return self._connection

    def _replay(self, connection: _Connection) -> None:
        def again(name: str, arguments: Mapping[str, Any]) -> str:
            return connection.call(name, arguments, self._seconds)

        def slow(name: str, arguments: Mapping[str, Any]) -> None:
            with suppress(ToolError):
                again(name, arguments)

        self._journal.replay(again, slow=slow)

    def close(self) -> None:
        """Ends the connection, unless others share it."""
        if self._connection is not None and not self._shared:
            self._connection.close()
        if self._watch is not None:
            self._watch.close()
        self._connection = self._watch = None


class _Connection:
    """A client that lives in the thread of `_loop`, from its making to `close`."""

    def __init__(self, server: Callable[[], Any], where: str, seconds: float) -> None:
        self._where = where
        # Whether a call got no answer because the server has gone.
        self.lost = False
        self._client: Any = None
        self._stop: asyncio.Event | None = None
        ready: Future[None] = Future()
        # A client has to be left in the task that entered it.
        self._life = _submit(self._live(server, ready))
        try:
            ready.result(seconds)
        except TimeoutError as error:
            self.close()
            told = f"{where}: no start within {seconds:.2g} s"
            raise UnreachableError(told) from error
        except Exception as error:  # Any failure of the program or the network.
            if _status(error) not in (None, 500):
                raise ServerError(f"{where}: no connection, {_first(error)}") from error
            raise UnreachableError(f"{where}: {_first(error)}") from error

    def tools(self, concurrent: bool | None) -> tuple[Tool, ...]:
        """Lists the tools that the server offers; `concurrent` is as of `McpServer`."""
        found = _submit(self._client.list_tools()).result(_START)
        return tuple(
            Tool(
                each.name,
                each.description or "",
                each.input_schema,
                _only_reads(each) if concurrent is None else concurrent,
            )
            for each in found.tools
        )

    def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        """Calls a tool; see `OpenMcp.call`."""
        pending = _submit(self._client.call_tool(name, dict(arguments)))
        try:
            result = pending.result(seconds)
        except TimeoutError as error:
            pending.cancel()
            raise slow_call(seconds) from error
        except Exception as error:
            if _status(error) in BARRED:
                raise ServerError(f"{self._where}: {_first(error)}") from error
            if _refused(error):
                raise ToolError(str(error)) from error
            self.lost = True
            raise UnreachableError(f"{self._where}: {_first(error)}") from error
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
    """Makes the argument that a client of the package mcp takes as its server."""
    try:
        from mcp import StdioServerParameters
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"tools of MCP servers need the package mcp: {install('tools')}"
        ) from error
    if url is not None:
        return transport(url)
    assert command is not None, "one of both is given"
    return StdioServerParameters(command=command[0], args=list(command[1:]))


# The connections that episodes of this process share.
_shared: dict[tuple[tuple[str, ...] | None, str | None], _Connection] = {}


_sharing = threading.Lock()


def _shared_connection(
    command: tuple[str, ...] | None, url: str | None, until: float
) -> _Connection:
    with _sharing:
        found = _shared.get((command, url))
        if found is not None and found.lost:
            found.close()
            found = None
        if found is None:
            where = f"mcp {url or ' '.join(command or ())}"
            found = _Connection(lambda: _server(command, url), where, _left(until))
            _shared[command, url] = found
        return found


def _left(until: float) -> float:
    """Seconds that a server may take to start, out of the remaining time."""
    return min(_START, max(until - time.monotonic(), 1e-3))


def _watch(url: str, until: float) -> Watch | None:
    """A connection that tells when the server ends; None if there can be none."""
    try:
        return Watch(url, min(until, time.monotonic() + _WATCH))
    except UnreachableError:
        # A server behind a proxy of the environment variables is reached without it.
        return None


def _only_reads(tool: Any) -> bool:
    """Whether the server says that a tool changes nothing."""
    return tool.annotations is not None and tool.annotations.read_only_hint is True


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all connections of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def _submit[Found](work: Coroutine[Any, Any, Found]) -> Future[Found]:
    return asyncio.run_coroutine_threadsafe(work, _loop())


def _status(error: BaseException) -> int | None:
    """The status of HTTP with which a server refused something."""
    from mcp import MCPError

    error = _innermost(error)
    return refused_status(error.error.data) if isinstance(error, MCPError) else None


def _refused(error: Exception) -> bool:
    """Whether a server that is there refused a call, so that the policy should know."""
    from mcp import MCPError

    if not isinstance(error, MCPError):
        return False
    code, message = error.error.code, error.error.message
    gone = code == _CLOSED or message in _GONE or (code, message) == _NOT_FOUND
    return not gone


def _innermost(error: BaseException) -> BaseException:
    """The first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _first(error: BaseException) -> str:
    """The first error of a group, as a line."""
    error = _innermost(error)
    return f"{type(error).__name__}: {error}"
