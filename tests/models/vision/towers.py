"""Small random towers, and pictures for them."""

import dataclasses

import jax
import numpy as np

from jaxrl_post.models.spec import is_spec
from jaxrl_post.models.vision import VisionConfig, vision_specs
from jaxrl_post.models.vision_params import VisionParams

__all__ = ["CONFIGS", "drawn", "pictures_of"]

QWEN3 = VisionConfig(
    "qwen3_vl",
    hidden_size=32,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    out_hidden_size=8,
    patch_size=2,
    num_positions=16,
    levels=(0,),
)
# Windows of 2 x 2 tokens.
QWEN2_5 = dataclasses.replace(
    QWEN3,
    model_type="qwen2_5_vl",
    norm="rms",
    gated=True,
    activation="silu",
    patch_bias=False,
    num_positions=0,
    window_size=8,
    full_layers=(1,),
    levels=(),
)
CONFIGS = {"qwen2_5_vl": QWEN2_5, "qwen3_vl": QWEN3}


def drawn(config: VisionConfig, seed: int = 0) -> VisionParams:
    """Random parameters, norms and biases included; NumPy, so nothing is compiled."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda spec: 0.3 * rng.standard_normal(spec.shape).astype(np.float32),
        vision_specs(config),
        is_leaf=is_spec,
    )


def pictures_of(config: VisionConfig, *grids: tuple[int, int], seed: int = 0) -> list:
    """Random patches of pictures with these grids."""
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal((r * c, config.patch_width)).astype(np.float32), (r, c))
        for r, c in grids
    ]
