"""Judgements that were requested and have not been applied yet.

In a run of several processes, each asks its own workers for a part of the judgements,
and the processes exchange what has arrived. So all of them apply the same judgements in
the same round, in the same order, whenever and wherever these arrived.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxrl_post.envs.env import Message, Task
from jaxrl_post.envs.workers.interface import Judgement, decode_outcome, encode_outcome
from jaxrl_post.sampler.requests import SampleId
from jaxrl_post.sharding import processes

__all__ = ["Judgements", "Judges"]

type _Future = concurrent.futures.Future[Judgement]

# Seconds between two exchanges while no judgement has arrived anywhere.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.002, 0.25


@runtime_checkable
class Judges(Protocol):
    """Worker processes in which an environment answers turns, under a deadline."""

    def submit(
        self, task: Task, conversation: tuple[Message, ...], session: SampleId
    ) -> concurrent.futures.Future[Judgement]:
        """Requests the answer to the turn that ends a conversation."""
        ...

    def end(self, session: SampleId) -> None:
        """Closes the session of a finished episode, if it has one."""
        ...


@dataclass
class Judgements:
    """Requests judgements, and hands out those that have arrived, in every process.

    Attributes:
        judges: the environment, in worker processes of this process.
    """

    judges: Judges
    # The requested judgements by number, in the order of the requests.
    _waiting: dict[int, SampleId] = field(default_factory=dict, init=False)
    # Numbers of judgements that a round still waits for, see `take`.
    _due: set[int] = field(default_factory=set, init=False)
    _asked: int = field(default=0, init=False)
    # The threads of the workers put finished judgements here.
    _arrived: queue.SimpleQueue[tuple[int, _Future]] = field(
        default_factory=queue.SimpleQueue, init=False
    )

    def __len__(self) -> int:
        return len(self._waiting)

    def request(
        self, task: Task, conversation: tuple[Message, ...], sample: SampleId
    ) -> None:
        """Requests the judgement of the turn that ends a conversation."""
        number, self._asked = self._asked, self._asked + 1
        self._waiting[number] = sample
        self._due.add(number)
        if _is_ours(sample):
            future = self.judges.submit(task, conversation, sample)
            future.add_done_callback(lambda done: self._arrived.put((number, done)))

    def end(self, sample: SampleId) -> None:
        """Closes the session of a finished episode, if it has one."""
        if _is_ours(sample):
            self.judges.end(sample)

    def forget(self) -> None:
        """Drops all requests; judgements that still arrive are not handed out."""
        self._waiting, self._due = {}, set()

    def take(
        self, deadline: float, *, grace_s: float, idle: bool
    ) -> Iterator[tuple[SampleId, Judgement]]:
        """Yields the judgements that have arrived, in the order of their requests.

        Args:
            deadline: value of `time.monotonic` at which waiting ends.
            grace_s: seconds to wait for each judgement that was requested since the
                last call. The wait ends with the first one that takes longer.
            idle: whether to wait for a judgement if none has arrived.
        """
        if not self._waiting:
            return
        ready = self._arrivals(0.0)
        if grace_s:
            while not self._due <= ready.keys():
                # The grace restarts at each arrival: it bounds one judgement, not all.
                left = max(0.0, deadline - time.monotonic())
                if not (more := self._arrivals(min(grace_s, left))):
                    break
                ready |= more
            self._due.clear()
        if not ready and idle:
            ready = self._arrivals(max(0.0, deadline - time.monotonic()))
        # In the order of the requests, so that a replayed run submits the same samples.
        for number in sorted(ready):
            self._due.discard(number)
            yield self._waiting.pop(number), ready[number]

    def _arrivals(self, wait_s: float) -> dict[int, Judgement]:
        """Judgements that have arrived; waits for the first one, at most `wait_s`."""
        if processes.count() == 1:
            return self._local(wait_s)
        expires, pause = time.monotonic() + wait_s, _FIRST_WAIT_S
        while True:
            left = expires - time.monotonic()
            found = self._local(max(0.0, min(left, pause)))
            told = {
                number: encode_outcome(outcome) for number, outcome in found.items()
            }
            everyone = processes.exchange("judgements", [left <= pause, told])
            merged = {
                int(number): decode_outcome(value)
                for _, theirs in everyone
                for number, value in theirs.items()
            }
            # Clocks differ, so process 0 says when the wait is over.
            if merged or everyone[0][0]:
                return merged
            pause = min(2 * pause, _LONGEST_WAIT_S)

    def _local(self, wait_s: float) -> dict[int, Judgement]:
        """Judgements of this process's workers that have arrived."""
        found: dict[int, Judgement] = {}
        expires = time.monotonic() + wait_s
        with contextlib.suppress(queue.Empty):
            while True:
                left = 0.0 if found else max(0.0, expires - time.monotonic())
                number, judgement = self._arrived.get(timeout=left)
                # Judgements that were forgotten may still arrive.
                if number in self._waiting:
                    found[number] = judgement.result(timeout=0)
        return found


def _is_ours(sample: SampleId) -> bool:
    """Whether this process's workers judge a sample: all turns of an episode or none.

    The samples of a prompt go to different processes, as do the first samples of
    consecutive prompts.
    """
    return sum(sample) % processes.count() == processes.index()
