"""Which sampler draws which samples: a state machine without clocks and sockets.

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
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxrl_post.sampler.requests import (
    Alternatives,
    Completion,
    FinishReason,
    Request,
    SampleId,
    Unfinished,
)
from jaxrl_post.tokens import Tokens

__all__ = [
    "Grant",
    "Leases",
    "News",
    "Order",
    "Policy",
    "Progress",
    "Revoke",
    "UnknownSamplerError",
    "member_of",
]

# Samples that a sampler is granted in addition to those that it decodes at once, as a
# share of these: the next ones wait at the sampler, not a message away.
AHEAD = 0.25
# Share of another sampler's speed below which samples of a slow one are moved.
SLOW = 0.5
# Weight of the newest measurement of a sampler's speed.
NEWEST = 0.3


class UnknownSamplerError(LookupError):
    """The sampler must join again: it was given up, or another one has its name."""


class Policy(NamedTuple):
    """A version of the parameters: its number, and the digest of its bytes."""

    version: int
    digest: str


class Grant(NamedTuple):
    """The order to sample.

    Attributes:
        lease: number of the lease, unique in a run.
        policy: samples all of it.
        job: number of the work to which it belongs; with another one nothing that was
            held of earlier requests is used.
        request: of samples with consecutive indices.
    """

    lease: int
    policy: Policy
    job: int
    request: Request


class Revoke(NamedTuple):
    """The order to stop samples of a lease."""

    lease: int
    samples: tuple[int, ...]


type Order = Grant | Revoke


class Progress(NamedTuple):
    """What a sample has sampled since the last news of it.

    Attributes:
        lease: of the sample.
        index: of the sample.
        start: number of tokens that were told under this lease before.
        tokens: the new ones, all sampled by the lease's policy.
        alternatives: of these; None if not asked for.
        finish_reason: None while the sample runs.
        error: of a sample that failed; else "".
        refused: as `Completion.refused`.
    """

    lease: int
    index: int
    start: int
    tokens: Tokens
    alternatives: Alternatives | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    refused: bool = False


class News(NamedTuple):
    """The news of a sampler.

    Attributes:
        number: 1 for the first news after joining, then one more each time.
        doing: the sampler's state, for people.
        ready: digests of the policies by which it can sample now.
        refused: digests of policies that it does not serve, and why.
        progress: of its samples.
    """

    number: int
    doing: str = ""
    ready: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    progress: Sequence[Progress] = ()


@dataclass
class _Sample:
    request: Request
    index: int
    policy: Policy
    job: int
    tokens: Tokens = field(default_factory=lambda: Tokens.context(()))
    alternatives: Alternatives | None = None
    lease: "_Lease | None" = None

    @property
    def id(self) -> SampleId:
        return self.request.prompt_id, self.index

    def finished(self, reason: FinishReason, error: str, refused: bool) -> Completion:
        return Completion(
            self.request.prompt_id,
            self.index,
            self.tokens,
            reason,
            error,
            self.alternatives,
            refused,
        )


@dataclass
class _Lease:
    number: int
    member: "Member"
    samples: dict[int, _Sample]
    # Tokens that each sample had when the lease was granted.
    before: dict[int, int]

    def begun(self, index: int) -> bool:
        return len(self.samples[index].tokens) > self.before[index]

    def drop(self, indices: Sequence[int], *, tell: bool) -> list[_Sample]:
        """Takes samples out of the lease, which ends with the last of them."""
        dropped = [self.samples.pop(index) for index in indices]
        for sample in dropped:
            sample.lease = None
        if not self.samples:
            del self.member.leases[self.number]
        if tell:
            self.member.order(Revoke(self.number, tuple(indices)))
        return dropped


@dataclass
class Member:
    """A sampler that has joined.

    Attributes:
        name: unique among the samplers.
        url: where other samplers fetch what it holds; "" for nowhere.
        slots: samples that it decodes at once.
        epoch: number of its joining.
        heard: when it was last heard.
        present: whether a connection of it is held open.
        doing: its state, for people.
        ready: digests of the policies by which it can sample.
        refused: digests of policies that it refused, and why.
        pace: tokens a second of a sample that it decodes; NaN before it was measured.
    """

    name: str
    url: str
    slots: int
    epoch: int
    heard: float
    present: bool = False
    number: int = 0
    doing: str = ""
    ready: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    pace: float = math.nan
    leases: dict[int, _Lease] = field(default_factory=dict)
    orders: deque[tuple[int, Order]] = field(default_factory=deque)
    ordered: int = 0
    # Since when tokens count for its pace.
    counted: float = math.nan

    @property
    def running(self) -> int:
        """Number of its samples."""
        return sum(len(lease.samples) for lease in self.leases.values())

    @property
    def limit(self) -> int:
        """Most samples that it is granted at a time."""
        return self.slots + int(AHEAD * self.slots)

    def order(self, order: Order) -> None:
        """Adds an order."""
        self.ordered += 1
        self.orders.append((self.ordered, order))


def member_of(name: str, epoch: int) -> str:
    """Names a sampler from its joining until it leaves."""
    return f"{name}/{epoch}"


@dataclass
class Leases:
    """The samples of a trainer and the samplers that draw them.

    Attributes:
        silence_s: seconds without a word after which a sampler is given up.
        members: the samplers, by name.
        held: whether nothing is granted now.
        happened: (event, sampler, detail) since the caller last cleared it.
        numbers: of epochs and leases. A trainer that is started again must use none of
            the one before.
        counts: of joins, deaths, takeovers (samples that changed their sampler) and
            stale news (of leases that had ended).
    """

    silence_s: float = 5.0
    members: dict[str, Member] = field(default_factory=dict)
    held: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    happened: list[tuple[str, str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("joins", "deaths", "takeovers", "stale_news"), 0
        )
    )
    _samples: dict[SampleId, _Sample] = field(default_factory=dict)
    # Samples without a lease, in the order in which they were submitted.
    _waiting: dict[SampleId, _Sample] = field(default_factory=dict)
    # The sampler that drew the last sample of a prompt, and holds its keys.
    _homes: dict[int, str] = field(default_factory=dict)
    _finished: list[Completion] = field(default_factory=list)

    # The trainer's side.

    @property
    def busy(self) -> bool:
        """Whether samples have not ended, or their completions were not taken."""
        return bool(self._samples or self._finished)

    @property
    def has_finished(self) -> bool:
        """Whether `take` would return completions."""
        return bool(self._finished)

    def submit(self, request: Request, policy: Policy, job: int) -> None:
        """Queues the samples of a request.

        Raises:
            ValueError: one of them has not ended yet.
        """
        first = request.first_sample
        for index in range(first, first + request.num_samples):
            sample = _Sample(request, index, policy, job)
            if sample.id in self._samples:
                raise ValueError(f"submit: sample {sample.id} has not ended yet")
            self._samples[sample.id] = self._waiting[sample.id] = sample

    def take(self) -> list[Completion]:
        """Returns the samples that have ended since the last call."""
        found, self._finished = self._finished, []
        return found

    def unfinished(self) -> list[Unfinished]:
        """Returns the tokens so far of each sample that has any."""
        return [
            Unfinished(*sample.id, sample.tokens, sample.alternatives)
            for sample in self._samples.values()
            if len(sample.tokens)
        ]

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples (all for None); returns them with their tokens so far."""
        chosen = list(self._samples) if samples is None else [*samples]
        ended = list[Completion]()
        for each in chosen:
            if (sample := self._samples.pop(each, None)) is None:
                continue
            self._waiting.pop(each, None)
            if sample.lease is not None:
                sample.lease.drop([sample.index], tell=True)
            ended.append(sample.finished("cancelled", "", refused=False))
        return ended

    def forget_homes(self) -> None:
        """Forgets which sampler holds the keys of which prompts."""
        self._homes.clear()

    # The samplers' side.

    def join(self, name: str, url: str, slots: int, now: float) -> int:
        """Admits a sampler; one of the same name has ended. Returns its epoch."""
        if name in self.members:
            self.leave(name, "another sampler of this name has joined")
        epoch = next(self.numbers)
        self.members[name] = Member(name, url, slots, epoch, now)
        self.counts["joins"] += 1
        self.happened.append(("join", name, f"{slots} slots"))
        return epoch

    def leave(self, name: str, why: str) -> None:
        """Removes a sampler; its samples wait for others with the tokens they have."""
        member = self.members.pop(name, None)
        if member is None:
            return
        for lease in list(member.leases.values()):
            self._reclaim(lease, list(lease.samples), tell=False)
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
        ready = frozenset(news.ready) - member.refused.keys()
        if ready and ready != member.ready:
            self.happened.append(("ready", name, news.doing))
        member.ready = ready
        running = min(member.running, member.slots)
        for each in news.progress:
            self._advance(member, each)
        tokens = sum(len(each.tokens) for each in news.progress)
        if tokens and running:
            self._measure(member, tokens / running, now)

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
        while member.orders and member.orders[0][0] <= acknowledged:
            member.orders.popleft()
        if not self.held:
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

    # What samples do.

    def _advance(self, member: Member, told: Progress) -> None:
        """Adds tokens to a sample."""
        lease = member.leases.get(told.lease)
        if lease is None or told.index not in lease.samples:
            self.counts["stale_news"] += 1
            return
        sample = lease.samples[told.index]
        known = len(sample.tokens) - lease.before[told.index]
        versions = told.tokens.versions
        if told.start != known or (versions != sample.policy.version).any():
            self._fail(
                member,
                f"lease {told.lease}, sample {told.index}: told tokens from "
                f"{told.start} on, of versions {sorted({*versions.tolist()})}; known "
                f"are {known}, of version {sample.policy.version}",
            )
        sample.tokens = sample.tokens + told.tokens
        if told.alternatives is not None:
            before = sample.alternatives
            new = told.alternatives
            sample.alternatives = new if before is None else before + new
        if told.finish_reason is None:
            return
        lease.drop([told.index], tell=False)
        if told.finish_reason == "cancelled":
            # The sampler gave it up.
            self._waiting[sample.id] = sample
            return
        del self._samples[sample.id]
        self._finished.append(
            sample.finished(told.finish_reason, told.error, told.refused)
        )

    def _fail(self, member: Member, why: str) -> None:
        self.leave(member.name, why)
        raise UnknownSamplerError(f"sampler {member.name}: {why}; join again")

    def _reclaim(self, lease: _Lease, indices: Sequence[int], *, tell: bool) -> None:
        """Lets samples of a lease wait for another sampler."""
        self.counts["takeovers"] += len(indices)
        for sample in lease.drop(indices, tell=tell):
            self._waiting[sample.id] = sample

    # Who gets which.

    def _grant(self, member: Member, now: float) -> None:
        """Grants a sampler its share of what waits."""
        if not self._waiting and member.ready and not member.running:
            self._relieve(member)
        waiting = [s for s in self._waiting.values() if s.policy.digest in member.ready]
        if not waiting:
            return
        count = min(member.limit, self._share(member, len(waiting))) - member.running
        if count <= 0:
            return
        chosen = list[_Sample]()
        for part in self._prompts(member, waiting):
            room = count - len(chosen)
            if room <= 0:
                break
            # The samples of a prompt stay together where they have room.
            if len(part) <= room or not chosen:
                chosen += part[:room]
        if not member.running:
            member.counted = now
        for run in _runs(chosen):
            self._lease(member, run)

    def _prompts(
        self, member: Member, waiting: Sequence[_Sample]
    ) -> list[list[_Sample]]:
        """The waiting samples by prompt, those first that the sampler had before."""
        parts = dict[int, list[_Sample]]()
        for sample in waiting:
            parts.setdefault(sample.request.prompt_id, []).append(sample)

        def place(part: list[_Sample]) -> int:
            home = self._homes.get(part[0].request.prompt_id)
            if home == member.name:
                return 0
            other = self.members.get(home) if home is not None else None
            free = other is not None and other.running < other.limit
            return 2 if free else 1

        return sorted(parts.values(), key=place)

    def _share(self, member: Member, waiting: int) -> int:
        """The samples that a sampler should have, by the speeds of all."""
        # One that has sampled before is about to be ready for the next policy too.
        able = [each for each in self.members.values() if each.ready or each.pace > 0]
        paces = [each.pace for each in able if each.pace > 0]
        usual = sum(paces) / len(paces) if paces else 1.0

        def speed(each: Member) -> float:
            return each.slots * (each.pace if each.pace > 0 else usual)

        total = waiting + sum(each.running for each in able)
        return math.ceil(total * speed(member) / sum(map(speed, able)))

    def _relieve(self, idle: Member) -> None:
        """Takes samples back from the sampler that is furthest behind an idle one."""

        def late(each: Member) -> list[tuple[_Lease, int]]:
            found = [
                (lease, index)
                for lease in each.leases.values()
                for index, sample in lease.samples.items()
                if sample.policy.digest in idle.ready
            ]
            if each.pace < SLOW * idle.pace:
                kept = int(len(found) * each.pace / (each.pace + idle.pace))
                return found[kept:]
            excess = max(0, each.running - each.slots)
            fresh = [(lease, i) for lease, i in found if not lease.begun(i)]
            return fresh[len(fresh) - min(excess, len(fresh)) :]

        others = [each for each in self.members.values() if each is not idle]
        moved = max(map(late, others), key=len, default=[])
        for lease, index in moved[: idle.limit]:
            self.happened.append(("move", lease.member.name, f"to {idle.name}"))
            self._reclaim(lease, [index], tell=True)

    def _lease(self, member: Member, run: Sequence[_Sample]) -> None:
        """Grants samples of one prompt with consecutive indices."""
        number, first = next(self.numbers), run[0]
        if len(first.tokens):
            request = first.request.rest(first.index, first.tokens.ids.tolist())
        else:
            request = first.request.some(first.index, len(run))
        lease = _Lease(number, member, {}, {})
        for sample in run:
            sample.lease = lease
            lease.samples[sample.index] = sample
            lease.before[sample.index] = len(sample.tokens)
            del self._waiting[sample.id]
        member.leases[number] = lease
        self._homes[first.request.prompt_id] = member.name
        member.order(Grant(number, first.policy, first.job, request))

    def _measure(self, member: Member, tokens: float, now: float) -> None:
        """Measures a sampler's speed by the tokens of each of its samples."""
        passed = now - member.counted
        if passed > 0:
            pace = tokens / passed
            before = pace if math.isnan(member.pace) else member.pace
            member.pace = NEWEST * pace + (1 - NEWEST) * before
        member.counted = now


def _runs(samples: Sequence[_Sample]) -> list[list[_Sample]]:
    """Cuts samples into runs of one prompt that have no tokens, or one that has."""
    runs = list[list[_Sample]]()
    for sample in samples:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.request is sample.request
            and last.index + 1 == sample.index
            and not len(last.tokens)
            and not len(sample.tokens)
        ):
            runs[-1].append(sample)
        else:
            runs.append([sample])
    return runs
