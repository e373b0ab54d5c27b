"""Llama, and families that differ from it by an option or two."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Key,
    option,
    windows,
    written,
)
from jaxrl_post.pretrained.families.layers import windows_of
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import Json, flag, integer, integers, number
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "CWM",
    "GRANITE",
    "INTERNLM3",
    "IQUEST_CODER",
    "LLAMA",
    "SEED_OSS",
    "SMOLLM3",
    "WEIGHTS",
]

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

LLAMA = Family("Llama", WEIGHTS, Defaults(2048), keys=(ATTENTION_BIAS, MLP_BIAS))

SEED_OSS = Family(
    "SeedOss",
    WEIGHTS,
    Defaults(max_length=524288, num_kv_heads=8, head_dim=128),
    keys=(
        option("attention_bias", flag, True, "qkv_bias"),
        option("attention_out_bias", flag, False, "output_bias"),
        MLP_BIAS,
    ),
)

# Granite 3: Llama with four multipliers; an absent one is 1, attention's too.
GRANITE = replace(
    LLAMA,
    architecture="Granite",
    keys=(
        *LLAMA.keys,
        option("embedding_multiplier", number, 1.0, "embedding_scale"),
        option(
            "attention_multiplier",
            number,
            1.0,
            "attention_scale",
            written="score_scale",
        ),
        option("residual_multiplier", number, 1.0, "residual_scale"),
        option("logits_scaling", number, 1.0, "logit_divisor"),
    ),
    classifier=None,
    judges_tokens=False,
)


def _with_new_names(raw: Json) -> Json:
    """InternLM3: older files have the keys `qkv_bias` and `bias`."""
    attention = flag(raw, "attention_bias", flag(raw, "qkv_bias", False))
    mlp = flag(raw, "mlp_bias", flag(raw, "bias", False))
    if attention != mlp:
        raise CheckpointError(
            "attention_bias (qkv_bias) must equal mlp_bias (bias), as the family has "
            f"biases everywhere or nowhere; got {attention} and {mlp}"
        )
    return {**raw, "attention_bias": attention, "mlp_bias": mlp}


INTERNLM3 = replace(
    LLAMA,
    defaults=Defaults(32768, num_kv_heads=2, head_dim=128, rms_norm_eps=1e-5),
    keys=(
        *LLAMA.keys,
        written(lambda config: {"qkv_bias": config.qkv_bias, "bias": config.mlp_bias}),
    ),
    prepare=_with_new_names,
    classifier=None,
    judges_tokens=False,
)


def _without_unused(raw: Json) -> Json:
    """IQuest-Coder: no release uses these keys, nor does transformers."""
    if raw.get("clip_qkv") is not None:
        raise CheckpointError(f"clip_qkv must be null; got {raw['clip_qkv']!r}")
    if flag(raw, "use_sliding_window", False):
        raise CheckpointError("use_sliding_window must be false; got True")
    return raw


IQUEST_CODER = replace(
    LLAMA,
    defaults=Defaults(131072, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5),
    prepare=_without_unused,
    classifier=None,
    judges_tokens=False,
)


# The default of Code World Model without a rotary dictionary, for every rope_theta.
CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _with_cwm_rope(raw: Json) -> Json:
    absent = raw.get("rope_parameters") is None and not raw.get("rope_scaling")
    return {**raw, "rope_parameters": CWM_ROPE} if absent else raw


# Llama 3 with windows; by default every fourth layer has full attention.
CWM = Family(
    "Cwm",
    WEIGHTS,
    Defaults(131072, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6),
    keys=(
        MLP_BIAS,
        windows(lambda raw: lambda layer: bool(layer % 4), 8192, nullable=False),
        # The id of Llama 3, because transformers accepts no null here.
        written(lambda _: {"bos_token_id": 128000}),
    ),
    prepare=_with_cwm_rope,
    classifier=None,
    judges_tokens=False,
)


def _rotated(raw: Json, num_layers: int) -> list[int]:
    """SmolLM3: 1 for a layer with rotary embedding, 0 for one without."""
    every = integer(raw, "no_rope_layer_interval", 4)
    rotated = integers(raw, "no_rope_layers")
    if raw.get("no_rope_layers") is None:
        rotated = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if len(rotated) != num_layers or not set(rotated) <= {0, 1}:
        raise CheckpointError(
            f"no_rope_layers must have a 0 or 1 for each of {num_layers} layers; got "
            f"{rotated}"
        )
    return rotated


def _read_unrotated(raw: Json, config: ModelConfig) -> ModelConfig:
    rotated = _rotated(raw, config.num_layers)
    layers = config.changed_layers(
        lambda i, spec: replace(spec, rotated=bool(rotated[i]))
    )
    return replace(config, layers=layers)


def _write_unrotated(config: ModelConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    return {"no_rope_layers": [int(config.layer(i).rotated) for i in layers]}


def _unrotated_slide(raw: Json):
    """By default a layer has a window if it has no rotary embedding."""
    sliding = flag(raw, "use_sliding_window", False)
    rotated = _rotated(raw, integer(raw, "num_hidden_layers"))
    return lambda layer: sliding and not rotated[layer]


SMOLLM3 = Family(
    "SmolLM3",
    WEIGHTS,
    Defaults(32768, num_kv_heads=4, rope_theta=2e6, tie_embeddings=True),
    keys=(
        Key(_read_unrotated, _write_unrotated),
        windows(_unrotated_slide),
        written(lambda config: {"use_sliding_window": any(windows_of(config))}),
        ATTENTION_BIAS,
        MLP_BIAS,
    ),
)
