"""Rotary position embeddings and their scaling kinds."""

import math

import jax.numpy as jnp
import numpy as np

from jaxrl_post.models.config import ModelConfig, RopeScaling
from jaxrl_post.types import Array, Float, Int

__all__ = ["apply_rope", "rope_tables"]


def rope_tables(
    config: ModelConfig, positions: Int[Array, "*batch length"]
) -> tuple[Float[Array, "*batch length half"], Float[Array, "*batch length half"]]:
    """Cosines and sines of every position's rotation angles, float32.

    Args:
        config: gives head_dim, base and scaling.
        positions: int32 positions; rows are treated one by one.

    References:
        Su et al., RoFormer, arXiv:2104.09864.
    """
    frequencies, scale = _frequencies(config)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        angles = _dynamic_angles(config, scaling, positions)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(
    x: Float[Array, "batch length heads head_dim"],
    cos: Float[Array, "batch length half"],
    sin: Float[Array, "batch length half"],
) -> Float[Array, "batch length heads head_dim"]:
    """Rotates the first half of each head against the second, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _plain(config: ModelConfig) -> np.ndarray:
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    return config.rope_theta**-exponents


def _frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies [head_dim / 2] and the scale of cos and sin."""
    plain, scaling = _plain(config), config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return plain.astype(np.float32), 1.0
    if scaling.kind == "linear":
        return (plain / scaling.factor).astype(np.float32), 1.0
    original = scaling.original_length or config.max_length
    if scaling.kind == "llama3":
        return _llama3(plain, scaling, original).astype(np.float32), 1.0
    frequencies = _yarn(config, plain, scaling, original)
    return frequencies.astype(np.float32), _yarn_scale(scaling)


def _llama3(plain: np.ndarray, scaling: RopeScaling, original: int) -> np.ndarray:
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    rotations = original * plain / (2 * math.pi)
    # 0 where the wavelength exceeds the original context, 1 where it is short.
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn(
    config: ModelConfig, plain: np.ndarray, scaling: RopeScaling, original: int
) -> np.ndarray:
    def dim_of(rotations: float) -> float:
        """The (fractional) dim that turns `rotations` times over the context."""
        turns = math.log(original / (rotations * 2 * math.pi))
        return config.head_dim * turns / (2 * math.log(config.rope_theta))

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    dims = np.arange(config.head_dim // 2, dtype=np.float64)
    # Equal bounds are a step; reversed ones (a context below 2 pi) leave all as it is.
    ramp = np.clip((dims - low) / ((high - low) or 1e-3), 0.0, 1.0)
    return plain * (1 - ramp) + plain / scaling.factor * ramp


def _yarn_scale(scaling: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        if scaling.factor <= 1:
            return 1.0
        return 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _dynamic_angles(
    config: ModelConfig, scaling: RopeScaling, positions: Int[Array, "*batch length"]
) -> Float[Array, "*batch length half"]:
    """NTK-aware: the base grows once a row is longer than the original context."""
    original = scaling.original_length or config.max_length
    length = jnp.maximum(positions.max(axis=-1) + 1, original).astype(jnp.float32)
    growth = scaling.factor * length / original - (scaling.factor - 1)
    base = config.rope_theta * growth ** (config.head_dim / (config.head_dim - 2))
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = base[..., None] ** -jnp.asarray(exponents)
    return positions[..., None].astype(jnp.float32) * frequencies[..., None, :]
