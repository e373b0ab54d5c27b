"""A sampler that has joined, as the trainer knows it."""

import math
from collections import deque
from dataclasses import dataclass, field

from jaxrl_post.fleet.orders import Order
from jaxrl_post.fleet.samples import Sample, Work

__all__ = ["Member", "member_of"]

# Samples that a sampler is granted in addition to those that it decodes at once, as a
# share of these: the next ones wait at the sampler, not a message away.
AHEAD = 0.25
# Seconds after which a measurement of a sampler's speed counts 1/e of a new one. One
# that has told nothing for so long counts as half as fast as before.
MEMORY_S = 10.0


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
        samples: that it draws, by lease and index, in the order of its orders.
        orders: that it has not acknowledged, with their numbers.
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
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    orders: deque[tuple[int, Order]] = field(default_factory=deque)
    _ordered: int = 0
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
        """What it samples; None for nothing."""
        for sample in self.samples.values():
            return sample.work
        return None

    @property
    def measured(self) -> bool:
        """Whether it has told tokens."""
        return self._seconds > 0

    def can(self, work: Work) -> bool:
        """Whether it could sample some work now."""
        return work.policy.digest in self.ready and self.fits(work)

    def fits(self, work: Work) -> bool:
        """Whether some work is what it samples: it does one at a time."""
        return self.work in (None, work)

    def order(self, order: Order) -> None:
        """Adds an order."""
        self._ordered += 1
        self.orders.append((self._ordered, order))

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
        passed = max(0.0, now - self._counted) if self.samples else 0.0
        if not self.measured:
            return usual * MEMORY_S / (MEMORY_S + passed)
        return self._tokens / (self._seconds + passed)


def member_of(name: str, epoch: int) -> str:
    """Names a sampler from its joining until it leaves."""
    return f"{name}/{epoch}"
