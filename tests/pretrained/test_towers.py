"""The configurations of vision towers; tests/parity/test_vision.py has the tensors."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_post.models.spec import is_spec
from jaxrl_post.models.vision import VisionConfig, vision_specs
from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.vision.towers import (
    TOWERS,
    vision_config_from_hf,
    vision_config_to_hf,
    vision_params_from_hf,
    vision_params_to_hf,
)

# As in config.json of Qwen2.5-VL-3B-Instruct and of Qwen3-VL-4B-Instruct.
QWEN2_5_3B = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}
QWEN3_4B = {
    "deepstack_visual_indexes": [5, 11, 17],
    "depth": 24,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1024,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "model_type": "qwen3_vl",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2560,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def size(config: VisionConfig) -> int:
    specs = jax.tree.leaves(vision_specs(config), is_leaf=is_spec)
    return sum(spec.size for spec in specs)


def test_qwen2_5_vl_as_released():
    config = vision_config_from_hf(QWEN2_5_3B, "qwen2_5_vl")
    assert config.window == 4
    assert config.head_dim == 80
    assert [i for i in range(32) if not config.windowed(i)] == [7, 15, 23, 31]
    assert config.tokens_per_second == 2
    # Without the last map, of the patches of a block to 2048.
    layer = 4 * 1280**2 + 4 * 1280 + 3 * 1280 * 3420 + 2 * 3420 + 1280 + 2 * 1280
    merger = 1280 + 5120**2 + 5120 + 5120 * 2048 + 2048
    assert size(config) == 1176 * 1280 + 32 * layer + merger


def test_qwen3_vl_as_released():
    config = vision_config_from_hf(QWEN3_4B)
    assert config.levels == (5, 11, 17)
    assert (config.side, config.window_size, config.gated) == (48, None, False)
    layer = 4 * 1024**2 + 4 * 1024 + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    merger = 4096**2 + 4096 + 4096 * 2560 + 2560
    patches = 1536 * 1024 + 1024 + 2304 * 1024
    norms = 2 * 1024 + 3 * 2 * 4096
    assert size(config) == patches + 24 * layer + 4 * merger + norms


@pytest.mark.parametrize("kind", TOWERS)
def test_defaults_are_those_of_transformers(kind):
    config = vision_config_from_hf({"model_type": f"{kind}_vision"})
    again = vision_config_from_hf({"model_type": kind})
    assert config == again
    assert config.out_hidden_size == 3584
    if kind == "qwen2_5_vl":
        assert (config.num_layers, config.hidden_size) == (32, 3584)
        assert config.full_layers == (7, 15, 23, 31)
    else:
        levels = (8, 16, 24) if kind.startswith("qwen3_vl") else ()
        assert (config.num_layers, config.hidden_size) == (27, 1152)
        assert config.levels == levels


@pytest.mark.parametrize("raw", [{**QWEN2_5_3B, "model_type": "qwen2_5_vl"}, QWEN3_4B])
def test_a_config_is_written_as_it_was(raw):
    written = vision_config_to_hf(vision_config_from_hf(raw))
    # Keys that transformers does not read either.
    kept = raw.keys() - {"in_chans", "spatial_patch_size"}
    assert {key: written[key] for key in kept} == {key: raw[key] for key in kept}
    assert ("deepstack_visual_indexes" in written) == (raw is QWEN3_4B)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "siglip"}, "model_type 'siglip' is not supported; known: qwen"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "relu"}, "hidden_act must be one of silu, gelu, gelu_py"),
        ({"depth": 0}, "depth must be at least 1; got 0"),
        ({"depth": 10}, "levels must be layers below 10"),
        ({"patch_size": [16, 16]}, "patch_size must be an integer"),
        ({"num_heads": 7}, "hidden_size must be a multiple of 4 x num_heads"),
        ({"num_position_embeddings": 2300}, "num_positions must be a square; got 2300"),
        ({"deepstack_visual_indexes": [5, "6"]}, "must be a list of integers"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'axial'"),
        (
            {"model_type": "qwen3_5", "deepstack_visual_indexes": [5]},
            "deepstack_visual_indexes must be empty for qwen3_5",
        ),
    ],
)
def test_other_towers_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        vision_config_from_hf({**QWEN3_4B, **change})


@pytest.mark.parametrize("kind", TOWERS)
def test_parameters_of_any_sizes_come_back(kind):
    """Sizes that are all different, so that no dims can change places unseen."""
    config = vision_config_from_hf({"model_type": kind})
    tiny = {"hidden_size": 24, "intermediate_size": 10, "num_layers": 3, "num_heads": 2}
    config = dataclasses.replace(
        config,
        **tiny,
        out_hidden_size=14,
        patch_size=4,
        window_size=None if config.window_size is None else 16,
        num_positions=9 if config.num_positions else 0,
        full_layers=(1,) if config.full_layers else (),
        levels=(0, 2) if config.levels else (),
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: rng.standard_normal(spec.shape).astype(np.float32),
        vision_specs(config),
        is_leaf=is_spec,
    )
    tensors = vision_params_to_hf(config, params)
    assert tensors["model.visual.patch_embed.proj.weight"].shape == (24, 3, 2, 4, 4)
    assert tensors["model.visual.blocks.2.attn.qkv.weight"].shape == (72, 24)
    again = vision_params_from_hf(config, tensors)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
    half = vision_params_from_hf(config, tensors, np.float16)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {np.dtype(np.float16)}
