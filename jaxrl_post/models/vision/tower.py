"""The vision tower: from the patches of pictures to embeddings."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl_post.models.layers import add_bias, project, to_heads
from jaxrl_post.models.rope import apply_rope
from jaxrl_post.models.vision.attention import full_attention, window_attention
from jaxrl_post.models.vision.pictures import Pictures
from jaxrl_post.models.vision_config import VisionConfig
from jaxrl_post.models.vision_params import (
    MergerParams,
    VisionLayerParams,
    VisionNormParams,
    VisionParams,
)
from jaxrl_post.sharding import DEFAULT_RULES, Rules, constrain
from jaxrl_post.types import Array, Float

__all__ = ["VisionOutput", "VisionRemat", "tower"]

# Activations of a layer that are kept for the backward pass: all, or its input alone.
VisionRemat = Literal["none", "full"]

HEAD_AXES = ("batch", "length", "tower_heads", "head_dim")


@struct.dataclass
class VisionOutput:
    """Embeddings of pictures; 0 in padding.

    Attributes:
        embeddings: they take the place of the embeddings of image tokens. A picture's
            tokens come first, in the order of rows.
        levels: one array for each of the config's levels; the i-th is added to the
            hidden states of the image tokens after the decoder's layer i.
    """

    embeddings: Float[Array, "pictures tokens out_hidden"]
    levels: tuple[Float[Array, "pictures tokens out_hidden"], ...] = ()


def tower(
    params: VisionParams[Array],
    config: VisionConfig,
    pictures: Pictures,
    *,
    rules: Rules = DEFAULT_RULES,
    remat: VisionRemat = "none",
) -> VisionOutput:
    """Maps pictures to embeddings of the language model.

    Pictures do not see one another, and padding changes neither values nor gradients.

    Args:
        params: parameters in the compute dtype.
        config: of the tower, static under jit.
        pictures: from `arrange`.
        rules: sharding of activations under the mesh of `jax.set_mesh`, if any:
            pictures as the batch, heads and the MLP's width as the decoder's.
        remat: activations that are kept for the backward pass.

    Returns:
        Embeddings in the parameters' dtype.
    """
    pictures = jax.tree.map(jnp.asarray, pictures)
    shape = pictures.pixels.shape[:2]
    valid = jnp.arange(shape[1], dtype=jnp.int32) < pictures.counts[:, None]
    hidden = _embedded(params, config, pictures, valid, rules)
    tables = _rotation(config, pictures)
    levels = []
    for index, layer in enumerate(params.layers):
        step = functools.partial(_layer, config, config.windowed(index), rules)
        if remat == "full":
            step = jax.checkpoint(step)
        hidden = step(layer, hidden, pictures, tables)
        if index in config.levels:
            merger = params.levels[config.levels.index(index)]
            levels.append(_merged(config, merger, hidden, pictures, rules))
    embeddings = _merged(config, params.merger, hidden, pictures, rules)
    return VisionOutput(embeddings, tuple(levels))


def _embedded(
    params: VisionParams[Array],
    config: VisionConfig,
    pictures: Pictures,
    valid: Array,
    rules: Rules,
) -> Float[Array, "flat hidden"]:
    """Projects patches, and adds the learned positions, if any."""
    dtype = params.patch.dtype
    pixels = pictures.pixels
    if pictures.scaling is not None:
        pixels = _normalized(config, pixels, pictures.scaling)
    pixels = jnp.where(valid[..., None], pixels, 0).astype(dtype)
    pixels = pixels.reshape(-1, config.patch_width)
    hidden = project(pixels, params.patch.reshape(config.patch_width, -1))
    if params.patch_bias is not None:
        hidden = add_bias(hidden, params.patch_bias)
    if params.positions is not None:
        assert pictures.corners is not None
        assert pictures.weights is not None
        # float32, so that the gradients of an entry are summed in float32. Every device
        # looks up its own pictures' entries in the whole grid.
        grid = constrain(params.positions.astype(jnp.float32), (None, None), rules)
        learned = jnp.zeros(hidden.shape, jnp.float32)
        for corner in range(4):
            entries = grid[pictures.corners[..., corner].reshape(-1)]
            learned += entries * pictures.weights[..., corner].reshape(-1, 1)
        hidden = hidden + learned.astype(dtype)
    return constrain(hidden, ("batch", "hidden"), rules)


def _normalized(
    config: VisionConfig, pixels: Array, scaling: Array
) -> Float[Array, "pictures patches width"]:
    """Patches of one frame as float32, normalized and repeated for each frame."""
    count, patches, _ = pixels.shape
    split = pixels.astype(jnp.float32).reshape(count, patches, config.channels, 1, -1)
    factor, added = (scaling[:, None, :, i, None, None] for i in range(2))
    frames = jnp.repeat(split * factor + added, config.temporal_patch_size, axis=3)
    return frames.reshape(count, patches, config.patch_width)


def _rotation(config: VisionConfig, pictures: Pictures) -> tuple[Array, Array]:
    """Cosines and sines: the first quarter of a head by row, the next by column."""
    half = config.head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float64) / half
    frequencies = jnp.asarray((config.rope_theta**-exponents).astype(np.float32))
    angles = jnp.concatenate(
        [
            places[..., None].astype(jnp.float32) * frequencies
            for places in (pictures.rows, pictures.columns)
        ],
        axis=-1,
    )
    return jnp.cos(angles), jnp.sin(angles)


def _layer(
    config: VisionConfig,
    windowed: bool,
    rules: Rules,
    params: VisionLayerParams[Array],
    hidden: Float[Array, "flat hidden"],
    pictures: Pictures,
    tables: tuple[Array, Array],
) -> Float[Array, "flat hidden"]:
    """Runs one layer: attention, then the MLP."""

    def add(hidden: Array, branch: Array) -> Array:
        return constrain(hidden + branch, ("batch", "hidden"), rules)

    x = _norm(config, params.attention_norm, hidden)
    attended = _attention(config, windowed, rules, params, x, pictures, tables)
    hidden = add(hidden, attended)
    x = _norm(config, params.mlp_norm, hidden)
    inner = project(x, params.up, params.up_bias)
    if params.gate is None:
        inner = _activation(config, inner)
    else:
        inner = inner * _activation(config, project(x, params.gate, params.gate_bias))
    inner = constrain(inner, ("batch", "tower_ffn"), rules)
    return add(hidden, project(inner, params.down, params.down_bias))


def _attention(
    config: VisionConfig,
    windowed: bool,
    rules: Rules,
    params: VisionLayerParams[Array],
    x: Float[Array, "flat hidden"],
    pictures: Pictures,
    tables: tuple[Array, Array],
) -> Float[Array, "flat hidden"]:
    shape = pictures.rows.shape
    query, key, value = (
        constrain(to_heads(x, weight, bias, shape), HEAD_AXES, rules)
        for weight, bias in (
            (params.query, params.query_bias),
            (params.key, params.key_bias),
            (params.value, params.value_bias),
        )
    )
    query, key = apply_rope(query, *tables), apply_rope(key, *tables)
    if windowed:
        assert pictures.windows is not None
        size = (config.window * config.merge_size) ** 2
        found = window_attention(query, key, value, pictures.windows, size)
    else:
        found = full_attention(query, key, value, pictures.counts)
    found = constrain(found, HEAD_AXES, rules).reshape(x.shape[0], -1)
    return project(found, params.output, params.output_bias, inputs=2)


def _merged(
    config: VisionConfig,
    params: MergerParams[Array],
    hidden: Float[Array, "flat hidden"],
    pictures: Pictures,
    rules: Rules,
) -> Float[Array, "pictures tokens out_hidden"]:
    """Joins the patches of each block and projects them; tokens in order of rows."""
    if params.norm.weight.shape[0] == config.hidden_size:
        hidden = _norm(config, params.norm, hidden)
        joined = hidden.reshape(-1, config.merged_size)
    else:
        joined = hidden.reshape(-1, config.merged_size)
        joined = _norm(config, params.norm, joined)
    inner = project(joined, params.up, params.up_bias)
    inner = constrain(
        jax.nn.gelu(inner, approximate=False), ("batch", "tower_ffn"), rules
    )
    found = project(inner, params.down, params.down_bias)
    found = found.reshape(pictures.pixels.shape[0], -1, config.out_hidden_size)
    if pictures.order is not None:
        found = jnp.take_along_axis(found, pictures.order[..., None], axis=1)
    tokens = jnp.arange(found.shape[1], dtype=jnp.int32) * config.merge_size**2
    found = jnp.where((tokens < pictures.counts[:, None])[..., None], found, 0)
    return constrain(found, ("batch", "length", "hidden"), rules)


def _norm(
    config: VisionConfig,
    params: VisionNormParams[Array],
    x: Float[Array, "... width"],
) -> Float[Array, "... width"]:
    """RMSNorm, or LayerNorm if it has a bias, in float32 (arXiv:1607.06450)."""
    wide = x.astype(jnp.float32)
    if params.bias is not None:
        wide = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(wide).mean(axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(variance + config.norm_eps)
    normed = normed * params.weight.astype(jnp.float32)
    if params.bias is not None:
        normed = normed + params.bias.astype(jnp.float32)
    return normed.astype(x.dtype)


def _activation(config: VisionConfig, x: Array) -> Array:
    if config.activation == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=config.activation == "gelu_tanh")
