"""Samplers whose device work is simulated, behind the real code of samplers apart.

A burst of decoding and an update are timed sleeps. All else is the code of a run: the
trainer's hub and its HTTP server, the followers with their threads, leases, catalogue,
manifests, payloads, probe. All samplers are threads of this process.
"""

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.fleet.app import hub_app, relay_app
from jaxrl_post.fleet.client import TrainerClient
from jaxrl_post.fleet.follower import Follower
from jaxrl_post.fleet.hub import Hub
from jaxrl_post.fleet.image import Image
from jaxrl_post.fleet.probe import IDS, ProbeAnswers, ProbeRows
from jaxrl_post.fleet.remote import RemoteFleet
from jaxrl_post.programs.apart.remote import Remote
from jaxrl_post.programs.build.layouts import SamplerLayout
from jaxrl_post.sampler import Completion, Request
from jaxrl_post.sampler.requests import SampleId, Unfinished
from jaxrl_post.serve.threads import serving
from jaxrl_post.sharding import create_mesh
from jaxrl_post.tokens import Tokens

__all__ = [
    "MOST_TOKENS",
    "PROBE_TOKENS",
    "PROMPT",
    "Burst",
    "Device",
    "Length",
    "Simulated",
    "Speed",
    "State",
    "Updater",
    "opened",
    "parameters",
]

# Number of tokens of a sample, by its prompt id and index.
type Length = Callable[[SampleId], int]

VOCAB, PROMPT = 1000, (1, 2, 3, 4)
# Tokens of each of the probe's rows, and most of a sample.
PROBE_TOKENS, MOST_TOKENS = 16, 2**20
# Log-prob of every token.
LOGPROB = -1.0


@dataclass(frozen=True)
class Speed:
    """The speed of a simulated sampler.

    Attributes:
        slots: samples that decode at once.
        burst_s: seconds of a burst, however many samples decode.
        tokens: tokens of each sample that a burst decodes.
    """

    slots: int = 16
    burst_s: float = 0.04
    tokens: int = 16


class Burst(NamedTuple):
    """A burst of decoding: when it ran, for how many samples, whether of the probe."""

    version: int
    begin: float
    end: float
    samples: int
    probe: bool


@dataclass
class _Sample:
    request: Request
    index: int
    length: int
    count: int = 0

    def tokens(self, version: int) -> Tokens:
        before = self.request.num_sampled
        ids = np.arange(before, before + self.count) % VOCAB
        return Tokens.generated(ids, np.full(self.count, LOGPROB), version=version)


@dataclass
class Device:
    """A simulated engine; `Simulated` binds it to a version.

    Attributes:
        speed: of the sampler.
        length: of a sample.
        bursts: that have run.
    """

    speed: Speed
    length: Length
    bursts: list[Burst] = field(default_factory=list, init=False)
    waiting: deque[_Sample] = field(default_factory=deque, init=False)
    running: dict[SampleId, _Sample] = field(default_factory=dict, init=False)
    # When the burst that runs began and ends; None while none does.
    _under_way: tuple[float, float] | None = field(default=None, init=False)
    # When the last burst ended, if the next one was started behind it.
    _behind: float | None = field(default=None, init=False)

    def submit(self, request: Request) -> None:
        """Queues the samples of a request."""
        most = request.sampling.max_tokens
        for index in range(request.num_samples):
            number = request.first_sample + index
            length = most
            if request.prompt_id < IDS:
                whole = self.length((request.prompt_id, number))
                length = whole - request.num_sampled
            self.waiting.append(_Sample(request, number, length))
        self._behind = None

    def start(self) -> None:
        """Starts a burst, if none runs. Two run where no sample ends."""
        if self._under_way is not None:
            return
        while self.waiting and len(self.running) < self.speed.slots:
            sample = self.waiting.popleft()
            self.running[sample.request.prompt_id, sample.index] = sample
        if self.running:
            begin = self._behind or time.perf_counter()
            self._under_way = begin, begin + self.speed.burst_s

    def ended(self) -> bool:
        """Whether the burst that was started is over."""
        return self._under_way is None or time.perf_counter() >= self._under_way[1]

    def finish(self, version: int) -> list[Completion]:
        """Waits for the burst; returns the samples that ended."""
        if self._under_way is None:
            return []
        begin, end = self._under_way
        time.sleep(max(0.0, end - time.perf_counter()))
        self._under_way = None
        probe = any(prompt >= IDS for prompt, _ in self.running)
        self.bursts.append(Burst(version, begin, end, len(self.running), probe))
        done = list[Completion]()
        for sample, each in [*self.running.items()]:
            each.count = min(each.count + self.speed.tokens, each.length)
            if each.count == each.length:
                del self.running[sample]
                done.append(Completion(*sample, each.tokens(version), "stop"))
        self._behind = None if done or self.waiting else end
        return done

    def drop(self, chosen: Iterable[SampleId] | None, version: int) -> list[Completion]:
        """Stops samples (all for None)."""
        everything = [*self.running.values(), *self.waiting]
        wanted = None if chosen is None else {*chosen}
        done = list[Completion]()
        for each in everything:
            sample = each.request.prompt_id, each.index
            if wanted is not None and sample not in wanted:
                continue
            if self.running.pop(sample, None) is None:
                self.waiting.remove(each)
            done.append(Completion(*sample, each.tokens(version), "cancelled"))
        if not self.running:
            self._under_way = self._behind = None
        return done


@dataclass(frozen=True)
class Simulated:
    """A simulated engine with a version of the parameters bound, as `Published`."""

    device: Device
    version: int

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return bool(self.device.waiting or self.device.running)

    @property
    def running(self) -> bool:
        """Whether a burst was started and not collected."""
        return bool(self.device.running)

    @property
    def ended(self) -> bool:
        """Whether `collect` would return at once, with the results of a burst."""
        return self.running and self.device.ended()

    def renew(self) -> None:
        """Begins other work."""

    def check(self, request: Request) -> None:
        """Refuses no request."""

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self.device.submit(request)

    def dispatch(self) -> None:
        """Starts a burst."""
        self.device.start()

    def collect(self) -> list[Completion]:
        """Waits for the burst; returns finished completions."""
        return self.device.finish(self.version)

    def unfinished(self) -> list[Unfinished]:
        """The tokens of each running sample at the last `collect`."""
        return [
            Unfinished(*sample, each.tokens(self.version))
            for sample, each in self.device.running.items()
        ]

    def settle(self) -> list[Completion]:
        """Waits for the burst; returns finished completions."""
        return self.collect()

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples (all for None); returns completions of the tokens so far."""
        return self.device.drop(samples, self.version)


@dataclass(frozen=True)
class _Config:
    vocab_size: int = VOCAB


@dataclass(frozen=True)
class _Model:
    """The part of a model that publishing reads."""

    config: _Config = _Config()
    adaptation: None = None


@dataclass
class State:
    """Parameters, and the number of updates that made them."""

    params: Any
    step: int = 0


@dataclass
class Updater:
    """An updater whose update is a sleep, and which changes its parameters a little.

    Attributes:
        state: the parameters and the number of updates.
        update_s: seconds of an update.
        model: what publishing reads of the model.
    """

    state: State
    update_s: float
    model: _Model = _Model()

    def update(self) -> None:
        """Takes the time of an update; the parameters before are donated."""
        time.sleep(self.update_s)
        params = jax.block_until_ready(_changed(self.state.params))
        self.state = State(params, self.state.step + 1)


@functools.partial(jax.jit, donate_argnums=0)
def _changed(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.at[::64].add(1), params)


@dataclass(frozen=True)
class _Answering:
    """The log-probs that simulated samplers have of the probe's rows."""

    rows: ProbeRows

    def answers(self, params: Any) -> ProbeAnswers:
        """Returns -1 for each token."""
        del params
        own = np.full(self.rows.decoded.shape, LOGPROB, np.float32)
        return ProbeAnswers(own, (), exact=True)


def parameters(count: int, arrays: int = 4) -> dict[str, jax.Array]:
    """Makes bfloat16 arrays with so many elements in all."""
    keys = jax.random.split(jax.random.key(0), arrays)
    return {
        f"w{number}": jax.random.normal(key, (count // arrays,), jnp.bfloat16)
        for number, key in enumerate(keys)
    }


@contextlib.contextmanager
def opened(
    updater: Updater, speeds: Sequence[Speed], length: Length
) -> Iterator[tuple[Remote, list[Device]]]:
    """Opens a trainer's hub and simulated samplers that follow it over loopback HTTP.

    Args:
        updater: of the trainer.
        speeds: of the samplers, each of which is there before the block begins.
        length: of a sample.
    """
    rows = ProbeRows.make(VOCAB, len(PROMPT), PROBE_TOKENS, 1.0)
    count = len(speeds)
    hub = Hub(b"", lambda facts: "", first=count, least=min(1, count))
    layout = SamplerLayout(create_mesh("dp1", jax.devices()[:1]), jnp.dtype("bfloat16"))
    devices = [Device(speed, length) for speed in speeds]
    with contextlib.ExitStack() as stack:
        url, loop = stack.enter_context(
            serving(hub_app(hub, None), "127.0.0.1", 0, name="hub")
        )
        hub.attach(loop)
        remote = Remote(
            RemoteFleet(hub, lambda request: None),
            hub.catalogue,
            url,
            cast(Any, updater),
            layout,
            cast(Any, _Answering(rows)),
        )
        for number, device in enumerate(devices):
            stack.enter_context(_following(f"s{number}", device, url, rows))
        yield remote, devices
        remote.close(completed=True)


@contextlib.contextmanager
def _following(
    name: str, device: Device, trainer: str, rows: ProbeRows
) -> Iterator[Follower]:
    """Runs a sampler in threads of its own."""

    def bound(image: Image, version: int) -> Any:
        del image
        return Simulated(device, version)

    follower = Follower(
        name, functools.partial(TrainerClient, lambda: trainer), {}, bound, rows, VOCAB
    )
    stop = threading.Event()
    app = relay_app(follower.payload, follower.state, None)
    with serving(app, "127.0.0.1", 0, name=f"relay {name}") as (url, _):
        follower.facts = {"slots": device.speed.slots, "url": url}
        thread = threading.Thread(target=follower.run, args=(stop.is_set,), name=name)
        thread.start()
        try:
            yield follower
        finally:
            stop.set()
            thread.join()
