"""Families with Llama's architecture: InternLM3 and IQuest-Coder."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.hf_config import Defaults, decoder_from_hf
from jaxrl_post.pretrained.hf_values import flag

__all__ = ["internlm3_from_hf", "internlm3_to_hf", "iquestcoder_from_hf"]


def internlm3_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; older files have the keys `qkv_bias` and `bias`.

    Raises:
        CheckpointError: as `decoder_from_hf`, or only one of attention and MLP has
            biases, which transformers refuses too.
    """
    raw = {"num_key_value_heads": 2, "head_dim": 128, **raw}
    attention = flag(raw, "attention_bias", flag(raw, "qkv_bias", False))
    mlp = flag(raw, "mlp_bias", flag(raw, "bias", False))
    if attention != mlp:
        raise CheckpointError(
            "attention_bias (qkv_bias) must equal mlp_bias (bias), as the family has "
            f"biases everywhere or nowhere; got {attention} and {mlp}"
        )
    return replace(
        decoder_from_hf(raw, Defaults(max_length=32768, rms_norm_eps=1e-5)),
        qkv_bias=attention,
        output_bias=attention,
        mlp_bias=mlp,
    )


def internlm3_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json with both names of the bias keys.

    Raises:
        CheckpointError: as `decoder_to_hf`.
    """
    old = {"qkv_bias": config.qkv_bias, "bias": config.mlp_bias}
    return {**llama.config_to_hf(config), **old}


def iquestcoder_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; `attention_bias` covers all four projections.

    Raises:
        CheckpointError: as `decoder_from_hf`, or `clip_qkv` or `use_sliding_window` is
            set, which no release uses and transformers does not implement.
    """
    if raw.get("clip_qkv") is not None:
        raise CheckpointError(f"clip_qkv must be null; got {raw['clip_qkv']!r}")
    if flag(raw, "use_sliding_window", False):
        raise CheckpointError("use_sliding_window must be false; got True")
    raw = {"num_key_value_heads": 8, "head_dim": 128, **raw}
    bias = flag(raw, "attention_bias", False)
    return replace(
        decoder_from_hf(raw, Defaults(max_length=131072, rms_norm_eps=1e-5)),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(raw, "mlp_bias", False),
    )
