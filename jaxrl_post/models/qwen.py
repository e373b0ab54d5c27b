"""Qwen2, Qwen2.5 and Qwen3 in Hugging Face's terms, where they differ from Llama."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models import llama
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.errors import CheckpointError
from jaxrl_post.models.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    flag,
    integer,
)
from jaxrl_post.models.layout import Weight

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

FULL, SLIDING = "full_attention", "sliding_attention"


def qwen2_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; queries, keys and values always have biases.

    Raises:
        CheckpointError: as `decoder_from_hf`, or the windows make no sense.
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
        CheckpointError: as `decoder_from_hf`, or the windows make no sense.
    """
    defaults = Defaults(max_length=32768, num_kv_heads=32, head_dim=128)
    config = decoder_from_hf(raw, defaults)
    bias = flag(raw, "attention_bias", False)
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        windows=_windows(raw, config.num_layers),
    )


def qwen3_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the windows have several widths.
    """
    return {**qwen2_to_hf(config), "attention_bias": config.qkv_bias}


def _windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of every layer; () where all attention is full.

    `layer_types` names the sliding layers; without it they are the layers from
    `max_window_layers` on. Either way they need `use_sliding_window`.
    """
    width: int | None = None
    if flag(raw, "use_sliding_window", False):
        width = raw.get("sliding_window", 4096)
        if width is not None and integer(raw, "sliding_window", 4096) < 1:
            raise CheckpointError(f"sliding_window must be at least 1; got {width}")
    types = raw.get("layer_types")
    if types is None:
        first = integer(raw, "max_window_layers", 28)
        types = [SLIDING if width and i >= first else FULL for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {FULL, SLIDING}:
        raise CheckpointError(
            f"layer_types must name {FULL} or {SLIDING} for each of {num_layers} "
            f"layers; got {types}"
        )
    if SLIDING not in types:
        return ()
    if width is None:
        raise CheckpointError(
            f"layer_types names {SLIDING}, but use_sliding_window is not true or "
            f"sliding_window is null; set both or make every layer {FULL}"
        )
    return tuple(width if kind == SLIDING else None for kind in types)


def _windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    windows = [config.window(layer) for layer in range(config.num_layers)]
    widths = sorted({width for width in windows if width is not None})
    if len(widths) > 1:
        raise CheckpointError(
            f"windows must all have one width to be written; got {widths}"
        )
    sliding = [layer for layer, width in enumerate(windows) if width is not None]
    return {
        "use_sliding_window": bool(widths),
        "sliding_window": widths[0] if widths else None,
        "max_window_layers": sliding[0] if sliding else config.num_layers,
        "layer_types": [FULL if width is None else SLIDING for width in windows],
    }
