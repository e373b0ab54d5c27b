"""The parameters of a decoder: their tree, shapes, logical axes and initialisers.

Every layer has its own arrays (docs/decisions/0001): decoding reads them in place,
while stacked layers would be sliced, and so copied, at every step.
"""

import dataclasses
import functools

import jax
from flax import struct

from jaxrl_post.models.config import (
    LatentAttention,
    MixtureOfExperts,
    ModelConfig,
)
from jaxrl_post.models.recurrences import GatedDelta, Mamba2, ShortConvolution
from jaxrl_post.models.recurrent_params import (
    GatedDeltaParams,
    Mamba2Params,
    ShortConvolutionParams,
    convolution_specs,
    delta_specs,
    mamba_specs,
)
from jaxrl_post.models.spec import ParamSpec, is_spec, matrix, ones, when, zeros
from jaxrl_post.models.vision_params import VisionParams, vision_specs

__all__ = [
    "AttentionParams",
    "DecoderParams",
    "ExpertsParams",
    "IndexerParams",
    "LatentAttentionParams",
    "LayerParams",
    "MLPParams",
    "PerLayerInputParams",
    "PerLayerParams",
    "ProcessHeadParams",
    "param_specs",
    "text_specs",
]


@struct.dataclass
class AttentionParams[Leaf]:
    """Projections of grouped-query attention; None for parts that a family lacks.

    Attributes:
        query: [hidden, heads, head_dim]; with `attention_gate`, twice as many dims.
        key: [hidden, kv_heads, head_dim]; None if another layer's keys are read.
        value: [hidden, kv_heads, head_dim]; None then too, or if keys are values.
        output: [heads, head_dim, hidden].
        query_bias: [heads, head_dim], as the queries.
        key_bias: [kv_heads, head_dim].
        value_bias: [kv_heads, head_dim].
        output_bias: [hidden].
        query_norm: [head_dim], or [heads, head_dim] for a joint norm.
        key_norm: [head_dim], or [kv_heads, head_dim] for a joint norm.
        sinks: [heads], extra logits in the softmax.
    """

    query: Leaf
    key: Leaf | None
    value: Leaf | None
    output: Leaf
    query_bias: Leaf | None = None
    key_bias: Leaf | None = None
    value_bias: Leaf | None = None
    output_bias: Leaf | None = None
    query_norm: Leaf | None = None
    key_norm: Leaf | None = None
    sinks: Leaf | None = None


@struct.dataclass
class IndexerParams[Leaf]:
    """An indexer of sparse attention, which is read and saved and has no gradient.

    Attributes:
        queries: [query_rank, heads, head_dim], from the queries' latent.
        keys: [hidden, head_dim].
        key_norm: [head_dim].
        key_norm_bias: [head_dim].
        weights: [hidden, heads].
    """

    queries: Leaf
    keys: Leaf
    key_norm: Leaf
    key_norm_bias: Leaf
    weights: Leaf


@struct.dataclass
class LatentAttentionParams[Leaf]:
    """Projections of multi-head latent attention.

    Attributes:
        kv_down: [hidden, kv_rank + rope_dim], to the latent and the rotated key.
        kv_norm: [kv_rank].
        kv_up: [kv_rank, heads, nope_dim + value_dim], to keys and values.
        output: [heads, value_dim, hidden].
        query: [hidden, heads, nope_dim + rope_dim]; None if queries have a latent.
        query_down: [hidden, query_rank], to the queries' latent.
        query_norm: [query_rank].
        query_up: [query_rank, heads, nope_dim + rope_dim].
        query_down_bias: [query_rank].
        kv_down_bias: [kv_rank + rope_dim].
        output_bias: [hidden].
        indexer: of sparse attention, in layers that have their own.
    """

    kv_down: Leaf
    kv_norm: Leaf
    kv_up: Leaf
    output: Leaf
    query: Leaf | None = None
    query_down: Leaf | None = None
    query_norm: Leaf | None = None
    query_up: Leaf | None = None
    query_down_bias: Leaf | None = None
    kv_down_bias: Leaf | None = None
    output_bias: Leaf | None = None
    indexer: IndexerParams[Leaf] | None = None


@struct.dataclass
class MLPParams[Leaf]:
    """MLP: gate and up [hidden, ffn], down [ffn, hidden], optional biases.

    The gate is None for an activation without one.
    """

    gate: Leaf | None
    up: Leaf
    down: Leaf
    gate_bias: Leaf | None = None
    up_bias: Leaf | None = None
    down_bias: Leaf | None = None


@struct.dataclass
class ExpertsParams[Leaf]:
    """A mixture of experts.

    Attributes:
        router: [experts, hidden].
        gate: [experts, hidden, expert_size]; None for an activation without a gate.
        up: [experts, hidden, expert_size].
        down: [experts, expert_size, hidden].
        router_bias: [experts].
        correction_bias: [experts], added to the scores for the selection alone.
        gate_bias: [experts, expert_size].
        up_bias: [experts, expert_size].
        down_bias: [experts, hidden].
        shared: an MLP of width `shared_size` for every token.
        shared_gate: [1, hidden].
        narrow: [hidden, latent_size], before the experts, whose matrices then have
            `latent_size` in place of hidden.
        widen: [latent_size, hidden], after them.
        router_scale: [hidden], factor of the router's input.
        expert_scale: [experts], factor of the experts' weights.
    """

    router: Leaf
    gate: Leaf | None
    up: Leaf
    down: Leaf
    router_bias: Leaf | None = None
    correction_bias: Leaf | None = None
    gate_bias: Leaf | None = None
    up_bias: Leaf | None = None
    down_bias: Leaf | None = None
    shared: MLPParams[Leaf] | None = None
    shared_gate: Leaf | None = None
    narrow: Leaf | None = None
    widen: Leaf | None = None
    router_scale: Leaf | None = None
    expert_scale: Leaf | None = None


@struct.dataclass
class PerLayerInputParams[Leaf]:
    """The end of a layer that reads the layer's embeddings of tokens.

    Attributes:
        gate: [hidden, size].
        output: [size, hidden].
        norm: [hidden], norm of its output.
    """

    gate: Leaf
    output: Leaf
    norm: Leaf


@struct.dataclass
class PerLayerParams[Leaf]:
    """The embeddings of tokens for all layers; see `PerLayerEmbedding`.

    Attributes:
        embedding: [vocab, layers * size].
        projection: [hidden, layers * size], of the token's embedding.
        norm: [size], norm of what is projected.
    """

    embedding: Leaf
    projection: Leaf
    norm: Leaf


@struct.dataclass
class LayerParams[Leaf]:
    """One decoder layer; the norms are [hidden].

    Attributes:
        attention: grouped-query or latent attention; None if the layer has none.
        convolution: None if the layer has no short convolution.
        delta: None if the layer has no gated delta net.
        mamba: None if the layer has no Mamba-2.
        mlp: None if the layer has no dense MLP.
        experts: None if the layer has none.
        attention_norm: norm of the input of attention, or of what is in its place.
        attention_post_norm: norm of its output.
        mlp_norm: norm of the MLP's input.
        mlp_post_norm: norm of the MLP's output.
        dense_post_norm: norm of the dense MLP's output, where there are experts too.
        experts_norm: norm of the experts' input there.
        experts_post_norm: norm of the experts' output there.
        per_layer: None for a model without embeddings for every layer.
        scale: [1], factor of the layer's output, without a gradient.
    """

    attention: AttentionParams[Leaf] | LatentAttentionParams[Leaf] | None = None
    convolution: ShortConvolutionParams[Leaf] | None = None
    delta: GatedDeltaParams[Leaf] | None = None
    mamba: Mamba2Params[Leaf] | None = None
    mlp: MLPParams[Leaf] | None = None
    experts: ExpertsParams[Leaf] | None = None
    attention_norm: Leaf | None = None
    attention_post_norm: Leaf | None = None
    mlp_norm: Leaf | None = None
    mlp_post_norm: Leaf | None = None
    dense_post_norm: Leaf | None = None
    experts_norm: Leaf | None = None
    experts_post_norm: Leaf | None = None
    per_layer: PerLayerInputParams[Leaf] | None = None
    scale: Leaf | None = None


@struct.dataclass
class ProcessHeadParams[Leaf]:
    """Head for the logits of wrong and right steps: weight [2, hidden], bias [2]."""

    weight: Leaf
    bias: Leaf


@struct.dataclass
class DecoderParams[Leaf]:
    """All parameters of a decoder.

    Attributes:
        embedding: [vocab, hidden].
        layers: one LayerParams per layer.
        final_norm: [hidden].
        unembedding: [vocab, hidden]; None for tied embeddings or no logits.
        value_head: [1, hidden], or None if the model predicts no value.
        process_head: head of a process reward model, or None.
        per_layer: embeddings of tokens for every layer, or None.
        vision: the vision tower of a model that also sees, or None.
    """

    embedding: Leaf
    layers: tuple[LayerParams[Leaf], ...]
    final_norm: Leaf
    unembedding: Leaf | None = None
    value_head: Leaf | None = None
    process_head: ProcessHeadParams[Leaf] | None = None
    per_layer: PerLayerParams[Leaf] | None = None
    vision: VisionParams[Leaf] | None = None


def param_specs(config: ModelConfig) -> DecoderParams[ParamSpec]:
    """Returns the parameters' shapes, logical axes and initialisers."""
    specs = text_specs(config)
    if config.vision is None:
        return specs
    return dataclasses.replace(specs, vision=vision_specs(config.vision.tower))


def text_specs(config: ModelConfig) -> DecoderParams[ParamSpec]:
    """`param_specs` without a vision tower."""
    table = matrix((config.vocab_size, config.hidden_size), ("vocab", "embed"))
    untied = config.predicts_tokens and not config.tie_embeddings
    specs = DecoderParams(
        embedding=table,
        layers=tuple(_layer(config, layer) for layer in range(config.num_layers)),
        final_norm=_norm(config, config.hidden_size),
        unembedding=when(untied, table),
        value_head=when(
            config.head in ("value", "lm+value"),
            zeros((1, config.hidden_size), ("value", "embed"), decay=True),
        ),
        process_head=_process_head(config) if config.head == "process" else None,
        per_layer=_per_layer(config),
    )
    scaled = functools.partial(dataclasses.replace, scale=config.initializer_range)
    return jax.tree.map(scaled, specs, is_leaf=is_spec)


def _process_head(config: ModelConfig) -> ProcessHeadParams[ParamSpec]:
    return ProcessHeadParams(
        weight=zeros((2, config.hidden_size), ("value", "embed"), decay=True),
        bias=zeros((2,), ("value",)),
    )


def _norm(config: ModelConfig, width: int, axis: str = "norm") -> ParamSpec:
    # Both choices make a norm multiply by one at the start.
    return (zeros if config.norm_plus_one else ones)((width,), (axis,))


def _layer(config: ModelConfig, layer: int) -> LayerParams[ParamSpec]:
    experts, norm = config.layer_experts(layer), _norm(config, config.hidden_size)
    before = config.norm_placement in ("before", "both")
    after = config.norm_placement in ("after", "both")
    kind, spec = config.recurrent(layer), config.layer(layer)
    mixes, ends = spec.mixer is not None, spec.mlp is not None
    both, width = spec.mlp == "both", spec.mlp_multiple * config.intermediate_size
    return LayerParams(
        attention=_mixing(config, layer) if spec.mixer == "attention" else None,
        convolution=(
            convolution_specs(config, kind)
            if isinstance(kind, ShortConvolution)
            else None
        ),
        delta=delta_specs(config, kind) if isinstance(kind, GatedDelta) else None,
        mamba=mamba_specs(config, kind) if isinstance(kind, Mamba2) else None,
        mlp=_mlp(config, width) if spec.has("dense") else None,
        experts=None if experts is None else _experts(config, experts),
        attention_norm=when(before and mixes, norm),
        attention_post_norm=when(after and mixes, norm),
        mlp_norm=when(before and ends, norm),
        mlp_post_norm=when(after and ends, norm),
        dense_post_norm=when(both, norm),
        experts_norm=when(both, norm),
        experts_post_norm=when(both, norm),
        per_layer=_per_layer_input(config),
        # A checkpoint's constant, which no optimizer changes.
        scale=when(config.layer_scale, ones((1,), ("value",), decay=False)),
    )


def _per_layer(config: ModelConfig) -> PerLayerParams[ParamSpec] | None:
    if config.per_layer is None:
        return None
    rows, size = config.per_layer.vocab_size, config.per_layer.size
    width = config.num_layers * size
    return PerLayerParams(
        embedding=matrix((rows, width), ("vocab", "embed")),
        projection=matrix((config.hidden_size, width), ("embed", "rank")),
        norm=_norm(config, size),
    )


def _per_layer_input(config: ModelConfig) -> PerLayerInputParams[ParamSpec] | None:
    if config.per_layer is None:
        return None
    hidden, size = config.hidden_size, config.per_layer.size
    return PerLayerInputParams(
        gate=matrix((hidden, size), ("embed", "rank")),
        output=matrix((size, hidden), ("rank", "embed")),
        norm=_norm(config, hidden),
    )


def _mixing(
    config: ModelConfig, layer: int
) -> AttentionParams[ParamSpec] | LatentAttentionParams[ParamSpec]:
    latent = config.latent
    return (
        _attention(config, layer) if latent is None else _latent(config, latent, layer)
    )


def _attention(config: ModelConfig, layer: int) -> AttentionParams[ParamSpec]:
    own, makes = config.heads(layer), config.layer(layer).makes_keys
    hidden, dim = config.hidden_size, own.head_dim
    heads, kv_heads = config.num_heads, own.num_kv_heads
    head_axes, kv_axes = ("heads", "head_dim"), ("kv_heads", "head_dim")
    asked = 2 * dim if config.attention_gate else dim
    values = makes and not own.keys_as_values

    def head_norm(count: int, axes: tuple[str, str]) -> ParamSpec | None:
        if config.qk_norm == "joint":
            return ones((count, dim), axes)
        return when(config.qk_norm == "head", _norm(config, dim, "head_dim"))

    def entries(wanted: bool) -> ParamSpec | None:
        return when(wanted, matrix((hidden, kv_heads, dim), ("embed", *kv_axes)))

    def bias(wanted: bool, count: int, width: int, axes: tuple) -> ParamSpec | None:
        return when(config.qkv_bias and wanted, zeros((count, width), axes))

    return AttentionParams(
        query=matrix((hidden, heads, asked), ("embed", *head_axes)),
        key=entries(makes),
        value=entries(values),
        output=matrix((heads, dim, hidden), (*head_axes, "embed")),
        query_bias=bias(True, heads, asked, head_axes),
        key_bias=bias(makes, kv_heads, dim, kv_axes),
        value_bias=bias(values, kv_heads, dim, kv_axes),
        output_bias=when(config.output_bias, zeros((hidden,), ("norm",))),
        query_norm=head_norm(heads, head_axes),
        key_norm=head_norm(kv_heads, kv_axes) if makes else None,
        sinks=when(config.sinks, zeros((heads,), ("heads",))),
    )


def _latent(
    config: ModelConfig, latent: LatentAttention, layer: int
) -> LatentAttentionParams[ParamSpec]:
    hidden, heads, rank = config.hidden_size, config.num_heads, latent.query_rank
    head = (heads, config.head_dim)
    head_axes = ("heads", "head_dim")
    if rank is None:
        queries = {"query": matrix((hidden, *head), ("embed", *head_axes))}
    else:
        queries = {
            "query_down_bias": when(config.qkv_bias, zeros((rank,), ("rank",))),
            "query_down": matrix((hidden, rank), ("embed", "rank")),
            "query_norm": _norm(config, rank),
            "query_up": matrix((rank, *head), ("rank", *head_axes)),
        }
    width = latent.kv_rank + latent.rope_dim
    return LatentAttentionParams(
        kv_down=matrix((hidden, width), ("embed", "rank")),
        kv_norm=_norm(config, latent.kv_rank),
        kv_up=matrix(
            (latent.kv_rank, heads, latent.nope_dim + latent.value_dim),
            ("rank", *head_axes),
        ),
        output=matrix((heads, latent.value_dim, hidden), (*head_axes, "embed")),
        kv_down_bias=when(config.qkv_bias, zeros((width,), ("rank",))),
        output_bias=when(config.output_bias, zeros((hidden,), ("norm",))),
        indexer=_indexer(config, latent, layer),
        **queries,
    )


def _indexer(
    config: ModelConfig, latent: LatentAttention, layer: int
) -> IndexerParams[ParamSpec] | None:
    """Specs without weight decay, so that no optimizer changes what has no gradient."""
    indexer, rank, hidden = latent.indexer, latent.query_rank, config.hidden_size
    if indexer is None or rank is None or not config.layer(layer).indexed:
        return None
    heads, dim = indexer.num_heads, indexer.head_dim
    kept = functools.partial(matrix, decay=False)
    return IndexerParams(
        queries=kept((rank, heads, dim), ("rank", "heads", "head_dim")),
        keys=kept((hidden, dim), ("embed", "head_dim")),
        key_norm=ones((dim,), ("head_dim",), wide=True),
        key_norm_bias=zeros((dim,), ("head_dim",), wide=True),
        weights=kept((hidden, heads), ("embed", "heads"), wide=True),
    )


def _mlp(config: ModelConfig, ffn: int) -> MLPParams[ParamSpec]:
    hidden, bias, gated = config.hidden_size, config.mlp_bias, config.gated_mlp
    return MLPParams(
        gate=when(gated, matrix((hidden, ffn), ("embed", "ffn"))),
        up=matrix((hidden, ffn), ("embed", "ffn")),
        down=matrix((ffn, hidden), ("ffn", "embed")),
        gate_bias=when(bias and gated, zeros((ffn,), ("ffn",))),
        up_bias=when(bias, zeros((ffn,), ("ffn",))),
        down_bias=when(bias, zeros((hidden,), ("norm",))),
    )


def _experts(
    config: ModelConfig, experts: MixtureOfExperts
) -> ExpertsParams[ParamSpec]:
    count, hidden, ffn = experts.num_experts, config.hidden_size, experts.expert_size
    latent, gated = experts.latent_size, config.gated_mlp
    inner = latent or hidden
    # Separate axes, because the mesh axis that splits the experts must not also split
    # an expert's matrix.
    wide = ("experts", "expert_embed", "expert_ffn")
    bias = experts.biases
    return ExpertsParams(
        router=matrix((count, hidden), ("router", "embed")),
        gate=when(gated, matrix((count, inner, ffn), wide)),
        up=matrix((count, inner, ffn), wide),
        down=matrix((count, ffn, inner), ("experts", "expert_ffn", "expert_embed")),
        router_bias=when(experts.router_bias, zeros((count,), ("router",))),
        correction_bias=when(
            experts.correction_bias, zeros((count,), ("router",), wide=True)
        ),
        gate_bias=when(bias and gated, zeros((count, ffn), ("experts", "expert_ffn"))),
        up_bias=when(bias, zeros((count, ffn), ("experts", "expert_ffn"))),
        down_bias=when(bias, zeros((count, inner), ("experts", "norm"))),
        shared=_mlp(config, experts.shared_size) if experts.shared_size else None,
        shared_gate=when(experts.shared_gate, matrix((1, hidden), ("value", "embed"))),
        narrow=when(latent > 0, matrix((hidden, latent), ("embed", "rank"))),
        widen=when(latent > 0, matrix((latent, hidden), ("rank", "embed"))),
        router_scale=when(experts.scaled_router, ones((hidden,), ("norm",))),
        expert_scale=when(experts.scaled_router, ones((count,), ("router",))),
    )
