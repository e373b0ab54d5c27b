"""VESPO, LUSPO, clipped RLOO, Lite PPO, GDPO, OPO and ReMax against transcriptions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Predictions, corrections
from jaxrl_post.losses import baselines

KL, CAP, LOW, HIGH = 0.1, 1.3, 0.1, 0.15
SHARED = {
    "kl_coefficient": KL,
    "correction": corrections.truncated_tokens(cap=CAP),
}
CLIP = {"clip_low": LOW, "clip_high": HIGH}
ALGORITHMS = {
    "vespo": algorithms.vespo(kl_coefficient=KL),
    "luspo": algorithms.luspo(**CLIP, **SHARED),
    "clipped_rloo": algorithms.clipped_rloo(**CLIP, **SHARED),
    "lite_ppo": algorithms.lite_ppo(**CLIP, **SHARED),
    "gdpo": algorithms.gdpo(**CLIP, **SHARED),
    "opo": algorithms.opo(**SHARED),
    "remax": algorithms.remax(**SHARED),
}


def clipped(ratio, a):
    return -np.minimum(ratio * a, np.clip(ratio, 1 - LOW, 1 + HIGH) * a)


def vespo(p, q, b, a):
    w = np.exp((p - b).sum())
    k, rate = (2, 3) if a[0] >= 0 else (3, 2)
    return -(w**k) * np.exp(rate * (1 - w)) * a * p


# From one sequence's log-probs under policy, proximal and sampler, and its advantages.
TERMS = {
    "vespo": vespo,
    "luspo": lambda p, q, b, a: clipped(np.exp((p - q).mean()), a),
    "clipped_rloo": lambda p, q, b, a: clipped(np.exp((p - q).sum()), a),
    "lite_ppo": lambda p, q, b, a: clipped(np.exp(p - q), a),
    "gdpo": lambda p, q, b, a: clipped(np.exp(p - q), a),
    "opo": lambda p, q, b, a: -a * p,
    "remax": lambda p, q, b, a: -a * p,
}
REDUCTIONS = {
    "vespo": "tokens",
    "luspo": "sum",
    "clipped_rloo": "mean",
    "lite_ppo": "tokens",
    "gdpo": "mean",
    "opo": "tokens",
    "remax": "sum",
}


def reduced(sequences, how):
    if how == "tokens":
        return np.concatenate(sequences).mean()
    each = {"sum": np.sum, "mean": np.mean}[how]
    return np.mean([each(tokens) for tokens in sequences])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_losses_equal_their_transcriptions(name, unpacked):
    policy_logprobs, batch = unpacked
    found = ALGORITHMS[name].objective(Predictions(policy_logprobs), batch)
    sequences = []
    for row, kept in enumerate(np.asarray(batch.loss_mask)):
        if not kept.any():
            continue
        p, q, b, r, a = (
            np.asarray(x, np.float64)[row, kept]
            for x in (
                policy_logprobs,
                batch.proximal_logprobs,
                batch.behavior_logprobs,
                batch.reference_logprobs,
                batch.advantages,
            )
        )
        weights = 1.0 if name == "vespo" else np.minimum(np.exp(q - b), CAP)
        divergence = np.exp(r - p) - (r - p) - 1
        sequences.append(weights * TERMS[name](p, q, b, a) + KL * divergence)
    expected = reduced(sequences, REDUCTIONS[name])
    np.testing.assert_allclose(found.loss.mean(), expected, rtol=2e-5)


def test_clipped_rloo_is_rloo_on_policy(unpacked):
    policy_logprobs, batch = unpacked
    on_policy = batch.replace(proximal_logprobs=policy_logprobs)

    def gradient(made):
        return jax.grad(
            lambda p: made.objective(Predictions(p), on_policy).loss.mean()
        )(policy_logprobs)

    np.testing.assert_allclose(
        gradient(algorithms.clipped_rloo(correction=None)),
        gradient(algorithms.rloo(correction=None)),
        rtol=1e-4,
        atol=1e-6,
    )


def test_what_the_advantages_read():
    rng = np.random.default_rng(0)
    rewards = jnp.array(rng.normal(size=(3, 4)), jnp.float32)
    valid = jnp.array(rng.random((3, 4)) < 0.8)
    lengths = jnp.array(rng.integers(1, 9, (3, 4)), jnp.int32)
    components = jnp.stack([rewards, 3 * rewards**2], -1)
    inputs = {
        "rewards": (rewards, valid),
        "components": (components, valid),
        "lengths": (rewards, valid, lengths),
        "greedy": (rewards, valid, rewards[:, 0]),
    }
    expected = {
        "lite_ppo": baselines.batch_scaled(rewards, valid),
        "gdpo": baselines.gdpo(components, valid),
        "opo": baselines.optimal_baseline(rewards, lengths, valid),
        "remax": baselines.remax(rewards, rewards[:, 0], valid),
    }
    for name, values in expected.items():
        made = ALGORITHMS[name]
        np.testing.assert_array_equal(made.advantages(*inputs[made.reads]), values)
    read = {name: made.reads for name, made in ALGORITHMS.items()}
    assert read == dict.fromkeys(read, "rewards") | {
        "gdpo": "components",
        "opo": "lengths",
        "remax": "greedy",
    }
    with pytest.raises(ValueError, match="greedy_rewards must have 1 axis"):
        ALGORITHMS["remax"].advantages(rewards, valid, rewards)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(algorithms.vespo, k_positive=-1.0), "k_positive must be >= 0, got -1"),
        (partial(algorithms.luspo, clip_low=2.0), r"clip_low must be in \[0, 1\]"),
        (partial(algorithms.clipped_rloo, clip_high=-1.0), "clip_high must be >= 0"),
        (partial(algorithms.lite_ppo, epsilon=-1.0), "epsilon must be >= 0, got -1"),
        (partial(algorithms.gdpo, epsilon=-1.0), "epsilon must be >= 0, got -1"),
        (partial(algorithms.opo, kl_coefficient=-1.0), "kl_coefficient must be >= 0"),
        (partial(algorithms.remax, kl_coefficient=-1.0), "kl_coefficient must be >= 0"),
    ],
)
def test_bad_hyperparameters_raise_when_the_algorithm_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()
