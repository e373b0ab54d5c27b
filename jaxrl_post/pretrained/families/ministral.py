"""Ministral and Ministral 3 in Hugging Face's terms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig, QueryScaling
from jaxrl_post.pretrained.families import mistral
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    layer_types,
    layer_types_to_hf,
    single_window,
    with_window,
)
from jaxrl_post.pretrained.hf_values import integer, number, optional_integer

__all__ = [
    "ministral3_from_hf",
    "ministral3_to_hf",
    "ministral_from_hf",
    "ministral_to_hf",
]

ORIGINAL, STRENGTH = "original_max_position_embeddings", "llama_4_scaling_beta"
# What transformers takes where config.json has no dictionary.
ROPE3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    STRENGTH: 0.1,
}


def ministral_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; Mistral, but that `layer_types` says which layers slide.

    Raises:
        CheckpointError: as `decoder_from_hf`, or windows that make no sense.
    """
    raw = {"num_key_value_heads": 8, "sliding_window": 4096, **raw}
    config = decoder_from_hf(raw, Defaults(max_length=131072))
    width = optional_integer(raw, "sliding_window")
    windows = layer_types(raw, config.num_layers, width, lambda _: width is not None)
    return replace(config, windows=windows)


def ministral_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows of several widths.
    """
    return {
        **decoder_to_hf(config),
        "sliding_window": single_window(config),
        "layer_types": layer_types_to_hf(config),
    }


def ministral3_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; queries grow beyond the context of pre-training.

    Raises:
        CheckpointError: as `decoder_from_hf`, an empty window, or no
            `llama_4_scaling_beta` beside a scaling, without which transformers fails.
    """
    raw = {"num_key_value_heads": 8, "head_dim": 128, **raw}
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    if rope is None:
        rope = raw["rope_parameters"] = ROPE3
    defaults = Defaults(max_length=262144, rms_norm_eps=1e-5)
    config = with_window(decoder_from_hf(raw, defaults), raw)
    scaling, strength = config.rope_scaling, number(rope, STRENGTH)
    known = None if scaling is None else scaling.original_length
    length = integer(rope, ORIGINAL) if known is None else known
    if not strength:
        return config
    return replace(config, query_scaling=QueryScaling(strength, length))


def ministral3_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json, its rotation in transformers 5's spelling alone.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows that differ between layers.
    """
    raw = mistral.mistral_to_hf(config)
    # Version 4 has no such family, and its keys would hide the query's scaling.
    del raw["rope_scaling"], raw["rope_theta"]
    rope = raw["rope_parameters"]
    scaling = config.query_scaling or QueryScaling(0.0, config.max_length)
    rope[STRENGTH] = scaling.strength
    rope.setdefault(ORIGINAL, scaling.length)
    return raw
