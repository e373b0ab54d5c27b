"""Text models inside vision-language models, in Hugging Face's format.

Only the text model is loaded, as a model of its own family: Qwen3 for Qwen3-VL, Qwen2
for Qwen2.5-VL, Mistral or Ministral 3 for Mistral 3, DeepSeek-V3 for Kimi K2.5. A text
token has the same position on all axes of a multimodal rotary embedding, so the
standard embedding is equal to it.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.hf_values import Json, flag, section

__all__ = [
    "gemma4_text",
    "gemma4_unified_text",
    "kimi_text",
    "mistral3_text",
    "qwen2_5_text",
    "qwen3_5_text",
    "qwen3_moe_text",
    "qwen3_text",
    "seeing",
]

# Prefixes of the text model's tensors in transformers 4 and 5, and their replacements.
PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
# The vision encoder and its projection to the text model's hidden size.
TENSORS = (
    "visual.*",
    "vision_tower.*",
    "multi_modal_projector.*",
    "mm_projector.*",
    "model.visual.*",
    "model.vision_tower.*",
    "model.multi_modal_projector.*",
    "model.mm_projector.*",
)

# The defaults of transformers for absent keys of the text model.
QWEN3 = {"rope_theta": 5e5, "max_position_embeddings": 128000}
QWEN3_MOE = {
    **QWEN3,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}
QWEN2_5 = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}
GEMMA4_UNIFIED = {"sliding_window": 1024, "max_position_embeddings": 262144}
FULL = {"use_sliding_window": False, "layer_types": None}
MISTRAL = ("mistral", "ministral", "ministral3")
DEEPSEEK = "deepseek_v3"


def seeing(family: Family) -> Family:
    """Lets a family also load the text model inside a vision-language model."""
    return replace(family, prefixes=PREFIXES, vision=TENSORS)


def qwen3_text(raw: Json) -> Json:
    """Returns the config.json of Qwen3-VL's text model, whose attention is full.

    Raises:
        CheckpointError: text_config is missing.
    """
    return {**QWEN3, **_text(raw), **FULL, "model_type": "qwen3", **_tied(raw)}


def qwen3_moe_text(raw: Json) -> Json:
    """Returns the config.json of the text model of Qwen3-VL with experts.

    transformers does not read `norm_topk_prob`: the weights of a token sum to 1.

    Raises:
        CheckpointError: text_config is missing.
    """
    fixed = {**FULL, "norm_topk_prob": True, "model_type": "qwen3_moe"}
    return {**QWEN3_MOE, **_text(raw), **fixed, **_tied(raw)}


def qwen2_5_text(raw: Json) -> Json:
    """Returns the config.json of Qwen2.5-VL's text model.

    Older files have its keys at the top level.
    """
    text = raw if raw.get("text_config") is None else _text(raw)
    found = {**QWEN2_5, **text, "model_type": "qwen2", **_tied(raw)}
    for key in ("rope_scaling", "rope_parameters"):
        rope = found.get(key)
        if isinstance(rope, Mapping) and "mrope" in (
            rope.get("rope_type"),
            rope.get("type"),
        ):
            found[key] = {**rope, "rope_type": "default"}
    return found


def qwen3_5_text(raw: Json) -> Json:
    """Returns the config.json of the text model of Qwen3.5, 3.6 or 3.8.

    Raises:
        CheckpointError: text_config is missing.
    """
    family = f"{raw['model_type']}_text"
    return {**_text(raw), "model_type": family, **_tied(raw)}


def gemma4_text(raw: Json) -> Json:
    """Returns the config.json of Gemma 4's text model.

    Raises:
        CheckpointError: text_config is missing.
    """
    return {**_text(raw), "model_type": "gemma4_text", **_tied(raw, default=True)}


def gemma4_unified_text(raw: Json) -> Json:
    """Returns the config.json of the text model of Gemma 4 12B, a plain Gemma 4.

    Raises:
        CheckpointError: text_config is missing.
    """
    fixed = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    return {**GEMMA4_UNIFIED, **gemma4_text(raw), **fixed}


def mistral3_text(raw: Json) -> Json:
    """Returns the config.json of the text model of Mistral Small 3.1 or Ministral 3.

    Raises:
        CheckpointError: its family is not supported, or text_config is missing.
    """
    text = {"model_type": "mistral", **_text(raw)}
    family = text["model_type"]
    if not isinstance(family, str) or family not in MISTRAL:
        raise CheckpointError(
            f"text_config: model_type must be one of {', '.join(MISTRAL)}; got "
            f"{family!r}"
        )
    return {**text, **_tied(raw)}


def kimi_text(raw: Json) -> Json:
    """Returns the config.json of a Kimi's DeepSeek-V3: of K2, or inside K2.5 and K2.6.

    Raises:
        CheckpointError: text_config is missing, or is of another family.
    """
    text = raw if raw["model_type"] == "kimi_k2" else _text(raw)
    family = text.get("model_type", DEEPSEEK)
    if family not in ("kimi_k2", DEEPSEEK):
        raise CheckpointError(
            f"text_config: model_type must be kimi_k2 or {DEEPSEEK}; got {family!r}"
        )
    return {**text, "model_type": DEEPSEEK, **_tied(raw)}


def _text(raw: Json) -> Json:
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(
            f"text_config must be a dictionary, the text model's config; got {text!r}"
        )
    return text


def _tied(raw: Json, *, default: bool = False) -> Json:
    """Ties the embeddings if the outer config or text_config, if any, does so."""
    places = (raw, section(raw, "text_config"))
    tied = [flag(place, "tie_word_embeddings", default) for place in places]
    return {"tie_word_embeddings": any(tied)}
