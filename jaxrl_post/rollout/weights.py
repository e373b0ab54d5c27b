"""Hands the trainer's parameters to the sampler: the same arrays, or another layout.

A trainer's layout need not suit the sampler. With `fsdp` in the mesh every device holds
a part of every matrix, so each decoded token would gather all weights. `Relayout` then
moves the parameters once a step to the layout that decoding wants, on the same devices.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrl_post.sampler.engine import Engine
from jaxrl_post.sampler.requests import Completion, Request, SampleId, Unfinished
from jaxrl_post.sharding.reshard import Plan, as_target, plan_reshard, reshard
from jaxrl_post.types import Array, PyTree

__all__ = [
    "MovedArrays",
    "Published",
    "Relayout",
    "Transfer",
    "buffer_pointers",
    "bytes_over_links",
]


class Published:
    """The engine bound to one version of the parameters; implements `Sampler`.

    Valid until the next optimizer step, to which the trainer's arrays are donated, or
    until the next version is published.

    Args:
        engine: the engine, which holds no parameters of its own.
        params: the parameters of this version.
        version: recorded with every sampled token.
        bytes_moved: bytes of trained parameters that publishing sent over the links
            between devices; 0 for the trainer's own arrays.
    """

    def __init__(
        self, engine: Engine, params: PyTree, version: int, bytes_moved: int = 0
    ) -> None:
        self.engine, self.params = engine, params
        self.version, self.bytes_moved = version, bytes_moved

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        return self.engine.busy

    @property
    def running(self) -> bool:
        """Whether a burst was started and not collected."""
        return self.engine.running

    @property
    def ended(self) -> bool:
        """Whether `collect` would return at once, with the results of a burst."""
        return self.engine.ended

    def renew(self) -> None:
        """Begins other work, independent of what the engine saw before.

        A run that is resumed here has no guesses to go by, and no keys of an evaluation
        that may have come before with the same parameters.
        """
        self.engine.guessing.restart()
        self.engine.forget()

    def check(self, request: Request) -> None:
        """Raises ValueError if `submit` would refuse the request."""
        self.engine.check(request)

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self.engine.submit(request)

    def dispatch(self) -> None:
        """Starts decoding with the bound parameters; does not wait."""
        self.engine.dispatch(self.params, version=self.version)

    def collect(self) -> list[Completion]:
        """Waits for the first burst; returns finished completions."""
        return self.engine.collect()

    def unfinished(self) -> list[Unfinished]:
        """The tokens of each running sample at the last `collect`."""
        return self.engine.unfinished()

    def settle(self) -> list[Completion]:
        """Waits for all bursts; returns finished completions."""
        return self.engine.settle()

    def cancel(self, samples: Iterable[SampleId] | None = None) -> list[Completion]:
        """Stops samples (all for None); returns completions of the tokens so far."""
        return self.engine.cancel(samples)


class Relayout:
    """Moves a tree of arrays to other shardings on the same devices, group by group.

    Every group of arrays is one jitted program. The arrays of the last call are deleted
    group by group, before their successors are made, so that only one copy in the
    new layout and one group's temporary buffers take memory. An array that already has
    its target's sharding and dtype is passed on as it is. A group whose arrays are the
    same objects as in the last call is not moved again.

    Args:
        targets: tree of ShapeDtypeStructs with a NamedSharding each, all of them on
            the trainer's devices.
        group_bytes: > 0; most bytes that the arrays of a group take on a device, at the
            largest step of their way; a larger array is a group of its own.

    Raises:
        ValueError: `group_bytes` is not positive.

    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxrl_post.sharding import create_mesh
    >>> whole = NamedSharding(create_mesh("dp1", jax.devices()[:1]), P())
    >>> target = jax.ShapeDtypeStruct((4,), jax.numpy.bfloat16, sharding=whole)
    >>> relayout = Relayout({"w": target})
    >>> moved, sent = relayout({"w": jax.device_put(jax.numpy.ones(4), whole)})
    >>> moved["w"].dtype.name, sent
    ('bfloat16', 0)
    """

    def __init__(self, targets: PyTree, *, group_bytes: int = 2**30) -> None:
        if group_bytes <= 0:
            raise ValueError(f"group_bytes must be > 0, got {group_bytes}")
        self.targets = targets
        self._structure = jax.tree.structure(targets)
        self._group_bytes = group_bytes
        self._groups: list[MovedArrays] | None = None
        # The arrays of the last call, and what became of them.
        self._sources: list[Any] = []
        self._placed: list[Any] = []

    def __call__(self, tree: PyTree) -> tuple[PyTree, int]:
        """Returns the tree in the new layout, and the bytes sent between devices.

        The arrays of the last result are deleted, but for those passed on as they are.

        Args:
            tree: arrays of the targets' shapes; in every call in the same layout.

        Raises:
            ValueError: the tree has another structure than the targets.
        """
        leaves, sent = self._leaves(tree), 0
        if self._groups is None:
            self._groups = self._grouped(leaves)
            self._sources = [None] * len(leaves)
            self._placed = [None] * len(leaves)
        for group in self._groups:
            if all(leaves[i] is self._sources[i] for i in group.places):
                continue
            for way in group.ways:
                if self._placed[way.place] is not None:
                    self._placed[way.place].delete()
            made = group([leaves[place] for place in group.places])
            # The next program's temporary buffers come after this one's.
            for way, array in zip(group.ways, jax.block_until_ready(made), strict=True):
                self._placed[way.place] = array
                sent += way.bytes_sent
        self._sources = leaves
        moved = [
            leaf if placed is None else placed
            for leaf, placed in zip(leaves, self._placed, strict=True)
        ]
        return jax.tree.unflatten(self._structure, moved), sent

    def temporary_bytes(self, tree: PyTree) -> int:
        """Temporary bytes per device of the program that needs most, by its compiler.

        Args:
            tree: arrays, or ShapeDtypeStructs with shardings, in the trainer's layout.
        """
        leaves = self._leaves(tree)
        analyses = [
            group.compiled([leaves[place] for place in group.places]).memory_analysis()
            for group in self.groups(tree)
        ]
        return max((found.temp_size_in_bytes for found in analyses), default=0)

    def groups(self, tree: PyTree) -> list["MovedArrays"]:
        """The programs that move a tree, in order; nothing is compiled or moved.

        Args:
            tree: arrays, or ShapeDtypeStructs with shardings, in the trainer's layout.

        Raises:
            ValueError: the tree has another structure than the targets.
        """
        return self._grouped(self._leaves(tree))

    def _leaves(self, tree: PyTree) -> list[Any]:
        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structure:
            raise ValueError("tree: must have the structure of the targets")
        return leaves

    def _grouped(self, leaves: Sequence[Any]) -> list["MovedArrays"]:
        """Groups the arrays that have another layout than their target."""
        groups, total = list[MovedArrays](), 0
        for place, target in enumerate(jax.tree.leaves(self.targets)):
            leaf = leaves[place]
            same = leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim)
            if same and leaf.dtype == target.dtype:
                continue
            way = _Way(place, leaf.dtype, leaf.sharding, target)
            if not groups or total + way.largest_bytes > self._group_bytes:
                groups.append(MovedArrays([]))
                total = 0
            groups[-1].ways.append(way)
            total += way.largest_bytes
        return groups


class Transfer:
    """Copies a tree of arrays to other devices of this process.

    The copies of a call stay valid: later calls make new ones.

    Args:
        targets: tree of ShapeDtypeStructs with a sharding each.
        once: the arrays never change, so that only the first call copies them.
    """

    def __init__(self, targets: PyTree, *, once: bool = False) -> None:
        self.targets, self._once = targets, once
        self._kept: PyTree = None

    def __call__(self, tree: PyTree) -> tuple[PyTree, int]:
        """Returns the tree on the targets' devices, and the bytes that they received.

        The call does not wait for the copies. The sources may be donated afterwards.
        """

        if self._kept is not None:
            return self._kept, 0

        def copy(leaf: Array, target: jax.ShapeDtypeStruct) -> Array:
            return jax.device_put(leaf.astype(target.dtype), target.sharding)

        moved = jax.tree.map(copy, tree, self.targets)
        sent = sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape))
            * leaf.dtype.itemsize
            * leaf.sharding.num_devices
            for leaf in jax.tree.leaves(moved)
        )
        if self._once:
            self._kept = moved
        return moved, sent


@dataclass(frozen=True)
class _Way:
    """The way of one array: its place in the tree, and its target."""

    place: int
    dtype: Any
    source: NamedSharding
    target: jax.ShapeDtypeStruct

    @cached_property
    def plan(self) -> Plan | None:
        assert isinstance(self.target.sharding, NamedSharding)
        return plan_reshard(self.target.shape, self.source, self.target.sharding)

    @property
    def sent_dtype(self) -> Any:
        """The narrower of the two dtypes."""
        return min(self.dtype, self.target.dtype, key=lambda dtype: dtype.itemsize)

    @property
    def bytes_sent(self) -> int:
        """Bytes that devices receive from others."""
        if self.plan is None:
            # XLA's way is not known; it sends at least what devices lack.
            source = jax.ShapeDtypeStruct(
                self.target.shape, self.dtype, sharding=self.source
            )
            return bytes_over_links(source, self.target)
        return self.plan.values_sent(self.target.shape) * self.sent_dtype.itemsize

    @property
    def largest_bytes(self) -> int:
        """Bytes on a device of the largest part on the way."""
        shape = self.target.shape
        if self.plan is None:
            return math.prod(shape) * self.target.dtype.itemsize
        return self.plan.largest(shape) * self.target.dtype.itemsize

    def __call__(self, array: Array) -> Array:
        array = array.astype(self.sent_dtype)
        if self.plan is not None:
            array = reshard(array, self.plan)
        return array.astype(self.target.dtype)

    def arrived(self, array: Array) -> Array:
        """Gives the moved array the target's mesh."""
        assert isinstance(self.target.sharding, NamedSharding)
        return array if self.plan is None else as_target(array, self.target.sharding)


@dataclass
class MovedArrays:
    """Arrays that one program of a `Relayout` moves.

    Attributes:
        ways: where each array goes.
    """

    ways: list[_Way]

    def __call__(self, arrays: list[Array]) -> list[Array]:
        with jax.set_mesh(self.mesh):
            made = self.program(arrays)
        return [way.arrived(array) for way, array in zip(self.ways, made, strict=True)]

    def compiled(self, arrays: list[Any]) -> Any:
        """The compiled program."""
        with jax.set_mesh(self.mesh):
            return self.program.lower(arrays).compile()

    @property
    def places(self) -> list[int]:
        """Places of the arrays among the leaves of the tree."""
        return [way.place for way in self.ways]

    @property
    def bytes_sent(self) -> int:
        """Bytes that all devices together receive from others."""
        return sum(way.bytes_sent for way in self.ways)

    @property
    def mesh(self) -> Mesh:
        """The mesh that is set around the program."""
        # All arrays come from one mesh and go to one mesh.
        way = self.ways[0]
        mesh = way.source.mesh if way.plan is None else way.plan.mesh
        assert isinstance(mesh, Mesh)
        return mesh

    @cached_property
    def program(self) -> Any:
        """The jitted function, from the list of arrays to the list of moved ones."""

        def relayout(arrays: list[Array]) -> list[Array]:
            return [way(array) for way, array in zip(self.ways, arrays, strict=True)]

        shardings = [
            way.target.sharding if way.plan is None else way.plan.sharding
            for way in self.ways
        ]
        return jax.jit(relayout, out_shardings=shardings)


def bytes_over_links(source: Any, target: jax.ShapeDtypeStruct) -> int:
    """Bytes that devices receive from others when an array gets another layout.

    A device needs its part of the target, and has what overlaps with its part of the
    source. Values are sent in the narrower of the two dtypes.

    Args:
        source: an array, or a ShapeDtypeStruct with a sharding.
        target: its layout afterwards, on the same devices.

    >>> from jax.sharding import PartitionSpec as P
    >>> from jaxrl_post.sharding import create_mesh
    >>> whole = NamedSharding(create_mesh("dp1", jax.devices()[:1]), P())
    >>> array = jax.device_put(jax.numpy.ones(4), whole)
    >>> bytes_over_links(array, jax.ShapeDtypeStruct((4,), "float32", sharding=whole))
    0
    """
    width = min(source.dtype.itemsize, target.dtype.itemsize)
    return width * _values_over_links(source.shape, source.sharding, target.sharding)


@functools.cache
def _values_over_links(
    shape: tuple[int, ...], source: NamedSharding, target: NamedSharding
) -> int:
    def bounds(index: tuple[slice, ...]) -> list[tuple[int, int, int]]:
        return [part.indices(n) for part, n in zip(index, shape, strict=True)]

    has, total = source.devices_indices_map(shape), 0
    for device, index in target.devices_indices_map(shape).items():
        wanted, own = bounds(index), bounds(has[device])
        common = math.prod(
            max(0, min(a[1], b[1]) - max(a[0], b[0]))
            for a, b in zip(wanted, own, strict=True)
        )
        total += math.prod(stop - start for start, stop, _ in wanted) - common
    return total


def buffer_pointers(tree: PyTree) -> list[tuple[int, int]]:
    """(device id, address) of every local shard; equal addresses mean no copy."""
    return [
        (shard.device.id, shard.data.unsafe_buffer_pointer())
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]
