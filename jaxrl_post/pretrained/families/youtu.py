"""Youtu-LLM (youtu) in Hugging Face's terms: a dense model with latent attention."""

from collections.abc import Mapping
from typing import Any

from jaxrl_post.models.config import LatentAttention, ModelConfig
from jaxrl_post.pretrained.families import deepseek
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import optional_flag

__all__ = ["config_from_hf", "config_to_hf"]

LATENT = LatentAttention(
    kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, query_rank=1536
)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json; embeddings are tied, where it does not say.

    Raises:
        CheckpointError: as `decoder_from_hf`.
    """
    # transformers takes null for false here.
    return deepseek.latent_from_hf(
        raw,
        LATENT,
        Defaults(max_length=131072, tie_embeddings=True),
        interleaved=optional_flag(raw, "rope_interleave", True),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json.

    Raises:
        CheckpointError: as `decoder_to_hf`.
    """
    return {
        **deepseek.latent_to_hf(config),
        "rope_interleave": config.rope_interleaved,
    }
