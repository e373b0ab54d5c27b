"""Computes shardings of arrays and trees from logical axes, rules and a mesh."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.sharding.mesh import MeshError
from jaxrl_post.sharding.rules import DEFAULT_RULES, Rules
from jaxrl_post.types import Array, PyTree

__all__ = [
    "constrain",
    "dividing_axes",
    "named_shardings",
    "on_parts",
    "partition_spec",
    "per_device_bytes",
    "place",
    "placed",
    "split_size",
]

# Axes that are replicated, not refused, if the mesh does not divide them. A
# vocabulary's size is a detail of a tokenizer, key/value heads may be fewer than a
# node's devices, and a vision tower is small (Qwen2.5-VL's MLP is 3420 wide, which 8
# does not divide); every operation over them works split or whole.
REPLICATE_WHEN_UNEVEN = ("vocab", "kv_heads", "tower_heads", "tower_ffn")


def partition_spec(
    shape: Sequence[int],
    axes: Sequence[str | None],
    mesh: Mesh | AbstractMesh,
    rules: Rules = DEFAULT_RULES,
    *,
    name: str = "array",
) -> P:
    """Returns the PartitionSpec of an array whose dimensions have logical `axes`.

    Mesh axes that have size 1 or are not in the mesh are left out.

    Args:
        shape: dimensions of the array.
        axes: a logical axis, or None, for each dimension.
        mesh: its axis sizes are used; the devices are not.
        rules: logical axis to mesh axes.
        name: the array's name in error messages.

    Raises:
        MeshError: a dimension is not divisible by the mesh axes that split it.
    """
    entries: list[str | tuple[str, ...] | None] = []
    for size, axis in zip(shape, axes, strict=True):
        names = tuple(n for n in rules.mesh_axes(axis) if mesh.shape.get(n, 1) > 1)
        parts = math.prod(mesh.shape[n] for n in names)
        if size % parts:
            if axis in REPLICATE_WHEN_UNEVEN:
                names = ()
            else:
                split = " x ".join(f"{n}={mesh.shape[n]}" for n in names)
                raise MeshError(
                    f"mesh: {name} has {axis}={size}, which {split} does not divide; "
                    f"choose sizes whose product divides {size}"
                )
        entries.append(names[0] if len(names) == 1 else names or None)
    return P(*entries)


def dividing_axes(
    axis: str | None, size: int, mesh: Mesh | AbstractMesh, rules: Rules = DEFAULT_RULES
) -> tuple[str, ...]:
    """Returns the mesh axes that split a dimension of `size`, or () if it is uneven.

    With () the dimension is whole on every device.

    >>> mesh = AbstractMesh((2, 4), ("dp", "tp"))
    >>> dividing_axes("batch", 6, mesh), dividing_axes("batch", 7, mesh)
    (('dp',), ())
    """
    names = tuple(n for n in rules.mesh_axes(axis) if mesh.shape.get(n, 1) > 1)
    return () if size % math.prod(mesh.shape[n] for n in names) else names


def place(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Puts NumPy arrays on the devices of a mesh, of one process or of several.

    Args:
        tree: NumPy arrays; in a run of several processes, the same in each of them.
        sharding: of every array.

    Returns:
        The tree of jax arrays. Each process copies what its own devices hold, and no
        process hears from another.

    >>> import numpy as np
    >>> mesh = jax.make_mesh((1,), ("dp",))
    >>> placed = place({"x": np.arange(4)}, NamedSharding(mesh, P("dp")))
    >>> placed["x"].sharding.spec == P("dp")
    True
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    # `device_put` would first compare the arrays of all processes.
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(
            leaf.shape, sharding, leaf.__getitem__
        ),
        tree,
    )


def split_size(
    axis: str, mesh: Mesh | AbstractMesh, rules: Rules = DEFAULT_RULES
) -> int:
    """Returns the number of parts into which a mesh splits a logical axis.

    >>> from jaxrl_post.sharding import create_mesh
    >>> split_size("batch", create_mesh("dp1", jax.devices()[:1]))
    1
    """
    return math.prod(mesh.shape.get(name, 1) for name in rules.mesh_axes(axis))


def named_shardings(specs: PyTree, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> PyTree:
    """Maps a tree of objects with `.shape` and `.axes` to NamedShardings.

    Raises:
        MeshError: a leaf does not fit the mesh; the message names its path.
    """
    is_leaf = lambda leaf: hasattr(leaf, "axes")  # noqa: E731

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "array"
        return NamedSharding(
            mesh, partition_spec(leaf.shape, leaf.axes, mesh, rules, name=name)
        )

    return jax.tree_util.tree_map_with_path(one, specs, is_leaf=is_leaf)


def constrain(
    value: Array, axes: Sequence[str | None], rules: Rules | None = DEFAULT_RULES
) -> Array:
    """Constrains an activation's sharding under the mesh of `jax.set_mesh`.

    Without a mesh it returns `value` unchanged, so that model code runs anywhere; so it
    does with `rules=None`, for an array of one device, as in a `shard_map`. A dimension
    that the mesh does not divide is kept whole.
    """
    if rules is None:
        return value
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return value
    entries = [
        dividing_axes(axis, size, mesh, rules) or None
        for size, axis in zip(value.shape, axes, strict=True)
    ]
    return jax.lax.with_sharding_constraint(value, P(*entries))


def on_parts(
    function: Callable[..., Any], *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Lets each device of the mesh of `jax.set_mesh` compute on its parts of arrays.

    Inside a stage of a pipeline (`sharding.stages`), the parts are split over the
    other axes of the mesh.

    Args:
        function: of the parts; it may exchange them along the mesh's axes.
        in_specs: PartitionSpecs of its arguments, as `jax.shard_map` takes them.
        out_specs: PartitionSpecs of its results.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        # The checker does not know that a gathered value is equal on all devices.
        check_vma=False,
    )


def per_device_bytes(tree: PyTree) -> int:
    """Bytes that the arrays (or ShapeDtypeStructs with a sharding) take on one device.

    >>> import jax.numpy as jnp
    >>> per_device_bytes({"w": jnp.zeros((4, 4), jnp.bfloat16)})
    32
    """
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            total += math.prod(shape) * 8
        else:
            total += math.prod(shape) * leaf.dtype.itemsize
    return total


def placed(shapes: PyTree, layout: PyTree) -> PyTree:
    """Adds shardings to shapes; one sharding may cover a whole subtree."""

    def place(sharding: Any, below: PyTree) -> PyTree:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding
            ),
            below,
        )

    return jax.tree.map(place, layout, shapes)
