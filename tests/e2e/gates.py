"""The way between a trainer and its samplers: it sees every message, and may lose it.

Each sampler has a gate of its own, an address that passes its requests on to the
trainer. What the messages say tells in which phase a sampler and the trainer are, so a
test need not guess when to kill: it kills as a message passes.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxrl_post.fleet import wire

__all__ = ["Gates", "Seen"]


class Seen(NamedTuple):
    """A message that passes.

    Attributes:
        sampler: that asks.
        path: of the request.
        asked: what the request says; None for one without a body.
        status: of the answer; 0 while the request passes.
        answer: what the answer says; None while the request passes.
    """

    sampler: str
    path: str
    asked: Any
    status: int = 0
    answer: Any = None


class _Message(NamedTuple):
    first: list[str]
    body: bytes
    raw: bytes


# Sees a message before it is passed on; returns it, or None to lose it, which breaks
# the connection.
type Observe = Callable[[Seen, bytes], Awaitable[bytes | None]]


async def passes(seen: Seen, raw: bytes) -> bytes:
    """Passes every message on."""
    del seen
    return raw


@dataclass
class Gates:
    """Gates of samplers to one trainer, in a thread of their own.

    Attributes:
        port: of the trainer, on this machine.
        observe: sees every message, before it is passed on.
        shut: samplers whose connections are broken, and that get no others.
    """

    port: int
    observe: Observe = passes
    shut: set[str] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop = field(
        default_factory=asyncio.new_event_loop, init=False
    )
    _open: dict[str, set[asyncio.StreamWriter]] = field(
        default_factory=dict, init=False
    )
    _servers: list[asyncio.Server] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def url(self, sampler: str) -> str:
        """Opens the gate of a sampler; returns its address."""

        async def opened() -> int:
            self._open[sampler] = set()
            server = await asyncio.start_server(
                lambda *streams: self._passing(sampler, *streams), "127.0.0.1", 0
            )
            self._servers.append(server)
            return server.sockets[0].getsockname()[1]

        return f"http://127.0.0.1:{self.run(opened())}"

    def shut_out(self, sampler: str) -> None:
        """Breaks a sampler's connections until `let_in`; of this thread or another."""
        self.shut.add(sampler)
        self.cut(sampler)

    def cut(self, *samplers: str) -> None:
        """Breaks the connections of some samplers, of all if none is named."""

        def abort() -> None:
            for sampler in samplers or self._open:
                for writer in self._open[sampler]:
                    writer.transport.abort()

        self._loop.call_soon_threadsafe(abort)

    def let_in(self, sampler: str) -> None:
        """Lets a sampler reach the trainer again."""
        self.shut.discard(sampler)

    def run[Result](self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine where the messages pass; waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        """Breaks all connections, and ends the thread."""

        async def ended() -> None:
            for server in self._servers:
                server.close()
            # An accepted connection becomes a task, and a task that is cancelled closes
            # its connections in a later turn of the loop.
            await asyncio.sleep(0.05)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.05)

        self.run(ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _passing(
        self,
        sampler: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Passes on the requests and answers of a connection until either side ends."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(_closed, writer)
            stack.enter_context(
                contextlib.suppress(OSError, EOFError, asyncio.CancelledError)
            )
            if sampler in self.shut:
                return
            there, onward = await asyncio.open_connection("127.0.0.1", self.port)
            stack.push_async_callback(_closed, onward)
            self._open[sampler].add(writer)
            stack.callback(self._open[sampler].discard, writer)
            while asked := await _unless_ended(reader, there):
                path = asked.first[1].partition("?")[0]
                seen = Seen(sampler, path, _value(asked))
                if (passed := await self.observe(seen, asked.raw)) is None:
                    return
                onward.write(passed)
                answer = await _unless_ended(there, reader)
                if answer is None:
                    return
                seen = seen._replace(status=int(answer.first[1]), answer=_value(answer))
                if (passed := await self.observe(seen, answer.raw)) is None:
                    return
                writer.write(passed)
                await writer.drain()


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        await writer.wait_closed()


async def _unless_ended(
    source: asyncio.StreamReader, other: asyncio.StreamReader
) -> _Message | None:
    """The next message of a side; None if the other side ends before it comes.

    The other side says nothing meanwhile.
    """
    message = asyncio.ensure_future(_message(source))
    ended = asyncio.ensure_future(other.read(1))
    try:
        await asyncio.wait({message, ended}, return_when=asyncio.FIRST_COMPLETED)
        return message.result() if message.done() else None
    finally:
        message.cancel()
        ended.cancel()
        await asyncio.gather(message, ended, return_exceptions=True)


async def _message(reader: asyncio.StreamReader) -> _Message:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {
        name.lower(): value for name, _, value in (x.partition(":") for x in lines)
    }
    body = await reader.readexactly(int(fields.get("content-length", "0")))
    return _Message(first.split(" "), body, head + body)


def _value(message: _Message) -> Any:
    """The content of a message that carries no weights."""
    for read in (wire.unpack, json.loads):
        with contextlib.suppress(ValueError):
            return read(message.body)
    return None
