"""VESPO, sequences as actions, batch scales and entropy quantiles, transcribed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import baselines, entropy, policy

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
KERNEL = {
    "k_positive": 1.5,
    "lambda_positive": 2.5,
    "k_negative": 3.0,
    "lambda_negative": 1.5,
}


def example(seed=4, rows=3, length=5):
    rng = np.random.default_rng(seed)
    q = -rng.gamma(2.0, 0.5, (rows, length))
    p = q + rng.normal(0, 0.3, (rows, length))
    a = np.broadcast_to(rng.normal(size=(rows, 1)), (rows, length))
    return p, q, a, rng.random((rows, length)) < 0.7


def vespo(p, frozen, q, a, mask):
    w = np.exp(((frozen - q) * mask).sum(-1, keepdims=True))
    k = np.where(a >= 0, KERNEL["k_positive"], KERNEL["k_negative"])
    rate = np.where(a >= 0, KERNEL["lambda_positive"], KERNEL["lambda_negative"])
    return np.where(mask, -(w**k) * np.exp(rate * (1 - w)) * a * p, 0.0)


def surrogate(p, frozen, q, a, mask):
    w = np.exp(((p - q) * mask).sum(-1, keepdims=True))
    clipped = np.clip(w, 1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
    return np.where(mask, -np.minimum(w * a, clipped * a), 0.0)


LOSSES = {
    "vespo": (partial(policy.vespo, **KERNEL), vespo),
    "surrogate": (partial(policy.clipped_sequence_surrogate, **CLIP), surrogate),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_equal_their_transcriptions(name):
    loss, transcription = LOSSES[name]
    p, q, a, mask = example()
    low = [jnp.array(x, jnp.float32) for x in (p, q, a)]
    found = loss(*low, jnp.array(mask))
    expected = transcription(p, p, q, a, mask)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda x: loss(x, *low[1:], jnp.array(mask)).sum())(low[0])
    numeric, step = np.zeros_like(p), 1e-6
    for index in np.ndindex(p.shape):
        shift = np.zeros_like(p)
        shift[index] = step
        above, below = (
            transcription(p + s * shift, p, q, a, mask).sum() for s in (1, -1)
        )
        numeric[index] = (above - below) / (2 * step)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5)


def test_vespo_is_reinforce_on_policy_and_fades_on_both_sides():
    p, _, a, mask = (jnp.array(x) for x in example())
    p, a = p.astype(jnp.float32), a.astype(jnp.float32)
    np.testing.assert_array_equal(
        policy.vespo(p, p, a, mask), policy.reinforce(p, a, mask)
    )
    one, whole = jnp.ones((1, 1)), jnp.array([[True]])

    def weight(w, advantage):
        p = jnp.full((1, 1), -1.0)
        return policy.vespo(p, p - jnp.log(w), advantage * one, whole)[0, 0] / advantage

    # The authors' defaults peak at w = k / lambda: 2/3 and 3/2.
    assert weight(2 / 3, 1.0) > weight(1.0, 1.0) > weight(4.0, 1.0)
    assert weight(3 / 2, -1.0) > weight(1.0, -1.0) > weight(0.2, -1.0)
    np.testing.assert_allclose(weight(2 / 3, 1.0), 4 / 9 * np.e, rtol=1e-5)


def test_the_kernels_numbers_are_checked():
    x, mask = jnp.zeros((1, 1)), jnp.array([[True]])
    for name in KERNEL:
        with pytest.raises(ValueError, match=f"{name} must be >= 0, got -1"):
            policy.vespo(x, x, x, mask, **{name: -1.0})


@pytest.mark.parametrize("ddof", [0, 1])
def test_batch_scaled_centres_in_the_group_and_scales_by_the_batch(ddof):
    rng = np.random.default_rng(0)
    rewards, valid = rng.normal(size=(4, 3)), rng.random((4, 3)) < 0.7
    found = baselines.batch_scaled(
        jnp.array(np.where(valid, rewards, np.nan), jnp.float32),
        jnp.array(valid),
        ddof=ddof,
        epsilon=1e-4,
    )
    scale = rewards[valid].std(ddof=ddof) + 1e-4
    for row, kept, got in zip(rewards, valid, found, strict=True):
        # A group of one has nothing to be compared with.
        centred = row[kept] - row[kept].mean() if kept.any() else row[kept]
        np.testing.assert_allclose(got[kept], centred / scale, rtol=1e-5, atol=1e-6)
        assert (got[~kept] == 0).all()
    equal = baselines.batch_scaled(jnp.full((2, 3), 0.1))
    assert (equal == 0).all()


def test_gdpo_with_epsilon_outside_of_the_root():
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=(3, 4, 2))
    epsilon = 0.5
    parts = (rewards - rewards.mean(1, keepdims=True)) / (
        rewards.std(1, ddof=1, keepdims=True) + epsilon
    )
    total = parts.sum(-1)
    low = jnp.array(rewards, jnp.float32)
    outside = baselines.gdpo(low, epsilon=epsilon, epsilon_inside=False)
    np.testing.assert_allclose(
        outside, total / (total.std(ddof=1) + epsilon), rtol=1e-5, atol=1e-6
    )
    inside = baselines.gdpo(low, epsilon=epsilon)
    np.testing.assert_allclose(
        inside, total / np.sqrt(total.var(ddof=1) + epsilon**2), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("levels", [3, 1000])
def test_the_entropy_quantile_is_numpys(quantile, levels):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        values = rng.integers(0, levels, (2, 7)) / 8
        mask = rng.random((2, 7)) < 0.7
        found = entropy.entropy_quantile_mask(
            jnp.array(np.where(mask, values, np.nan), jnp.float32),
            jnp.array(mask),
            quantile=quantile,
        )
        kept = values[mask]
        threshold = np.quantile(kept.astype(np.float32), np.float32(quantile))
        expected = mask & (values >= threshold - 1e-6)
        np.testing.assert_array_equal(found, expected)


def test_the_two_choices_of_tokens_differ_in_ties_alone():
    mask = jnp.ones((1, 10), bool)
    distinct = jnp.arange(10.0)[None]
    np.testing.assert_array_equal(
        entropy.entropy_quantile_mask(distinct, mask),
        entropy.top_entropy_mask(distinct, mask),
    )
    tied = jnp.minimum(distinct, 5.0)
    assert entropy.top_entropy_mask(tied, mask).sum() == 2
    assert entropy.entropy_quantile_mask(tied, mask).sum() == 5


def test_an_entropy_that_is_nan_is_kept():
    mask = jnp.array([True, True, False])
    found = entropy.entropy_quantile_mask(jnp.array([jnp.nan, 1.0, 2.0]), mask)
    assert found.tolist() == [True, True, False]
    with pytest.raises(ValueError, match=r"quantile must be in \[0, 1\], got 1\.5"):
        entropy.entropy_quantile_mask(jnp.zeros(3), mask, quantile=1.5)
