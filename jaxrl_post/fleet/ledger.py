"""The trainer's ledger: its samples, the queues of waiting ones, and its samplers."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxrl_post.fleet.orders import Order, PolicyVersion, Progress
from jaxrl_post.sampler.requests import (
    Alternatives,
    Completion,
    FinishReason,
    Request,
    SampleId,
)
from jaxrl_post.tokens import Tokens

__all__ = ["Member", "Queue", "Sample", "Work", "member_of"]

# Pieces of tokens that are joined at a time: joining each to all before it would cost
# the square of their number.
JOINED = 32
# Samples that a sampler is granted in addition to those that it decodes at once, as a
# share of these: the next ones wait at the sampler, not a message away.
AHEAD = 0.25
# Seconds after which a measurement of a sampler's speed counts 1/e of a new one. One
# that has told nothing for so long counts as half as fast as before.
MEMORY_S = 10.0


class Work(NamedTuple):
    """The work of an engine at a time: requests of one job, sampled by one policy."""

    policy: PolicyVersion
    job: int


@dataclass(eq=False)
class Sample:
    """A sample, and who draws it.

    Attributes:
        request: what was asked for, for this sample and perhaps others.
        index: among the samples of the prompt.
        work: to which it belongs.
        epoch: of the sampler that draws it or drew it last; 0 for none.
        lease: under which it is drawn; 0 while it waits.
        before: number of tokens that it had when the lease was granted.
        length: number of its tokens.
        moves: how often it was taken from one sampler for another.
    """

    request: Request
    index: int
    work: Work
    epoch: int = 0
    lease: int = 0
    before: int = 0
    length: int = 0
    moves: int = 0
    alternatives: Alternatives | None = None
    _joined: list[Tokens] = field(default_factory=list)
    _pieces: list[Tokens] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.request.sampling.alternatives:
            self.alternatives = Alternatives.none()

    @property
    def id(self) -> SampleId:
        """Prompt id and index."""
        return self.request.prompt_id, self.index

    @property
    def tokens(self) -> Tokens:
        """The tokens so far."""
        return Tokens.concatenate([*self._joined, *self._pieces])

    @property
    def begun(self) -> bool:
        """Whether tokens of it were told under its lease."""
        return self.length > self.before

    def fault(self, told: Progress) -> str:
        """Says why it cannot have sampled this; "" if it can."""
        known, size = self.length - self.before, len(told.tokens)
        if told.start != known:
            return f"told tokens from {told.start} on, {known} are known"
        version, versions = self.work.policy.version, told.tokens.versions
        if (versions != version).any():
            return f"told tokens of versions {np.unique(versions)}, not of {version}"
        others, mine = told.alternatives, self.alternatives
        if size and (others is None) != (mine is None):
            return "told alternatives or not, and was asked otherwise"
        if others is not None and mine is not None and len(others.ids) != size:
            return f"told alternatives of {len(others.ids)} tokens of {size}"
        length, most = self.length + size, self.request.sampling.max_tokens
        if length > most:
            return f"told {length} tokens of at most {most}"
        if length == most and told.finish_reason in (None, "cancelled"):
            return f"told all of {most} tokens, and not that it has ended"
        return ""

    def add(self, told: Progress) -> None:
        """Adds tokens."""
        self.length += len(told.tokens)
        self._pieces.append(told.tokens)
        if len(self._pieces) == JOINED:
            self._joined.append(Tokens.concatenate(self._pieces))
            self._pieces.clear()
        if self.alternatives is not None and told.alternatives is not None:
            self.alternatives += told.alternatives

    def completion(
        self, reason: FinishReason, error: str = "", *, refused: bool = False
    ) -> Completion:
        """Returns it with its tokens so far."""
        return Completion(
            *self.id, self.tokens, reason, error, self.alternatives, refused
        )


@dataclass
class Queue:
    """The samples of some work that wait, prompt by prompt, the first ones first.

    Attributes:
        count: number of the samples.
        since: when a sampler first asked for some; infinity before that.
    """

    count: int = 0
    since: float = float("inf")
    # Epoch of the sampler that drew the last sample of a prompt, and holds its keys.
    _homes: dict[int, int] = field(default_factory=dict)
    # The waiting samples by home (0 for none), prompt and index.
    _parts: dict[int, dict[int, dict[int, Sample]]] = field(default_factory=dict)

    def add(self, sample: Sample) -> None:
        """Adds a sample."""
        prompt, index = sample.id
        home = self._homes.get(prompt, 0)
        self._parts.setdefault(home, {}).setdefault(prompt, {})[index] = sample
        self.count += 1

    def remove(self, sample: Sample) -> None:
        """Removes a sample."""
        prompt, index = sample.id
        home = self._homes.get(prompt, 0)
        del self._parts[home][prompt][index]
        self.count -= 1
        if not self._parts[home][prompt]:
            del self._parts[home][prompt]
            if not self._parts[home]:
                del self._parts[home]

    def draws(self, epoch: int, sample: Sample) -> None:
        """Notes which sampler draws a sample, which waits no more."""
        prompt = sample.request.prompt_id
        before = self._homes.get(prompt, 0)
        self._homes[prompt] = epoch
        if before != epoch and prompt in self._parts.get(before, ()):
            rest = self._parts[before].pop(prompt)
            self._parts.setdefault(epoch, {})[prompt] = rest
            if not self._parts[before]:
                del self._parts[before]

    def forget_homes(self) -> None:
        """Forgets which samplers hold the keys of prompts."""
        waiting = [
            sample
            for prompts in self._parts.values()
            for part in prompts.values()
            for sample in part.values()
        ]
        self.count = 0
        self._homes.clear()
        self._parts.clear()
        for sample in waiting:
            self.add(sample)

    def prompts(
        self, place: Callable[[int], int | None]
    ) -> Iterator[tuple[int, Collection[Sample]]]:
        """Yields the home of a prompt and its waiting samples, prompt by prompt.

        The queue must not change meanwhile.

        Args:
            place: of a home, the least first; None leaves its prompts out.
        """
        places = {home: place(home) for home in self._parts}
        able = [(at, home) for home, at in places.items() if at is not None]
        for _, home in sorted(able):
            for part in self._parts[home].values():
                yield home, part.values()


@dataclass(eq=False)
class Member:
    """A sampler that has joined.

    Attributes:
        name: unique among the samplers.
        url: where other samplers fetch what it holds; "" for nowhere.
        slots: samples that it decodes at once.
        epoch: number of its joining.
        heard: when it was last heard.
        present: whether a connection of it is held open.
        number: of its last news.
        doing: its state, for people.
        ready: digests of the policies by which it can sample.
        refused: digests of policies that it refused, and why.
        probed: as `News.probed`.
        samples: that it draws, by lease and index, in the order of its orders.
        orders: that it has not acknowledged, with their numbers.
        ordered: number of all its orders.
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
    probed: dict[str, float] = field(default_factory=dict)
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    orders: deque[tuple[int, Order]] = field(default_factory=deque)
    ordered: int = 0
    # Tokens of one of its samples, and the seconds that they took.
    _tokens: float = 0.0
    _seconds: float = 0.0
    # Until when these are counted.
    _counted: float = math.nan

    @property
    def running(self) -> int:
        """Number of its samples."""
        return len(self.samples)

    @property
    def room(self) -> int:
        """Number of samples that it may be granted now."""
        return self.slots + max(1, int(AHEAD * self.slots)) - self.running

    @property
    def free(self) -> int:
        """Number of samples that it could begin at once."""
        return self.slots - self.running

    @property
    def work(self) -> Work | None:
        """The work to which its samples belong; None if it has none."""
        for sample in self.samples.values():
            return sample.work
        return None

    @property
    def newest(self) -> list[Sample]:
        """Its samples, the last ones first."""
        return list(self.samples.values())[::-1]

    @property
    def measured(self) -> bool:
        """Whether it has told tokens."""
        return self._seconds > 0

    def can(self, work: Work) -> bool:
        """Whether it could sample some work now."""
        return work.policy.digest in self.ready and self.fits(work)

    def fits(self, work: Work) -> bool:
        """Whether it has no samples of other work: it does one at a time."""
        return self.work in (None, work)

    def order(self, order: Order) -> None:
        """Adds an order."""
        self.ordered += 1
        self.orders.append((self.ordered, order))

    def acknowledge(self, number: int) -> None:
        """Drops the orders up to a number."""
        while self.orders and self.orders[0][0] <= number:
            self.orders.popleft()

    def begin(self, now: float) -> None:
        """Counts time from now on, if it had nothing to do."""
        if not self.samples:
            self._counted = now

    def count(self, tokens: int, samples: int, now: float) -> None:
        """Counts the tokens that its samples have sampled since the last call."""
        passed = max(0.0, now - self._counted)
        kept = math.exp(-passed / MEMORY_S)
        self._tokens = self._tokens * kept + tokens / samples
        self._seconds = self._seconds * kept + passed
        self._counted = now

    def pace(self, now: float, usual: float = math.nan) -> float:
        """Tokens a second of each of its samples; less, the longer it tells none.

        Args:
            now: the time.
            usual: the pace of one that has told none so far.
        """
        silent = max(0.0, now - self._counted) if self.samples else 0.0
        pace = self._tokens / self._seconds if self.measured else usual
        return pace * MEMORY_S / (MEMORY_S + silent)


def member_of(name: str, epoch: int) -> str:
    """Names a sampler from its joining until it leaves."""
    return f"{name}/{epoch}"
