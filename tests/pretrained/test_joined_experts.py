"""Experts that share a tensor, read one by one."""

from pathlib import Path

import numpy as np
import pytest

from jaxrl_post.pretrained import CheckpointError
from jaxrl_post.pretrained.families import FAMILIES
from jaxrl_post.pretrained.joined_experts import split_experts
from jaxrl_post.pretrained.tensor_files import Tensor

WEIGHTS = FAMILIES["qwen3_moe"].weights
STEM = "model.layers.0.mlp.experts"
NAMES = f"{STEM}.gate_up_proj", f"{STEM}.down_proj"
COUNT, HIDDEN, WIDTH = 3, 8, 4


def tensors(*arrays):
    def of(array):
        return Tensor(Path("file"), array.shape, "F32", lambda region: array[region])

    return {name: of(array) for name, array in zip(NAMES, arrays, strict=True)}


@pytest.mark.parametrize("turned", [False, True])
def test_a_region_of_each_matrix_is_that_of_the_joined_tensor(turned):
    """HIDDEN is 2 WIDTH: one tensor alone would not tell the layout."""
    rng = np.random.default_rng(0)
    joined = rng.standard_normal((COUNT, 2 * WIDTH, HIDDEN))
    down = rng.standard_normal((COUNT, HIDDEN, WIDTH))
    stored = [array.swapaxes(1, 2) if turned else array for array in (joined, down)]
    found = split_experts(tensors(*stored), WEIGHTS)
    assert len(found) == 3 * COUNT
    region = slice(1, 3), slice(2, 4)
    for expert in range(COUNT):
        parts = joined[expert, :WIDTH], joined[expert, WIDTH:], down[expert]
        for part, matrix in zip(("gate", "up", "down"), parts, strict=True):
            tensor = found[f"{STEM}.{expert}.{part}_proj.weight"]
            assert tensor.shape == matrix.shape
            np.testing.assert_array_equal(tensor.fetch(region), matrix[region])


def test_other_shapes_are_refused_and_other_families_left_alone():
    wrong = tensors(np.zeros((3, 8, 8)), np.zeros((3, 8, 5)))
    with pytest.raises(CheckpointError, match=r"gate_up_proj and down_proj must be"):
        split_experts(wrong, WEIGHTS)
    assert split_experts(wrong, FAMILIES["gpt_oss"].weights) == wrong
