"""Group-relative advantages: transcriptions, missing rewards, degenerate groups."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import advantages

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
REWARDS = hnp.arrays(np.float32, (3, 4), elements=st.floats(-4, 4, width=16))
VALID = hnp.arrays(bool, (3, 4))
EPSILON = 1e-3
ADVANTAGES = [
    jax.jit(function)
    for function in (
        advantages.group_centered,
        partial(advantages.group_normalized, epsilon=EPSILON),
        partial(advantages.group_normalized, ddof=0, epsilon=EPSILON),
        advantages.leave_one_out,
        partial(advantages.leave_one_out_normalized, epsilon=EPSILON),
    )
]
IDS = ["centered", "sample_std", "population_std", "leave_one_out", "loo_normalized"]
every_advantage = pytest.mark.parametrize("advantage", ADVANTAGES, ids=IDS)


def std(values, ddof) -> float:
    return values.std(ddof=ddof) if len(values) > ddof else 0.0


def transcription(kind: str, group) -> list[float]:
    """Advantages of one group without missing rewards, in float64."""
    group = group.astype(np.float64)
    if len(group) < 2:
        return [0.0] * len(group)
    if kind == "centered":
        return list(group - group.mean())
    if kind in ("sample_std", "population_std"):
        spread = std(group, ddof=1 if kind == "sample_std" else 0)
        return list((group - group.mean()) / (spread + EPSILON))
    values = []
    for i, reward in enumerate(group):
        others = np.delete(group, i)
        spread = std(others, ddof=1)
        scale = spread + EPSILON if kind == "loo_normalized" and spread > 0 else 1.0
        values.append((reward - others.mean()) / scale)
    return values


@pytest.mark.parametrize(("kind", "advantage"), list(zip(IDS, ADVANTAGES, strict=True)))
@LAWS
@given(rewards=REWARDS, valid=VALID)
def test_equals_its_transcription_over_the_valid_samples(
    kind, advantage, rewards, valid
):
    given_rewards = jnp.array(np.where(valid, rewards, np.nan))
    values = np.asarray(advantage(given_rewards, jnp.array(valid)))
    for row, group, kept in zip(values, rewards, valid, strict=True):
        np.testing.assert_allclose(
            row[kept], transcription(kind, group[kept]), rtol=1e-4, atol=1e-4
        )
        assert (row[~kept] == 0).all()


@every_advantage
@LAWS
@given(reward=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(advantage, reward, size):
    rewards = np.full((1, 9), reward, np.float32)
    valid = (np.arange(9) < size)[None]
    values = np.asarray(advantage(jnp.array(rewards), jnp.array(valid)))
    assert (values == 0).all()


@every_advantage
@LAWS
@given(rewards=REWARDS, order=st.permutations(range(4)))
def test_permuting_the_samples_permutes_the_advantages(advantage, rewards, order):
    order = list(order)
    everyone = jnp.ones(rewards.shape, bool)
    permuted = np.asarray(advantage(jnp.array(rewards[:, order]), everyone))
    values = np.asarray(advantage(jnp.array(rewards), everyone))
    np.testing.assert_allclose(permuted, values[:, order], rtol=1e-4, atol=1e-5)


@every_advantage
def test_one_dimension_or_many(advantage):
    rewards = np.arange(24, dtype=np.float32).reshape(2, 3, 4) ** 2
    many, one = advantage(jnp.array(rewards)), advantage(jnp.array(rewards[1, 2]))
    np.testing.assert_allclose(np.asarray(many)[1, 2], one, rtol=1e-6)


@every_advantage
def test_a_group_without_a_valid_sample(advantage):
    values = advantage(jnp.full((1, 3), jnp.nan), jnp.zeros((1, 3), bool))
    assert values.tolist() == [[0, 0, 0]]


@every_advantage
def test_no_samples_at_all(advantage):
    assert advantage(jnp.zeros((2, 0))).shape == (2, 0)


@every_advantage
@pytest.mark.parametrize("rewards", [[2.0, 2.0, 2.0], [1.0, 2.0, jnp.nan]])
def test_finite_gradients_in_degenerate_groups(advantage, rewards):
    rewards = jnp.array([rewards])
    valid = ~jnp.isnan(rewards)
    gradient = jax.grad(lambda r: advantage(r, valid)[0, 0])(rewards)
    assert jnp.isfinite(gradient).all()
    assert jnp.where(valid, 0, gradient).sum() == 0


@every_advantage
def test_a_valid_nan_reward_stays_visible(advantage):
    assert jnp.isnan(advantage(jnp.array([[1.0, jnp.nan, 2.0]]))).any()


def test_the_leave_one_out_advantage_is_the_centred_one_rescaled():
    rewards = jnp.array([[0.0, 1.0, 1.0, 5.0]])
    np.testing.assert_allclose(
        advantages.leave_one_out(rewards),
        4 / 3 * advantages.group_centered(rewards),
        rtol=1e-6,
    )


def test_large_rewards_keep_their_differences():
    rewards = jnp.array([[1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3]])
    assert advantages.group_centered(rewards).tolist() == [[-1.5, -0.5, 0.5, 1.5]]


def test_ddof_is_one_or_zero():
    with pytest.raises(
        ValueError, match=r"ddof must be 1 \(sample\) or 0 \(population\), got 2"
    ):
        advantages.group_normalized(jnp.ones((1, 2)), ddof=2)


@pytest.mark.parametrize(
    "advantage", [advantages.group_normalized, advantages.leave_one_out_normalized]
)
def test_epsilon_is_not_negative(advantage):
    with pytest.raises(ValueError, match=r"epsilon must be >= 0, got -0.1"):
        advantage(jnp.ones((1, 2)), epsilon=-0.1)
