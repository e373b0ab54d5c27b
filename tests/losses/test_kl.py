"""KL estimators: exact expectations over a small distribution, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import kl

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGPROBS = hnp.arrays(np.float32, (6,), elements=st.floats(-8, 0, width=32))
ESTIMATORS = [kl.k1, kl.k2, kl.k3, kl.k3_plus]
MASK = jnp.ones(6, bool)
LOGITS = jnp.array([0.3, -1.0, 0.9, 0.0, -0.4, 1.7])
REFERENCE = jax.nn.log_softmax(jnp.array([-0.5, 0.8, 0.1, 0.4, -1.2, 0.6]))


def expectation_of_gradient(estimator):
    """E_policy[grad estimator], exact: every token weighted by its probability."""
    probabilities = jax.nn.softmax(LOGITS)

    def expectation(logits):
        values = estimator(jax.nn.log_softmax(logits), REFERENCE, MASK)
        return (probabilities * values).sum()

    return jax.grad(expectation)(LOGITS)


def gradient_of_kl(forward: bool):
    """Gradient of KL(policy || reference), or of KL(reference || policy)."""

    def divergence(logits):
        logprobs = jax.nn.log_softmax(logits)
        gap = logprobs - REFERENCE
        if forward:
            return (jnp.exp(logprobs) * gap).sum()
        return -(jnp.exp(REFERENCE) * gap).sum()

    return jax.grad(divergence)(LOGITS)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3, kl.k3_plus])
def test_unbiased(estimator):
    logprobs = jax.nn.log_softmax(LOGITS)
    exact = (jnp.exp(logprobs) * (logprobs - REFERENCE)).sum()
    estimate = (jnp.exp(logprobs) * estimator(logprobs, REFERENCE, MASK)).sum()
    np.testing.assert_allclose(estimate, exact, rtol=1e-5)


def test_k1_as_a_loss_has_zero_expected_gradient():
    np.testing.assert_allclose(expectation_of_gradient(kl.k1), 0.0, atol=1e-7)


@pytest.mark.parametrize("estimator", [kl.k2, kl.k3_plus])
def test_expected_gradient_is_that_of_the_kl(estimator):
    np.testing.assert_allclose(
        expectation_of_gradient(estimator), gradient_of_kl(forward=True), atol=1e-6
    )


def test_expected_gradient_of_k3_is_that_of_the_reverse_kl():
    np.testing.assert_allclose(
        expectation_of_gradient(kl.k3), gradient_of_kl(forward=False), atol=1e-6
    )


@LAWS
@given(p=LOGPROBS, q=LOGPROBS)
def test_equal_their_transcriptions(p, q):
    arrays = jnp.array(p), jnp.array(q), MASK
    d = p.astype(np.float64) - q.astype(np.float64)
    k3 = np.exp(-d) + d - 1
    for estimator, expected in zip(ESTIMATORS, [d, d**2 / 2, k3, k3], strict=True):
        np.testing.assert_allclose(estimator(*arrays), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradient_beyond_either_clamp_is_zero(estimator):
    logprobs = jnp.array([-9.0, -4.0, -1.5, -1.0, -0.5, 0.0])
    reference = jnp.full(6, -1.0)

    def gradient(**clamps):
        return jax.grad(lambda p: estimator(p, reference, MASK, **clamps).sum())(
            logprobs
        )

    free = gradient(max_log_ratio=None)
    by_ratio, by_value = gradient(max_log_ratio=2.0), gradient(max_value=2.0)
    assert (free[:2] != 0).all()
    assert by_ratio[:2].tolist() == by_value[:2].tolist() == [0.0, 0.0]
    np.testing.assert_array_equal(by_ratio[2:], free[2:])
    np.testing.assert_array_equal(by_value[2:], free[2:])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_finite_by_default_however_far_apart_the_policies_are(estimator):
    p, q = jnp.array([-jnp.inf, -1.0, -300.0]), jnp.array([-1.0, -jnp.inf, 0.0])
    value, gradient = jax.value_and_grad(
        lambda p: estimator(p, q, jnp.ones(3, bool)).sum()
    )(p)
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


def test_k3_keeps_its_digits_near_zero():
    # (1e-4)^2 / 2 = 5e-9 vanishes in float32 when exp and 1 are subtracted.
    value = kl.k3(jnp.array([0.0]), jnp.array([-1e-4]), jnp.ones(1, bool))
    assert 0 <= value.item() < 6e-8


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", ["max_log_ratio", "max_value"])
def test_clamps_are_checked(estimator, name):
    with pytest.raises(
        ValueError, match=rf"{name} must be > 0, or None for no clamp, got -1.0"
    ):
        estimator(LOGITS, REFERENCE, MASK, **{name: -1.0})
