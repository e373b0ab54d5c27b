"""Rotary position embeddings and their scaling kinds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_post.models.config import HeadSpec, ModelConfig, RopeScaling
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "LayerRotation",
    "apply_rope",
    "layer_tables",
    "mrope_axes",
    "rope_tables",
    "rotation",
    "yarn_mscale",
]


class LayerRotation(NamedTuple):
    """Layers of a model with equal rotations have the same tables.

    Attributes:
        local: whether the base is `local_rope_theta`.
        heads: the layer's own heads; None for the config's.
    """

    local: bool = False
    heads: HeadSpec | None = None


DEFAULT_ROTATION = LayerRotation()


def rope_tables(
    config: ModelConfig,
    positions: Int[Array, "*batch length"],
    kind: LayerRotation = DEFAULT_ROTATION,
    *,
    rotations: Int[Array, "*batch length 3"] | None = None,
) -> tuple[Float[Array, "*batch length half"], Float[Array, "*batch length half"]]:
    """Computes cosines and sines of every position's rotary angles, float32.

    Args:
        config: gives the rotated width, base and scaling.
        positions: int32 positions; a row's length can change its scaling.
        kind: the rotation of a layer. Heads of the layer's own have an angle for each
            pair of dims, which is 0 for those that do not rotate.
        rotations: int32, positions in time, row and column of the tokens of a model
            that also sees; None for rows of text, whose tokens have one on all axes.

    References:
        Su et al., RoFormer, arXiv:2104.09864; Wang et al., Qwen2-VL, arXiv:2409.12191
        (M-RoPE).
    """
    scaling = config.rope_scaling
    base = config.rope_theta
    if kind.local and config.local_rope_theta is not None:
        scaling, base = None, config.local_rope_theta
    heads = kind.heads
    plain = base ** -_exponents(
        config.rotated_dims if heads is None else heads.head_dim
    )
    if heads is not None:
        plain[heads.rotated_pairs :] = 0.0
    places = _by_frequency(config, positions, rotations).astype(jnp.float32)
    scale = 1.0
    if scaling is None:
        angles = places * jnp.asarray(plain.astype(np.float32))
    elif scaling.kind == "dynamic":
        angles = places * _dynamic(config, scaling, positions)
    elif scaling.kind == "longrope":
        angles = places * _longrope(config, scaling, plain, positions)
        scale = _longrope_scale(config, scaling)
    else:
        frequencies, scale = _fixed(config, scaling, plain)
        angles = places * jnp.asarray(frequencies.astype(np.float32))
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def mrope_axes(sections: Sequence[int], *, interleaved: bool) -> np.ndarray:
    """Returns which axis gives each frequency of the rotary embedding its position.

    With `axes` of this function a token's angle i is `positions[axes[i]] *
    frequency[i]`.

    Args:
        sections: frequencies of time, row and column (`mrope_section`); they sum to
            half of the rotated dims.
        interleaved: whether row and column take turns with time (Qwen3-VL, Qwen3.5),
            or follow it (Qwen2.5-VL).

    Returns:
        int32 [half]: 0 time, 1 row, 2 column.

    Raises:
        ValueError: there are not three sections, or they do not fit.

    >>> mrope_axes([2, 1, 1], interleaved=False).tolist()
    [0, 0, 1, 2]
    >>> mrope_axes([4, 2, 2], interleaved=True).tolist()
    [0, 1, 2, 0, 1, 2, 0, 0]
    """
    if len(sections) != 3 or min(sections) < 0:
        raise ValueError(
            f"sections must be three counts: time, row, column; got {list(sections)}"
        )
    if not interleaved:
        return np.repeat(np.arange(3, dtype=np.int32), sections)
    half = sum(sections)
    axes = np.zeros(half, np.int32)
    for axis in (1, 2):
        # The i-th frequency of an axis is at 3 i + axis.
        if 3 * (sections[axis] - 1) + axis >= half and sections[axis]:
            raise ValueError(
                f"sections: {list(sections)} cannot be interleaved, since row and "
                "column must have at most a third of the frequencies"
            )
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _by_frequency(
    config: ModelConfig, positions: Array, rotations: Array | None
) -> Int[Array, "*batch length half"]:
    """The position by which each frequency of a token rotates."""
    if rotations is None:
        return positions[..., None]
    assert config.vision is not None
    axes = mrope_axes(config.vision.sections, interleaved=config.vision.interleaved)
    return rotations[..., axes]


def apply_rope(
    x: Float[Array, "batch length heads head_dim"],
    cos: Float[Array, "batch length half"],
    sin: Float[Array, "batch length half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "batch length heads head_dim"]:
    """Rotates the leading 2 * half dims of each head, in float32.

    Args:
        x: queries or keys.
        cos: from `rope_tables`.
        sin: from `rope_tables`.
        interleaved: dims 2i and 2i + 1 rotate as a pair instead of i and half + i. The
            result stores the pairs as halves; queries and keys both do, so their
            products are unchanged.
    """
    width = 2 * cos.shape[-1]
    rotating, rest = jnp.split(x, [width], axis=-1)
    wide = rotating.astype(jnp.float32)
    if interleaved:
        first, second = wide[..., ::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    turned = jnp.concatenate(rotated, axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def layer_tables(
    config: ModelConfig,
    positions: Int[Array, "*batch length"],
    *,
    rotations: Int[Array, "*batch length 3"] | None = None,
) -> tuple[tuple[Array, Array] | None, ...]:
    """The tables of all layers, as of `rope_tables`; None where nothing rotates."""
    made: dict[LayerRotation, tuple[Array, Array]] = {}
    found = []
    for index in range(config.num_layers):
        kind = rotation(config, index)
        if kind is not None and kind not in made:
            made[kind] = rope_tables(config, positions, kind, rotations=rotations)
        found.append(None if kind is None else made[kind])
    return tuple(found)


def rotation(config: ModelConfig, index: int) -> LayerRotation | None:
    """The rotation of a layer; None if it has no rotary embedding."""
    spec = config.layer(index)
    if spec.mixer != "attention" or not spec.rotated:
        return None
    local = spec.window is not None and config.local_rope_theta is not None
    return LayerRotation(local, spec.heads)


def _exponents(dims: int) -> np.ndarray:
    return np.arange(0, dims, 2, dtype=np.float64) / dims


def _fixed(
    config: ModelConfig, scaling: RopeScaling, plain: np.ndarray
) -> tuple[np.ndarray, float]:
    """Frequencies [rotary_dim / 2] for rows of any length, and scale of cos, sin."""
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    original = scaling.original_length or config.max_length
    if scaling.kind == "llama3":
        return _llama3(plain, scaling, original), 1.0
    return _yarn(config, plain, scaling, original), _yarn_scale(scaling)


def _llama3(plain: np.ndarray, scaling: RopeScaling, original: int) -> np.ndarray:
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    rotations = original * plain / (2 * math.pi)
    # 0 for wavelengths beyond the original context, 1 for short wavelengths.
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn(
    config: ModelConfig, plain: np.ndarray, scaling: RopeScaling, original: int
) -> np.ndarray:
    def dim_of(rotations: float) -> float:
        """Fractional dim with `rotations` rotations over the original context."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return config.rotated_dims * turns / (2 * math.log(config.rope_theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotated_dims - 1)
    dims = np.arange(config.rotated_dims // 2, dtype=np.float64)
    # Equal bounds give a step; reversed bounds (context below 2 pi) change nothing.
    ramp = np.clip((dims - low) / ((high - low) or 1e-3), 0.0, 1.0)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


def _yarn_scale(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_mscale(scaling.factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Returns 0.1 weight ln(factor) + 1, or 1 for a factor of at most 1.

    >>> round(yarn_mscale(40.0, 1.0), 4)
    1.3689
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _row_lengths(positions: Int[Array, "*batch length"]) -> Int[Array, "*batch"]:
    return positions.max(axis=-1) + 1


def _dynamic(
    config: ModelConfig, scaling: RopeScaling, positions: Int[Array, "*batch length"]
) -> Float[Array, "*batch 1 half"]:
    """NTK-aware frequencies: the base grows for rows beyond the original context."""
    original = scaling.original_length or config.max_length
    length = jnp.maximum(_row_lengths(positions), original).astype(jnp.float32)
    growth = 1 + scaling.factor * (length - original) / original
    dim = config.rotated_dims
    base = config.rope_theta * growth ** (dim / (dim - 2))
    exponents = jnp.asarray(_exponents(dim).astype(np.float32))
    return (base[..., None] ** -exponents)[..., None, :]


def _longrope(
    config: ModelConfig,
    scaling: RopeScaling,
    plain: np.ndarray,
    positions: Int[Array, "*batch length"],
) -> Float[Array, "*batch 1 half"]:
    """Frequencies over short factors up to the original context, else long factors."""
    original = scaling.original_length or config.max_length
    short = jnp.asarray((plain / np.asarray(scaling.short_factors)).astype(np.float32))
    long = jnp.asarray((plain / np.asarray(scaling.long_factors)).astype(np.float32))
    beyond = _row_lengths(positions) > original
    return jnp.where(beyond[..., None], long, short)[..., None, :]


def _longrope_scale(config: ModelConfig, scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    original = scaling.original_length or config.max_length
    return math.sqrt(1 + math.log(scaling.factor) / math.log(original))
