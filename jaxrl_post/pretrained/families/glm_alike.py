"""Families with GLM-4.5's experts: dots.llm1 (dots1) and Solar Open (solar_open)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.families import glm
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    layer_types,
    layer_types_to_hf,
    required_experts,
    single_window,
)
from jaxrl_post.pretrained.hf_values import (
    flag,
    integer,
    optional_flag,
    optional_integer,
)

__all__ = ["dots_from_hf", "dots_to_hf", "solar_from_hf", "solar_to_hf"]

SOLAR_SIZES = {"head_dim": 128, "moe_intermediate_size": 1280}


def dots_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; by default layers from `max_window_layers` on have a window.

    Raises:
        CheckpointError: as `decoder_from_hf`, or experts or windows are invalid.
    """
    # transformers has no defaults for these keys.
    counts = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
    routed, _, chosen = (integer(raw, key) for key in counts)
    raw = {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        **raw,
        "norm_topk_prob": optional_flag(raw, "norm_topk_prob", False),
    }
    config = decoder_from_hf(raw, Defaults(max_length=2048))
    dense = min(integer(raw, "first_k_dense_replace", 0), config.num_layers)
    experts = glm.balanced_from_hf(
        raw,
        MixtureOfExperts(
            num_experts=routed,
            experts_per_token=chosen,
            expert_size=1408,
            dense_layers=tuple(range(dense)),
        ),
    )
    width = optional_integer(raw, "sliding_window")
    first = integer(raw, "max_window_layers", 62)
    bias = flag(raw, "attention_bias", False)
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        windows=layer_types(
            raw,
            config.num_layers,
            width,
            lambda layer: width is not None and layer >= first,
        ),
        experts=experts if dense < config.num_layers else None,
    )


def dots_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, several widths of windows, or no experts.
    """
    return {
        **decoder_to_hf(config),
        **glm.balanced_to_hf(required_experts(config)),
        "attention_bias": config.qkv_bias,
        "sliding_window": single_window(config),
        "max_window_layers": config.num_layers,
        "layer_types": layer_types_to_hf(config),
    }


def solar_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; no layer is dense, and the attention's output has no bias.

    Raises:
        CheckpointError: as `decoder_from_hf`, or experts are invalid.
    """
    raw = {**SOLAR_SIZES, **raw}
    defaults = Defaults(
        max_length=131072, num_kv_heads=8, rms_norm_eps=1e-5, rope_theta=1e6
    )
    # The family has no dense layers, hence no key for the width of a dense MLP.
    config = decoder_from_hf(raw, defaults, width_key="moe_intermediate_size")
    experts = MixtureOfExperts(
        num_experts=128, experts_per_token=8, expert_size=config.intermediate_size
    )
    return replace(
        config,
        qkv_bias=flag(raw, "attention_bias", False),
        experts=glm.balanced_from_hf(raw, experts),
    )


def solar_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the model has no experts.
    """
    return {
        **decoder_to_hf(config),
        **glm.balanced_to_hf(required_experts(config)),
        "attention_bias": config.qkv_bias,
    }
