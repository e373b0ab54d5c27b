"""Connects the processes of a run, so that they exchange values and notice a death.

Process 0 listens, the others connect to it. Every frame is a JSON object. If a process
dies, its connection closes, so the others know at once. If its machine dies, or it is
stopped, its beats stay away, so they know after `silence_s`.

This is not JAX's own coordination service, because that one ends the processes that it
serves from C++ code, without a message of ours, and has no value per process and step.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxrl_post.frames import receive_frame, send_frame

__all__ = ["Channel", "OnEnd", "ProcessesError", "gather", "is_local", "join"]

# Why the processes end: one has an error, or one is gone and may be started again.
type Reason = Literal["failed", "gone"]
type OnEnd = Callable[[Reason, str], None]
# (index of the process, frame) in the order of their arrival.
type _Inbox = queue.SimpleQueue[tuple[int, dict[str, Any]]]

_BEAT_S = 2.0
_HELLO_S = 10.0
_RETRY_S = 0.25
_LAST_FRAMES_S = 5.0


class ProcessesError(RuntimeError):
    """The processes of a run do not find each other, wait too long, or differ."""


class _Link:
    """A connection to another process, with the text that names that process."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Time-outs belong to a socket object, and two threads use this connection.
        self._reader, self._writer = connection, connection.dup()
        self._lock = threading.Lock()
        self.name = name

    def send(self, frame: Mapping[str, Any] | bytes, *, within_s: float) -> None:
        """Sends a frame.

        Raises:
            OSError: the other side is gone, or did not read in time (TimeoutError).
        """
        payload = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
        with self._lock:
            send_frame(self._writer, payload, expires=time.monotonic() + within_s)

    def receive(self, *, within_s: float) -> dict[str, Any]:
        """Waits for a frame.

        Raises:
            EOFError, OSError: the other side is gone.
            TimeoutError: no frame came in time.
            ValueError: a frame that is no JSON object.
        """
        payload = receive_frame(self._reader, expires=time.monotonic() + within_s)
        frame = json.loads(payload)
        if not isinstance(frame, dict):
            raise ValueError(f"a frame must be a JSON object, got {payload[:40]!r}")
        return frame

    def finish(self) -> None:
        """Closes the direction to the other side, which reads what was sent before."""
        with contextlib.suppress(OSError):
            self._writer.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()
        self._reader.close()


class Channel:
    """Connects this process to the others of a run; made by `gather` and `join`.

    Each thread that exchanges has a lane of its own, the main thread "". Threads of the
    channel send beats and listen. If another process fails, is gone or is silent, one
    of them calls `on_end` once, with a reason and a message that names the process.

    Attributes:
        index: of this process, from 0.
        count: number of processes.
    """

    def __init__(
        self,
        index: int,
        count: int,
        links: Mapping[int, _Link],
        on_end: OnEnd,
        *,
        silence_s: float,
    ) -> None:
        self.index, self.count = index, count
        self._links, self._on_end, self._silence_s = dict(links), on_end, silence_s
        self._name = _named(index, socket.gethostname(), os.getpid())
        # The number of exchanges, and the frames that came, by lane.
        self._sequences = Counter[str]()
        self._inboxes: dict[str, _Inbox] = {}
        self._closing = threading.Event()
        self._ending = threading.Lock()
        self._threads = [
            threading.Thread(target=self._listen, args=pair, daemon=True)
            for pair in self._links.items()
        ]
        for thread in (
            *self._threads,
            threading.Thread(target=self._beat, daemon=True),
        ):
            thread.start()

    def exchange(
        self, name: str, value: Any, *, deadline_s: float, lane: str = ""
    ) -> list[Any]:
        """Tells all processes a value, and returns everyone's, in order of the index.

        All processes must call it in the same order in each lane, with the same names.

        Args:
            name: of what is exchanged, for errors.
            value: a JSON value.
            deadline_s: seconds to wait for the others.
            lane: of the calling thread.

        Raises:
            ProcessesError: a process did not come in time, or is at another exchange.
        """
        self._sequences[lane] += 1
        if self.index:
            return self._through_0(name, value, deadline_s, lane)
        found = self._found(name, value, deadline_s, lane)
        values = [found[index] for index in range(self.count)]
        frame = {"at": self._sequences[lane], "lane": lane, "values": values}
        payload = json.dumps(frame).encode()
        for link in self._links.values():
            # A link that fails here is reported by the thread that listens to it.
            with contextlib.suppress(OSError):
                link.send(payload, within_s=self._silence_s)
        return values

    def fail(self, message: str) -> None:
        """Tells the others that this process ends with an error, and why."""
        self._closing.set()
        if self.index:
            frame = {"failed": message}
        else:
            frame = {"reason": "failed", "end": f"{self._name} failed: {message}"}
        self._tell(frame)
        self._drain()

    def close(self) -> None:
        """Ends the connection; call it when no exchange is left."""
        self._closing.set()
        self._tell({"bye": True})
        self._drain()

    def _found(
        self, name: str, value: Any, deadline_s: float, lane: str
    ) -> dict[int, Any]:
        """Process 0 collects the values of the others."""
        found, expires = {0: value}, time.monotonic() + deadline_s
        number = self._sequences[lane]
        while len(found) < self.count:
            try:
                left = max(0.0, expires - time.monotonic())
                index, frame = self._inbox(lane).get(timeout=left)
            except queue.Empty:
                late = [self._links[i].name for i in self._links if i not in found]
                raise ProcessesError(
                    f"{name}: {_listed(late)} did not come within {deadline_s:g} s"
                ) from None
            if frame["at"] != [number, name]:
                raise ProcessesError(
                    f"{self._links[index].name} is at the exchange of "
                    f"{frame['at'][1]!r}, number {frame['at'][0]}, and process 0 at "
                    f"{name!r}, number {number}: they do not run the same "
                    "program, or not on the same data"
                )
            found[index] = frame["value"]
        return found

    def _through_0(
        self, name: str, value: Any, deadline_s: float, lane: str
    ) -> list[Any]:
        link, number = self._links[0], self._sequences[lane]
        # A link that fails here is reported by the thread that listens to it.
        with contextlib.suppress(OSError):
            frame = {"at": [number, name], "lane": lane, "value": value}
            link.send(frame, within_s=self._silence_s)
        try:
            # Process 0 names who is late, so give it the time to do so.
            _, frame = self._inbox(lane).get(timeout=deadline_s + _LAST_FRAMES_S)
        except queue.Empty:
            raise ProcessesError(
                f"{name}: {link.name} did not come within {deadline_s:g} s"
            ) from None
        return frame["values"]

    def _inbox(self, lane: str) -> _Inbox:
        # One step for two threads: the one that listens, and the one that exchanges.
        return self._inboxes.setdefault(lane, queue.SimpleQueue())

    def _tell(self, frame: Mapping[str, Any]) -> None:
        payload = json.dumps(frame).encode()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(payload, within_s=_LAST_FRAMES_S)
            link.finish()

    def _drain(self) -> None:
        """Reads all connections to their end: closing before may lose what was sent."""
        expires = time.monotonic() + _LAST_FRAMES_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, expires - time.monotonic()))
        for link in self._links.values():
            link.close()

    def _beat(self) -> None:
        while not self._closing.wait(_BEAT_S):
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.send({"beat": True}, within_s=self._silence_s)

    def _listen(self, index: int, link: _Link) -> None:
        while True:
            try:
                frame = link.receive(within_s=self._silence_s)
            except TimeoutError:
                lost = f"{link.name} was not heard for {self._silence_s:g} s"
                return self._end("gone", lost)
            except (EOFError, OSError):
                return self._end("gone", f"{link.name} is gone: its connection closed")
            except ValueError as error:
                return self._end("failed", f"{link.name} sent no frame: {error}")
            if "at" in frame:
                self._inbox(frame["lane"]).put((index, frame))
            elif "failed" in frame:
                return self._end("failed", f"{link.name} failed: {frame['failed']}")
            elif "end" in frame:
                return self._end(frame["reason"], frame["end"])
            elif "bye" in frame:
                return None

    def _end(self, reason: Reason, message: str) -> None:
        # When this process ends, the connections close one after the other.
        if self._closing.is_set() or not self._ending.acquire(blocking=False):
            return
        if self.index == 0:
            self._tell({"reason": reason, "end": message})
            self._drain()
        self._on_end(reason, message)


def gather(
    address: tuple[str, int],
    count: int,
    welcome: Callable[[], Mapping[str, Any]],
    on_end: OnEnd,
    *,
    deadline_s: float,
    silence_s: float = 45.0,
) -> tuple[Channel, dict[int, float]]:
    """Waits in process 0 until all other processes have connected.

    Args:
        address: host and port at which to listen.
        count: number of processes.
        welcome: called when all are there; what it returns is sent to each of them.
        on_end: as described at `Channel`.
        deadline_s: seconds to wait for the others.
        silence_s: seconds without a beat after which a process counts as gone.

    Returns:
        The channel, and for every process how many seconds its clock is ahead.

    Raises:
        ProcessesError: the port is in use, a process did not come, two have the same
            index, or they were started with different counts.
    """
    expires = time.monotonic() + deadline_s
    links: dict[int, _Link] = {}
    accepted: list[_Link] = []
    clocks: dict[int, float] = {}
    try:
        with _listener(*address) as listener:
            while len(links) < count - 1:
                link, hello = _next_hello(listener, expires)
                if link is None:
                    raise _missing(count, links, deadline_s)
                accepted.append(link)
                index = hello["index"]
                link.name = _named(index, hello["host"], hello["pid"])
                _check_hello(hello, count, links)
                links[index] = link
                clocks[index] = hello["time"] - time.time()
        frame = {"host": socket.gethostname(), "pid": os.getpid(), **welcome()}
        for link in links.values():
            link.send(frame, within_s=_HELLO_S)
    except (ProcessesError, OSError) as error:
        for link in accepted:
            with contextlib.suppress(OSError):
                link.send({"refused": str(error)}, within_s=_HELLO_S)
            link.close()
        raise ProcessesError(str(error)) from error
    return Channel(0, count, links, on_end, silence_s=silence_s), clocks


def join(
    address: tuple[str, int],
    count: int,
    index: int,
    on_end: OnEnd,
    *,
    deadline_s: float,
    silence_s: float = 45.0,
) -> tuple[Channel, dict[str, Any]]:
    """Connects process `index`, 1 or higher, to process 0.

    Args:
        address: host and port of process 0.
        count: number of processes.
        index: of this process.
        on_end: as described at `Channel`.
        deadline_s: seconds to wait for process 0, and for it to greet.
        silence_s: seconds without a beat after which a process counts as gone.

    Returns:
        The channel, and what `welcome` returned in process 0.

    Raises:
        ProcessesError: process 0 does not answer, or refuses this process.
    """
    expires = time.monotonic() + deadline_s
    where = "process 0 at {}:{}".format(*address)
    link = _Link(_connected(address, expires, deadline_s), where)
    hello = {"index": index, "count": count, "host": socket.gethostname()}
    try:
        link.send({**hello, "pid": os.getpid(), "time": time.time()}, within_s=_HELLO_S)
        # Process 0 gives up first and says who did not come.
        left = max(0.0, expires - time.monotonic()) + _HELLO_S
        welcome = link.receive(within_s=left)
    except (EOFError, OSError, ValueError) as error:
        link.close()
        raise ProcessesError(
            f"process {index}: {where} did not greet within {deadline_s:g} s "
            f"({str(error) or type(error).__name__}). Is --processes.coordinator the "
            "host of process 0, and this run's port?"
        ) from error
    if "refused" in welcome:
        link.close()
        raise ProcessesError(str(welcome["refused"]))
    link.name = _named(0, welcome["host"], welcome["pid"])
    return Channel(index, count, {0: link}, on_end, silence_s=silence_s), welcome


def is_local(host: str) -> bool:
    """Whether a host's name is one that only this machine has for itself.

    >>> is_local("127.0.0.1"), is_local("10.0.0.1")
    (True, False)
    """
    return host in ("localhost", "::1") or host.startswith("127.")


def _named(index: int, host: str, pid: int) -> str:
    return f"process {index} (host {host}, pid {pid})"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} others"


def _listener(host: str, port: int) -> socket.socket:
    # The name of this host may be one that the other hosts reach it by, so listen on
    # all of its addresses, but stay on this machine if all processes are here.
    local = is_local(host)
    both = not local and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or host == "::1" else socket.AF_INET
    try:
        return socket.create_server(
            (host if local else "", port),
            family=family,
            backlog=1024,
            dualstack_ipv6=both,
        )
    except OSError as error:
        raise ProcessesError(
            f"--processes.coordinator: process 0 cannot listen on port {port}: "
            f"{os.strerror(error.errno or 0)}. Choose another port for this run, on "
            "every process"
        ) from error


def _next_hello(
    listener: socket.socket, expires: float
) -> tuple[_Link | None, dict[str, Any]]:
    """Accepts connections until one begins as a process of a run does; None is late."""
    while (left := expires - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, source = listener.accept()
        except TimeoutError:
            break
        link = _Link(connection, str(source))
        try:
            hello = link.receive(within_s=_HELLO_S)
            kinds = {"index": int, "count": int, "pid": int, "host": str, "time": float}
            if all(isinstance(hello.get(key), kind) for key, kind in kinds.items()):
                return link, hello
        except (EOFError, OSError, ValueError):
            pass  # A port scanner, or a process that was ended: wait for the next.
        link.close()
    return None, {}


def _missing(
    count: int, links: Mapping[int, _Link], deadline_s: float
) -> ProcessesError:
    missing = [str(i) for i in range(1, count) if i not in links]
    return ProcessesError(
        f"start: process {_listed(missing)} of {count} did not connect to process 0 "
        f"within {deadline_s:g} s. Was it started, with the same "
        "--processes.coordinator and --processes.count?"
    )


def _check_hello(
    hello: Mapping[str, Any], count: int, links: Mapping[int, _Link]
) -> None:
    index = hello["index"]
    name = _named(index, hello["host"], hello["pid"])
    if hello["count"] != count:
        raise ProcessesError(
            f"start: {name} was started with --processes.count {hello['count']}, and "
            f"process 0 with {count}"
        )
    if index in links:
        raise ProcessesError(
            f"start: {links[index].name} and {name} have the same "
            "--processes.index; every process needs its own, from 0"
        )


def _connected(
    address: tuple[str, int], expires: float, deadline_s: float
) -> socket.socket:
    while True:
        left = expires - time.monotonic()
        try:
            return socket.create_connection(address, timeout=max(left, 0.1))
        except OSError as error:
            # Process 0 may start later, and its host's name may not be known yet.
            if left <= _RETRY_S:
                raise ProcessesError(
                    f"--processes.coordinator: no process 0 answered at "
                    f"{address[0]}:{address[1]} within {deadline_s:g} s ({error}). "
                    "Was it started, and is its port open to this host?"
                ) from error
        time.sleep(_RETRY_S)
