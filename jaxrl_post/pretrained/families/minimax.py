"""MiniMax-M2, M2.1, M2.5 and M2.7."""

from typing import Any

from jaxrl_post.models.config import MixtureOfExperts
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import glm, mistral, olmo
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import (
    count_of_experts,
    fixed,
    wide_experts,
    written,
)
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import Json, integer
from jaxrl_post.pretrained.layout import Weight

__all__ = ["MINIMAX_M2"]

HEAD_DIM = 128


def _with_share(raw: Json) -> Json:
    """Spells `rotary_dim` as a share, and refuses linear attention."""
    kinds = raw.get("attn_type_list")
    if kinds is not None and kinds != [1] * integer(raw, "num_hidden_layers"):
        raise CheckpointError(
            f"attn_type_list must be 1, full attention, for every layer; got {kinds}"
        )
    if raw.get("rotary_dim") is None:
        return raw
    head_dim = integer(raw, "head_dim", HEAD_DIM)
    return {"partial_rotary_factor": integer(raw, "rotary_dim") / head_dim, **raw}


def _experts(raw: Json) -> MixtureOfExperts:
    return MixtureOfExperts(
        num_experts=count_of_experts(raw, 256),
        experts_per_token=integer(raw, "num_experts_per_tok", 8),
        expert_size=1,
        scoring="sigmoid",
        correction_bias=True,
    )


def _written(experts: MixtureOfExperts) -> dict[str, Any]:
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
    }


MINIMAX_M2 = Family(
    "MiniMaxM2",
    {
        **mistral.MIXTRAL_WEIGHTS,
        **olmo.QK_NORMS,
        "layers.*.experts.correction_bias": Weight(
            "model.layers.*.block_sparse_moe.e_score_correction_bias", "router"
        ),
    },
    Defaults(
        max_length=196608,
        num_kv_heads=8,
        head_dim=HEAD_DIM,
        rope_theta=5e6,
        partial=True,
    ),
    keys=(
        wide_experts(_experts, _written),
        fixed(
            scoring_func="sigmoid",
            use_qk_norm=True,
            qk_norm_type="per_layer",
            use_routing_bias=True,
            norm_topk_prob=True,
        ),
        written(lambda config: {"rotary_dim": config.rotated_dims}),
    ),
    options={"qk_norm": "joint"},
    prepare=_with_share,
    classifier=None,
    judges_tokens=False,
    ignored=glm.NEXT_TOKEN_LAYERS,
)
