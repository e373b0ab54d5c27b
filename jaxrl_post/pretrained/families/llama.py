"""Llama 2 and 3.x in Hugging Face's format: config.json and names of the weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.hf_config import Defaults, decoder_from_hf, decoder_to_hf
from jaxrl_post.pretrained.hf_values import flag
from jaxrl_post.pretrained.layout import Weight

__all__ = ["WEIGHTS", "config_from_hf", "config_to_hf"]

# Name and layout by our path; parameters that a config lacks are left out.
WEIGHTS: Mapping[str, Weight] = {
    "embedding": Weight("model.embed_tokens.weight", "vocab embed"),
    "layers.*.attention_norm": Weight("model.layers.*.input_layernorm.weight", "norm"),
    "layers.*.attention.query": Weight(
        "model.layers.*.self_attn.q_proj.weight", "(heads head_dim) embed"
    ),
    "layers.*.attention.key": Weight(
        "model.layers.*.self_attn.k_proj.weight", "(kv_heads head_dim) embed"
    ),
    "layers.*.attention.value": Weight(
        "model.layers.*.self_attn.v_proj.weight", "(kv_heads head_dim) embed"
    ),
    "layers.*.attention.output": Weight(
        "model.layers.*.self_attn.o_proj.weight", "embed (heads head_dim)"
    ),
    "layers.*.attention.query_bias": Weight(
        "model.layers.*.self_attn.q_proj.bias", "(heads head_dim)"
    ),
    "layers.*.attention.key_bias": Weight(
        "model.layers.*.self_attn.k_proj.bias", "(kv_heads head_dim)"
    ),
    "layers.*.attention.value_bias": Weight(
        "model.layers.*.self_attn.v_proj.bias", "(kv_heads head_dim)"
    ),
    "layers.*.attention.output_bias": Weight(
        "model.layers.*.self_attn.o_proj.bias", "norm"
    ),
    "layers.*.mlp_norm": Weight(
        "model.layers.*.post_attention_layernorm.weight", "norm"
    ),
    "layers.*.mlp.gate": Weight("model.layers.*.mlp.gate_proj.weight", "ffn embed"),
    "layers.*.mlp.up": Weight("model.layers.*.mlp.up_proj.weight", "ffn embed"),
    "layers.*.mlp.down": Weight("model.layers.*.mlp.down_proj.weight", "embed ffn"),
    "layers.*.mlp.gate_bias": Weight("model.layers.*.mlp.gate_proj.bias", "ffn"),
    "layers.*.mlp.up_bias": Weight("model.layers.*.mlp.up_proj.bias", "ffn"),
    "layers.*.mlp.down_bias": Weight("model.layers.*.mlp.down_proj.bias", "norm"),
    "final_norm": Weight("model.norm.weight", "norm"),
    "unembedding": Weight("lm_head.weight", "vocab embed"),
    "value_head": Weight("score.weight", "value embed"),
    "process_head.weight": Weight("score.weight", "value embed"),
    "process_head.bias": Weight("score.bias", "value"),
}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; `attention_bias` covers all four projections.

    Raises:
        CheckpointError: as `decoder_from_hf`.
    """
    bias = flag(raw, "attention_bias", False)
    return replace(
        decoder_from_hf(raw, Defaults(max_length=2048)),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(raw, "mlp_bias", False),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`.
    """
    return {
        **decoder_to_hf(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }
