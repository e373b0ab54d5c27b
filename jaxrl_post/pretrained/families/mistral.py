"""Mistral, Mixtral, Ministral and Ministral 3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig, QueryScaling
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    ONE_WINDOW,
    Key,
    all_layers,
    single_window,
    wide_experts,
    windows,
)
from jaxrl_post.pretrained.families.layers import layer_types, windows_of
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import Json, integer, number
from jaxrl_post.pretrained.layout import Weight

__all__ = ["MINISTRAL", "MINISTRAL3", "MISTRAL", "MIXTRAL", "MIXTRAL_WEIGHTS"]

EXPERT = "model.layers.*.block_sparse_moe.experts.%"
MIXTRAL_WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    "layers.*.experts.router": Weight(
        "model.layers.*.block_sparse_moe.gate.weight", "router embed"
    ),
    "layers.*.experts.gate": Weight(f"{EXPERT}.w1.weight", "expert_ffn expert_embed"),
    "layers.*.experts.up": Weight(f"{EXPERT}.w3.weight", "expert_ffn expert_embed"),
    "layers.*.experts.down": Weight(f"{EXPERT}.w2.weight", "expert_embed expert_ffn"),
}


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    # With `layer_types`, AutoConfig of transformers treats the model as a ministral.
    mixed = len(set(windows_of(config))) > 1
    return {
        "sliding_window": single_window(config),
        **(layer_types(config) if mixed else {}),
    }


MISTRAL = Family(
    "Mistral",
    llama.WEIGHTS,
    Defaults(max_length=131072, num_kv_heads=8),
    keys=(windows(all_layers, 4096, write=_write_windows),),
)
MINISTRAL = Family(
    "Ministral", llama.WEIGHTS, MISTRAL.defaults, keys=(windows(all_layers, 4096),)
)
MIXTRAL = Family(
    "Mixtral",
    MIXTRAL_WEIGHTS,
    Defaults(131072, num_kv_heads=8, rms_norm_eps=1e-5, rope_theta=1e6),
    keys=(
        ONE_WINDOW,
        wide_experts(
            lambda raw: MixtureOfExperts(
                num_experts=integer(raw, "num_local_experts", 8),
                experts_per_token=integer(raw, "num_experts_per_tok", 2),
                expert_size=1,
            ),
            lambda experts: {
                "num_local_experts": experts.num_experts,
                "num_experts_per_tok": experts.experts_per_token,
            },
        ),
    ),
)

ORIGINAL, STRENGTH = "original_max_position_embeddings", "llama_4_scaling_beta"
# The default of transformers if config.json has no rotary parameters.
ROPE3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    STRENGTH: 0.1,
}


def _rope3(raw: Json) -> Any:
    return raw.get("rope_scaling") or raw.get("rope_parameters")


def _read_query_scaling(raw: Json, config: ModelConfig) -> ModelConfig:
    """Queries are scaled up beyond the pre-training context.

    Rotary parameters must have `llama_4_scaling_beta`, as in transformers.
    """
    scaling, strength = config.rope_scaling, number(_rope3(raw), STRENGTH)
    known = None if scaling is None else scaling.original_length
    length = integer(_rope3(raw), ORIGINAL) if known is None else known
    if not strength:
        return config
    return replace(config, query_scaling=QueryScaling(strength, length))


def _finish3(config: ModelConfig, keys: Json) -> Json:
    # Version 4 lacks this family, and its rotary keys would hide the query scaling.
    kept = {k: v for k, v in keys.items() if k not in ("rope_scaling", "rope_theta")}
    scaling = config.query_scaling or QueryScaling(0.0, config.max_length)
    rope = {ORIGINAL: scaling.length, **keys["rope_parameters"]}
    return {**kept, "rope_parameters": {**rope, STRENGTH: scaling.strength}}


MINISTRAL3 = Family(
    "Ministral3",
    llama.WEIGHTS,
    Defaults(262144, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5),
    keys=(
        Key(ONE_WINDOW.read, _write_windows),
        Key(_read_query_scaling, lambda _: {}),
    ),
    prepare=lambda raw: (
        raw if _rope3(raw) is not None else {**raw, "rope_parameters": ROPE3}
    ),
    finish=_finish3,
)
