"""GLM-4.5 and 4.6 (glm4_moe) in Hugging Face's format."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.families import qwen, qwen_moe
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    required_experts,
)
from jaxrl_post.pretrained.hf_values import Json, flag, integer, number, optional_flag
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "BALANCED_EXPERTS",
    "NEXT_TOKEN_LAYERS",
    "WEIGHTS",
    "balanced_from_hf",
    "balanced_to_hf",
    "config_from_hf",
    "config_to_hf",
]

# Experts balanced by a bias on the selection scores, as in DeepSeek-V3.
BALANCED_EXPERTS: Mapping[str, Weight] = {
    **qwen_moe.EXPERTS,
    **qwen_moe.shared_experts("shared_experts"),
    "layers.*.experts.correction_bias": Weight(
        "model.layers.*.mlp.gate.e_score_correction_bias", "router"
    ),
}
WEIGHTS: Mapping[str, Weight] = {**qwen.WEIGHTS, **BALANCED_EXPERTS}

# Layers after the last one are for multi-token prediction; a policy does not use them.
NEXT_TOKEN_LAYERS = ("model.layers.+.*",)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; by default half of each head's dims rotate.

    Raises:
        CheckpointError: as `decoder_from_hf`, or experts are invalid.
    """
    defaults = Defaults(
        max_length=131072,
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rotary_share=0.5,
        partial=True,
    )
    config = decoder_from_hf(raw, defaults)
    dense = min(integer(raw, "first_k_dense_replace", 1), config.num_layers)
    return replace(
        config,
        qkv_bias=flag(raw, "attention_bias", False),
        qk_norm="head" if flag(raw, "use_qk_norm", False) else None,
        experts=balanced_from_hf(
            raw,
            MixtureOfExperts(
                num_experts=128,
                experts_per_token=8,
                expert_size=1408,
                dense_layers=tuple(range(dense)),
            ),
        ),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the model has no experts.
    """
    return {
        **decoder_to_hf(config, partial=True),
        **balanced_to_hf(required_experts(config)),
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm is not None,
    }


def balanced_from_hf(raw: Json, defaults: MixtureOfExperts) -> MixtureOfExperts:
    """Reads experts with sigmoid scores, groups and a bias on the selection scores.

    Args:
        raw: the parsed config.json.
        defaults: the family's defaults, with the model's dense layers.

    Raises:
        CheckpointError: a value is invalid.
    """
    size = integer(raw, "moe_intermediate_size", defaults.expert_size)
    count = integer(
        raw, "num_local_experts", integer(raw, "num_experts", defaults.num_experts)
    )
    return MixtureOfExperts(
        num_experts=integer(raw, "n_routed_experts", count),
        experts_per_token=integer(
            raw, "num_experts_per_tok", defaults.experts_per_token
        ),
        expert_size=size,
        scoring="sigmoid",
        normalize=optional_flag(raw, "norm_topk_prob", True),
        normalize_epsilon=1e-20,
        scale=number(raw, "routed_scaling_factor", defaults.scale),
        num_groups=integer(raw, "n_group", defaults.num_groups),
        groups_per_token=integer(raw, "topk_group", defaults.groups_per_token),
        group_score="top2",
        correction_bias=True,
        shared_size=size * integer(raw, "n_shared_experts", 1),
        dense_layers=defaults.dense_layers,
    )


def balanced_to_hf(experts: MixtureOfExperts) -> dict[str, Any]:
    """Writes the keys that `balanced_from_hf` reads."""
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_size,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.num_groups,
        "topk_group": experts.groups_per_token,
        "n_shared_experts": experts.shared_size // experts.expert_size,
        "first_k_dense_replace": len(experts.dense_layers),
    }
