"""The matrices of a layer, where they are more than one array: adapted, quantised.

The decoder multiplies through `multiply`, and experts' own matrices through `grouped`,
so that what stands for a matrix may say itself how it multiplies; it never asks which
kind it has.
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

# What attention, the MLP and the MLP shared by a mixture multiply with, and experts;
# and over how many dims the product sums: the leading ones, but for experts' number.
INPUT_DIMS = {
    "query": 1,
    "key": 1,
    "value": 1,
    "output": 2,
    "query_down": 1,
    "query_up": 1,
    "kv_down": 1,
    "kv_up": 1,
    "gate": 1,
    "up": 1,
    "down": 1,
    "expert_gate": 1,
    "expert_up": 1,
    "expert_down": 1,
}
EXPERTS = ("expert_gate", "expert_up", "expert_down")
PLACE = re.compile(r"layers\.\d+\.(attention|mlp|experts\.shared|experts)\.(\w+)")


@runtime_checkable
class Matrix(Protocol):
    """What stands for a matrix in a tree of parameters; a pytree of arrays.

    It is [*inputs, *outputs], or [experts, inputs, outputs] for experts' own, of which
    every expert has one.

    Attributes:
        shape: of the matrix.
        ndim: its number of dims.
        dtype: of the matrix, as if it were one array.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> Any: ...

    def multiply(self, x: Array, inputs: int) -> Array:
        """x W; see the function of that name."""
        ...

    def grouped(self, x: Array, sizes: Array) -> Array:
        """x W of experts' own; see the function of that name."""
        ...

    def part_axes(self, axes: Axes) -> "Matrix":
        """Axes in the place of its arrays; see the function of that name."""
        ...

    def dense(self, dtype: DTypeLike) -> Array:
        """The matrix as one array."""
        ...


def is_matrix(leaf: Any) -> bool:
    """True for what stands for a matrix and is no array; for `is_leaf` arguments."""
    return isinstance(leaf, Matrix)


def multiply(
    x: Float[Array, "tokens inner"],
    weight: Float[Array, "..."] | Matrix,
    inputs: int = 1,
) -> Float[Array, "tokens outer"]:
    """x W, as a product of two matrices.

    Args:
        x: any float dtype, which is the result's too.
        weight: an array of the same dtype, or a Matrix.
        inputs: leading dims of `weight` that are merged into x's second and summed
            over; the others are merged into the result's second.
    """
    if isinstance(weight, Matrix):
        return weight.multiply(x, inputs)
    return x @ weight.reshape(math.prod(weight.shape[:inputs]), -1)


def grouped(
    x: Float[Array, "rows inner"],
    weight: Float[Array, "experts inner outer"] | Matrix,
    sizes: Int[Array, " experts"],
) -> Float[Array, "rows outer"]:
    """x W with a matrix for every group of rows, which follow one another.

    Args:
        x: any float dtype, which is the result's too.
        weight: an array of the same dtype, or a Matrix.
        sizes: int32, rows of each group, from the first on. What is computed for rows
            behind the last group means nothing.
    """
    if isinstance(weight, Matrix):
        return weight.grouped(x, sizes)
    return jax.lax.ragged_dot(x, weight, sizes)


def part_axes(weight: Any, axes: Axes) -> Any:
    """Returns the logical axes of every array that stands for a matrix.

    Args:
        weight: an array, or a Matrix.
        axes: of the matrix as a whole.

    Returns:
        `weight` with axes in the place of arrays.

    >>> part_axes(jax.numpy.zeros((4, 2)), ("embed", "ffn"))
    ('embed', 'ffn')
    """
    return weight.part_axes(axes) if isinstance(weight, Matrix) else axes


def scale_axes(shape: Sequence[int], axes: Axes) -> Axes:
    """Axes of a matrix for an array with fewer elements; a dim of 1 has none."""
    return tuple(
        None if size == 1 else axis for size, axis in zip(shape, axes, strict=True)
    )


def dense(
    weight: Float[Array, "..."] | Matrix, dtype: DTypeLike
) -> Float[Array, "..."]:
    """The matrix as one array of a dtype."""
    if isinstance(weight, Matrix):
        return weight.dense(dtype)
    return weight.astype(dtype)


def matrices(tree: PyTree) -> dict[str, Any]:
    """Returns by path what the decoder multiplies with as `multiply` and `grouped` do.

    Those are the matrices of attention, of dense MLPs, of MLPs that a mixture shares,
    and experts' own. Routers, embeddings and heads are not among them.

    Args:
        tree: of a decoder: DecoderParams of arrays, of Matrices or of ParamSpecs.

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
    """Dims of a matrix that its product sums over.

    >>> input_dims("layers.0.attention.output")  # [heads, head_dim, hidden]
    2
    """
    return INPUT_DIMS[target_name(path)]


def expert_dims(path: str) -> int:
    """Dims of a matrix before those that its product sums over: experts' number.

    >>> expert_dims("layers.0.experts.gate")  # [experts, hidden, expert_size]
    1
    >>> expert_dims("layers.0.experts.shared.gate")
    0
    """
    return int(target_name(path) in EXPERTS)


def target_name(path: str) -> str:
    """What a matrix is called in every layer; "" for what is none.

    >>> target_name("layers.3.attention.query"), target_name("layers.3.experts.gate")
    ('query', 'expert_gate')
    """
    found = PLACE.fullmatch(path)
    if found is None:
        return ""
    return f"expert_{found[2]}" if found[1] == "experts" else found[2]


def path_name(path: Any) -> str:
    """A path as JAX has it, in the form "layers.0.attention.query"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
