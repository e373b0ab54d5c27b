"""Hands the trainer's parameters to samplers in other processes."""

import contextlib
import dataclasses
import functools
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import FleetConfig
from jaxrl_post.extras import install
from jaxrl_post.files import replace_file
from jaxrl_post.learner.model import Model, versions
from jaxrl_post.learner.updater import Updater
from jaxrl_post.pretrained.families import write_config
from jaxrl_post.programs.apart.address import reachable
from jaxrl_post.programs.apart.answers import Answering, probe_rows
from jaxrl_post.programs.build.engine import engine_sizes, exact_tile
from jaxrl_post.programs.build.layouts import SamplerLayout, sampler_layout
from jaxrl_post.rollout.events import Tell, silent
from jaxrl_post.sampler.fitting import check_request
from jaxrl_post.sharding import processes
from jaxrl_post.types import PyTree

try:
    from jaxrl_post.fleet import wire
    from jaxrl_post.fleet.app import hub_app, relay_app
    from jaxrl_post.fleet.catalogue import Catalogue
    from jaxrl_post.fleet.hub import Hub
    from jaxrl_post.fleet.manifest import ArrayEntry, joined, keys_of, to_records
    from jaxrl_post.fleet.orders import PolicyVersion
    from jaxrl_post.fleet.probe import ProbeRows
    from jaxrl_post.fleet.remote import RemoteFleet, RemoteSamplers
    from jaxrl_post.serve.threads import serving
except ModuleNotFoundError as error:
    raise ConfigError(
        f"--samplers any:N needs the extra serve ({error}); install it with "
        f"{install('serve')}"
    ) from error

__all__ = ["Remote", "check_free", "open_remote"]

# Versions that must be the same for log-probs that are equal to the last bit.
SAME = ("jaxrl_post", "jax", "jaxlib")
# Seconds that other processes wait for process 0 in addition to `fleet.wait_s`.
MARGIN_S = 600.0


@dataclass
class Remote:
    """Weights of samplers in other processes.

    Attributes:
        fleet: the samplers.
        catalogue: the parameters that samplers can fetch from this process.
        url: where they fetch them.
        updater: has the parameters.
        layout: dtype of the samplers' parameters, and how they are quantised.
        answering: answers the probe.
        tell: told of each version that is published, and what samplers do.
    """

    fleet: RemoteFleet
    catalogue: Catalogue
    url: str
    updater: Updater
    layout: SamplerLayout
    answering: Answering
    tell: Tell = silent
    _spent: dict[str, float] = field(default_factory=dict, init=False)
    # Copies parameters to the host and makes their manifest, one version at a time.
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(
            1,
            thread_name_prefix="publish",
            initializer=processes.enter_lane,
            initargs=("publish",),
        ),
        init=False,
    )
    # The last trained parameters that were published, and their policy.
    _last: tuple[Any, "Future[PolicyVersion] | None"] = field(
        default=(None, None), init=False
    )
    _base: tuple[str, ...] = field(default=(), init=False)
    # Bytes sent by the last call of `metrics`.
    _sent: int = field(default=0, init=False)

    @property
    def unbound(self) -> RemoteSamplers:
        """The samplers without parameters, which say what fits them."""
        return RemoteSamplers(self.fleet, -1, Future())

    def publish(self) -> RemoteSamplers:
        """Begins to publish the current parameters; does not wait for the samplers.

        The trainer's own arrays are copied on their devices: it may donate them. The
        parameters of the last call, such as for an evaluation, are not copied again.
        """
        begin = time.perf_counter()
        state, model = self.updater.state, self.updater.model
        source, policy = self._last
        if policy is None or source is not state.params:
            if policy is not None:
                # One version at a time is copied to the host.
                policy.result()
            params, base, _ = self.layout.moved(model, state.params)
            trees = {"trained": _copied(params, state.params)}
            if base is not None and not self._base:
                trees["base"] = base
            answers = self.answering.answers(state.params)
            work = functools.partial(
                self._catalogued, trees, int(state.step), answers.to_json()
            )
            policy = self._thread.submit(work)
            self._last = state.params, policy
        self._spent["time/publish"] = time.perf_counter() - begin
        return RemoteSamplers(self.fleet, int(state.step), policy)

    def metrics(self) -> dict[str, float]:
        """Returns what publishing took since the last call, and how many samplers are.

        Parameters are sent while a step trains, so a step's bytes may belong to
        the version before.
        """
        found, self._spent = self._spent, {}
        hub = self.fleet.hub
        if hub is None:
            return found
        sent = hub.sent_bytes
        found["publish/bytes_moved"] = float(sent - self._sent)
        self._sent = sent
        return found | hub.counts()

    def close(self, *, completed: bool) -> None:
        """Ends what waits for samplers; of a complete run the samplers end too."""
        self.fleet.stop.set()
        self._thread.shutdown(cancel_futures=True)
        if completed and self.fleet.hub is not None:
            self.fleet.hub.end("the run is complete")

    def _catalogued(
        self, trees: Mapping[str, PyTree], version: int, extra: Any
    ) -> PolicyVersion:
        arrays = [
            (path, _parts(leaf))
            for name, tree in trees.items()
            for path, leaf in _named(name, tree)
        ]
        if "base" in trees:
            self._base = tuple(path for path, _ in _named("base", trees["base"]))
            unchanged = ()
        else:
            unchanged = self._base
        begin = time.perf_counter()
        owners, hub = dict[str, str](), self.fleet.hub

        def join(entries: Sequence[ArrayEntry]) -> list[ArrayEntry]:
            own = [self.url, to_records(entries)]
            everyone = processes.exchange("parameters", own)
            for url, records in everyone[1:]:
                for key in keys_of(records):
                    owners[key] = url
            return joined([records for _, records in everyone])

        manifest = self.catalogue.add(
            version,
            [(path, parts) for path, parts in arrays if parts],
            extra=extra,
            unchanged=unchanged,
            join=join if processes.count() > 1 else None,
        )
        if hub is not None:
            hub.published(owners)
        made = self.catalogue.last_addition
        assert made is not None, "it was added"
        self.tell(
            "publish",
            {
                "version": version,
                "bytes": made.update_bytes,
                "seconds": round(time.perf_counter() - begin, 6),
            },
        )
        return PolicyVersion(version, manifest.digest)


def _copied(tree: PyTree, source: PyTree) -> PyTree:
    """Copies the arrays of a tree that are the source's own, on their devices."""
    leaves, structure = jax.tree.flatten(tree)
    own = {id(leaf) for leaf in jax.tree.leaves(source)}
    places = [i for i, leaf in enumerate(leaves) if id(leaf) in own]
    for i, copy in zip(places, _copy([leaves[i] for i in places]), strict=True):
        leaves[i] = copy
    for leaf in leaves:
        leaf.copy_to_host_async()
    return jax.tree.unflatten(structure, leaves)


@jax.jit
def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def _named(name: str, tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a tree by their paths."""
    return [
        (f"{name}{jax.tree_util.keystr(path)}", leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _parts(array: jax.Array) -> list[tuple[tuple[tuple[int, int], ...], np.ndarray]]:
    """The distinct parts of an array on the host, each with its bounds."""
    return [
        (
            tuple(
                each.indices(size)[:2]
                for each, size in zip(shard.index, array.shape, strict=True)
            ),
            np.asarray(shard.data),
        )
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


@contextlib.contextmanager
def open_remote(
    updater: Updater,
    address: Path,
    *,
    console: Console,
    should_stop: Callable[[], bool],
) -> Iterator[Remote]:
    """Opens the address at which samplers in other processes join a run.

    Of several processes, process 0 opens it. The others serve their parts of the
    parameters, on any free port of the same host.

    Args:
        updater: has the options, the model and the parameters.
        address: file for the URL at which samplers join.
        console: for messages to the user.
        should_stop: whether the run is to end; too few samplers are not waited for
            then.

    Raises:
        ConfigError: the address is taken.
    """
    config, model = updater.config, updater.model
    options, catalogue = config.fleet, Catalogue()
    host, port = options.address
    rows = probe_rows(config, model.config.vocab_size)
    hub, ending = None, lambda: None
    if processes.index():
        app, port = relay_app(catalogue.payload, dict, options.key), 0
    else:
        hub = _hub(config, model, rows, catalogue, should_stop)
        app, ending = hub_app(hub, options.key), hub.release
        check_free(options)
    sizes = engine_sizes(config.rollout, 1, stop_ids=len(model.tokenizer.stop_ids))
    tile = exact_tile(config)
    sizes = dataclasses.replace(sizes, exact=tile, kept_ids=config.kept_ids)
    vocab = model.config.vocab_size
    fleet = RemoteFleet(
        hub,
        lambda request: check_request(request, sizes, vocab, detokenizes=True),
        # Process 0 may wait so long for samplers.
        deadline_s=options.wait_s + MARGIN_S,
    )
    layout = sampler_layout(config.rollout, model, rounds_inputs=config.rounds_inputs)
    with serving(app, host, port, name="hub", ending=ending) as (url, loop):
        shown = reachable(url, config.processes.coordinator)
        remote = Remote(
            fleet, catalogue, shown, updater, layout, Answering(updater, rows)
        )
        if hub is not None:
            hub.attach(loop)
            hub.tell = functools.partial(_tell, remote, console)
            replace_file(address, f"{shown}\n")
            console.print(
                f"samplers join at {shown}: python -m launch.serve --follow {shown}",
                markup=False,
                highlight=False,
            )
        try:
            yield remote
        finally:
            if hub is not None:
                address.unlink(missing_ok=True)


def _hub(
    config: RLConfig,
    model: Model,
    rows: ProbeRows,
    catalogue: Catalogue,
    should_stop: Callable[[], bool],
) -> Hub:
    facts, options = versions(), config.fleet
    return Hub(
        welcome=wire.pack(_welcome(config, model, rows, facts)),
        refusal=functools.partial(_refusal, facts, exact=config.exact),
        catalogue=catalogue,
        first=config.remote_samplers,
        least=options.least,
        wait_s=options.wait_s,
        silence_s=options.silence_s,
        should_stop=should_stop,
    )


def _tell(
    remote: Remote, console: Console, event: str, sampler: str, detail: str
) -> None:
    """Tells the timeline, and the user of what matters."""
    if event in ("begin", "end"):
        remote.tell(event, {"work": "sample", "sampler": sampler})
        return
    remote.tell(event, {"sampler": sampler, "detail": detail})
    if event in _TOLD:
        style, said = _TOLD[event]
        named = f"sampler {sampler} {said}" if sampler else "samplers"
        console.print(f"{named}: {detail}", style=style, markup=False, highlight=False)


def check_free(fleet: FleetConfig) -> None:
    """Refuses an address that is taken, before a model is opened.

    Raises:
        ConfigError: names the option.
    """
    host, port = fleet.address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"--fleet.listen: cannot listen on {fleet.listen}: {error}; choose "
            "another, or port 0 for a free one"
        ) from error


# Events that the user is told of, each with its style and words.
_TOLD: dict[str, tuple[str | None, str]] = {
    "join": (None, "has joined"),
    "leave": ("yellow", "has left"),
    "refuse": ("red", "refused a version"),
    "short": ("yellow", ""),
    "enough": (None, ""),
}


def _welcome(
    config: RLConfig, model: Model, rows: ProbeRows, facts: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what a sampler needs to open the same engine."""
    with tempfile.TemporaryDirectory(prefix="welcome-") as folder:
        model.tokenizer.save(folder)
        files = {
            str(file.relative_to(folder)): file.read_text(encoding="utf-8")
            for file in sorted(Path(folder).rglob("*"))
            if file.is_file()
        }
    return {
        "versions": dict(facts),
        "model": write_config(model.config),
        # Compared with what a sampler reads: another version may read it otherwise.
        "config": repr(model.config),
        "files": files,
        "dtype": model.dtype.name,
        "rollout": dataclasses.asdict(config.rollout),
        "rounds_inputs": config.rounds_inputs,
        "lora": dataclasses.asdict(config.lora),
        "seed": config.seed,
        "exact": exact_tile(config),
        "kept_ids": config.kept_ids,
        "kernels": config.kernels,
        "rows": rows.to_json(),
    }


def _refusal(own: Mapping[str, str], facts: Mapping[str, Any], *, exact: bool) -> str:
    """Says why a sampler may not join; "" if it may."""
    theirs = facts["versions"]
    names = (*SAME, "device") if exact else SAME[:1]
    for name in names:
        if own[name] != theirs.get(name):
            promised = " and --exact promises equal log-probs" if exact else ""
            return (
                f"the trainer has {name} {own[name]}, the sampler "
                f"{theirs.get(name)}{promised}; start it with the trainer's version"
            )
    return ""
