"""Numbers that other frameworks' tests assert for policy losses with other bounds."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import entropy, policy, trust_region

ENTROPY = jnp.arange(1, 13).reshape(2, 6) / 10
TEN = jnp.array([[True] * 6, [True] * 4 + [False] * 2])


def test_row_35_sapo_gate():
    logprobs, mask = jnp.full((2, 4), -1.0), jnp.ones((2, 4), bool)
    loss = policy.sapo(logprobs, logprobs, jnp.ones((2, 4)), mask, tau_positive=1.0)
    assert loss.tolist() == [[-2.0] * 4] * 2
    scaled = policy.sapo(logprobs, logprobs, jnp.full((2, 4), 3.0), mask)
    np.testing.assert_allclose(-scaled / 3.0, 2.0, rtol=1e-6)


def test_row_40_off_policy_sequence_mask():
    advantages, mean_kl = jnp.array([1.0, -1.0, -1.0]), jnp.array([2.0, 0.5, 2.0])
    keep = trust_region.opsm_keep(advantages, mean_kl, threshold=1.0)
    assert keep.tolist() == [True, True, False]
    # The same means from log-probs, two tokens a sequence.
    sampler = jnp.zeros((3, 2))
    drift = jnp.array([[1.0, 3.0], [0.5, 0.5], [4.0, 0.0]])
    tokens = trust_region.opsm_mask(
        sampler - drift,
        sampler,
        jnp.repeat(advantages[:, None], 2, axis=1),
        jnp.ones((3, 2), bool),
        threshold=1.0,
    )
    assert tokens.tolist() == [[True] * 2, [True] * 2, [False] * 2]


@pytest.mark.parametrize(
    ("policy_logprobs", "sampler", "advantage", "delta", "kept"),
    [
        ([-1.0, -2.0], [-1.5, -2.5], 1.0, 0.5, True),
        ([-1.0], [-0.5], -1.0, 1.0, True),
        ([-1.0], [1.0], -1.0, 0.1, False),
    ],
)
def test_row_40_as_miles_tests_it(policy_logprobs, sampler, advantage, delta, kept):
    p, q = jnp.array(policy_logprobs), jnp.array(sampler)
    mask = trust_region.opsm_mask(
        p, q, jnp.full(p.shape, advantage), jnp.ones(p.shape, bool), threshold=delta
    )
    assert mask.tolist() == [kept] * len(policy_logprobs)


@pytest.mark.parametrize(
    ("quantile", "expected"),
    [
        (0.8, [[0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]]),
        (0.5, [[0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0]]),
        (0.0, [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
        (1.0, [[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]),
    ],
)
def test_row_41_entropy_quantile_mask(quantile, expected):
    keep = entropy.top_entropy_mask(ENTROPY, TEN, quantile=quantile)
    np.testing.assert_array_equal(keep, expected)


def test_row_41_entropy_quantile_mask_of_unsorted_entropies():
    values = jnp.array(
        [[0.1, 0.2, 0.3, 1.4, 0.5, 0.14], [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]]
    )
    mask = jnp.tile(jnp.arange(6) < 4, (2, 1))
    keep = entropy.top_entropy_mask(values, mask, quantile=0.8)
    np.testing.assert_array_equal(keep, [[0, 0, 0, 1, 0, 0]] * 2)
    nothing = jnp.zeros_like(mask)
    assert not entropy.top_entropy_mask(values, nothing, quantile=0.5).any()
