"""OLMo 2, OLMo 3 and OLMoE in Hugging Face's format."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.families import llama, qwen_moe
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    layer_types,
    layer_types_to_hf,
    required_experts,
    ropes_by_layer,
    ropes_by_layer_to_hf,
    single_window,
)
from jaxrl_post.pretrained.hf_values import (
    flag,
    integer,
    optional_integer,
    optional_number,
)
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "OLMOE_WEIGHTS",
    "WEIGHTS",
    "olmo2_from_hf",
    "olmo2_to_hf",
    "olmo3_from_hf",
    "olmo3_to_hf",
    "olmoe_from_hf",
    "olmoe_to_hf",
]

# The norms of queries and keys run over all heads jointly.
QK_NORMS: Mapping[str, Weight] = {
    "layers.*.attention.query_norm": Weight(
        "model.layers.*.self_attn.q_norm.weight", "(heads head_dim)"
    ),
    "layers.*.attention.key_norm": Weight(
        "model.layers.*.self_attn.k_norm.weight", "(kv_heads head_dim)"
    ),
}
WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    **QK_NORMS,
    "layers.*.attention_post_norm": Weight(
        "model.layers.*.post_attention_layernorm.weight", "norm"
    ),
    "layers.*.mlp_post_norm": Weight(
        "model.layers.*.post_feedforward_layernorm.weight", "norm"
    ),
}
OLMOE_WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    **QK_NORMS,
    **qwen_moe.EXPERTS,
}

# The base of sliding layers in transformers if config.json has version 4's keys with a
# scaling, whatever its rope_theta.
OLMO3_THETA = 5e5


def olmo2_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; norms come after attention and MLP.

    Raises:
        CheckpointError: as `decoder_from_hf`.
    """
    config = decoder_from_hf(raw, Defaults(max_length=2048, rms_norm_eps=1e-5))
    return replace(_biased(raw, config), norm_placement="after")


def olmo2_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`.
    """
    return {**decoder_to_hf(config), "attention_bias": config.qkv_bias}


def olmo3_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; by default three of four layers have a window.

    Raises:
        CheckpointError: as `decoder_from_hf`, or windows are invalid.
    """
    max_length = integer(raw, "max_position_embeddings", 2048)
    full, local = ropes_by_layer(
        raw, max_length, theta=OLMO3_THETA, local_theta=OLMO3_THETA
    )
    defaults = Defaults(max_length=2048, rms_norm_eps=1e-5)
    config = decoder_from_hf(raw, defaults, rotation=full)
    return replace(
        _biased(raw, config),
        norm_placement="after",
        local_rope_theta=local,
        windows=layer_types(
            raw,
            config.num_layers,
            optional_integer(raw, "sliding_window", 4096),
            lambda layer: bool((layer + 1) % 4),
        ),
    )


def olmo3_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows have several widths.
    """
    raw = {
        **olmo2_to_hf(config),
        "rope_parameters": ropes_by_layer_to_hf(config),
        "sliding_window": single_window(config) or 4096,
        "layer_types": layer_types_to_hf(config),
    }
    if config.local_rope_theta != OLMO3_THETA:
        raw.pop("rope_scaling")
    return raw


def olmoe_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; `intermediate_size` is the width of an expert.

    Raises:
        CheckpointError: as `decoder_from_hf`, or experts are invalid.
    """
    config = decoder_from_hf(raw, Defaults(max_length=4096, rms_norm_eps=1e-5))
    count = integer(raw, "num_local_experts", integer(raw, "num_experts", 64))
    return replace(
        _biased(raw, config),
        qkv_clip=optional_number(raw, "clip_qkv"),
        experts=MixtureOfExperts(
            num_experts=count,
            experts_per_token=integer(raw, "num_experts_per_tok", 8),
            expert_size=config.intermediate_size,
            normalize=flag(raw, "norm_topk_prob", False),
        ),
    )


def olmoe_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the model has no experts.
    """
    experts = required_experts(config)
    return {
        **olmo2_to_hf(config),
        "intermediate_size": experts.expert_size,
        "clip_qkv": config.qkv_clip,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "norm_topk_prob": experts.normalize,
    }


def _biased(raw: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    bias = flag(raw, "attention_bias", False)
    return replace(config, qkv_bias=bias, output_bias=bias, qk_norm="joint")
