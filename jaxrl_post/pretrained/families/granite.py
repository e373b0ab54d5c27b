"""Granite 3 in Hugging Face's format: Llama with four multipliers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.hf_values import number

__all__ = ["config_from_hf", "config_to_hf"]


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; absent multipliers are 1, including attention's.

    Raises:
        CheckpointError: as `decoder_from_hf`.
    """
    return replace(
        llama.config_from_hf(raw),
        embedding_scale=number(raw, "embedding_multiplier", 1.0),
        attention_scale=number(raw, "attention_multiplier", 1.0),
        residual_scale=number(raw, "residual_multiplier", 1.0),
        logit_divisor=number(raw, "logits_scaling", 1.0),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`.
    """
    return {
        **llama.config_to_hf(config),
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.score_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
    }
