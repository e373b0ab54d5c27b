"""Specs of parameters: shape, logical axes and initialiser."""

import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_post.sharding import DEFAULT_RULES, Rules, named_shardings
from jaxrl_post.types import Array, PyTree

__all__ = [
    "ParamSpec",
    "abstract",
    "copied",
    "initialize",
    "is_abstract",
    "is_spec",
    "matrix",
    "named_key",
    "ones",
    "when",
    "zeros",
]


@dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axes and initialiser of one parameter.

    Initial values, shapes and shardings all derive from a tree of specs.

    Attributes:
        shape: the parameter's shape.
        axes: the logical axis of each dimension (see `sharding.rules`).
        init: "normal" (standard deviation `scale`), "zeros" or "ones"; "decay_rate" and
            "decay_step" of a recurrence: the logarithm of a number in [1, 16], and a
            number whose softplus lies in [0.001, 0.1], so that a state decays over 1 to
            1,000 tokens.
        scale: standard deviation of the "normal" initialiser.
        wide: float32 for every dtype of the model, where small differences matter.
        decay: whether weight decay applies; None applies it if `init` is "normal", as
            for matrices, but not to norms and biases.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "zeros", "ones", "decay_rate", "decay_step"] = "normal"
    scale: float = 0.02
    wide: bool = False
    decay: bool | None = None

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to the parameter."""
        return self.init == "normal" if self.decay is None else self.decay

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def dtype(self, dtype: DTypeLike) -> DTypeLike:
        """Returns the parameter's dtype in a model of `dtype`."""
        return jnp.float32 if self.wide else dtype


matrix = ParamSpec
ones = functools.partial(ParamSpec, init="ones")
zeros = functools.partial(ParamSpec, init="zeros")


def when(wanted: bool, spec: ParamSpec) -> ParamSpec | None:
    """Returns the spec if the family has this part, else None."""
    return spec if wanted else None


def is_spec(leaf: Any) -> bool:
    """True for a ParamSpec; for `is_leaf` arguments."""
    return isinstance(leaf, ParamSpec)


def abstract(
    specs: PyTree,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> PyTree:
    """Returns the tree of ShapeDtypeStructs, with shardings if a mesh is given."""
    if mesh is None:
        as_struct = lambda spec: jax.ShapeDtypeStruct(  # noqa: E731
            spec.shape, spec.dtype(dtype)
        )
        return jax.tree.map(as_struct, specs, is_leaf=is_spec)
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype(dtype), sharding=sharding
        ),
        specs,
        named_shardings(specs, mesh, rules),
        is_leaf=is_spec,
    )


def is_abstract(tree: PyTree) -> bool:
    """Whether a tree has ShapeDtypeStructs in place of arrays."""
    leaves = jax.tree.leaves(tree)
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def copied(tree: PyTree) -> PyTree:
    """Copies arrays, and ShapeDtypeStructs, which stand for other arrays then."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update()
        return jnp.copy(leaf)

    return jax.tree.map(copy, tree)


def named_key(key: Array, name: str) -> Array:
    """Derives a parameter's own PRNG key from its name, such as "layers.0.mlp.up"."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def initialize(
    key: Array,
    specs: PyTree,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> PyTree:
    """Draws initial values directly into their shards.

    A parameter's key derives from its path, so the values depend neither on the mesh
    nor on the other parameters.

    Args:
        key: a PRNG key.
        specs: tree of ParamSpecs.
        dtype: dtype of the values.
        mesh: mesh of the values; None lets JAX place them.
        rules: mesh axes of every logical axis.
    """

    def drawn(path: Any, spec: ParamSpec, sharding: Any = None) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return _drawing(spec, spec.dtype(dtype), sharding)(named_key(key, name))

    shardings = [] if mesh is None else [named_shardings(specs, mesh, rules)]
    return jax.tree_util.tree_map_with_path(drawn, specs, *shardings, is_leaf=is_spec)


@functools.lru_cache(maxsize=256)
def _drawing(
    spec: ParamSpec, dtype: DTypeLike, sharding: Any
) -> Callable[[Array], Array]:
    """Draws a parameter from its key; parameters of one spec share the program.

    For hundreds of parameters in one program XLA takes minutes on a GPU.
    """

    def draw(key: Array) -> Array:
        if spec.init == "decay_rate":
            return jnp.log(jax.random.uniform(key, spec.shape, dtype, 1.0, 16.0))
        if spec.init == "decay_step":
            low, high = math.log(0.001), math.log(0.1)
            step = jnp.exp(jax.random.uniform(key, spec.shape, dtype, low, high))
            return step + jnp.log(-jnp.expm1(-step))  # The inverse of softplus.
        if spec.init != "normal":
            fill = jnp.zeros if spec.init == "zeros" else jnp.ones
            return fill(spec.shape, dtype)
        values = spec.scale * jax.random.normal(key, spec.shape, jnp.float32)
        return values.astype(dtype)

    return jax.jit(draw, out_shardings=sharding)
