"""A sampler in a process of its own: it follows a trainer.

The engine runs in the caller's thread. Three others talk: one waits for orders and is
the sign of life, one tells news, one fetches versions while the engine decodes. When
the trainer is away the engine finishes what it has, and the sampler joins again.

Of a sampler of several processes, process 0 does this, and passes versions on to the
others, whose engines follow its ticks (`fleet.lockstep`).
"""

import contextlib
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.fleet.chunks import ChunkError
from jaxrl_post.fleet.client import AwayError, TrainerClient
from jaxrl_post.fleet.image import Image, stage
from jaxrl_post.fleet.leases import UnknownSamplerError
from jaxrl_post.fleet.ledger import member_of
from jaxrl_post.fleet.lockstep import Event, Tick
from jaxrl_post.fleet.manifest import Manifest
from jaxrl_post.fleet.orders import (
    Grant,
    News,
    Order,
    PolicyVersion,
    Progress,
    Revoke,
)
from jaxrl_post.fleet.probe import Examiner, ProbeAnswers, ProbeError, ProbeRows, ask
from jaxrl_post.fleet.worker import OrderWorker
from jaxrl_post.rollout.weights import Published

__all__ = ["Follower", "TrainerGoneError"]

# Seconds between attempts to reach a trainer that is away, the first and the longest.
FIRST_S, LONGEST_S = 0.1, 2.0
# Seconds between two looks for orders, while the engine has nothing to do.
IDLE_S = 0.5
# Attempts to fetch a version that the probe refuses: by deltas, then whole.
ATTEMPTS = 2


class TrainerGoneError(ConnectionError):
    """The trainer was away too long."""


@dataclass(frozen=True)
class _Staged:
    """A version whose arrays are here."""

    policy: PolicyVersion
    image: Image
    answers: ProbeAnswers
    attempt: int
    # None: it is bound when it is tried.
    sampler: Published | None

    @property
    def name(self) -> tuple[str, int]:
        """Digest and attempt."""
        return self.policy.digest, self.attempt


@dataclass
class _Session:
    """A sampler's time with a trainer, from joining to joining again."""

    epoch: int
    acknowledged: int = 0
    number: int = 0
    progress: list[Progress] = field(default_factory=list)


@dataclass
class Follower:
    """Follows a trainer until its run is over.

    Attributes:
        name: of this sampler, unique among the trainer's.
        connect: makes a connection to the trainer, or in other processes than process 0
            to the relay of process 0; called once in each thread.
        facts: what the trainer checks when this sampler joins.
        opened: binds the engine to the arrays of a version; called in a thread, unless
            there are several processes.
        rows: of the probe.
        vocab: number of token ids.
        away_s: seconds for which the trainer may be away.
        say: gets a line for people.
        together: with several processes, makes the tick of all of a process's own.
        leads: whether this process talks to the trainer.
    """

    name: str
    connect: Callable[[], TrainerClient]
    facts: Mapping[str, Any]
    opened: Callable[[Image, int], Published]
    rows: ProbeRows
    vocab: int
    away_s: float = 600.0
    say: Callable[[str], None] = lambda line: None
    together: Callable[[Tick], Tick] | None = None
    leads: bool = True
    # Versions that are here, by digest, the newest last.
    images: dict[str, Image] = field(default_factory=dict, init=False)
    examiner: Examiner = field(default_factory=Examiner, init=False)
    # The version that is being fetched, its digests, and the payloads that are here.
    _coming: tuple[Manifest | None, frozenset[str]] = field(
        default=(None, frozenset()), init=False
    )
    _arriving: dict[str, memoryview] = field(default_factory=dict, init=False)
    ended: str = field(default="", init=False)
    _worker: OrderWorker = field(default_factory=OrderWorker, init=False)
    _inbox: "queue.SimpleQueue[Any]" = field(
        default_factory=queue.SimpleQueue, init=False
    )
    # Versions that are here and not tried, the oldest first.
    _staged: dict[tuple[str, int], _Staged] = field(default_factory=dict, init=False)
    # Digests of the versions that the engine has, or is about to try.
    _opened: set[str] = field(default_factory=set, init=False)
    _refused: dict[str, str] = field(default_factory=dict, init=False)
    _session: _Session | None = field(default=None, init=False)
    # Guards the session, what is wanted, and what is told; notified of changes.
    _lock: threading.Condition = field(
        default_factory=threading.Condition, init=False, repr=False
    )
    _wanted: list[PolicyVersion] = field(default_factory=list, init=False)
    # The versions that were wanted at the last tick, which the engine keeps.
    _kept: Sequence[PolicyVersion] = field(default=(), init=False)
    # Versions to fetch again, and whether whole, by digest.
    _attempts: dict[str, int] = field(default_factory=dict, init=False)
    _doing: str = field(default="starting", init=False)
    # The work of the thread of weights; "" for none.
    _fetching: str = field(default="", init=False)
    _ready: tuple[str, ...] = field(default=(), init=False)
    # As `News.probed`.
    _probed: dict[str, float] = field(default_factory=dict, init=False)
    _changed: bool = field(default=False, init=False)
    _stopped: bool = field(default=False, init=False)
    _error: BaseException | None = field(default=None, init=False)

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Samples for the trainer until its run is over, or `should_stop` says so.

        Raises:
            TrainerGoneError: it was away for `away_s`.
            NotAdmittedError: it does not take this sampler.
        """
        threads = [
            threading.Thread(target=self._guarded, args=(work,), daemon=True, name=name)
            for name, work in (
                ("weights", self._fetch_versions),
                ("orders", self._hear_orders),
                ("news", self._tell_news),
            )[: 3 if self.leads else 1]
        ]
        for thread in threads:
            thread.start()
        try:
            while self._tick(stop=should_stop()):
                if self._error is not None:
                    raise self._error
        finally:
            self._stop(threads, self.ended or "it was stopped")

    def manifest(self, digest: str) -> Manifest | None:
        """Returns the manifest of a version that is here or being fetched, or None."""
        held = [image.manifest for image in [*self.images.values()]]
        found = [each for each in (self._coming[0], *held) if each is not None]
        return next((each for each in found if each.digest == digest), None)

    def expects(self, key: str) -> bool:
        """Whether a payload belongs to the version that is being fetched."""
        return key in self._coming[1]

    def payload(self, key: str) -> bytes | memoryview | None:
        """Returns a payload for other samplers; None if it is not here."""
        if (data := self._arriving.get(key)) is not None:
            return data
        for image in list(self.images.values()):
            if (data := image.payload(key)) is not None:
                return data
        return None

    def state(self) -> dict[str, Any]:
        """Returns the state for people."""
        with self._lock:
            ready = len(self._ready)
            joined = self._session is not None
        return {"status": self._doing, "joined": joined, "versions_ready": ready}

    # The engine's thread.

    def _tick(self, *, stop: bool) -> bool:
        """Takes what has come, tries a version that is new, decodes a burst.

        Returns whether there is another tick.
        """
        worker = self._worker
        # The others wait for process 0.
        wait_s = 0.0
        if self.leads and not (stop or worker.busy):
            wait_s = FIRST_S if self._staged else IDLE_S
        tick = self._come(wait_s, stop=stop)
        if tick.stop:
            return False
        for event in tick.events:
            if event is None:
                worker.reset()
            elif isinstance(event, Grant | Revoke):
                worker.order(event)
            else:
                self._kept = event
                if not self.leads:
                    self._want(event)
        self._let_go()
        fetched = [name for name in tick.fetched if name in self._staged]
        if fetched and worker.empty:
            self._try(self._staged.pop(fetched[0]))
        progress = worker.step()
        doing = "sampling" if worker.busy else "waiting for work"
        if self._fetching:
            doing = f"{doing}, {self._fetching}"
        self._tell(doing, progress)
        return True

    def _come(self, wait_s: float, *, stop: bool) -> Tick:
        events = list[Event]()
        for item in self._news_of_threads(wait_s):
            if isinstance(item, _Staged):
                self._staged[item.name] = item
            else:
                events.append(item)
        own = Tick(tuple(events), tuple(self._staged), stop or bool(self.ended))
        return own if self.together is None else self.together(own)

    def _news_of_threads(self, wait_s: float) -> list[Any]:
        found = list[Any]()
        with contextlib.suppress(queue.Empty):
            found.append(
                self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            )
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def _try(self, staged: _Staged) -> None:
        """Admits a version whose log-probs are the trainer's."""
        digest = staged.policy.digest
        sampler = staged.sampler or self.opened(staged.image, staged.policy.version)
        try:
            found = ask(sampler, self.rows, self.vocab)
            self._probed[digest] = self.examiner.examine(found, staged.answers)
        except ProbeError as error:
            self.say(f"version {staged.policy.version}: {error}")
            with self._lock:
                self._opened.discard(digest)
                if staged.attempt + 1 < ATTEMPTS:
                    self._attempts[digest] = staged.attempt + 1
                else:
                    self._refused[digest] = str(error)
                self._lock.notify_all()
            return
        finally:
            sampler.renew()
        self._worker.policies[digest] = sampler

    def _let_go(self) -> None:
        """Frees the versions that are needed no more, tried or not."""
        wanted = {policy.digest for policy in self._kept}
        stale = [name for name in self._staged if name[0] not in wanted]
        tried = self._worker.policies.keys() - wanted - self._worker.needed
        for name in stale:
            del self._staged[name]
        for digest in tried:
            del self._worker.policies[digest], self._probed[digest]
        with self._lock:
            # A trainer that resumes may want them again.
            self._opened -= tried | {digest for digest, _ in stale}

    def _tell(self, doing: str, progress: list[Progress]) -> None:
        ready = tuple(self._worker.policies)
        with self._lock:
            changed = (doing, ready) != (self._doing, self._ready)
            self._doing, self._ready = doing, ready
            if self._session is not None:
                self._session.progress += progress
            if changed or progress:
                self._changed = True
                self._lock.notify_all()

    def _stop(self, threads: list[threading.Thread], why: str) -> None:
        with self._lock:
            self._stopped = True
            session = self._session
            self._lock.notify_all()
        self._worker.reset()
        if session is not None and not self.ended:
            with (
                contextlib.suppress(AwayError, UnknownSamplerError, RuntimeError),
                contextlib.closing(self.connect()) as trainer,
            ):
                trainer.leave(self.name, session.epoch, why)
        for thread in threads:
            thread.join(LONGEST_S)

    # The other threads.

    def _guarded(self, work: Callable[[TrainerClient], None]) -> None:
        trainer = self.connect()
        try:
            work(trainer)
        except BaseException as error:
            self._error = self._error or error
            self._inbox.put(None)
        finally:
            trainer.close()

    def _hear_orders(self, trainer: TrainerClient) -> None:
        """Joins, and hands orders to the engine; joins again where it must."""
        known, waits = 0, self._waits()
        while not self._stopped:
            try:
                session = self._session
                if session is None:
                    session, known = self._joined(trainer), 0
                reply = trainer.orders(
                    self.name, session.epoch, session.acknowledged, known
                )
                waits = self._waits()
            except UnknownSamplerError as error:
                self.say(str(error))
                self._forget()
                continue
            except AwayError as error:
                self._wait(next(waits), str(error))
                continue
            known = reply.known
            self._take(session, reply.orders, reply.policies)
            if reply.ended:
                self.ended = reply.ended
                with contextlib.suppress(AwayError, UnknownSamplerError):
                    trainer.leave(self.name, session.epoch, "the run is over")
                self._inbox.put(None)
                return

    def _joined(self, trainer: TrainerClient) -> _Session:
        session = _Session(trainer.join({**self.facts, "name": self.name}))
        self.say(f"joined {trainer.url}")
        with self._lock:
            self._session, self._changed = session, True
            # The run may have gone back to a checkpoint: look at each version again.
            self._refused.clear()
            self._lock.notify_all()
        return session

    def _forget(self) -> None:
        """Drops what belongs to the session."""
        with self._lock:
            self._session = None
        self._inbox.put(None)

    def _take(
        self,
        session: _Session,
        orders: list[tuple[int, Order]],
        policies: list[tuple[int, str]],
    ) -> None:
        for number, order in orders:
            if number > session.acknowledged:
                session.acknowledged = number
                self._inbox.put(order)
        wanted = [PolicyVersion(*each) for each in policies]
        if wanted != self._wanted:
            self._inbox.put(tuple(wanted))
            self._want(wanted)

    def _want(self, policies: Sequence[PolicyVersion]) -> None:
        with self._lock:
            self._wanted = list(policies)
            self._lock.notify_all()

    def _tell_news(self, trainer: TrainerClient) -> None:
        """Tells the trainer what is new, until it has heard it."""
        waits = self._waits()
        session: _Session | None = None
        news = News(0)
        while not self._stopped:
            with self._lock:
                if session is not self._session:
                    session, news = self._session, News(0)
                if session is None or not (self._changed or news.number):
                    self._lock.wait(IDLE_S)
                    continue
                if not news.number:
                    self._changed = False
                    session.number += 1
                    told, session.progress = session.progress, []
                    news = News(
                        session.number,
                        self._doing,
                        self._ready,
                        dict(self._refused),
                        told,
                        dict(self._probed),
                    )
            try:
                trainer.news(self.name, session.epoch, news)
                news, waits = News(0), self._waits()
            except UnknownSamplerError:
                # The thread of orders hears it too, and joins again.
                with self._lock:
                    while self._session is session and not self._stopped:
                        self._lock.wait(FIRST_S)
            except AwayError:
                time.sleep(next(waits))

    def _fetch_versions(self, trainer: TrainerClient) -> None:
        """Fetches the versions that are wanted and not here."""
        waits = self._waits()
        while not self._stopped:
            with self._lock:
                policy = self._missing()
                if policy is None:
                    self._lock.wait(IDLE_S)
                    continue
                attempt = self._attempts.get(policy.digest, 0)
                wanted = {each.digest for each in self._wanted}
            self._fetching = f"fetching version {policy.version}"
            try:
                self._fetch(trainer, policy, attempt, wanted)
                self._fetching = ""
                waits = self._waits()
            except (AwayError, ChunkError) as error:
                # A version that is needed no more goes while it is fetched.
                if policy in self._wanted:
                    self._wait(next(waits), f"version {policy.version}: {error}")
                else:
                    waits = self._waits()

    def _missing(self) -> PolicyVersion | None:
        """The oldest version that is wanted, and not here or to be fetched again."""
        for policy in self._wanted:
            if policy.digest in self._refused:
                continue
            if policy.digest not in self._opened or policy.digest in self._attempts:
                return policy
        return None

    def _fetch(
        self,
        trainer: TrainerClient,
        policy: PolicyVersion,
        attempt: int,
        wanted: set[str],
    ) -> None:
        manifest = trainer.manifest(policy.digest)
        held = None
        if not attempt and self.images:
            held = list(self.images.values())[-1]
        session, member = self._session, ""
        if session is not None:
            member = member_of(self.name, session.epoch)
        elif self.leads:
            raise AwayError("this sampler has not joined")

        def get(key: str, size: int) -> bytes:
            return trainer.payload(member, key, size)

        self._coming = manifest, manifest.keys
        try:
            image = stage(
                manifest,
                get,
                held,
                # The same in all processes of this sampler, which fetch in one order.
                seed=zlib.crc32(self.name.encode()),
                arrived=self._arriving.__setitem__,
            )
            if self.leads:
                trainer.flush(member)
        finally:
            self._coming = None, frozenset()
            self._arriving.clear()
        sampler = None
        if self.together is None:
            sampler = self.opened(image, policy.version)
        answers = ProbeAnswers.from_json(manifest.extra)
        for digest in [*self.images]:
            # The last one stays: the next deltas build on it.
            if digest not in wanted and self.images[digest] is not held:
                del self.images[digest]
        self.images.pop(policy.digest, None)
        self.images[policy.digest] = image
        with self._lock:
            self._opened.add(policy.digest)
            if self._attempts.get(policy.digest) == attempt:
                del self._attempts[policy.digest]
        self._inbox.put(_Staged(policy, image, answers, attempt, sampler))

    def _waits(self) -> Iterator[float]:
        """Seconds to wait before each next attempt to reach the trainer.

        Raises:
            TrainerGoneError: it was away too long.
        """
        begin, pause = time.monotonic(), FIRST_S
        while time.monotonic() - begin < self.away_s:
            yield pause
            pause = min(2 * pause, LONGEST_S)
        raise TrainerGoneError(
            f"the trainer did not answer for {self.away_s:g} s (--follow-wait-s)"
        )

    def _wait(self, pause: float, why: str) -> None:
        if pause == FIRST_S:
            self.say(f"{why}; trying again for {self.away_s:g} s")
        time.sleep(pause)
