"""A trainer's hub and samplers in threads of one process, over real sockets."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.fleet.app import hub_app, relay_app
from jaxrl_post.fleet.client import TrainerClient
from jaxrl_post.fleet.follower import Follower
from jaxrl_post.fleet.hub import Hub
from jaxrl_post.fleet.image import Image
from jaxrl_post.fleet.lockstep import Tick
from jaxrl_post.fleet.orders import PolicyVersion
from jaxrl_post.fleet.probe import ProbeAnswers, ProbeRows, ask
from jaxrl_post.fleet.remote import RemoteFleet, RemoteSamplers
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import Completion, Engine, EngineConfig, Request
from jaxrl_post.serve.threads import serving
from tests import tiny

__all__ = ["Sampler", "Trainer", "alone", "same"]

# Seconds within which anything happens, on a machine that does much else.
PATIENCE_S = 60.0
# Samples take several bursts, and more samples wait than decode.
SIZES = EngineConfig(
    num_slots=4,
    max_prompt_tokens=8,
    max_tokens=12,
    steps_per_call=4,
    prefill_tokens=16,
    max_stop_ids=2,
    exact=8,
)
VOCAB = tiny.CONFIG.vocab_size
ROWS = ProbeRows.make(VOCAB, 4, 4, 1.0)


def engine() -> Engine:
    return Engine(tiny.CONFIG, SIZES, seed=0)


@functools.cache
def params(seed: int):
    return tiny.params(seed=seed)


@functools.cache
def answers(seed: int) -> ProbeAnswers:
    """The answers to the probe under `params(seed)`."""
    found = ask(Published(engine(), params(seed), 0), ROWS, VOCAB)
    return ProbeAnswers(found, (), exact=True)


def alone(version: int, seed: int, requests: Sequence[Request]) -> list[Completion]:
    """The samples as one engine draws them, by prompt and index."""
    sampler, done = Published(engine(), params(seed), version), list[Completion]()
    for request in requests:
        sampler.submit(request)
    while sampler.busy:
        sampler.dispatch()
        done += sampler.collect()
    return _sorted(done)


def same(one: Completion, other: Completion) -> bool:
    """Whether two samples are equal to the last bit."""
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("prompt_id", "sample_index", "finish_reason")
    ) and all(
        getattr(one.tokens, name).tobytes() == getattr(other.tokens, name).tobytes()
        for name in ("ids", "logprobs", "versions")
    )


class Trainer:
    """A hub that serves at a port."""

    def __init__(
        self,
        port: int,
        *,
        first: int = 1,
        key: str | None = None,
        silence_s: float = 0.5,
    ) -> None:
        self.told = list[tuple[str, str, str]]()
        self.hub = Hub(
            welcome=b"",
            refusal=lambda facts: "",
            first=first,
            wait_s=PATIENCE_S,
            silence_s=silence_s,
            tell=lambda *told: self.told.append(told),
        )
        self._stack = contextlib.ExitStack()
        app = hub_app(self.hub, key)
        self.url, loop = self._stack.enter_context(
            serving(app, "127.0.0.1", port, name="hub")
        )
        self.hub.attach(loop)

    def publish(self, version: int, seed: int) -> RemoteSamplers:
        """Publishes `params(seed)` as a version."""
        leaves = jax.tree_util.tree_flatten_with_path(params(seed))[0]
        arrays = [
            (
                jax.tree_util.keystr(path),
                [(tuple((0, n) for n in leaf.shape), np.asarray(leaf))],
            )
            for path, leaf in leaves
        ]
        extra = answers(seed).to_json()
        made = self.hub.catalogue.add(version, arrays, extra=extra)
        self.hub.published()
        policy = Future[PolicyVersion]()
        policy.set_result(PolicyVersion(version, made.digest))
        fleet = RemoteFleet(self.hub, lambda request: None)
        return RemoteSamplers(fleet, version, policy)

    def sample(
        self,
        samplers: RemoteSamplers,
        requests: Sequence[Request],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[Completion]:
        """Has requests sampled; calls `meanwhile` again and again."""
        samplers.renew()
        done, end = list[Completion](), time.monotonic() + PATIENCE_S
        for request in requests:
            samplers.submit(request)
        while samplers.busy:
            meanwhile()
            done += samplers.collect()
            assert time.monotonic() < end, (self.told[-20:], self.hub.leases.members)
        return _sorted(done)

    def close(self, why: str = "") -> None:
        """Ends; with a reason the samplers end too."""
        if why:
            self.hub.end(why)
        self._stack.close()


class Sampler:
    """A follower in a thread, with an engine of its own.

    Args:
        name: of the sampler.
        url: of the trainer, or of the relay of the sampler's process 0.
        key: that the trainer asks for.
        together: of a sampler of several processes.
        leads: whether it is process 0.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        key: str | None = None,
        together: Callable[[Tick], Tick] | None = None,
        leads: bool = True,
    ) -> None:
        self.lines = list[str]()
        self._engine, self._stop = engine(), threading.Event()
        self.follower = Follower(
            name=name,
            connect=functools.partial(TrainerClient, lambda: url, key),
            facts={"slots": SIZES.num_slots},
            opened=self._opened,
            rows=ROWS,
            vocab=VOCAB,
            away_s=PATIENCE_S,
            say=self.lines.append,
            together=together,
            leads=leads,
        )
        self.error: BaseException | None = None
        self._stack = contextlib.ExitStack()
        app = relay_app(
            self.follower.payload,
            self.follower.state,
            None,
            expected=self.follower.expects,
            manifest_of=self.follower.manifest,
        )
        self.relay, _ = self._stack.enter_context(
            serving(app, "127.0.0.1", 0, name="relay")
        )
        self.follower.facts = {**self.follower.facts, "url": self.relay}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tells it to end."""
        self._stop.set()

    def close(self) -> None:
        """Waits for its end."""
        self.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), self.lines
        self._stack.close()

    def _run(self) -> None:
        try:
            self.follower.run(self._stop.is_set)
        except BaseException as error:
            self.error = error

    def _opened(self, image: Image, version: int) -> Published:
        def array(path, leaf):
            host = image.array(jax.tree_util.keystr(path))
            return jnp.asarray(host, leaf.dtype)

        tree = jax.tree_util.tree_map_with_path(array, params(0))
        return Published(self._engine, tree, version)


def _sorted(done: Sequence[Completion]) -> list[Completion]:
    return sorted(done, key=lambda each: (each.prompt_id, each.sample_index))
