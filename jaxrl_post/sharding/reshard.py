"""Moves arrays from one mesh to another over the same devices, with little memory.

XLA gathers a whole array on every device where it finds no short way between two
shardings, as between `fsdp8` and `dp2,tp4`. Here every step is one collective whose
result is never larger than it has to be.

The axes of both meshes are products of common factors: 8 = 2 x 4 has the factors 2 and
4; fsdp8 is their product, and dp2 and tp4 are one each. A dimension of an array is then
split by a list of factors, the slowest first. Only the last factor of a list can be
taken off, and only a new last one can be put on, like on a stack:

    move    from one dimension to another      all-to-all
    join    off a dimension, for good          all-gather
    split   onto a dimension                   a slice, without communication
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.types import Array

__all__ = ["Plan", "as_target", "plan_reshard", "reshard"]

# The factors that split each dimension of an array, by their place in the mesh.
type Stacks = tuple[tuple[int, ...], ...]


class Hop(NamedTuple):
    """One collective, or a slice.

    Attributes:
        kind: see the module's docstring.
        factor: place of the factor in the mesh of factors.
        source: dimension that it is taken off; -1 for a split.
        target: dimension that it is put on; -1 for a join.
    """

    kind: Literal["move", "join", "split"]
    factor: int
    source: int
    target: int


@dataclass(frozen=True)
class Plan:
    """Steps that move an array from one sharding to another.

    Attributes:
        mesh: the mesh of the common factors.
        begin: the source's factors.
        steps: in order.
        end: the target's factors.
    """

    mesh: Mesh
    begin: Stacks
    steps: tuple[Hop, ...]
    end: Stacks

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the result, on the mesh of the factors."""
        return NamedSharding(self.mesh, _spec(self.end, self.mesh))

    def values_sent(self, shape: tuple[int, ...]) -> int:
        """Number of values that devices receive from others, over all devices."""
        total, local = 0, _local(shape, self.begin, self.mesh)
        for step in self.steps:
            size = self.mesh.devices.shape[step.factor]
            if step.kind == "move":
                total += local * (size - 1) // size
            elif step.kind == "join":
                total += local * (size - 1)
                local *= size
            else:
                local //= size
        return total * self.mesh.size

    def largest(self, shape: tuple[int, ...]) -> int:
        """Number of values of the largest part that a device holds on the way."""
        most = local = _local(shape, self.begin, self.mesh)
        for step in self.steps:
            size = self.mesh.devices.shape[step.factor]
            if step.kind != "move":
                local = local * size if step.kind == "join" else local // size
            most = max(most, local)
        return most


@functools.cache
def plan_reshard(
    shape: tuple[int, ...], source: NamedSharding, target: NamedSharding
) -> Plan | None:
    """Plans the way of an array from one sharding to another.

    Args:
        shape: of the array.
        source: its sharding.
        target: its sharding afterwards, on the same devices in any order.

    Returns:
        The plan; None if the meshes have no common factors, such as 2 x 3 and 3 x 2, or
        list their devices in unrelated orders.

    >>> from jaxrl_post.sharding import create_mesh
    >>> whole = NamedSharding(create_mesh("dp1", jax.devices()[:1]), P())
    >>> plan_reshard((4, 4), whole, whole).steps
    ()
    """
    one, other = source.mesh, target.mesh
    assert isinstance(one, Mesh)
    assert isinstance(other, Mesh)
    devices = list(one.devices.flat)
    strides = _strides(one, devices), _strides(other, devices)
    factors = _factors([part for axes in strides for axis in axes for part in axis])
    if factors is None or math.prod(factors) != len(devices):
        return None
    begin, end = (
        _stacks(sharding, axes, len(shape), factors)
        for sharding, axes in zip((source, target), strides, strict=True)
    )
    names = tuple(f"factor{place}" for place in range(len(factors)))
    grid = np.array(devices, dtype=object).reshape(factors)
    mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    for stacks, sharding in ((begin, source), (end, target)):
        if _parts(shape, NamedSharding(mesh, _spec(stacks, mesh))) != _parts(
            shape, sharding
        ):
            return None  # The mesh steps through the devices irregularly.
    steps = tuple(_steps(shape, list(map(list, begin)), end, factors))
    return Plan(mesh, begin, steps, end)


def reshard(array: Array, plan: Plan) -> Array:
    """Carries out a plan, inside jit.

    Args:
        array: with the source's sharding.
        plan: from `plan_reshard`.

    Returns:
        The array with the sharding `plan.sharding`. Every device has its part of the
        target; `as_target` gives it the target's mesh outside of jit.
    """
    names, sizes = plan.mesh.axis_names, plan.mesh.devices.shape

    def local(part: Array) -> Array:
        for kind, factor, source, target in plan.steps:
            name = names[factor]
            if kind == "move":
                part = jax.lax.all_to_all(part, name, target, source, tiled=True)
            elif kind == "join":
                part = jax.lax.all_gather(part, name, axis=source, tiled=True)
            else:
                size = part.shape[target] // sizes[factor]
                start = jax.lax.axis_index(name) * size
                part = jax.lax.dynamic_slice_in_dim(part, start, size, target)
        return part

    return jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=_spec(plan.begin, plan.mesh),
        out_specs=_spec(plan.end, plan.mesh),
        # The checker does not know that a gathered value is equal on all devices.
        check_vma=False,
    )(array)


def as_target(array: Array, target: NamedSharding) -> Array:
    """Gives the result of `reshard` its mesh; the same buffers, nothing is copied."""
    held = {shard.device: shard.data for shard in array.addressable_shards}
    parts = [held[device] for device in target.addressable_devices]
    return jax.make_array_from_single_device_arrays(array.shape, target, parts)


# (size, stride) of the factors of an axis, the slowest first.
type Strides = tuple[tuple[int, int], ...]


def _parts(shape: tuple[int, ...], sharding: NamedSharding) -> dict[Any, Any]:
    """The part of an array on each device."""
    return {
        device: [part.indices(n) for part, n in zip(index, shape, strict=True)]
        for device, index in sharding.devices_indices_map(shape).items()
    }


def _strides(mesh: Mesh, devices: list[Any]) -> list[Strides]:
    """Strides of each axis of a mesh through a list of its devices."""
    places = {device: place for place, device in enumerate(devices)}
    grid = np.vectorize(places.__getitem__, otypes=[int])(mesh.devices)
    found = []
    for axis, size in enumerate(grid.shape):
        index: list[Any] = [0] * grid.ndim
        index[axis] = slice(None)
        line = grid[tuple(index)]
        parts, inner = list[tuple[int, int]](), 1
        while inner < size:
            stride, count = int(line[inner] - line[0]), 1
            while inner * count < size and line[inner * count] - line[0] == (
                stride * count
            ):
                count += 1
            parts.append((count, stride))
            inner *= count
        found.append(tuple(reversed(parts)))
    return found


def _factors(parts: list[tuple[int, int]]) -> tuple[int, ...] | None:
    """Sizes of the coarsest mesh whose products give all axes, slowest first."""
    cuts = sorted({1} | {s for size, stride in parts for s in (stride, stride * size)})
    if cuts[0] < 1 or any(larger % cut for cut, larger in itertools.pairwise(cuts)):
        return None
    sizes = [larger // cut for cut, larger in itertools.pairwise(cuts)]
    return tuple(reversed(sizes)) or (1,)


def _stacks(
    sharding: NamedSharding,
    strides: list[Strides],
    ndim: int,
    factors: tuple[int, ...],
) -> Stacks:
    """The factors that split each dimension."""
    # The stride of each factor, by its place.
    steps = [math.prod(factors[place + 1 :]) for place in range(len(factors))]
    places = {}
    for axis, parts in zip(sharding.mesh.axis_names, strides, strict=True):
        places[axis] = tuple(
            place
            for size, stride in parts
            for place, step in enumerate(steps)
            if stride <= step < stride * size
        )
    stacks = []
    for entry in (*sharding.spec, *(None,) * ndim)[:ndim]:
        axes = (entry,) if isinstance(entry, str) else entry or ()
        stacks.append(tuple(place for axis in axes for place in places[axis]))
    return tuple(stacks)


def _steps(
    shape: tuple[int, ...],
    stacks: list[list[int]],
    end: Stacks,
    factors: tuple[int, ...],
) -> Iterator[Hop]:
    """Yields steps, and changes `stacks` to `end` meanwhile.

    A factor that is in the way of another is put aside on some dimension that it
    divides. Where there is none it is joined, and split again later.
    """
    wanted = {factor: dim for dim, stack in enumerate(end) for factor in stack}

    def settled(dim: int) -> bool:
        """Whether a dimension has only factors that stay where they are."""
        return tuple(stacks[dim]) == end[dim][: len(stacks[dim])]

    def ready(factor: int) -> bool:
        """Whether a factor's place is free: all that come before it are there."""
        dim = wanted[factor]
        return settled(dim) and end[dim][len(stacks[dim])] == factor

    def divides(factor: int, dim: int) -> bool:
        parts = math.prod(factors[place] for place in stacks[dim])
        return shape[dim] % (parts * factors[factor]) == 0

    def move(source: int, target: int) -> Hop:
        factor = stacks[source].pop()
        stacks[target].append(factor)
        return Hop("move", factor, source, target)

    held = {factor for stack in stacks for factor in stack}
    aside = list[int]()
    while any(tuple(stack) != end[dim] for dim, stack in enumerate(stacks)):
        loose = [dim for dim in range(len(stacks)) if not settled(dim)]
        tops = [(dim, stacks[dim][-1]) for dim in loose]
        direct = [dim for dim, top in tops if top in wanted and ready(top)]
        unheld = [f for f in wanted if f not in held and ready(f)]
        if direct:
            yield move(direct[0], wanted[stacks[direct[0]][-1]])
            continue
        if unheld:
            held.add(unheld[0])
            stacks[wanted[unheld[0]]].append(unheld[0])
            yield Hop("split", unheld[0], -1, wanted[unheld[0]])
            continue
        # Joining makes parts larger, so what is only in the way is put aside first.
        blocking = [(dim, top) for dim, top in tops if top in wanted]
        places = [
            (dim, other)
            for dim, top in blocking
            for other in range(len(stacks))
            if top not in aside and other != dim and divides(top, other)
        ]
        # Best on a dimension where nothing has to be put on or taken off any more.
        places.sort(key=lambda place: tuple(stacks[place[1]]) != end[place[1]])
        if places:
            aside.append(stacks[places[0][0]][-1])
            yield move(*places[0])
            continue
        spare = [dim for dim, top in tops if top not in wanted]
        dim = (spare or [dim for dim, _ in blocking])[0]
        factor = stacks[dim].pop()
        held.discard(factor)
        yield Hop("join", factor, dim, -1)


def _spec(stacks: Stacks, mesh: Mesh) -> P:
    return P(*(tuple(mesh.axis_names[place] for place in stack) for stack in stacks))


def _local(shape: tuple[int, ...], stacks: Stacks, mesh: Mesh) -> int:
    parts = [mesh.devices.shape[place] for stack in stacks for place in stack]
    return math.prod(shape) // math.prod(parts)
