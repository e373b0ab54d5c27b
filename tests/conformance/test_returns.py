"""Numbers and dialects of GAE, returns and what is whitened from them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import advantages, baselines, returns
from jaxrl_post.losses.credit.recurrence import reverse_linear_recurrence
from jaxrl_post.losses.credit.whitening import whitened

ALL = jnp.ones((1, 3), bool)
GAP = jnp.array([[True, True, False, True, True]])
# The critic's value at the gap must not matter.
VALUES = jnp.array([[0.1, 0.2, 999.0, 0.4, 0.5]])
DISCOUNTS = {"gamma": 0.99, "lambda_": 0.95}


def test_row_21_gdpo():
    rewards = jnp.array([[[1.0, 0.0, 10.0], [0.0, -1.0, 2.0]]])
    np.testing.assert_allclose(baselines.gdpo(rewards), [[0.7071, -0.7071]], atol=5e-5)


def test_row_22_gae_of_one_step():
    rewards = returns.at_last_token(jnp.full((1, 3), 5.0), ALL)
    values = jnp.array([[1.0, 2.0, 3.0]])
    estimate = returns.gae(rewards, values, ALL, gamma=1.0, lambda_=0.0)
    assert estimate.tolist() == [[1.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # The row's numbers belong to one reward, at the end.
        ([0.0, 0.0, 9.0, 0.0, 1.0], [0.782324, 0.727618, 0.56525, 0.5]),
        ([1.0, 1.0, 9.0, 1.0, 1.0], [3.607364, 2.668118, 1.56525, 0.5]),
    ],
)
def test_row_23_gae_over_a_gap_equals_the_run_without_it(rewards, expected):
    rewards, kept = jnp.array([rewards]), np.flatnonzero(GAP[0])
    estimate = returns.gae(rewards, VALUES, GAP, **DISCOUNTS)
    alone = returns.gae(rewards[:, kept], VALUES[:, kept], GAP[:, kept], **DISCOUNTS)
    np.testing.assert_allclose(estimate[0, kept], expected, atol=1.5e-6)
    np.testing.assert_allclose(estimate[:, kept], alone, rtol=1e-6)
    assert estimate[0, 2] == 0


def test_row_27_reinforce_plus_plus_returns():
    mask = jnp.array([[True, True, False, False, True]])
    rewards = returns.at_last_token(jnp.full((1, 5), 2.0), mask)
    values = returns.discounted_returns(rewards, mask, gamma=0.5)
    assert values.tolist() == [[0.5, 1.0, 0.0, 0.0, 2.0]]


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("chunked", (256, 1024)),
        ("chunked", (4, 131072)),
        ("chunked", (2, 257)),
        ("associative", (16, 200)),
    ],
)
def test_row_34_parallel_gae_equals_the_serial_recursion(method, shape):
    # 256 x 131072, both at once, is measured by benchmarks/gae.py.
    rng = np.random.default_rng(0)
    rewards, values = (jnp.array(rng.normal(size=shape), jnp.float32) for _ in "rv")
    mask = jnp.array(rng.random(shape) < 0.9)
    estimate = jax.jit(partial(returns.gae, **DISCOUNTS), static_argnames="method")
    serial = estimate(rewards, values, mask, method="serial")
    parallel = estimate(rewards, values, mask, method=method)
    np.testing.assert_allclose(parallel, serial, rtol=0, atol=1e-5)


def test_row_34_the_serial_recurrence_equals_a_loop():
    rng = np.random.default_rng(1)
    increments = rng.normal(size=5000).astype(np.float32)
    expected, later = np.zeros(5000), 0.0
    for t in reversed(range(5000)):
        expected[t] = later = float(increments[t]) + 0.9405 * later
    x = reverse_linear_recurrence(
        jnp.full(5000, 0.9405), jnp.array(increments), method="serial"
    )
    np.testing.assert_allclose(x, expected, rtol=0, atol=1e-5)


def test_row_39_max_rl():
    rewards = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0] * 4, [0.0] * 4])
    assert baselines.max_rl(rewards).tolist() == [[3, -1, -1, -1], [0] * 4, [0] * 4]


@pytest.mark.parametrize(
    ("dialect", "gaps", "expected"),
    [
        ("verl, NeMo RL, AReaL carry it forward", "carry", [1.0 + 0.5 * 2.0, 0, 2.0]),
        ("OpenRLHF zeroes it", "zero", [1.0 + 0.25 * 2.0, 0, 2.0]),
    ],
)
def test_dialects_of_gae_across_uncounted_tokens(dialect, gaps, expected):
    mask = jnp.array([True, False, True])
    rewards, values = jnp.array([1.0, 7.0, 2.0]), jnp.zeros(3)
    estimate = returns.gae(rewards, values, mask, gamma=0.5, lambda_=1.0, gaps=gaps)
    assert estimate.tolist() == expected, dialect


@pytest.mark.parametrize(
    ("dialect", "single", "expected"),
    [("NeMo RL, prime-rl", "zero", 0.0), ("verl", "raw", 7.0)],
)
@pytest.mark.parametrize(
    "advantage", [advantages.group_centered, advantages.group_normalized]
)
def test_dialects_of_a_group_of_one(advantage, dialect, single, expected):
    values = advantage(jnp.array([[7.0]]), single=single)
    assert values.tolist() == [[expected]], dialect


@pytest.mark.parametrize(
    ("dialect", "ddof", "expected"),
    [("TRL, verl", 1, 1 / 2**0.5), ("OpenRLHF", 0, 1.0)],
)
def test_dialects_of_the_whitening_variance(dialect, ddof, expected):
    values = whitened(jnp.array([1.0, 3.0]), jnp.ones(2, bool), ddof=ddof)
    np.testing.assert_allclose(values, [-expected, expected], rtol=1e-6)
