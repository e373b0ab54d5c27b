"""Each algorithm against a float64 transcription of its paper's objective."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Predictions, corrections
from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.learner.algorithm import make_algorithm
from jaxrl_post.losses import policy, reduce

KL, CAP, EPSILON = 0.1, 1.3, 1e-6
SHARED = {
    "kl_coefficient": KL,
    "correction": corrections.truncated_tokens(cap=CAP),
}
# Two groups of three samples, the last group with a sample that failed.
REWARDS = np.array([[1.0, 0.0, 3.0], [0.5, 2.0, np.nan]])
VALID = np.array([[True, True, True], [True, True, False]])

ALGORITHMS = {
    "grpo": algorithms.grpo(**SHARED),
    "dr_grpo": algorithms.dr_grpo(denominator=16.0, **SHARED),
    "dapo": algorithms.dapo(**SHARED),
    "gspo": algorithms.gspo(clip_low=0.1, clip_high=0.15, **SHARED),
    "cispo": algorithms.cispo(ratio_high=1.2, **SHARED),
    "rloo": algorithms.rloo(**SHARED),
}
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def group_advantages(name, rewards):
    """Advantages of one group in float64, without missing rewards."""
    centred = rewards - rewards.mean()
    if name == "dr_grpo":
        return centred
    if name == "rloo":
        return centred * len(rewards) / (len(rewards) - 1)
    return centred / (rewards.std(ddof=1) + EPSILON)


def clipped(ratio, advantages, low, high):
    bounded = np.clip(ratio, 1 - low, 1 + high)
    return -np.minimum(ratio * advantages, bounded * advantages)


def policy_terms(name, p, frozen, q, a):
    """Policy loss of one sequence's tokens; `frozen` is p without a gradient."""
    if name in ("grpo", "dr_grpo"):
        return clipped(np.exp(p - q), a, 0.2, 0.2)
    if name == "dapo":
        return clipped(np.exp(p - q), a, 0.2, 0.28)
    if name == "gspo":
        # GSPO-token: each token's own weight counts for its gradient.
        return clipped(np.exp((frozen - q).mean() + p - frozen), a, 0.1, 0.15)
    if name == "cispo":
        return -np.minimum(np.exp(frozen - q), 1.2) * a * p
    return -a * p


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
        weights = np.minimum(np.exp(q - b), CAP)
        kl = np.exp(r - p) - (r - p) - 1
        terms = policy_terms(name, p, frozen[row, kept], q, a)
        sequences.append(weights * terms + KL * kl)
    if name in ("grpo", "gspo"):
        return np.mean([tokens.mean() for tokens in sequences])
    if name in ("dapo", "cispo"):
        return np.concatenate(sequences).mean()
    scale = 16.0 if name == "dr_grpo" else 1.0
    return np.mean([tokens.sum() / scale for tokens in sequences])


@every_algorithm
def test_advantages_equal_their_transcription(name):
    values = ALGORITHMS[name].advantages(
        jnp.array(REWARDS, jnp.float32), jnp.array(VALID)
    )
    for row, rewards, kept in zip(values, REWARDS, VALID, strict=True):
        np.testing.assert_allclose(
            row[kept], group_advantages(name, rewards[kept]), rtol=1e-5, atol=1e-7
        )
        assert (row[~kept] == 0).all()


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


def test_the_fixture_clips_on_both_sides(unpacked):
    # Else the transcriptions would agree without testing the clips.
    for name in ("grpo", "gspo"):
        policy_logprobs, batch = unpacked
        predictions = Predictions(policy_logprobs)
        metrics = ALGORITHMS[name].objective(predictions, batch).metrics
        assert metrics["policy/clip_fraction_low"].sum > 0
        assert metrics["policy/clip_fraction_high"].sum > 0
        assert 0 < metrics["correction/truncated_fraction"].mean() < 1


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        ("grpo", reduce.sequence_mean_of_token_mean),
        ("dapo", reduce.token_mean),
        ("cispo", reduce.token_mean),
        ("rloo", reduce.sequence_mean_of_token_sum),
    ],
)
def test_on_policy_gradient_equals_reinforce(name, reduction, unpacked):
    policy_logprobs, batch = unpacked
    batch = batch.replace(proximal_logprobs=None, behavior_logprobs=policy_logprobs)
    make = getattr(algorithms, name)

    def reinforce(policy_logprobs):
        values = policy.reinforce(policy_logprobs, batch.advantages, batch.loss_mask)
        return reduction(values, batch.loss_mask, batch.ends).mean()

    gradient = jax.grad(lambda p: make().objective(Predictions(p), batch).loss.mean())(
        policy_logprobs
    )
    np.testing.assert_allclose(
        gradient, jax.grad(reinforce)(policy_logprobs), rtol=1e-5, atol=1e-8
    )


def test_on_policy_gspo_and_grpo_agree(unpacked):
    policy_logprobs, batch = unpacked
    batch = batch.replace(proximal_logprobs=None, behavior_logprobs=policy_logprobs)
    by_token, by_sequence = (
        jax.grad(lambda p, a=algorithm: a.objective(Predictions(p), batch).loss.mean())(
            policy_logprobs
        )
        for algorithm in (algorithms.grpo(), algorithms.gspo())
    )
    np.testing.assert_allclose(by_token, by_sequence, rtol=1e-5, atol=1e-8)


def test_defaults_are_the_papers(unpacked):
    policy_logprobs, batch = unpacked
    pairs = [
        (algorithms.grpo(), algorithms.grpo(clip_low=0.2, clip_high=0.2)),
        (algorithms.dapo(), algorithms.dapo(clip_low=0.2, clip_high=0.28)),
        (algorithms.gspo(), algorithms.gspo(clip_low=3e-4, clip_high=4e-4)),
        (algorithms.cispo(), algorithms.cispo(ratio_low=0.0, ratio_high=5.0)),
    ]
    for default, explicit in pairs:
        assert not default.needs_reference
        assert (
            default.objective(Predictions(policy_logprobs), batch).loss.sum
            == explicit.objective(Predictions(policy_logprobs), batch).loss.sum
        )


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_without_a_correction_the_sampler_weighs_nothing(name, unpacked):
    policy_logprobs, batch = unpacked
    algorithm = getattr(algorithms, name)(correction=None)
    exact = batch.replace(behavior_logprobs=batch.proximal_logprobs)
    corrected = getattr(algorithms, name)()
    assert (
        algorithm.objective(Predictions(policy_logprobs), batch).loss.sum
        == corrected.objective(Predictions(policy_logprobs), exact).loss.sum
    )


def config(name: str, **options) -> algorithms.Algorithm:
    """The algorithm that options of the command line make, with 16 tokens at most."""
    return make_algorithm(AlgorithmConfig(name=name, **options), 16)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # Each is the other's definition by its parts.
        (config("grpo", scale_advantages="none", aggregation="fixed"),
         config("dr_grpo")),
        (config("dr_grpo", scale_advantages="group", aggregation="sequence_mean"),
         config("grpo")),
        (config("grpo", clip_high=0.28, aggregation="token_mean"), config("dapo")),
        (config("dapo", clip_high=0.2, aggregation="sequence_mean"), config("grpo")),
    ],
)  # fmt: skip
def test_options_make_one_algorithm_of_another(one, other, unpacked):
    policy_logprobs, batch = unpacked
    rewards = jnp.array(REWARDS, jnp.float32), jnp.array(VALID)
    np.testing.assert_array_equal(one.advantages(*rewards), other.advantages(*rewards))
    losses = [
        each.objective(Predictions(policy_logprobs), batch).loss.mean()
        for each in (one, other)
    ]
    assert losses[0] == losses[1]


def test_a_sum_over_each_sequence(unpacked):
    policy_logprobs, batch = unpacked
    fixed, summed = (
        config("grpo", aggregation=name)
        .objective(Predictions(policy_logprobs), batch)
        .loss.mean()
        for name in ("fixed", "sequence_sum")
    )
    np.testing.assert_allclose(16 * fixed, summed, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rloo", {"scale_advantages": "group"}, "--algorithm.scale-advantages: rloo"),
        ("reinforce_plus_plus_baseline", {"scale_advantages": "none"},
         "--algorithm.scale-advantages: reinforce_plus_plus_baseline"),
        ("reinforce_plus_plus", {"aggregation": "fixed"},
         "--algorithm.aggregation: reinforce_plus_plus does not read it"),
    ],
)  # fmt: skip
def test_options_that_an_algorithm_cannot_have_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        config(name, **options)


def test_ppo_takes_an_aggregation(unpacked):
    policy_logprobs, batch = unpacked
    losses = {
        each: float(
            config("ppo", aggregation=each)
            .objective(Predictions(policy_logprobs), batch)
            .loss.mean()
        )
        for each in (None, "token_mean", "sequence_mean")
    }
    assert losses[None] == losses["token_mean"] != losses["sequence_mean"]
