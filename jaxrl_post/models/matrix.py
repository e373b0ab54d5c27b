"""The matrices of a layer, where they are more than one array: adapted, quantised.

The decoder multiplies through `multiply`, so that what stands for a matrix may say
itself how it multiplies; it never asks which kind it has.
"""

import math
import re
from typing import Any, Protocol, runtime_checkable

import jax
from jax.typing import DTypeLike

from jaxrl_post.models.spec import is_spec
from jaxrl_post.types import Array, Float, PyTree

__all__ = ["Matrix", "dense", "input_dims", "is_matrix", "matrices", "multiply"]

# What attention, the MLP and the MLP shared by a mixture multiply with, and over how
# many of its leading dims the product sums.
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
}
PLACE = re.compile(r"layers\.\d+\.(?:attention|mlp|experts\.shared)\.(\w+)")


@runtime_checkable
class Matrix(Protocol):
    """What stands for a matrix [*inputs, *outputs] in a tree of parameters.

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


def dense(
    weight: Float[Array, "..."] | Matrix, dtype: DTypeLike
) -> Float[Array, "..."]:
    """The matrix as one array of a dtype."""
    if isinstance(weight, Matrix):
        return weight.dense(dtype)
    return weight.astype(dtype)


def matrices(tree: PyTree) -> dict[str, Any]:
    """Returns by path what the decoder multiplies with through `multiply`.

    Those are the matrices of attention, of dense MLPs and of MLPs that a mixture
    shares. Experts' own, routers, embeddings and heads are not among them.

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
    return {name: leaf for name, leaf in named if _place(name) in INPUT_DIMS}


def input_dims(path: str) -> int:
    """Leading dims of a matrix that its product sums over.

    >>> input_dims("layers.0.attention.output")  # [heads, head_dim, hidden]
    2
    """
    return INPUT_DIMS[_place(path)]


def path_name(path: Any) -> str:
    """A path as JAX has it, in the form "layers.0.attention.query"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _place(path: str) -> str:
    found = PLACE.fullmatch(path)
    return found[1] if found else ""
