"""Reads and writes rotary embeddings in config.json, as in transformers 4 and 5.

Version 4 has the top-level keys `rope_theta`, `rope_scaling` and, in some families,
`partial_rotary_factor`. Version 5 has all of them inside `rope_parameters`, with one
dictionary per kind of layer if the kinds differ. Both spellings are read as
transformers 5 reads them, and both are written.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_post.models.config import ModelConfig, RopeScaling
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.hf_values import (
    Json,
    integer,
    number,
    optional_flag,
    optional_number,
    section,
    text,
)

__all__ = ["Rotation", "layer_ropes", "rope_from_hf", "rope_to_hf", "rotation_from_hf"]

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# Older names of longrope in Phi-3's files.
SYNONYMS = {"su": "longrope"}
ORIGINAL = "original_max_position_embeddings"


class Rotation(NamedTuple):
    """A rotary embedding: base, scaling, and the fraction of rotated dims per head."""

    theta: float
    scaling: RopeScaling | None
    share: float


def rope_from_hf(raw: Json, max_length: int, *, theta: float, share: float) -> Rotation:
    """Reads the rotary embedding that all layers share.

    Args:
        raw: the parsed config.json.
        max_length: the config's maximum length.
        theta: the family's default base.
        share: the family's default for `partial_rotary_factor`.

    Raises:
        CheckpointError: `rope_type` is unknown, or the kinds of layers differ.
    """
    scaling, parameters = section(raw, "rope_scaling"), section(raw, "rope_parameters")
    rope = scaling or parameters
    _check_flat("rope_scaling" if scaling else "rope_parameters", rope)
    return rotation_from_hf(rope, raw, max_length, theta=theta, share=share)


def layer_ropes(raw: Json) -> tuple[Json, Json]:
    """Returns the rotary dictionaries of full and of sliding layers.

    Version 5 has one dictionary per kind of layer in `rope_parameters`. Entries of
    `rope_scaling` apply to full layers only, and override `rope_parameters`.

    Raises:
        CheckpointError: `rope_parameters` has one dictionary for all layers, or
            `rope_scaling` has `type` but no `rope_type`; transformers ignores both.
    """
    parameters = section(raw, "rope_parameters")
    if parameters.keys() - {FULL, SLIDING}:
        raise CheckpointError(
            f"rope_parameters must have entries for {FULL} and {SLIDING} alone; got "
            f"{', '.join(map(str, parameters))}"
        )
    scaling = section(raw, "rope_scaling")
    if "type" in scaling and "rope_type" not in scaling:
        raise CheckpointError(
            f"rope_type is missing in rope_scaling; without it transformers 5 ignores "
            f"the type {scaling['type']!r} where the kinds of layers rotate apart"
        )
    full, sliding = section(parameters, FULL), section(parameters, SLIDING)
    for name, rope in (("rope_scaling", scaling), (FULL, full), (SLIDING, sliding)):
        _check_flat(name, rope)
    return {**full, **scaling}, sliding


def rotation_from_hf(
    rope: Json, raw: Json, max_length: int, *, theta: float, share: float
) -> Rotation:
    """Reads one rotary dictionary; missing keys come from the top level of config.json.

    Raises:
        CheckpointError: `rope_type` is unknown, or a value is invalid.
    """
    theta = number(rope, "rope_theta", number(raw, "rope_theta", theta))
    key = "partial_rotary_factor"
    # A null at the top level means the whole head, not the family's default.
    share = number(rope, key, optional_number(raw, key, share) or 1.0)
    kind = text(rope, "rope_type", text(rope, "type", "default"))
    kind = SYNONYMS.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"unknown rope_type {kind!r}; supported: {', '.join(ROPE_KINDS)}"
        )
    if kind == "default":
        return Rotation(theta, None, share)
    return Rotation(theta, _scaling_from_hf(kind, rope, raw, max_length), share)


def rope_to_hf(config: ModelConfig, *, partial: bool = False) -> dict[str, Any]:
    """Writes the rotary embedding of all layers, as in transformers 4 and 5.

    Args:
        config: the model's config.
        partial: whether the family has `partial_rotary_factor`.

    Raises:
        CheckpointError: transformers cannot express the scaling.
    """
    top: dict[str, Any] = {"rope_theta": config.rope_theta}
    if partial:
        top["partial_rotary_factor"] = config.rotated_dims / config.head_dim
    scaling = scaling_to_hf(config)
    inside = scaling or {"rope_type": "default"}
    if config.rope_scaling is not None and config.rope_scaling.kind == "longrope":
        # Phi-3 reads the top-level key and prefers it to the dictionary's.
        top[ORIGINAL] = inside[ORIGINAL]
    return {**top, "rope_scaling": scaling, "rope_parameters": {**inside, **top}}


def scaling_to_hf(config: ModelConfig) -> dict[str, Any] | None:
    """Returns the dictionary of the config's scaling, None without a scaling.

    Raises:
        CheckpointError: transformers cannot express the scaling.
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


def _check_flat(name: str, rope: Json) -> None:
    """Refuses nested dictionaries, one for each kind of layer."""
    inner = [key for key, value in rope.items() if isinstance(value, Mapping)]
    inner += [key for key in (FULL, SLIDING) if key in rope and key not in inner]
    if inner:
        raise CheckpointError(
            f"{name} must be the same for all layers; got one entry for each of "
            f"{', '.join(map(str, inner))}"
        )


def _scaling_from_hf(kind: str, rope: Json, raw: Json, max_length: int) -> RopeScaling:
    if kind == "linear":
        return RopeScaling("linear", number(rope, "factor"))
    if kind == "dynamic":
        # transformers ignores `original_max_position_embeddings` for this kind; the
        # original length is always max_position_embeddings.
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
    factor = optional_number(rope, "factor") or max_length / original
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
        # As in transformers, zero means the default.
        beta_fast=optional_number(rope, "beta_fast") or 32.0,
        beta_slow=optional_number(rope, "beta_slow") or 1.0,
        attention_factor=optional_number(rope, "attention_factor"),
        mscale=optional_number(rope, "mscale"),
        mscale_all_dim=optional_number(rope, "mscale_all_dim"),
        truncate=optional_flag(rope, "truncate", True),
    )


def _divisors(rope: Json, key: str) -> tuple[float, ...]:
    found = rope.get(key)
    if not isinstance(found, list):
        raise CheckpointError(f"{key} must be a list of positive numbers; got {found}")
    return tuple(number({key: value}, key) for value in found)
