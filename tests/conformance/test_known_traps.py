"""Mistakes that other stacks have made, which these losses must not."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Predictions, corrections
from jaxrl_post.losses import kl, reduce
from jaxrl_post.types import TokenBatch, rows

POLICY = jnp.array([[-1.0, -2.0, -0.5, -1.5], [-1.0, -3.0, 0.0, 0.0]])


def batch() -> TokenBatch:
    """Two sequences of four and two tokens."""
    mask = jnp.array([[True] * 4, [True, True, False, False]])
    ids = mask.astype(jnp.int32)
    return TokenBatch(
        tokens=ids,
        positions=ids,
        ends=ids * ids.sum(axis=1, keepdims=True),
        loss_mask=mask,
        advantages=jnp.array([[1.0] * 4, [-2.0] * 4]),
        behavior_logprobs=POLICY,
        versions=ids,
        reference_logprobs=POLICY - 0.5,
    )


def test_k1_as_a_loss_is_refused():
    with pytest.raises(ValueError, match="expected gradient is zero"):
        algorithms.grpo(kl_coefficient=0.1, kl_estimator=kl.k1)


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo"])
def test_the_kl_and_the_policy_term_share_one_denominator(name):
    make = getattr(algorithms, name)
    reduction = {
        "grpo": reduce.sequence_mean_of_token_mean,
        "dapo": reduce.token_mean,
        "rloo": reduce.sequence_mean_of_token_sum,
    }[name]
    data = batch()
    plain = make().objective(Predictions(POLICY), data).loss
    with_kl = make(kl_coefficient=0.3).objective(Predictions(POLICY), data).loss
    penalty = reduction(
        kl.k3(POLICY, data.reference_logprobs, data.loss_mask),
        data.loss_mask,
        data.ends,
    )
    assert with_kl.count == plain.count == penalty.count
    np.testing.assert_allclose(
        with_kl.mean(), plain.mean() + 0.3 * penalty.mean(), rtol=1e-6
    )


def test_the_loss_does_not_depend_on_the_split_into_microbatches():
    algorithm, data = algorithms.dapo(), batch()
    parts = [
        algorithm.objective(Predictions(POLICY[i : i + 1]), rows(data, i, i + 1)).loss
        for i in range(2)
    ]
    whole = algorithm.objective(Predictions(POLICY), data).loss
    np.testing.assert_allclose((parts[0] + parts[1]).mean(), whole.mean(), rtol=1e-6)
    mean_of_means = (parts[0].mean() + parts[1].mean()) / 2
    assert abs(mean_of_means - whole.mean()) > 0.1


@pytest.mark.parametrize(
    "correction",
    [
        corrections.truncated_tokens(),
        corrections.truncated_sequences(),
        corrections.icepop(),
        corrections.icepop_sequences(),
        corrections.masked_sequences(low=0.9, high=1.1),
        corrections.rejected_tokens(divergence=kl.k3, high=1.0),
        corrections.rejected_sequences(divergence=kl.k3, statistic="max", high=1.0),
    ],
)
def test_a_missing_sampler_logprob_is_not_probability_one(correction):
    data = batch()
    missing = data.behavior_logprobs.at[0, 2].set(jnp.nan)
    loss = algorithms.grpo(correction=correction).objective(
        Predictions(POLICY), data.replace(behavior_logprobs=missing)
    )
    assert jnp.isnan(loss.loss.sum)


def test_a_dropped_token_stays_in_the_denominator():
    # The sampler was 2.5 times as sure of one of six tokens: icepop drops it.
    data = batch()
    unlike = data.behavior_logprobs.at[0, 2].add(np.log(2.5))
    data = data.replace(
        behavior_logprobs=unlike, advantages=jnp.ones_like(data.advantages)
    )
    loss = algorithms.dapo(correction=corrections.icepop()).objective(
        Predictions(POLICY), data
    )
    assert loss.loss.count == 6
    np.testing.assert_allclose(loss.loss.mean(), -5 / 6, rtol=1e-6)


def test_every_counted_token_counts_whatever_its_id():
    # Pad and EOS are id 0 here; only the mask says what counts.
    data = batch()
    zeros = data.replace(tokens=jnp.zeros_like(data.tokens))
    loss, same = (
        algorithms.dapo().objective(Predictions(POLICY), x).loss for x in (data, zeros)
    )
    assert (loss.sum, loss.count) == (same.sum, same.count)
    assert loss.count == 6
