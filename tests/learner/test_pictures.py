"""Training on rows with pictures: meshes, trees, gradients, frozen towers."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_post.algorithms import Objective
from jaxrl_post.data.packing import Sequence, pack, trees
from jaxrl_post.learner.learner import Scorer, check_same_batch
from jaxrl_post.learner.step import (
    Policy,
    SeeingPolicy,
    accumulate,
    empty_accumulator,
    predict,
)
from jaxrl_post.metrics import masked
from jaxrl_post.models.vision import RowPictures, for_devices
from jaxrl_post.sharding import create_mesh
from jaxrl_post.tokens import Tokens
from tests.models.vision.rows_of_pictures import drawn, seeing
from tests.tiers import daily

NAMES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]
TOLERANCE = 3e-5


def sequences(config):
    """Two answers to a prompt with two pictures, one to another, one to text."""
    one, two = drawn(config, 2, 3, 0), drawn(config, 3, 2, 1)
    prompt = (5, 6, *one.ids, 7, 8, *two.ids, 9)
    return [
        Sequence.of(prompt, [10, 11, 12], advantage=1.0),
        Sequence.of(prompt, [10, 13], advantage=-1.0),
        Sequence.of((5, *two.ids, 7), [14, 15], advantage=0.5),
        Sequence.of((5, 6, 7), [16, 17, 18, 19], advantage=0.5),
    ]


def by_sequence(batch, array):
    """Values of trained tokens, by token id and the row's advantage."""
    mask = batch.loss_mask
    keys = zip(
        batch.tokens[mask].tolist(), batch.advantages[mask].tolist(), strict=True
    )
    return dict(zip(keys, array[mask].tolist(), strict=True))


def predicted(config, params, batch, spec="dp1", devices=1):
    mesh = create_mesh(spec, jax.devices()[:devices])
    rows = batch.shape[0]
    with jax.set_mesh(mesh):
        return Scorer(Policy(config), mesh, rows).predict(params, batch).logprobs


def weighted(predictions, batch):
    return Objective(
        masked(predictions.logprobs * batch.advantages, batch.loss_mask), {}
    )


def gradient(policy, params, batch):
    empty = empty_accumulator(policy, weighted, params, batch)
    step = jax.jit(lambda *inputs: accumulate(policy, weighted, *inputs))
    return step(params, empty, batch).grads


@pytest.mark.parametrize("name", NAMES)
def test_trees_give_what_rows_alone_give(name):
    config, params = seeing(name)
    alone = pack(sequences(config), 24, 1)
    tree = pack(trees(sequences(config)), 64, 1)
    assert alone.shape[0] > tree.shape[0] == 1
    found = by_sequence(tree, predicted(config, params, tree))
    expected = by_sequence(alone, predicted(config, params, alone))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, atol=TOLERANCE)
    ours, theirs = (
        gradient(
            Policy(config, remat=remat, scan=scan), params, for_devices(batch, config)
        )
        for batch, remat, scan in ((alone, "none", False), (tree, "full", True))
    )
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(ours))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * scale)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(ours.vision)) > 0


@pytest.mark.parametrize(
    ("spec", "devices"),
    daily(
        [
            ("dp2", 2),
            ("fsdp2", 2),
            ("tp2", 2),
            ("dp2,tp2", 4),
            ("cp2", 2),
            ("pp2,dp2", 4),
            ("pp2,tp2", 4),
        ],
        {("dp2,tp2", 4), ("cp2", 2), ("pp2,tp2", 4)},
    ),
)
def test_meshes_change_nothing(spec, devices):
    config, params = seeing("qwen3_vl")
    # Stages take the layers without a level of pictures.
    config = dataclasses.replace(config, num_layers=6, layers=config.layers * 3)
    params = params.replace(layers=params.layers * 3)
    batch = pack(sequences(config), 24, 4)
    assert batch.shape[0] == 4
    expected = predicted(config, params, batch)
    found = predicted(config, params, batch, spec, devices)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_a_frozen_tower_has_no_gradient():
    config, params = seeing("qwen3_vl")
    batch = for_devices(pack(trees(sequences(config)), 64, 1), config)
    whole = gradient(Policy(config), params, batch)
    trained = params.replace(vision=None)
    policy = SeeingPolicy(params.vision, Policy(config))
    found = gradient(policy, trained, batch)
    assert found.vision is None
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5),
        found,
        whole.replace(vision=None),
    )


def test_rows_of_text_cost_no_tower():
    config, params = seeing("qwen3_vl")
    text = Sequence.of(range(5, 20), [16, 17, 18, 19], advantage=0.5)
    mixed = pack([*sequences(config), text], 24, 1)
    rows = [
        for_devices(jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], mixed), config)
        for i in range(mixed.shape[0])
    ]
    seen = [isinstance(row.pictures, RowPictures) for row in rows]
    assert seen == [bool((row < 0).any()) for row in mixed.tokens]
    assert not all(seen)
    assert pack([text], 24, 1).pictures is None
    blind, eyeless = (
        dataclasses.replace(config, vision=None),
        params.replace(vision=None),
    )
    row = rows[seen.index(False)]
    np.testing.assert_array_equal(
        predict(Policy(config), params, row).logprobs,
        predict(Policy(blind), eyeless, row).logprobs,
    )


def test_a_picture_is_cut_once_for_all_rows():
    config, _ = seeing("qwen3_vl")
    batch = pack(sequences(config), 24, 1)
    made = for_devices(batch, config, multiple=4).pictures
    assert made.pictures.pixels.shape[0] == 4
    assert (made.pictures.counts > 0).sum() == 2
    assert (batch.tokens < 0).sum() == (made.places >= 0).sum()
    tokens = for_devices(batch, config).tokens
    assert tokens.min() >= 0
    np.testing.assert_array_equal(tokens == config.vision.image_token, batch.tokens < 0)
    assert not batch.loss_mask[batch.tokens < 0].any()
    check_same_batch("step 1", batch)


def test_pictures_need_a_model_that_sees():
    config, params = seeing("qwen3_vl")
    batch = pack(sequences(config), 24, 1)
    blind = dataclasses.replace(config, vision=None)
    with pytest.raises(ValueError, match="loaded without a vision tower"):
        for_devices(batch, blind)
    with pytest.raises(ValueError, match="for_devices"):
        predict(Policy(config), params, batch)
    with pytest.raises(ValueError, match="loaded without a vision tower"):
        predict(Policy(config), params.replace(vision=None), for_devices(batch, config))


def test_sampled_tokens_of_a_row_are_trained_and_pictures_are_not():
    config, _ = seeing("qwen3_vl")
    picture = drawn(config, 2, 2, 5)
    said = Tokens.generated([10, 11], [-1.0, -2.0], version=3)
    tokens = Tokens.context([5]) + said + Tokens.context([6, *picture.ids, 7]) + said
    batch = pack([Sequence(tokens, np.ones(len(tokens), np.float32))], 16, 1)
    assert batch.tokens[batch.loss_mask].tolist() == [10, 11, 10, 11]
    rotations = batch.pictures.rotations[0, : len(tokens)]
    assert rotations[:, 0].tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 6, 7, 8]
