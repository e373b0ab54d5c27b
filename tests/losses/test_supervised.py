"""Supervised losses."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.losses import reduce, supervised


def test_next_token_loss_is_the_negative_log_likelihood_of_the_targets():
    logprobs = jnp.array([[-0.5, -2.0, -jnp.inf], [-1.5, jnp.nan, -3.0]])
    mask = jnp.array([[True, True, False], [True, False, False]])
    loss = supervised.next_token_loss(logprobs, mask)
    assert loss.tolist() == [[0.5, 2.0, 0.0], [1.5, 0.0, 0.0]]
    mean = reduce.token_mean(loss, mask).mean().item()
    assert mean == pytest.approx(4 / 3)


def test_its_gradient_is_minus_one_at_the_targets():
    mask = jnp.array([True, False])
    gradient = jax.grad(lambda p: supervised.next_token_loss(p, mask).sum())(
        jnp.array([-1.0, -jnp.inf])
    )
    assert gradient.tolist() == [-1.0, 0.0]
