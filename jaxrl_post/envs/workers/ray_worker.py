"""Workers on the nodes of a Ray cluster, seen from the trainer's process."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import socket
import sys
import threading
import time
from types import TracebackType
from typing import Any

from jaxrl_post.envs.workers.child import Child
from jaxrl_post.envs.workers.interface import (
    Judgement,
    WorkerLostError,
    WorkerSettings,
    WorkerStartError,
    decode_outcome,
)
from jaxrl_post.envs.workers.ray_driver import ANSWER_GRACE_S, COMMAND, KILL, SERVE
from jaxrl_post.envs.workers.wire import Reply, receive_reply
from jaxrl_post.extras import install
from jaxrl_post.frames import send_frame

__all__ = ["RayCluster", "RayWorker"]

_EXIT_GRACE_S = 1.0
# The driver process gives up first: its error says more.
_BACKUP_S = 10.0
_LEAVE_S = 30.0


class RayCluster:
    """A connection to a Ray cluster, whose nodes run workers. A context manager.

    A process of its own holds the connection (`ray_driver`), so that this process does
    not load Ray. If it dies, the next worker that starts connects again.

    Args:
        address: HOST:PORT of a cluster with this machine as a node; "local" starts
            a cluster on this machine and ends it with the connection; None joins the
            cluster that `ray.init()` would find, or else starts a local one.
        cpus_per_worker: CPUs that the cluster reserves for each worker, > 0.
        timeout_s: maximum seconds to connect, and for each worker to get a place.

    Raises:
        WorkerLostError: on entering, if the cluster cannot be joined.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus_per_worker: float = 1.0,
        timeout_s: float = 60.0,
    ) -> None:
        self.timeout_s = timeout_s
        self._settings = {
            "address": address,
            "cpus": cpus_per_worker,
            "timeout_s": timeout_s,
        }
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._driver: Child | None = None

    def __enter__(self) -> RayCluster:
        with self._lock:
            self._driver = self._connected()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            driver, self._driver = self._driver, None
            if driver is not None:
                _ended(driver)

    def worker(self, settings: WorkerSettings) -> RayWorker:
        """A worker on a node of the cluster; to be passed as `make_worker`."""
        return RayWorker(settings, self)

    def open(self) -> tuple[int, socket.socket]:
        """Opens a connection for one worker; returns its number and our end.

        Raises:
            WorkerLostError: if there is no connection to the cluster, nor a new one.
        """
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            number = next(self._numbers)
            try:
                self._command(SERVE, number, theirs)
            except OSError:
                try:
                    self._reconnect()
                    self._command(SERVE, number, theirs)
                except (OSError, WorkerLostError) as error:
                    ours.close()
                    raise WorkerLostError(str(error)) from error
        return number, ours

    def kill(self, number: int) -> None:
        """Kills the worker process behind a connection. Thread-safe."""
        with self._lock, contextlib.suppress(OSError):
            self._command(KILL, number)

    def last_output(self) -> str:
        """The last lines that the connecting process wrote, for an error message."""
        driver = self._driver
        return "" if driver is None else driver.shown_output()

    def _command(self, command: bytes, number: int, *sent: socket.socket) -> None:
        if self._driver is None:
            raise ConnectionError("the connection to the Ray cluster is closed")
        message = COMMAND.pack(command, number)
        self._driver.connection.settimeout(ANSWER_GRACE_S)
        descriptors = [each.fileno() for each in sent]
        socket.send_fds(self._driver.connection, [message], descriptors)

    def _reconnect(self) -> None:
        if self._driver is not None:
            self._driver.reap()
            self._driver = self._connected()

    def _connected(self) -> Child:
        address = self._settings["address"]
        where = "Ray" if address is None else f"the Ray cluster {address}"
        if importlib.util.find_spec("ray") is None:
            raise WorkerLostError(
                f"{where} cannot be used: there is no module 'ray': {install('ray')}"
            )
        if address not in (None, "local"):
            _require_listener(address, self.timeout_s)
        driver = Child("jaxrl_post.envs.workers.ray_driver")
        expires = time.monotonic() + self.timeout_s
        settings = json.dumps(self._settings).encode()
        try:
            send_frame(driver.connection, settings, expires=expires)
            reply = receive_reply(driver.connection, expires=expires)
        except TimeoutError:
            reply = {"error": f"no answer within {self.timeout_s:g} s"}
        except (EOFError, OSError, ValueError) as error:
            reply = {"error": f"the connecting process ended ({error})"}
        if reply.get("kind") == "ready":
            return driver
        driver.reap()
        raise WorkerLostError(
            f"{where} cannot be used: {reply.get('error')}. `ray status` tells whether "
            "a cluster runs; this machine must be one of its nodes, with the same "
            "versions of Ray and Python. If the cluster asks for a token, set "
            f"RAY_AUTH_MODE=token{driver.shown_output()}"
        )


class RayWorker:
    """A worker process that an actor holds on a node of a Ray cluster: a `Worker`.

    Args:
        settings: the settings of each process that `start` starts.
        cluster: the connection to the cluster.
    """

    def __init__(self, settings: WorkerSettings, cluster: RayCluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._connection: socket.socket | None = None
        self._number = 0
        self._ready = False
        self._killed = False
        # Held while a connection is opened, so that `kill` does not miss it.
        self._lock = threading.Lock()

    @property
    def start_limit_s(self) -> float:
        """Maximum seconds that `start` takes: to connect, be placed and get ready."""
        timeouts_s = 2 * self._cluster.timeout_s + self._settings.start_timeout_s
        return timeouts_s + ANSWER_GRACE_S + _BACKUP_S

    @property
    def alive(self) -> bool:
        """Whether the process can be asked; may be True after an unnoticed death."""
        return self._ready

    def start(self) -> None:
        """Starts a process in the worker's place, or in a new place if it has none.

        Raises:
            WorkerStartError: if it does not become ready in time; with its output.
            WorkerLostError: if the cluster has no room, or lost the place.
        """
        with self._lock:
            if self._killed:
                raise WorkerStartError("the worker pool is closed")
            if self._connection is None:
                self._number, self._connection = self._cluster.open()
        settings = self._settings
        fields = {
            "command": "start",
            "path": [os.path.abspath(e) for e in sys.path if isinstance(e, str)],
            "directory": os.getcwd(),
            "settings": settings.limits,
        }
        reply = self._request(
            fields,
            settings.environment,
            settings.start_timeout_s,
            extra_s=self._cluster.timeout_s,
        )
        if reply["kind"] != "ready":
            raise WorkerStartError(str(reply.get("error")))
        self._ready = True

    def ask(self, request: bytes, calls: int = 1) -> Judgement:
        """Sends a request and waits for the answer.

        After the outcomes "timeout" and "crashed" the process is dead.

        Args:
            request: a pickled `Ask`.
            calls: maximum calls of the environment, each with its own deadline.

        Raises:
            WorkerLostError: if the node or the actor is gone.
        """
        assert self._ready, "start() comes before ask()"
        limit_s = self._settings.deadline_s * calls
        reply = self._request({"command": "ask", "calls": calls}, request, limit_s)
        try:
            outcome = decode_outcome({**reply})
        except (ValueError, TypeError, KeyError) as error:
            raise self._lost(f"the actor sent what is no outcome ({error})") from error
        self._ready = outcome.kind not in ("timeout", "crashed")
        return outcome

    def end(self, *, grace_s: float = _EXIT_GRACE_S) -> None:
        """Ends the process and gives its place back.

        Args:
            grace_s: seconds to wait for a normal exit, which runs exit handlers.
        """
        if self._connection is not None:
            with contextlib.suppress(WorkerLostError):
                self._request({"command": "end"}, b"", grace_s)
            self._close()

    def kill(self) -> None:
        """Kills the process and prevents another start. Thread-safe."""
        with self._lock:
            self._killed = True
            if self._connection is not None:
                self._cluster.kill(self._number)

    def _request(
        self,
        fields: dict[str, Any],
        payload: bytes,
        limit_s: float,
        *,
        extra_s: float = 0.0,
    ) -> Reply:
        """Sends a command to the driver process and waits for the reply.

        Args:
            fields: the command and its arguments.
            payload: bytes that follow.
            limit_s: maximum seconds that the worker process takes.
            extra_s: maximum seconds of what comes before.
        """
        assert self._connection is not None, "start() comes first"
        header = json.dumps({**fields, "limit_s": limit_s}).encode()
        waits_s = limit_s + extra_s + ANSWER_GRACE_S + _BACKUP_S
        expires = time.monotonic() + waits_s
        try:
            frame = header + b"\n" + payload
            send_frame(self._connection, frame, expires=expires)
            reply = receive_reply(self._connection, expires=expires)
        except TimeoutError as error:
            raise self._lost(f"no reply within {waits_s:g} s") from error
        except (EOFError, OSError, ValueError) as error:
            text = f"the process that connects to the Ray cluster ended ({error})"
            raise self._lost(text + self._cluster.last_output()) from error
        if reply["kind"] == "lost":
            raise self._lost(str(reply.get("error")))
        return reply

    def _lost(self, error: str) -> WorkerLostError:
        self._close()
        return WorkerLostError(error)

    def _close(self) -> None:
        self._ready = False
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _require_listener(address: str, timeout_s: float) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        raise WorkerLostError(
            f"no Ray cluster answers at {address} ({error}): give the address that "
            "`ray start --head` printed, and make this machine a node of the cluster "
            f"with `ray start --address {address} --num-cpus 0`"
        ) from error


def _ended(driver: Child) -> None:
    """Closes the connection, and waits until a local cluster has ended."""
    with contextlib.suppress(OSError):
        driver.connection.shutdown(socket.SHUT_WR)
        driver.connection.settimeout(_LEAVE_S)
        while driver.connection.recv(2**16):
            pass
    driver.reap()
