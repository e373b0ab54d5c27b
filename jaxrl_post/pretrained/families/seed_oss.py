"""Seed-OSS in Hugging Face's format: Llama with separate options for biases."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.hf_config import Defaults, decoder_from_hf, decoder_to_hf
from jaxrl_post.pretrained.hf_values import flag

__all__ = ["config_from_hf", "config_to_hf"]


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; the output projection's bias has its own key.

    Raises:
        CheckpointError: as `decoder_from_hf`.
    """
    defaults = Defaults(max_length=524288, num_kv_heads=8, head_dim=128)
    return replace(
        decoder_from_hf(raw, defaults),
        qkv_bias=flag(raw, "attention_bias", True),
        output_bias=flag(raw, "attention_out_bias", False),
        mlp_bias=flag(raw, "mlp_bias", False),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`.
    """
    return {
        **decoder_to_hf(config),
        "attention_bias": config.qkv_bias,
        "attention_out_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
    }
