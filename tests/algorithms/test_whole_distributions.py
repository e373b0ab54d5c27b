"""Distillation from whole distributions: the objective and its divergences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Predictions
from jaxrl_post.algorithms.whole_distributions import (
    distribution_distillation,
    top_k_forward_kl,
)

UNIFORM, ON = jnp.zeros((1, 4)), jnp.array([True])
TEACHER = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))


def divergences(batch, seed: int = 0):
    """Two numbers a token; NaN where none is to be read."""
    rng = np.random.default_rng(seed)
    drawn = rng.gamma(2.0, 0.5, (2, *batch.shape)).astype(np.float32)
    return jnp.where(batch.loss_mask, drawn, jnp.nan)


def test_the_loss_is_the_mean_over_the_tokens_that_count(unpacked):
    _, batch = unpacked
    divergence, entropy = divergences(batch)
    predictions = Predictions(divergence=divergence, teacher_entropy=entropy)
    found = distribution_distillation().objective(predictions, batch)
    mask = np.asarray(batch.loss_mask & (batch.ends > 0))
    expected = np.asarray(divergence, np.float64)[mask]
    assert float(found.loss.count) == mask.sum() > 10
    assert float(found.loss.mean()) == pytest.approx(expected.mean(), rel=1e-6)
    assert found.metrics.keys() == {"distill/divergence", "distill/teacher_entropy"}
    assert found.metrics["distill/divergence"] == found.loss
    assert float(found.metrics["distill/teacher_entropy"].mean()) == pytest.approx(
        np.asarray(entropy, np.float64)[mask].mean(), rel=1e-6
    )


def test_packing_changes_nothing(sequences, unpacked, lay_out):
    _, batch = unpacked
    divergence, _ = divergences(batch)
    values = [
        {
            **sequence,
            "policy_logprobs": np.asarray(divergence[i, : len(sequence["tokens"])]),
        }
        for i, sequence in enumerate(sequences)
    ]
    packed, together = lay_out([values[:3], values[3:]], 16)
    objective = distribution_distillation().objective
    apart = objective(Predictions(divergence=divergence), batch)
    found = objective(Predictions(divergence=packed), together)
    np.testing.assert_allclose(found.loss.sum, apart.loss.sum, rtol=1e-6)
    assert found.loss.count == apart.loss.count
    assert "distill/teacher_entropy" not in found.metrics


def test_the_gradient_is_one_for_each_token_that_counts(unpacked):
    _, batch = unpacked
    divergence, entropy = divergences(batch)

    def total(divergence):
        predictions = Predictions(divergence=divergence, teacher_entropy=entropy)
        return distribution_distillation().objective(predictions, batch).loss.sum

    mask = batch.loss_mask & (batch.ends > 0)
    np.testing.assert_array_equal(jax.grad(total)(divergence), mask)


def test_rewards_are_only_watched():
    made = distribution_distillation()
    rewards, valid = jnp.array([[1.0, jnp.nan]]), jnp.array([[True, False]])
    assert made.advantages(rewards, valid).tolist() == [[1.0, 0.0]]
    assert (made.needs_reference, made.credit) == (False, None)
    # The sampled one reads log-probs, and compares nothing else.
    assert algorithms.distillation().divergence is None


def test_predictions_without_a_teacher_are_refused(unpacked):
    policy_logprobs, batch = unpacked
    with pytest.raises(
        ValueError, match=r"divergence must be given, got None; predict"
    ):
        distribution_distillation().objective(Predictions(policy_logprobs), batch)


@pytest.mark.parametrize(
    ("k", "tail", "expected"),
    [
        # For p = (4, 2, 1, 1) / 8 against 1/4 each.
        (1, "bucket", 0.5 * np.log(2) + 0.5 * np.log(2 / 3)),
        (1, "renormalize", 0.0),
        (2, "bucket", 0.5 * np.log(2) + 0.25 * np.log(0.5)),
        (2, "renormalize", 2 / 3 * np.log(4 / 3) + 1 / 3 * np.log(2 / 3)),
        (4, "bucket", 0.5 * np.log(2) + 0.25 * np.log(0.5)),
    ],
)
def test_the_teachers_likeliest_tokens(k, tail, expected):
    value = top_k_forward_kl(k, tail=tail)(TEACHER, UNIFORM, ON)
    assert value.tolist() == pytest.approx([expected], abs=1e-6)


def test_a_k_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="k must be >= 1, got 0"):
        top_k_forward_kl(0)
    with pytest.raises(ValueError, match="at most the vocabulary's 4, got 5; take the"):
        top_k_forward_kl(5)(TEACHER, UNIFORM, ON)
