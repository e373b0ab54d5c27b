"""Latent attention: DeepSeek-V2 and V3, GLM-4.7-Flash and Youtu-LLM."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxrl_post.models.config import LatentAttention, MixtureOfExperts, ModelConfig
from jaxrl_post.models.rope import yarn_mscale
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import glm, llama
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    ATTENTION_BIAS,
    Key,
    option,
    required_experts,
    written,
)
from jaxrl_post.pretrained.hf_config import Defaults
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

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3", "GLM4_MOE_LITE", "YOUTU"]

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


LATENT = LatentAttention(
    kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, query_rank=1536
)


def _latent(raw: Json, absent: LatentAttention) -> LatentAttention:
    return LatentAttention(
        kv_rank=integer(raw, "kv_lora_rank", absent.kv_rank),
        nope_dim=integer(raw, "qk_nope_head_dim", absent.nope_dim),
        rope_dim=integer(raw, "qk_rope_head_dim", absent.rope_dim),
        value_dim=integer(raw, "v_head_dim", absent.value_dim),
        # Null means that queries have no latent.
        query_rank=optional_integer(raw, "q_lora_rank", absent.query_rank),
    )


def _with_whole_width(absent: LatentAttention, raw: Json) -> Json:
    """Replaces `head_dim`, which is the width of the rotated part alone."""
    latent = _latent(raw, absent)
    return {**raw, "head_dim": latent.nope_dim + latent.rope_dim}


def _read_latent(
    absent: LatentAttention, raw: Json, config: ModelConfig
) -> ModelConfig:
    scaling, mscale = config.rope_scaling, 1.0
    if scaling is not None and scaling.mscale_all_dim:
        mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return replace(
        config,
        num_kv_heads=config.num_heads,
        attention_scale=None if mscale == 1.0 else config.head_dim**-0.5 * mscale**2,
        latent=_latent(raw, absent),
    )


def _write_latent(config: ModelConfig) -> dict[str, Any]:
    latent = config.latent
    if latent is None:
        raise CheckpointError(
            f"{config.model_type} checkpoints cannot express latent=None"
        )
    return {
        "head_dim": latent.rope_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


def _family(
    architecture: str,
    defaults: Defaults,
    *keys: Key,
    latent: LatentAttention = LATENT,
    **others: Any,
) -> Family:
    """A family with latent attention, whose keys default to `latent`."""
    return Family(
        architecture,
        WEIGHTS,
        defaults,
        keys=(ATTENTION_BIAS, Key(partial(_read_latent, latent), _write_latent), *keys),
        prepare=partial(_with_whole_width, latent),
        **others,
    )


# transformers reads a null `rope_interleave` as false.
INTERLEAVED = option("rope_interleave", optional_flag, True, "rope_interleaved")

YOUTU = _family(
    "Youtu",
    Defaults(max_length=131072, tie_embeddings=True),
    INTERLEAVED,
    classifier=None,
    judges_tokens=False,
)

DEEPSEEK_V3 = _family(
    "DeepseekV3",
    Defaults(max_length=4096),
    INTERLEAVED,
    glm.balanced_experts(
        MixtureOfExperts(256, 8, 2048, scale=2.5, num_groups=8, groups_per_token=4),
        glm.first_dense(3),
    ),
    written(lambda _: {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    ignored=glm.NEXT_TOKEN_LAYERS,
)


GREEDY, GROUPED = "greedy", "group_limited_greedy"


def _read_softmax_experts(raw: Json, config: ModelConfig) -> ModelConfig:
    """V2: softmax scores, never normalised over a token's experts."""
    method = text(raw, "topk_method", GREEDY)
    if method not in (GREEDY, GROUPED):
        raise CheckpointError(
            f"topk_method must be {GREEDY} or {GROUPED}; got {method!r}"
        )
    size = integer(raw, "moe_intermediate_size", 1407)
    experts = MixtureOfExperts(
        num_experts=integer(raw, "n_routed_experts", integer(raw, "num_experts", 64)),
        experts_per_token=integer(raw, "num_experts_per_tok"),
        expert_size=size,
        normalize=False,
        scale=number(raw, "routed_scaling_factor", 1.0),
        num_groups=integer(raw, "n_group") if method == GROUPED else 1,
        groups_per_token=integer(raw, "topk_group") if method == GROUPED else 1,
        shared_size=size * integer(raw, "n_shared_experts", 2),
        dense_layers=glm.first_dense(0)(raw, config.num_layers),
    )
    return glm.with_experts(config, experts)


def _write_softmax_experts(config: ModelConfig) -> dict[str, Any]:
    experts = required_experts(config)
    return {
        **glm.balanced_to_hf(experts),
        "topk_method": GREEDY if experts.num_groups == 1 else GROUPED,
        "scoring_func": "softmax",
    }


DEEPSEEK_V2 = _family(
    "DeepseekV2",
    DEEPSEEK_V3.defaults,
    option("mlp_bias", flag, False, "mlp_bias"),
    Key(_read_softmax_experts, _write_softmax_experts),
    options={"rope_interleaved": True},
    judges_tokens=False,
)


DENSE, SPARSE = "dense", "sparse"


def _dense_by_type(raw: Json, num_layers: int) -> tuple[int, ...]:
    """GLM-4.7-Flash: without `mlp_layer_types`, only the first layer is dense."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return (0,)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in (DENSE, SPARSE) for kind in kinds)
    ):
        raise CheckpointError(
            f"mlp_layer_types must name {DENSE} or {SPARSE} for each of {num_layers} "
            f"layers; got {kinds}"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == DENSE)


def _write_types(config: ModelConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    dense = layers if config.experts is None else config.experts.dense_layers
    kinds = [DENSE if layer in dense else SPARSE for layer in layers]
    return {"mlp_layer_types": kinds, "topk_method": "noaux_tc"}


GLM4_MOE_LITE = _family(
    "Glm4MoeLite",
    Defaults(max_length=202752, rms_norm_eps=1e-5),
    option("rope_interleave", flag, True, "rope_interleaved"),
    glm.balanced_experts(MixtureOfExperts(64, 4, 1536, scale=1.8), _dense_by_type),
    written(_write_types),
    latent=LatentAttention(
        kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256, query_rank=768
    ),
    classifier=None,
    judges_tokens=False,
    ignored=glm.NEXT_TOKEN_LAYERS,
)
