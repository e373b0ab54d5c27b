"""Weights in eight or four bits, for a frozen base (QLoRA) or for the sampler.

A quantised matrix is a node of the parameter tree with codes and scales. A product with
eight bits multiplies by the codes, which every activation dtype holds exactly, and then
by the scales. One with four bits dequantises its matrix to the activations' dtype. So
does one of routed experts. One matrix is dequantised at a time.

We do not use qwix: its four-bit type flattens an array in both directions, which loses
the sharding, and its models are modules, not plain trees.
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

from jaxrl_post.models.adapters.eight_bits import (
    Codes,
    grouped_product,
    product,
    to_codes,
)
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
from jaxrl_post.types import Array, Float, Int, Num, UInt

__all__ = ["BLOCK", "NF4", "NF4_VALUES", "EightBit", "Quantizer", "quantize"]

Kind = Literal["int8", "float8", "nf4"]

BLOCK = 64

# The hidden dim of routed experts' matrices, which is not sharded in their products.
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


# The backward pass dequantises again: keeping the matrices of the forward pass would
# hold the whole model unquantised.
@functools.partial(jax.checkpoint, static_argnums=2)
def _multiply(x: Array, weight: Any, inputs: int) -> Array:
    return multiply(x, weight.dense(x.dtype), inputs)


@jax.checkpoint
def _grouped(x: Array, weight: Any, sizes: Array) -> Array:
    return grouped(x, weight.dense(x.dtype), sizes)


# The scales belong to the outputs, so the product's sums are multiplied by them.
@functools.partial(jax.checkpoint, static_argnums=2)
def _multiply_codes(x: Array, weight: Any, inputs: int) -> Array:
    inner = math.prod(weight.shape[:inputs])
    codes = weight.codes.reshape(inner, -1).astype(x.dtype)
    sums = jnp.matmul(x, codes, preferred_element_type=jnp.float32)
    return (sums * weight.scales.reshape(1, -1)).astype(x.dtype)


class Quantized:
    """Base class of both kinds: codes and scales."""

    codes: Any
    scales: Any

    def multiply(self, x: Float[Array, "tokens inner"], inputs: int) -> Array:
        """Returns x W in x's dtype."""
        return _multiply(x, self, inputs)

    def grouped(
        self, x: Float[Array, "rows inner"], sizes: Int[Array, " experts"]
    ) -> Array:
        """Returns x W of routed experts in x's dtype."""
        return _grouped(x, self, sizes)

    def part_axes(self, axes: Axes) -> "Quantized":
        """Replaces codes and scales by their axes."""
        scales = scale_axes(self.scales.shape, axes)
        return self.replace(codes=axes, scales=scales)  # type: ignore[attr-defined]


@struct.dataclass
class EightBit(Quantized):
    """A matrix W = codes * scales, symmetric, with one scale per output.

    Attributes:
        codes: int8 in [-127, 127], or float8_e4m3fn in [-448, 448], of the matrix's
            shape.
        scales: float32, of size 1 in the input dims.
        dtype: dtype of the original matrix.
        rounds_inputs: of float8: whether products round their inputs too, as in
            training with `float8.in_float8`.
    """

    codes: Num[Array, "..."]
    scales: Float[Array, "..."]
    dtype: Any = struct.field(pytree_node=False)
    rounds_inputs: bool = struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """The matrix's number of dims."""
        return self.codes.ndim

    def multiply(self, x: Float[Array, "tokens inner"], inputs: int) -> Array:
        """Returns x W in x's dtype; sums are float32."""
        if self.rounds_inputs:
            inner = math.prod(self.shape[:inputs])
            codes, scales = self.codes.reshape(inner, -1), self.scales.reshape(1, -1)
            return product(*to_codes(x, "float8", (1,)), codes, scales, x.dtype)
        return _multiply_codes(x, self, inputs)

    def grouped(
        self, x: Float[Array, "rows inner"], sizes: Int[Array, " experts"]
    ) -> Array:
        """Returns x W of routed experts in x's dtype."""
        if self.rounds_inputs:
            rounded = to_codes(x, "float8", (1,))
            return grouped_product(*rounded, self.codes, self.scales, sizes, x.dtype)
        return super().grouped(x, sizes)

    def dense(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Dequantises the matrix in float32 and rounds it once to `dtype`."""
        return (self.codes.astype(jnp.float32) * self.scales).astype(dtype)


@struct.dataclass
class NF4(Quantized):
    """A matrix in four bits: NF4_VALUES[code] times its block's largest magnitude.

    Attributes:
        codes: uint8, of the matrix's shape with `dim` halved: element 2 i along `dim`
            in the low half of byte i, element 2 i + 1 in the high half.
        scales: bfloat16, of the matrix's shape with one element per block along `dim`.
        dim: the matrix's dim that is split into blocks.
        dtype: dtype of the original matrix.
    """

    codes: UInt[Array, "..."]
    scales: Float[Array, "..."]
    dim: int = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        shape = self.codes.shape
        return (*shape[: self.dim], 2 * shape[self.dim], *shape[self.dim + 1 :])

    @property
    def ndim(self) -> int:
        """The matrix's number of dims."""
        return self.codes.ndim

    def dense(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Dequantises the matrix in float32 and rounds it once to `dtype`."""
        halves = jnp.stack([self.codes & 15, self.codes >> 4], axis=self.dim + 1)
        table = jnp.asarray(NF4_VALUES)
        # Half a byte is at most 15, so it is never out of bounds.
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
    rounds_inputs: bool = False,
    donate: bool = False,
) -> DecoderParams[Any]:
    """Quantises the matrices of attention, MLPs and routed experts.

    Embeddings, heads, norms, biases and routers stay arrays. The codes keep the
    sharding of their matrix. The scales keep it too, but dims of the scales that the
    mesh does not divide are replicated.

    Args:
        params: arrays, not tracers; ShapeDtypeStructs give ShapeDtypeStructs.
        kind: "int8", "float8" (e4m3): symmetric, one float32 scale per output, 8 bits
            per element.
            "nf4": blocks that share a bfloat16 scale, 4.25 bits per element with blocks
            of 64. (The paper's second quantisation, of the scales, gives 4.13.)
        block: nf4 only: number of elements that share a scale, even. Blocks lie along
            the longest dim that `block` divides; for routed experts along the hidden
            dim, which is not sharded in their products.
        rounds_inputs: float8 only: whether products round their inputs too, token by
            token.
        donate: whether to free every matrix once it is quantised, so that only one is
            in memory twice; `params` must not be used again.

    Returns:
        The tree, in which `EightBit` or `NF4` replaces these matrices.

    Raises:
        ValueError: `block` is odd or does not divide a matrix; the mesh cannot shard a
            matrix's codes like the matrix; a matrix is already quantised or adapted.

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
        if kind == "nf4":
            made = _nf4(leaf, block, name)
        else:
            first = expert_dims(name)
            inputs = tuple(range(first, first + input_dims(name)))
            made = _eight_bit(leaf, kind, inputs, rounds_inputs)
        if donate:
            jax.block_until_ready(made)
            leaf.delete()
        return made

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_matrix)


class Quantizer:
    """Quantises versions of the same parameters, one after the other.

    The codes of a version are deleted before the next version's are made. Arrays that
    are not quantised are the version's own.

    Args:
        kind: "int8" or "float8", as in `quantize`.
        rounds_inputs: as in `quantize`.
    """

    def __init__(self, kind: Kind, *, rounds_inputs: bool = False) -> None:
        self.kind: Kind = kind
        self.rounds_inputs = rounds_inputs
        self._sources: list[Any] = []
        self._made: Any = None

    def __call__(self, params: DecoderParams[Array]) -> DecoderParams[Any]:
        """Quantises a version; the same arrays as in the last call give its result.

        Args:
            params: as for `quantize`.
        """
        sources = jax.tree.leaves(params)
        if len(sources) != len(self._sources) or any(
            new is not old for new, old in zip(sources, self._sources, strict=True)
        ):
            for matrix in matrices(self._made).values():
                jax.tree.map(lambda array: array.delete(), matrix)
            self._made = self.quantized(params)
            self._sources = sources
        return self._made

    def quantized(self, params: DecoderParams[Any]) -> DecoderParams[Any]:
        """As a call, also for ShapeDtypeStructs; nothing is kept or deleted."""
        return quantize(params, self.kind, rounds_inputs=self.rounds_inputs)


def _eight_bit(
    weight: Array | jax.ShapeDtypeStruct,
    kind: Codes,
    inputs: tuple[int, ...],
    rounds_inputs: bool,
) -> EightBit:
    """Quantises a matrix; `inputs` are the dims that are summed over."""
    shape = tuple(1 if dim in inputs else size for dim, size in enumerate(weight.shape))
    make = _eight_bit_program(_like(weight, weight.shape), _like(weight, shape))
    codes, scales = _made(make, weight, kind, inputs)
    return EightBit(codes, scales, weight.dtype, rounds_inputs)


@functools.cache
def _eight_bit_program(
    codes: NamedSharding | None, scales: NamedSharding | None
) -> Any:
    """The jitted function; kept, because a sampler quantises in every step."""
    return jax.jit(to_codes, static_argnums=(1, 2), out_shardings=(codes, scales))


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
            f"holds two elements along dim {dim}, whose half the mesh does not divide; "
            "use int8, or other sizes of the mesh"
        )
    make = jax.jit(_nf4_codes, static_argnums=(1, 2), out_shardings=shardings)
    return NF4(*_made(make, weight, dim, block), dim=dim, dtype=weight.dtype)


def _nf4_codes(weight: Array, dim: int, block: int) -> tuple[Array, Array]:
    blocks = weight.shape[dim] // block
    blocked = _blocked(weight.astype(jnp.float32), dim, blocks)
    # Round the scales first, so that the codes fit the stored scales.
    scales = jnp.abs(blocked).max(axis=dim + 1)
    # A block of zeros must not give 0 / 0.
    scales = jnp.where(scales == 0, 1.0, scales).astype(jnp.bfloat16)
    relative = blocked / jnp.expand_dims(scales.astype(jnp.float32), dim + 1)
    borders = jnp.asarray(BORDERS)
    # A code is the number of borders below the value; compare_all needs no sorting.
    codes = jnp.searchsorted(borders, relative, method="compare_all").astype(jnp.uint8)
    low, high = jnp.moveaxis(_blocked(codes.reshape(weight.shape), dim, -1), dim + 1, 0)
    return low | (high << 4), scales


def _made(make: Any, weight: Any, *static: Any) -> Any:
    """Runs `make` on an array; for a ShapeDtypeStruct, evaluates the shapes alone."""
    shape_alone = isinstance(weight, jax.ShapeDtypeStruct)
    return (make.eval_shape if shape_alone else make)(weight, *static)


def _blocked(array: Array, dim: int, blocks: int) -> Array:
    """Splits a dim into equal blocks; `blocks` -1 means blocks of two elements."""
    shape, size = array.shape, array.shape[dim]
    blocks = size // 2 if blocks == -1 else blocks
    return array.reshape(*shape[:dim], blocks, size // blocks, *shape[dim + 1 :])


def _like(
    weight: Array | jax.ShapeDtypeStruct, shape: tuple[int, ...]
) -> NamedSharding | None:
    """Returns the matrix's sharding for a smaller array; undivided dims: replicated."""
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
    """Returns the matrix's PartitionSpec with an entry for every dim."""
    assert isinstance(weight.sharding, NamedSharding)
    return P(*(*weight.sharding.spec, *(None,) * weight.ndim)[: weight.ndim])
