"""A trainer, its samplers and the network between them, in virtual time.

The state machines are the library's. The network loses, repeats, delays and reorders
messages; the threads and sockets of `hub.py` and `follower.py` are written here as
plain events, with the same promises: a sampler has one request for orders open, and
tells its news one after the other, each until it was heard.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxrl_post.fleet import wire
from jaxrl_post.fleet.leases import Leases, UnknownSamplerError
from jaxrl_post.fleet.orders import Grant, News, Order, PolicyVersion, Progress
from jaxrl_post.fleet.worker import OrderWorker
from jaxrl_post.sampler.requests import Completion, Request, SampleId
from tests.fleet.drawing import Engine, Stubborn, same, undisturbed

__all__ = ["Job", "Network", "Node", "Trainer", "check_whole"]

# Seconds for which a request for orders is held, and after which one is sent again.
HOLD_S, AGAIN_S = 1.0, 1.5
# A sample is moved fewer times, by a sampler that is twice as fast, then four times ...
MOST_MOVES = 8


@dataclass
class Network:
    """Events in virtual time, and messages that may go wrong.

    Attributes:
        random: draws what happens to a message.
        lost: share of messages that are lost.
        repeated: share of messages that come twice.
        delay_s: most seconds that a message takes; they are drawn one by one.
        written: whether messages pass through `wire`.
    """

    random: random.Random
    lost: float = 0.0
    repeated: float = 0.0
    delay_s: float = 0.01
    written: bool = False
    now: float = 0.0
    _events: list[tuple[float, int, Callable[[], Any]]] = field(default_factory=list)
    _order: Any = field(default_factory=itertools.count)

    def after(self, seconds: float, call: Callable[[], Any]) -> None:
        """Calls later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call))

    def send(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Calls at the other side: later, twice or never."""
        for _ in range(2 if self.random.random() < self.repeated else 1):
            if self.random.random() >= self.lost:
                delay = self.random.random() * self.delay_s
                self.after(delay, partial(call, *arguments))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """Lets events happen until a time, or until `done` says so."""
        while self._events and self._events[0][0] <= until and not done():
            self.now, _, call = heapq.heappop(self._events)
            call()


@dataclass
class Job:
    """Work of a trainer: requests that one policy samples."""

    policy: PolicyVersion
    requests: Sequence[Request]


@dataclass
class Trainer:
    """Submits jobs one after the other; knows what must come back.

    Attributes:
        network: to the samplers.
        jobs: that are left.
        silence_s: after which a sampler is given up.
        overlap: whether a job begins before the one before has ended.
    """

    network: Network
    jobs: list[Job]
    silence_s: float = 3.0
    overlap: bool = False
    leases: Leases = field(init=False)
    # The request and the policy of each sample that has not ended.
    due: dict[SampleId, tuple[Request, PolicyVersion]] = field(default_factory=dict)
    ended: list[Completion] = field(default_factory=list)
    # When each sample ended.
    times: list[float] = field(default_factory=list)
    # Policies that samplers should have.
    wanted: list[PolicyVersion] = field(default_factory=list)
    published: int = 0
    _number: int = 0
    _starts: int = 0
    _open: dict[str, Callable[[], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start()
        self._tick()

    @property
    def done(self) -> bool:
        """Whether all samples of all jobs have ended."""
        return not (self.jobs or self.due)

    def start(self) -> None:
        """Starts, or starts again: nothing is known of samplers, and no tokens."""
        self._starts += 1
        numbers = itertools.count(self._starts * 10**9)
        self.leases = Leases(self.silence_s, numbers=numbers)
        self._open.clear()
        due, self.due = self.due, {}
        for (_, index), (request, policy) in due.items():
            self.submit(request.some(index, 1), policy)
        self.begin()

    def begin(self) -> None:
        """Begins the next job, if it is time."""
        if self.jobs and (not self.due or self.overlap):
            job, self._number = self.jobs.pop(0), self._number + 1
            if not self.due:
                self.wanted.clear()
            self.wanted.append(job.policy)
            self.published += 1
            self.leases.forget_homes()
            for request in job.requests:
                self.submit(request, job.policy)
        self.wake()

    def submit(self, request: Request, policy: PolicyVersion) -> None:
        """Submits samples of the job that was begun last."""
        self.leases.submit(request, policy, self._number)
        for index in range(request.num_samples):
            name = request.prompt_id, request.first_sample + index
            self.due[name] = request, policy

    def cancel(self, samples: Sequence[SampleId], again: str) -> None:
        """Cancels samples; draws them again from the beginning, or where they were."""
        self.collect()
        for each in self.leases.cancel(samples):
            name = each.prompt_id, each.sample_index
            request, policy = self.due.pop(name)
            whole = undisturbed(request, each.sample_index, policy.digest, 0)
            count = len(each.tokens)
            assert each.finish_reason == "cancelled"
            assert each.tokens.ids.tolist() == whole.tokens.ids[:count].tolist()
            assert set(each.tokens.versions.tolist()) <= {policy.version}
            if again == "anew":
                self.submit(request.some(each.sample_index, 1), policy)
            elif again == "on" and count < request.sampling.max_tokens:
                rest = request.rest(each.sample_index, each.tokens.ids.tolist())
                self.submit(rest, policy)
        self.wake()

    def collect(self) -> None:
        """Takes what has ended; checks that it is what must come."""
        for each in self.leases.take():
            name = each.prompt_id, each.sample_index
            assert name in self.due, f"{name} ended twice, or after it was cancelled"
            request, policy = self.due.pop(name)
            whole = undisturbed(
                request, each.sample_index, policy.digest, policy.version
            )
            if each.error:
                assert each.finish_reason == "failed"
            else:
                assert same(each, whole), f"{each} is not {whole}"
            self.ended.append(each)
            self.times.append(self.network.now)
        if not self.due:
            self.begin()

    def wake(self) -> None:
        """Lets the requests that are held look again."""
        self.leases.changed = False
        found, self._open = self._open, {}
        for look in found.values():
            look()

    def stir(self) -> None:
        """Lets them look soon, if something has changed for them."""
        if self.leases.changed:
            self.leases.changed = False
            self.network.after(0.0, self.wake)

    def _tick(self) -> None:
        self.leases.expire(self.network.now)
        self.collect()
        self.stir()
        check_whole(self.leases)
        self.network.after(0.7, self._tick)

    # Called by the samplers.

    def join(self, node: "Node") -> None:
        """Admits a sampler."""
        epoch = self.leases.join(node.name, "", node.slots, self.network.now)
        self.network.send(node.joined, epoch)
        self.wake()

    def hear(self, node: "Node", epoch: int, news: News) -> None:
        """Takes news."""
        try:
            if self.network.written:
                told = wire.unpack(wire.pack(wire.write_news(news)))
                news = wire.read_news(told)
            self.leases.hear(node.name, epoch, news, self.network.now)
        except UnknownSamplerError:
            self.network.send(node.unknown, epoch)
            return
        self.network.send(node.heard, epoch, news.number)
        self.collect()
        self.stir()

    def orders(self, node: "Node", epoch: int, acknowledged: int, known: int) -> None:
        """Answers once there are orders, or after a while."""
        end = self.network.now + HOLD_S

        def look() -> None:
            now = self.network.now
            try:
                found = self.leases.orders(node.name, epoch, acknowledged, now)
                member = self.leases.member(node.name, epoch)
            except UnknownSamplerError:
                self.network.send(node.unknown, epoch)
                return
            self.stir()
            if not (found or known != self.published or now >= end):
                member.present = True
                self._open[node.name] = look
                self.network.after(end - now, give_up)
                return
            member.present = False
            if self.network.written:
                found = wire.read_orders(
                    wire.unpack(wire.pack(wire.write_orders(found)))
                )
            wanted = {each.digest for each in self.wanted}
            self.network.send(node.ordered, epoch, found, wanted, self.published)

        def give_up() -> None:
            if self._open.get(node.name) is look:
                del self._open[node.name]
                look()

        look()

    def lost(self, name: str, epoch: int | None) -> None:
        """A connection broke."""
        if epoch is not None:
            self.leases.lost(name, epoch, "its connection broke")
            self.wake()


def check_whole(leases: Leases) -> None:
    """Checks that each sample waits or is drawn by one sampler, and that this is known.

    A sampler draws one work at a time.
    """
    found = list[int]()
    for work, queue in leases._queues.items():
        waiting = [each for _, part in queue.prompts(lambda _: 0) for each in part]
        assert len(waiting) == queue.count
        assert all(each.work == work and not each.lease for each in waiting)
        found += map(id, waiting)
    assert {each.epoch: each for each in leases.members.values()} == leases._epochs
    for member in leases.members.values():
        assert len({each.work for each in member.samples.values()}) < 2
        assert member.room >= 0
        for (lease, index), sample in member.samples.items():
            assert (lease, index) == (sample.lease, sample.index)
            assert sample.epoch == member.epoch
            found.append(id(sample))
    assert sorted(found) == sorted(map(id, leases._samples.values()))
    assert all(each.moves < MOST_MOVES for each in leases._samples.values())


@dataclass
class Node:
    """A sampler: its engine's turns, its requests for orders and its news.

    Attributes:
        network: to the trainer.
        trainer: at the other end.
        name: unique among samplers that live.
        pace: bursts a second.
        worker: carries out the orders.
        refuses: digests of the policies that it never serves.
        stage_s: most seconds until it has a policy that is wanted.
    """

    network: Network
    trainer: Trainer
    name: str
    pace: float
    worker: OrderWorker | Stubborn
    slots: int
    steps: int = 2
    refuses: frozenset[str] = frozenset()
    stage_s: float = 0.5
    alive: bool = True
    # Until when its messages are not let through.
    away_until: float = 0.0
    epoch: int | None = None
    # Number of tokens that it has drawn.
    drawn: int = 0
    grants: list[Grant] = field(default_factory=list)
    _acknowledged: int = 0
    _known: int = 0
    _number: int = 0
    _progress: list[Progress] = field(default_factory=list)
    _news: News | None = None
    _changed: bool = True
    _asked: int = 0
    _turning: bool = False
    _staging: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._join()

    # To the trainer.

    def _send(self, call: Callable[..., None], *arguments: Any) -> None:
        if self.network.now >= self.away_until:
            self.network.send(call, self, *arguments)

    def _join(self) -> None:
        if self.alive and self.epoch is None:
            self._send(lambda node: self.trainer.join(node))
            self.network.after(AGAIN_S, self._join)

    def _ask(self) -> None:
        """Asks for orders, again and again until there is an answer."""
        self._asked += 1
        asked, epoch = self._asked, self.epoch

        def ask() -> None:
            if self.alive and asked == self._asked and epoch == self.epoch:
                arguments = epoch, self._acknowledged, self._known
                self._send(self.trainer.orders, *arguments)
                self.network.after(HOLD_S + AGAIN_S, ask)

        ask()

    def _tell(self) -> None:
        """Tells what is new, unless earlier news have not been heard."""
        if self.epoch is None or self._news is not None or not self._changed:
            return
        self._changed = False
        self._number += 1
        told, self._progress = self._progress, []
        ready = tuple(self.worker.policies)
        refused = dict.fromkeys(self.refuses, "it is wrong")
        news = self._news = News(self._number, "", ready, refused, told)
        epoch = self.epoch

        def tell() -> None:
            if self.alive and self._news is news and self.epoch == epoch:
                self._send(self.trainer.hear, epoch, news)
                self.network.after(AGAIN_S, tell)

        tell()

    # From the trainer.

    def _hears(self, epoch: int) -> bool:
        here = self.network.now >= self.away_until
        return self.alive and here and epoch == self.epoch

    def joined(self, epoch: int) -> None:
        """It was admitted."""
        if not self.alive or self.epoch is not None:
            return
        self.epoch, self._acknowledged, self._number, self._known = epoch, 0, 0, 0
        self._progress, self._news, self._changed = [], None, True
        self._tell()
        self._ask()

    def unknown(self, epoch: int) -> None:
        """It must join again."""
        if self._hears(epoch):
            self.epoch, self._news = None, None
            self.worker.reset()
            self._join()

    def heard(self, epoch: int, number: int) -> None:
        """The trainer has its news."""
        if self._hears(epoch) and self._news and self._news.number == number:
            self._news = None
            self._tell()

    def ordered(
        self,
        epoch: int,
        orders: list[tuple[int, Order]],
        wanted: set[str],
        known: int,
    ) -> None:
        """Takes orders."""
        if not self._hears(epoch):
            return
        for number, order in orders:
            if number > self._acknowledged:
                assert number == self._acknowledged + 1, "an order is missing"
                self._acknowledged = number
                self.worker.order(order)
                if isinstance(order, Grant):
                    self.grants.append(order)
        self._known = max(self._known, known)
        self._stage(wanted)
        self._ask()
        self._turn()

    # Its engine.

    def _stage(self, wanted: set[str]) -> None:
        for digest in wanted - self.worker.policies.keys() - self._staging:
            if digest not in self.refuses:
                self._staging.add(digest)
                wait = self.network.random.random() * self.stage_s
                self.network.after(wait, partial(self._staged, digest))
        for digest in self.worker.policies.keys() - wanted - self.worker.needed:
            del self.worker.policies[digest]
            self._changed = True

    def _staged(self, digest: str) -> None:
        self._staging.discard(digest)
        if self.alive:
            # An earlier version may have had the same bytes.
            engine = Engine(digest, 0, self.slots, self.steps)
            self.worker.policies[digest] = engine  # type: ignore[assignment]
            self._changed = True
            self._tell()

    def _turn(self) -> None:
        if self._turning or not self.worker.busy:
            return
        self._turning = True
        self.network.after(1 / self.pace, self._burst)

    def _burst(self) -> None:
        self._turning = False
        if not self.alive:
            return
        progress = self.worker.step()
        self.drawn += sum(len(each.tokens) for each in progress)
        if self.epoch is not None and progress:
            self._progress += progress
            self._changed = True
            self._tell()
        self._turn()
