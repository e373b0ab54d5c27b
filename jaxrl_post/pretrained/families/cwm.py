"""Code World Model (cwm) in Hugging Face's format: Llama 3 with windows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    layer_types,
    layer_types_to_hf,
    single_window,
)
from jaxrl_post.pretrained.hf_values import flag, optional_integer

__all__ = ["config_from_hf", "config_to_hf"]

# The default of transformers without a rotary dictionary, whatever the rope_theta.
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ABSENT = {"head_dim": 128, "num_key_value_heads": 8, "sliding_window": 8192}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; by default every fourth layer has full attention.

    Raises:
        CheckpointError: as `decoder_from_hf`, or windows are invalid.
    """
    raw = {**ABSENT, **raw}
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw["rope_parameters"] = ROPE
    defaults = Defaults(max_length=131072, rms_norm_eps=1e-5, rope_theta=1e6)
    config = decoder_from_hf(raw, defaults)
    return replace(
        config,
        mlp_bias=flag(raw, "mlp_bias", False),
        windows=layer_types(
            raw,
            config.num_layers,
            optional_integer(raw, "sliding_window") or None,
            lambda layer: bool(layer % 4),
        ),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows have several widths.
    """
    return {
        **decoder_to_hf(config),
        "mlp_bias": config.mlp_bias,
        # The id of Llama 3, because transformers accepts no null here.
        "bos_token_id": 128000,
        "sliding_window": single_window(config) or 8192,
        "layer_types": layer_types_to_hf(config),
    }
