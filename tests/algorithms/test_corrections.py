"""Corrections of the sampler's mismatch against loops over sequences in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Predictions, corrections
from jaxrl_post.losses import kl

LOW, HIGH, CAP = 0.8, 1.3, 1.2


def k3(q, b):
    return np.exp(q - b) - (q - b) - 1


def geometric_mean(w):
    return np.exp(np.log(w).mean())


def inside(value, low, high):
    return (low <= value) & (value <= high)


# Each correction with its result for one sequence: the raw weights, and the weights
# as applied, of q (proximal) and b (behavior).
CASES = {
    "truncated_tokens": (
        corrections.truncated_tokens(cap=CAP),
        lambda q, b, w: (w, np.minimum(w, CAP)),
    ),
    "truncated_sequences": (
        corrections.truncated_sequences(cap=CAP),
        lambda q, b, w: (w.prod(), np.minimum(w.prod(), CAP)),
    ),
    "icepop": (
        corrections.icepop(low=LOW, high=HIGH),
        lambda q, b, w: (w, np.where(inside(w, LOW, HIGH), w, 0.0)),
    ),
    "icepop_sequences": (
        corrections.icepop_sequences(low=0.0, high=HIGH),
        lambda q, b, w: (w.prod(), w.prod() * inside(w.prod(), 0.0, HIGH)),
    ),
    "masked_sequences": (
        corrections.masked_sequences(low=LOW, high=HIGH, cap=CAP),
        lambda q, b, w: (
            w,
            np.minimum(w, CAP) * inside(geometric_mean(w), LOW, HIGH),
        ),
    ),
    "rejected_tokens": (
        corrections.rejected_tokens(divergence=kl.k3, high=0.1, cap=CAP),
        lambda q, b, w: (w, np.where(k3(q, b) <= 0.1, np.minimum(w, CAP), 0.0)),
    ),
    "rejected_sequences": (
        corrections.rejected_sequences(
            divergence=kl.k1, statistic="mean", low=-0.15, high=0.2, cap=CAP
        ),
        lambda q, b, w: (w, np.minimum(w, CAP) * inside((b - q).mean(), -0.15, 0.2)),
    ),
}
OF_SEQUENCES = ("truncated_sequences", "icepop_sequences")
every_correction = pytest.mark.parametrize("name", CASES)


def sequences_of(batch):
    """(row, counted places, proximal, behavior) of every sequence, in float64."""
    ids, mask = np.asarray(batch.ends), np.asarray(batch.loss_mask)
    q, b = (
        np.asarray(x, np.float64)
        for x in (batch.proximal_logprobs, batch.behavior_logprobs)
    )
    for row in range(len(ids)):
        for segment in range(1, ids[row].max() + 1):
            places = mask[row] & (ids[row] == segment)
            if places.any():
                yield row, places, q[row, places], b[row, places]


def apply(name, batch):
    return CASES[name][0](
        batch.proximal_logprobs,
        batch.behavior_logprobs,
        batch.loss_mask,
        batch.ends,
    )


@pytest.fixture(scope="module")
def packed(sequences, lay_out):
    s = sequences
    return lay_out([[s[0], s[1], s[2]], [s[3], s[4], s[5]]], 16)[1]


@every_correction
def test_weights_and_metrics_equal_their_transcription(name, packed):
    weights, metrics = apply(name, packed)
    raw_all, applied_all, ess, chi_square = [], [], [], []
    for row, places, q, b in sequences_of(packed):
        raw, applied = CASES[name][1](q, b, np.exp(q - b))
        raw, applied = (np.broadcast_to(x, q.shape) for x in (raw, applied))
        np.testing.assert_allclose(weights[row, places], applied, rtol=2e-5)
        raw_all.append(raw)
        applied_all.append(applied)
        squares = len(q) * (applied**2).sum()
        ess.append(applied.sum() ** 2 / squares if squares else 0.0)
        chi_square.append(raw[0] ** 2 - 1)
    raw_all, applied_all = np.concatenate(raw_all), np.concatenate(applied_all)
    if name not in OF_SEQUENCES:
        chi_square = raw_all**2 - 1
    expected = {
        "correction/weight": applied_all.mean(),
        "correction/truncated_fraction": (raw_all != applied_all).mean(),
        "correction/ess": np.mean(ess),
        "correction/chi_square": np.mean(chi_square),
    }
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(
            metrics[key].mean(), value, rtol=2e-5, atol=1e-6, err_msg=key
        )
    # Else the transcription would agree without testing the bounds.
    assert 0 < expected["correction/truncated_fraction"] < 1


@every_correction
def test_the_weight_multiplies_the_policy_loss_alone(name, unpacked):
    policy_logprobs, batch = unpacked
    weights = apply(name, batch).weights
    options = {"kl_coefficient": 0.3}
    loss, plain, only_kl = (
        algorithms.dapo(correction=correct, **options)
        .objective(Predictions(policy_logprobs), data)
        .loss
        for correct, data in (
            (CASES[name][0], batch),
            (None, batch.replace(advantages=weights * batch.advantages)),
            (None, batch.replace(advantages=jnp.zeros_like(batch.advantages))),
        )
    )
    np.testing.assert_allclose(loss.sum, plain.sum, rtol=2e-5)
    assert loss.count == plain.count == float(batch.loss_mask.sum())
    assert abs(loss.sum - only_kl.sum) > 1e-2


@every_correction
def test_packing_changes_nothing(name, packed, unpacked):
    expected = apply(name, unpacked[1]).metrics
    metrics = apply(name, packed).metrics
    for key, metric in metrics.items():
        np.testing.assert_allclose(metric.mean(), expected[key].mean(), rtol=2e-5)
        assert metric.count == expected[key].count


@every_correction
def test_the_sampler_being_the_trainer_leaves_weights_of_exactly_one(name, packed):
    batch = packed.replace(behavior_logprobs=packed.proximal_logprobs)
    weights, metrics = apply(name, batch)
    assert (weights[batch.loss_mask] == 1).all()
    means = {key.split("/")[1]: metric.mean() for key, metric in metrics.items()}
    assert means == {"weight": 1, "truncated_fraction": 0, "ess": 1, "chi_square": 0}


@every_correction
def test_a_missing_sampler_logprob_shows(name, packed):
    batch = packed.replace(
        behavior_logprobs=packed.behavior_logprobs.at[0, 2].set(jnp.nan)
    )
    assert packed.loss_mask[0, 2]
    weights, metrics = apply(name, batch)
    assert jnp.isnan(weights[0, 2])
    assert jnp.isnan(metrics["correction/weight"].sum)


@every_correction
def test_an_impossible_sampler_logprob_gives_a_finite_loss(name, unpacked):
    policy_logprobs, batch = unpacked
    impossible = batch.behavior_logprobs.at[0, 2].set(-jnp.inf)
    loss = (
        algorithms.grpo(correction=CASES[name][0])
        .objective(
            Predictions(policy_logprobs), batch.replace(behavior_logprobs=impossible)
        )
        .loss
    )
    assert jnp.isfinite(loss.sum)


def test_what_is_dropped_stays_in_the_denominator():
    ones = jnp.ones((1, 2), bool)
    ids = ones.astype(jnp.int32)
    weights, metrics = corrections.icepop()(
        jnp.array([[-1.0, -1.0]]), jnp.array([[-9.0, -1.0]]), ones, ids
    )
    assert weights.tolist() == [[0.0, 1.0]]
    assert metrics["correction/weight"].count == 2
    assert metrics["correction/truncated_fraction"].mean() == 0.5


@pytest.mark.parametrize(
    ("correct", "message"),
    [
        (corrections.truncated_tokens(cap=0.0), r"cap must be > 0, got 0\.0"),
        (corrections.truncated_sequences(cap=-1.0), r"cap must be > 0, got -1\.0"),
        (corrections.icepop(low=2.0, high=1.0), r"0 <= low <= high, got 2\.0 and 1\.0"),
        (corrections.icepop_sequences(low=-1.0), r"0 <= low <= high, got -1\.0"),
        (
            corrections.masked_sequences(low=1.0, high=0.9),
            r"0 <= low <= high, got 1\.0 and 0\.9",
        ),
        (
            corrections.rejected_tokens(divergence=kl.k3, low=1.0, high=0.5),
            r"low <= high, got 1\.0 and 0\.5",
        ),
        (
            corrections.rejected_sequences(
                divergence=kl.k3, statistic="sum", low=1.0, high=0.5
            ),
            r"low <= high, got 1\.0 and 0\.5",
        ),
    ],
)
def test_bounds_are_checked_when_an_algorithm_is_made(correct, message):
    with pytest.raises(ValueError, match=message):
        algorithms.grpo(correction=correct)
