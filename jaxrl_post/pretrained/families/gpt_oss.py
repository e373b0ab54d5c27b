"""GPT-OSS in Hugging Face's format: sinks, biases, experts in joined tensors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    layer_types,
    layer_types_to_hf,
    required_experts,
    single_window,
)
from jaxrl_post.pretrained.hf_values import (
    flag,
    integer,
    number,
    optional_integer,
    section,
)
from jaxrl_post.pretrained.layout import Weight

__all__ = ["WEIGHTS", "config_from_hf", "config_to_hf"]

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


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; by default even layers have a window.

    Raises:
        CheckpointError: as `decoder_from_hf`, or the activation has other constants.
    """
    for key, only in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if number(raw, key, only) != only:
            raise CheckpointError(f"{key} must be {only}; got {raw[key]}")
    if not section(raw, "rope_scaling") and raw.get("rope_parameters") is None:
        raw = {**raw, "rope_parameters": YARN}
    defaults = Defaults(
        max_length=131072,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
    )
    config = decoder_from_hf(raw, defaults)
    bias = flag(raw, "attention_bias", True)
    count = integer(raw, "num_local_experts", integer(raw, "num_experts", 128))
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        activation="gpt_oss",
        windows=layer_types(
            raw,
            config.num_layers,
            optional_integer(raw, "sliding_window", 128),
            lambda layer: layer % 2 == 0,
        ),
        experts=MixtureOfExperts(
            num_experts=count,
            experts_per_token=integer(raw, "num_experts_per_tok", 4),
            expert_size=config.intermediate_size,
            router_bias=True,
            biases=True,
        ),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows have several widths.
    """
    experts = required_experts(config)
    return {
        **decoder_to_hf(config),
        "intermediate_size": experts.expert_size,
        "attention_bias": config.qkv_bias,
        "swiglu_limit": 7.0,
        "sliding_window": single_window(config) or 128,
        "layer_types": layer_types_to_hf(config),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "experts_per_token": experts.experts_per_token,
    }
