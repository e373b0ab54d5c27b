"""Diagnostics: known values, and exactness under packing and microbatches."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import diagnostics

MASK = jnp.array([[True, True, True, False], [True, False, False, False]])


def test_clip_fractions_count_the_tokens_that_lose_their_gradient():
    ratio = jnp.array([[0.7, 0.7, 1.4, 1.4], [1.4, 0.7, 0.7, 0.7]])
    advantages = jnp.array([[-1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]])
    low = diagnostics.clip_fraction_low(ratio, advantages, MASK, clip_low=0.2)
    high = diagnostics.clip_fraction_high(ratio, advantages, MASK, clip_high=0.2)
    assert (low.sum.item(), low.count.item()) == (1.0, 4.0)
    assert (high.sum.item(), high.count.item()) == (1.0, 4.0)
    wide = diagnostics.clip_fraction_high(ratio, advantages, MASK, clip_high=0.5)
    assert wide.sum.item() == 0.0


def test_outside_fraction_by_hand():
    values = jnp.array([[0.4, 0.5, 5.0, 9.0], [5.1, 9.0, 9.0, 9.0]])
    both = diagnostics.outside_fraction(values, MASK, low=0.5, high=5.0)
    assert (both.sum.item(), both.count.item()) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0, 1.0, 1.0, 9.0], 1.0),
        ([5.0, 0.0, 0.0, 9.0], 1 / 3),
        ([1.0, 2.0, 3.0, 9.0], 36 / 42),
        ([0.0, 0.0, 0.0, 9.0], 0.0),
        ([4.8e8, 4.8e8, 4.8e8, 9.0], 1.0),
    ],
)
def test_effective_sample_size_of_a_sequence(weights, expected):
    ess = diagnostics.effective_sample_size(jnp.array([weights]), MASK[:1])
    assert ess.count.item() == 1.0
    assert ess.mean().item() == pytest.approx(expected, rel=1e-6)


def test_effective_sample_size_packed_and_split():
    weights = jnp.array([[1.0, 2.0, 3.0, 9.0], [7.0, 9.0, 9.0, 9.0]])
    whole = diagnostics.effective_sample_size(weights, MASK)
    parts = [
        diagnostics.effective_sample_size(weights[i : i + 1], MASK[i : i + 1])
        for i in range(2)
    ]
    packed = diagnostics.effective_sample_size(
        weights.reshape(1, 8),
        MASK.reshape(1, 8),
        jnp.array([[1, 1, 1, 0, 2, 0, 0, 0]]),
    )
    for other in (parts[0] + parts[1], packed):
        np.testing.assert_allclose(other.sum, whole.sum, rtol=1e-6)
        assert other.count.item() == whole.count.item() == 2.0
    assert whole.mean().item() == pytest.approx((36 / 42 + 1) / 2)


def test_mismatch_is_bounded_when_the_sampler_gave_minus_infinity():
    sampler = jnp.full(MASK.shape, -1.0).at[0, 0].set(-jnp.inf)
    trainer = jnp.full(MASK.shape, -1.0)
    error = diagnostics.token_mult_prob_error(trainer, sampler, MASK)
    assert error.mean().item() == pytest.approx((np.exp(20.0) + 3) / 4, rel=1e-6)
    assert jnp.isfinite(diagnostics.approximate_kl(sampler, trainer, MASK).sum)


def test_approximate_kl_by_hand():
    sampled, other = jnp.array([-1.0, -1.0]), jnp.array([-2.0, -1.0])
    estimate = diagnostics.approximate_kl(sampled, other, jnp.ones(2, bool))
    assert estimate.mean().item() == pytest.approx((np.exp(-1) + 1 - 1) / 2, rel=1e-6)


def test_sampled_entropy_is_the_entropy_in_expectation():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    sampler = np.array([0.25, 0.25, 0.25, 0.25])
    estimate = diagnostics.sampled_entropy(
        jnp.log(jnp.array(probabilities)),
        jnp.log(jnp.array(sampler)),
        jnp.ones(4, bool),
    )
    entropy = -(probabilities * np.log(probabilities)).sum()
    assert estimate.mean().item() == pytest.approx(entropy, rel=1e-5)
