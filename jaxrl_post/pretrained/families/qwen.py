"""Qwen2, Qwen2.5 and Qwen3 in Hugging Face's format: the differences from Llama."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    layer_types,
    layer_types_to_hf,
    single_window,
)
from jaxrl_post.pretrained.hf_values import flag, integer, optional_integer
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "WEIGHTS",
    "qwen2_from_hf",
    "qwen2_to_hf",
    "qwen3_from_hf",
    "qwen3_to_hf",
]

WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    "layers.*.attention.query_norm": Weight(
        "model.layers.*.self_attn.q_norm.weight", "head_dim"
    ),
    "layers.*.attention.key_norm": Weight(
        "model.layers.*.self_attn.k_norm.weight", "head_dim"
    ),
}


def qwen2_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; queries, keys and values always have biases.

    Raises:
        CheckpointError: as `decoder_from_hf`, or the windows are invalid.
    """
    config = decoder_from_hf(raw, Defaults(max_length=32768, num_kv_heads=32))
    return replace(config, qkv_bias=True, windows=_windows(raw, config.num_layers))


def qwen2_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the windows have several widths.
    """
    return {**decoder_to_hf(config), **_windows_to_hf(config)}


def qwen3_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; every query and key head is normalised.

    Raises:
        CheckpointError: as `decoder_from_hf`, or the windows are invalid.
    """
    defaults = Defaults(max_length=32768, num_kv_heads=32, head_dim=128)
    config = decoder_from_hf(raw, defaults)
    bias = flag(raw, "attention_bias", False)
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        windows=_windows(raw, config.num_layers),
    )


def qwen3_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the windows have several widths.
    """
    return {**qwen2_to_hf(config), "attention_bias": config.qkv_bias}


def _windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Returns the window of every layer, () if all attention is full.

    `layer_types` names the layers with a window; by default they are all layers from
    `max_window_layers` on. Windows require `use_sliding_window`.
    """
    width = optional_integer(raw, "sliding_window", 4096)
    if not flag(raw, "use_sliding_window", False):
        width = None
    first = integer(raw, "max_window_layers", 28)
    return layer_types(
        raw, num_layers, width, lambda layer: width is not None and layer >= first
    )


def _windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    width = single_window(config)
    sliding = [i for i in range(config.num_layers) if config.window(i) is not None]
    return {
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "max_window_layers": sliding[0] if sliding else config.num_layers,
        "layer_types": layer_types_to_hf(config),
    }
