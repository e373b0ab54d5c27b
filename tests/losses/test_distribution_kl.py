"""Divergences of whole distributions: transcriptions, limits, impossible tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import distribution_kl, kl
from jaxrl_post.losses.distribution_kl import entropy, jensen_shannon, kl_divergence

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGITS = hnp.arrays(np.float32, (2, 3, 5), elements=st.floats(-6, 6, width=32))
MASKS = hnp.arrays(bool, (2, 3))
BETA = 0.3
INF = jnp.inf


def softmax(logits):
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def divergence(p, q):
    return (p * (np.log(p) - np.log(q))).sum(axis=-1)


def skewed(p, q):
    mixture = BETA * p + (1 - BETA) * q
    return BETA * divergence(p, mixture) + (1 - BETA) * divergence(q, mixture)


# Each function of two logits and a mask, with its transcription in float64.
CASES = {
    "kl": (kl_divergence, divergence),
    "jsd": (partial(jensen_shannon, beta=BETA), skewed),
    "entropy": (
        lambda p, q, mask: entropy(p, mask),
        lambda p, q: -(p * np.log(p)).sum(axis=-1),
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


def example(seed=0, shape=(2, 3, 5)):
    rng = np.random.default_rng(seed)
    p, q = (jnp.array(rng.normal(size=shape), jnp.float32) for _ in range(2))
    return p, q, jnp.array([[True, False, True], [True, True, False]])


@every_case
@LAWS
@given(p=LOGITS, q=LOGITS, mask=MASKS)
def test_equals_its_transcription(name, p, q, mask):
    function, transcription = CASES[name]
    values = function(*map(jnp.array, (p, q, mask)))
    p, q = (softmax(x.astype(np.float64)) for x in (p, q))
    expected = np.where(mask, transcription(p, q), 0.0)
    np.testing.assert_allclose(values, expected, rtol=2e-5, atol=2e-6)


@every_case
def test_gradients_equal_finite_differences_in_both_arguments(name):
    function, transcription = CASES[name]
    p, q, mask = example(1)
    weights = np.random.default_rng(2).normal(size=mask.shape)

    def total(*logits):
        values = transcription(*map(softmax, logits))
        return (weights * np.where(mask, values, 0.0)).sum()

    def gradient(argument):
        logits = [np.array(x, np.float64) for x in (p, q)]
        numeric, step = np.zeros(p.shape), 1e-6
        for index in np.ndindex(p.shape):
            here = logits[argument][index]
            ends = []
            for there in (here + step, here - step):
                logits[argument][index] = there
                ends.append(total(*logits))
            logits[argument][index] = here
            numeric[index] = (ends[0] - ends[1]) / (2 * step)
        return numeric

    scale = jnp.array(weights, jnp.float32)
    found = jax.grad(lambda *x: (scale * function(*x, mask)).sum(), argnums=(0, 1))
    for argument, analytic in enumerate(found(p, q)):
        np.testing.assert_allclose(analytic, gradient(argument), rtol=1e-3, atol=1e-6)


@every_case
def test_a_token_that_neither_has_changes_nothing(name):
    function = CASES[name][0]
    p, q, mask = example()
    wide = [jnp.concatenate([x, jnp.full((2, 3, 1), -INF)], -1) for x in (p, q)]

    def total(*logits):
        return function(*logits, mask).sum()

    narrow_value, narrow = jax.value_and_grad(total, argnums=(0, 1))(p, q)
    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(*wide)
    np.testing.assert_allclose(value, narrow_value, rtol=1e-6)
    for gradient, expected in zip(gradients, narrow, strict=True):
        np.testing.assert_allclose(gradient[..., :5], expected, rtol=1e-5, atol=1e-7)
        assert (gradient[..., 5] == 0).all()


def test_a_token_that_one_of_them_has():
    p, q = jnp.array([0.0, -INF]), jnp.array([0.0, 0.0])
    one = jnp.ones((), bool)
    np.testing.assert_allclose(kl_divergence(p, q, one), np.log(2), rtol=1e-6)
    assert kl_divergence(q, p, one) == INF
    # beta p + (1 - beta) q with p = [1, 0] and q = [.5, .5] is [.65, .35].
    expected = 0.3 * np.log(1 / 0.65) + 0.7 * np.log(0.25 / (0.65 * 0.35)) / 2
    value, gradients = jax.value_and_grad(
        lambda p, q: jensen_shannon(p, q, one, beta=0.3), argnums=(0, 1)
    )(p, q)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)


def test_a_token_too_unlikely_for_float32_counts_as_absent():
    p, q = jnp.array([0.0, -200.0]), jnp.array([0.0, -INF])
    assert kl_divergence(p, q, jnp.ones((), bool)) == 0.0


@every_case
def test_a_counted_nan_stays_visible(name):
    p, q, mask = example()
    p = p.at[0, 0, 1].set(jnp.nan)
    values = CASES[name][0](p, q, mask)
    assert jnp.isnan(values).tolist() == [[True, False, False], [False] * 3]


@LAWS
@given(p=LOGITS, q=LOGITS, beta=st.floats(0.05, 0.95))
def test_laws_of_the_jensen_shannon_divergence(p, q, beta):
    p, q, mask = jnp.array(p), jnp.array(q), jnp.ones((2, 3), bool)
    value = jensen_shannon(p, q, mask, beta=beta)
    swapped = jensen_shannon(q, p, mask, beta=1 - beta)
    np.testing.assert_allclose(value, swapped, rtol=1e-5, atol=1e-6)
    # The mutual information of a token and which distribution it is from.
    from_p = -(beta * np.log(beta) + (1 - beta) * np.log1p(-beta))
    assert (value >= -1e-6).all()
    assert (value <= from_p + 1e-6).all()
    np.testing.assert_allclose(jensen_shannon(p, p, mask, beta=beta), 0.0, atol=1e-6)


def test_limits_of_the_jensen_shannon_divergence():
    p, q, mask = example()
    small = 1e-3
    forward = jensen_shannon(p, q, mask, beta=small) / small
    backward = jensen_shannon(p, q, mask, beta=1 - small) / small
    np.testing.assert_allclose(forward, kl_divergence(p, q, mask), rtol=0.02)
    np.testing.assert_allclose(backward, kl_divergence(q, p, mask), rtol=0.02)


def test_entropy_is_the_uniform_ones_less_the_divergence_from_it():
    p, _, mask = example()
    expected = jnp.where(mask, np.log(5) - kl_divergence(p, jnp.zeros_like(p), mask), 0)
    np.testing.assert_allclose(entropy(p, mask), expected, rtol=1e-6)
    assert (kl_divergence(p, p + 3.0, mask) <= 1e-6).all()


def test_the_sampled_estimator_has_its_value_and_gradient_in_expectation():
    p, q, _ = example()
    p, q = p[0, 0], q[0, 0]
    everything, one = jnp.ones(5, bool), jnp.ones((), bool)
    reference = jax.nn.log_softmax(q)
    probabilities = jax.nn.softmax(p)

    def sampled(logits):
        logprobs = jax.nn.log_softmax(logits)
        values = kl.k1(logprobs, reference, everything)
        return (probabilities * kl.with_score_term(values, logprobs, everything)).sum()

    whole = jax.value_and_grad(lambda x: kl_divergence(x, q, one))(p)
    estimate = jax.value_and_grad(sampled)(p)
    for found, expected in zip(estimate, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5])
def test_beta_is_checked(beta):
    p, q, mask = example()
    message = rf"beta must be in \(0, 1\), got {beta}; .* kl_divergence\(p, q\)"
    with pytest.raises(ValueError, match=message):
        distribution_kl.jensen_shannon(p, q, mask, beta=beta)
