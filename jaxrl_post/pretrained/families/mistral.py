"""Mistral and Mixtral in Hugging Face's terms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
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
from jaxrl_post.pretrained.hf_values import integer, optional_integer
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "MIXTRAL_WEIGHTS",
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


def mistral_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; a window, where there is one, is that of all layers.

    With `layer_types`, it is that of the layers that slide: AutoConfig of transformers
    then takes the model for a ministral.

    Raises:
        CheckpointError: as `decoder_from_hf`, or an empty window.
    """
    config = decoder_from_hf(raw, Defaults(max_length=131072, num_kv_heads=8))
    width = optional_integer(raw, "sliding_window", 4096)
    windows = layer_types(raw, config.num_layers, width, lambda _: width is not None)
    return replace(config, windows=windows)


def mistral_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows of several widths.
    """
    raw = {**decoder_to_hf(config), "sliding_window": single_window(config)}
    if config.windows and None in config.windows:
        raw["layer_types"] = layer_types_to_hf(config)
    return raw


def mixtral_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; `intermediate_size` is the width of an expert.

    Raises:
        CheckpointError: as `mistral_from_hf`, or experts that make no sense.
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
