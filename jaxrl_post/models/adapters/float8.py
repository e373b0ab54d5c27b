"""Matrix products in float8, forward and backward.

With x [tokens, inner], W [inner, outer], y = x W, and the gradient dy of y:

    x  = X s_x, W = V s_w    codes in e4m3, a scale a token and a scale an output
    y  = (X V) s_x s_w
    dx = D V^T s_d           D in e5m2, a scale a token, of dy s_w
    dW = X^T E s_e           E in e5m2, a scale an output, of dy s_x

So one set of codes of W and of x serves all three products: the backward pass
differentiates the rounded matrices, a device gathers each matrix as codes, and the
forward pass keeps a byte a value of x. Scales are powers of two (`eight_bits`), so that
moving them from one factor of a sum to the other rounds nothing. Gradients have the
wider range of e5m2. The parameters and what is between products keep their dtype.

`quantized.quantize` makes the same codes of W, so a sampler with float8 weights that
rounds its inputs computes y as the trainer does.

We do not use qwix: it intercepts the operations of modules, and ours are functions of
trees, whose products are all in `matrix.multiply` and `matrix.grouped`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxrl_post.models.adapters.eight_bits import (
    grouped_product,
    of_groups,
    product,
    scaled,
    to_codes,
)
from jaxrl_post.models.adapters.lora import Adapted
from jaxrl_post.models.matrix import Axes, is_matrix, matrices, path_name
from jaxrl_post.models.params import DecoderParams
from jaxrl_post.types import Array, Float, Int

__all__ = ["PRODUCT", "Float8", "in_float8"]

# Name of a product for policies of rematerialisation, which do not look into functions
# with a backward pass of their own.
PRODUCT = "product in float8"
E4M3 = jnp.dtype("float8_e4m3fn")


@struct.dataclass
class Float8:
    """A matrix whose products are computed in float8.

    Attributes:
        weight: the matrix, float32 or bfloat16.
    """

    weight: Float[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """The matrix's number of dims."""
        return self.weight.ndim

    @property
    def dtype(self) -> Any:
        """The matrix's dtype."""
        return self.weight.dtype

    def multiply(self, x: Float[Array, "tokens inner"], inputs: int) -> Array:
        """Returns x W in x's dtype."""
        inner = math.prod(self.weight.shape[:inputs])
        return checkpoint_name(_multiply(x, self.weight.reshape(inner, -1)), PRODUCT)

    def grouped(
        self, x: Float[Array, "rows inner"], sizes: Int[Array, " experts"]
    ) -> Array:
        """Returns x W of routed experts in x's dtype."""
        return checkpoint_name(_grouped(x, self.weight, sizes), PRODUCT)

    def part_axes(self, axes: Axes) -> "Float8":
        """Replaces the matrix by its axes."""
        return self.replace(weight=axes)  # type: ignore[attr-defined]

    def dense(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Returns the matrix, which is not rounded."""
        return self.weight.astype(dtype)


def in_float8(params: DecoderParams[Any]) -> DecoderParams[Any]:
    """Returns parameters whose matrix products `forward` computes in float8.

    They are the products of attention and recurrences, dense and shared MLPs, and
    routed experts. Routers, embeddings and heads stay as they are. Of an adapted matrix
    it is the base's product.

    Args:
        params: arrays, which the result contains without a copy; or adapted matrices.

    References:
        Micikevicius et al., FP8 formats for deep learning, arXiv:2209.05433.

    >>> from jaxrl_post.models import ModelConfig, initialize, param_specs
    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    >>> params = initialize(jax.random.key(0), param_specs(config))
    >>> in_float8(params).layers[0].mlp.up.weight is params.layers[0].mlp.up
    True
    """
    wanted = matrices(params)

    def one(path: Any, leaf: Any) -> Any:
        return _matrix(leaf) if path_name(path) in wanted else leaf

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_matrix)


def _matrix(leaf: Any) -> Any:
    if isinstance(leaf, Adapted):
        return leaf.replace(base=_matrix(leaf.base))  # type: ignore[attr-defined]
    return leaf if is_matrix(leaf) else Float8(leaf)


def _bits(codes: Array) -> Array:
    """The codes as integers, for the backward pass.

    jax.checkpoint reduces the precision of floats that it keeps, as if e4m3 had
    infinities, and so made infinities of codes above 240.
    """
    return jax.lax.bitcast_convert_type(codes, jnp.uint8)


@jax.custom_vjp
def _multiply(x: Array, weight: Array) -> Array:
    return _multiply_forward(x, weight)[0]


# The codes of W are made again: kept, they would be a second copy of the model.
def _multiply_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, ...]]:
    codes, scales = to_codes(weight, "float8", (0,))
    inputs, input_scales = to_codes(x, "float8", (1,))
    y = product(inputs, input_scales, codes, scales, x.dtype)
    return y, (_bits(inputs), input_scales, weight)


def _multiply_backward(kept: tuple[Array, ...], change: Array) -> tuple[Array, Array]:
    inputs, input_scales, weight = kept
    inputs = jax.lax.bitcast_convert_type(inputs, E4M3)
    codes, scales = to_codes(weight, "float8", (0,))
    changes, change_scales = to_codes(scaled(change, scales), "float8_e5m2", (1,))
    to_x = _dot(changes, codes, (1, 1), change.dtype)
    changes, output_scales = to_codes(scaled(change, input_scales), "float8_e5m2", (0,))
    to_weight = _dot(inputs, changes, (0, 0), weight.dtype)
    return scaled(to_x, change_scales), scaled(to_weight, output_scales)


def _dot(left: Array, right: Array, over: tuple[int, int], dtype: DTypeLike) -> Array:
    """Sums products over a dim of each."""
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=dtype)


_multiply.defvjp(_multiply_forward, _multiply_backward)


@jax.custom_vjp
def _grouped(x: Array, weight: Array, sizes: Array) -> Array:
    return _grouped_forward(x, weight, sizes)[0]


def _grouped_forward(
    x: Array, weight: Array, sizes: Array
) -> tuple[Array, tuple[Array, ...]]:
    codes, scales = to_codes(weight, "float8", (1,))
    inputs, input_scales = to_codes(x, "float8", (1,))
    y = grouped_product(inputs, input_scales, codes, scales, sizes, x.dtype)
    return y, (_bits(inputs), input_scales, weight, sizes)


# The sum over the rows of a group: [rows, inner], [rows, outer] to [experts, inner,
# outer].
OVER_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _grouped_backward(
    kept: tuple[Array, ...], change: Array
) -> tuple[Array, Array, None]:
    inputs, input_scales, weight, sizes = kept
    inputs = jax.lax.bitcast_convert_type(inputs, E4M3)
    codes, scales = to_codes(weight, "float8", (1,))
    own = of_groups(scales[:, 0], sizes, len(change))
    changes, change_scales = to_codes(scaled(change, own), "float8_e5m2", (1,))
    to_x = jax.lax.ragged_dot(
        changes, codes.swapaxes(1, 2), sizes, preferred_element_type=change.dtype
    )
    # All groups share the scale of an output.
    changes, output_scales = to_codes(scaled(change, input_scales), "float8_e5m2", (0,))
    to_weight = jax.lax.ragged_dot_general(
        inputs, changes, sizes, OVER_ROWS, preferred_element_type=weight.dtype
    )
    return scaled(to_x, change_scales), scaled(to_weight, output_scales), None


_grouped.defvjp(_grouped_forward, _grouped_backward)
