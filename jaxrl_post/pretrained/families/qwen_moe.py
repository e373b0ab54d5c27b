"""Qwen2-MoE and Qwen3-MoE in Hugging Face's format."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.families import qwen
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    layer_types,
    layer_types_to_hf,
    required_experts,
    single_window,
    uniform_window,
)
from jaxrl_post.pretrained.hf_values import flag, integer, integers, optional_integer
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "EXPERTS",
    "WEIGHTS",
    "qwen2_moe_from_hf",
    "qwen2_moe_to_hf",
    "qwen3_moe_from_hf",
    "qwen3_moe_to_hf",
]

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
    }


WEIGHTS: Mapping[str, Weight] = {
    **qwen.WEIGHTS,
    **EXPERTS,
    **shared_experts("shared_expert"),
    "layers.*.experts.shared_gate": Weight(
        f"{MLP}.shared_expert_gate.weight", "value embed"
    ),
}


def qwen2_moe_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; every token also passes through a gated shared MLP.

    Raises:
        CheckpointError: as `decoder_from_hf`, or experts or windows are invalid.
    """
    config = decoder_from_hf(raw, Defaults(max_length=32768, num_kv_heads=16))
    experts = _experts(raw, config.num_layers, count=60, chosen=4, size=1408)
    shared = integer(raw, "shared_expert_intermediate_size", 5632)
    sliding = flag(raw, "use_sliding_window", False)
    # As in transformers: every other layer from the first one on, below `most`.
    most = integer(raw, "max_window_layers", 28)
    windows = layer_types(
        raw,
        config.num_layers,
        optional_integer(raw, "sliding_window", 4096) if sliding else None,
        lambda layer: sliding and layer % 2 == 0 and layer < most,
    )
    return replace(
        config,
        qkv_bias=flag(raw, "qkv_bias", True),
        windows=windows,
        experts=replace(experts, shared_size=shared, shared_gate=True),
    )


def qwen2_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or windows have several widths.
    """
    experts, width = required_experts(config), single_window(config)
    sliding = {} if width is None else {"layer_types": layer_types_to_hf(config)}
    return {
        **decoder_to_hf(config),
        **_experts_to_hf(experts),
        **sliding,
        "num_experts": experts.num_experts,
        "shared_expert_intermediate_size": experts.shared_size,
        "qkv_bias": config.qkv_bias,
        "use_sliding_window": width is not None,
        "sliding_window": width or 4096,
        "max_window_layers": config.num_layers,
    }


def qwen3_moe_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; every query and key head is normalised.

    Raises:
        CheckpointError: as `decoder_from_hf`, or experts are invalid.
    """
    config = decoder_from_hf(raw, Defaults(max_length=32768, num_kv_heads=4))
    windows: tuple[int | None, ...] = ()
    width = optional_integer(raw, "sliding_window", 4096)
    if flag(raw, "use_sliding_window", False) and width is not None:
        windows = (width,) * config.num_layers
    bias = flag(raw, "attention_bias", False)
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        windows=windows,
        experts=_experts(raw, config.num_layers, count=128, chosen=8, size=768),
    )


def qwen3_moe_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the layers' windows differ.
    """
    experts, width = required_experts(config), uniform_window(config)
    return {
        **decoder_to_hf(config),
        **_experts_to_hf(experts),
        # Version 4 and released files have num_experts, version 5 num_local_experts.
        "num_experts": experts.num_experts,
        "num_local_experts": experts.num_experts,
        "attention_bias": config.qkv_bias,
        "use_sliding_window": width is not None,
        "sliding_window": width,
        "max_window_layers": config.num_layers if width is None else 0,
    }


def _experts(
    raw: Mapping[str, Any], num_layers: int, *, count: int, chosen: int, size: int
) -> MixtureOfExperts:
    count = integer(raw, "num_local_experts", integer(raw, "num_experts", count))
    every = integer(raw, "decoder_sparse_step", 1)
    plain = integers(raw, "mlp_only_layers")
    dense = [
        layer for layer in range(num_layers) if layer in plain or (layer + 1) % every
    ]
    return MixtureOfExperts(
        num_experts=count,
        experts_per_token=integer(raw, "num_experts_per_tok", chosen),
        expert_size=integer(raw, "moe_intermediate_size", size),
        normalize=flag(raw, "norm_topk_prob", False),
        dense_layers=tuple(dense),
    )


def _experts_to_hf(experts: MixtureOfExperts) -> dict[str, Any]:
    return {
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_size,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
    }
