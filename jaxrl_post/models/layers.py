"""The small parts of a model: norms, projections, the gated MLP, the heads.

And embeddings of tokens for every layer (`PerLayerEmbedding` has the mathematics).

Between the embedding and the last norm a hidden state is [batch * length, hidden], so
that every projection is a product of two matrices. With three dims XLA's CPU backend
transposes the inputs of the weight gradients element by element (the backward pass of
the MLP took 2.7 times as long).
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxrl_post.models.config import Activation, ModelConfig
from jaxrl_post.models.embedding import lookup
from jaxrl_post.models.matrix import Matrix, multiply
from jaxrl_post.models.params import (
    DecoderParams,
    MLPParams,
    PerLayerInputParams,
    PerLayerParams,
)
from jaxrl_post.sharding import Rules, constrain
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "activated",
    "add_bias",
    "embed",
    "logits",
    "logits_of",
    "mlp",
    "mlp_inputs",
    "mlp_output",
    "norm",
    "per_layer_inputs",
    "per_layer_rows",
    "per_layer_update",
    "project",
    "scaled",
    "softcap",
    "to_heads",
    "unembedding",
    "unit_norm",
    "values",
]

# Constants of GPT-OSS's activation: slope of the sigmoid, and bound of both inputs.
SLOPE, LIMIT = 1.702, 7.0


def norm(
    config: ModelConfig,
    x: Float[Array, "... width"],
    weight: Float[Array, "..."],
    epsilon: float | None = None,
) -> Float[Array, "... width"]:
    """RMSNorm over the last `weight.ndim` dims, computed in float32.

    Args:
        config: gives the epsilon, and whether the norm multiplies by 1 + weight.
        x: any float dtype; the result has the same.
        weight: weight of the norm.
        epsilon: replaces the config's epsilon.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    axes = tuple(range(-weight.ndim, 0))
    epsilon = config.rms_norm_eps if epsilon is None else epsilon
    weight = weight.astype(jnp.float32)
    factor = 1.0 + weight if config.norm_plus_one else weight
    return (factor * _of_unit_size(x, axes, epsilon)).astype(x.dtype)


def unit_norm(
    config: ModelConfig, x: Float[Array, "... width"]
) -> Float[Array, "... width"]:
    """RMSNorm over the last dim without a weight, computed in float32."""
    return _of_unit_size(x, (-1,), config.rms_norm_eps).astype(x.dtype)


def _of_unit_size(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
    return wide * jax.lax.rsqrt(variance + epsilon)


def project(
    x: Float[Array, "tokens inner"],
    weight: Float[Array, "..."] | Matrix,
    bias: Float[Array, " outer"] | None = None,
    *,
    inputs: int = 1,
) -> Float[Array, "tokens outer"]:
    """Returns x W + b.

    Args:
        x: any float dtype.
        weight: an array of the same dtype, or a Matrix; its first `inputs` dims are
            merged into `inner`, the other dims into `outer`.
        bias: bias, or None.
        inputs: number of leading dims of `weight` that are summed over.
    """
    product = multiply(x, weight, inputs)
    return product if bias is None else add_bias(product, bias)


def to_heads(
    x: Float[Array, "tokens hidden"],
    weight: Float[Array, "hidden heads head_dim"] | Matrix,
    bias: Float[Array, "heads head_dim"] | None,
    shape: tuple[int, ...],
) -> Float[Array, "*shape heads head_dim"]:
    """Projects to heads; `shape` has the tokens' dims, such as (batch, length)."""
    heads = project(x, weight).reshape(*shape, *weight.shape[1:])
    return heads if bias is None else add_bias(heads, bias)


def add_bias(x: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x + b in x's dtype; sums the gradient of b over tokens in float32."""
    return (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def embed(
    config: ModelConfig, table: Array, tokens: Array, rules: Rules
) -> Float[Array, "tokens hidden"]:
    """Looks up and scales the tokens' rows of the embedding."""
    rows = lookup(table, tokens, rules)
    if config.embedding_scale != 1.0:
        # Round the scale to the dtype first, as the families with a scale do.
        rows = rows * jnp.asarray(config.embedding_scale, rows.dtype)
    return constrain(rows, ("batch", "hidden"), rules)


def scaled(x: Array, factor: float) -> Array:
    """Returns x * factor in x's dtype; the factor itself is not rounded to it.

    >>> x = jnp.array(51.0, jnp.bfloat16)  # 51 x 0.22 = 11.22
    >>> scaled(x, 0.22).item(), (x * 0.22).item()
    (11.25, 11.1875)
    """
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def activated(activation: Activation, gate: Array | None, up: Array) -> Array:
    """Applies the activation of an MLP: act(gate) * up, or without a gate act(up).

    >>> activated("silu", jnp.array(0.0), jnp.array(3.0)).item()
    0.0
    >>> round(activated("gpt_oss", jnp.array(9.0), jnp.array(-9.0)).item(), 3)
    -42.0
    >>> activated("relu2", None, jnp.array([-1.0, 3.0])).tolist()
    [0.0, 9.0]

    References:
        So et al., Primer, arXiv:2109.08668 (relu2).
    """
    if gate is None:
        assert activation == "relu2"
        return jnp.square(jax.nn.relu(up))
    if activation == "gpt_oss":
        gate = jnp.minimum(gate, LIMIT)
        up = jnp.clip(up, -LIMIT, LIMIT)
        return (up + 1.0) * (gate * jax.nn.sigmoid(scaled(gate, SLOPE)))
    function = {
        "silu": jax.nn.silu,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    }[activation]
    return function(gate) * up


def mlp(
    config: ModelConfig,
    params: MLPParams[Array],
    x: Float[Array, "tokens hidden"],
    rules: Rules | None,
) -> Float[Array, "tokens hidden"]:
    """The MLP (gated: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202)."""
    return mlp_output(config, params, *mlp_inputs(params, x), rules)


def mlp_inputs(
    params: MLPParams[Array], x: Float[Array, "tokens hidden"]
) -> tuple[Float[Array, "tokens ffn"] | None, Float[Array, "tokens ffn"]]:
    """Returns the gate, None for an MLP without one, and what it gates."""
    gate = None
    if params.gate is not None:
        gate = project(x, params.gate, params.gate_bias)
    return gate, project(x, params.up, params.up_bias)


def mlp_output(
    config: ModelConfig,
    params: MLPParams[Array],
    gate: Float[Array, "tokens ffn"] | None,
    up: Float[Array, "tokens ffn"],
    rules: Rules | None,
) -> Float[Array, "tokens hidden"]:
    """Returns what an MLP makes of its `mlp_inputs`."""
    inner = constrain(activated(config.activation, gate, up), ("batch", "ffn"), rules)
    return project(inner, params.down, params.down_bias)


def softcap(x: Array, cap: float | None) -> Array:
    """Returns c tanh(x / c), or x if `cap` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


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


def unembedding(params: DecoderParams[Array]) -> Float[Array, "vocab hidden"]:
    """Returns the matrix from hidden states to logits; tied: the embedding."""
    return params.embedding if params.unembedding is None else params.unembedding


def logits(
    params: DecoderParams[Array],
    config: ModelConfig,
    hidden: Float[Array, "*batch hidden"],
) -> Float[Array, "*batch vocab"]:
    """Maps hidden states to float32 logits."""
    return logits_of(config, unembedding(params), hidden)


def logits_of(
    config: ModelConfig,
    weight: Float[Array, "vocab hidden"],
    hidden: Float[Array, "*batch hidden"],
) -> Float[Array, "*batch vocab"]:
    """Maps hidden states to float32 logits by a matrix, such as `unembedding`.

    Args:
        config: gives the divisor and cap of the logits.
        weight: rows of the vocabulary.
        hidden: final hidden states.
    """
    product = jnp.einsum(
        "...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32
    )
    if config.logit_divisor != 1.0:
        product = product / config.logit_divisor
    return softcap(product, config.logit_softcap)


def values(
    params: DecoderParams[Array], hidden: Float[Array, "*batch hidden"]
) -> Float[Array, "*batch"]:
    """Maps hidden states to the value head's float32 outputs, one per token.

    For a process reward model the value is the logit z_1 - z_0 of a right step.

    Raises:
        ValueError: the parameters have no value head.
    """
    judge = params.process_head
    weight = params.value_head if judge is None else judge.weight
    if weight is None:
        raise ValueError(
            'values: the parameters have no value head; make them with head="value", '
            '"lm+value" or "process" in the model\'s config'
        )
    outputs = jnp.einsum(
        "...d,nd->...n", hidden, weight, preferred_element_type=jnp.float32
    )
    if judge is None:
        return outputs[..., 0]
    outputs = outputs + judge.bias.astype(jnp.float32)
    return outputs[..., 1] - outputs[..., 0]
