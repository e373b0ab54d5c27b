"""GLM-4.7-Flash (glm4_moe_lite) in Hugging Face's format: DeepSeek-V3, other keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import LatentAttention, MixtureOfExperts, ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import deepseek, glm
from jaxrl_post.pretrained.hf_config import Defaults, required_experts
from jaxrl_post.pretrained.hf_values import Json, flag

__all__ = ["config_from_hf", "config_to_hf"]

LATENT = LatentAttention(
    kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256, query_rank=768
)
DENSE, SPARSE = "dense", "sparse"


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; without `mlp_layer_types`, only the first layer is dense.

    Raises:
        CheckpointError: as `decoder_from_hf`, or layers or experts are invalid.
    """
    config = deepseek.latent_from_hf(
        raw,
        LATENT,
        Defaults(max_length=202752, rms_norm_eps=1e-5),
        interleaved=flag(raw, "rope_interleave", True),
    )
    dense = _dense_layers(raw, config.num_layers)
    experts = MixtureOfExperts(
        num_experts=64,
        experts_per_token=4,
        expert_size=1536,
        scale=1.8,
        dense_layers=dense,
    )
    if len(dense) == config.num_layers:
        return config
    return replace(config, experts=glm.balanced_from_hf(raw, experts))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`, or the model has no experts.
    """
    experts = required_experts(config)
    kinds = [
        DENSE if layer in experts.dense_layers else SPARSE
        for layer in range(config.num_layers)
    ]
    return {
        **deepseek.latent_to_hf(config),
        **glm.balanced_to_hf(experts),
        "rope_interleave": config.rope_interleaved,
        "topk_method": "noaux_tc",
        "mlp_layer_types": kinds,
    }


def _dense_layers(raw: Json, num_layers: int) -> tuple[int, ...]:
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
