"""SmolLM3 in Hugging Face's format: Llama, some layers without rotary embedding."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    layer_types,
    layer_types_to_hf,
    single_window,
)
from jaxrl_post.pretrained.hf_values import flag, integer, integers, optional_integer

__all__ = ["config_from_hf", "config_to_hf"]


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; 0 in `no_rope_layers` means no rotary embedding.

    Raises:
        CheckpointError: as `decoder_from_hf`, or a list does not fit the layers.
    """
    defaults = Defaults(
        max_length=32768, num_kv_heads=4, rope_theta=2e6, tie_embeddings=True
    )
    config = decoder_from_hf(raw, defaults)
    every = integer(raw, "no_rope_layer_interval", 4)
    rotated = integers(raw, "no_rope_layers")
    if raw.get("no_rope_layers") is None:
        rotated = [int((layer + 1) % every != 0) for layer in range(config.num_layers)]
    if len(rotated) != config.num_layers or not set(rotated) <= {0, 1}:
        raise CheckpointError(
            f"no_rope_layers must have a 0 or 1 for each of {config.num_layers} "
            f"layers; got {rotated}"
        )
    width = optional_integer(raw, "sliding_window")
    sliding = flag(raw, "use_sliding_window", False) and width is not None
    bias = flag(raw, "attention_bias", False)
    return replace(
        config,
        unrotated_layers=tuple(i for i, used in enumerate(rotated) if not used),
        windows=layer_types(
            raw,
            config.num_layers,
            width,
            lambda layer: sliding and not rotated[layer],
        ),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(raw, "mlp_bias", False),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows have several widths.
    """
    width, layers = single_window(config), range(config.num_layers)
    return {
        **decoder_to_hf(config),
        "no_rope_layers": [int(i not in config.unrotated_layers) for i in layers],
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "layer_types": layer_types_to_hf(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }
