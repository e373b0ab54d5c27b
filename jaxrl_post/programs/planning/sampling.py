"""The sampler's programs from shapes alone: publish, prefill and decode."""

import collections
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_post import models
from jaxrl_post.config.plan import PlanConfig, PlanError
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.models import ModelConfig
from jaxrl_post.models.adapters.quantized import quantize
from jaxrl_post.models.matrix import matrices
from jaxrl_post.programs.build.engine import cache_dtype, engine_sizes
from jaxrl_post.programs.build.layouts import same_devices
from jaxrl_post.programs.planning.chips import Work, chip_of
from jaxrl_post.programs.planning.lengths import answer_lengths
from jaxrl_post.programs.planning.links import network_of
from jaxrl_post.programs.planning.program import Program
from jaxrl_post.programs.planning.work import ModelWork
from jaxrl_post.rollout.weights import MovedArrays, Relayout
from jaxrl_post.sampler import Request, SamplingParams, batches
from jaxrl_post.sampler.calls import PrefillRows, Rows
from jaxrl_post.sampler.jitted import DeviceFunctions
from jaxrl_post.sampler.pages import Shared
from jaxrl_post.sampler.scheduler import Scheduler
from jaxrl_post.sampler.sizes import PAGE
from jaxrl_post.sharding import (
    DEFAULT_RULES,
    MeshError,
    per_device_bytes,
    placed,
    split_size,
)
from jaxrl_post.tokens import Tokens
from jaxrl_post.types import PyTree

__all__ = ["SamplerPlan", "make_own_sampler", "make_sampler", "sampler_mesh"]


@dataclass(frozen=True)
class SamplerPlan:
    """An engine without arrays, and how it gets its parameters.

    Attributes:
        config: the options.
        functions: the engine's jitted functions.
        params: ShapeDtypeStructs of the parameters in the sampler's layout.
        pages: of the engine's cache.
        work: counts the programs' work.
        relayout: moves the trainer's parameters to the sampler's layout; None where
            the sampler uses the trainer's own arrays.
    """

    config: PlanConfig
    functions: DeviceFunctions
    params: PyTree
    pages: PyTree
    work: ModelWork
    relayout: Relayout | None

    @property
    def resident(self) -> PyTree:
        """The arrays that stay in memory while the trainer's programs run."""
        if self.relayout is not None:
            return self.pages, self.params
        if self.config.rollout.weights is None:
            return self.pages, ()
        return self.pages, list(matrices(self.params).values())

    def programs(self, trained: PyTree, rest: PyTree) -> Iterator[Program]:
        """The programs that sample the completions of a step, in order.

        Args:
            trained: ShapeDtypeStructs of the trainer's parameters.
            rest: of the rest of the train state, which stays in memory.
        """
        beside = rest if self.relayout is None else (rest, trained)
        if self.relayout is not None:
            sent = trained
            if self.config.rollout.weights is not None:
                sent = _quantized(trained, self.config)
            yield from self._publish(self.relayout, sent, rest)
        yield from self._prefill(beside)
        yield from self._decode(beside)

    @cached_property
    def view_bytes(self) -> int:
        """Bytes of a device's largest view of the cache, a copy of pages in a burst."""
        return max(
            int(
                self.work.cache_bytes
                * self.work.view_entries(
                    rows.pages.shape[0],
                    rows.pages.shape[1] * PAGE,
                    groups=rows.shared.pages.shape[0],
                    shared=_view(rows.shared),
                )
            )
            for rows, *_ in self._calls.decode.values()
        )

    def _publish(
        self, relayout: Relayout, trained: PyTree, rest: PyTree
    ) -> Iterator[Program]:
        sources, targets = jax.tree.leaves(trained), jax.tree.leaves(self.params)
        for number, groups in enumerate(_alike(relayout.groups(trained)), 1):
            group = groups[0]
            own, moved = (
                [tree[i] for i in group.places] for tree in (sources, targets)
            )
            others = [
                [leaf for i, leaf in enumerate(tree) if i not in set(group.places)]
                for tree in (sources, targets)
            ]
            received = group.bytes_sent / group.mesh.size
            # Each device receives other parts than its neighbours.
            away = network_of(group.mesh, self.work.chip).exchange(
                [range(group.mesh.size)]
            )
            copied = per_device_bytes(own) + per_device_bytes(moved)
            yield Program(
                f"publish {number}",
                group.program,
                (own,),
                (rest, others, self.pages),
                group.mesh,
                calls=len(groups),
                # Received bytes are written, then read to be put into their place.
                work=Work(0.0, copied + 2 * received),
                received=received * away,
            )

    def _prefill(self, beside: PyTree) -> Iterator[Program]:
        for rows, calls, _ in self._calls.prefill.values():
            count, length = rows.tokens.shape
            yield Program(
                f"prefill {count} x {length}",
                self.functions.prefill,
                (self.params, self.pages, rows),
                beside,
                self.mesh,
                calls=calls,
                work=self.work.prefill(count, length, _view(rows.shared)),
            )

    def _decode(self, beside: PyTree) -> Iterator[Program]:
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct((), key.dtype, sharding=self.functions.replicated)
        floor = jax.ShapeDtypeStruct((), np.int32)
        by_row = self.functions.by_row
        for unplaced, calls, read in self._calls.decode.values():
            progress = placed(unplaced.progress, by_row)
            rows = dataclasses.replace(unplaced, progress=progress)
            count, pages = rows.pages.shape
            groups = rows.shared.pages.shape[0]
            shared, own = _view(rows.shared), pages * PAGE
            yield Program(
                f"decode {count} x {shared} + {own}",
                self.functions.decode,
                (self.params, self.pages, rows, key, floor),
                beside,
                self.mesh,
                static={"burst": self.functions.burst(truncate=False)},
                calls=calls,
                work=self.work.decode(
                    count,
                    own,
                    self.functions.sizes.steps_per_call,
                    groups=groups,
                    members=rows.shared.members,
                    shared=shared,
                    read=read / calls,
                ),
                overhead=self.functions.sizes.steps_per_call
                * self.config.step_overhead_s,
            )

    @cached_property
    def _calls(self) -> "_Calls":
        """The calls of an engine for a step whose samples all have full length."""
        sizes, split = self.functions.sizes, self.functions.split
        rollout, calls = self.config.rollout, _Calls({}, {})
        scheduler = Scheduler(sizes, split)
        samples = rollout.samples_per_prompt
        longest = rollout.max_tokens
        mean = self.config.mean_tokens or longest
        lengths = answer_lengths(rollout.prompts_per_step * samples, mean, longest)
        for prompt in range(rollout.prompts_per_step):
            # No two prompts begin alike.
            tokens = (prompt,) * rollout.max_prompt_tokens
            scheduler.submit(
                Request(
                    prompt,
                    tokens,
                    samples,
                    sampling=SamplingParams(max_tokens=rollout.max_tokens),
                )
            )
        while scheduler.busy:
            for rows, _ in batches.prefill_calls(scheduler.prefill(), sizes, split):
                _count(calls.prefill, rows)
            burst = scheduler.burst()
            if burst is None:
                continue
            rows, read = batches.rows(burst, sizes, split), 0.0
            for sample in (sample for part in burst.rows for sample in part):
                # `remaining` counts down from the most tokens that an answer may have.
                place = sample.request.prompt_id * samples + sample.sample_index
                left = lengths[place] - longest + sample.remaining
                steps = min(sizes.steps_per_call, left)
                assert sample.own is not None
                read += steps * (sample.own.computed + steps / 2)
                sampled = np.zeros(steps, np.int32)
                tokens = Tokens.generated(
                    sampled, sampled.astype(np.float32), version=0
                )
                scheduler.advance(sample, tokens)
                if steps == left:
                    scheduler.release(sample)
            _count(calls.decode, rows, read / sizes.steps_per_call)
        return calls

    @property
    def mesh(self) -> Mesh:
        """The sampler's mesh."""
        assert self.functions.mesh is not None
        return self.functions.mesh


class _Calls(NamedTuple):
    """Shapes of an engine's calls, their number, and own entries that a step reads."""

    prefill: dict[str, tuple[PrefillRows, int, float]]
    decode: dict[str, tuple[Rows, int, float]]


def sampler_mesh(config: PlanConfig, mesh: Mesh) -> Mesh:
    """The mesh of a sampler on the trainer's devices.

    Args:
        config: the options.
        mesh: the trainer's.

    Raises:
        MeshError: --rollout.mesh does not fill the devices.
    """
    try:
        return same_devices(config.rollout.mesh, mesh)
    except MeshError as error:
        raise MeshError(f"--rollout.{error}") from error


def _quantized(params: PyTree, config: PlanConfig) -> PyTree:
    kind = config.rollout.weights
    assert kind is not None
    return quantize(params, kind, rounds_inputs=_rounds_inputs(config))


def _rounds_inputs(config: PlanConfig) -> bool:
    """Whether sampler and trainer both compute in float8."""
    return config.rollout.weights == "float8" == config.precision


def make_sampler(
    config: PlanConfig, architecture: ModelConfig, mesh: Mesh
) -> SamplerPlan | None:
    """Makes the sampler of a run from shapes; None for a train step alone.

    Args:
        config: the options.
        architecture: of the model.
        mesh: the trainer's mesh; its devices are not used.

    Raises:
        PlanError: the options do not go with each other.
        MeshError: --rollout.mesh does not go with the slice or the model.
    """
    options = config.rollout
    if not options.prompts_per_step:
        return None
    if config.lora.rank:
        raise PlanError(
            "--rollout.prompts-per-step: of an adapter only the train step can be "
            f"planned; got {options.prompts_per_step} with --lora.rank "
            f"{config.lora.rank}. Drop one of the two options"
        )
    rules = DEFAULT_RULES.with_context_as_batch()
    dtype = jnp.dtype(options.dtype or config.dtype)
    own = sampler_mesh(config, mesh)
    try:
        params = models.abstract(models.param_specs(architecture), dtype, own, rules)
    except MeshError as error:
        raise MeshError(f"--rollout.{error}") from error
    if options.weights is not None:
        params = _quantized(params, config)
    rollout = RolloutConfig(**dataclasses.asdict(options))
    cached = cache_dtype(rollout, dtype)
    functions = DeviceFunctions(
        architecture,
        engine_sizes(rollout, split_size("batch", own, rules), stop_ids=1),
        cached,
        own,
        rules,
    )
    moved = own is not mesh or dtype != jnp.dtype(config.dtype)
    return SamplerPlan(
        config,
        functions,
        params,
        placed(functions.pages_shape, functions.pages_shardings),
        ModelWork(
            functions.config,
            own,
            rules,
            dtype,
            cached,
            options.weights is not None,
            _rounds_inputs(config),
            chip_of(config.topology),
        ),
        Relayout(params, group_bytes=options.publish_mib * 2**20) if moved else None,
    )


def make_own_sampler(
    config: PlanConfig, architecture: ModelConfig, mesh: Mesh
) -> SamplerPlan:
    """Makes one of --samplers from shapes, for its share of a step's prompts.

    Args:
        config: the options; without --rollout.num-slots all samples of the share decode
            at once.
        architecture: of the model.
        mesh: of the sampler's own devices, which are not used.

    Raises:
        PlanError: no step is planned, or the options do not go with each other.
        MeshError: the mesh does not go with the model.
    """
    rollout = config.rollout
    share = -(-rollout.prompts_per_step // config.num_samplers)
    own = dataclasses.replace(
        rollout, mesh="", dtype=None, prompts_per_step=share, ahead=0
    )
    dtype = rollout.dtype or config.dtype
    made = make_sampler(
        dataclasses.replace(config, dtype=dtype, rollout=own), architecture, mesh
    )
    if made is None:
        raise PlanError(
            "--samplers: need the samples of a step; give --rollout.prompts-per-step"
        )
    return made


def _alike(groups: list[MovedArrays]) -> list[list[MovedArrays]]:
    """Groups of arrays of the same shapes and ways, which compile to one program."""
    found = collections.defaultdict[Any, list[MovedArrays]](list)
    for group in groups:
        ways = tuple((way.dtype, way.source, way.target) for way in group.ways)
        found[ways].append(group)
    return list(found.values())


def _count(
    found: dict[str, tuple[Any, int, float]], rows: PyTree, read: float = 0.0
) -> None:
    """Counts a call by the shapes of its arguments, and adds the entries it reads."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), rows)
    name = str(shapes)
    _, calls, total = found.get(name, (None, 0, 0.0))
    found[name] = (shapes, calls + 1, total + read)


def _view(shared: Shared | None) -> int:
    """Tokens that a group shares, padded."""
    return 0 if shared is None else shared.pages.shape[1] * PAGE
