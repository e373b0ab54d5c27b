"""Reward models: transcriptions, finite differences, brute force, refusals."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import reward_model
from tests.losses import numeric

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
REWARDS = hnp.arrays(np.float32, (5,), elements=st.floats(-5, 5, width=32))
FRACTIONS = hnp.arrays(np.float32, (5,), elements=st.floats(0, 1, width=32))
MASKS = hnp.arrays(bool, (5,))


def pairwise(chosen, rejected, margin):
    return -np.log(1 / (1 + np.exp(-(chosen - rejected - margin)))) + 0.1 * (
        (chosen + rejected) ** 2
    )


def stepwise(x, y):
    p = 1 / (1 + np.exp(-x))
    return -y * np.log(p) - (1 - y) * np.log(1 - p)


@LAWS
@given(c=REWARDS, r=REWARDS, margin=FRACTIONS, valid=MASKS)
def test_bradley_terry_equals_its_transcription(c, r, margin, valid):
    loss = reward_model.bradley_terry(
        *map(jnp.array, (c, r, valid)), target_margin=jnp.array(margin), centering=0.1
    )
    exact = pairwise(*(x.astype(np.float64) for x in (c, r, margin)))
    np.testing.assert_allclose(loss, np.where(valid, exact, 0.0), rtol=2e-5, atol=1e-5)


@LAWS
@given(x=REWARDS, y=FRACTIONS, mask=MASKS)
def test_process_reward_loss_equals_its_transcription(x, y, mask):
    loss = reward_model.process_reward_loss(*map(jnp.array, (x, y, mask)))
    exact = stepwise(x.astype(np.float64), y.astype(np.float64))
    np.testing.assert_allclose(loss, np.where(mask, exact, 0.0), rtol=2e-5, atol=1e-5)


def test_gradients_equal_finite_differences():
    rng = np.random.default_rng(5)
    c, r, margin = rng.normal(size=(3, 4))
    low = [jnp.array(x, jnp.float32) for x in (c, r, margin)]

    def total(c, r, margin):
        return reward_model.bradley_terry(
            c, r, target_margin=margin, centering=0.1
        ).sum()

    of_chosen, of_rejected, of_margin = jax.grad(total, argnums=(0, 1, 2))(*low)
    exact = numeric.gradient(lambda x: pairwise(x, r, margin), c)
    np.testing.assert_allclose(of_chosen, exact, rtol=1e-4, atol=1e-6)
    exact = numeric.gradient(lambda x: pairwise(c, x, margin), r)
    np.testing.assert_allclose(of_rejected, exact, rtol=1e-4, atol=1e-6)
    assert of_margin.tolist() == [0.0] * 4

    y, mask = np.array([0.0, 1.0, 0.25, 0.5]), np.array([True, True, True, False])

    def steps(x, y):
        return reward_model.process_reward_loss(x, y, jnp.array(mask)).sum()

    labels = jnp.array(y, jnp.float32)
    of_logits, of_labels = jax.grad(steps, argnums=(0, 1))(low[0], labels)
    exact = numeric.gradient(lambda x: np.where(mask, stepwise(x, y), 0.0), c)
    np.testing.assert_allclose(of_logits, exact, rtol=1e-4, atol=1e-6)
    assert of_labels.tolist() == [0.0] * 4


def test_one_number_may_be_the_margin_of_all():
    c, r = jnp.array([1.0, 2.0]), jnp.array([0.5, -1.0])
    one = reward_model.bradley_terry(c, r, target_margin=0.5)
    np.testing.assert_array_equal(
        one, reward_model.bradley_terry(c, r, target_margin=jnp.full(2, 0.5))
    )
    np.testing.assert_allclose(one, [np.log(2), np.logaddexp(0, -2.5)], rtol=1e-6)


def test_centering_is_of_the_pairs_sum():
    c, r = jnp.array([3.0]), jnp.array([-1.0])
    plain = reward_model.bradley_terry(c, r)
    centred = reward_model.bradley_terry(c, r, centering=0.25)
    np.testing.assert_allclose(centred - plain, [1.0], rtol=1e-6)


def test_centering_is_checked():
    with pytest.raises(ValueError, match=r"centering must be >= 0, got -0\.1"):
        reward_model.bradley_terry(jnp.zeros(1), jnp.zeros(1), centering=-0.1)


def test_a_verdict_that_is_certain_and_right_costs_nothing():
    x, y = jnp.array([1e4, -1e4, 1e4]), jnp.array([1.0, 0.0, 0.0])
    loss = reward_model.process_reward_loss(x, y, jnp.ones(3, bool))
    assert loss.tolist() == [0.0, 0.0, 1e4]


def test_best_of_n_is_the_first_of_the_best_valid_samples():
    rewards = jnp.array(
        [[1.0, 3.0, 3.0], [9.0, -1.0, 2.0], [jnp.nan, 1.0, 2.0], [jnp.inf, -jnp.inf, 0]]
    )
    valid = jnp.array(
        [[True] * 3, [False, True, True], [False] * 3, [False, True, False]]
    )
    best = reward_model.best_of_n(rewards, valid)
    assert best.dtype == jnp.int32
    assert best.tolist() == [1, 2, -1, 1]
    assert reward_model.best_of_n(rewards).tolist() == [1, 0, 0, 0]
    assert reward_model.best_of_n(rewards[0]).item() == 1


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@LAWS
@given(rewards=REWARDS, valid=MASKS)
def test_best_of_n_value_is_the_mean_over_all_subsets(n, rewards, valid):
    kept = rewards[valid].astype(np.float64)
    best = [max(subset) for subset in combinations(kept, n)]
    expected = np.mean(best) if best else 0.0
    poisoned = jnp.where(jnp.array(valid), rewards, jnp.nan)
    value = jax.jit(reward_model.best_of_n_value, static_argnames="n")(
        poisoned, jnp.array(valid), n=n
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_best_of_n_value_of_many_samples_is_pass_at_n():
    num_right, samples, n = 5, 4096, 100
    rewards = (jnp.arange(samples) < num_right).astype(jnp.bfloat16)
    value = reward_model.best_of_n_value(rewards[::-1], n=n)
    misses = np.arange(samples - num_right + 1, samples + 1)
    expected = 1 - np.prod(1 - n / misses)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_best_of_n_value_keeps_what_must_be_seen():
    rewards = jnp.array([[jnp.nan, 1.0, 2.0], [-jnp.inf, 1.0, 2.0]])
    best_of_two = reward_model.best_of_n_value(rewards, n=2)
    assert jnp.isnan(best_of_two[0])
    assert best_of_two[1].item() == pytest.approx((2 + 2 + 1) / 3)


@pytest.mark.parametrize("n", [0, 4])
def test_n_is_checked(n):
    with pytest.raises(ValueError, match=rf"n must be in \[1, 3\].*, got {n}"):
        reward_model.best_of_n_value(jnp.zeros((2, 3)), n=n)
