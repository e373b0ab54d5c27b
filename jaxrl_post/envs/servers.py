"""Requests to other programs' servers: retries, and errors if there is no answer."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = [
    "Retries",
    "ServerAwayError",
    "ServerError",
    "SlowServerError",
    "UnreachableError",
]

# Seconds between two attempts, at first and at most; they double from one to the next.
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


class ServerError(RuntimeError):
    """A server failed; the policy did nothing wrong, nor can it mend it.

    So the policy is not told: the episode fails, with this message as the reason.
    """


class SlowServerError(ServerError):
    """A server took a request, and did not answer it in time.

    A tool that is slow may have been asked for too much, so of a call this one may be
    told to the policy.
    """


class ServerAwayError(ServerError):
    """A server was away for all attempts; neither the answer nor the data is at fault.

    A run rolls out again for a while where too many judgements fail so.
    """


class UnreachableError(Exception):
    """One attempt to reach a server failed; the next may succeed."""


class Retries:
    """Repeats a request that does not reach its server, for a bounded time.

    Args:
        seconds: for all attempts together, positive.
        most: number of attempts, at least 1; None if only the time bounds them.

    Several threads may make requests at the same time.

    >>> tries = iter([False, True])
    >>> def attempt(until):
    ...     if not next(tries):
    ...         raise UnreachableError("connection refused")
    ...     return "here"
    >>> retries = Retries(5.0)
    >>> retries(attempt), retries.lost > 0
    ('here', True)
    """

    def __init__(self, seconds: float, most: int | None = None) -> None:
        self._seconds = seconds
        self._most = most
        # Beginning and end of each failed attempt, with the pause after it.
        self._failed: list[tuple[float, float]] = []

    @property
    def lost(self) -> float:
        """Seconds so far in which some request failed, or waited to be repeated."""
        total, reached = 0.0, 0.0
        for begin, end in sorted(self._failed):
            total += max(end - max(begin, reached), 0.0)
            reached = max(end, reached)
        return total

    def __call__[Found](self, attempt: Callable[[float], Found]) -> Found:
        """Makes attempts until one reaches the server.

        Args:
            attempt: gets the instant of `time.monotonic()` at which it must end, and
                raises `UnreachableError`, with the server's name, if it did not reach
                the server, or if the connection broke before the answer.

        Returns:
            What the attempt returned.

        Raises:
            ServerAwayError: no attempt reached the server in time.
        """
        begin = time.monotonic()
        until = begin + self._seconds
        pause = _FIRST_PAUSE
        number = 1
        causes: list[str] = []
        while True:
            try:
                found = attempt(until)
            except UnreachableError as error:
                causes.append(str(error))
                left = until - time.monotonic()
                if number == self._most or left <= pause:
                    raise self._failure(causes) from error
            except SlowServerError as error:
                if number == 1:
                    raise
                # The rest of the time was too short for a fair chance to answer.
                raise self._failure([*causes, str(error)]) from error
            else:
                return found
            time.sleep(pause)
            end = time.monotonic()
            self._failed.append((begin, end))
            begin = end
            pause = min(2 * pause, _LONGEST_PAUSE)
            number += 1

    def _failure(self, causes: list[str]) -> ServerAwayError:
        # A last attempt that ran out of time says less than the first one.
        first, last = causes[0], causes[-1]
        then = "" if last == first else f", and at last: {last}"
        times = "once" if len(causes) == 1 else f"{len(causes)} times"
        return ServerAwayError(
            f"{first}{then}; tried {times} within {self._seconds:g} s. Look after the "
            "server; the option 'seconds' gives it longer to come back"
        )
