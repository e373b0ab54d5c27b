"""Weights that are likely to be damaged are named as they are loaded."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_post import pretrained
from jaxrl_post.pretrained import CheckpointWarning
from tests import tiny
from tests.pretrained.checkpoints import edit_tensors

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint in one file."""
    folder = tmp_path_factory.mktemp("health") / "m"
    pretrained.save(folder, tiny.CONFIG, tiny.shared())
    return folder


@pytest.fixture
def saved(tmp_path, source):
    """A copy of it."""
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def put(saved, value, dtype):
    """Makes a number the last one of a matrix, in another dtype."""

    def edit(tensors):
        tensors[NAME] = tensors[NAME].astype(dtype)
        tensors[NAME][-1, -1] = value

    edit_tensors(saved, edit)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_one_number_that_is_none_is_named(saved, value, dtype):
    put(saved, value, dtype)
    with pytest.warns(
        CheckpointWarning,
        match=r"tensors hold NaN or infinity: model\.layers\.1\.mlp\.up_proj\.weight, "
        r"in model\.safetensors; the files are damaged",
    ):
        pretrained.load(saved)


@pytest.mark.parametrize(
    ("value", "dtype"), [(1e38, "float32"), (-1e17, "float32"), (1e30, "float64")]
)
def test_a_number_whose_squares_overflow_is_named(saved, value, dtype):
    put(saved, value, dtype)
    with pytest.warns(
        CheckpointWarning,
        match=r"tensors hold numbers beyond 7e\+16, whose sums of squares overflow: "
        r"model\.layers\.1\.mlp\.up_proj\.weight, in model\.safetensors",
    ):
        pretrained.load(saved)


@pytest.mark.parametrize(
    ("value", "dtype"), [(1e16, "float32"), (65504, "float16"), (-1e16, "float64")]
)
def test_a_large_number_that_is_none_of_those_is_right(saved, value, dtype):
    put(saved, value, dtype)
    pretrained.load(saved)


def test_matrices_of_zeros_are_named(saved):
    def damage(tensors):
        tensors[NAME][:] = 0
        tensors["model.embed_tokens.weight"][:] = -0.0
        # Where a norm multiplies by 1 + weight, all zeros is how it begins.
        tensors["model.norm.weight"][:] = 0

    edit_tensors(saved, damage)
    with pytest.warns(
        CheckpointWarning,
        match=r"nothing but zeros: model\.embed_tokens\.weight, model\.layers\.1\.mlp\."
        r"up_proj\.weight, in",
    ):
        pretrained.load(saved)


def test_a_matrix_with_one_number_is_no_matrix_of_zeros(saved):
    def thin(tensors):
        tensors[NAME][:] = 0
        tensors[NAME][0, 0] = 1e-6

    edit_tensors(saved, thin)
    pretrained.load(saved)


def test_arrays_of_orbax_are_looked_at_too(tmp_path):
    params = tiny.shared()
    damaged = params.embedding.at[3, 1].set(np.nan)
    damaged = params.replace(embedding=damaged)
    pretrained.save(tmp_path / "o", tiny.CONFIG, damaged, weights_format="orbax")
    with pytest.warns(CheckpointWarning, match=r"infinity: embedding, in params"):
        pretrained.load(tmp_path / "o")


def test_a_new_value_head_of_zeros_is_as_it_should_be(tmp_path, source):
    config, params = pretrained.load(source, head="value")
    pretrained.save(tmp_path / "critic", config, params)
    assert not np.asarray(pretrained.load(tmp_path / "critic")[1].value_head).any()


def test_a_tensor_in_two_files_is_named(tmp_path):
    """The index says which one counts."""
    config = dataclasses.replace(tiny.CONFIG, num_layers=2)
    folder = tmp_path / "m"
    pretrained.save(folder, config, tiny.shared(), max_file_bytes=12_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.embed_tokens.weight"]
    other = max(set(index["weight_map"].values()) - {file})
    tensors = load_file(folder / other)
    shape = tiny.shared().embedding.shape
    tensors["model.embed_tokens.weight"] = np.ones(shape, np.float32)
    save_file(tensors, folder / other)
    with pytest.warns(
        CheckpointWarning, match=r"several files hold .*: model\.embed_tokens\.weight; "
    ):
        params = pretrained.load(folder)[1]
    np.testing.assert_array_equal(params.embedding, tiny.shared().embedding)
