"""Interface of a worker for its pool: start, answer one request, end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jaxrl_post.envs.env import Step
from jaxrl_post.envs.workers.wire import decode_step, encode_step

__all__ = [
    "Judgement",
    "MakeWorker",
    "OutcomeKind",
    "Worker",
    "WorkerLostError",
    "WorkerSettings",
    "WorkerStartError",
    "decode_outcome",
    "encode_outcome",
]

type OutcomeKind = Literal[
    "ok", "raised", "unreachable", "timeout", "invalid", "crashed", "ended"
]


class WorkerStartError(RuntimeError):
    """A worker process did not become ready; the message holds its output."""


class WorkerLostError(WorkerStartError):
    """The machine of a worker is gone, or has no room for it.

    Nothing that the environment did is the cause, so another worker can answer.
    """


@dataclass(frozen=True)
class Judgement:
    """The result of asking an environment for the answer to one turn.

    Args:
        step: the step if `kind` is "ok", else None.
        error: the error message; None if `kind` is "ok" or "ended".
        kind: "ok"; "raised" (step raised); "unreachable" (a server that step asks, or
            the machine of its worker, was away); "invalid" (step returned no `Step`, or
            a number that is not finite); "timeout" (the deadline passed); "crashed"
            (the process died, or could not be started again); "ended" (a session was
            closed, no turn was answered).
        seconds: time from sending the request to the worker until the result.

    >>> Judgement(Step(1.0, done=True), None, "ok", 0.01).kind
    'ok'
    """

    step: Step | None
    error: str | None
    kind: OutcomeKind
    seconds: float


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of a worker process.

    Args:
        environment: the pickled environment.
        deadline_s: maximum seconds of one step.
        start_timeout_s: maximum seconds of importing and preparing.
        memory_bytes: limit on the address space, or None.
    """

    environment: bytes
    deadline_s: float
    start_timeout_s: float
    memory_bytes: int | None

    @property
    def limits(self) -> dict[str, float | None]:
        """All settings but the environment, as a JSON object.

        >>> WorkerSettings(b"", 10.0, 60.0, None).limits
        {'deadline_s': 10.0, 'start_timeout_s': 60.0, 'memory_bytes': None}
        """
        return {
            "deadline_s": self.deadline_s,
            "start_timeout_s": self.start_timeout_s,
            "memory_bytes": self.memory_bytes,
        }


class Worker(Protocol):
    """A process that runs an environment, on this machine or another.

    Not thread-safe, except `kill`, which any thread may call.
    """

    @property
    def start_limit_s(self) -> float:
        """Maximum seconds that `start` takes."""
        ...

    @property
    def alive(self) -> bool:
        """Whether `ask` may be called; may be True after an unnoticed death."""
        ...

    def start(self) -> None:
        """Starts a process and waits until it is ready.

        Raises:
            WorkerStartError: if it does not become ready in time; with its output.
            WorkerLostError: if no machine has room for it.
        """
        ...

    def ask(self, request: bytes, calls: int = 1) -> Judgement:
        """Sends a request and waits for the answer.

        After the outcomes "timeout" and "crashed" the worker is not alive.

        Args:
            request: a pickled `Ask`.
            calls: maximum calls of the environment, each with its own deadline.

        Raises:
            WorkerLostError: if the worker's machine is gone; it is not alive then.
        """
        ...

    def end(self, *, grace_s: float = ...) -> None:
        """Ends the process, `grace_s` seconds after it was asked to exit."""
        ...

    def kill(self) -> None:
        """Kills the process and prevents another start. Thread-safe."""
        ...


type MakeWorker = Callable[[WorkerSettings], Worker]


def encode_outcome(outcome: Judgement) -> dict[str, Any]:
    """An outcome as a JSON object.

    >>> encode_outcome(Judgement(None, "it died", "crashed", 0.5))
    {'kind': 'crashed', 'error': 'it died', 'seconds': 0.5, 'step': None}
    """
    return {
        "kind": outcome.kind,
        "error": outcome.error,
        "seconds": outcome.seconds,
        "step": None if outcome.step is None else encode_step(outcome.step),
    }


def decode_outcome(fields: dict[str, Any]) -> Judgement:
    """The outcome that `encode_outcome` encoded.

    >>> outcome = Judgement(Step(1.0, done=True), None, "ok", 0.5)
    >>> decode_outcome(encode_outcome(outcome)) == outcome
    True
    """
    step = fields["step"]
    return Judgement(
        None if step is None else decode_step(step),
        fields["error"],
        fields["kind"],
        fields["seconds"],
    )
