"""Implicit process rewards: numbers worked out by hand, and laws."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import implicit, reduce

BETA = 0.05


def softplus(x):
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def test_the_reward_of_a_token_is_beta_times_its_log_ratio():
    phi = jnp.array([[-1.0, -2.0, -0.5, -9.0]])
    reference = jnp.array([[-3.0, -1.0, -0.5, -1.0]])
    mask = jnp.array([[True, True, True, False]])
    found = implicit.implicit_rewards(phi, reference, mask, beta=BETA)
    np.testing.assert_allclose(found, [[0.1, -0.05, 0.0, 0.0]], rtol=1e-6)


def test_the_loss_is_the_cross_entropy_of_the_sum():
    # Two answers in a row; a token between the first one's does not count.
    phi = jnp.array([[-1.0, 7.0, -2.0, -4.0, -6.0, 0.0]])
    reference = jnp.array([[-3.0, 0.0, -12.0, -2.0, -2.0, 0.0]])
    mask = jnp.array([[True, False, True, True, True, False]])
    ids = jnp.array([[1, 1, 1, 2, 2, 0]])
    labels = jnp.array([[1.0, 1.0, 1.0, 0.25, 0.25, 0.0]])
    # r = 0.05 (2 + 10) = 0.6 with o = 1; r = 0.05 (-2 - 4) = -0.3 with o = 0.25.
    first = softplus(-0.6)
    second = 0.25 * softplus(0.3) + 0.75 * softplus(-0.3)
    assert (first, second) == pytest.approx((0.437488, 0.629355), abs=1e-6)
    found = implicit.implicit_reward_loss(phi, reference, labels, mask, ids, beta=BETA)
    expected = [[first, 0.0, first, second, second, 0.0]]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # The mean over answers, not over tokens.
    mean = reduce.sequence_mean_of_token_mean(found, mask, ids).mean()
    assert mean.item() == pytest.approx((first + second) / 2)


def test_the_gradient_raises_right_answers_and_lowers_wrong_ones():
    """dL / dlog phi_t = beta (sigmoid(r) - o) at every token of the answer."""
    phi, reference = jnp.array([[-1.0, -2.0], [-4.0, -6.0]]), jnp.full((2, 2), -2.0)
    labels = jnp.array([[1.0, 1.0], [0.0, 0.0]])
    mask = jnp.ones((2, 2), bool)

    def loss(phi):
        last = jnp.array([False, True])
        each = implicit.implicit_reward_loss(phi, reference, labels, mask, beta=BETA)
        return jnp.where(last, each, 0.0).sum()

    said = [BETA * (-1 - 2 + 4), BETA * (-4 - 6 + 4)]
    share = [1 / (1 + math.exp(-each)) for each in said]
    expected = [[BETA * (share[0] - 1)] * 2, [BETA * share[1]] * 2]
    np.testing.assert_allclose(jax.grad(loss)(phi), expected, rtol=1e-6)


def by_loops(rewards, mask, segments, answers, groups, gamma):
    """Algorithm 1, line 18, without the outcomes' part, in float64."""
    of_answer, group_of = {}, {}
    for place in zip(*np.nonzero(mask), strict=True):
        of_answer.setdefault(answers[place], []).append(float(rewards[place]))
        group_of[answers[place]] = groups[place]
    means = {number: sum(own) / len(own) for number, own in of_answer.items()}
    found = np.zeros(rewards.shape, np.float64)
    for row, column in zip(*np.nonzero(mask), strict=True):
        own = answers[row, column]
        others = [
            m for a, m in means.items() if a != own and group_of[a] == group_of[own]
        ]
        if not others:
            continue
        baseline, discount = sum(others) / len(others), 1.0
        for later in range(column, rewards.shape[1]):
            same = segments[row, later] == segments[row, column]
            if same and mask[row, later]:
                found[row, column] += discount * (rewards[row, later] - baseline)
                discount *= gamma
    return found


def test_returns_of_two_answers_by_hand():
    # The baseline of the first is 0.3, the mean of the second; of the second it is
    # (1 + 0 - 0.4) / 3 = 0.2. Its token in the middle is a tool's.
    rewards = jnp.array([[1.0, 0.0, -0.4, 0.0], [0.5, 9.0, 0.1, 0.0]])
    mask = jnp.array([[True, True, True, False], [True, False, True, False]])
    answers = jnp.array([[1, 1, 1, 0], [2, 2, 2, 0]])
    groups = jnp.where(answers > 0, 1, 0)
    found = implicit.leave_one_out_returns(
        rewards, mask, None, answers, groups, gamma=1.0
    )
    np.testing.assert_allclose(
        found, [[-0.3, -1.0, -0.7, 0.0], [0.2, 0.0, -0.1, 0.0]], rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_are_the_papers(gamma):
    """Groups of three answers and of one, in packed rows, one answer in two rows."""
    random = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 2, 2, 2, 2]])
    answers = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [3, 3, 3, 3, 2, 2, 2, 2]])
    segments = np.concatenate([segments, [[1, 1, 1, 0, 0, 0, 0, 0]]])
    answers = np.concatenate([answers, [[4, 4, 4, 0, 0, 0, 0, 0]]])
    groups = np.where(answers == 4, 2, np.where(answers > 0, 1, 0))
    mask = (segments > 0) & (random.random(segments.shape) < 0.7)
    rewards = random.normal(size=segments.shape).astype(np.float32)
    arrays = map(jnp.asarray, (rewards, mask, segments, answers, groups))
    found = implicit.leave_one_out_returns(*arrays, gamma=gamma)
    expected = by_loops(rewards, mask, segments, answers, groups, gamma)
    assert np.abs(expected[:2]).max() > 0.5
    assert not expected[2].any()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_outcomes_at_the_last_token_give_the_usual_leave_one_out():
    """With answers of one token it is RLOO."""
    outcomes = np.array([1.0, 0.0, 0.0, 1.0], np.float32)
    answers = jnp.arange(1, 5)[:, None]
    found = implicit.leave_one_out_returns(
        jnp.asarray(outcomes)[:, None], jnp.ones((4, 1), bool), None,
        answers, jnp.ones_like(answers), gamma=1.0,
    )  # fmt: skip
    expected = outcomes - (outcomes.sum() - outcomes) / 3
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6)


def test_ids_out_of_range_show():
    rewards, mask = jnp.ones((2, 2)), jnp.ones((2, 2), bool)
    answers, groups = jnp.array([[1, 1], [2, 9]]), jnp.ones((2, 2), int)
    for ids in ((answers, groups), (jnp.ones((2, 2), int), answers)):
        found = implicit.leave_one_out_returns(rewards, mask, None, *ids, gamma=1.0)
        assert jnp.isnan(found).any()


def test_the_largest_return_becomes_one():
    # Returns are 3, 2 and -1; of the second sequence -4.
    rewards = jnp.array([[1.0, 3.0, -1.0, -4.0, 7.0]])
    mask = jnp.array([[True, True, True, True, False]])
    ids = jnp.array([[1, 1, 1, 2, 0]])
    found = implicit.bounded_by_return(rewards, mask, ids, epsilon=0.0)
    np.testing.assert_allclose(found, [[0.25, 0.75, -0.25, -1.0, 0.0]])
    assert not implicit.bounded_by_return(0 * rewards, mask, ids).any()


def test_what_is_out_of_range_is_refused():
    ones, mask = jnp.ones((1, 2)), jnp.ones((1, 2), bool)
    with pytest.raises(ValueError, match=r"beta must be > 0, got 0"):
        implicit.implicit_rewards(ones, ones, mask, beta=0.0)
    with pytest.raises(ValueError, match=r"beta must be > 0, got -1"):
        implicit.implicit_reward_loss(ones, ones, ones, mask, beta=-1.0)
    ids = jnp.ones((1, 2), int)
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], got 2"):
        implicit.leave_one_out_returns(ones, mask, None, ids, ids, gamma=2.0)
    with pytest.raises(ValueError, match=r"epsilon must be >= 0, got -1"):
        implicit.bounded_by_return(ones, mask, epsilon=-1.0)
