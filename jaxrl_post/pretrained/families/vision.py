"""The text model inside a model that also sees, in Hugging Face's terms.

What is read is the text model, under the family that it has on its own: Qwen3-VL's is a
Qwen3, Qwen2.5-VL's a Qwen2, Mistral 3's a Mistral or a Ministral 3. The positions of
text are the same along all axes of a multimodal rotation, which makes it the plain one.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families import mistral, qwen
from jaxrl_post.pretrained.hf_values import Json, flag

__all__ = [
    "PREFIXES",
    "TENSORS",
    "mistral3_from_hf",
    "qwen2_5_vl_from_hf",
    "qwen3_vl_from_hf",
]

# The text model's names inside the larger one's, as versions 4 and 5 have them.
PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
# What sees, and what takes that into the text model's space.
TENSORS = (
    "visual.*",
    "vision_tower.*",
    "multi_modal_projector.*",
    "model.visual.*",
    "model.vision_tower.*",
    "model.multi_modal_projector.*",
)

# What transformers takes where the text model's keys are absent.
QWEN3 = {"rope_theta": 5e5, "max_position_embeddings": 128000}
QWEN2_5 = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}
MISTRAL: Mapping[str, Callable[[Json], ModelConfig]] = {
    "mistral": mistral.mistral_from_hf,
    "ministral": mistral.ministral_from_hf,
    "ministral3": mistral.ministral3_from_hf,
}


def qwen3_vl_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads the text model of Qwen3-VL, whose layers all see everything.

    Raises:
        CheckpointError: as `qwen3_from_hf`, or there is no text_config.
    """
    full = {"use_sliding_window": False, "layer_types": None, "model_type": "qwen3"}
    text = _text(raw)
    return _tied(raw, text, qwen.qwen3_from_hf({**QWEN3, **text, **full}))


def qwen2_5_vl_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads the text model of Qwen2.5-VL; in older files its keys stand outside.

    Raises:
        CheckpointError: as `qwen2_from_hf`.
    """
    text = raw if raw.get("text_config") is None else _text(raw)
    found = {**QWEN2_5, **text, "model_type": "qwen2"}
    for key in ("rope_scaling", "rope_parameters"):
        rope = found.get(key)
        if isinstance(rope, Mapping) and "mrope" in (
            rope.get("rope_type"),
            rope.get("type"),
        ):
            found[key] = {**rope, "rope_type": "default"}
    return _tied(raw, text, qwen.qwen2_from_hf(found))


def mistral3_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads the text model of Mistral Small 3.1 and later, or of Ministral 3.

    Raises:
        CheckpointError: as the text model's family, of which there is another, or there
            is no text_config.
    """
    text = {"model_type": "mistral", **_text(raw)}
    family = text["model_type"]
    if not isinstance(family, str) or family not in MISTRAL:
        raise CheckpointError(
            f"text_config: model_type must be one of {', '.join(MISTRAL)}; got "
            f"{family!r}"
        )
    return _tied(raw, text, MISTRAL[family](text))


def _text(raw: Json) -> Json:
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(
            f"text_config must be a dictionary, the text model's config; got {text!r}"
        )
    return text


def _tied(raw: Json, text: Json, config: ModelConfig) -> ModelConfig:
    """Embeddings are tied where either of both configs says so."""
    places = (raw, text)
    tied = any(flag(place, "tie_word_embeddings", False) for place in places)
    return replace(config, tie_embeddings=tied)
