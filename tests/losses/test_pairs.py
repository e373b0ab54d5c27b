"""What every function of preference pairs promises, whatever it computes.

Slots without a pair may hold anything and reach neither value nor gradient; gradients
flow through the policy alone; values are float32; jit, vmap and shard_map change
nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxrl_post.losses import preference, reference_free, reward_model, unpaired

BETA = {"beta": 0.3}
over = pytest.mark.parametrize


def of_margin(function):
    def loss(pc, pr, rc, rr, valid):
        return function(preference.log_ratio_margin(pc, pr, rc, rr), valid)

    return loss


def of_policy(function):
    return lambda pc, pr, rc, rr, valid: function(pc, pr, valid)


def kto_loss(pc, pr, rc, rr, valid):
    point = jnp.array(0.5, jnp.float32)
    return unpaired.kto_loss(pc, rc, jnp.arange(pc.size) % 2 == 0, point, valid, **BETA)


# Of the policy's log-probs of chosen and rejected, the reference's, and `valid`.
DIFFERENTIABLE = {
    "log_ratio": lambda pc, pr, rc, rr, valid: preference.log_ratio(pc, rc, valid),
    "log_ratio_margin": preference.log_ratio_margin,
    "alpha_divergence_margin": partial(preference.alpha_divergence_margin, alpha=0.5),
    "jensen_shannon_margin": preference.jensen_shannon_margin,
    "sigmoid_loss": of_margin(partial(preference.sigmoid_loss, **BETA)),
    "smoothed": of_margin(
        partial(preference.sigmoid_loss, label_smoothing=0.1, **BETA)
    ),
    "robust_loss": of_margin(
        partial(preference.robust_loss, label_smoothing=0.1, **BETA)
    ),
    "hinge_loss": of_margin(partial(preference.hinge_loss, **BETA)),
    "ipo_loss": of_margin(partial(preference.ipo_loss, **BETA)),
    "simpo_loss": of_policy(
        partial(reference_free.simpo_loss, target_margin=0.5, **BETA)
    ),
    "cpo_loss": of_policy(partial(reference_free.cpo_loss, **BETA)),
    "orpo_loss": of_policy(reference_free.orpo_loss),
    "kto_loss": kto_loss,
    "bradley_terry": lambda pc, pr, rc, rr, valid: reward_model.bradley_terry(
        pc, pr, valid, margin=rc, centering=0.1
    ),
}
CONSTANT = {"wpo_weights": of_policy(preference.wpo_weights)}
METRICS = {
    "accuracy": of_margin(preference.accuracy),
    "reward_margin": of_margin(partial(preference.reward_margin, **BETA)),
    "implicit_reward": lambda pc, pr, rc, rr, valid: preference.implicit_reward(
        pc, rc, valid, **BETA
    ),
}
PER_PAIR = DIFFERENTIABLE | CONSTANT


def example(num_pairs=8):
    rng = np.random.default_rng(0)
    arrays = [jnp.array(-rng.gamma(2.0, 1.0, num_pairs), jnp.float32) for _ in range(4)]
    valid = jnp.array([True, False, True, True, False, True, True, False])
    return arrays, valid[:num_pairs]


def poisoned(arrays, valid, rotation):
    bad = np.resize(np.roll([-np.inf, np.nan, np.inf], rotation), valid.shape)
    return [jnp.where(valid, x, jnp.array(bad, x.dtype)) for x in arrays]


@over("name", PER_PAIR)
def test_invalid_slots_reach_neither_value_nor_gradient(name):
    arrays, valid = example()

    def total(*arrays):
        values = PER_PAIR[name](*arrays, valid)
        return values.sum(), values

    gradients = jax.jit(jax.value_and_grad(total, argnums=range(4), has_aux=True))
    (clean_total, values), clean = gradients(*arrays)
    assert (jnp.where(valid, 0.0, values) == 0).all()
    for rotation in range(3):
        (dirty_total, _), dirty = gradients(*poisoned(arrays, valid, rotation))
        assert dirty_total == clean_total
        for gradient, expected in zip(dirty, clean, strict=True):
            np.testing.assert_array_equal(gradient, expected)
            assert (jnp.where(valid, 0.0, gradient) == 0).all()
    assert bool((clean[0] != 0).any()) == (name in DIFFERENTIABLE)
    assert (clean[2] == 0).all()
    assert (clean[3] == 0).all()


@over("name", METRICS)
def test_invalid_slots_do_not_reach_a_metric(name):
    arrays, valid = example()
    clean = METRICS[name](*arrays, valid)
    assert clean.count == 5
    for rotation in range(3):
        dirty = METRICS[name](*poisoned(arrays, valid, rotation), valid)
        assert (dirty.sum, dirty.count) == (clean.sum, clean.count)
    nothing = METRICS[name](*poisoned(arrays, valid & False, 0), valid & False)
    assert (nothing.sum, nothing.count, nothing.mean()) == (0, 0, 0)


@over("name", PER_PAIR)
def test_without_valid_slots_all_is_zero(name):
    arrays, valid = example()
    nothing = valid & False
    values = PER_PAIR[name](*poisoned(arrays, nothing, 1), nothing)
    assert (values == 0).all()


@over("name", PER_PAIR)
def test_a_nan_that_counts_stays_visible(name):
    arrays, _ = example()
    values = PER_PAIR[name](arrays[0].at[2].set(jnp.nan), *arrays[1:], None)
    assert jnp.isnan(values).tolist() == [i == 2 for i in range(8)]


@over("name", PER_PAIR | METRICS)
def test_none_means_that_every_slot_is_valid(name):
    function = (PER_PAIR | METRICS)[name]
    arrays, valid = example()
    for one, other in zip(
        jax.tree.leaves(function(*arrays, None)),
        jax.tree.leaves(function(*arrays, valid | True)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@over("name", PER_PAIR)
def test_float32_out_for_bfloat16_in(name):
    arrays, valid = example()
    low = [x.astype(jnp.bfloat16) for x in arrays]
    values = PER_PAIR[name](*low, valid)
    assert values.dtype == jnp.float32
    exact = PER_PAIR[name](*(x.astype(jnp.float32) for x in low), valid)
    np.testing.assert_array_equal(values, exact)


@over("name", [name for name in PER_PAIR if name != "kto_loss"])
def test_vmap_and_permutation_change_nothing(name):
    arrays, valid = example()
    function = PER_PAIR[name]
    expected = function(*arrays, valid)
    by_pair = jax.vmap(function)(*arrays, valid)
    np.testing.assert_allclose(by_pair, expected, rtol=1e-6)
    order = jnp.array([3, 1, 7, 0, 2, 6, 4, 5])
    permuted = function(*(x[order] for x in arrays), valid[order])
    np.testing.assert_array_equal(permuted, expected[order])


@over("name", ["sigmoid_loss", "orpo_loss", "alpha_divergence_margin"])
def test_a_shard_of_the_pairs_has_its_own_losses(name):
    arrays, valid = example()
    spec = PartitionSpec("data")
    sharded = jax.shard_map(
        PER_PAIR[name],
        mesh=Mesh(np.array(jax.devices()), ("data",)),
        in_specs=(spec,) * 5,
        out_specs=spec,
    )
    expected = PER_PAIR[name](*arrays, valid)
    np.testing.assert_allclose(sharded(*arrays, valid), expected, rtol=1e-6)


@over("name", DIFFERENTIABLE)
@over("sign", [1.0, -1.0])
def test_gradients_are_finite_for_very_unlikely_responses(name, sign):
    function = DIFFERENTIABLE[name]
    far, near = jnp.full(2, -1e4), jnp.array([-1.0, -20.0])
    policy = (far, near) if sign > 0 else (near, far)

    def total(pc, pr):
        return function(pc, pr, near, near, None).sum()

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(*policy)
    assert jnp.isfinite(value)
    assert jnp.isfinite(jnp.stack(gradients)).all()
