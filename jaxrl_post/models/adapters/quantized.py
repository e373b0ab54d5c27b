"""Weights in eight or four bits, for a base that is not trained (QLoRA).

A quantised matrix is a node of the parameter tree with its codes and scales. It is made
dense in the activations' dtype where it multiplies, one matrix at a time.

Written here and not taken from qwix: its four-bit type flattens the array on the way
in and out, which undoes the sharding, and its models are modules, not plain trees.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxrl_post.models.matrix import (
    Axes,
    expert_dims,
    grouped,
    input_dims,
    is_matrix,
    matrices,
    multiply,
    path_name,
    scale_axes,
    target_name,
)
from jaxrl_post.models.params import DecoderParams
from jaxrl_post.types import Array, Float, Int, UInt

__all__ = ["BLOCK", "NF4", "NF4_VALUES", "Int8", "quantize"]

Kind = Literal["int8", "nf4"]

BLOCK = 64
LARGEST = 127

# The dim of experts' own matrices that no device holds a part of when it multiplies.
HIDDEN = {"expert_gate": (1,), "expert_up": (1,), "expert_down": (2,)}

# QLoRA, appendix E: quantiles of the normal distribution scaled to [-1, 1], seven
# negative and eight positive, and zero.
NF4_VALUES = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
BORDERS = (NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2


# The backward pass makes the matrix dense again: to keep what the forward pass made
# would be to hold the whole model unquantised.
@functools.partial(jax.checkpoint, static_argnums=2)
def _multiply(x: Array, weight: Any, inputs: int) -> Array:
    return multiply(x, weight.dense(x.dtype), inputs)


@jax.checkpoint
def _grouped(x: Array, weight: Any, sizes: Array) -> Array:
    return grouped(x, weight.dense(x.dtype), sizes)


class Quantized:
    """What both kinds do alike: codes and scales, made dense where they multiply."""

    codes: Any
    scales: Any

    def multiply(self, x: Float[Array, "tokens inner"], inputs: int) -> Array:
        """x W, in x's dtype."""
        return _multiply(x, self, inputs)

    def grouped(
        self, x: Float[Array, "rows inner"], sizes: Int[Array, " experts"]
    ) -> Array:
        """x W of experts' own, in x's dtype."""
        return _grouped(x, self, sizes)

    def part_axes(self, axes: Axes) -> "Quantized":
        """Axes in the place of codes and scales."""
        scales = scale_axes(self.scales.shape, axes)
        return self.replace(codes=axes, scales=scales)  # type: ignore[attr-defined]


@struct.dataclass
class Int8(Quantized):
    """A matrix W = codes * scales, symmetric, with one scale for every output.

    Attributes:
        codes: int8 in [-127, 127], of the matrix's shape.
        scales: float32, of size 1 in the dims that are summed over.
        dtype: of the matrix that was quantised.
    """

    codes: Int[Array, "..."]
    scales: Float[Array, "..."]
    dtype: Any = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Number of its dims."""
        return self.codes.ndim

    def dense(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """The matrix; the product is rounded once, from float32."""
        return (self.codes.astype(jnp.float32) * self.scales).astype(dtype)


@struct.dataclass
class NF4(Quantized):
    """A matrix in four bits: NF4_VALUES[code] times the largest size in its block.

    Attributes:
        codes: uint8, of the matrix's shape with `dim` halved: element 2 i along `dim`
            in the low half of byte i, element 2 i + 1 in the high one.
        scales: bfloat16, of the matrix's shape with one element for every block.
        dim: along which blocks lie.
        dtype: of the matrix that was quantised.
    """

    codes: UInt[Array, "..."]
    scales: Float[Array, "..."]
    dim: int = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        shape = self.codes.shape
        return (*shape[: self.dim], 2 * shape[self.dim], *shape[self.dim + 1 :])

    @property
    def ndim(self) -> int:
        """Number of its dims."""
        return self.codes.ndim

    def dense(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """The matrix; the product is rounded once, from float32."""
        halves = jnp.stack([self.codes & 15, self.codes >> 4], axis=self.dim + 1)
        table = jnp.asarray(NF4_VALUES)
        # A byte's half is never out of bounds.
        values = table.at[halves].get(mode="promise_in_bounds")
        blocks = self.scales.shape[self.dim]
        blocked = _blocked(values.reshape(self.shape), self.dim, blocks)
        scales = jnp.expand_dims(self.scales.astype(jnp.float32), self.dim + 1)
        return (blocked * scales).reshape(self.shape).astype(dtype)


def quantize(
    params: DecoderParams[Array],
    kind: Kind = "nf4",
    *,
    block: int = BLOCK,
    donate: bool = False,
) -> DecoderParams[Any]:
    """Quantises the matrices of attention and of MLPs, experts' own among them.

    Embeddings, heads, norms, biases and routers stay arrays. The codes keep the
    sharding of what they come from; so do the scales, but for a dim that they have too
    few of to split.

    Args:
        params: arrays, not tracers; or ShapeDtypeStructs, for those of the result.
        kind: "int8": symmetric, one float32 scale for each output, 8 bits an element.
            "nf4": blocks that share a bfloat16 scale, 4.25 bits an element with blocks
            of 64. (The paper's second quantisation, of the scales, gives 4.13.)
        block: nf4 only: elements that share a scale, even. They lie along the matrix's
            longest dim that this divides; in experts' own along the hidden one, of
            which a device that multiplies has all.
        donate: frees every matrix when its codes are made, so that only one is in
            memory twice; `params` can then be used no more.

    Returns:
        The tree with `Int8` or `NF4` in the place of those matrices.

    Raises:
        ValueError: a matrix that blocks do not fit, or whose codes a mesh does not
            divide as it does the matrix, or that is quantised or adapted already; an
            odd block.

    References:
        Dettmers et al., QLoRA, arXiv:2305.14314.

    >>> import jax
    >>> from jaxrl_post.models import ModelConfig, initialize, param_specs
    >>> config = ModelConfig("llama", 32, 64, 64, 1, num_heads=4, num_kv_heads=2)
    >>> params = quantize(initialize(jax.random.key(0), param_specs(config)))
    >>> gate = params.layers[0].mlp.gate
    >>> gate.shape, gate.codes.shape, gate.scales.shape
    ((64, 64), (32, 64), (1, 64))
    """
    if block < 2 or block % 2:
        raise ValueError(f"block: must be even and at least 2; got {block}")
    wanted = matrices(params)

    def one(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        if name not in wanted:
            return leaf
        if is_matrix(leaf):
            raise ValueError(
                f"params: {name} is {type(leaf).__name__} already; quantise the arrays "
                "of the base, then adapt"
            )
        if kind == "int8":
            first = expert_dims(name)
            made = _int8(leaf, tuple(range(first, first + input_dims(name))))
        else:
            made = _nf4(leaf, block, name)
        if donate:
            jax.block_until_ready(made)
            leaf.delete()
        return made

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_matrix)


def _int8(weight: Array | jax.ShapeDtypeStruct, inputs: tuple[int, ...]) -> Int8:
    """`inputs` are the dims that are summed over."""
    shape = tuple(1 if dim in inputs else size for dim, size in enumerate(weight.shape))
    shardings = _like(weight, weight.shape), _like(weight, shape)
    make = jax.jit(_int8_codes, static_argnums=1, out_shardings=shardings)
    return Int8(*_made(make, weight, inputs), dtype=weight.dtype)


def _int8_codes(weight: Array, inputs: tuple[int, ...]) -> tuple[Array, Array]:
    wide = weight.astype(jnp.float32)
    largest = jnp.abs(wide).max(axis=inputs, keepdims=True)
    scales = _nonzero(largest) / LARGEST
    return jnp.rint(wide / scales).astype(jnp.int8), scales


def _nf4(weight: Array | jax.ShapeDtypeStruct, block: int, name: str) -> NF4:
    along = HIDDEN.get(target_name(name), range(weight.ndim))
    fits = [
        size if size % block == 0 and dim in along else 0
        for dim, size in enumerate(weight.shape)
    ]
    size = max(fits)
    if not size:
        raise ValueError(
            "block: must divide a dim of every matrix, the hidden one of experts' own; "
            f"got {block}, and {name} has shape {weight.shape}"
        )
    dim = fits.index(size)
    before, after = weight.shape[:dim], weight.shape[dim + 1 :]
    shardings = (
        _like(weight, (*before, size // 2, *after)),
        _like(weight, (*before, size // block, *after)),
    )
    if shardings[0] is not None and shardings[0].spec != _spec(weight):
        raise ValueError(
            f"params: {name} {weight.shape} is split as {_spec(weight)}, and a byte "
            f"holds two elements along dim {dim}, of which the mesh does not divide "
            "the half; use int8, or other sizes of the mesh"
        )
    make = jax.jit(_nf4_codes, static_argnums=(1, 2), out_shardings=shardings)
    return NF4(*_made(make, weight, dim, block), dim=dim, dtype=weight.dtype)


def _nf4_codes(weight: Array, dim: int, block: int) -> tuple[Array, Array]:
    blocks = weight.shape[dim] // block
    blocked = _blocked(weight.astype(jnp.float32), dim, blocks)
    # Rounded before the codes are chosen, so that these fit what is stored.
    scales = _nonzero(jnp.abs(blocked).max(axis=dim + 1)).astype(jnp.bfloat16)
    relative = blocked / jnp.expand_dims(scales.astype(jnp.float32), dim + 1)
    borders = jnp.asarray(BORDERS)
    # Every code is the number of borders below; one pass, nothing is sorted.
    codes = jnp.searchsorted(borders, relative, method="compare_all").astype(jnp.uint8)
    low, high = jnp.moveaxis(_blocked(codes.reshape(weight.shape), dim, -1), dim + 1, 0)
    return low | (high << 4), scales


def _made(make: Any, weight: Any, *static: Any) -> Any:
    """Codes and scales of an array; of a shape, their shapes and shardings."""
    shape_alone = isinstance(weight, jax.ShapeDtypeStruct)
    return (make.eval_shape if shape_alone else make)(weight, *static)


def _blocked(array: Array, dim: int, blocks: int) -> Array:
    """Splits a dim into blocks of one size; -1 for as many as make pairs."""
    shape, size = array.shape, array.shape[dim]
    blocks = size // 2 if blocks == -1 else blocks
    return array.reshape(*shape[:dim], blocks, size // blocks, *shape[dim + 1 :])


def _nonzero(scales: Array) -> Array:
    """A block of zeros is zeros with any scale, but not with 0 / 0."""
    return jnp.where(scales == 0, jnp.ones_like(scales), scales)


def _like(
    weight: Array | jax.ShapeDtypeStruct, shape: tuple[int, ...]
) -> NamedSharding | None:
    """The matrix's sharding for a smaller array; what does not divide stays whole."""
    sharding = weight.sharding
    if not isinstance(sharding, NamedSharding):
        return None

    def fits(size: int, names: Any) -> bool:
        axes = (names,) if isinstance(names, str) else names or ()
        return size % math.prod(sharding.mesh.shape[axis] for axis in axes) == 0

    kept = (
        names if fits(size, names) else None
        for size, names in zip(shape, _spec(weight), strict=True)
    )
    return NamedSharding(sharding.mesh, P(*kept))


def _spec(weight: Array | jax.ShapeDtypeStruct) -> P:
    """The matrix's partition, with an entry for every dim."""
    assert isinstance(weight.sharding, NamedSharding)
    return P(*(*weight.sharding.spec, *(None,) * weight.ndim)[: weight.ndim])
