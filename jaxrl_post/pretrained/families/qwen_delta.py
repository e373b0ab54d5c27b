"""Qwen3-Next and Qwen3.5, dense and with experts: delta nets in three of four layers.

Qwen3.6 and 3.8 are Qwen3.5 by their files.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.recurrences import GatedDelta
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import qwen
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import ATTENTION_BIAS, Key
from jaxrl_post.pretrained.families.layers import (
    kinds_of_layers,
    recurrent_types,
    with_recurrence,
)
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_rope import FULL
from jaxrl_post.pretrained.hf_values import Json, integer
from jaxrl_post.pretrained.layout import Weight

__all__ = ["QWEN3_5", "QWEN3_5_MOE", "QWEN3_NEXT"]

NET = "model.layers.*.linear_attn"
HEADS = "(heads head_dim) embed"
LINEAR = "linear_attention"
# The layer for multi-token prediction, which transformers does not read.
NEXT_TOKEN = ("mtp.*",)
MTP: Mapping[str, Weight] = {
    "embedding_norm": Weight("mtp.pre_fc_norm_embedding.weight", "norm"),
    "hidden_norm": Weight("mtp.pre_fc_norm_hidden.weight", "norm"),
    "fusion": Weight("mtp.fc.weight", "rank embed"),
    "final_norm": Weight("mtp.norm.weight", "norm"),
}

SHARED: Mapping[str, Weight] = {
    **qwen.MOE_WEIGHTS,
    **{
        f"layers.*.delta.{name}_kernel": Weight(
            f"{NET}.conv1d.weight", "(heads head_dim) () kernel", part=part
        )
        for part, name in enumerate(("query", "key", "value"))
    },
    "layers.*.delta.rate": Weight(f"{NET}.A_log", "heads"),
    "layers.*.delta.step_bias": Weight(f"{NET}.dt_bias", "heads"),
    "layers.*.delta.norm": Weight(f"{NET}.norm.weight", "head_dim"),
    "layers.*.delta.output": Weight(f"{NET}.out_proj.weight", "embed (heads head_dim)"),
}
WEIGHTS: Mapping[str, Weight] = {
    **SHARED,
    **{
        f"layers.*.delta.{name}": Weight(f"{NET}.in_proj_qkv.weight", HEADS, part=part)
        for part, name in enumerate(("query", "key", "value"))
    },
    "layers.*.delta.output_gate": Weight(f"{NET}.in_proj_z.weight", HEADS),
    "layers.*.delta.beta": Weight(f"{NET}.in_proj_b.weight", "heads embed"),
    "layers.*.delta.decay": Weight(f"{NET}.in_proj_a.weight", "heads embed"),
}


def _by_key_head(tensor: str, layout: str, *names: str) -> dict[str, Weight]:
    """Parameters whose rows are stored together for each key head."""
    return {
        f"layers.*.delta.{name}": Weight(
            f"{NET}.{tensor}.weight",
            layout,
            part=part,
            join="grouped",
            groups="layers.*.delta.key",
        )
        for part, name in enumerate(names)
    }


NEXT_WEIGHTS: Mapping[str, Weight] = {
    **SHARED,
    **_by_key_head("in_proj_qkvz", HEADS, "query", "key", "value", "output_gate"),
    **_by_key_head("in_proj_ba", "heads embed", "beta", "decay"),
}

SIZES = {
    "linear_conv_kernel_dim": ("kernel", 4),
    "linear_num_key_heads": ("key_heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("key_dim", 128),
    "linear_value_head_dim": ("value_dim", 128),
}


def _read_layers(raw: Json, config: ModelConfig) -> ModelConfig:
    every = integer(raw, "full_attention_interval", 4)
    default = [
        LINEAR if (layer + 1) % every else FULL for layer in range(config.num_layers)
    ]
    kinds = kinds_of_layers(raw, default, LINEAR)
    if FULL not in kinds:
        raise CheckpointError(
            f"layer_types must name {FULL} for one layer at least; got {kinds}"
        )
    sizes = {name: integer(raw, key, default) for key, (name, default) in SIZES.items()}
    return with_recurrence(config, GatedDelta(**sizes), kinds)


def _write_layers(config: ModelConfig) -> dict[str, Any]:
    delta = config.recurrence
    if not isinstance(delta, GatedDelta):
        raise CheckpointError(
            f"{config.model_type} checkpoints cannot express recurrence={delta}"
        )
    return {
        "layer_types": recurrent_types(config, LINEAR),
        **{key: getattr(delta, name) for key, (name, _) in SIZES.items()},
    }


LAYERS = Key(_read_layers, _write_layers)
DEFAULTS = Defaults(
    max_length=32768, num_kv_heads=2, head_dim=256, rotary_share=0.25, partial=True
)
OPTIONS = {"qk_norm": "head", "norm_plus_one": True, "attention_gate": True}

QWEN3_NEXT = Family(
    "Qwen3Next",
    NEXT_WEIGHTS,
    DEFAULTS,
    keys=(
        LAYERS,
        ATTENTION_BIAS,
        qwen.experts_in(512, 10, 512, shared=512, normalize=True),
    ),
    options=OPTIONS,
    ignored=NEXT_TOKEN,
    carried=NEXT_TOKEN,
    mtp=MTP,
)
QWEN3_5 = Family(
    "Qwen3_5",
    WEIGHTS,
    replace(DEFAULTS, num_kv_heads=4),
    keys=(LAYERS, ATTENTION_BIAS),
    options=OPTIONS,
    classifier="Qwen3_5Text",
    judges_tokens=False,
    ignored=NEXT_TOKEN,
    carried=NEXT_TOKEN,
    mtp=MTP,
)
# It has no dense layers, and always normalises the weights of a token's experts.
FIXED = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
ABSENT = (*FIXED, "intermediate_size")
EXPERT_SIZE = 512


def _prepare_experts(raw: Json) -> Json:
    width = integer(raw, "moe_intermediate_size", EXPERT_SIZE)
    return {**raw, **FIXED, "intermediate_size": width}


QWEN3_5_MOE = Family(
    "Qwen3_5Moe",
    WEIGHTS,
    DEFAULTS,
    keys=(
        LAYERS,
        ATTENTION_BIAS,
        qwen.experts_in(256, 8, EXPERT_SIZE, shared=512, normalize=True),
    ),
    options=OPTIONS,
    prepare=_prepare_experts,
    finish=lambda _, keys: {key: v for key, v in keys.items() if key not in ABSENT},
    classifier=None,
    judges_tokens=False,
    ignored=NEXT_TOKEN,
    carried=NEXT_TOKEN,
    mtp=MTP,
)
