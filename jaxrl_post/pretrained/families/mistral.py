"""Mistral, Mixtral, Ministral and Ministral 3 in Hugging Face's format."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig, QueryScaling
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    layer_types,
    layer_types_to_hf,
    required_experts,
    single_window,
    uniform_window,
    with_window,
)
from jaxrl_post.pretrained.hf_values import integer, number, optional_integer
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "MIXTRAL_WEIGHTS",
    "ministral3_from_hf",
    "ministral3_to_hf",
    "ministral_from_hf",
    "ministral_to_hf",
    "mistral_from_hf",
    "mistral_to_hf",
    "mixtral_from_hf",
    "mixtral_to_hf",
]

EXPERT = "model.layers.*.block_sparse_moe.experts.%"
MIXTRAL_WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    "layers.*.experts.router": Weight(
        "model.layers.*.block_sparse_moe.gate.weight", "router embed"
    ),
    "layers.*.experts.gate": Weight(f"{EXPERT}.w1.weight", "expert_ffn expert_embed"),
    "layers.*.experts.up": Weight(f"{EXPERT}.w3.weight", "expert_ffn expert_embed"),
    "layers.*.experts.down": Weight(f"{EXPERT}.w2.weight", "expert_embed expert_ffn"),
}

ORIGINAL, STRENGTH = "original_max_position_embeddings", "llama_4_scaling_beta"
# The default of transformers if config.json has no rotary parameters.
ROPE3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    STRENGTH: 0.1,
}


def mistral_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; all layers have the same window, if any.

    With `layer_types`, only its sliding layers have the window, because AutoConfig of
    transformers then treats the model as a ministral.

    Raises:
        CheckpointError: as `decoder_from_hf`, or the window is empty.
    """
    config = decoder_from_hf(raw, Defaults(max_length=131072, num_kv_heads=8))
    width = optional_integer(raw, "sliding_window", 4096)
    windows = layer_types(raw, config.num_layers, width, lambda _: width is not None)
    return replace(config, windows=windows)


def mistral_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows have several widths.
    """
    raw = {**decoder_to_hf(config), "sliding_window": single_window(config)}
    if config.windows and None in config.windows:
        raw["layer_types"] = layer_types_to_hf(config)
    return raw


def mixtral_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; `intermediate_size` is the width of an expert.

    Raises:
        CheckpointError: as `mistral_from_hf`, or experts are invalid.
    """
    defaults = Defaults(
        max_length=131072, num_kv_heads=8, rms_norm_eps=1e-5, rope_theta=1e6
    )
    config = decoder_from_hf(raw, defaults)
    experts = MixtureOfExperts(
        num_experts=integer(raw, "num_local_experts", 8),
        experts_per_token=integer(raw, "num_experts_per_tok", 2),
        expert_size=config.intermediate_size,
    )
    return with_window(replace(config, experts=experts), raw)


def mixtral_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `mistral_to_hf`, or the model has no experts.
    """
    experts = required_experts(config)
    return {
        **decoder_to_hf(config),
        "sliding_window": uniform_window(config),
        "intermediate_size": experts.expert_size,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
    }


def ministral_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; as Mistral, but `layer_types` names the sliding layers.

    Raises:
        CheckpointError: as `decoder_from_hf`, or windows are invalid.
    """
    raw = {"num_key_value_heads": 8, "sliding_window": 4096, **raw}
    config = decoder_from_hf(raw, Defaults(max_length=131072))
    width = optional_integer(raw, "sliding_window")
    windows = layer_types(raw, config.num_layers, width, lambda _: width is not None)
    return replace(config, windows=windows)


def ministral_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows have several widths.
    """
    return {
        **decoder_to_hf(config),
        "sliding_window": single_window(config),
        "layer_types": layer_types_to_hf(config),
    }


def ministral3_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; queries are scaled up beyond the pre-training context.

    Raises:
        CheckpointError: as `decoder_from_hf`, the window is empty, or rotary parameters
            lack `llama_4_scaling_beta`, which transformers requires too.
    """
    raw = {"num_key_value_heads": 8, "head_dim": 128, **raw}
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    if rope is None:
        rope = raw["rope_parameters"] = ROPE3
    defaults = Defaults(max_length=262144, rms_norm_eps=1e-5)
    config = with_window(decoder_from_hf(raw, defaults), raw)
    scaling, strength = config.rope_scaling, number(rope, STRENGTH)
    known = None if scaling is None else scaling.original_length
    length = integer(rope, ORIGINAL) if known is None else known
    if not strength:
        return config
    return replace(config, query_scaling=QueryScaling(strength, length))


def ministral3_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json with rotary parameters as in transformers 5 alone.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows have several widths.
    """
    raw = mistral_to_hf(config)
    # Version 4 lacks this family, and its rotary keys would hide the query scaling.
    del raw["rope_scaling"], raw["rope_theta"]
    rope = raw["rope_parameters"]
    scaling = config.query_scaling or QueryScaling(0.0, config.max_length)
    rope[STRENGTH] = scaling.strength
    rope.setdefault(ORIGINAL, scaling.length)
    return raw
