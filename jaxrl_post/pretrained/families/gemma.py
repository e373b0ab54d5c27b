"""Gemma 1, 2 and 3 (text) in Hugging Face's format."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.families import qwen
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    layer_types,
    layer_types_to_hf,
    ropes_by_layer,
    ropes_by_layer_to_hf,
    single_window,
)
from jaxrl_post.pretrained.hf_values import (
    flag,
    integer,
    number,
    optional_integer,
    optional_number,
    section,
)
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "GEMMA2_WEIGHTS",
    "gemma2_from_hf",
    "gemma2_to_hf",
    "gemma3_from_hf",
    "gemma3_to_hf",
    "gemma_from_hf",
    "gemma_to_hf",
]

GEMMA2_WEIGHTS: Mapping[str, Weight] = {
    **qwen.WEIGHTS,
    "layers.*.attention_post_norm": Weight(
        "model.layers.*.post_attention_layernorm.weight", "norm"
    ),
    "layers.*.mlp_norm": Weight(
        "model.layers.*.pre_feedforward_layernorm.weight", "norm"
    ),
    "layers.*.mlp_post_norm": Weight(
        "model.layers.*.post_feedforward_layernorm.weight", "norm"
    ),
}

TANH = "gelu_pytorch_tanh"
DEFAULTS = Defaults(
    max_length=8192, num_kv_heads=16, head_dim=256, tie_embeddings=True, activation=TANH
)


def gemma_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; "gelu" means the tanh approximation used in training.

    Raises:
        CheckpointError: as `decoder_from_hf`.
    """
    if raw.get("hidden_act") == "gelu":
        raw = {**raw, "hidden_act": TANH}
    return _gemma(raw, decoder_from_hf(raw, DEFAULTS))


def gemma_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`.
    """
    return {
        **decoder_to_hf(config),
        "hidden_activation": None,
        "attention_bias": config.qkv_bias,
    }


def gemma2_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; by default even layers have a window.

    Raises:
        CheckpointError: as `gemma_from_hf`, or windows are invalid.
    """
    defaults = replace(DEFAULTS, num_kv_heads=4, activation_key="hidden_activation")
    config = _gemma(raw, decoder_from_hf(raw, defaults))
    return replace(
        _normed_twice(raw, config),
        windows=layer_types(
            raw,
            config.num_layers,
            optional_integer(raw, "sliding_window", 4096),
            lambda layer: layer % 2 == 0,
        ),
        attention_softcap=optional_number(raw, "attn_logit_softcapping", 50.0),
        logit_softcap=optional_number(raw, "final_logit_softcapping", 30.0),
    )


def gemma2_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows have several widths.
    """
    return {
        **decoder_to_hf(config, activation_key="hidden_activation"),
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": _scalar(config),
        "sliding_window": single_window(config) or 4096,
        "layer_types": layer_types_to_hf(config),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def gemma3_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads the text model's config, alone or inside a multimodal config.

    By default every sixth layer has full attention; the others have a window and their
    own rotary base.

    Raises:
        CheckpointError: as `gemma2_from_hf`.
    """
    nested = raw.get("text_config") is not None
    if nested:
        # A nested config may lack `model_type`.
        raw = {**section(raw, "text_config"), "model_type": "gemma3_text"}
    defaults = replace(
        DEFAULTS,
        max_length=131072,
        num_kv_heads=4,
        activation_key="hidden_activation",
    )
    full, local_theta = ropes_by_layer(
        raw,
        integer(raw, "max_position_embeddings", 131072),
        theta=1e6,
        local_theta=1e4,
        local_key="rope_local_base_freq",
    )
    sizes = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    }
    raw = {**sizes, **raw} if nested else raw
    config = _gemma(raw, decoder_from_hf(raw, defaults, rotation=full))
    pattern = integer(
        raw, "sliding_window_pattern", integer(raw, "_sliding_window_pattern", 6)
    )
    return replace(
        _normed_twice(raw, config),
        model_type="gemma3_text",
        qk_norm="head",
        local_rope_theta=local_theta,
        windows=layer_types(
            raw,
            config.num_layers,
            optional_integer(raw, "sliding_window", 4096),
            lambda layer: bool((layer + 1) % pattern),
        ),
        # The multimodal class ignores the cap of logits in its config.
        logit_softcap=None
        if nested
        else optional_number(raw, "final_logit_softcapping"),
    )


def gemma3_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json of the text model.

    Raises:
        CheckpointError: as `gemma2_to_hf`.
    """
    return {
        **gemma2_to_hf(config),
        "rope_local_base_freq": config.local_rope_theta or config.rope_theta,
        "rope_parameters": ropes_by_layer_to_hf(config),
    }


def _gemma(raw: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    """Adds the options of all Gemmas: norms by 1 + w, embeddings times sqrt(hidden)."""
    bias = flag(raw, "attention_bias", False)
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        norm_plus_one=True,
        embedding_scale=math.sqrt(config.hidden_size),
    )


def _normed_twice(raw: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    scalar = number(raw, "query_pre_attn_scalar", 256.0)
    return replace(config, norm_placement="both", attention_scale=scalar**-0.5)


def _scalar(config: ModelConfig) -> float:
    scalar = config.score_scale**-2
    # Releases have integers; the square root and its inverse add a rounding error.
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar
