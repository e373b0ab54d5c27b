"""Fully trained parameters that go with an adapter, mainly value heads.

A new head has no pretrained values to adapt, so the adapter holds the parameter itself
(in PEFT: modules_to_save).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.matrix import is_matrix, matrices, path_name
from jaxrl_post.models.params import DecoderParams, text_specs
from jaxrl_post.models.spec import ParamSpec, is_spec
from jaxrl_post.sharding import Rules, named_shardings
from jaxrl_post.types import Array

__all__ = ["Whole", "copies", "whole_specs"]


@struct.dataclass
class Whole[Leaf]:
    """A fully trained parameter.

    Attributes:
        weight: float32, of the parameter's shape.
    """

    weight: Leaf


def whole_specs(
    config: ModelConfig, names: tuple[str, ...]
) -> dict[str, Whole[ParamSpec]]:
    """Returns the specs of fully trained parameters by path.

    Args:
        config: the model's config.
        names: paths of parameters, or of groups of them.

    Raises:
        ValueError: a name is no parameter, or an adaptable matrix.

    >>> config = ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1,
    ...                      head="value")
    >>> list(whole_specs(config, ("value_head", "layers.0.mlp_norm")))
    ['value_head', 'layers.0.mlp_norm']
    """
    specs = text_specs(config)
    leaves, found = _by_path(specs), {}
    for name in names:
        paths = [path for path in leaves if path == name or path.startswith(f"{name}.")]
        if not paths or not matrices(specs).keys().isdisjoint(paths):
            why = "has matrices, which are adapted" if paths else "is no parameter"
            raise ValueError(
                f"lora: {name} {why} in this {config.model_type} with the head "
                f"{config.head!r}; whole may name embeddings, norms, biases, routers "
                "and heads"
            )
        # A narrower dtype would lose small optimizer steps.
        found |= {path: Whole(replace(leaves[path], wide=True)) for path in paths}
    return found


def copies(
    specs: dict[str, Whole[ParamSpec]],
    params: DecoderParams[Any],
    mesh: Mesh | None,
    rules: Rules,
) -> dict[str, Whole[Array]]:
    """Copies the base's values, because optimizer steps donate the copies.

    Args:
        specs: specs from `whole_specs`.
        params: the base.
        mesh: mesh of the copies; None lets JAX place them.
        rules: mesh axes of every logical axis.
    """
    if not specs:
        return {}
    leaves = _by_path(params)
    base = {path: Whole(leaves[path]) for path in specs}
    shardings = None if mesh is None else named_shardings(specs, mesh, rules)

    def copy(tree: dict[str, Whole[Array]]) -> dict[str, Whole[Array]]:
        return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), tree)

    return jax.jit(copy, out_shardings=shardings)(base)


def _by_path(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda leaf: is_spec(leaf) or is_matrix(leaf)
    )
    return {path_name(path): leaf for path, leaf in leaves}
