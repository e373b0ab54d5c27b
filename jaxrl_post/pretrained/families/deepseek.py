"""DeepSeek-V2, V3 and Youtu-LLM in Hugging Face's format: latent attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import LatentAttention, MixtureOfExperts, ModelConfig
from jaxrl_post.models.rope import yarn_mscale
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import glm, llama
from jaxrl_post.pretrained.hf_config import (
    Defaults,
    decoder_from_hf,
    decoder_to_hf,
    required_experts,
)
from jaxrl_post.pretrained.hf_values import (
    Json,
    flag,
    integer,
    number,
    optional_flag,
    optional_integer,
    text,
)
from jaxrl_post.pretrained.layout import Weight

__all__ = [
    "WEIGHTS",
    "latent_from_hf",
    "latent_to_hf",
    "v2_from_hf",
    "v2_to_hf",
    "v3_from_hf",
    "v3_to_hf",
    "youtu_from_hf",
    "youtu_to_hf",
]

LATENT = LatentAttention(
    kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, query_rank=1536
)
DEFAULTS = Defaults(max_length=4096)

ATTENTION = "model.layers.*.self_attn"
WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    **glm.BALANCED_EXPERTS,
    # These replace q_proj if queries have their own latent.
    "layers.*.attention.query_up": Weight(
        f"{ATTENTION}.q_b_proj.weight", "(heads head_dim) rank"
    ),
    "layers.*.attention.query_down": Weight(
        f"{ATTENTION}.q_a_proj.weight", "rank embed"
    ),
    "layers.*.attention.query_norm": Weight(
        f"{ATTENTION}.q_a_layernorm.weight", "norm"
    ),
    "layers.*.attention.query_down_bias": Weight(f"{ATTENTION}.q_a_proj.bias", "rank"),
    "layers.*.attention.kv_down_bias": Weight(
        f"{ATTENTION}.kv_a_proj_with_mqa.bias", "rank"
    ),
    "layers.*.attention.kv_down": Weight(
        f"{ATTENTION}.kv_a_proj_with_mqa.weight", "rank embed"
    ),
    "layers.*.attention.kv_norm": Weight(f"{ATTENTION}.kv_a_layernorm.weight", "norm"),
    "layers.*.attention.kv_up": Weight(
        f"{ATTENTION}.kv_b_proj.weight", "(heads head_dim) rank"
    ),
    "layers.*.attention.output": Weight(
        f"{ATTENTION}.o_proj.weight", "embed (heads head_dim)"
    ),
}


def v2_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads V2's config.json; softmax scores, never normalised over a token's experts.

    Raises:
        CheckpointError: as `decoder_from_hf`.
    """
    config = latent_from_hf(raw, LATENT, DEFAULTS, interleaved=True)
    method = text(raw, "topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"topk_method must be greedy or group_limited_greedy; got {method!r}"
        )
    grouped = method == "group_limited_greedy"
    size = integer(raw, "moe_intermediate_size", 1407)
    count = integer(raw, "n_routed_experts", integer(raw, "num_experts", 64))
    dense = min(integer(raw, "first_k_dense_replace", 0), config.num_layers)
    experts = MixtureOfExperts(
        num_experts=count,
        experts_per_token=integer(raw, "num_experts_per_tok"),
        expert_size=size,
        normalize=False,
        scale=number(raw, "routed_scaling_factor", 1.0),
        num_groups=integer(raw, "n_group") if grouped else 1,
        groups_per_token=integer(raw, "topk_group") if grouped else 1,
        shared_size=size * integer(raw, "n_shared_experts", 2),
        dense_layers=tuple(range(dense)),
    )
    return replace(
        config, mlp_bias=flag(raw, "mlp_bias", False), experts=_used(experts, config)
    )


def v2_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes V2's config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`.
    """
    experts = required_experts(config)
    method = "greedy" if experts.num_groups == 1 else "group_limited_greedy"
    return {
        **latent_to_hf(config),
        **glm.balanced_to_hf(experts),
        "topk_method": method,
        "scoring_func": "softmax",
        "mlp_bias": config.mlp_bias,
    }


def v3_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads V3's config.json.

    Raises:
        CheckpointError: as `decoder_from_hf`.
    """
    interleaved = optional_flag(raw, "rope_interleave", True)
    config = latent_from_hf(raw, LATENT, DEFAULTS, interleaved=interleaved)
    dense = min(integer(raw, "first_k_dense_replace", 3), config.num_layers)
    experts = glm.balanced_from_hf(
        raw,
        MixtureOfExperts(
            num_experts=256,
            experts_per_token=8,
            expert_size=2048,
            scale=2.5,
            num_groups=8,
            groups_per_token=4,
            dense_layers=tuple(range(dense)),
        ),
    )
    return replace(config, experts=_used(experts, config))


def v3_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes V3's config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`.
    """
    return {
        **latent_to_hf(config),
        **glm.balanced_to_hf(required_experts(config)),
        "rope_interleave": config.rope_interleaved,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def _used(experts: MixtureOfExperts, config: ModelConfig) -> MixtureOfExperts | None:
    return experts if len(experts.dense_layers) < config.num_layers else None


def latent_from_hf(
    raw: Json, absent: LatentAttention, defaults: Defaults, *, interleaved: bool
) -> ModelConfig:
    """Reads a decoder with latent attention and without experts.

    Args:
        raw: the parsed config.json.
        absent: the family's defaults of the latent's keys.
        defaults: the family's other defaults.
        interleaved: whether neighbouring dims rotate together.

    Raises:
        CheckpointError: as `decoder_from_hf`.
    """
    bias = flag(raw, "attention_bias", False)
    latent = LatentAttention(
        kv_rank=integer(raw, "kv_lora_rank", absent.kv_rank),
        nope_dim=integer(raw, "qk_nope_head_dim", absent.nope_dim),
        rope_dim=integer(raw, "qk_rope_head_dim", absent.rope_dim),
        value_dim=integer(raw, "v_head_dim", absent.value_dim),
        # Null means that queries have no latent.
        query_rank=optional_integer(raw, "q_lora_rank", absent.query_rank),
    )
    # `head_dim` in config.json is the width of the rotated part alone.
    width = latent.nope_dim + latent.rope_dim
    config = decoder_from_hf({**raw, "head_dim": width}, defaults)
    scaling, mscale = config.rope_scaling, 1.0
    if scaling is not None and scaling.mscale_all_dim:
        mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return replace(
        config,
        num_kv_heads=config.num_heads,
        qkv_bias=bias,
        output_bias=bias,
        rope_interleaved=interleaved,
        attention_scale=None if mscale == 1.0 else width**-0.5 * mscale**2,
        latent=latent,
    )


def latent_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes the keys that `latent_from_hf` reads.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the model has no latent attention.
    """
    latent = config.latent
    if latent is None:
        raise CheckpointError(
            f"{config.model_type} checkpoints cannot express latent=None"
        )
    return {
        **decoder_to_hf(config),
        "head_dim": latent.rope_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "attention_bias": config.qkv_bias,
    }


def youtu_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json of a dense model; embeddings are tied by default.

    Raises:
        CheckpointError: as `decoder_from_hf`.
    """
    # transformers reads a null `rope_interleave` as false.
    return latent_from_hf(
        raw,
        LATENT,
        Defaults(max_length=131072, tie_embeddings=True),
        interleaved=optional_flag(raw, "rope_interleave", True),
    )


def youtu_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`.
    """
    return {
        **latent_to_hf(config),
        "rope_interleave": config.rope_interleaved,
    }
