"""A sampler that follows a trainer, for `launch.serve --follow`.

It may have several processes, with one mesh over the devices of all. Process 0 talks to
the trainer, and the others fetch the parameters from it.
"""

import contextlib
import functools
import os
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import jax
import numpy as np
from rich.console import Console

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.serve import ServeConfig, is_loopback, read_key
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.fleet.app import relay_app
from jaxrl_post.fleet.client import AwayError, NotAdmittedError, TrainerClient
from jaxrl_post.fleet.follower import Follower
from jaxrl_post.fleet.image import Image
from jaxrl_post.fleet.lockstep import together
from jaxrl_post.fleet.probe import ProbeRows
from jaxrl_post.learner.adapters import with_adapter
from jaxrl_post.learner.model import Model, versions
from jaxrl_post.models import abstract, param_specs
from jaxrl_post.pretrained.families import read_config
from jaxrl_post.programs.apart.address import reachable, trainer_url
from jaxrl_post.programs.build.engine import make_engine
from jaxrl_post.programs.build.layouts import SamplerLayout, bound, sampler_layout
from jaxrl_post.rollout.weights import Published, Transfer
from jaxrl_post.sampler import Engine
from jaxrl_post.serve.threads import serving
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh, processes
from jaxrl_post.types import PyTree

__all__ = ["follow"]

# Seconds that other processes wait for process 0 in addition to `follow_wait_s`.
MARGIN_S = 600.0


def follow(config: ServeConfig, *, console: Console) -> None:
    """Samples for a trainer until its run is over, or SIGTERM or Ctrl-C.

    Args:
        config: the options; `follow` says where the trainer is.
        console: for messages to the user; a silent one in other processes than 0.

    Raises:
        ConfigError: the trainer does not take this sampler, or the address is taken.
        MeshError: the mesh does not fit the devices or the model.
        TrainerGoneError: the trainer did not answer for `follow_wait_s`.
    """
    assert config.follow is not None, "the caller has asked"
    key, stop = read_key(config), threading.Event()
    where = functools.partial(trainer_url, config.follow)
    connect = functools.partial(TrainerClient, where, key)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    try:
        with _signals(stop, say):
            _check_reached(config)
            welcome = None
            if not processes.index():
                welcome = _welcomed(connect, config.follow_wait_s, stop, say)
            # The others wait for process 0, which waits for the trainer.
            deadline_s = config.follow_wait_s + MARGIN_S
            welcome = processes.agree("welcome", welcome, deadline_s=deadline_s)
            if welcome is None:
                return
            model, engine, layout = _opened(config, welcome)
            follower = _follower(config, welcome, connect, model, engine, layout, say)
            with _relaying(config, follower, where, key) as url:
                if not follower.leads:
                    follower.connect = functools.partial(
                        TrainerClient, lambda: url, key
                    )
                say(f"sampler {follower.name} at {url}; Ctrl-C ends it")
                follower.run(stop.is_set)
            say(follower.ended or "ended")
    except NotAdmittedError as error:
        raise ConfigError(f"--follow: {error}") from error


def _check_reached(config: ServeConfig) -> None:
    """Refuses an address at which other hosts' processes cannot fetch parameters."""
    hosts = processes.exchange("hosts", socket.gethostname())
    if len({*hosts}) > 1 and is_loopback(config.host):
        raise ConfigError(
            f"--host: the sampler's processes on {', '.join(sorted({*hosts}))} fetch "
            f"the parameters from process 0, and {config.host} is reached from its own "
            "host alone; give --host 0.0.0.0 and --api-key-file to all of them"
        )


@contextlib.contextmanager
def _relaying(
    config: ServeConfig, follower: Follower, where: Callable[[], str], key: str | None
) -> Iterator[str]:
    """Passes the parameters on, in process 0; yields the URL."""
    if not follower.leads:
        yield processes.agree("relay", None)
        return
    app = relay_app(
        follower.payload,
        follower.state,
        key,
        expected=follower.expects,
        manifest_of=follower.manifest,
    )
    with serving(app, config.host, config.port, name="relay") as (url, _):
        url = reachable(url, urlsplit(where()).netloc)
        follower.facts = {**follower.facts, "url": url}
        yield processes.agree("relay", url)


def _follower(
    config: ServeConfig,
    welcome: Mapping[str, Any],
    connect: Callable[[], TrainerClient],
    model: Model,
    engine: Engine,
    layout: SamplerLayout,
    say: Callable[[str], None],
) -> Follower:
    own = config.name or f"{socket.gethostname()}-{secrets.token_hex(3)}"
    name = processes.agree("name", own)
    facts = {"versions": versions(), "slots": engine.sizes.num_slots}
    return Follower(
        name=name,
        connect=connect,
        facts=facts,
        opened=functools.partial(_published, engine, layout, model),
        rows=ProbeRows.from_json(welcome["rows"]),
        vocab=model.config.vocab_size,
        away_s=config.follow_wait_s,
        say=say,
        together=together if processes.count() > 1 else None,
        leads=not processes.index(),
    )


def _welcomed(
    connect: Callable[[], TrainerClient],
    wait_s: float,
    stop: threading.Event,
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    """Returns the trainer's welcome, once it answers; None if it shall stop."""
    trainer, waited, told = connect(), 0.0, False
    with contextlib.closing(trainer):
        while not stop.is_set():
            try:
                return trainer.welcome()
            except AwayError as error:
                if waited >= wait_s:
                    raise ConfigError(
                        f"--follow: {error}, for {wait_s:g} s (--follow-wait-s)"
                    ) from error
                if not told:
                    say(f"{error}; trying again for {wait_s:g} s")
                told = True
            stop.wait(1.0)
            waited += 1.0
    return None


def _opened(
    config: ServeConfig, welcome: Mapping[str, Any]
) -> tuple[Model, Engine, SamplerLayout]:
    """The trainer's model without its parameters, and the engine that samples it."""
    own = read_config(welcome["model"])
    if repr(own) != welcome["config"]:
        raise ConfigError(
            "--follow: this version reads the trainer's model config as "
            f"{own!r}, the trainer as {welcome['config']}; take the same version"
        )
    mesh, dtype = create_mesh(config.mesh), np.dtype(welcome["dtype"])
    specs = param_specs(own)
    model = Model(
        "policy",
        own,
        specs,
        abstract(specs, dtype, mesh, DEFAULT_RULES),
        _tokenizer(welcome["files"]).for_model(own.vocab_size),
        mesh,
        DEFAULT_RULES,
        preset=True,
    )
    adapter = AdapterConfig(**_tuples(welcome["lora"]))
    model = with_adapter(adapter, model, seed=int(welcome["seed"]))
    rollout = RolloutConfig(**_tuples(welcome["rollout"]))
    rounds_inputs = bool(welcome["rounds_inputs"])
    layout = sampler_layout(rollout, model, rounds_inputs=rounds_inputs, own=mesh)
    engine = make_engine(
        rollout,
        model,
        layout,
        seed=int(welcome["seed"]),
        exact=int(welcome["exact"]),
        kept_ids=int(welcome["kept_ids"]),
        kernels=welcome["kernels"],
    )
    return model, engine, layout


def _published(
    engine: Engine, layout: SamplerLayout, model: Model, image: Image, version: int
) -> Published:
    """Binds the engine to the arrays of an image, which are put on its devices."""

    def arrays(name: str, moved: Any) -> PyTree:
        if moved is None:
            return None
        assert isinstance(moved, Transfer), "the sampler has devices of its own"
        leaves, structure = jax.tree_util.tree_flatten_with_path(moved.targets)
        return jax.tree.unflatten(
            structure,
            [
                _array(image, f"{name}{jax.tree_util.keystr(path)}", target)
                for path, target in leaves
            ],
        )

    trained, base = arrays("trained", layout.trained), arrays("base", layout.frozen)
    return Published(engine, bound(model, trained, base), version)


def _array(image: Image, path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
    host = image.array(path)
    if host.shape != target.shape or host.dtype != target.dtype:
        raise ConfigError(
            f"--follow: {path} is {host.dtype.name} {host.shape}, and this sampler "
            f"expects {target.dtype.name} {target.shape}"
        )
    # Each process puts its own parts on its devices.
    return jax.make_array_from_callback(host.shape, target.sharding, host.__getitem__)


def _tokenizer(files: Mapping[str, str]) -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        for name, text in files.items():
            place = (Path(folder) / name).resolve()
            if not place.is_relative_to(Path(folder).resolve()):
                raise ConfigError(f"--follow: the trainer sent a file named {name!r}")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        return Tokenizer.from_directory(folder)


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}


@contextlib.contextmanager
def _signals(stop: threading.Event, say: Callable[[str], None]) -> Iterator[None]:
    """Sets `stop` at SIGTERM and Ctrl-C; a second signal ends the process."""

    def receive(number: int, frame: FrameType | None) -> None:
        del frame
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        say(f"{signal.Signals(number).name}: giving samples back; again to end at once")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(name, receive) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
