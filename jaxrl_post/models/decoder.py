"""The decoder: one pure function for training, prefill and decoding.

Parameters are one array a layer and kind (docs/decisions/0001): decoding reads them in
place, where stacked layers would be sliced, hence copied, at every step.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_post.kernels.attention import attention
from jaxrl_post.models.cache import KVView
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.rope import apply_rope, rope_tables
from jaxrl_post.models.spec import ParamSpec
from jaxrl_post.sharding import DEFAULT_RULES, Rules, constrain
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "AttentionParams",
    "DecoderParams",
    "LayerParams",
    "MLPParams",
    "Remat",
    "forward",
    "logits",
    "param_specs",
    "unembedding",
    "values",
]

# What the backward pass keeps of a layer: everything; the results of matrix products
# with parameters; or its input alone.
Remat = Literal["none", "dots", "full"]


@struct.dataclass
class AttentionParams[Leaf]:
    """Projections of grouped-query attention; None where the family has no such part.

    Attributes:
        query: [hidden, heads, head_dim].
        key: [hidden, kv_heads, head_dim].
        value: [hidden, kv_heads, head_dim].
        output: [heads, head_dim, hidden].
        query_bias: [heads, head_dim].
        key_bias: [kv_heads, head_dim].
        value_bias: [kv_heads, head_dim].
        output_bias: [hidden].
        query_norm: [head_dim].
        key_norm: [head_dim].
    """

    query: Leaf
    key: Leaf
    value: Leaf
    output: Leaf
    query_bias: Leaf | None = None
    key_bias: Leaf | None = None
    value_bias: Leaf | None = None
    output_bias: Leaf | None = None
    query_norm: Leaf | None = None
    key_norm: Leaf | None = None


@struct.dataclass
class MLPParams[Leaf]:
    """Gated MLP: gate and up [hidden, ffn], down [ffn, hidden], optional biases."""

    gate: Leaf
    up: Leaf
    down: Leaf
    gate_bias: Leaf | None = None
    up_bias: Leaf | None = None
    down_bias: Leaf | None = None


@struct.dataclass
class LayerParams[Leaf]:
    """One decoder layer; the norms are [hidden]."""

    attention_norm: Leaf
    attention: AttentionParams[Leaf]
    mlp_norm: Leaf
    mlp: MLPParams[Leaf]


@struct.dataclass
class DecoderParams[Leaf]:
    """All parameters. `unembedding` is None where the embeddings are tied, or unused.

    Attributes:
        embedding: [vocab, hidden].
        layers: one LayerParams a layer.
        final_norm: [hidden].
        unembedding: [vocab, hidden] or None.
        value_head: [1, hidden], or None where the model predicts no value.
    """

    embedding: Leaf
    layers: tuple[LayerParams[Leaf], ...]
    final_norm: Leaf
    unembedding: Leaf | None = None
    value_head: Leaf | None = None


def param_specs(config: ModelConfig) -> DecoderParams[ParamSpec]:
    """Returns the parameters' shapes, logical axes and initialisers."""
    hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    matrix = ParamSpec
    ones = functools.partial(ParamSpec, init="ones")
    zeros = functools.partial(ParamSpec, init="zeros")

    def when(wanted: bool, spec: ParamSpec) -> ParamSpec | None:
        return spec if wanted else None

    head_axes, kv_axes = ("heads", "head_dim"), ("kv_heads", "head_dim")
    attention_specs = AttentionParams(
        query=matrix((hidden, heads, dim), ("embed", *head_axes)),
        key=matrix((hidden, kv_heads, dim), ("embed", *kv_axes)),
        value=matrix((hidden, kv_heads, dim), ("embed", *kv_axes)),
        output=matrix((heads, dim, hidden), (*head_axes, "embed")),
        query_bias=when(config.qkv_bias, zeros((heads, dim), head_axes)),
        key_bias=when(config.qkv_bias, zeros((kv_heads, dim), kv_axes)),
        value_bias=when(config.qkv_bias, zeros((kv_heads, dim), kv_axes)),
        output_bias=when(config.output_bias, zeros((hidden,), ("norm",))),
        query_norm=when(config.qk_norm, ones((dim,), ("head_dim",))),
        key_norm=when(config.qk_norm, ones((dim,), ("head_dim",))),
    )
    mlp_specs = MLPParams(
        gate=matrix((hidden, ffn), ("embed", "ffn")),
        up=matrix((hidden, ffn), ("embed", "ffn")),
        down=matrix((ffn, hidden), ("ffn", "embed")),
        gate_bias=when(config.mlp_bias, zeros((ffn,), ("ffn",))),
        up_bias=when(config.mlp_bias, zeros((ffn,), ("ffn",))),
        down_bias=when(config.mlp_bias, zeros((hidden,), ("norm",))),
    )
    norm = ones((hidden,), ("norm",))
    table = matrix((config.vocab_size, hidden), ("vocab", "embed"))
    return DecoderParams(
        embedding=table,
        layers=(LayerParams(norm, attention_specs, norm, mlp_specs),)
        * config.num_layers,
        final_norm=norm,
        unembedding=when(config.head != "value" and not config.tie_embeddings, table),
        value_head=when(
            config.head != "lm",
            zeros((1, hidden), ("value", "embed")),
        ),
    )


def forward(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Int[Array, "batch length"],
    *,
    positions: Int[Array, "batch length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    kv_view: KVView | None = None,
    rules: Rules = DEFAULT_RULES,
    remat: Remat = "none",
) -> Any:
    """Maps tokens to final hidden states (normalised; `logits` takes it from there).

    A token attends to the tokens of its own segment at its own or an earlier position.

    Args:
        params: in the compute dtype.
        config: static.
        tokens: int32 ids in [0, vocab_size).
        positions: int32; default 0, 1, 2, ... along each row.
        segment_ids: int32, for packed rows; 0 marks padding, which attends to itself
            and to nothing else. Default: every row is one segment.
        kv_view: where keys and values of earlier tokens are, and where those of these
            tokens go. None attends among `tokens` alone (training).
        rules: sharding of activations under the mesh of `jax.set_mesh`, if any.
        remat: what the backward pass keeps.

    Returns:
        hidden [batch, length, hidden_size] in the parameters' dtype; with a `kv_view`
        the pair (hidden, the view after these tokens).

    Raises:
        ValueError: `segment_ids` together with `kv_view`.
    """
    if kv_view is not None and segment_ids is not None:
        raise ValueError(
            "forward: segment_ids cannot be combined with kv_view; a view's row is one "
            "sequence already"
        )
    if positions is None:
        length = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(length, tokens.shape)
    tables = rope_tables(config, positions)
    hidden = _embed(params.embedding, tokens.reshape(-1), rules)
    layer_caches = []
    for index, layer in enumerate(params.layers):
        step = functools.partial(_layer, config, index, rules)
        entry = None if kv_view is None else kv_view.layer(index)
        hidden, entry = _remat(step, remat)(
            layer, hidden, tables, positions, segment_ids, entry
        )
        layer_caches.append(entry)
    hidden = _rms_norm(hidden, params.final_norm, config.rms_norm_eps)
    hidden = hidden.reshape(*tokens.shape, -1)
    if kv_view is None:
        return hidden
    return hidden, kv_view.with_layers(layer_caches)


def unembedding(params: DecoderParams[Array]) -> Float[Array, "vocab hidden"]:
    """The matrix that maps hidden states to logits, the embedding where it is tied."""
    return params.embedding if params.unembedding is None else params.unembedding


def logits(
    params: DecoderParams[Array],
    config: ModelConfig,
    hidden: Float[Array, "*batch hidden"],
) -> Float[Array, "*batch vocab"]:
    """Maps hidden states to float32 logits."""
    del config  # Families with soft-caps or scales need it; the signature stays.
    return jnp.einsum(
        "...d,vd->...v", hidden, unembedding(params), preferred_element_type=jnp.float32
    )


def values(
    params: DecoderParams[Array], hidden: Float[Array, "*batch hidden"]
) -> Float[Array, "*batch"]:
    """Maps hidden states to float32 values: what the value head says after each token.

    Raises:
        ValueError: the parameters have no value head.
    """
    if params.value_head is None:
        raise ValueError(
            'values: the parameters have no value head; make them with head="value" or '
            '"lm+value" in the model\'s config'
        )
    both = jnp.einsum(
        "...d,nd->...n", hidden, params.value_head, preferred_element_type=jnp.float32
    )
    return both[..., 0]


def _remat(step: Callable, remat: Remat) -> Callable:
    if remat == "none":
        return step
    if remat == "full":
        return jax.checkpoint(step)
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(step, policy=policy)


# Between the embedding and the last norm a hidden state is [batch * length, hidden]:
# every projection is a product of two matrices. With three dimensions XLA's CPU backend
# transposes the inputs of the weight gradients element by element (the backward pass of
# the MLP took 2.7 times as long).


def _embed(table: Array, tokens: Array, rules: Rules) -> Array:
    # Whole rows before the lookup: else the backward pass has to move the activations
    # from a split of the batch to one of the width.
    table = constrain(table, ("vocab", "hidden"), rules)
    return constrain(table[tokens], ("batch", "hidden"), rules)


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return weight * (wide * jax.lax.rsqrt(variance + epsilon)).astype(x.dtype)


def _layer(
    config: ModelConfig,
    index: int,
    rules: Rules,
    params: LayerParams[Array],
    hidden: Array,
    tables: tuple[Array, Array],
    positions: Array,
    segment_ids: Array | None,
    entry: Any,
) -> tuple[Array, Any]:
    normed = _rms_norm(hidden, params.attention_norm, config.rms_norm_eps)
    attended, entry = _attention(
        config, index, rules, params.attention, normed, tables, positions, segment_ids,
        entry,
    )  # fmt: skip
    hidden = constrain(hidden + attended, ("batch", "hidden"), rules)
    normed = _rms_norm(hidden, params.mlp_norm, config.rms_norm_eps)
    hidden = hidden + _mlp(params.mlp, normed, rules)
    return constrain(hidden, ("batch", "hidden"), rules), entry


def _attention(
    config: ModelConfig,
    index: int,
    rules: Rules,
    params: AttentionParams[Array],
    x: Array,
    tables: tuple[Array, Array],
    positions: Array,
    segment_ids: Array | None,
    entry: Any,
) -> tuple[Array, Any]:
    shape = positions.shape
    query = _to_heads(x, params.query, params.query_bias, shape)
    key = _to_heads(x, params.key, params.key_bias, shape)
    value = _to_heads(x, params.value, params.value_bias, shape)
    if params.query_norm is not None and params.key_norm is not None:
        query = _rms_norm(query, params.query_norm, config.rms_norm_eps)
        key = _rms_norm(key, params.key_norm, config.rms_norm_eps)
    query = constrain(
        apply_rope(query, *tables), ("batch", "length", "heads", "head_dim"), rules
    )
    # The cache's layout, [batch, kv_heads, length, head_dim], serves training too.
    key = apply_rope(key, *tables).swapaxes(1, 2)
    value = value.swapaxes(1, 2)
    kv_positions, kv_segment_ids = positions, segment_ids
    if entry is not None:
        entry = entry.write(key, value, positions)
        key, value, kv_positions = entry.read()
    kv_axes = ("batch", "kv_heads", "length", "head_dim")
    attended = attention(
        query,
        constrain(key, kv_axes, rules),
        constrain(value, kv_axes, rules),
        query_positions=positions,
        kv_positions=kv_positions,
        query_segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        window=config.window(index),
    )
    output = params.output.reshape(-1, params.output.shape[-1])
    attended = attended.reshape(x.shape[0], -1)
    return _project(attended, output, params.output_bias), entry


def _mlp(params: MLPParams[Array], x: Array, rules: Rules) -> Array:
    gate = _project(x, params.gate, params.gate_bias)
    up = _project(x, params.up, params.up_bias)
    inner = constrain(jax.nn.silu(gate) * up, ("batch", "ffn"), rules)
    return _project(inner, params.down, params.down_bias)


def _to_heads(
    x: Array, weight: Array, bias: Array | None, shape: tuple[int, ...]
) -> Array:
    """Projects to [batch, length, heads, head_dim]."""
    flat = _project(x, weight.reshape(weight.shape[0], -1), None)
    heads = flat.reshape(*shape, *weight.shape[1:])
    return heads if bias is None else heads + bias


def _project(x: Array, weight: Array, bias: Array | None) -> Array:
    product = x @ weight
    return product if bias is None else product + bias
