"""The main loop of the process that talks to a Ray cluster, started by `ray_worker`.

Ray is loaded here and not in the trainer's process, for three reasons. Ray ends the
process that uses it a minute after the cluster's head has died. It starts a cluster of
its own by forks, which may deadlock with jax's threads. It sets environment variables
and signal handlers.

The first frame on standard input is a JSON object of settings. Each later message is a
command: to serve a worker over the socket that comes with it, or to kill a worker.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from typing import Any

from jaxrl_post.envs.workers import ray_actor
from jaxrl_post.envs.workers.child import ignore_stop_signals, take_connection
from jaxrl_post.frames import receive_frame, send_frame

__all__ = ["ANSWER_GRACE_S", "COMMAND", "KILL", "SERVE", "main"]

# A command and the number of a worker.
COMMAND = struct.Struct("!cQ")
SERVE, KILL = b"s", b"k"
# Beyond the deadlines that a worker process has itself, so much later its node is taken
# to be lost.
ANSWER_GRACE_S = 20.0
_POLL_S = 0.2
_LONGEST_ERROR = 600


def main() -> None:
    """Serves workers until the trainer closes the connection or dies."""
    control = take_connection()
    ignore_stop_signals()
    settings = json.loads(receive_frame(control, expires=None))
    # Imported here: a program that reads this module may not have the extra.
    import ray

    try:
        ray.init(
            address=settings["address"],
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    # The boundary of the process: the trainer raises WorkerLostError with this text.
    except Exception as error:
        _send(control, {"kind": "failed", "error": _described(error)})
        return
    ignore_stop_signals()  # ray.init has set a handler.
    _send(control, {"kind": "ready"})
    _serve_all(control, settings)
    ray.shutdown(wait_for_processes=True)


def _serve_all(control: socket.socket, settings: dict[str, Any]) -> None:
    """Obeys commands until the trainer has closed its end."""
    from ray import cloudpickle

    # Sent to the nodes by value: their search paths may not have this package.
    cloudpickle.register_pickle_by_value(ray_actor)
    seats: dict[int, _Seat] = {}
    # No deadline: commands come as long as the trainer lives.
    control.settimeout(None)
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        except ConnectionError:
            return
        if len(message) < COMMAND.size:
            return
        command, number = COMMAND.unpack(message)
        if command == SERVE:
            connection = socket.socket(fileno=descriptors[0])
            seats[number] = _Seat(connection, settings)
            seats[number].start()
        elif number in seats:
            seats[number].kill()
        seats = {n: seat for n, seat in seats.items() if seat.is_alive()}


class _Seat(threading.Thread):
    """The place of one worker: its connection to the trainer, and its actor.

    Args:
        connection: to the trainer's `RayWorker`.
        settings: `cpus` of the actor; `timeout_s`, maximum seconds until it is placed.
    """

    def __init__(self, connection: socket.socket, settings: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._connection = connection
        self._settings = settings
        self._host: Any = None
        self._killed = threading.Event()

    def kill(self) -> None:
        """Kills the worker process and stops the wait for a place. Thread-safe."""
        self._killed.set()
        if self._host is not None:
            self._host.kill.remote()

    def run(self) -> None:
        """Answers the trainer's frames: a JSON object, a line break and a payload."""
        with self._connection:
            while True:
                try:
                    # No deadline: an idle worker waits; if the trainer ends, this is
                    # the end of the stream.
                    frame = receive_frame(self._connection, expires=None)
                    reply = self._reply(frame)
                    expires = time.monotonic() + ANSWER_GRACE_S
                    send_frame(self._connection, reply, expires=expires)
                except (EOFError, OSError):
                    break
        self._leave()

    def _reply(self, frame: bytes) -> bytes:
        from ray.exceptions import RayError

        header, _, payload = frame.partition(b"\n")
        fields = json.loads(header)
        try:
            return self._obeyed(fields, payload)
        # An actor or a node died, did not answer, or has no room.
        except (RayError, _NoRoomError) as error:
            self._leave()
            lost = {"kind": "lost", "error": _described(error)}
            return json.dumps(lost).encode()

    def _obeyed(self, fields: dict[str, Any], payload: bytes) -> bytes:
        import ray

        limit_s = fields["limit_s"] + ANSWER_GRACE_S
        match fields["command"]:
            case "start":
                host = self._host or self._placed(fields["path"], fields["directory"])
                settings = json.dumps(fields["settings"])
                answer = host.start.remote(payload, settings)
                return ray.get(answer, timeout=limit_s)
            case "ask":
                answer = self._host.ask.remote(payload, fields["calls"])
                return ray.get(answer, timeout=limit_s)
            case command:
                assert command == "end", command
                ray.get(self._host.end.remote(fields["limit_s"]), timeout=limit_s)
                return json.dumps({"kind": "ended"}).encode()

    def _placed(self, path: list[str], directory: str) -> Any:
        """Creates the actor and waits until a node has room for it."""
        import ray

        make = ray.remote(ray_actor.Host).options(
            num_cpus=self._settings["cpus"],
            # `kill` is answered while `ask` runs.
            max_concurrency=2,
            scheduling_strategy="SPREAD",
        )
        self._host = make.remote(path, directory)
        placed = self._host.node.remote()
        expires = time.monotonic() + self._settings["timeout_s"]
        while not ray.wait([placed], timeout=_POLL_S)[0]:
            if self._killed.is_set() or time.monotonic() > expires:
                raise _NoRoomError(self._no_room())
        ray.get(placed, timeout=ANSWER_GRACE_S)
        return self._host

    def _no_room(self) -> str:
        import ray

        cpus, timeout_s = self._settings["cpus"], self._settings["timeout_s"]
        there, free = ray.cluster_resources(), ray.available_resources()
        return (
            f"no node had {cpus:g} CPUs free for a worker within {timeout_s:g} s: the "
            f"cluster has {there.get('CPU', 0):g} CPUs, {free.get('CPU', 0):g} of them "
            "free. Ask for fewer workers, or for fewer CPUs for each, or add nodes"
        )

    def _leave(self) -> None:
        import ray

        host, self._host = self._host, None
        if host is not None:
            ray.kill(host)


class _NoRoomError(RuntimeError):
    """No node of the cluster has the resources of a worker."""


def _described(error: Exception) -> str:
    """The error and its causes, in a few lines."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {cause}".strip()[:_LONGEST_ERROR])
        cause = cause.__cause__
    return "\n".join(texts)


def _send(control: socket.socket, fields: dict[str, Any]) -> None:
    expires = time.monotonic() + ANSWER_GRACE_S
    send_frame(control, json.dumps(fields).encode(), expires=expires)
