"""Rotary embeddings in config.json, in the spellings of transformers 4 and 5.

Version 4 has `rope_theta`, `rope_scaling` and, in some families,
`partial_rotary_factor` beside one another; version 5 has them all inside
`rope_parameters`, by kind of layer where the kinds differ. Both are read as
transformers 5 reads them, and both are written.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_post.models.config import ModelConfig, RopeScaling
from jaxrl_post.models.errors import CheckpointError
from jaxrl_post.models.hf_values import Json, flag, integer, number, optional_number

__all__ = ["Rotation", "rope_from_hf", "rope_to_hf", "rotation_from_hf"]

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Older names of longrope in Phi-3's files.
SYNONYMS = {"su": "longrope"}
ORIGINAL = "original_max_position_embeddings"


class Rotation(NamedTuple):
    """Base, scaling, and the share of a head's dims that rotates."""

    theta: float
    scaling: RopeScaling | None
    share: float


def rope_from_hf(raw: Json, max_length: int, *, theta: float, share: float) -> Rotation:
    """Reads the rotation of all layers; a value inside the dictionary wins.

    Args:
        raw: the parsed config.json.
        max_length: of the config.
        theta: the family's default base.
        share: the family's default for `partial_rotary_factor`.

    Raises:
        CheckpointError: an unknown kind, or one entry for each kind of layer.
    """
    rope = _dictionary(raw)
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise CheckpointError(
            f"rope_parameters must be the same for all layers; got one entry for each "
            f"of {', '.join(rope)}"
        )
    return rotation_from_hf(rope, raw, max_length, theta=theta, share=share)


def layer_ropes(raw: Json) -> dict[str, Json] | None:
    """The entries of `rope_parameters` by kind of layer; None where there is one."""
    rope = _dictionary(raw)
    if not any(isinstance(value, Mapping) for value in rope.values()):
        return None
    if set(rope) - {FULL, SLIDING} or FULL not in rope:
        raise CheckpointError(
            f"rope_parameters must have entries for {FULL} and {SLIDING}; got "
            f"{', '.join(rope)}"
        )
    return dict(rope)


def rotation_from_hf(
    rope: Json, raw: Json, max_length: int, *, theta: float, share: float
) -> Rotation:
    """Reads one dictionary; what it lacks stands at the top level of config.json.

    Raises:
        CheckpointError: an unknown kind, or a value that makes no sense.
    """
    theta = number(rope, "rope_theta", number(raw, "rope_theta", theta))
    key = "partial_rotary_factor"
    share = number(rope, key, number(raw, key, share))
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = SYNONYMS.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"unknown rope_type {kind!r}; supported: {', '.join(ROPE_KINDS)}"
        )
    if kind == "default":
        return Rotation(theta, None, share)
    return Rotation(theta, _scaling_from_hf(kind, rope, raw, max_length), share)


def rope_to_hf(config: ModelConfig, *, partial: bool = False) -> dict[str, Any]:
    """Writes the rotation of all layers in both spellings.

    Args:
        config: of the model.
        partial: whether the family has `partial_rotary_factor`.

    Raises:
        CheckpointError: transformers has no words for the scaling.
    """
    top: dict[str, Any] = {"rope_theta": config.rope_theta}
    if partial:
        top["partial_rotary_factor"] = config.rotated_dims / config.head_dim
    scaling = scaling_to_hf(config)
    inside = scaling or {"rope_type": "default"}
    if config.rope_scaling is not None and config.rope_scaling.kind == "longrope":
        # Phi-3 reads it here, and prefers it to the dictionary's.
        top[ORIGINAL] = inside[ORIGINAL]
    return {**top, "rope_scaling": scaling, "rope_parameters": {**inside, **top}}


def scaling_to_hf(config: ModelConfig) -> dict[str, Any] | None:
    """Returns the dictionary of a scaling, None where there is none.

    Raises:
        CheckpointError: transformers has no words for it.
    """
    scaling, max_length = config.rope_scaling, config.max_length
    if scaling is None:
        return None
    original = scaling.original_length or max_length
    entries: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return entries
    if scaling.kind == "dynamic":
        if original != max_length:
            raise CheckpointError(
                f"rope_scaling 'dynamic' grows from max_length in transformers, so "
                f"original_length must be None or {max_length}; got {original}"
            )
        return entries
    entries[ORIGINAL] = original
    if scaling.kind == "llama3":
        entries["low_freq_factor"] = scaling.low_frequency_factor
        entries["high_freq_factor"] = scaling.high_frequency_factor
        return entries
    if scaling.kind == "longrope":
        entries["short_factor"] = list(scaling.short_factors)
        entries["long_factor"] = list(scaling.long_factors)
        if scaling.attention_factor is not None:
            entries["attention_factor"] = scaling.attention_factor
        return entries
    entries["beta_fast"] = scaling.beta_fast
    entries["beta_slow"] = scaling.beta_slow
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if getattr(scaling, key) is not None:
            entries[key] = getattr(scaling, key)
    if not scaling.truncate:
        entries["truncate"] = False
    return entries


def _dictionary(raw: Json) -> Json:
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def _scaling_from_hf(kind: str, rope: Json, raw: Json, max_length: int) -> RopeScaling:
    if kind == "linear":
        return RopeScaling("linear", number(rope, "factor"))
    if kind == "dynamic":
        # Its original length is always max_position_embeddings: transformers ignores
        # `original_max_position_embeddings` here.
        return RopeScaling("dynamic", number(rope, "factor"))
    original = integer(raw, ORIGINAL, integer(rope, ORIGINAL, max_length))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            number(rope, "factor"),
            original_length=original,
            low_frequency_factor=number(rope, "low_freq_factor"),
            high_frequency_factor=number(rope, "high_freq_factor"),
        )
    factor = number(rope, "factor", max_length / original)
    if kind == "longrope":
        return RopeScaling(
            "longrope",
            factor,
            original_length=original,
            attention_factor=optional_number(rope, "attention_factor"),
            short_factors=_divisors(rope, "short_factor"),
            long_factors=_divisors(rope, "long_factor"),
        )
    return RopeScaling(
        "yarn",
        factor,
        original_length=original,
        # Zero means the default, as transformers reads it.
        beta_fast=optional_number(rope, "beta_fast") or 32.0,
        beta_slow=optional_number(rope, "beta_slow") or 1.0,
        attention_factor=optional_number(rope, "attention_factor"),
        mscale=optional_number(rope, "mscale"),
        mscale_all_dim=optional_number(rope, "mscale_all_dim"),
        truncate=flag(rope, "truncate", True),
    )


def _divisors(rope: Json, key: str) -> tuple[float, ...]:
    found = rope.get(key)
    if not isinstance(found, list) or not all(
        isinstance(value, int | float) and value > 0 for value in found
    ):
        raise CheckpointError(f"{key} must be a list of positive numbers; got {found}")
    return tuple(float(value) for value in found)
