"""What a parameter is, before it has a value."""

import math
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_post.sharding import DEFAULT_RULES, Rules, named_shardings
from jaxrl_post.types import Array, PyTree

__all__ = ["ParamSpec", "abstract", "initialize", "is_spec"]


@dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axes and initialiser of one parameter.

    Trees of initial values, of shapes and of shardings all derive from trees of specs.

    Attributes:
        shape: dimensions.
        axes: the logical axis of each dimension (see `sharding.rules`).
        init: "normal" (standard deviation `scale`), "zeros" or "ones".
        scale: standard deviation of the "normal" initialiser.
        wide: float32 whatever the dtype of the others, as where a small difference
            decides.
        decay: whether weight decay takes from it; None for whether it is drawn, as
            matrices are, while norms and biases begin as constants.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Literal["normal", "zeros", "ones"] = "normal"
    scale: float = 0.02
    wide: bool = False
    decay: bool | None = None

    @property
    def decays(self) -> bool:
        """Whether weight decay takes from it."""
        return self.init == "normal" if self.decay is None else self.decay

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def dtype(self, dtype: DTypeLike) -> DTypeLike:
        """The parameter's dtype where the others have `dtype`."""
        return jnp.float32 if self.wide else dtype


def is_spec(leaf: Any) -> bool:
    """True for a ParamSpec; for `is_leaf` arguments."""
    return isinstance(leaf, ParamSpec)


def abstract(
    specs: PyTree,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> PyTree:
    """Returns the tree of ShapeDtypeStructs, with shardings where a mesh is given."""
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


def initialize(
    key: Array,
    specs: PyTree,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> PyTree:
    """Draws initial values, each straight into its shards.

    The key of a parameter derives from its path, so the values depend neither on the
    mesh nor on which other parameters exist.

    Args:
        key: a PRNG key.
        specs: tree of ParamSpecs.
        dtype: of the values.
        mesh: where they go; None leaves that to JAX.
        rules: logical axis to mesh axes.
    """

    def draw(path: Any, spec: ParamSpec) -> Array:
        if spec.init != "normal":
            fill = jnp.zeros if spec.init == "zeros" else jnp.ones
            return fill(spec.shape, spec.dtype(dtype))
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        values = spec.scale * jax.random.normal(own_key, spec.shape, jnp.float32)
        return values.astype(spec.dtype(dtype))

    def draw_all() -> PyTree:
        return jax.tree_util.tree_map_with_path(draw, specs, is_leaf=is_spec)

    shardings = None if mesh is None else named_shardings(specs, mesh, rules)
    return jax.jit(draw_all, out_shardings=shardings)()
