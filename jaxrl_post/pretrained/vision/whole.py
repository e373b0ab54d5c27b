"""Models that also see, whole: a text model with its vision tower."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.vision_config import VisionInputs
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.families.family import Family
from jaxrl_post.pretrained.hf_values import Json, integer, integers, section
from jaxrl_post.pretrained.layout import Weight
from jaxrl_post.pretrained.name_map import replaced_prefix
from jaxrl_post.pretrained.vision.towers import (
    TOWERS,
    vision_config_from_hf,
    vision_config_to_hf,
    vision_weights,
)

__all__ = ["read_vision", "saved_weights", "whole_family", "write_whole"]


class WholeFormat(NamedTuple):
    """The format of a kind of whole model.

    Attributes:
        architecture: class in transformers, without "ForConditionalGeneration".
        sections: default of `mrope_section`.
        interleaved: as `VisionInputs.interleaved`, which no file says.
        prefixes: pairs of a prefix of our names of tensors and the one in files.
        saved: weights that are saved otherwise than by the text model's family.
    """

    architecture: str
    sections: tuple[int, int, int]
    interleaved: bool
    prefixes: tuple[tuple[str, str], ...]
    saved: Mapping[str, Weight] = {}


# transformers 5 saves Qwen2.5-VL under the names of its first releases.
FIRST = (("model.visual.", "visual."),)
LATER = (("model.visual.", "model.visual."), ("model.", "model.language_model."))
# Released files hold all experts in one tensor, and [in, out].
EXPERTS, WIDE = "model.layers.*.mlp.experts", "experts expert_embed expert_ffn"
JOINED = {
    "layers.*.experts.gate": Weight(f"{EXPERTS}.gate_up_proj", WIDE, part=0, dim=-1),
    "layers.*.experts.up": Weight(f"{EXPERTS}.gate_up_proj", WIDE, part=1, dim=-1),
    "layers.*.experts.down": Weight(
        f"{EXPERTS}.down_proj", "experts expert_ffn expert_embed"
    ),
}
WHOLE: Mapping[str, WholeFormat] = {
    "qwen2_5_vl": WholeFormat("Qwen2_5_VL", (16, 24, 24), False, FIRST),
    "qwen3_vl": WholeFormat("Qwen3VL", (24, 20, 20), True, LATER),
    "qwen3_vl_moe": WholeFormat("Qwen3VLMoe", (24, 20, 20), True, LATER, JOINED),
    "qwen3_5": WholeFormat("Qwen3_5", (11, 11, 10), True, LATER),
    "qwen3_5_moe": WholeFormat("Qwen3_5Moe", (11, 11, 10), True, LATER),
}
assert WHOLE.keys() == TOWERS.keys()

IMAGE = "image_token_id"
# Ids of transformers for absent keys.
MARKS = {
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def read_vision(raw: Json, config: ModelConfig) -> VisionInputs:
    """Reads how a model sees.

    Args:
        raw: the parsed config.json of the whole model.
        config: of its text model.

    Raises:
        CheckpointError: its tower is not supported, or a key is missing or invalid.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in WHOLE:
        raise CheckpointError(
            f"model_type {kind!r} has no vision tower here; those with one are "
            f"{', '.join(WHOLE)}"
        )
    tower = vision_config_from_hf(section(raw, "vision_config"), kind)
    text = section(raw, "text_config") or raw
    rope = section(text, "rope_parameters") or section(text, "rope_scaling")
    sections = WHOLE[kind].sections
    if "mrope_section" in rope:
        found = integers(rope, "mrope_section")
        if len(found) != 3:
            raise CheckpointError(f"mrope_section must be three counts; got {found}")
        sections = (found[0], found[1], found[2])
    marks = tuple((name, integer(raw, name, value)) for name, value in MARKS.items())
    return VisionInputs(
        # A file names a tower by its own type or by the whole model's.
        replace(tower, model_type=kind),
        image_token=integer(raw, IMAGE, 151655),
        sections=sections,
        interleaved=WHOLE[kind].interleaved,
        marks=marks,
    )


def write_whole(vision: VisionInputs, text: Json) -> dict[str, Any]:
    """Writes the config.json of a whole model.

    Args:
        vision: how it sees.
        text: what the family of its text model writes.
    """
    kind = vision.tower.model_type
    rope: dict[str, Any] = {"mrope_section": list(vision.sections)}
    if vision.interleaved:
        rope["mrope_interleaved"] = True
    inside = {key: value for key, value in text.items() if key != "architectures"}
    inside["model_type"] = f"{kind}_text"
    for key in ("rope_parameters", "rope_scaling"):
        if key in inside:
            inside[key] = {**(inside[key] or {"rope_type": "default"}), **rope}
    return {
        "architectures": [f"{WHOLE[kind].architecture}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": inside,
        "vision_config": vision_config_to_hf(vision.tower),
        "tie_word_embeddings": text["tie_word_embeddings"],
        IMAGE: vision.image_token,
        **dict(vision.marks),
    }


def whole_family(config: ModelConfig, family: Family) -> Family:
    """A text model's family with the weights of the config's tower, if it has one."""
    if config.vision is None:
        return family
    tower = {
        f"vision.{path}": weight
        for path, weight in vision_weights(config.vision.tower).items()
    }
    weights: dict[str, Weight] = {**family.weights, **tower}
    return replace(family, weights=weights, vision=())


def saved_weights(config: ModelConfig, family: Family) -> Mapping[str, Weight]:
    """Name and layout of every parameter in a directory that is saved.

    Args:
        config: of the model.
        family: of its text model.
    """
    if config.vision is None:
        return family.weights
    kind = WHOLE[config.vision.tower.model_type]
    weights = {**whole_family(config, family).weights, **kind.saved}
    return {
        path: replace(weight, name=replaced_prefix(weight.name, kind.prefixes))
        for path, weight in weights.items()
    }
