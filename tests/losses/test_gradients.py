"""Finite differences of the losses whose own tests have none.

A transcription is a function of x, differentiated at x = p in float64; what a loss
holds constant it holds at p.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import entropy, kl, policy, ratios, supervised, trust_region
from tests.losses import numeric

LOW, HIGH = 0.2, 0.3
CLIP = {"clip_low": LOW, "clip_high": HIGH}
THRESHOLD, MAX_RATIO = 0.05, 1.5


def example():
    """Ratios from far below to far above the clip range, none of them on a corner."""
    rng = np.random.default_rng(1)
    q = rng.uniform(-3, -1.4, (3, 4))
    p = q + rng.uniform(-0.6, 1.3, (3, 4))
    return p, q, rng.normal(size=(3, 4)), rng.random((3, 4)) < 0.8


def mean_of_rows(values, mask):
    return (values * mask).sum(axis=1, keepdims=True) / mask.sum(axis=1, keepdims=True)


def sequence_ratio(x, q, mask):
    return np.exp(mean_of_rows(x - q, mask)) + np.zeros_like(x)


def clipped(ratio, a):
    return -np.minimum(ratio * a, np.clip(ratio, 1 - LOW, 1 + HIGH) * a)


def k3(x, q):
    return np.exp(q - x) - (q - x) - 1


def dppo(x, p, q, a, mask):
    """With the divergence of {the sampled token, all others} and a bounded weight."""
    on, off = np.exp(p), np.exp(q)
    divergence = off * (q - p) + (1 - off) * np.log((1 - off) / (1 - on))
    outward = np.where(a > 0, p > q, p < q)
    weight = np.minimum(np.exp(p - q), MAX_RATIO)
    keep = ~(outward & (divergence > THRESHOLD))
    assert 0 < (mask & ~keep).sum() < mask.sum()
    return np.where(keep, -weight * np.exp(x - p) * a, 0.0)


def clip_cov(p, q, a, mask):
    return entropy.clip_cov(
        *(p, q, a, mask, jax.random.key(0)),
        **{"fraction": 0.2, "cov_range": (0.0, 9.0), **CLIP},
    )


def clip_cov_transcription(x, p, q, a, mask):
    # Which tokens are drawn is the library's to say.
    dropped = mask & np.asarray(clip_cov(*low(p, q, a, mask)) == 0)
    assert dropped.any()
    return np.where(dropped, 0.0, clipped(np.exp(x - q), a))


# Each function of p, q, a and the mask with its transcription of x, p, q, a and mask.
CASES = {
    "cispo": (
        lambda p, q, a, mask: policy.cispo(
            p, q, a, mask, ratio_low=1 - LOW, ratio_high=1 + HIGH
        ),
        lambda x, p, q, a, mask: -np.clip(np.exp(p - q), 1 - LOW, 1 + HIGH) * a * x,
    ),
    "gspo_token": (
        lambda p, q, a, mask: policy.gspo_token(p, q, a, mask, **CLIP),
        lambda x, p, q, a, mask: clipped(sequence_ratio(p, q, mask) * np.exp(x - p), a),
    ),
    "clip_cov": (clip_cov, clip_cov_transcription),
    "dppo": (
        lambda p, q, a, mask: trust_region.dppo(
            *(p, q, a, mask),
            divergence=trust_region.binary_kl,
            threshold=THRESHOLD,
            ratio_high=MAX_RATIO,
        ),
        dppo,
    ),
    "k1": (
        lambda p, q, a, mask: kl.k1(p, q, mask),
        lambda x, p, q, a, mask: x - q,
    ),
    "k2": (
        lambda p, q, a, mask: kl.k2(p, q, mask),
        lambda x, p, q, a, mask: (x - q) ** 2 / 2,
    ),
    "k3": (
        lambda p, q, a, mask: kl.k3(p, q, mask),
        lambda x, p, q, a, mask: k3(x, q),
    ),
    "k3_plus": (
        lambda p, q, a, mask: kl.k3_plus(p, q, mask),
        lambda x, p, q, a, mask: k3(p, q) + ((x - q) ** 2 - (p - q) ** 2) / 2,
    ),
    "entropy_bonus": (
        lambda p, q, a, mask: entropy.entropy_bonus(p, mask),
        lambda x, p, q, a, mask: -x,
    ),
    "next_token_loss": (
        lambda p, q, a, mask: supervised.next_token_loss(p, mask),
        lambda x, p, q, a, mask: -x,
    ),
    "dynamic_fine_tuning_loss": (
        lambda p, q, a, mask: supervised.dynamic_fine_tuning_loss(p, mask),
        lambda x, p, q, a, mask: -np.exp(p) * x,
    ),
    "token_ratio": (
        lambda p, q, a, mask: ratios.token_ratio(p, q, mask),
        lambda x, p, q, a, mask: np.exp(x - q),
    ),
    "sequence_ratio": (
        lambda p, q, a, mask: ratios.sequence_ratio(p, q, mask),
        lambda x, p, q, a, mask: sequence_ratio(x, q, mask),
    ),
    "sequence_product_ratio": (
        lambda p, q, a, mask: ratios.sequence_product_ratio(p, q, mask),
        lambda x, p, q, a, mask: np.exp(
            ((x - q) * mask).sum(axis=1, keepdims=True) + np.zeros_like(x)
        ),
    ),
    "gspo_token_ratio": (
        lambda p, q, a, mask: ratios.gspo_token_ratio(p, q, mask),
        lambda x, p, q, a, mask: sequence_ratio(p, q, mask) * np.exp(x - p),
    ),
}


def low(*arrays):
    return [jnp.array(x, bool if x.dtype == bool else jnp.float32) for x in arrays]


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_equal_those_of_the_transcription(name):
    function, transcription = CASES[name]
    p, q, a, mask = example()
    weights = np.where(mask, np.random.default_rng(2).normal(size=p.shape), 0.0)

    def exact(x):
        return weights * transcription(x, p, q, a, mask)

    def total(*logprobs):
        values = function(*logprobs, *low(a, mask))
        return (jnp.array(weights, jnp.float32) * values).sum()

    value, (gradient, of_q) = jax.value_and_grad(total, argnums=(0, 1))(*low(p, q))
    np.testing.assert_allclose(value, exact(p).sum(), rtol=1e-5, atol=1e-5)
    expected = numeric.gradient(exact, p)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
    assert np.count_nonzero(expected) > 3
    assert not np.any(of_q)
