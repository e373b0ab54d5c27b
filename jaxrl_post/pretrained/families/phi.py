"""Phi-3: joined projections, partial rotation, longrope."""

from collections.abc import Mapping

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import llama
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.families.keys import ONE_WINDOW, Key
from jaxrl_post.pretrained.hf_config import Defaults
from jaxrl_post.pretrained.hf_values import Json, integer, section
from jaxrl_post.pretrained.layout import Weight

__all__ = ["PHI3"]

QKV = "model.layers.*.self_attn.qkv_proj.weight"
GATE_UP = "model.layers.*.mlp.gate_up_proj.weight"
WEIGHTS: Mapping[str, Weight] = {
    **llama.WEIGHTS,
    "layers.*.attention.query": Weight(QKV, "(heads head_dim) embed", part=0),
    "layers.*.attention.key": Weight(QKV, "(kv_heads head_dim) embed", part=1),
    "layers.*.attention.value": Weight(QKV, "(kv_heads head_dim) embed", part=2),
    "layers.*.mlp.gate": Weight(GATE_UP, "ffn embed", part=0),
    "layers.*.mlp.up": Weight(GATE_UP, "ffn embed", part=1),
}

ORIGINAL = "original_max_position_embeddings"


def _prepare(raw: Json) -> Json:
    raw = {ORIGINAL: integer(raw, ORIGINAL, 4096), **raw}
    rope = section(raw, "rope_scaling") or section(raw, "rope_parameters")
    if rope.get("rope_type", rope.get("type")) == "yarn":
        # Early releases call longrope "yarn".
        raw = {**raw, "rope_scaling": {**rope, "rope_type": "longrope"}}
    return raw


def _only_longrope(raw: Json, config: ModelConfig) -> ModelConfig:
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind != "longrope":
        raise CheckpointError(f"rope_type must be longrope; got {scaling.kind}")
    return config


PHI3 = Family(
    "Phi3",
    WEIGHTS,
    Defaults(4096, rms_norm_eps=1e-5, partial=True),
    keys=(Key(_only_longrope, lambda _: {}), ONE_WINDOW),
    prepare=_prepare,
    finish=lambda _, keys: {ORIGINAL: 4096, **keys},
)
