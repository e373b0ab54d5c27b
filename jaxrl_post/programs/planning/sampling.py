"""The sampler's programs from shapes alone: publish, prefill, start and decode."""

import collections
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_post import models
from jaxrl_post.config.plan import PlanConfig, PlanError
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.models import ModelConfig
from jaxrl_post.programs.layouts import same_devices
from jaxrl_post.programs.planning.program import Program, placed
from jaxrl_post.programs.planning.work import ModelWork, Work
from jaxrl_post.programs.rl import engine_sizes
from jaxrl_post.rollout.weights import Group, Relayout
from jaxrl_post.sampler.decode import Starts
from jaxrl_post.sampler.jitted import DeviceFunctions
from jaxrl_post.sampler.sampling import SamplingArrays
from jaxrl_post.sharding import DEFAULT_RULES, MeshError, per_device_bytes, split_size
from jaxrl_post.types import PyTree

__all__ = ["Sampler", "make_sampler"]


@dataclass(frozen=True)
class Sampler:
    """An engine without arrays, and how it gets its parameters.

    Attributes:
        config: the options.
        functions: the engine's jitted functions.
        params: ShapeDtypeStructs of the parameters in the sampler's layout.
        state: of the engine's state.
        work: counts the programs' work.
        relayout: moves the trainer's parameters to the sampler's layout; None where
            the sampler uses the trainer's own arrays.
    """

    config: PlanConfig
    functions: DeviceFunctions
    params: PyTree
    state: PyTree
    work: ModelWork
    relayout: Relayout | None

    @property
    def resident(self) -> PyTree:
        """The arrays that stay in memory while the trainer's programs run."""
        return self.state, () if self.relayout is None else self.params

    def programs(self, trained: PyTree, rest: PyTree) -> Iterator[Program]:
        """The programs that sample the completions of a step, in order.

        Args:
            trained: ShapeDtypeStructs of the trainer's parameters.
            rest: of the rest of the train state, which stays in memory.
        """
        beside = rest if self.relayout is None else (rest, trained)
        if self.relayout is not None:
            yield from self._publish(self.relayout, trained, rest)
        yield from self._prefill(beside)
        yield self._start(beside)
        yield from self._decode(beside)

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
            copied = per_device_bytes(own) + per_device_bytes(moved)
            yield Program(
                f"publish {number}",
                group.program,
                (own,),
                (rest, others, self.state),
                group.mesh,
                calls=len(groups),
                # What arrives is written, then read to be put into its place.
                work=Work(0.0, copied + 2 * received),
                received=received,
            )

    def _prefill(self, beside: PyTree) -> Iterator[Program]:
        sizes, rollout = self.functions.sizes, self.config.rollout
        length = sizes.prompt_length(rollout.max_prompt_tokens)
        calls, waiting = collections.Counter[int](), rollout.prompts_per_step
        while waiting > 0:
            rows = sizes.prefill_rows(length, waiting)
            calls[rows] += 1
            waiting -= rows
        for rows, count in calls.items():
            yield Program(
                f"prefill {rows} x {length}",
                self.functions.prefill,
                (
                    self.params,
                    self.state,
                    jax.ShapeDtypeStruct((rows, length), jnp.int32),
                    jax.ShapeDtypeStruct((rows,), jnp.int32),
                ),
                beside,
                self.mesh,
                calls=count,
                work=self.work.prefill(rows, length),
            )

    def _start(self, beside: PyTree) -> Program:
        sizes = self.functions.sizes
        length = sizes.prompt_length(self.config.rollout.max_prompt_tokens)
        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct((), key.dtype, sharding=self.functions.replicated)
        # It does not read the parameters: they are beside it.
        return Program(
            f"start {length}",
            self.functions.start,
            (self.state, _starts(sizes.num_slots, sizes.max_stop_ids), key),
            (beside, self.params),
            self.mesh,
            static={"length": length},
            calls=self.waves,
            work=self.work.start(sizes.num_slots, length),
        )

    def _decode(self, beside: PyTree) -> Iterator[Program]:
        sizes, rollout = self.functions.sizes, self.config.rollout
        steps = sizes.steps_per_call
        views = collections.Counter(
            sizes.view_length(rollout.max_prompt_tokens + done)
            for done in range(0, rollout.max_tokens, steps)
        )
        for view, bursts in views.items():
            yield Program(
                f"decode {view}",
                self.functions.decode,
                (
                    self.params,
                    self.state,
                    jax.ShapeDtypeStruct((sizes.num_slots,), jnp.bool_),
                ),
                beside,
                self.mesh,
                static={"view_length": view, "truncate": False},
                calls=bursts * self.waves,
                work=self.work.decode(sizes.num_slots, view, steps, sizes.max_length),
            )

    @property
    def mesh(self) -> Mesh:
        """The sampler's mesh."""
        assert self.functions.mesh is not None
        return self.functions.mesh

    @property
    def waves(self) -> int:
        """How often all slots are filled; completions are equally long."""
        rollout = self.config.rollout
        samples = rollout.prompts_per_step * rollout.samples_per_prompt
        return -(-samples // self.functions.sizes.num_slots)


def make_sampler(
    config: PlanConfig, architecture: ModelConfig, mesh: Mesh
) -> Sampler | None:
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
    rules, dtype = DEFAULT_RULES, jnp.dtype(options.dtype or config.dtype)
    try:
        own = same_devices(options.mesh, mesh)
        params = models.abstract(models.param_specs(architecture), dtype, own, rules)
    except MeshError as error:
        raise MeshError(f"--rollout.{error}") from error
    rollout = RolloutConfig(**dataclasses.asdict(options))
    functions = DeviceFunctions(
        architecture,
        engine_sizes(rollout, split_size("batch", own, rules), stop_ids=1),
        dtype,
        own,
        rules,
        collections.Counter(),
    )
    moved = own is not mesh or dtype != jnp.dtype(config.dtype)
    return Sampler(
        config,
        functions,
        params,
        placed(functions.state_shape, functions.state_shardings),
        ModelWork(architecture, own, rules, dtype),
        Relayout(params, group_bytes=options.publish_mib * 2**20) if moved else None,
    )


def _alike(groups: list[Group]) -> list[list[Group]]:
    """Groups of arrays of the same shapes and ways, which compile to one program."""
    found = collections.defaultdict[Any, list[Group]](list)
    for group in groups:
        ways = tuple((way.dtype, way.source, way.target) for way in group.ways)
        found[ways].append(group)
    return list(found.values())


def _starts(count: int, stops: int) -> Starts:
    """The host's arrays of an engine's admissions."""

    def array(dtype: Any, *more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *more), dtype)

    return Starts(
        slots=array(np.int32),
        sources=array(np.int32),
        tokens=array(np.int32),
        positions=array(np.int32),
        remaining=array(np.int32),
        prompt_ids=array(np.uint32),
        sample_indices=array(np.uint32),
        sampling=SamplingArrays(
            array(np.float32), array(np.int32), array(np.float32), array(np.float32)
        ),
        stop_ids=array(np.int32, stops),
    )
