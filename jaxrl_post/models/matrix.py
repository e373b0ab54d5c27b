"""The matrices of a layer: plain arrays, or adapted and quantised matrices.

The decoder calls `multiply`, and `grouped` for routed experts, for every kind of
matrix. A `Matrix` is a drop-in for an array and implements its own product.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.typing import DTypeLike

from jaxrl_post.models.spec import is_spec
from jaxrl_post.types import Array, Float, Int, PyTree

__all__ = [
    "EXPERTS",
    "INPUT_DIMS",
    "Axes",
    "Matrix",
    "dense",
    "expert_dims",
    "grouped",
    "input_dims",
    "is_matrix",
    "matrices",
    "multiply",
    "part_axes",
    "path_name",
    "scale_axes",
    "target_name",
]

# The logical axis, if any, of every dim of an array.
type Axes = tuple[str | None, ...]

# The matrices of attention, recurrences, dense and shared MLPs, and routed experts:
# the number of input dims that a product sums over. They come first, or after the
# experts dim.
INPUT_DIMS = {
    "query": 1,
    "key": 1,
    "value": 1,
    "output": 2,
    "query_down": 1,
    "query_up": 1,
    "kv_down": 1,
    "kv_up": 1,
    "input_gate": 1,
    "output_gate": 1,
    "inputs": 1,
    "outputs": 1,
    "delta_query": 1,
    "delta_key": 1,
    "delta_value": 1,
    "delta_output_gate": 1,
    "delta_beta": 1,
    "delta_decay": 1,
    "delta_output": 2,
    "mamba_query": 1,
    "mamba_key": 1,
    "mamba_value": 1,
    "mamba_output_gate": 1,
    "mamba_step": 1,
    "mamba_output": 2,
    "gate": 1,
    "up": 1,
    "down": 1,
    "per_layer_gate": 1,
    "per_layer_output": 1,
    "expert_gate": 1,
    "expert_up": 1,
    "expert_down": 1,
}
EXPERTS = ("expert_gate", "expert_up", "expert_down")
PLACE = re.compile(
    r"layers\.\d+\."
    r"(attention|convolution|delta|mamba|mlp|per_layer|experts\.shared|experts)\.(\w+)"
)


@runtime_checkable
class Matrix(Protocol):
    """A pytree of arrays that replaces a matrix in a tree of parameters.

    The matrix is [*inputs, *outputs], or [experts, inputs, outputs] with one matrix for
    every routed expert.

    Attributes:
        shape: shape of the matrix.
        ndim: number of dims of the matrix.
        dtype: dtype of the matrix, as if it were one array.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> Any: ...

    def multiply(self, x: Array, inputs: int) -> Array:
        """Returns x W; see the function of this name."""
        ...

    def grouped(self, x: Array, sizes: Array) -> Array:
        """Returns x W of routed experts; see the function of this name."""
        ...

    def part_axes(self, axes: Axes) -> "Matrix":
        """Replaces the arrays by their axes; see the function of this name."""
        ...

    def dense(self, dtype: DTypeLike) -> Array:
        """Returns the matrix as one array."""
        ...


def is_matrix(leaf: Any) -> bool:
    """True for a `Matrix`, False for an array; for `is_leaf` arguments."""
    return isinstance(leaf, Matrix)


def multiply(
    x: Float[Array, "tokens inner"],
    weight: Float[Array, "..."] | Matrix,
    inputs: int = 1,
) -> Float[Array, "tokens outer"]:
    """Returns x W.

    Args:
        x: any float dtype; the result has the same.
        weight: an array of the same dtype, or a Matrix.
        inputs: number of leading dims of `weight` that are summed over; they are merged
            into `inner`, the other dims into `outer`.
    """
    if isinstance(weight, Matrix):
        return weight.multiply(x, inputs)
    return x @ weight.reshape(math.prod(weight.shape[:inputs]), -1)


def grouped(
    x: Float[Array, "rows inner"],
    weight: Float[Array, "experts inner outer"] | Matrix,
    sizes: Int[Array, " experts"],
) -> Float[Array, "rows outer"]:
    """Returns x W with one matrix for every group of consecutive rows.

    Args:
        x: any float dtype; the result has the same.
        weight: an array of the same dtype, or a Matrix.
        sizes: int32, number of rows of each group. Results for rows after the last
            group are undefined.
    """
    if isinstance(weight, Matrix):
        return weight.grouped(x, sizes)
    return jax.lax.ragged_dot(x, weight, sizes)


def part_axes(weight: Any, axes: Axes) -> Any:
    """Returns the logical axes of every array of a matrix.

    Args:
        weight: an array, or a Matrix.
        axes: logical axes of the matrix.

    Returns:
        `weight` with every array replaced by its axes.

    >>> part_axes(jax.numpy.zeros((4, 2)), ("embed", "ffn"))
    ('embed', 'ffn')
    """
    return weight.part_axes(axes) if isinstance(weight, Matrix) else axes


def scale_axes(shape: Sequence[int], axes: Axes) -> Axes:
    """Returns a matrix's axes for a smaller array; dims of size 1 get None."""
    return tuple(
        None if size == 1 else axis for size, axis in zip(shape, axes, strict=True)
    )


def dense(
    weight: Float[Array, "..."] | Matrix, dtype: DTypeLike
) -> Float[Array, "..."]:
    """Returns the matrix as one array of a dtype."""
    if isinstance(weight, Matrix):
        return weight.dense(dtype)
    return weight.astype(dtype)


def matrices(tree: PyTree) -> dict[str, Any]:
    """Returns by path all matrices that the decoder uses in `multiply` and `grouped`.

    They are the matrices of attention and recurrences, dense and shared MLPs, and
    routed experts. Routers, embeddings and heads do not belong to them.

    Args:
        tree: DecoderParams of arrays, of Matrices or of ParamSpecs.

    >>> from jaxrl_post.models import ModelConfig, param_specs
    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
    >>> list(matrices(param_specs(config)))[:2]
    ['layers.0.attention.query', 'layers.0.attention.key']
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda leaf: is_spec(leaf) or is_matrix(leaf)
    )
    named = ((path_name(path), leaf) for path, leaf in leaves)
    return {name: leaf for name, leaf in named if target_name(name) in INPUT_DIMS}


def input_dims(path: str) -> int:
    """Returns the number of dims of a matrix that its product sums over.

    >>> input_dims("layers.0.attention.output")  # [heads, head_dim, hidden]
    2
    """
    return INPUT_DIMS[target_name(path)]


def expert_dims(path: str) -> int:
    """Returns 1 for routed experts' matrices, whose first dim is the expert, else 0.

    >>> expert_dims("layers.0.experts.gate")  # [experts, hidden, expert_size]
    1
    >>> expert_dims("layers.0.experts.shared.gate")
    0
    """
    return int(target_name(path) in EXPERTS)


def target_name(path: str) -> str:
    """Returns the name of a matrix without its layer, "" for other parameters.

    >>> target_name("layers.3.attention.query"), target_name("layers.3.experts.gate")
    ('query', 'expert_gate')
    """
    found = PLACE.fullmatch(path)
    if found is None:
        return ""
    prefixes = {"experts": "expert_"} | {
        name: f"{name}_" for name in ("delta", "mamba", "per_layer")
    }
    return prefixes.get(found[1], "") + found[2]


def path_name(path: Any) -> str:
    """Converts JAX's path to a string such as "layers.0.attention.query"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
