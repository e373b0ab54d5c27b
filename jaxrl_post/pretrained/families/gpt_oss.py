"""GPT-OSS: sinks, biases, experts in joined tensors."""

from collections.abc import Mapping

from jaxrl_post.models.config import MixtureOfExperts
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    count_of_experts,
    option,
    wide_experts,
    windows,
    written,
)
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import Json, flag, integer, number, section
from jaxrl_post.pretrained.layout import Weight

__all__ = ["GPT_OSS"]

EXPERTS = "model.layers.*.mlp.experts"
WIDE = "experts expert_embed expert_ffn"


def _joined(part: int, name: str, layout: str) -> Weight:
    """Gate and up projections are interleaved along the last dim of one tensor."""
    return Weight(f"{EXPERTS}.{name}", layout, part=part, join="interleave", dim=-1)


WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    "layers.*.attention.sinks": Weight("model.layers.*.self_attn.sinks", "heads"),
    "layers.*.experts.router": Weight(
        "model.layers.*.mlp.router.weight", "router embed"
    ),
    "layers.*.experts.router_bias": Weight("model.layers.*.mlp.router.bias", "router"),
    "layers.*.experts.gate": _joined(0, "gate_up_proj", WIDE),
    "layers.*.experts.up": _joined(1, "gate_up_proj", WIDE),
    "layers.*.experts.gate_bias": _joined(0, "gate_up_proj_bias", "experts expert_ffn"),
    "layers.*.experts.up_bias": _joined(1, "gate_up_proj_bias", "experts expert_ffn"),
    "layers.*.experts.down": Weight(
        f"{EXPERTS}.down_proj", "experts expert_ffn expert_embed"
    ),
    "layers.*.experts.down_bias": Weight(f"{EXPERTS}.down_proj_bias", "experts norm"),
}

# The default of transformers if config.json has no rotary parameters.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ALPHA, LIMIT = 1.702, 7.0


def _prepare(raw: Json) -> Json:
    for key, only in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
        if number(raw, key, only) != only:
            raise CheckpointError(f"{key} must be {only}; got {raw[key]}")
    if not section(raw, "rope_scaling") and raw.get("rope_parameters") is None:
        return {**raw, "rope_parameters": YARN}
    return raw


GPT_OSS = Family(
    "GptOss",
    WEIGHTS,
    Defaults(
        max_length=131072,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
    ),
    keys=(
        option("attention_bias", flag, True, "qkv_bias", "output_bias"),
        windows(lambda raw: lambda layer: layer % 2 == 0, 128, nullable=False),
        wide_experts(
            lambda raw: MixtureOfExperts(
                num_experts=count_of_experts(raw, 128),
                experts_per_token=integer(raw, "num_experts_per_tok", 4),
                expert_size=1,
                router_bias=True,
                biases=True,
            ),
            lambda experts: {
                "num_local_experts": experts.num_experts,
                "num_experts_per_tok": experts.experts_per_token,
                "experts_per_token": experts.experts_per_token,
            },
        ),
        written(lambda _: {"swiglu_limit": LIMIT}),
    ),
    options={"sinks": True, "activation": "gpt_oss"},
    prepare=_prepare,
)
