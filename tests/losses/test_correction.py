"""Importance weights: bounds, dropped sequences, and what must stay visible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import correction

TRAINER = jnp.log(jnp.array([[0.5, 0.4, 0.9], [0.2, 0.2, 0.9]]))
SAMPLER = jnp.log(jnp.array([[0.25, 0.8, 0.9], [0.2, 0.1, 0.9]]))
MASK = jnp.array([[True, True, True], [True, True, False]])


def test_token_and_sequence_weights_by_hand():
    tokens = correction.token_weights(TRAINER, SAMPLER, MASK)
    sequences = correction.sequence_weights(TRAINER, SAMPLER, MASK)
    np.testing.assert_allclose(tokens, [[2, 0.5, 1], [1, 2, 1]], rtol=1e-6)
    np.testing.assert_allclose(sequences, [[1, 1, 1], [2, 2, 2]], rtol=1e-6)


def test_sequence_masked_looks_at_the_geometric_mean():
    weights = correction.token_weights(TRAINER, SAMPLER, MASK)
    kept = correction.sequence_masked(
        weights, TRAINER, SAMPLER, MASK, low=0.9, high=1.1
    )
    np.testing.assert_allclose(kept, [[2, 0.5, 1], [0, 0, 0]], rtol=1e-6)
    wider = correction.sequence_masked(
        weights, TRAINER, SAMPLER, MASK, low=0.9, high=1.5
    )
    np.testing.assert_array_equal(wider, weights)


def test_icepop_keeps_its_bounds_and_truncation_keeps_small_weights():
    weights = jnp.array([0.0, 0.5, 2.0, 5.0, 5.5])
    assert correction.icepop(weights).tolist() == [0.0, 0.5, 2.0, 5.0, 0.0]
    assert correction.truncated(weights).tolist() == [0.0, 0.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "weigh", [correction.token_weights, correction.sequence_weights]
)
def test_weights_carry_no_gradient(weigh):
    gradients = jax.grad(lambda p, q: weigh(p, q, MASK).sum(), argnums=(0, 1))(
        TRAINER, SAMPLER
    )
    assert all((gradient == 0).all() for gradient in gradients)


def test_a_missing_behavior_logprob_is_visible_and_not_probability_one():
    sampler = SAMPLER.at[0, 1].set(jnp.nan)
    weights = correction.token_weights(TRAINER, sampler, MASK)
    assert jnp.isnan(weights).tolist() == [[False, True, False], [False] * 3]
    for used in (
        correction.truncated(weights),
        correction.icepop(weights),
        correction.sequence_masked(weights, TRAINER, sampler, MASK, low=0.5, high=2.0),
    ):
        assert jnp.isnan(used[0, 1])


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_cap_is_checked(cap):
    with pytest.raises(ValueError, match=f"cap must be > 0, got {cap}"):
        correction.truncated(jnp.ones(1), cap=cap)


@pytest.mark.parametrize(("low", "high"), [(-0.5, 2.0), (2.0, 0.5)])
def test_bounds_are_checked(low, high):
    message = f"bounds must satisfy 0 <= low <= high, got {low} and {high}"
    with pytest.raises(ValueError, match=message):
        correction.icepop(jnp.ones(1), low=low, high=high)
    with pytest.raises(ValueError, match=message):
        correction.sequence_masked(
            jnp.ones((2, 3)), TRAINER, SAMPLER, MASK, low=low, high=high
        )
