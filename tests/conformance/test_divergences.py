"""Numbers that other frameworks' tests assert for KL estimators and diagnostics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import diagnostics, kl, reduce

MASK = jnp.ones(3, bool)
LOGPROBS = jnp.array([-1.0, -1.0, -1.0])
REFERENCE = jnp.array([0.0, -15.0, -30.0])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (kl.k1, [-1.0, 14.0, 29.0]),
        (kl.k2, [0.5, 98.0, 420.5]),
        (kl.k3, [0.7183, 13.0, 28.0]),
        (kl.k3_plus, [0.7183, 13.0, 28.0]),
    ],
)
def test_row_12_estimators_without_clamps(estimator, expected):
    values = estimator(LOGPROBS, REFERENCE, MASK, max_log_ratio=None)
    np.testing.assert_allclose(values, expected, atol=5e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (kl.k1, [-1.0, 10.0, 10.0]),
        (kl.k3, [0.7183, 10.0, 10.0]),
        (kl.k3_plus, [0.7183, 10.0, 10.0]),
    ],
)
def test_row_13_estimators_with_clamps(estimator, expected):
    values = estimator(LOGPROBS, REFERENCE, MASK, max_log_ratio=20.0, max_value=10.0)
    np.testing.assert_allclose(values, expected, atol=5e-5)


def test_row_14_penalty():
    logprobs = jnp.array([0.0, -1.0, -2.0])
    values = 0.1 * kl.k3(logprobs, jnp.full(3, -1.0), MASK)
    assert reduce.token_mean(values, MASK).mean().item() == pytest.approx(
        0.0362, abs=5e-5
    )


def test_row_15_gradient_beyond_the_clamp_is_zero():
    logprobs, reference = jnp.array([-3.0, -1.0]), jnp.array([0.0, 0.0])

    def values(policy_logprobs):
        return kl.k3_plus(policy_logprobs, reference, MASK[:2], max_log_ratio=2.0)

    gradient = jax.grad(lambda p: values(p).sum())(logprobs)
    np.testing.assert_allclose(values(logprobs), [4.389056, 0.7182818], rtol=1e-6)
    assert gradient.tolist() == [0.0, -1.0]


def test_row_31_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    logprobs, reference = jnp.array([-3.0, -1.0, -0.1]), jnp.array([-1.0, -1.0, -2.0])

    def total(estimator):
        return lambda p: estimator(p, reference, MASK).sum()

    np.testing.assert_array_equal(
        kl.k3_plus(logprobs, reference, MASK), kl.k3(logprobs, reference, MASK)
    )
    np.testing.assert_array_equal(
        jax.grad(total(kl.k3_plus))(logprobs), jax.grad(total(kl.k2))(logprobs)
    )


def test_row_16_sampled_entropy():
    logprobs, sampler = jnp.array([-0.5, -1.0, -1.5]), jnp.array([-0.6, -1.1, -1.6])
    entropy = diagnostics.sampled_entropy(logprobs, sampler, MASK)
    assert entropy.mean().item() == pytest.approx(1.10517, abs=5e-6)


def test_row_17_token_mult_prob_error():
    error = diagnostics.token_mult_prob_error(
        jnp.full(3, -1.0), jnp.array([-0.5, -1.5, -0.8]), MASK
    )
    assert error.mean().item() == pytest.approx(1.50628, abs=5e-6)


@pytest.mark.parametrize(
    ("dialect", "estimator", "clamps", "expected"),
    [
        ("verl k3", kl.k3, {"max_log_ratio": 20.0, "max_value": 10.0}, 10.0),
        ("OpenRLHF k1", kl.k1, {"max_log_ratio": None, "max_value": 10.0}, -10.0),
        ("OpenRLHF k2", kl.k2, {"max_log_ratio": None, "max_value": 10.0}, 10.0),
        ("TRL k3", kl.k3, {"max_log_ratio": None}, np.exp(25.0) - 26.0),
    ],
)
def test_dialects_of_the_clamps(dialect, estimator, clamps, expected):
    one = jnp.ones(1, bool)
    value = estimator(jnp.array([-25.0]), jnp.array([0.0]), one, **clamps)
    assert value.item() == pytest.approx(expected, rel=1e-6), dialect
