"""Ratios: their bounds, and which policy the gradient reaches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import ratios

FUNCTIONS = [
    ratios.token_ratio,
    ratios.sequence_ratio,
    ratios.sequence_product_ratio,
    ratios.gspo_token_ratio,
]
MASK = jnp.ones((1, 2), bool)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("logprob", [-jnp.inf, -500.0])
def test_extreme_logprobs_stay_within_the_documented_bound(function, logprob):
    extreme, usual = jnp.full((1, 2), logprob), jnp.full((1, 2), -1.0)
    bound = math.exp(ratios.MAX_LOG_RATIO)
    np.testing.assert_allclose(function(extreme, usual, MASK), 1 / bound, rtol=1e-6)
    np.testing.assert_allclose(function(usual, extreme, MASK), bound, rtol=1e-6)
    gradient = jax.grad(lambda p: function(p, usual, MASK).sum())(extreme)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_impossible_tokens_have_a_ratio_of_one_and_no_gradient(function):
    impossible = jnp.full((1, 2), -jnp.inf)
    ratio, gradient = jax.value_and_grad(lambda p: function(p, impossible, MASK).sum())(
        impossible
    )
    assert ratio.item() == 2.0
    assert gradient.tolist() == [[0.0, 0.0]]


def test_max_log_ratio_is_checked():
    p = jnp.zeros((1, 2))
    with pytest.raises(
        ValueError, match=r"max_log_ratio must be > 0, or None for no clamp, got 0\.0"
    ):
        ratios.token_log_ratio(p, p, MASK, max_log_ratio=0.0)


def test_sequence_ratios_by_hand():
    p = jnp.log(jnp.array([[0.5, 0.25, 0.9]]))
    q = jnp.log(jnp.array([[0.25, 0.5, 0.1]])) + jnp.log(0.5)
    mask = jnp.array([[True, True, False]])
    product = ratios.sequence_product_ratio(p, q, mask)
    geometric = ratios.sequence_ratio(p, q, mask)
    np.testing.assert_allclose(product, [[4.0, 4.0, 4.0]], rtol=1e-6)
    np.testing.assert_allclose(geometric, [[2.0, 2.0, 2.0]], rtol=1e-6)


@pytest.mark.parametrize("function", [*FUNCTIONS, ratios.token_log_ratio])
def test_the_second_policy_is_held_constant(function):
    p, q = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -1.0]])
    to_p, to_q = jax.grad(lambda p, q: function(p, q, MASK).sum(), argnums=(0, 1))(p, q)
    assert (to_p != 0).all()
    assert (to_q == 0).all()


def test_gradient_of_the_ratio_of_a_policy_to_itself():
    p = jnp.array([[-1.0, -2.0]])
    gradient = jax.grad(lambda p: ratios.token_ratio(p, p, MASK).sum())(p)
    assert gradient.tolist() == [[1.0, 1.0]]


def test_gspo_token_ratio_has_the_sequence_value_and_the_token_gradient():
    p, q = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -1.0]])
    of_sequence = ratios.sequence_ratio(p, q, MASK)
    np.testing.assert_array_equal(ratios.gspo_token_ratio(p, q, MASK), of_sequence)
    jacobian = jax.jacobian(lambda p: ratios.gspo_token_ratio(p, q, MASK)[0])(p)[:, 0]
    np.testing.assert_allclose(jacobian, jnp.diag(of_sequence[0]), rtol=1e-6)
