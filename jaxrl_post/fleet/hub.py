"""The trainer's side of samplers in other processes: their leases and their weights.

The trainer's threads and the handlers of requests share one lock. A sampler always has
one request for orders open; it is held until there are some. So a sampler whose process
dies is noticed when its connection breaks, not when its lease runs out.
"""

import asyncio
import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.fleet.catalogue import Catalogue
from jaxrl_post.fleet.holders import Answer, Holders
from jaxrl_post.fleet.leases import Leases
from jaxrl_post.fleet.ledger import member_of
from jaxrl_post.fleet.manifest import Manifest
from jaxrl_post.fleet.orders import News, Order, PolicyVersion
from jaxrl_post.rollout.collector import RolloutTimeoutError
from jaxrl_post.sampler.requests import Completion, Request, SampleId, Unfinished

__all__ = ["FleetError", "Hub", "NameTakenError"]

# Most seconds for which a request for orders is held.
HOLD_S = 1.0
# Seconds for which too few samplers are ready before the user is told.
SHORT_S = 10.0
# Seconds for which a trainer that is told to end waits for samplers that have joined:
# they may be about to have the version that its last step needs.
ENDING_S = 60.0
# Seconds for the samplers to hear that a run is over.
FAREWELL_S = 2.0


class FleetError(RolloutTimeoutError):
    """Too few samplers were ready for too long."""


class NameTakenError(RuntimeError):
    """A sampler of this name is alive; another one must have another name."""


@dataclass
class Hub:
    """Samplers that have joined, and what they are to do.

    Attributes:
        welcome: what a sampler needs to know before it can join, as `wire.pack` has it.
        refusal: says why a sampler with such facts may not join; "" if it may.
        first: samplers that must be ready before the first sample is drawn, >= 1.
        least: samplers that must be ready afterwards, >= 1; with fewer the trainer
            waits.
        wait_s: seconds for which it waits.
        silence_s: seconds without a word after which a sampler is given up.
        should_stop: whether the run is to end; it then waits for no samplers.
        tell: gets (event, sampler, detail) as it happens, such as a sampler's joining.
    """

    welcome: bytes
    refusal: Callable[[Mapping[str, Any]], str]
    first: int = 1
    least: int = 1
    wait_s: float = 3600.0
    silence_s: float = 5.0
    should_stop: Callable[[], bool] = lambda: False
    tell: Callable[[str, str, str], None] = lambda event, sampler, detail: None
    catalogue: Catalogue = field(default_factory=Catalogue)
    holders: Holders = field(default_factory=Holders)
    # The samplers that have samples.
    _working: set[str] = field(default_factory=set, init=False)
    # The samplers that have asked for payloads, as `member_of` has them.
    _asked: set[str] = field(default_factory=set, init=False)
    # URLs of processes of the trainer, by the payloads that they alone have.
    _owners: dict[str, str] = field(default_factory=dict, init=False)
    # Why the run has ended; "" before.
    ended: str = field(default="", init=False)
    # Bytes of parameters that were sent to samplers.
    sent_bytes: int = field(default=0, init=False)
    leases: Leases = field(init=False)
    _lock: threading.Condition = field(
        default_factory=threading.Condition, init=False, repr=False
    )
    _jobs: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)
    # Number of changes of the list of policies.
    _published: int = field(default=0, init=False)
    _begun: bool = field(default=False, init=False)
    _ending: bool = field(default=False, init=False)
    # Since when too few samplers are ready, and whether the user knows.
    _short_since: float | None = field(default=None, init=False)
    _short_told: bool = field(default=False, init=False)
    # The event loop of the handlers, and what wakes requests that are held.
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        numbers = itertools.count(1 + secrets.randbits(48))
        self.leases = Leases(self.silence_s, held=True, numbers=numbers)

    # The trainer's threads.

    def published(self, owners: Mapping[str, str] = {}) -> None:
        """Tells the samplers that the catalogue has one more version.

        Args:
            owners: where other processes of the trainer serve payloads that are not in
                this one's catalogue, by key.
        """
        with self._lock:
            self._published += 1
            known = {key for key in self._owners if self.catalogue.names(key)}
            self._owners = {key: self._owners[key] for key in known} | dict(owners)
        self._wake()

    def begin(self, policy: PolicyVersion) -> int:
        """Begins a job, wholly sampled by a policy.

        Earlier versions are let go, but for those by which samples are still drawn.

        Returns:
            The job's number.
        """
        with self._lock:
            self.catalogue.retire(int(min(policy.version, self.leases.oldest)))
            self._published += 1
            self.leases.forget_homes()
            job = next(self._jobs)
        self._wake()
        return job

    def ready(self, policy: PolicyVersion, wait_s: float) -> bool:
        """Whether enough samplers are ready; waits a little if they are not.

        Raises:
            FleetError: too few samplers were ready for too long.
        """
        if self._require(policy):
            return True
        with self._changing():
            self._lock.wait(wait_s)
            self.leases.expire(time.monotonic())
        self._report()
        return False

    def submit(self, request: Request, policy: PolicyVersion, job: int) -> None:
        """Queues a request."""
        with self._changing():
            self.leases.submit(request, policy, job)

    def collect(self, policy: PolicyVersion, wait_s: float) -> list[Completion]:
        """Returns samples that have ended; waits a little if there is no news.

        Raises:
            FleetError: too few samplers were ready for too long.
        """
        with self._changing():
            if not self.leases.has_finished and self.leases.busy:
                self._lock.wait(wait_s)
            done = self.leases.take()
            self.leases.expire(time.monotonic())
        self._report()
        self._require(policy)
        return done

    def unfinished(self) -> list[Unfinished]:
        """Returns the tokens so far of the samples that have any."""
        with self._lock:
            return self.leases.unfinished()

    def cancel(self, samples: Sequence[SampleId] | None) -> list[Completion]:
        """Stops samples (all for None); returns what they have."""
        with self._changing():
            return self.leases.take() + self.leases.cancel(samples)

    @property
    def busy(self) -> bool:
        """Whether samples have not ended, or were not collected."""
        with self._lock:
            return self.leases.busy

    def counts(self) -> dict[str, float]:
        """Numbers for the run's metrics."""
        with self._lock:
            members = list(self.leases.members.values())
            counts = self.leases.counts.items()
            found = {f"fleet/{name}": float(count) for name, count in counts}
        # The newest version that any sampler has tried counts.
        for _, digest in reversed(self.catalogue.versions):
            apart = [m.probed[digest] for m in members if digest in m.probed]
            if apart:
                found["mismatch/probe"] = max(apart)
                break
        return {
            "fleet/ready": float(sum(bool(each.ready) for each in members)),
            "fleet/joined": float(len(members)),
            **found,
        }

    def release(self) -> None:
        """Answers the requests that are held, and holds no more; the server ends."""
        self._ending = True
        self._wake()

    def end(self, why: str) -> None:
        """Tells the samplers that the run is over; waits a moment for them to leave."""
        self.ended = why
        self._wake()
        end = time.monotonic() + FAREWELL_S
        with self._lock:
            while self.leases.members and time.monotonic() < end:
                self._lock.wait(0.05)

    def _require(self, policy: PolicyVersion) -> bool:
        """Whether enough samplers are ready; too few are not waited for too long."""
        with self._lock:
            members = list(self.leases.members.values())
            ready = [each for each in members if policy.digest in each.ready]
            needed = self.least if self._begun else self.first
            enough = len(ready) >= needed
            self._begun |= enough
            self.leases.held = not enough
        now = time.monotonic()
        if enough:
            if self._short_since is not None:
                self._wake()
            if self._short_told:
                self.tell("enough", "", f"{len(ready)} are ready")
            self._short_since, self._short_told = None, False
            return True
        states = ", ".join(f"{each.name}: {_state(each, policy)}" for each in members)
        said = (
            f"{len(ready)} of {needed} were ready for version {policy.version} "
            f"({states or 'none has joined'})"
        )
        if self._short_since is None:
            self._short_since = now
        waited = now - self._short_since
        if waited > SHORT_S and not self._short_told:
            self._short_told = True
            self.tell("short", "", f"{said}; waiting up to {self.wait_s:g} s")
        if self.should_stop() and waited > (ENDING_S if members else SHORT_S):
            raise FleetError(
                f"samplers: the run was told to end while {said}. Its last checkpoint "
                "is whole; the same command resumes it"
            )
        if waited > self.wait_s:
            raise FleetError(
                f"samplers: {said}, for {self.wait_s:g} s (--fleet.wait-s). Start some "
                "with python -m launch.serve --follow and this trainer's address. The "
                "last checkpoint is whole; the same command resumes the run"
            )
        return False

    def _report(self) -> None:
        with self._lock:
            happened, self.leases.happened = self.leases.happened, []
        for event, sampler, detail in happened:
            self.tell(event, sampler, detail)

    # The handlers of requests.

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Says in which event loop the handlers run."""
        self._loop = loop

    def join(self, facts: Mapping[str, Any]) -> int:
        """Admits a sampler; returns its epoch.

        Args:
            facts: name, url, slots, and what `refusal` reads.

        Raises:
            ValueError: why it may not join.
            NameTakenError: it may join later, or by another name.
        """
        if why := self.refusal(facts):
            raise ValueError(why)
        # Also when the run is over: its first request for orders is told so.
        name, slots = str(facts["name"]), int(facts["slots"])
        with self._changing():
            self.leases.expire(time.monotonic())
            if name in self.leases.members:
                raise NameTakenError(
                    f"a sampler named {name} has joined and is alive; give this one "
                    f"another --name. One that died gives its name back within "
                    f"{self.silence_s:g} s"
                )
            return self.leases.join(name, str(facts["url"]), slots, time.monotonic())

    def leave(self, name: str, epoch: int, why: str) -> None:
        """Lets a sampler go that says so."""
        with self._changing():
            self.leases.member(name, epoch)
            self.leases.leave(name, why)
            self._notice(name)
            self.holders.leave(member_of(name, epoch))

    def hear(self, name: str, epoch: int, news: News) -> None:
        """Takes the news of a sampler, as `Leases.hear`."""
        with self._changing():
            self.leases.hear(name, epoch, news, time.monotonic())
            self._notice(name)

    async def orders(
        self,
        name: str,
        epoch: int,
        acknowledged: int,
        known: int,
        gone: Callable[[], Any],
    ) -> dict[str, Any]:
        """Returns a sampler's orders, once there are any.

        Args:
            name: of the sampler.
            epoch: of its joining.
            acknowledged: number of the last order that it has.
            known: number of the list of policies that it has.
            gone: coroutine function that returns when the connection breaks.

        Raises:
            UnknownSamplerError: it must join again.
        """
        end = time.monotonic() + HOLD_S
        broken = asyncio.ensure_future(gone())
        try:
            while True:
                changed = self._changed
                now = time.monotonic()
                orders = self._orders(name, epoch, acknowledged, now)
                waits = known == self._published and not (self.ended or self._ending)
                if orders or not waits or now >= end:
                    return self._reply(orders)
                woken = asyncio.ensure_future(changed.wait())
                await asyncio.wait(
                    {woken, broken},
                    timeout=end - now,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                woken.cancel()
                if broken.done():
                    self._lost(name, epoch)
                    return self._reply([])
        finally:
            broken.cancel()
            with self._lock, contextlib.suppress(LookupError):
                member = self.leases.member(name, epoch)
                member.heard, member.present = time.monotonic(), False

    def _orders(
        self, name: str, epoch: int, acknowledged: int, now: float
    ) -> list[tuple[int, Order]]:
        with self._changing():
            self.leases.expire(now)
            orders = self.leases.orders(name, epoch, acknowledged, now)
            self.leases.member(name, epoch).present = True
            self._notice(name)
        return orders

    def _notice(self, name: str) -> None:
        """Tells when a sampler begins to work, and when it has nothing more to do."""
        member = self.leases.members.get(name)
        works = member is not None and member.running > 0
        if works != (name in self._working):
            (self._working.add if works else self._working.discard)(name)
            self.tell("begin" if works else "end", name, "")

    def _reply(self, orders: list[tuple[int, Order]]) -> dict[str, Any]:
        return {
            "orders": orders,
            "policies": [list(each) for each in self.catalogue.versions],
            "known": self._published,
            "ended": self.ended,
        }

    def _lost(self, name: str, epoch: int) -> None:
        with self._changing():
            self.leases.lost(name, epoch, "its connection broke")
            self._notice(name)
            self.holders.leave(member_of(name, epoch))

    def ask(self, key: str, member: str, failed: Collection[str] = ()) -> Answer:
        """Returns where a sampler gets a payload from, as `Holders.ask`.

        A sampler that was given up is neither named nor waited for.
        """
        with self._lock:
            members = list(self.leases.members.values())
        joined = {member_of(each.name, each.epoch) for each in members}
        for gone in self._asked - joined:
            self.holders.leave(gone)
        self._asked = self._asked & joined | {member}
        return self.holders.ask(key, member, failed)

    def owner(self, key: str) -> str | None:
        """Returns the URL of the trainer's process that has a payload, if not this."""
        return self._owners.get(key)

    def manifest(self, digest: str) -> Manifest | None:
        """Returns the manifest of a policy; None if it is gone."""
        for version, each in self.catalogue.versions:
            if each == digest:
                return self.catalogue.manifest(version)
        return None

    def urls(self, holders: Sequence[str]) -> dict[str, str]:
        """Returns where samplers, as `member_of` has them, serve what they hold."""
        with self._lock:
            members = list(self.leases.members.values())
        urls = {member_of(each.name, each.epoch): each.url for each in members}
        # One that has left is asked in vain, and passed over.
        return {holder: urls.get(holder, "") for holder in holders}

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Holds the lock; afterwards all that wait look at what has changed."""
        with self._lock:
            try:
                yield
            finally:
                changed, self.leases.changed = self.leases.changed, False
                self._lock.notify_all()
        if changed:
            self._wake()

    def _wake(self) -> None:
        """Lets the requests that are held look again."""
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._look_again)

    def _look_again(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _state(member: Any, policy: PolicyVersion) -> str:
    if policy.digest in member.refused:
        return f"refused it: {member.refused[policy.digest]}"
    return member.doing or "has joined"
