"""Solar Open (solar_open) in Hugging Face's terms: GLM-4.5's experts in every layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.families import glm
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    required_experts,
)
from jaxrl_post.pretrained.hf_values import flag

__all__ = ["config_from_hf", "config_to_hf"]

SIZES = {"head_dim": 128, "moe_intermediate_size": 1280}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; no layer is dense, and the attention's output has no bias.

    Raises:
        CheckpointError: as `decoder_from_hf`, or experts that make no sense.
    """
    raw = {**SIZES, **raw}
    defaults = Defaults(
        max_length=131072, num_kv_heads=8, rms_norm_eps=1e-5, rope_theta=1e6
    )
    # The width of an MLP, which only dense layers have, is no key of this family.
    config = decoder_from_hf(raw, defaults, width_key="moe_intermediate_size")
    experts = MixtureOfExperts(
        num_experts=128, experts_per_token=8, expert_size=config.intermediate_size
    )
    return replace(
        config,
        qkv_bias=flag(raw, "attention_bias", False),
        experts=glm.balanced_from_hf(raw, experts),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the model has no experts.
    """
    return {
        **decoder_to_hf(config),
        **glm.balanced_to_hf(required_experts(config)),
        "attention_bias": config.qkv_bias,
    }
