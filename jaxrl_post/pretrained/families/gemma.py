"""Gemma 1, 2 and 3 (text)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.families import llama, qwen, vision
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    ATTENTION_BIAS,
    Key,
    option,
    windows,
    written,
)
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import (
    Json,
    integer,
    number,
    optional_number,
    section,
)
from jaxrl_post.pretrained.layout import Weight

__all__ = ["GEMMA", "GEMMA2", "GEMMA3", "SCALED", "TANH", "WEIGHTS"]

WEIGHTS: Mapping[str, Weight] = {
    **qwen.WEIGHTS,
    "layers.*.attention_post_norm": Weight(
        "model.layers.*.post_attention_layernorm.weight", "norm"
    ),
    "layers.*.mlp_norm": Weight(
        "model.layers.*.pre_feedforward_layernorm.weight", "norm"
    ),
    "layers.*.mlp_post_norm": Weight(
        "model.layers.*.post_feedforward_layernorm.weight", "norm"
    ),
}

TANH = "gelu_pytorch_tanh"


def _with_tanh(raw: Json) -> Json:
    """ "gelu" means the tanh approximation, with which Gemma 1 was trained."""
    return {**raw, "hidden_act": TANH} if raw.get("hidden_act") == "gelu" else raw


# Embeddings are scaled by a number that config.json does not have.
SCALED = Key(
    lambda _, config: replace(config, embedding_scale=math.sqrt(config.hidden_size)),
    lambda _: {},
)
GEMMA = Family(
    "Gemma",
    llama.WEIGHTS,
    Defaults(
        max_length=8192,
        num_kv_heads=16,
        head_dim=256,
        tie_embeddings=True,
        activation=TANH,
    ),
    keys=(ATTENTION_BIAS, SCALED, written(lambda _: {"hidden_activation": None})),
    options={"norm_plus_one": True},
    prepare=_with_tanh,
)


def _read_scale(raw: Json, config: ModelConfig) -> ModelConfig:
    scalar = number(raw, "query_pre_attn_scalar", 256.0)
    return replace(config, attention_scale=scalar**-0.5)


def _write_scale(config: ModelConfig) -> dict[str, Any]:
    scalar, whole = config.score_scale**-2, round(config.score_scale**-2)
    # Releases have integers; the square root and its inverse add a rounding error.
    exact = abs(scalar - whole) >= 1e-6 * scalar
    return {"query_pre_attn_scalar": scalar if exact else whole}


GEMMA2 = Family(
    "Gemma2",
    WEIGHTS,
    replace(GEMMA.defaults, num_kv_heads=4, activation_key="hidden_activation"),
    keys=(
        ATTENTION_BIAS,
        SCALED,
        Key(_read_scale, _write_scale),
        windows(lambda raw: lambda layer: layer % 2 == 0, 4096, nullable=False),
        option("attn_logit_softcapping", optional_number, 50.0, "attention_softcap"),
        option("final_logit_softcapping", optional_number, 30.0, "logit_softcap"),
    ),
    options={"norm_plus_one": True, "norm_placement": "both"},
)


def _prepare3(raw: Json) -> Json:
    """Takes the text model's part, where there is one; `model_type` may lack there."""
    if raw.get("text_config") is None:
        return {**raw, "model_type": "gemma3_text"}
    return {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        **section(raw, "text_config"),
        "model_type": "gemma3_text",
        # The multimodal class ignores the cap of logits in its config.
        "final_logit_softcapping": None,
    }


def _all_but_every_sixth(raw: Json):
    """Has a window, except every `sliding_window_pattern`-th layer."""
    pattern = integer(
        raw, "sliding_window_pattern", integer(raw, "_sliding_window_pattern", 6)
    )
    return lambda layer: bool((layer + 1) % pattern)


GEMMA3 = vision.seeing(
    Family(
        "Gemma3",
        WEIGHTS,
        replace(
            GEMMA2.defaults,
            max_length=131072,
            rope_theta=1e6,
            local_theta=1e4,
            local_theta_key="rope_local_base_freq",
        ),
        keys=(
            ATTENTION_BIAS,
            SCALED,
            Key(_read_scale, _write_scale),
            windows(_all_but_every_sixth, 4096, nullable=False),
            written(lambda _: {"attn_logit_softcapping": None}),
            option("final_logit_softcapping", optional_number, None, "logit_softcap"),
        ),
        options={**GEMMA2.options, "qk_norm": "head"},
        prepare=_prepare3,
        classifier="Gemma3Text",
        judges_tokens=False,
    )
)
