"""Has the batches of later steps sampled before the step that trains on them.

With `ahead` k the batch of step t is sampled by the parameters with which step t - k
begins; the first steps use the initial parameters. So a run is a function of its seed,
whether sampling takes turns with training or runs at the same time.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jaxrl_post.rollout.episode import Group
from jaxrl_post.rollout.events import Tell, silent, told
from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sharding import processes

__all__ = ["Ahead", "SampledBatch", "Versioned"]


class Versioned(Sampler, Protocol):
    """A sampler that says which version of the parameters it has."""

    @property
    def version(self) -> int:
        """Number of optimizer steps that made the parameters."""
        ...


class SampledBatch(NamedTuple):
    """The batch of a step, with the metrics of its sampling."""

    groups: list[Group]
    metrics: dict[str, float]


@dataclass
class Ahead:
    """Samples the batches of steps in their order; in a thread, if it runs `beside`.

    A batch is begun when the version that samples it is published, and at most `ahead`
    + 1 batches are begun and not taken. Each is sampled wholly by its version.

    Attributes:
        sample: samples the batch of a step, given the sampler and the step's number.
        ahead: steps by which sampling is ahead of training; 0 for none.
        steps: of the run; no batch is sampled for a later one.
        beside: whether sampling runs in a thread while steps train, on other devices.
        tell: told when a batch is sampled, and when it is taken.
    """

    sample: Callable[[Versioned, int], SampledBatch]
    ahead: int
    steps: int
    beside: bool = False
    tell: Tell = silent
    # The batches that were begun and not taken, by the step's number, in order.
    _begun: dict[int, "Future[SampledBatch]"] = field(default_factory=dict, init=False)
    _taken: deque[list[Group]] = field(default_factory=deque, init=False)
    _thread: ThreadPoolExecutor | None = field(default=None, init=False)
    # When batches were sampled, the present one with an end of infinity.
    _spans: deque[tuple[float, float]] = field(default_factory=deque, init=False)
    # The time of the last `feed`.
    _fed: float | None = field(default=None, init=False)

    def feed(self, buffer: object, sampler: Versioned, number: int) -> dict[str, float]:
        """Begins the batches that a new version samples; waits for one of them.

        Args:
            buffer: not used: the batches are here.
            sampler: with the parameters with which the step begins.
            number: of the step, whose batch `take` returns afterwards.

        Returns:
            The metrics of the batch's sampling, and how long each side waited.

        Raises:
            Exception: that sampling the batch raised.
        """
        del buffer
        begin = time.perf_counter()
        first = max([number - 1, *self._begun]) + 1
        for step in range(first, min(number + self.ahead, self.steps) + 1):
            self._begin(sampler, step)
        groups, metrics = self._begun.pop(number).result()
        self._taken.append(groups)
        self._tell_taken(groups, sampler.version, number)
        return metrics | self._idle(begin)

    def take(self) -> list[Group]:
        """Removes and returns the batch for which `feed` waited."""
        return self._taken.popleft()

    def settle(self) -> None:
        """Waits until every batch that was begun is there.

        Raises:
            Exception: that sampling one of them raised.
        """
        for made in self._begun.values():
            made.result()

    def state(self) -> list[dict[str, Any]]:
        """Returns the batches that wait as a JSON value; call `settle` first."""
        return [
            {
                "step": number,
                "groups": [group.to_json() for group in made.result().groups],
                "metrics": made.result().metrics,
            }
            for number, made in self._begun.items()
        ]

    def restore(self, value: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the batches with a value of `state`."""
        self._begun, self._fed = {}, None
        for each in value:
            groups = [Group.from_json(group) for group in each["groups"]]
            made = self._begun[each["step"]] = Future[SampledBatch]()
            made.set_result(SampledBatch(groups, dict(each["metrics"])))

    def close(self) -> None:
        """Ends the thread; a batch that is being sampled must end soon."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _begin(self, sampler: Versioned, number: int) -> None:
        if self.beside:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(
                    1,
                    thread_name_prefix="samplers",
                    # Processes of a run exchange judgements in this thread.
                    initializer=processes.enter_lane,
                    initargs=("samplers",),
                )
            self._begun[number] = self._thread.submit(self._timed, sampler, number)
            return
        made = self._begun[number] = Future[SampledBatch]()
        made.set_result(self._sampled(sampler, number))

    def _timed(self, sampler: Versioned, number: int) -> SampledBatch:
        begin = time.perf_counter()
        self._spans.append((begin, math.inf))
        try:
            return self._sampled(sampler, number)
        finally:
            self._spans[-1] = begin, time.perf_counter()

    def _sampled(self, sampler: Versioned, number: int) -> SampledBatch:
        fields = {"step": number, "version": sampler.version}
        with told(self.tell, "sample", fields):
            return self.sample(sampler, number)

    def _tell_taken(self, groups: list[Group], version: int, number: int) -> None:
        self.tell(
            "take",
            {
                "step": number,
                "version": version,
                "prompts": [group.prompt_id for group in groups],
                "versions": [group.versions for group in groups],
            },
        )

    def _idle(self, begin: float) -> dict[str, float]:
        """Shares of the time since the last `feed` in which each side waited."""
        now, last = time.perf_counter(), self._fed
        self._fed = now
        if not self.beside or last is None:
            return {}
        spans = list(self._spans)
        busy = sum(max(0.0, min(end, now) - max(start, last)) for start, end in spans)
        while self._spans and self._spans[0][1] < now:
            self._spans.popleft()
        return {
            "idle/trainer": (now - begin) / (now - last),
            "idle/samplers": 1.0 - busy / (now - last),
        }
