"""Mistral and Mixtral in Hugging Face's terms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.models.errors import CheckpointError
from jaxrl_post.models.families import llama
from jaxrl_post.models.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    single_window,
)
from jaxrl_post.models.hf_values import integer, optional_integer
from jaxrl_post.models.layout import Weight

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

    Raises:
        CheckpointError: as `decoder_from_hf`, or an empty window.
    """
    config = decoder_from_hf(raw, Defaults(max_length=131072, num_kv_heads=8))
    absent = {"sliding_window": 4096}
    return _with_window(config, {**absent, **raw})


def mistral_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows that differ between layers.
    """
    return {**decoder_to_hf(config), "sliding_window": uniform_window(config)}


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
    return _with_window(replace(config, experts=experts), raw)


def mixtral_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `mistral_to_hf`, or the model has no experts.
    """
    experts = required_experts(config)
    return {
        **mistral_to_hf(config),
        "intermediate_size": experts.expert_size,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
    }


def required_experts(config: ModelConfig) -> MixtureOfExperts:
    """Returns the config's experts.

    Raises:
        CheckpointError: there are none, so that no checkpoint of the family fits.
    """
    if config.experts is None:
        raise CheckpointError(
            f"{config.model_type} checkpoints cannot express experts=None"
        )
    return config.experts


def uniform_window(config: ModelConfig) -> int | None:
    """The window that all layers have, None where no layer has one.

    Raises:
        CheckpointError: some have one and others not, or of another width.
    """
    width = single_window(config)
    if width is not None and None in config.windows:
        raise CheckpointError(
            f"{config.model_type} checkpoints have one window for all layers; got "
            f"windows={config.windows}"
        )
    return width


def _with_window(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    width = optional_integer(raw, "sliding_window")
    if width is None:
        return config
    if width < 1:
        raise CheckpointError(f"sliding_window must be at least 1; got {width}")
    return replace(config, windows=(width,) * config.num_layers)
