"""Carries out a sampler's orders with its engine, one policy and one job at a time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxrl_post.fleet.leases import Grant, Order, Progress
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler.requests import (
    Alternatives,
    Completion,
    FinishReason,
    Request,
    SampleId,
)
from jaxrl_post.tokens import Tokens

__all__ = ["Worker"]

_NONE = Tokens.context(())


class _Running(NamedTuple):
    """A sample in the engine: its lease, and the tokens of it that were told."""

    lease: int
    told: int


@dataclass
class Worker:
    """The orders of a sampler, and the engine with the policies that it may serve.

    Requests of another policy or job wait until the engine is empty: a sample is drawn
    wholly by one policy.

    Attributes:
        policies: the engine with each policy, by digest.
    """

    policies: dict[str, Published] = field(default_factory=dict)
    # Grants that have not begun, each with the samples that are left of it.
    _queue: deque[tuple[Grant, list[int]]] = field(default_factory=deque, init=False)
    _running: dict[SampleId, _Running] = field(default_factory=dict, init=False)
    # The policy and the job of what is in the engine, or was last.
    _present: tuple[str, int] | None = field(default=None, init=False)
    _news: list[Progress] = field(default_factory=list, init=False)

    @property
    def busy(self) -> bool:
        """Whether there is something to sample."""
        return bool(self._queue or self._running)

    @property
    def empty(self) -> bool:
        """Whether no sample is in the engine, so that another policy may use it."""
        return not self._running

    @property
    def needed(self) -> set[str]:
        """Digests of the policies that orders name."""
        found = {grant.policy.digest for grant, _ in self._queue}
        return found | (
            {self._present[0]} if self._running and self._present else set()
        )

    def order(self, order: Order) -> None:
        """Takes an order."""
        if isinstance(order, Grant):
            first, count = order.request.first_sample, order.request.num_samples
            self._queue.append((order, list(range(first, first + count))))
            return
        for grant, left in self._queue:
            if grant.lease == order.lease:
                left[:] = [index for index in left if index not in order.samples]
        stopped = [
            each
            for each, running in self._running.items()
            if running.lease == order.lease and each[1] in order.samples
        ]
        if stopped:
            done = self._sampler.cancel(stopped)
            for each in stopped:
                del self._running[each]
            self._tell_ended(done)

    def step(self) -> list[Progress]:
        """Begins what can begin, decodes a burst; returns what is new."""
        self._begin()
        if self._running:
            self._sampler.dispatch()
            self._tell_ended(self._sampler.collect())
            self._tell_tokens()
        news, self._news = self._news, []
        return news

    def reset(self) -> None:
        """Drops all orders."""
        if self._running:
            self._sampler.cancel()
        self._queue.clear()
        self._running.clear()
        self._news.clear()

    @property
    def _sampler(self) -> Published:
        assert self._present is not None, "a sample runs"
        return self.policies[self._present[0]]

    def _begin(self) -> None:
        while self._queue:
            grant, left = self._queue[0]
            wanted = grant.policy.digest, grant.job
            if wanted != self._present and self._running:
                return
            self._queue.popleft()
            if grant.policy.digest not in self.policies:
                self._tell_all(grant, left, "cancelled", "the policy is not here")
                continue
            if wanted != self._present:
                self._present = wanted
                self._sampler.renew()
            for part in _runs(grant.request, left):
                try:
                    self._sampler.submit(part)
                except ValueError as error:
                    indices = range(
                        part.first_sample, part.first_sample + part.num_samples
                    )
                    self._tell_all(grant, indices, "failed", str(error))
                    continue
                for index in range(part.num_samples):
                    sample = part.prompt_id, part.first_sample + index
                    self._running[sample] = _Running(grant.lease, 0)

    def _tell_all(
        self, grant: Grant, indices: Sequence[int], reason: FinishReason, why: str
    ) -> None:
        for index in indices:
            self._news.append(
                Progress(grant.lease, index, 0, _NONE, None, reason, why, True)
            )

    def _tell_ended(self, done: Sequence[Completion]) -> None:
        for each in done:
            running = self._running.pop((each.prompt_id, each.sample_index), None)
            if running is None:
                continue
            self._news.append(
                Progress(
                    running.lease,
                    each.sample_index,
                    running.told,
                    each.tokens[running.told :],
                    _after(each.alternatives, running.told),
                    each.finish_reason,
                    each.error,
                    each.refused,
                )
            )

    def _tell_tokens(self) -> None:
        for each in self._sampler.unfinished():
            sample = each.prompt_id, each.sample_index
            running = self._running.get(sample)
            if running is None or len(each.tokens) == running.told:
                continue
            self._news.append(
                Progress(
                    running.lease,
                    each.sample_index,
                    running.told,
                    each.tokens[running.told :],
                    _after(each.alternatives, running.told),
                )
            )
            self._running[sample] = _Running(running.lease, len(each.tokens))


def _after(alternatives: Alternatives | None, count: int) -> Alternatives | None:
    if alternatives is None:
        return None
    return Alternatives(alternatives.ids[count:], alternatives.logprobs[count:])


def _runs(request: Request, indices: Sequence[int]) -> list[Request]:
    """The requests of some of the samples: one for each run of indices."""
    runs = list[list[int]]()
    for index in indices:
        if runs and runs[-1][-1] + 1 == index:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [request.some(run[0], len(run)) for run in runs]
