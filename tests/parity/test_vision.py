"""Pictures and vision towers against transformers, in float32.

The fixtures were written by make_vision_fixtures.py.
"""

import functools
import io
import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_post.models.rope import apply_rope
from jaxrl_post.models.vision import (
    arrange,
    mrope_axes,
    tower,
)
from jaxrl_post.pictures import PictureProcessor, read_picture
from jaxrl_post.pictures.positions import PictureSpan, mrope_positions
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.vision.towers import (
    vision_config_from_hf,
    vision_config_to_hf,
    vision_params_from_hf,
    vision_params_to_hf,
)

TOLERANCE = 1e-4
KINDS = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]


@functools.cache
def load(folder):
    """Config, tensors, parameters, pictures, and what transformers computes."""
    raw = json.loads((folder / "config.json").read_text())
    config = vision_config_from_hf(raw["vision_config"])
    tensors = load_file(folder / "model.safetensors")
    params = jax.tree.map(jnp.asarray, vision_params_from_hf(config, tensors))
    with np.load(folder / "expected.npz") as stored:
        expected = dict(stored)
    ends = np.cumsum([rows * columns for rows, columns in expected["grids"]])
    grids = [(int(rows), int(columns)) for rows, columns in expected["grids"]]
    parts = np.split(expected["pixels"], ends[:-1])
    return config, tensors, params, list(zip(parts, grids, strict=True)), expected


def computed(params, config, arranged, counts):
    """Embeddings and levels of all pictures, one after the other."""
    output = tower(params, config, arranged)
    return [
        jnp.concatenate([each[i, :count] for i, count in enumerate(counts)])
        for each in (output.embeddings, *output.levels)
    ]


def gap(left, right) -> float:
    return float(np.abs(np.asarray(left) - np.asarray(right)).max())


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_levels_and_gradients_equal_those_of_transformers(
    kind, vision_fixtures
):
    config, _, params, parts, expected = load(vision_fixtures / kind)
    counts = [rows * columns // config.merge_size**2 for _, (rows, columns) in parts]
    arranged = arrange(config, parts)
    wanted = [expected["embeddings"], *expected["levels"]]

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        found = computed(params, config, arranged, counts)
        terms = zip(found, expected["factors"], strict=True)
        return sum((each * factor).sum() for each, factor in terms), found

    (_, found), gradients = loss(params)
    assert len(found) == len(wanted) == 1 + len(config.levels)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == np.float32
        assert gap(ours, theirs) < TOLERANCE
    ours = vision_params_to_hf(config, gradients)
    with np.load(vision_fixtures / kind / "gradients.npz") as stored:
        theirs = {name.removeprefix("gradient."): stored[name] for name in stored}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gap(gradient, theirs[name]) < TOLERANCE, name
        # Nothing is compared that has no gradient.
        assert np.abs(theirs[name]).max() > 1e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_and_configs_come_back_as_they_were(kind, vision_fixtures):
    config, tensors, params, _, _ = load(vision_fixtures / kind)
    saved = vision_params_to_hf(config, params)
    assert saved.keys() == tensors.keys()
    assert all(np.array_equal(saved[name], tensors[name]) for name in tensors)
    older = {name.removeprefix("model."): value for name, value in tensors.items()}
    again = vision_params_from_hf(config, older)
    assert jax.tree.all(jax.tree.map(np.array_equal, again, params))
    assert vision_config_from_hf(vision_config_to_hf(config)) == config
    raw = json.loads((vision_fixtures / kind / "config.json").read_text())
    theirs = raw["vision_config"]
    written = vision_config_to_hf(config)
    # transformers 5 writes the tower's own type, and reads both.
    assert written.pop("model_type") == theirs["model_type"].removesuffix("_vision")
    rope = written.pop("rope_parameters")
    assert rope == theirs.get("rope_parameters", rope)
    assert written == {name: theirs[name] for name in written}


def test_tensors_that_do_not_fit_are_refused(vision_fixtures):
    config, tensors, _, _, _ = load(vision_fixtures / "qwen3_vl")
    name = "model.visual.merger.norm.weight"
    missing = {key: value for key, value in tensors.items() if key != name}
    with pytest.raises(CheckpointError, match=rf"missing tensors: {name}"):
        vision_params_from_hf(config, missing)
    with pytest.raises(CheckpointError, match=r"unknown tensors: .*deepstack"):
        vision_params_from_hf(replace(config, levels=(0,)), tensors)
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(3,\), but"):
        vision_params_from_hf(config, {**tensors, name: np.zeros(3, np.float32)})
    text = {**tensors, "model.language_model.norm.weight": np.zeros(3, np.float32)}
    vision_params_from_hf(config, text)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_and_rotations_equal_those_of_transformers(kind, vision_fixtures):
    with np.load(vision_fixtures / kind / "positions.npz") as stored:
        case = dict(stored)
    rope = json.loads(case["rope"].tobytes())
    axes = mrope_axes(rope["sections"], interleaved=kind != "qwen2_5_vl")
    frequencies = rope["rope_theta"] ** (-np.arange(len(axes)) / len(axes))
    seen = set()
    for row in itertools.count():
        if f"types.{row}" not in case:
            break
        types, expected = case[f"types.{row}"], case[f"positions.{row}"]
        spans, place = [], 0
        for rows, columns in case[f"grids.{row}"].tolist():
            start = place + int(np.argmax(types[place:]))
            spans.append(PictureSpan(start, (rows, columns)))
            place = start + rows * columns // 4
        found = mrope_positions(len(types), spans, merge=2)
        assert np.array_equal(found, expected)
        assert found.max() + 1 - len(types) == case[f"delta.{row}"]
        angles = found[axes].T * frequencies
        cosines, sines = case[f"cosines.{row}"], case[f"sines.{row}"]
        assert cosines.shape == (len(types), 2 * len(axes))
        assert gap(np.tile(np.cos(angles), 2), cosines) < 1e-5
        assert gap(np.tile(np.sin(angles), 2), sines) < 1e-5
        seen.add(len(spans))
    assert seen == {0, 1, 2, 3}


def test_angles_by_axis_rotate_as_the_decoder_rotates():
    """Text has one position on all axes, so its rotation is the decoder's."""
    axes = mrope_axes([4, 2, 2], interleaved=True)
    positions = mrope_positions(5, [], merge=2)
    frequencies = np.float32(1e4) ** (-np.arange(8, dtype=np.float32) / 8)
    angles = positions[axes].T.astype(np.float32) * frequencies
    plain = np.arange(5, dtype=np.float32)[:, None] * frequencies
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 16)), np.float32)
    turned = [
        apply_rope(x, jnp.cos(each)[None], jnp.sin(each)[None])
        for each in (jnp.asarray(angles), jnp.asarray(plain))
    ]
    assert np.array_equal(*turned)


# Pillow 13 resizes these along columns first, older versions along rows as all others.
COLUMNS_FIRST = {(100, 3), (65, 43)}


@pytest.mark.parametrize("name", ["small", "qwen2_5_vl", "qwen3_vl"])
def test_patches_equal_those_of_transformers(name, vision_fixtures):
    folder = vision_fixtures / "pictures"
    processor = PictureProcessor.from_file(folder / f"{name}.json")
    with np.load(folder / f"{name}.npz") as stored:
        case = dict(stored)
    level = 1 / 255 / min(processor.std)
    for index in range(len(case) // 4):
        picture, grid = case[f"picture.{index}"], tuple(case[f"grid.{index}"].tolist())
        size = picture.shape[:2]
        assert processor.grid(*size) == grid
        found = processor.patches(picture)
        assert found.dtype == np.float32
        assert found.shape == (grid[0] * grid[1], processor.width)
        same = np.array_equal(found, case[f"patches.{index}"])
        assert same or size in COLUMNS_FIRST
        # The torchvision processor rounds a few values to the next level of 255.
        off = np.abs(found - case[f"torchvision.{index}"])
        assert off.max() < 1.01 * level
        assert off.mean() < 0.02 * level


def test_files_are_read_as_transformers_reads_them(vision_fixtures):
    with np.load(vision_fixtures / "pictures" / "modes.npz") as stored:
        case = dict(stored)
    names = [name.removeprefix("file ") for name in case if name.startswith("file ")]
    assert len(names) > 20
    for name in names:
        found = read_picture(case[f"file {name}"].tobytes())
        assert np.array_equal(found, case[f"pixels {name}"]), name


def test_files_of_fixtures_are_what_their_names_say(vision_fixtures):
    from PIL import Image

    with np.load(vision_fixtures / "pictures" / "modes.npz") as stored:
        for name in ("1", "L", "LA", "P", "RGB", "RGBA"):
            data = stored[f"file {name}.png"].tobytes()
            assert Image.open(io.BytesIO(data)).mode == name
