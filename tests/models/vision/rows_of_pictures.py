"""Tiny models that see, and pictures for them."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxrl_post import pretrained
from jaxrl_post.pictures import PictureProcessor, number

FIXTURES = Path(__file__).parents[2] / "parity" / "fixtures"
NAMES = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]


@functools.cache
def seeing(name):
    """Config and parameters of a model with its tower."""
    return pretrained.load(FIXTURES / name, dtype=jnp.float32, vision=True)


def processor_of(config):
    tower = config.vision.tower
    return PictureProcessor(
        patch_size=tower.patch_size,
        merge_size=tower.merge_size,
        temporal_patch_size=tower.temporal_patch_size,
        min_pixels=1,
    )


@functools.cache
def drawn(config, rows, columns, seed):
    """A picture of noise, of so many tokens a side."""
    processor = processor_of(config)
    shape = rows * processor.block, columns * processor.block, 3
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return number(pixels, processor)
