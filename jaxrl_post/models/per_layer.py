"""Embeddings of tokens for every layer, and the end of a layer that reads them.

See `PerLayerEmbedding` for the mathematics.
"""

import math

import jax.numpy as jnp

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.embedding import lookup
from jaxrl_post.models.layers import activated, norm, project, scaled
from jaxrl_post.models.params import PerLayerInputParams, PerLayerParams
from jaxrl_post.sharding import Rules, constrain
from jaxrl_post.types import Array, Float, Int

__all__ = ["per_layer_inputs", "per_layer_rows", "per_layer_update"]


def per_layer_rows(
    config: ModelConfig,
    params: PerLayerParams[Array],
    tokens: Int[Array, " tokens"],
    rules: Rules,
) -> Float[Array, "tokens width"]:
    """Looks up and scales the tokens' rows of the tables of all layers."""
    assert config.per_layer is not None
    rows = lookup(params.embedding, tokens, rules)
    # Round the scale to the dtype first, as `embed` does.
    rows = rows * jnp.asarray(math.sqrt(config.per_layer.size), rows.dtype)
    return constrain(rows, ("batch", "hidden"), rules)


def per_layer_inputs(
    config: ModelConfig,
    params: PerLayerParams[Array],
    embedded: Float[Array, "tokens hidden"],
    rows: Float[Array, "tokens width"],
) -> Float[Array, "tokens layers size"]:
    """Computes the inputs of all layers.

    Args:
        config: the model's config.
        params: of all layers.
        embedded: the tokens' scaled embeddings.
        rows: of `per_layer_rows`.
    """
    assert config.per_layer is not None
    shape = embedded.shape[0], config.num_layers, config.per_layer.size
    projected = project(embedded, params.projection)
    projected = scaled(projected, config.hidden_size**-0.5).reshape(shape)
    projected = norm(config, projected, params.norm)
    return scaled(projected + rows.reshape(shape), 2**-0.5)


def per_layer_update(
    config: ModelConfig,
    params: PerLayerInputParams[Array],
    hidden: Float[Array, "tokens hidden"],
    inputs: Float[Array, "tokens size"],
) -> Float[Array, "tokens hidden"]:
    """Returns the update of the residual stream at a layer's end."""
    inner = activated(config.activation, project(hidden, params.gate), inputs)
    return norm(config, project(inner, params.output), params.norm)
