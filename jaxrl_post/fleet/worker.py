"""Carries out a sampler's orders with its engine, one policy and one job at a time."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxrl_post.fleet.orders import Grant, Order, Progress
from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sampler.requests import (
    Alternatives,
    Completion,
    FinishReason,
    Request,
    SampleId,
    Unfinished,
)
from jaxrl_post.tokens import Tokens

__all__ = ["OrderWorker"]

_NONE = Tokens.context(())


class _Running(NamedTuple):
    """A sample in the engine.

    Attributes:
        lease: of the sample.
        version: of the lease's policy.
        told: number of its tokens that were told.
    """

    lease: int
    version: int
    told: int = 0


@dataclass
class OrderWorker:
    """The orders of a sampler, and the engine with the policies that it may serve.

    Requests of another policy or job wait until the engine is empty: a sample is drawn
    wholly by one policy.

    Attributes:
        policies: the engine with each policy, by digest.
    """

    policies: dict[str, Sampler] = field(default_factory=dict)
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
        if self._running and self._present:
            found.add(self._present[0])
        return found

    def order(self, order: Order) -> None:
        """Takes an order."""
        if isinstance(order, Grant):
            first, count = order.request.first_sample, order.request.num_samples
            self._queue.append((order, list(range(first, first + count))))
            return
        for item in [each for each in self._queue if each[0].lease == order.lease]:
            item[1][:] = [index for index in item[1] if index not in order.samples]
            if not item[1]:
                self._queue.remove(item)
        stopped = [
            sample
            for sample, running in self._running.items()
            if running.lease == order.lease and sample[1] in order.samples
        ]
        if stopped:
            done = self._sampler.cancel(stopped)
            for sample in stopped:
                del self._running[sample]
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
    def _sampler(self) -> Sampler:
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
                self._submit(grant, part)

    def _submit(self, grant: Grant, part: Request) -> None:
        indices = range(part.first_sample, part.first_sample + part.num_samples)
        try:
            self._sampler.submit(part)
        except ValueError as error:
            self._tell_all(grant, indices, "failed", str(error))
            return
        for index in indices:
            running = _Running(grant.lease, grant.policy.version)
            self._running[part.prompt_id, index] = running

    def _tell_all(
        self, grant: Grant, indices: Sequence[int], reason: FinishReason, why: str
    ) -> None:
        """Tells of samples that did not begin."""
        for index in indices:
            self._news.append(Progress(grant.lease, index, 0, _NONE, None, reason, why))

    def _tell_ended(self, done: Sequence[Completion]) -> None:
        for each in done:
            running = self._running.pop((each.prompt_id, each.sample_index), None)
            if running is not None:
                self._news.append(
                    _progress(each, running)._replace(
                        finish_reason=each.finish_reason,
                        error=each.error,
                        refused=each.refused,
                    )
                )

    def _tell_tokens(self) -> None:
        for each in self._sampler.unfinished():
            sample = each.prompt_id, each.sample_index
            running = self._running.get(sample)
            if running is not None and len(each.tokens) > running.told:
                self._news.append(_progress(each, running))
                self._running[sample] = running._replace(told=len(each.tokens))


def _progress(sample: Completion | Unfinished, running: _Running) -> Progress:
    """The progress of a sample since the last time."""
    told, others = running.told, sample.alternatives
    new = sample.tokens[told:]
    if len(new) and new.versions[0] != running.version:
        # A version with the bytes of an earlier one is not opened again.
        versions = np.full(len(new), running.version, np.int32)
        new = dataclasses.replace(new, versions=versions)
    if others is not None:
        others = Alternatives(others.ids[told:], others.logprobs[told:])
    return Progress(running.lease, sample.sample_index, told, new, others)


def _runs(request: Request, indices: Sequence[int]) -> list[Request]:
    """The requests of some of the samples: one for each run of indices."""
    runs = list[list[int]]()
    for index in indices:
        if runs and runs[-1][-1] + 1 == index:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [request.some(run[0], len(run)) for run in runs]
