"""The actor that holds a worker process on a node of a Ray cluster.

Ray sends the class to the node by value, since the node's own search path may not have
this package. So its methods import what they need, after `__init__` has set the path.
"""

import json
import os
import socket
import sys
from contextlib import suppress
from typing import Any

__all__ = ["Host"]


class Host:
    """Holds one worker process; deadline, memory limit and sessions are its own.

    Arguments and results are bytes, strings and numbers. What the environment's process
    replied leaves the actor as JSON.

    Args:
        path: the caller's `sys.path`, whose entries come before the node's own.
        directory: the caller's working directory, entered if the node has it.
    """

    def __init__(self, path: list[str], directory: str) -> None:
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        with suppress(OSError):
            os.chdir(directory)
        self._worker: Any = None

    def node(self) -> str:
        """The name of the node."""
        return socket.gethostname()

    def start(self, environment: bytes, settings: str) -> bytes:
        """Starts the worker process, also again after it has ended.

        Args:
            environment: the pickled environment.
            settings: the other fields of `WorkerSettings`, as JSON.

        Returns:
            A JSON object whose "kind" is "ready", or "failed" with an "error".
        """
        try:
            from jaxrl_post.envs.workers.interface import (
                WorkerSettings,
                WorkerStartError,
            )
            from jaxrl_post.envs.workers.process import WorkerProcess
        except ImportError as error:
            return self._failed(f"{type(error).__name__}: {error}")
        if self._worker is None:
            options = json.loads(settings)
            self._worker = WorkerProcess(WorkerSettings(environment, **options))
        try:
            self._worker.start()
        except WorkerStartError as error:
            return self._failed(str(error))
        return json.dumps({"kind": "ready"}).encode()

    def ask(self, request: bytes, calls: int) -> bytes:
        """Has the worker process answer a request; returns the outcome as JSON."""
        from jaxrl_post.envs.workers.interface import encode_outcome

        outcome = self._worker.ask(request, calls)
        return json.dumps(encode_outcome(outcome)).encode()

    def end(self, grace_s: float) -> None:
        """Ends the worker process."""
        if self._worker is not None:
            self._worker.end(grace_s=grace_s)

    def kill(self) -> None:
        """Kills the worker process, while another thread may wait for its answer."""
        if self._worker is not None:
            self._worker.kill()

    def _failed(self, error: str) -> bytes:
        if "ModuleNotFoundError" in error:
            error += (
                f"\nThe worker is on the node {self.node()} of a Ray cluster: install "
                "the same packages there, and put the caller's own modules at the same "
                "paths"
            )
        return json.dumps({"kind": "failed", "error": error}).encode()
