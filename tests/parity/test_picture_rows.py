"""Rows with pictures, through whole models, against transformers in float32.

The fixtures were written by make_picture_rows.py.
"""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import pretrained
from jaxrl_post.models import forward, logits
from jaxrl_post.models.decoder import Execution
from jaxrl_post.models.vision import (
    PictureTokens,
    arrange,
    tower,
)
from jaxrl_post.pictures import Picture, PictureProcessor, number
from jaxrl_post.pictures.positions import PictureSpan, mrope_positions
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams

HERE = Path(__file__).parent
MODELS, ROWS = HERE / "fixtures", HERE / "vision_fixtures" / "rows"
NAMES = [
    "qwen2_5_vl", "qwen2_5_vl_tied", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
    "qwen3_5_moe",
]  # fmt: skip
TOLERANCE = 1e-4


@pytest.fixture(autouse=True, scope="module")
def folders(request):
    """Takes fresh fixtures, if `make parity` names them."""
    options = request.config.getoption
    fresh = options("--parity-fixtures", None), options("--vision-fixtures", None)
    global MODELS, ROWS
    MODELS = fresh[0] or MODELS
    ROWS = fresh[1] / "rows" if fresh[1] else ROWS
    load.cache_clear()


@functools.cache
def load(name):
    """Config, parameters, and what transformers computes."""
    config, params = pretrained.load(MODELS / name, dtype=jnp.float32, vision=True)
    with np.load(ROWS / f"{name}.npz") as stored:
        return config, params, dict(stored)


def illustrated(config, params, tokens, pixels, grids, *, bucket=None):
    """`PictureTokens` of rows; pictures stand in the order of tokens."""
    grids = [(int(rows), int(columns)) for rows, columns in grids]
    ends = np.cumsum([rows * columns for rows, columns in grids])
    found = list(zip(np.split(pixels, ends[:-1]), grids, strict=True))
    arranged = arrange(config.vision.tower, found, patches=bucket)
    output = tower(params.vision, config.vision.tower, arranged)
    merge, each = config.vision.tower.merge_size, output.embeddings.shape[1]
    places = np.full(tokens.shape, -1, np.int32)
    rotations = np.zeros((*tokens.shape, 3), np.int32)
    numbers = itertools.count()
    for row, ids in enumerate(tokens):
        images = np.flatnonzero(ids == config.vision.image_token)
        spans, at = [], 0
        while at < len(images):
            number = next(numbers)
            grid = grids[number]
            size = grid[0] * grid[1] // merge**2
            spans.append(PictureSpan(int(images[at]), grid))
            places[row, images[at : at + size]] = number * each + np.arange(size)
            at += size
        rotations[row] = mrope_positions(len(ids), spans, merge).T
    return PictureTokens(
        jnp.asarray(tokens), jnp.asarray(rotations), jnp.asarray(places), output
    )


def rows_of(name, **options):
    config, params, found = load(name)
    arrays = found["tokens"], found["pixels"], found["grids"]
    return config, params, illustrated(config, params, *arrays, **options)


def score(config, params, rows, **options):
    return np.asarray(logits(params, config, forward(params, config, rows, **options)))


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name):
    expected = load(name)[2]["logits"]
    found = score(*rows_of(name))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(
    "execution", [Execution(scan=True), Execution(remat="full")], ids=str
)
def test_how_it_is_executed_changes_nothing(name, execution):
    expected = score(*rows_of(name))
    found = score(*rows_of(name, bucket=128), execution=execution)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_rows_of_text_need_no_tower(name):
    config, params, found = load(name)
    tokens = jnp.asarray(np.where(found["tokens"] > 60, 5, found["tokens"]))
    text = dataclasses.replace(config, vision=None)
    blind = params.replace(vision=None)
    np.testing.assert_array_equal(
        score(config, params, tokens), score(text, blind, tokens)
    )


def test_gradients_reach_the_tower_through_embeddings_and_levels():
    config, params, found = load("qwen3_vl")
    arrays = found["tokens"], found["pixels"], found["grids"]

    def loss(params):
        rows = illustrated(config, params, *arrays)
        return jnp.square(forward(params, config, rows)).sum()

    grads = jax.grad(loss)(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads.vision))


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_model_survives_its_files(name, tmp_path):
    config, params, _ = load(name)
    pretrained.save(tmp_path / "again", config, params)
    same, values = pretrained.load(tmp_path / "again", vision=True)
    assert same == config
    jax.tree.map(np.testing.assert_array_equal, values, params)


@pytest.mark.parametrize("name", NAMES)
def test_samples_equal_the_greedy_ones_of_transformers(name, monkeypatch):
    config, params, found = load(name)
    tower = config.vision.tower
    processor = PictureProcessor(
        patch_size=tower.patch_size, merge_size=tower.merge_size, min_pixels=1
    )
    grids = [tuple(map(int, grid)) for grid in found["grids"]]
    ends = np.cumsum([rows * columns for rows, columns in grids])
    patches = np.split(found["pixels"], ends[:-1])
    # The fixtures have patches; pictures of other colours stand for them.
    pictures = [
        number(
            np.full((rows * tower.patch_size, columns * tower.patch_size, 3), i, "u1"),
            processor,
        )
        for i, (rows, columns) in enumerate(grids)
    ]
    of = {each.first: own for each, own in zip(pictures, patches, strict=True)}
    monkeypatch.setattr(Picture, "patches", lambda self: of[self.first])
    monkeypatch.setattr(PictureProcessor, "scaling", None)
    row = found["tokens"][0].tolist()
    starts = [i for i, (a, b) in enumerate(itertools.pairwise([0, *row]), 0)
              if b == config.vision.image_token != a]  # fmt: skip
    for picture, start in zip(pictures, starts, strict=False):
        row[start : start + picture.num_tokens] = picture.ids
    greedy = SamplingParams(temperature=0.0, max_tokens=len(found["greedy"]))
    sizes = EngineConfig(num_slots=8, max_prompt_tokens=32, max_tokens=16)
    (done,) = Engine(config, sizes).generate(
        params, [Request(1, tuple(row), sampling=greedy)]
    )
    assert done.tokens.ids.tolist() == found["greedy"].tolist()
