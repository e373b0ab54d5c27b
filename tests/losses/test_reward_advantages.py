"""Advantages from more than a group's rewards, or for more than their mean."""

import inspect
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import advantages, baselines

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
REWARDS = hnp.arrays(np.float32, (3, 4), elements=st.floats(0, 4, width=16))
BINARY = hnp.arrays(bool, (3, 5)).map(lambda x: x.astype(np.float32))
LENGTHS = hnp.arrays(np.int32, (3, 4), elements=st.integers(0, 50))
GREEDY = hnp.arrays(np.float32, 3, elements=st.floats(-4, 4, width=16))
VALID, WIDE_VALID = hnp.arrays(bool, (3, 4)), hnp.arrays(bool, (3, 5))
# Each with one array of rewards and `valid`.
ESTIMATORS = {
    "remax": lambda r, valid=None: baselines.remax(r, jnp.ones(r.shape[:-1]), valid),
    "optimal_baseline": lambda r, valid=None: baselines.optimal_baseline(
        r, jnp.broadcast_to(jnp.arange(1, r.shape[-1] + 1), r.shape), valid
    ),
    "max_rl": baselines.max_rl,
    "pass_at_k": partial(baselines.pass_at_k, k=2),
    "gdpo": lambda r, valid=None: baselines.gdpo(
        jnp.stack([r, 2 * r * jnp.abs(r)], -1), valid
    ),
}
ESTIMATORS = {name: jax.jit(function) for name, function in ESTIMATORS.items()}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
relative = pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "remax"])


def dirty(rewards, valid):
    return jnp.array(np.where(valid, rewards, np.nan)), jnp.array(valid)


def compare(values, expected, valid):
    for row, kept, group in zip(np.asarray(values), valid, expected, strict=True):
        np.testing.assert_allclose(row[kept], group, rtol=1e-4, atol=1e-5)
        assert (row[~kept] == 0).all()


@LAWS
@given(REWARDS, GREEDY, VALID)
def test_remax_equals_its_transcription(rewards, greedy, valid):
    values = baselines.remax(
        dirty(rewards, valid)[0], jnp.array(greedy), jnp.array(valid)
    )
    expected = [r[k] - g for r, k, g in zip(rewards, valid, greedy, strict=True)]
    compare(values, expected, valid)


@LAWS
@given(REWARDS, LENGTHS, VALID)
def test_optimal_baseline_equals_its_transcription(rewards, lengths, valid):
    given_rewards, kept = dirty(rewards, valid)
    values = baselines.optimal_baseline(given_rewards, jnp.array(lengths), kept)

    def transcription(r, length):
        if not length.any():
            return np.zeros(len(r))
        return r - (length * r).sum() / length.sum()

    rows = zip(rewards.astype(float), lengths.astype(float), valid, strict=True)
    compare(values, [transcription(r[k], n[k]) for r, n, k in rows], valid)


@LAWS
@given(REWARDS, VALID)
def test_max_rl_equals_its_transcription(rewards, valid):
    def transcription(group):
        mean = group.mean() if len(group) else 0.0
        return (group - mean) / mean if mean > 0 else np.zeros(len(group))

    values = baselines.max_rl(*dirty(rewards, valid))
    groups = [r[k].astype(float) for r, k in zip(rewards, valid, strict=True)]
    compare(values, [transcription(group) for group in groups], valid)


def test_max_rl_of_a_negative_mean_is_zero_and_not_turned_around():
    assert baselines.max_rl(jnp.array([[-3.0, 1.0]])).tolist() == [[0, 0]]


def over_all_sets(group, k):
    """Mean advantage of each sample over the sets of k it is in, by enumeration."""
    k = min(k, len(group))
    if not k:
        return np.zeros(0), 0.0
    sets = list(itertools.combinations(range(len(group)), k))
    hits = np.array([float(group[list(chosen)].any()) for chosen in sets])
    scaled = (hits - hits.mean()) / (hits.std() if hits.std() > 0 else 1.0)
    means = [scaled[[i in chosen for chosen in sets]].mean() for i in range(len(group))]
    return np.array(means), hits.mean()


@partial(jax.jit, static_argnames="k")
def pass_at(rewards, valid, k):
    estimate = baselines.pass_at_k_estimate(rewards, valid, k=k)
    return baselines.pass_at_k(rewards, valid, k=k), estimate


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@LAWS
@given(BINARY, WIDE_VALID)
def test_pass_at_k_equals_the_mean_over_all_sets(k, rewards, valid):
    groups = [r[kept] > 0 for r, kept in zip(rewards, valid, strict=True)]
    expected = [over_all_sets(group, k) for group in groups]
    values, estimate = pass_at(*dirty(rewards, valid), k=k)
    compare(values, [x for x, _ in expected], valid)
    np.testing.assert_allclose(estimate, [p for _, p in expected], rtol=1e-5)


@LAWS
@given(BINARY)
def test_pass_at_one_is_group_normalized(rewards):
    rewards = jnp.array(rewards)
    expected = advantages.group_normalized(rewards, ddof=0, epsilon=0.0)
    values = baselines.pass_at_k(rewards, k=1)
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n", "c", "k"), [(4096, 1, 1), (4096, 2, 7), (1000, 3, 400)])
def test_pass_at_k_keeps_its_digits_for_many_samples(n, c, k):
    rewards = jnp.array(np.arange(n) < c, jnp.float32)
    miss = math.comb(n - c, k) / math.comb(n, k)
    hit = 1 - miss
    values, estimate = pass_at(rewards, rewards >= 0, k=k)
    np.testing.assert_allclose(estimate, hit, rtol=1e-5)
    np.testing.assert_allclose(values[0], math.sqrt(miss / hit), rtol=1e-5)
    np.testing.assert_allclose(values[-1], -c / (n - c) * values[0], rtol=1e-5)


@partial(jax.jit, static_argnums=(2, 3, 4))
def gdpo(rewards, valid, weights, ddof, epsilon):
    return baselines.gdpo(rewards, valid, weights=weights, ddof=ddof, epsilon=epsilon)


def gdpo_transcription(rewards, valid, weights, ddof, epsilon):
    total = np.zeros(valid.shape)
    for row, kept in enumerate(valid):
        group = rewards[row, kept].astype(float)
        if len(group) > ddof:
            scaled = (group - group.mean(0)) / (group.std(0, ddof=ddof) + epsilon)
            total[row, kept] = scaled @ weights
    kept = total[valid]
    scale = 1.0
    if len(kept) > ddof and kept.any():
        scale = np.sqrt(kept.var(ddof=ddof) + epsilon**2)
    return np.where(valid, (total - (kept.mean() if len(kept) else 0)) / scale, 0)


@pytest.mark.parametrize("ddof", [0, 1])
@LAWS
@given(hnp.arrays(np.float32, (3, 4, 2), elements=st.floats(-4, 4, width=16)), VALID)
def test_gdpo_equals_its_transcription(ddof, rewards, valid):
    weights, epsilon = (2.0, 0.5), 1e-2
    given_rewards = jnp.array(np.where(valid[..., None], rewards, np.nan))
    values = gdpo(given_rewards, jnp.array(valid), weights, ddof, epsilon)
    expected = gdpo_transcription(rewards, valid, weights, ddof, epsilon)
    np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-3)


def test_gdpo_tells_apart_what_grpo_of_the_sum_confuses():
    one, both = [[0.0, 0.0], [1.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]]
    rewards = jnp.array([one, both])
    of_sum = advantages.group_normalized(rewards.sum(-1), epsilon=0.0)
    np.testing.assert_allclose(of_sum[0], of_sum[1])
    values = jax.jit(baselines.gdpo)(rewards)
    np.testing.assert_allclose(values[1], 2 * values[0], rtol=1e-5)


def test_gdpo_gives_a_group_without_contrast_exactly_zero_in_any_batch():
    # The mean of a batch's sums is 0 but for rounding, which must not come in.
    rewards = np.random.default_rng(3).normal(size=(9, 5, 2)).astype(np.float32)
    rewards[4] = 0.5
    values = jax.jit(baselines.gdpo)(jnp.array(rewards))
    assert (values[4] == 0).all()
    assert abs(values.sum()) < 1e-4
    total = sum(
        advantages.group_normalized(jnp.array(rewards[..., c])) for c in range(2)
    )
    assert total.mean() != 0


@relative
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -3.0, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero_beside_other_groups(name, size, reward):
    valid = jnp.arange(5) < jnp.array([[size], [5]])
    rewards = jnp.array([[reward] * 5, [0.0, 1.0, 3.0, 0.0, 2.0]], jnp.float32)
    values = ESTIMATORS[name](rewards, valid)
    assert (values[0] == 0).all()
    assert (values[1] != 0).any()


@every_estimator
def test_a_group_without_a_valid_sample(name):
    values = ESTIMATORS[name](jnp.full((1, 3), jnp.nan), jnp.zeros((1, 3), bool))
    assert values.tolist() == [[0, 0, 0]]


@every_estimator
def test_a_valid_nan_reward_stays_visible(name):
    rewards = jnp.array([[1.0, jnp.nan, 2.0, 0.0]])
    assert jnp.isnan(ESTIMATORS[name](rewards)).any()
    if name == "pass_at_k":
        assert jnp.isnan(baselines.pass_at_k_estimate(rewards, k=2)).all()


@every_estimator
def test_one_dimension_or_many_and_permuted(name):
    rewards = jnp.array(np.random.default_rng(0).random((2, 3, 4)) < 0.5, jnp.float32)
    values = ESTIMATORS[name](rewards)
    groups = ESTIMATORS[name](rewards[::-1, ::-1])[::-1, ::-1]
    np.testing.assert_allclose(groups, values, rtol=1e-5, atol=1e-6)
    if name != "gdpo":
        np.testing.assert_allclose(
            ESTIMATORS[name](rewards[1, 2]), values[1, 2], rtol=1e-5, atol=1e-6
        )


@LAWS
@given(REWARDS, VALID)
def test_group_mean_is_the_mean_of_the_valid(rewards, valid):
    means = advantages.group_mean(*dirty(rewards, valid))
    groups = [r[k].astype(float) for r, k in zip(rewards, valid, strict=True)]
    expected = [group.mean() if len(group) else 0.0 for group in groups]
    np.testing.assert_allclose(means, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "advantage", [advantages.group_centered, advantages.group_normalized]
)
def test_a_group_of_one_may_keep_its_raw_reward(advantage):
    rewards = jnp.array([[7.0, jnp.nan], [1.0, 3.0], [jnp.nan, jnp.nan]])
    values = advantage(rewards, ~jnp.isnan(rewards), single="raw")
    usual = advantage(rewards, ~jnp.isnan(rewards))
    assert values.tolist() == [[7, 0], usual[1].tolist(), [0, 0]]
    assert usual[0].tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"single must be 'zero' or 'raw', got 'one'"):
        inspect.unwrap(advantage)(rewards, single="one")


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize(
    "function", [baselines.pass_at_k, baselines.pass_at_k_estimate]
)
def test_k_is_checked(function, k):
    with pytest.raises(ValueError, match=rf"k must be in \[1, samples = 3\], got {k}"):
        function(jnp.ones((1, 3)), k=k)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": (1.0,)}, r"one number for each of the 2 components, got \(1.0,\)"),
        ({"epsilon": -0.1}, r"epsilon must be >= 0, got -0.1"),
        ({"ddof": 2}, r"ddof must be 1 \(sample\) or 0 \(population\), got 2"),
    ],
)
def test_gdpo_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        baselines.gdpo(jnp.ones((1, 3, 2)), **arguments)
