"""The variants against float64 transcriptions of their papers' objectives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Predictions, corrections, terms
from jaxrl_post.losses import advantages, kl, policy, reduce, trust_region

KL, CAP = 0.1, 1.3
SHARED = {
    "kl_coefficient": KL,
    "correction": corrections.truncated_tokens(cap=CAP),
}
LOW, HIGH, TAU_UP, TAU_DOWN, TV, MAX_RATIO = 0.1, 0.15, 1.0, 2.0, 0.05, 1.25

ALGORITHMS = {
    "gmpo": algorithms.gmpo(clip_low=LOW, clip_high=HIGH, **SHARED),
    "sapo": algorithms.sapo(tau_positive=TAU_UP, tau_negative=TAU_DOWN, **SHARED),
    "dppo": algorithms.dppo(threshold=TV, ratio_high=MAX_RATIO, kl_coefficient=KL),
    "max_rl": algorithms.max_rl(**SHARED),
}
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def gmpo(p, frozen, q, b, a):
    up, down = (a > 0) & (p - q > HIGH), (a < 0) & (p - q < -LOW)
    d = np.where(up, HIGH, np.where(down, -LOW, p - q))
    return -np.exp(d.mean()) * a


def sapo(p, frozen, q, b, a):
    tau = np.where(a > 0, TAU_UP, TAU_DOWN)
    return -4 / tau / (1 + np.exp(-tau * (np.exp(p - q) - 1))) * a


def dppo(p, frozen, q, b, a):
    ratio = np.exp(frozen - b)
    leaves = ((a > 0) & (ratio > 1)) | ((a < 0) & (ratio < 1))
    dropped = leaves & (abs(np.exp(frozen) - np.exp(b)) > TV)
    # The bounded ratio as a weight, with the gradient of log p.
    weight = np.minimum(ratio, MAX_RATIO) * np.exp(p - frozen)
    return np.where(dropped, 0.0, -weight * a)


def max_rl(p, frozen, q, b, a):
    ratio = np.exp(p - q)
    return -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)


TERMS = {"gmpo": gmpo, "sapo": sapo, "dppo": dppo, "max_rl": max_rl}


def transcription(name, policy_logprobs, frozen, batch) -> float:
    """The loss in float64, one sequence (row) after another."""
    sequences = []
    for row, kept in enumerate(np.asarray(batch.loss_mask)):
        if not kept.any():
            continue
        q, b, r, a = (
            np.asarray(x, np.float64)[row, kept]
            for x in (
                batch.proximal_logprobs,
                batch.behavior_logprobs,
                batch.reference_logprobs,
                batch.advantages,
            )
        )
        p = policy_logprobs[row, kept]
        weights = 1.0 if name == "dppo" else np.minimum(np.exp(q - b), CAP)
        divergence = np.exp(r - p) - (r - p) - 1
        loss = TERMS[name](p, frozen[row, kept], q, b, a)
        sequences.append(weights * loss + KL * divergence)
    if name in ("gmpo", "sapo"):
        return np.mean([tokens.mean() for tokens in sequences])
    return np.concatenate(sequences).mean()


@every_algorithm
def test_loss_and_gradient_equal_the_transcription(name, unpacked):
    policy_logprobs, batch = unpacked
    exact = np.asarray(policy_logprobs, np.float64)

    def mean(policy_logprobs):
        return (
            ALGORITHMS[name].objective(Predictions(policy_logprobs), batch).loss.mean()
        )

    loss, gradient = jax.jit(jax.value_and_grad(mean))(policy_logprobs)
    np.testing.assert_allclose(
        loss, transcription(name, exact, exact, batch), rtol=1e-5
    )
    step, numeric = 1e-6, np.zeros_like(exact)
    for index in np.ndindex(exact.shape):
        shift = np.zeros_like(exact)
        shift[index] = step
        above, below = (
            transcription(name, exact + sign * shift, exact, batch) for sign in (1, -1)
        )
        numeric[index] = (above - below) / (2 * step)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gmpo", "dppo", "max_rl"])
def test_clip_fractions_equal_their_transcription(name, unpacked):
    policy_logprobs, batch = unpacked
    metrics = ALGORITHMS[name].objective(Predictions(policy_logprobs), batch).metrics
    p, q, b, a = (
        np.asarray(x, np.float64)[np.asarray(batch.loss_mask)]
        for x in (
            policy_logprobs,
            batch.proximal_logprobs,
            batch.behavior_logprobs,
            batch.advantages,
        )
    )
    outside = {
        "gmpo": (p - q < -LOW, p - q > HIGH),
        "dppo": tuple((abs(np.exp(p) - np.exp(b)) > TV) & x for x in (p < b, p > b)),
        "max_rl": (np.exp(p - q) < 0.8, np.exp(p - q) > 1.2),
    }[name]
    low, high = outside[0] & (a < 0), outside[1] & (a > 0)
    assert metrics["policy/clip_fraction_low"].mean() == pytest.approx(low.mean())
    assert metrics["policy/clip_fraction_high"].mean() == pytest.approx(high.mean())
    # Else the transcriptions would agree without testing the clips.
    assert low.any()
    assert high.any()


def test_gmpo_counts_as_clipped_what_is_beyond_its_bounds_in_nats():
    term = terms.geometric_mean_ratio(clip_low=0.5, clip_high=0.25)
    log_ratio = jnp.array([[-0.49, -0.51, 0.24, 0.26, -0.51, 0.26]])
    signs = jnp.array([[-1.0, -1.0, 1.0, 1.0, 1.0, -1.0]])
    ids = jnp.ones(signs.shape, jnp.int32)
    made = term(log_ratio, jnp.zeros_like(log_ratio), signs, ids > 0, ids)
    assert made.clip_fraction_low.sum == 1
    assert made.clip_fraction_high.sum == 1
    np.testing.assert_allclose(made.ratio, jnp.exp(log_ratio), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        ("gmpo", reduce.sequence_mean_of_token_mean),
        ("sapo", reduce.sequence_mean_of_token_mean),
        ("dppo", reduce.token_mean),
        ("max_rl", reduce.token_mean),
    ],
)
def test_on_policy_gradient_equals_reinforce(name, reduction, unpacked):
    policy_logprobs, batch = unpacked
    batch = batch.replace(proximal_logprobs=None, behavior_logprobs=policy_logprobs)
    arguments = {"threshold": TV} if name == "dppo" else {}
    algorithm = getattr(algorithms, name)(**arguments)

    def reinforce(policy_logprobs):
        values = policy.reinforce(policy_logprobs, batch.advantages, batch.loss_mask)
        return reduction(values, batch.loss_mask, batch.ends).mean()

    gradient = jax.grad(
        lambda p: algorithm.objective(Predictions(p), batch).loss.mean()
    )(policy_logprobs)
    np.testing.assert_allclose(
        gradient, jax.grad(reinforce)(policy_logprobs), rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("max_rl", [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        ("max_rl", [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        ("gmpo", [3.0, 1.0, 1.0, 3.0], [0.866025, -0.866025, -0.866025, 0.866025]),
        ("sapo", [3.0, 1.0, 1.0, 3.0], [0.866025, -0.866025, -0.866025, 0.866025]),
        ("dppo", [3.0, 1.0, 1.0, 3.0], [0.866025, -0.866025, -0.866025, 0.866025]),
    ],
)
def test_advantages(name, rewards, expected):
    valid = jnp.ones((1, 4), bool)
    values = ALGORITHMS[name].advantages(jnp.array([rewards]), valid)
    np.testing.assert_allclose(values, [expected], rtol=1e-5)


def test_dppo_takes_the_kl_as_divergence(unpacked):
    policy_logprobs, batch = unpacked
    losses = []
    for threshold in (0.0, 0.02, 1e9):
        made = algorithms.dppo(
            threshold=threshold, divergence=trust_region.binary_kl, ratio_high=None
        )
        metrics = made.objective(Predictions(policy_logprobs), batch).metrics
        losses.append(
            metrics["policy/clip_fraction_low"].mean()
            + metrics["policy/clip_fraction_high"].mean()
        )
    assert losses[0] > losses[1] > losses[2] == 0


def test_opsm_drops_bad_sequences_that_the_policy_has_left(unpacked):
    policy_logprobs, batch = unpacked
    delta = 0.03
    p, q, b, a = (
        np.asarray(x, np.float64)
        for x in (
            policy_logprobs,
            batch.proximal_logprobs,
            batch.behavior_logprobs,
            batch.advantages,
        )
    )
    mask = np.asarray(batch.loss_mask)
    inner = terms.clipped_token_ratio(clip_low=0.2, clip_high=0.2)
    for anchor, old in (("proximal", q), ("behavior", b)):
        dropped = np.zeros_like(mask)
        for row, kept in enumerate(mask):
            if kept.any():
                away = (old - p)[row, kept].mean() > delta
                dropped[row] = kept & away & (a[row] < 0)
        made, plain = (
            algorithms.compose(
                advantages=advantages.group_centered,
                policy_loss=term,
                reduction=reduce.token_mean,
                kl_coefficient=0.0,
                kl_estimator=kl.k3,
                correction=None,
                anchor=anchor,
            )
            for term in (terms.opsm(inner, threshold=delta), inner)
        )
        result = made.objective(Predictions(policy_logprobs), batch)
        kept_only = batch.replace(
            advantages=jnp.where(jnp.array(dropped), 0.0, batch.advantages)
        )
        expected = plain.objective(Predictions(policy_logprobs), kept_only)
        np.testing.assert_allclose(result.loss.sum, expected.loss.sum, rtol=1e-6)
        assert result.loss.count.item() == mask.sum()
        fraction = result.metrics["policy/off_policy_fraction"]
        assert fraction.sum.item() == dropped.sum()
        assert fraction.count.item() == mask.sum()
        assert 0 < dropped.sum() < mask.sum()
        gradient = jax.grad(
            lambda p, made=made: made.objective(Predictions(p), batch).loss.sum
        )(policy_logprobs)
        assert (gradient[jnp.array(dropped)] == 0).all()


def test_opsm_keeps_what_another_opsm_reports(unpacked):
    policy_logprobs, batch = unpacked
    twice = terms.opsm(terms.opsm(terms.reinforce(), threshold=-9.0), threshold=9.0)
    once = terms.opsm(terms.reinforce(), threshold=-9.0)
    arrays = (
        policy_logprobs,
        batch.proximal_logprobs,
        batch.advantages,
        batch.loss_mask,
        batch.ends,
    )
    np.testing.assert_array_equal(twice(*arrays).loss, once(*arrays).loss)
