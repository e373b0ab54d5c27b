"""Leases of samples to samplers: a state machine without clocks and sockets.

The trainer submits requests. Samplers in other processes join, are granted samples and
tell their tokens as they come. A grant is a lease with a number of its own. When a
sampler dies, falls silent or is too slow, its samples wait again with the tokens that
they have, and what it still tells of the old lease is not heard. So no sample is lost,
and none is counted twice.

Every message may come late, twice or never: a sampler numbers its news, and is told its
orders until it has acknowledged them. Times are arguments, in seconds of one monotonic
clock.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxrl_post.fleet.ledger import Member, Queue, Sample, Work
from jaxrl_post.fleet.orders import Grant, News, Order, PolicyVersion, Progress, Revoke
from jaxrl_post.fleet.sharing import late, share
from jaxrl_post.sampler.requests import Completion, Request, SampleId, Unfinished

__all__ = ["Leases", "UnknownSamplerError"]


class UnknownSamplerError(LookupError):
    """The sampler must join again: it was given up, or another one has its name."""


@dataclass
class Leases:
    """The samples of a trainer and the samplers that draw them.

    Attributes:
        silence_s: seconds without a word after which a sampler is given up.
        members: the samplers, by name.
        held: whether nothing is granted now.
        changed: whether samplers that have asked for orders in vain should ask again;
            the caller clears it.
        happened: (event, sampler, detail) since the caller last cleared it.
        numbers: of epochs and leases, ascending from 1 or more. A trainer that is
            started again must use none of the one before.
        counts: of joins, deaths, takeovers (samples that another sampler continues) and
            stale news (of leases that had ended).
    """

    silence_s: float = 5.0
    members: dict[str, Member] = field(default_factory=dict)
    held: bool = False
    changed: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    happened: list[tuple[str, str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("joins", "deaths", "takeovers", "stale_news"), 0
        )
    )
    _samples: dict[SampleId, Sample] = field(default_factory=dict)
    # Samples without a lease, the oldest work first.
    _queues: dict[Work, Queue] = field(default_factory=dict)
    _epochs: dict[int, Member] = field(default_factory=dict)
    _finished: list[Completion] = field(default_factory=list)

    # The trainer's side.

    @property
    def busy(self) -> bool:
        """Whether samples have not ended, or their completions were not taken."""
        return bool(self._samples or self._finished)

    @property
    def oldest(self) -> float:
        """Smallest version by which a sample is drawn; infinity without samples."""
        versions = (each.work.policy.version for each in self._samples.values())
        return min(versions, default=math.inf)

    @property
    def has_finished(self) -> bool:
        """Whether `take` would return completions."""
        return bool(self._finished)

    def submit(self, request: Request, policy: PolicyVersion, job: int) -> None:
        """Queues the samples of a request.

        Raises:
            ValueError: one of them has not ended yet; none is queued.
        """
        first, work = request.first_sample, Work(policy, job)
        made = [
            Sample(request, index, work)
            for index in range(first, first + request.num_samples)
        ]
        for sample in made:
            if sample.id in self._samples:
                raise ValueError(f"submit: sample {sample.id} has not ended yet")
        for sample in made:
            self._samples[sample.id] = sample
            self._wait(sample)

    def take(self) -> list[Completion]:
        """Returns the samples that have ended since the last call."""
        found, self._finished = self._finished, []
        return found

    def unfinished(self) -> list[Unfinished]:
        """Returns the tokens so far of each sample that has any."""
        return [
            Unfinished(*sample.id, sample.tokens, sample.alternatives)
            for sample in self._samples.values()
            if sample.length
        ]

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples (all for None); returns them with their tokens so far."""
        chosen = list(self._samples if samples is None else samples)
        found = [self._samples.pop(each, None) for each in chosen]
        stopped = [each for each in found if each is not None]
        for sample in stopped:
            if not sample.lease:
                self._queues[sample.work].remove(sample)
        self._revoke(sample for sample in stopped if sample.lease)
        return [sample.completion("cancelled") for sample in stopped]

    def forget_homes(self) -> None:
        """Forgets which samplers hold the keys of prompts."""
        self._queues = {work: each for work, each in self._queues.items() if each.count}
        for queue in self._queues.values():
            queue.forget_homes()

    # The samplers' side.

    def join(self, name: str, url: str, slots: int, now: float) -> int:
        """Admits a sampler; one of the same name has ended. Returns its epoch.

        Raises:
            ValueError: it has no slots.
        """
        if slots < 1:
            raise ValueError(f"join: sampler {name} must have slots >= 1; got {slots}")
        self.leave(name, "another sampler of this name has joined")
        epoch = next(self.numbers)
        self.members[name] = self._epochs[epoch] = Member(name, url, slots, epoch, now)
        self.counts["joins"] += 1
        self.happened.append(("join", name, f"{slots} slots"))
        return epoch

    def leave(self, name: str, why: str) -> None:
        """Removes a sampler; its samples wait for others with the tokens they have."""
        member = self.members.pop(name, None)
        if member is None:
            return
        del self._epochs[member.epoch]
        for sample in member.samples.values():
            self._wait(sample)
        self.happened.append(("leave", name, why))

    def member(self, name: str, epoch: int) -> Member:
        """Returns a sampler that has joined.

        Raises:
            UnknownSamplerError: it must join again.
        """
        member = self.members.get(name)
        if member is None or member.epoch != epoch:
            raise UnknownSamplerError(
                f"sampler {name}, epoch {epoch}, is not known here; join again"
            )
        return member

    def hear(self, name: str, epoch: int, news: News, now: float) -> None:
        """Takes the news of a sampler; news that came before change nothing.

        Raises:
            UnknownSamplerError: it must join again, also if news before these are
                missing, or these do not continue what it has told.
        """
        member = self.member(name, epoch)
        member.heard = now
        if news.number <= member.number:
            return
        if news.number != member.number + 1:
            self._fail(member, f"news {member.number + 1} are missing")
        member.number, member.doing = news.number, news.doing
        for digest, why in news.refused.items():
            if digest not in member.refused:
                self.happened.append(("refuse", name, why))
        member.refused = dict(news.refused)
        member.probed = dict(news.probed)
        ready = frozenset(news.ready) - member.refused.keys()
        if ready and ready != member.ready:
            self.happened.append(("ready", name, news.doing))
            self.changed = True
        member.ready = ready
        running = min(member.running, member.slots)
        told = sum([self._advance(member, each) for each in news.progress])
        if told:
            member.count(told, running, now)

    def orders(
        self, name: str, epoch: int, acknowledged: int, now: float
    ) -> list[tuple[int, Order]]:
        """Grants a sampler what it should do; returns its orders with their numbers.

        Args:
            name: of the sampler.
            epoch: of its joining.
            acknowledged: number of the last order that it has.
            now: the time.

        Raises:
            UnknownSamplerError: it must join again.
        """
        member = self.member(name, epoch)
        member.heard = now
        if acknowledged > member.ordered:
            self._fail(member, f"it was given {member.ordered} orders")
        member.acknowledge(acknowledged)
        if not self.held and member.ready and member.room > 0:
            self._grant(member, now)
        return list(member.orders)

    def expire(self, now: float) -> list[str]:
        """Gives up the samplers that were silent too long; returns their names."""
        silent = [
            member.name
            for member in self.members.values()
            if not member.present and now - member.heard > self.silence_s
        ]
        for name in silent:
            self.counts["deaths"] += 1
            self.leave(name, f"was silent for {self.silence_s:g} s")
        return silent

    def lost(self, name: str, epoch: int, why: str) -> None:
        """Gives up a sampler whose connection has broken; an older one is ignored."""
        member = self.members.get(name)
        if member is not None and member.epoch == epoch:
            self.counts["deaths"] += 1
            self.leave(name, why)

    # The samples.

    def _advance(self, member: Member, told: Progress) -> int:
        """Adds tokens to a sample; returns how many."""
        sample = member.samples.get((told.lease, told.index))
        if sample is None:
            self.counts["stale_news"] += 1
            return 0
        if fault := sample.fault(told):
            self._fail(member, f"lease {told.lease}, sample {told.index}: {fault}")
        sample.add(told)
        if told.finish_reason is not None:
            self.changed = True
            del member.samples[told.lease, told.index]
            if told.finish_reason == "cancelled":
                self._wait(sample)
            else:
                del self._samples[sample.id]
                self._finished.append(
                    sample.completion(
                        told.finish_reason, told.error, refused=told.refused
                    )
                )
        return len(told.tokens)

    def _fail(self, member: Member, why: str) -> None:
        self.leave(member.name, why)
        raise UnknownSamplerError(f"sampler {member.name}: {why}; join again")

    def _wait(self, sample: Sample) -> None:
        self.changed = True
        sample.lease = 0
        self._queues.setdefault(sample.work, Queue()).add(sample)

    def _revoke(self, samples: Iterable[Sample]) -> None:
        """Ends the leases of samples."""
        ended = dict[tuple[int, int], list[int]]()
        for sample in samples:
            ended.setdefault((sample.epoch, sample.lease), []).append(sample.index)
            del self._epochs[sample.epoch].samples[sample.lease, sample.index]
            sample.lease = 0
        for (epoch, lease), indices in ended.items():
            self.changed = True
            self._epochs[epoch].order(Revoke(lease, tuple(indices)))

    # Grants.

    def _grant(self, member: Member, now: float) -> None:
        """Grants a sampler its share of the oldest work for which it is ready."""
        work = next(
            (
                work
                for work, queue in self._queues.items()
                if queue.count and work.policy.digest in member.ready
            ),
            None,
        )
        if work is None:
            chosen = self._relieve(member, now)
        elif member.fits(work):
            chosen = share(member, self._epochs, work, self._queues[work], now)
        else:
            # It ends its own work first.
            chosen = []
        member.begin(now)
        for run in _runs(chosen):
            self._lease(member, run)

    def _relieve(self, idle: Member, now: float) -> list[Sample]:
        """Takes samples back that end sooner at a sampler with free slots."""
        moved = late(idle, self._epochs, now)
        if moved:
            name = self._epochs[moved[0].epoch].name
            self.happened.append(("move", name, f"{len(moved)} samples to {idle.name}"))
        self._revoke(moved)
        for sample in moved:
            sample.moves += 1
            self._wait(sample)
        return sorted(moved, key=lambda sample: sample.id)

    def _lease(self, member: Member, run: Sequence[Sample]) -> None:
        """Grants samples of one prompt with consecutive indices."""
        number, first = next(self.numbers), run[0]
        if first.length:
            ids = first.tokens.ids.tolist()
            request = first.request.rest(first.index, ids)
        else:
            request = first.request.some(first.index, len(run))
        queue = self._queues[first.work]
        for sample in run:
            queue.remove(sample)
            if sample.epoch not in (0, member.epoch):
                self.counts["takeovers"] += 1
            sample.lease, sample.epoch = number, member.epoch
            sample.before = sample.length
            member.samples[number, sample.index] = sample
            queue.draws(member.epoch, sample)
        member.order(Grant(number, *first.work, request))


def _runs(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Cuts samples into runs of one prompt that have no tokens, or one that has."""
    runs = list[list[Sample]]()
    for sample in samples:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.request is sample.request
            and last.index + 1 == sample.index
            and not last.length
            and not sample.length
        ):
            runs[-1].append(sample)
        else:
            runs.append([sample])
    return runs
