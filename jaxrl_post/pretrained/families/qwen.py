"""Qwen2, Qwen2.5 and Qwen3, dense and with experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    ATTENTION_BIAS,
    Key,
    count_of_experts,
    layers_from,
    option,
    required_experts,
    single_window,
    uniform_window,
    windows,
)
from jaxrl_post.pretrained.families.layers import (
    dense_layers,
    layer_types,
    with_experts,
    with_windows,
)
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import (
    Json,
    flag,
    integer,
    integers,
    optional_integer,
)
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "EXPERTS",
    "MOE_WEIGHTS",
    "QWEN2",
    "QWEN2_MOE",
    "QWEN3",
    "QWEN3_MOE",
    "WEIGHTS",
    "experts_in",
    "shared_experts",
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

MLP = "model.layers.*.mlp"
# Names of the experts' tensors, which several families share.
EXPERTS: Mapping[str, Weight] = {
    "layers.*.experts.router": Weight(f"{MLP}.gate.weight", "router embed"),
    "layers.*.experts.gate": Weight(
        f"{MLP}.experts.%.gate_proj.weight", "expert_ffn expert_embed"
    ),
    "layers.*.experts.up": Weight(
        f"{MLP}.experts.%.up_proj.weight", "expert_ffn expert_embed"
    ),
    "layers.*.experts.down": Weight(
        f"{MLP}.experts.%.down_proj.weight", "expert_embed expert_ffn"
    ),
}


def shared_experts(name: str) -> Mapping[str, Weight]:
    """Returns the weights of the shared MLP, which a family stores under `name`."""
    return {
        "layers.*.experts.shared.gate": Weight(
            f"{MLP}.{name}.gate_proj.weight", "ffn embed"
        ),
        "layers.*.experts.shared.up": Weight(
            f"{MLP}.{name}.up_proj.weight", "ffn embed"
        ),
        "layers.*.experts.shared.down": Weight(
            f"{MLP}.{name}.down_proj.weight", "embed ffn"
        ),
        "layers.*.experts.shared.gate_bias": Weight(
            f"{MLP}.{name}.gate_proj.bias", "ffn"
        ),
        "layers.*.experts.shared.up_bias": Weight(f"{MLP}.{name}.up_proj.bias", "ffn"),
        "layers.*.experts.shared.down_bias": Weight(
            f"{MLP}.{name}.down_proj.bias", "norm"
        ),
    }


MOE_WEIGHTS: Mapping[str, Weight] = {
    **WEIGHTS,
    **EXPERTS,
    **shared_experts("shared_expert"),
    "layers.*.experts.shared_gate": Weight(
        f"{MLP}.shared_expert_gate.weight", "value embed"
    ),
}


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    width = single_window(config)
    sliding = [i for i in range(config.num_layers) if config.window(i) is not None]
    return {
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "max_window_layers": sliding[0] if sliding else config.num_layers,
        **layer_types(config),
    }


WINDOWS = windows(layers_from(28), 4096, switched=True, write=_write_windows)

QWEN2 = Family(
    "Qwen2",
    WEIGHTS,
    Defaults(max_length=32768, num_kv_heads=32),
    keys=(WINDOWS,),
    options={"qkv_bias": True},
)
QWEN3 = Family(
    "Qwen3",
    WEIGHTS,
    Defaults(max_length=32768, num_kv_heads=32, head_dim=128),
    keys=(ATTENTION_BIAS, WINDOWS),
    options={"qk_norm": "head"},
)


def _every_other(raw: Json):
    """Every other layer from the first one on has a window, as in transformers."""
    most = integer(raw, "max_window_layers", 28)
    return lambda layer: layer % 2 == 0 and layer < most


def _write_every_other(config: ModelConfig) -> dict[str, Any]:
    width = single_window(config)
    return {
        **({} if width is None else layer_types(config)),
        "use_sliding_window": width is not None,
        "sliding_window": width or 4096,
        "max_window_layers": config.num_layers,
    }


def _read_all_or_none(raw: Json, config: ModelConfig) -> ModelConfig:
    width = optional_integer(raw, "sliding_window", 4096)
    if not flag(raw, "use_sliding_window", False) or width is None:
        return config
    return with_windows(config, (width,) * config.num_layers)


def _write_all_or_none(config: ModelConfig) -> dict[str, Any]:
    width = uniform_window(config)
    return {
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "max_window_layers": config.num_layers if width is None else 0,
    }


def experts_in(
    count: int, chosen: int, size: int, *, shared: int = 0, normalize: bool = False
) -> Key:
    """Experts in all layers but those that config.json names.

    Args:
        count: default number of experts.
        chosen: default number of experts of a token.
        size: default width of an expert.
        shared: default width of a gated MLP through which every token also passes; 0
            for none.
        normalize: default of `norm_topk_prob`.
    """

    def read(raw: Json, config: ModelConfig) -> ModelConfig:
        every = integer(raw, "decoder_sparse_step", 1)
        plain = integers(raw, "mlp_only_layers")
        dense = [i for i in range(config.num_layers) if i in plain or (i + 1) % every]
        experts = MixtureOfExperts(
            num_experts=count_of_experts(raw, count),
            experts_per_token=integer(raw, "num_experts_per_tok", chosen),
            expert_size=integer(raw, "moe_intermediate_size", size),
            normalize=flag(raw, "norm_topk_prob", normalize),
        )
        if shared:
            width = integer(raw, "shared_expert_intermediate_size", shared)
            experts = replace(experts, shared_size=width, shared_gate=True)
        return with_experts(config, experts, dense)

    def write(config: ModelConfig) -> dict[str, Any]:
        experts = required_experts(config)
        if shared:
            other = {"shared_expert_intermediate_size": experts.shared_size}
        else:
            # Version 4 and released files have num_experts, version 5 this key.
            other = {"num_local_experts": experts.num_experts}
        return {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.experts_per_token,
            "moe_intermediate_size": experts.expert_size,
            "norm_topk_prob": experts.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense_layers(config),
            **other,
        }

    return Key(read, write)


QWEN2_MOE = Family(
    "Qwen2Moe",
    MOE_WEIGHTS,
    Defaults(max_length=32768, num_kv_heads=16),
    keys=(
        experts_in(60, 4, 1408, shared=5632),
        windows(_every_other, 4096, switched=True, write=_write_every_other),
        option("qkv_bias", flag, True, "qkv_bias"),
    ),
)
QWEN3_MOE = Family(
    "Qwen3Moe",
    MOE_WEIGHTS,
    Defaults(max_length=32768, num_kv_heads=4),
    keys=(
        Key(_read_all_or_none, _write_all_or_none),
        ATTENTION_BIAS,
        experts_in(128, 8, 768),
    ),
    options={"qk_norm": "head"},
)
