"""Pipeline parallelism: layers over stages of devices, and microbatches through them.

The axis `pp` of a mesh has the stages. A stage holds several chunks of layers that do
not follow each other, so that it begins early and waits little (the interleaved
schedule of Narayanan et al., arXiv:2104.04473). All stages compute a chunk at the same
time, a tick, and then pass what they have to the next stage. The backward pass is the
same schedule in reverse.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxrl_post.sharding.partition import dividing_axes
from jaxrl_post.sharding.rules import Rules
from jaxrl_post.types import Array, Int, PyTree

__all__ = ["STAGE_AXIS", "Microbatches", "Schedule", "StageSlot", "through_stages"]

# The mesh axis whose devices are stages.
STAGE_AXIS = "pp"
# In a table of slots: the stage has nothing to compute.
IDLE = -1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The chunk and the microbatch that each stage computes in each tick.

    The layers are cut into `rounds * stages` chunks of equal length; chunk i lies on
    stage i % stages and is the stage's round i // stages. Microbatches start in groups
    of as many as there are stages, so that one comes back to the first stage in the
    tick in which its next round can begin.

    Attributes:
        stages: number of stages, at least 2.
        rounds: chunks of a stage.
        groups: groups of `stages` microbatches.

    >>> schedule = Schedule(stages=2, rounds=2, groups=1)
    >>> schedule.ticks, schedule.bubble
    (5, 0.2)
    >>> print(schedule.drawing())
    stage 0  0a 1a 0b 1b  .
    stage 1   . 0a 1a 0b 1b
    """

    stages: int
    rounds: int
    groups: int

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a pass."""
        return self.groups * self.stages

    @property
    def ticks(self) -> int:
        """Ticks of a forward pass, in each of which a stage computes one chunk."""
        return self.microbatches * self.rounds + self.stages - 1

    @property
    def bubble(self) -> float:
        """Share of its time for which a stage has nothing to compute."""
        return (self.stages - 1) / self.ticks

    @functools.cached_property
    def tick_of(self) -> Int[np.ndarray, "rounds stages microbatches"]:
        """int64, the tick in which a stage computes a round of a microbatch."""
        round_, stage, microbatch = np.indices(
            (self.rounds, self.stages, self.microbatches)
        )
        group, place = divmod(microbatch, self.stages)
        return (group * self.rounds + round_) * self.stages + place + stage

    @functools.cached_property
    def slots(self) -> Int[np.ndarray, "ticks stages 2"]:
        """int32 (round, microbatch) of every stage in every tick; IDLE for none."""
        table = np.full((self.ticks, self.stages, 2), IDLE, np.int32)
        round_, stage, microbatch = np.indices(self.tick_of.shape)
        table[self.tick_of, stage] = np.stack([round_, microbatch], axis=-1)
        return table

    def drawing(self) -> str:
        """Draws the schedule: a line a stage, a column a tick.

        A slot is the number of its microbatch and a letter for its round.
        """
        cells = [
            [_cell(*self.slots[tick, stage].tolist()) for tick in range(self.ticks)]
            for stage in range(self.stages)
        ]
        width = max(len(cell) for line in cells for cell in line)
        return "\n".join(
            f"stage {stage}  " + " ".join(cell.rjust(width) for cell in line)
            for stage, line in enumerate(cells)
        )


def _cell(round_: int, microbatch: int) -> str:
    if round_ == IDLE:
        return "."
    letters, number = "", round_
    while number >= 0:
        number, letter = divmod(number, 26)
        letters, number = chr(ord("a") + letter) + letters, number - 1
    return f"{microbatch}{letters}"


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """A way to make microbatches of rows: each has a row of every device of a stage.

    Outside the stages, rows lie on the devices in the order (stage, other axes of the
    batch, group). Nothing moves when they become a stream.

    Attributes:
        stages: number of stages.
        axes: mesh axes that split the rows of a stage.
        parts: number of their devices, and rows of a microbatch.
        groups: groups of `stages` microbatches.
    """

    stages: int
    axes: tuple[str, ...]
    parts: int
    groups: int

    @classmethod
    def of(cls, rows: int, stages: int, rules: Rules) -> "Microbatches":
        """The microbatches of rows on the mesh of `jax.set_mesh`.

        Args:
            rows: of the batch.
            stages: number of stages.
            rules: sharding of a stage's rows, without the axis of the stages.

        Raises:
            ValueError: the stages do not divide the rows.
        """
        if rows % stages:
            raise ValueError(
                f"batch: pp={stages} divides rows among its stages, so their number "
                f"must be a multiple of {stages}; got {rows}"
            )
        mesh = jax.sharding.get_abstract_mesh()
        axes = dividing_axes("batch", rows // stages, mesh, rules)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        return cls(stages, axes, parts, rows // stages // parts)

    def stream(self, array: Array) -> Array:
        """Rows [rows, ...] as a stream [stages, groups, parts, ...]."""
        array = array.reshape(
            self.stages, self.parts, self.groups, *array.shape[1:]
        ).swapaxes(1, 2)
        spec = P(STAGE_AXIS, None, self.axes)
        return jax.lax.with_sharding_constraint(array, spec)

    def joined(self, stream: Array) -> Array:
        """The rows of a stream."""
        return stream.swapaxes(1, 2).reshape(-1, *stream.shape[3:])

    def numbered(self, array: Array) -> Array:
        """Rows as microbatches [microbatches, parts, ...], on all stages."""
        array = self.stream(array).swapaxes(0, 1)
        array = array.reshape(-1, *array.shape[2:])
        return jax.lax.with_sharding_constraint(array, P(None, self.axes))


class StageSlot(NamedTuple):
    """A stage's work in a tick; int32 scalars.

    Attributes:
        round: which of the stage's chunks.
        microbatch: its number; any where the stage is idle.
    """

    round: Int[Array, ""]
    microbatch: Int[Array, ""]


class _Tick(NamedTuple):
    """A tick of a schedule, as arrays.

    Attributes:
        slots: int32 [stages, 2].
        enters: the group whose microbatches leave their stages for the first; or IDLE.
        left: the group whose results have come back to their stages; or IDLE.
    """

    slots: Any
    enters: Any
    left: Any


def _ticks(schedule: Schedule) -> _Tick:
    enters, left = (np.full(schedule.ticks, IDLE, np.int32) for _ in range(2))
    last = schedule.stages - 1
    for group in range(schedule.groups):
        first = group * schedule.stages
        enters[schedule.tick_of[0, 0, first]] = group
        left[schedule.tick_of[-1, last, first + last]] = group
    return _Tick(schedule.slots, enters, left)


def through_stages(
    schedule: Schedule,
    chunk: Callable[[PyTree, PyTree, StageSlot, PyTree], tuple[PyTree, PyTree]],
    weights: PyTree,
    facts: PyTree,
    stream: PyTree,
) -> tuple[PyTree, PyTree]:
    """Sends microbatches through the stages of the mesh of `jax.set_mesh`.

    Each stage holds the inputs of `groups` microbatches: at [stage, group] of `stream`
    is microbatch group * stages + stage. A group moves along the stages to the first
    one, which takes one in each tick, and its results move back likewise. So no device
    ever holds all microbatches. In an idle slot a stage computes on inputs that it
    holds, and the result is dropped.

    Args:
        schedule: has as many stages as the mesh.
        chunk: computes a slot: from the stage's weights [rounds, ...], the facts, the
            slot and the slot's inputs it returns outputs, of the inputs' shapes, and
            what is told of the slot. It is called in a `shard_map` over the stages
            alone; over the other axes of the mesh arrays are split as outside.
        weights: arrays [stages, rounds, ...].
        facts: arrays that all stages read.
        stream: inputs, arrays [stages, groups, ...].

    Returns:
        The outputs, as `stream`; and what was told, arrays [stages, ticks, ...], in
        idle slots without meaning.
    """
    last = schedule.stages - 1
    forward = [(i, (i + 1) % schedule.stages) for i in range(schedule.stages)]
    backward = [(to, source) for source, to in forward]

    def shift(tree: PyTree, pairs: list[tuple[int, int]]) -> PyTree:
        return jax.tree.map(lambda a: jax.lax.ppermute(a, STAGE_AXIS, pairs), tree)

    def local(
        stages: Array, weights: PyTree, facts: PyTree, stream: PyTree
    ) -> tuple[PyTree, PyTree]:
        weights, stream = jax.tree.map(lambda a: a[0], (weights, stream))
        stage = stages[0]

        def tick(carry: tuple, now: _Tick) -> tuple[tuple, PyTree]:
            passed, entering, leaving, results = carry
            round_, microbatch = now.slots[stage]
            slot = StageSlot(jnp.maximum(round_, 0), jnp.maximum(microbatch, 0))
            entering = _where(now.enters >= 0, _at(stream, now.enters), entering)
            # Idle stages get inputs too: results that pass through more chunks could
            # become infinite, and their gradients NaN. For the same reason the loop
            # begins with inputs, not with zeros.
            fresh = (round_ == IDLE) | ((stage == 0) & (round_ == 0))
            out, told = chunk(weights, facts, slot, _where(fresh, entering, passed))
            leaving = _where(stage == last, out, leaving)
            results = jax.tree.map(
                lambda all_, new: _stored(all_, new, now.left), results, leaving
            )
            carry = (
                shift(out, forward),
                shift(entering, backward),
                shift(leaving, backward),
                results,
            )
            return carry, told

        first = _at(stream, jnp.int32(0))
        zeros = jax.tree.map(jnp.zeros_like, (first, stream))
        begin = (first, first, *zeros)
        (*_, results), told = jax.lax.scan(tick, begin, _ticks(schedule))
        return jax.tree.map(lambda a: a[None], (results, told))

    return jax.shard_map(
        local,
        in_specs=(P(STAGE_AXIS), P(STAGE_AXIS), P(), P(STAGE_AXIS)),
        out_specs=P(STAGE_AXIS),
        axis_names={STAGE_AXIS},
        check_vma=False,
    )(jnp.arange(schedule.stages, dtype=jnp.int32), weights, facts, stream)


def _at(tree: PyTree, index: Array) -> PyTree:
    """Entry `index` of the arrays' first dimension; the first for IDLE."""
    index = jnp.maximum(index, 0)
    return jax.tree.map(
        lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree
    )


def _where(condition: Array, one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _stored(array: Array, new: Array, index: Array) -> Array:
    """The array with `new` at `index` of its first dimension; as it was for IDLE."""
    at = jnp.maximum(index, 0)
    old = jax.lax.dynamic_index_in_dim(array, at, keepdims=False)
    value = jnp.where(index >= 0, new, old)
    return jax.lax.dynamic_update_index_in_dim(array, value, at, 0)
