"""Weights that turn a sampled KL value into a KL gradient; the adaptive coefficient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import kl

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGPROBS = hnp.arrays(np.float32, (3, 4), elements=st.floats(-6, 0, width=32))
MASKS = hnp.arrays(bool, (3, 4))
ALL = jnp.ones(6, bool)
LOGITS = jnp.array([0.3, -1.0, 0.9, 0.0, -0.4, 1.7])
REFERENCE = jax.nn.log_softmax(jnp.array([-0.5, 0.8, 0.1, 0.4, -1.2, 0.6]))
BEHAVIOR = jax.nn.log_softmax(jnp.array([0.6, -0.2, 0.2, 0.9, -0.8, 0.3]))


def expected_gradient(term, sampler):
    """E_sampler[grad term], exact: every token weighted by its probability."""
    probabilities = jnp.exp(sampler)

    def expectation(logits):
        return (probabilities * term(jax.nn.log_softmax(logits))).sum()

    return jax.grad(expectation)(LOGITS)


def policy():
    return jax.nn.log_softmax(LOGITS)


def gradient_of_expectation(estimator):
    """grad E_p[estimator], differentiating the distribution as well."""

    def expectation(logits):
        logprobs = jax.nn.log_softmax(logits)
        return (jnp.exp(logprobs) * estimator(logprobs, REFERENCE, ALL)).sum()

    return jax.grad(expectation)(LOGITS)


# E_p[k1] is the KL exactly, so this is its gradient.
GRADIENT_OF_KL = gradient_of_expectation(kl.k1)


def scored(estimator):
    def term(logprobs):
        values = estimator(logprobs, REFERENCE, ALL)
        return kl.with_score_term(values, logprobs, ALL)

    return term


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3])
def test_the_score_term_makes_the_gradient_that_of_the_kl(estimator):
    gradient = expected_gradient(scored(estimator), policy())
    np.testing.assert_allclose(gradient, GRADIENT_OF_KL, atol=1e-6)
    plain = expected_gradient(lambda p: estimator(p, REFERENCE, ALL), policy())
    assert np.abs(plain - GRADIENT_OF_KL).max() > 0.05


def test_the_score_term_of_k2_has_the_gradient_of_its_own_expectation():
    gradient = expected_gradient(scored(kl.k2), policy())
    np.testing.assert_allclose(gradient, gradient_of_expectation(kl.k2), atol=1e-6)
    assert np.abs(gradient - GRADIENT_OF_KL).max() > 0.05


def test_the_score_term_of_k3_has_the_gradient_of_k2_token_by_token():
    logprobs = policy()
    np.testing.assert_allclose(
        jax.grad(lambda p: scored(kl.k3)(p).sum())(logprobs),
        jax.grad(lambda p: kl.k2(p, REFERENCE, ALL).sum())(logprobs),
        atol=1e-6,
    )


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3])
def test_importance_weights_move_both_moments_to_the_policy(estimator):
    def weighted(logprobs):
        values = scored(estimator)(logprobs)
        return kl.with_importance_weights(values, logprobs, BEHAVIOR, ALL)

    value = (jnp.exp(BEHAVIOR) * weighted(policy())).sum()
    exact = (jnp.exp(policy()) * (policy() - REFERENCE)).sum()
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    gradient = expected_gradient(weighted, BEHAVIOR)
    np.testing.assert_allclose(gradient, GRADIENT_OF_KL, atol=1e-6)
    unweighted = expected_gradient(scored(estimator), BEHAVIOR)
    assert np.abs(unweighted - GRADIENT_OF_KL).max() > 0.05


@LAWS
@given(p=LOGPROBS, q=LOGPROBS, r=LOGPROBS, mask=MASKS)
def test_equal_their_transcriptions(p, q, r, mask):
    arrays = [jnp.array(x) for x in (p, q, r, mask)]
    values = kl.k3(arrays[0], arrays[2], arrays[3])
    weighted = kl.with_importance_weights(
        values, arrays[0], arrays[1], arrays[3], cap=3.0
    )
    p, q, r = (x.astype(np.float64) for x in (p, q, r))
    k3 = np.exp(r - p) - (r - p) - 1
    expected = np.where(mask, np.minimum(np.exp(p - q), 3.0) * k3, 0.0)
    np.testing.assert_allclose(weighted, expected, rtol=1e-5, atol=1e-5)
    with_term = kl.with_score_term(values, arrays[0], arrays[3])
    np.testing.assert_array_equal(with_term, values)


def test_gradients_equal_finite_differences():
    rng = np.random.default_rng(4)
    p, q, r = rng.uniform(-3, 0, (3, 2, 5))
    mask = np.array([[True] * 5, [True, False, True, True, False]])
    arrays = [jnp.array(x, jnp.float32) for x in (p, q, r)]
    jax_mask = jnp.array(mask)

    def k3(x):
        return np.exp(r - x) - (r - x) - 1

    # Constants are held at p.
    transcriptions = {
        "score": lambda x: k3(x) + k3(p) * (x - p),
        "weights": lambda x: np.minimum(np.exp(p - q), 1.5) * k3(x),
    }

    def total(name, x):
        values = kl.k3(x, arrays[2], jax_mask)
        if name == "score":
            return kl.with_score_term(values, x, jax_mask).sum()
        return kl.with_importance_weights(values, x, arrays[1], jax_mask, cap=1.5).sum()

    step = 1e-6
    for name, transcription in transcriptions.items():
        # Every token's value depends on its own log-prob alone.
        change = transcription(p + step) - transcription(p - step)
        numeric = np.where(mask, change / (2 * step), 0.0)
        gradient = jax.grad(lambda x, name=name: total(name, x))(arrays[0])
        np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5)


def modified(values, p, q, mask):
    scored = kl.with_score_term(values, p, mask)
    return kl.with_importance_weights(scored, p, q, mask, cap=2.0)


def test_a_counted_nan_stays_and_a_counted_minus_infinity_is_finite():
    one = jnp.ones(1, bool)
    nan, zero = jnp.array([jnp.nan]), jnp.array([-1.0])
    assert jnp.isnan(kl.with_score_term(nan, zero, one)).all()
    assert jnp.isnan(kl.with_importance_weights(zero, zero, nan, one)).all()
    value, gradient = jax.value_and_grad(
        lambda p: modified(kl.k3(p, zero, one), p, zero, one).sum()
    )(jnp.array([-jnp.inf]))
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("cap", [0.0, -1.0])
def test_cap_is_checked(cap):
    x = jnp.zeros(1)
    with pytest.raises(ValueError, match=f"cap must be > 0, got {cap}"):
        kl.with_importance_weights(x, x, x, jnp.ones(1, bool), cap=cap)


@LAWS
@given(
    coefficient=st.floats(0, 2, width=32),
    observed=st.floats(0, 30, width=32),
    steps=st.integers(1, 40),
)
def test_adaptive_coefficient_equals_its_transcription(coefficient, observed, steps):
    updated = kl.adaptive_coefficient(
        coefficient, jnp.float32(observed), target=6.0, horizon=10.0, num_steps=steps
    )
    error = min(max((observed - 6.0) / 6.0, -0.2), 0.2)
    expected = coefficient * (1 + error * steps / 10.0)
    np.testing.assert_allclose(updated, expected, rtol=1e-5, atol=1e-7)


def test_adaptive_coefficient_holds_at_the_target_and_shows_a_nan():
    assert kl.adaptive_coefficient(0.5, 6.0, target=6.0, horizon=100.0) == 0.5
    assert kl.adaptive_coefficient(0.5, 60.0, target=6.0, horizon=2.0) == 0.55
    assert jnp.isnan(kl.adaptive_coefficient(0.5, jnp.nan, target=6.0, horizon=2.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 0.0, "horizon": 1.0}, r"target must be > 0 \(nats\), got 0.0"),
        ({"target": 1.0, "horizon": 0.0}, r"horizon must be > 0, got 0.0"),
        (
            {"target": 1.0, "horizon": 2.0, "num_steps": 10},
            r"num_steps must be in \(0, 10.0\), 5 times the horizon.*got 10",
        ),
        (
            {"target": 1.0, "horizon": 2.0, "num_steps": 0},
            r"num_steps must be in \(0, 10.0\).*got 0",
        ),
    ],
)
def test_adaptive_coefficient_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        kl.adaptive_coefficient(0.1, 1.0, **arguments)
