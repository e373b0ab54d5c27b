"""Numbers that other frameworks' tests assert for policy losses and their weights.

The fixture: advantages [1, -1, 2] and log-ratios of ln .5, 0, ln 1.5, three tokens that
all count, clip range 0.2. `SAMPLER` holds the sampler's log-probs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import (
    correction,
    diagnostics,
    policy,
    ratios,
    reduce,
)
from jaxrl_post.metrics import masked

ADVANTAGES = jnp.array([[1.0, -1.0, 2.0]])
PROXIMAL = jnp.array([[-1.0, -1.0, -1.0]])
POLICY = jnp.array([[-1.69315, -1.0, -0.59453]])
SAMPLER = jnp.array([[-0.5, -1.5, -0.8]])
MASK = jnp.ones((1, 3), bool)
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def token_mean(per_token) -> float:
    return reduce.token_mean(per_token, jnp.ones(per_token.shape, bool)).mean().item()


def from_ratios(values) -> tuple[jax.Array, jax.Array]:
    """Policy and proximal log-probs whose ratios are `values`."""
    policy_logprobs = jnp.log(jnp.array([values])) - 3.0
    return policy_logprobs, jnp.full_like(policy_logprobs, -3.0)


def clipped(policy_logprobs=POLICY, proximal_logprobs=PROXIMAL):
    return policy.clipped_surrogate(
        policy_logprobs, proximal_logprobs, ADVANTAGES, MASK, **CLIP
    )


def test_row_01_clipped_surrogate():
    assert token_mean(clipped()) == pytest.approx(-0.6333, abs=5e-5)


def test_row_02_reinforce():
    logprobs = jnp.array([[-0.5, -1.0, -1.5]])
    loss = policy.reinforce(logprobs, ADVANTAGES, MASK)
    assert token_mean(loss) == pytest.approx(0.8333, abs=5e-5)


def test_row_03_forced_on_policy_ratio():
    assert token_mean(clipped(POLICY, POLICY)) == pytest.approx(-0.6667, abs=5e-5)
    for ratio in (
        ratios.token_ratio(POLICY, POLICY, MASK),
        ratios.sequence_ratio(POLICY, POLICY, MASK),
        ratios.sequence_product_ratio(POLICY, POLICY, MASK),
        ratios.gspo_token_ratio(POLICY, POLICY, MASK),
    ):
        assert ratio.tolist() == [[1.0, 1.0, 1.0]]


def test_row_04_cispo_and_its_product_with_importance_weights():
    loss = policy.cispo(
        POLICY, PROXIMAL, ADVANTAGES, MASK, ratio_low=0.8, ratio_high=1.2
    )
    weights = correction.token_weights(PROXIMAL, SAMPLER, MASK)
    assert token_mean(loss) == pytest.approx(0.59380, abs=5e-6)
    assert token_mean(weights * loss) == pytest.approx(0.11369, abs=5e-6)


def test_row_05_clipped_surrogate_times_importance_weights():
    weights = correction.token_weights(PROXIMAL, SAMPLER, MASK)
    np.testing.assert_allclose(weights, [[0.6065, 1.6487, 0.8187]], atol=5e-5)
    assert token_mean(weights * clipped()) == pytest.approx(-0.2065, abs=5e-5)


def test_row_06_truncated_importance_sampling_per_token():
    weights = correction.token_weights(PROXIMAL, SAMPLER, MASK)
    capped = correction.truncated(weights, cap=0.8)
    assert token_mean(capped * clipped()) == pytest.approx(-0.4744, abs=5e-5)


def test_row_06_truncated_importance_sampling_per_sequence():
    # At the sequence level the ratio is GSPO's as well, and the weight is the product.
    weights = correction.sequence_weights(PROXIMAL, SAMPLER, MASK)
    capped = correction.truncated(weights, cap=0.8)
    loss = policy.gspo(POLICY, PROXIMAL, ADVANTAGES, MASK, **CLIP)
    assert token_mean(capped * loss) == pytest.approx(-0.4846, abs=5e-5)


def test_row_07_icepop_on_policy():
    sampler = jnp.array([[-0.5, -3.5, -0.8]])
    raw = correction.token_weights(PROXIMAL, sampler, MASK)
    weights = correction.icepop(raw, low=0.5, high=5.0)
    loss = weights * clipped(PROXIMAL, PROXIMAL)
    np.testing.assert_allclose(weights, [[0.6065, 0.0, 0.8187]], atol=5e-5)
    assert token_mean(loss) == pytest.approx(-0.7480, abs=5e-5)


def test_row_08_sequence_mask_keeps_a_sequence_inside_its_bounds():
    sampler = jnp.full((1, 3), -1.0005)
    weights = correction.token_weights(PROXIMAL, sampler, MASK)
    kept = correction.sequence_masked(
        weights, PROXIMAL, sampler, MASK, low=0.999, high=1.002
    )
    np.testing.assert_allclose(kept, np.full((1, 3), np.exp(0.0005)), rtol=1e-6)


def test_row_08_minus_infinity_from_the_sampler_gives_a_finite_loss():
    sampler = jnp.array([[-1.0005, -jnp.inf, -1.0005]])
    weights = correction.token_weights(PROXIMAL, sampler, MASK)
    dropped = correction.sequence_masked(
        weights, PROXIMAL, sampler, MASK, low=0.999, high=1.002
    )
    assert dropped.tolist() == [[0.0, 0.0, 0.0]]
    assert np.isfinite(token_mean(weights * clipped()))
    assert token_mean(dropped * clipped()) == 0.0


def test_row_09_gspo():
    loss = policy.gspo(POLICY, PROXIMAL, ADVANTAGES, MASK, **CLIP)
    assert token_mean(loss) == pytest.approx(-0.6057, abs=5e-5)


def test_row_09_gspo_of_two_sequences():
    def twice(row):
        return jnp.concatenate([row, row])

    proximal = jnp.concatenate([PROXIMAL, PROXIMAL - 1.0])
    loss = policy.gspo(twice(POLICY), proximal, twice(ADVANTAGES), twice(MASK), **CLIP)
    assert token_mean(loss) == pytest.approx(-0.4912, abs=5e-5)


def test_row_10_gspo_with_sequence_importance_weight():
    weights = correction.sequence_weights(PROXIMAL, SAMPLER, MASK)
    loss = policy.gspo(POLICY, PROXIMAL, ADVANTAGES, MASK, **CLIP)
    np.testing.assert_allclose(weights, np.full((1, 3), 0.8187), atol=5e-5)
    assert token_mean(weights * loss) == pytest.approx(-0.4959, abs=5e-5)


def test_row_11_dual_clip():
    logprobs, proximal = from_ratios([0.5, 1.0, 10.0])
    loss = policy.clipped_surrogate(
        logprobs, proximal, jnp.array([[1.0, -1.0, -4.0]]), MASK, dual_clip=3.0, **CLIP
    )
    np.testing.assert_allclose(loss, [[-0.5, 1.0, 12.0]], rtol=1e-5)
    assert token_mean(loss) == pytest.approx(4.1667, abs=5e-5)


def test_row_32_dual_clip():
    logprobs, proximal = from_ratios([2.0, 2.0, 0.5])
    loss = policy.clipped_surrogate(
        logprobs, proximal, jnp.array([[2.0, -2.0, 2.0]]), MASK, dual_clip=1.5, **CLIP
    )
    np.testing.assert_allclose(loss, [[-2.4, 3.0, -1.0]], rtol=1e-5)


def test_row_29_icepop_on_raw_weights():
    raw = jnp.array([[0.4, 0.8, 6.0]])
    weights = correction.icepop(raw, low=0.5, high=5.0)
    outside = diagnostics.outside_fraction(raw, MASK, low=0.5, high=5.0)
    ess = diagnostics.effective_sample_size(weights, MASK)
    mean, mean_square = (
        masked(values, MASK).mean().item() for values in (weights, weights**2)
    )
    np.testing.assert_allclose(weights, [[0.0, 0.8, 0.0]], rtol=1e-6)
    assert outside.mean().item() == pytest.approx(2 / 3)
    assert (mean_square - mean**2) ** 0.5 == pytest.approx(0.3771236, abs=5e-7)
    assert ess.mean().item() == pytest.approx(1 / 3)


def test_row_33_cispo_clamps_the_ratio_and_differentiates_the_logprob_alone():
    logprobs, proximal = from_ratios([1.0, 1.14, 1.56, 0.4])
    advantages, mask = jnp.ones((1, 4)), jnp.ones((1, 4), bool)

    def loss(policy_logprobs):
        return policy.cispo(
            policy_logprobs, proximal, advantages, mask, ratio_low=0.8, ratio_high=1.28
        )

    clamps = np.array([[1.0, 1.14, 1.28, 0.8]])
    gradient = jax.grad(lambda p: loss(p).sum())(logprobs)
    np.testing.assert_allclose(loss(logprobs), -clamps * logprobs, rtol=1e-5)
    np.testing.assert_allclose(gradient, -clamps, rtol=1e-5)


@pytest.mark.parametrize(
    ("dialect", "bounds", "weight"),
    [
        ("NeMo RL, verl, slime: 1 + eps_high", (0.8, 1.28), 1.28),
        ("TRL: eps_high itself", (0.0, 5.0), 3.0),
    ],
)
def test_cispo_offers_both_meanings_of_its_upper_bound(dialect, bounds, weight):
    logprobs, proximal = from_ratios([3.0])
    low, high = bounds
    loss = policy.cispo(
        logprobs,
        proximal,
        jnp.ones((1, 1)),
        jnp.ones((1, 1), bool),
        ratio_low=low,
        ratio_high=high,
    )
    assert (loss / -logprobs).item() == pytest.approx(weight, rel=1e-5), dialect
