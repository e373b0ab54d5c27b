"""GLM-4.5, 4.6 and 4.7, and families with its experts: dots.llm1 and Solar Open."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.families import qwen
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    ATTENTION_BIAS,
    Key,
    layers_from,
    option,
    required_experts,
    windows,
    written,
)
from jaxrl_post.pretrained.families.layers import dense_layers, with_experts
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import Json, flag, integer, number, optional_flag
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "BALANCED_EXPERTS",
    "DOTS1",
    "GLM4_MOE",
    "NEXT_TOKEN_LAYERS",
    "SOLAR_OPEN",
    "DenseLayers",
    "balanced_experts",
    "balanced_to_hf",
    "first_dense",
    "routed_to_hf",
]

# Experts balanced by a bias on the selection scores, as in DeepSeek-V3.
BALANCED_EXPERTS: Mapping[str, Weight] = {
    **qwen.EXPERTS,
    **qwen.shared_experts("shared_experts"),
    "layers.*.experts.correction_bias": Weight(
        "model.layers.*.mlp.gate.e_score_correction_bias", "router"
    ),
}
WEIGHTS: Mapping[str, Weight] = {**qwen.WEIGHTS, **BALANCED_EXPERTS}

# Layers after the last one are for multi-token prediction; a policy does not use them.
NEXT_TOKEN_LAYERS = ("model.layers.+.*",)

type DenseLayers = Callable[[Json, int], tuple[int, ...]]


def first_dense(default: int) -> DenseLayers:
    """The first `first_k_dense_replace` layers have no experts."""

    def dense(raw: Json, num_layers: int) -> tuple[int, ...]:
        count = integer(raw, "first_k_dense_replace", default)
        return tuple(range(min(count, num_layers)))

    return dense


def balanced_experts(defaults: MixtureOfExperts, dense: DenseLayers) -> Key:
    """Experts with sigmoid scores, groups and a bias on the selection scores.

    Args:
        defaults: the family's defaults.
        dense: (config.json, number of layers) to the layers without experts.
    """

    def read(raw: Json, config: ModelConfig) -> ModelConfig:
        layers = dense(raw, config.num_layers)
        size = integer(raw, "moe_intermediate_size", defaults.expert_size)
        count = integer(
            raw, "num_local_experts", integer(raw, "num_experts", defaults.num_experts)
        )
        experts = MixtureOfExperts(
            num_experts=integer(raw, "n_routed_experts", count),
            experts_per_token=integer(
                raw, "num_experts_per_tok", defaults.experts_per_token
            ),
            expert_size=size,
            scoring="sigmoid",
            normalize=optional_flag(raw, "norm_topk_prob", defaults.normalize),
            normalize_epsilon=1e-20,
            scale=number(raw, "routed_scaling_factor", defaults.scale),
            num_groups=integer(raw, "n_group", defaults.num_groups),
            groups_per_token=integer(raw, "topk_group", defaults.groups_per_token),
            group_score="top2",
            correction_bias=True,
            shared_size=size * integer(raw, "n_shared_experts", 1),
        )
        return with_experts(config, experts, layers)

    def write(config: ModelConfig) -> dict[str, Any]:
        if config.experts is None:
            return {"first_k_dense_replace": config.num_layers}
        return balanced_to_hf(config)

    return Key(read, write)


def routed_to_hf(experts: MixtureOfExperts) -> dict[str, Any]:
    """Writes the keys of balanced experts but of what all tokens share."""
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_size,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.num_groups,
        "topk_group": experts.groups_per_token,
    }


def balanced_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys of balanced experts."""
    experts = required_experts(config)
    return {
        **routed_to_hf(experts),
        "n_shared_experts": experts.shared_size // experts.expert_size,
        "first_k_dense_replace": len(dense_layers(config)),
    }


def _read_qk_norm(raw: Json, config: ModelConfig) -> ModelConfig:
    normed = flag(raw, "use_qk_norm", False)
    return replace(config, qk_norm="head" if normed else None)


# By default half of each head's dims rotate.
GLM4_MOE = Family(
    "Glm4Moe",
    WEIGHTS,
    Defaults(
        max_length=131072,
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rotary_share=0.5,
        partial=True,
    ),
    keys=(
        option("attention_bias", flag, False, "qkv_bias"),
        Key(_read_qk_norm, lambda config: {"use_qk_norm": config.qk_norm is not None}),
        balanced_experts(MixtureOfExperts(128, 8, 1408), first_dense(1)),
    ),
    classifier=None,
    judges_tokens=False,
    ignored=NEXT_TOKEN_LAYERS,
)

SOLAR_OPEN = replace(
    GLM4_MOE,
    architecture="SolarOpen",
    # The family has no dense layers, and so no key for the width of a dense MLP.
    defaults=Defaults(
        max_length=131072,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        width_key="moe_intermediate_size",
    ),
    keys=(
        option("attention_bias", flag, False, "qkv_bias"),
        balanced_experts(MixtureOfExperts(128, 8, 1280), lambda raw, num_layers: ()),
    ),
    prepare=lambda raw: {"moe_intermediate_size": 1280, **raw},
    ignored=(),
)


def _require_counts(raw: Json) -> Json:
    """transformers has no defaults for these keys of dots.llm1."""
    for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        integer(raw, key)
    return raw


DOTS1 = replace(
    GLM4_MOE,
    architecture="Dots1",
    defaults=Defaults(max_length=2048, num_kv_heads=32),
    keys=(
        ATTENTION_BIAS,
        windows(layers_from(62), 4096),
        written(lambda config: {"max_window_layers": config.num_layers}),
        balanced_experts(MixtureOfExperts(1, 1, 1408, normalize=False), first_dense(0)),
    ),
    options={"qk_norm": "head"},
    prepare=_require_counts,
    ignored=(),
)
