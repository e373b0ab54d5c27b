"""LFM2 and LFM2.5, dense and with experts: short convolutions in most layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import MixtureOfExperts, ModelConfig
from jaxrl_post.models.recurrences import ShortConvolution
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import Key, required_experts
from jaxrl_post.pretrained.families.layers import (
    dense_layers,
    kinds_of_layers,
    recurrent_types,
    with_experts,
    with_recurrence,
)
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_rope import FULL
from jaxrl_post.pretrained.hf_values import (
    Json,
    flag,
    integer,
    integers,
    number,
)
from jaxrl_post.pretrained.layout import Weight

__all__ = ["LFM2", "LFM2_MOE"]

LAYER = "model.layers.*"
IN, OUT = f"{LAYER}.conv.in_proj", f"{LAYER}.conv.out_proj"
MLP = f"{LAYER}.feed_forward"
# B, C and x lie in one tensor, in this order.
PARTS = ("input_gate", "output_gate", "inputs")

WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    "final_norm": Weight("model.embedding_norm.weight", "norm"),
    "layers.*.attention_norm": Weight(f"{LAYER}.operator_norm.weight", "norm"),
    "layers.*.mlp_norm": Weight(f"{LAYER}.ffn_norm.weight", "norm"),
    "layers.*.attention.output": Weight(
        f"{LAYER}.self_attn.out_proj.weight", "embed (heads head_dim)"
    ),
    "layers.*.attention.query_norm": Weight(
        f"{LAYER}.self_attn.q_layernorm.weight", "head_dim"
    ),
    "layers.*.attention.key_norm": Weight(
        f"{LAYER}.self_attn.k_layernorm.weight", "head_dim"
    ),
    **{
        f"layers.*.convolution.{name}": Weight(
            f"{IN}.weight", "channels embed", part=part
        )
        for part, name in enumerate(PARTS)
    },
    **{
        f"layers.*.convolution.{name}_bias": Weight(f"{IN}.bias", "channels", part=part)
        for part, name in enumerate(PARTS)
    },
    "layers.*.convolution.kernel": Weight(
        f"{LAYER}.conv.conv.weight", "channels () kernel"
    ),
    "layers.*.convolution.kernel_bias": Weight(f"{LAYER}.conv.conv.bias", "channels"),
    "layers.*.convolution.outputs": Weight(f"{OUT}.weight", "embed channels"),
    "layers.*.convolution.outputs_bias": Weight(f"{OUT}.bias", "norm"),
    "layers.*.mlp.gate": Weight(f"{MLP}.w1.weight", "ffn embed"),
    "layers.*.mlp.up": Weight(f"{MLP}.w3.weight", "ffn embed"),
    "layers.*.mlp.down": Weight(f"{MLP}.w2.weight", "embed ffn"),
    "layers.*.experts.router": Weight(f"{MLP}.gate.weight", "router embed"),
    "layers.*.experts.correction_bias": Weight(f"{MLP}.expert_bias", "router"),
    "layers.*.experts.gate": Weight(
        f"{MLP}.experts.%.w1.weight", "expert_ffn expert_embed"
    ),
    "layers.*.experts.up": Weight(
        f"{MLP}.experts.%.w3.weight", "expert_ffn expert_embed"
    ),
    "layers.*.experts.down": Weight(
        f"{MLP}.experts.%.w2.weight", "expert_embed expert_ffn"
    ),
}

CONVOLUTION = "conv"
DEFAULTS = Defaults(
    max_length=128_000,
    num_kv_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    tie_embeddings=True,
)


def _prepare(raw: Json) -> Json:
    """Spells keys of the family, and of its first releases, as other families do."""
    raw = {**raw, "rms_norm_eps": raw.get("norm_eps", DEFAULTS.rms_norm_eps)}
    if "tie_embedding" in raw:
        raw["tie_word_embeddings"] = raw["tie_embedding"]
    return raw


def _with_width(raw: Json) -> Json:
    """Computes the width of the dense MLP from the keys that it depends on."""
    raw = _prepare(raw)
    width = integer(raw, "block_ff_dim", integer(raw, "intermediate_size", 12288))
    if flag(raw, "block_auto_adjust_ff_dim", True):
        width = 2 * width // 3
        if raw.get("block_ffn_dim_multiplier", 1.0) is not None:
            width = int(number(raw, "block_ffn_dim_multiplier", 1.0) * width)
            multiple = integer(raw, "block_multiple_of", 256)
            width = -(-width // multiple) * multiple
    return {**raw, "intermediate_size": width}


def _read_layers(raw: Json, config: ModelConfig) -> ModelConfig:
    attended = range(config.num_layers)
    if raw.get("full_attn_idxs") is not None:
        attended = integers(raw, "full_attn_idxs")
    default = [
        FULL if layer in attended else CONVOLUTION for layer in range(config.num_layers)
    ]
    kinds = kinds_of_layers(raw, default, CONVOLUTION)
    convolution = ShortConvolution(
        kernel=integer(raw, "conv_L_cache", 3),
        bias=flag(raw, "conv_bias", False),
    )
    return with_recurrence(config, convolution, kinds)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    convolution = config.recurrence or ShortConvolution(kernel=3)
    if not isinstance(convolution, ShortConvolution):
        raise CheckpointError(
            f"{config.model_type} checkpoints cannot express recurrence={convolution}"
        )
    return {
        "layer_types": recurrent_types(config, CONVOLUTION),
        "conv_L_cache": convolution.kernel,
        "conv_bias": convolution.bias,
        "norm_eps": config.rms_norm_eps,
    }


LAYERS = Key(_read_layers, _write_layers)

LFM2 = Family(
    "Lfm2",
    WEIGHTS,
    DEFAULTS,
    keys=(LAYERS,),
    options={"qk_norm": "head"},
    prepare=_with_width,
    finish=lambda _, keys: {**keys, "block_auto_adjust_ff_dim": False},
    classifier=None,
    judges_tokens=False,
)


def _read_experts(raw: Json, config: ModelConfig) -> ModelConfig:
    dense = min(integer(raw, "num_dense_layers", 2), config.num_layers)
    experts = MixtureOfExperts(
        num_experts=integer(raw, "num_experts", 32),
        experts_per_token=integer(raw, "num_experts_per_tok", 4),
        expert_size=integer(raw, "moe_intermediate_size", 1792),
        scoring="sigmoid",
        normalize=flag(raw, "norm_topk_prob", True),
        normalize_epsilon=1e-6,
        scale=number(raw, "routed_scaling_factor", 1.0),
        correction_bias=flag(raw, "use_expert_bias", True),
    )
    return with_experts(config, experts, range(dense))


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    experts = required_experts(config)
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_size,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.scale,
        "use_expert_bias": experts.correction_bias,
        "num_dense_layers": len(dense_layers(config)),
    }


LFM2_MOE = replace(
    LFM2,
    architecture="Lfm2Moe",
    keys=(LAYERS, Key(_read_experts, _write_experts)),
    prepare=_prepare,
    finish=lambda _, keys: keys,
    experts_module="feed_forward.experts",
)
