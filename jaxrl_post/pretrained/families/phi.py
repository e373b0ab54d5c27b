"""Phi-3 in Hugging Face's format: joined projections, partial rotation, longrope."""

from collections.abc import Mapping
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    uniform_window,
    with_window,
)
from jaxrl_post.pretrained.hf_values import integer, section
from jaxrl_post.pretrained.layout import Weight

__all__ = ["WEIGHTS", "config_from_hf", "config_to_hf"]

QKV = "model.layers.*.self_attn.qkv_proj.weight"
GATE_UP = "model.layers.*.mlp.gate_up_proj.weight"
WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    "layers.*.attention.query": Weight(QKV, "(heads head_dim) embed", part=0),
    "layers.*.attention.key": Weight(QKV, "(kv_heads head_dim) embed", part=1),
    "layers.*.attention.value": Weight(QKV, "(kv_heads head_dim) embed", part=2),
    "layers.*.mlp.gate": Weight(GATE_UP, "ffn embed", part=0),
    "layers.*.mlp.up": Weight(GATE_UP, "ffn embed", part=1),
}

DEFAULTS = Defaults(max_length=4096, rms_norm_eps=1e-5, partial=True)
ORIGINAL = "original_max_position_embeddings"


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; all layers have the same window, if any.

    Raises:
        CheckpointError: as `decoder_from_hf`, or the scaling is not longrope.
    """
    raw = {ORIGINAL: integer(raw, ORIGINAL, 4096), **raw}
    rope = section(raw, "rope_scaling") or section(raw, "rope_parameters")
    if rope.get("rope_type", rope.get("type")) == "yarn":
        # Early releases call longrope "yarn".
        raw = {**raw, "rope_scaling": {**rope, "rope_type": "longrope"}}
    config = decoder_from_hf(raw, DEFAULTS)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind != "longrope":
        raise CheckpointError(f"rope_type must be longrope; got {scaling.kind}")
    return with_window(config, raw)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the layers' windows differ.
    """
    raw = decoder_to_hf(config, partial=True)
    return {ORIGINAL: 4096, **raw, "sliding_window": uniform_window(config)}
