"""OLMo 2, OLMo 3 and OLMoE."""

from collections.abc import Mapping
from dataclasses import replace

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.families import llama, qwen
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    ATTENTION_BIAS,
    count_of_experts,
    option,
    wide_experts,
    windows,
)
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import Json, flag, integer, optional_number
from jaxrl_post.pretrained.layout import Weight

__all__ = ["OLMO2", "OLMO3", "OLMOE", "QK_NORMS"]

# The norms of queries and keys run over all heads jointly.
QK_NORMS: Mapping[str, Weight] = {
    "layers.*.attention.query_norm": Weight(
        "model.layers.*.self_attn.q_norm.weight", "(heads head_dim)"
    ),
    "layers.*.attention.key_norm": Weight(
        "model.layers.*.self_attn.k_norm.weight", "(kv_heads head_dim)"
    ),
}
WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    **QK_NORMS,
    "layers.*.attention_post_norm": Weight(
        "model.layers.*.post_attention_layernorm.weight", "norm"
    ),
    "layers.*.mlp_post_norm": Weight(
        "model.layers.*.post_feedforward_layernorm.weight", "norm"
    ),
}

OLMO2 = Family(
    "Olmo2",
    WEIGHTS,
    Defaults(max_length=2048, rms_norm_eps=1e-5),
    keys=(ATTENTION_BIAS,),
    options={"qk_norm": "joint", "norm_placement": "after"},
    judges_tokens=False,
)

# The base of sliding layers in transformers if config.json has version 4's keys with a
# scaling, for every rope_theta.
OLMO3_THETA = 5e5


def _finish3(config: ModelConfig, keys: Json) -> Json:
    if config.local_rope_theta == OLMO3_THETA:
        return keys
    return {key: value for key, value in keys.items() if key != "rope_scaling"}


OLMO3 = replace(
    OLMO2,
    architecture="Olmo3",
    defaults=replace(OLMO2.defaults, rope_theta=OLMO3_THETA, local_theta=OLMO3_THETA),
    keys=(
        ATTENTION_BIAS,
        windows(lambda raw: lambda layer: bool((layer + 1) % 4), 4096, nullable=False),
    ),
    finish=_finish3,
)

OLMOE = Family(
    "Olmoe",
    {**llama.WEIGHTS, **QK_NORMS, **qwen.EXPERTS},
    Defaults(max_length=4096, rms_norm_eps=1e-5),
    keys=(
        ATTENTION_BIAS,
        option("clip_qkv", optional_number, None, "qkv_clip"),
        wide_experts(
            lambda raw: MixtureOfExperts(
                num_experts=count_of_experts(raw, 64),
                experts_per_token=integer(raw, "num_experts_per_tok", 8),
                expert_size=1,
                normalize=flag(raw, "norm_topk_prob", False),
            ),
            lambda experts: {
                "num_experts": experts.num_experts,
                "num_experts_per_tok": experts.experts_per_token,
                "norm_topk_prob": experts.normalize,
            },
        ),
    ),
    options={"qk_norm": "joint"},
    classifier=None,
    judges_tokens=False,
)
