"""Statistics of samples and evaluations: counts, pass@k and intervals."""

import itertools

import numpy as np
import pytest

from jaxrl_post.envs import WorkerPool
from jaxrl_post.envs.rubric import Criterion, Rubric
from jaxrl_post.programs.intervals import interval_over_tasks, wilson_interval
from jaxrl_post.programs.scores import score
from jaxrl_post.rollout import Episode, Group, Turn
from jaxrl_post.rollout.collector import FailedRolloutsError
from jaxrl_post.tokens import Tokens
from tests.programs.trainers import changed, make_trainer


# Newcombe, Two-sided confidence intervals for the single proportion, Statistics in
# Medicine 17 (1998), table I, method 3.
@pytest.mark.parametrize(
    ("solved", "count", "interval"),
    [
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilson_interval_is_the_published_one(solved, count, interval):
    found = wilson_interval(solved / count, count)
    np.testing.assert_allclose(found, interval, atol=5e-5)
    # No success is as certain as every success.
    mirrored = wilson_interval(1 - solved / count, count)
    np.testing.assert_allclose(mirrored, (1 - found[1], 1 - found[0]), atol=1e-12)


@pytest.mark.parametrize(("share", "count"), [(-0.1, 5), (1.1, 5), (0.5, 0)])
def test_wilson_interval_refuses_what_is_no_share(share, count):
    with pytest.raises(ValueError, match=f"got {share} of {count}"):
        wilson_interval(share, count)


def rollout(task: int, sample: int, reward: float | None, *, size=3, finish="stop"):
    said = Tokens.generated([1] * size, [0.0] * size, version=0)
    metrics = {} if reward is None else {"reward": reward}
    turn = Turn(Tokens.context([1, 1]), said, "?", "!", finish, reward, metrics=metrics)
    error = "" if reward is not None else "timeout: 10 s"
    return Episode(task, sample, task, "?", (turn,), finish, error)


def test_score_counts_by_hand():
    scores = score(
        [
            Group(0, (rollout(0, 0, 1.0), rollout(0, 1, 0.25, size=7))),
            Group(1, (rollout(1, 0, 0.5), rollout(1, 1, None))),
            Group(2, (rollout(2, 0, 0.0, finish="length"), rollout(2, 1, 1.0))),
            Group(3, (rollout(3, 0, None), rollout(3, 1, None))),
        ]
    )
    assert (scores.tasks, scores.samples, scores.failed) == (4, 8, 3)
    # A half, none, a half and none: every task counts the same, and what could not
    # be judged solves nothing.
    assert scores.accuracy == 0.25
    assert scores.interval == interval_over_tasks([0.5, 0.0, 0.5, 0.0], 8)
    assert scores.pass_at == {2: 0.5}
    # The rest is of those that were judged.
    assert scores.mean_reward == pytest.approx(0.55)
    assert scores.mean_tokens == pytest.approx(3.8)
    assert scores.max_tokens == 7
    assert scores.stopped == 0.8
    assert scores.metrics == {"reward": pytest.approx(0.55)}


def test_score_takes_the_threshold():
    groups = [Group(0, (rollout(0, 0, 0.5), rollout(0, 1, 0.4)))]
    assert score(groups).accuracy == 0.0
    assert score(groups, solved_reward=0.5).accuracy == 0.5


def test_score_tells_the_environments_of_a_mixture_apart():
    groups = [
        Group(0, (rollout(0, 0, 1.0), rollout(0, 1, 0.25))),
        Group(1, (rollout(1, 0, 1.0), rollout(1, 1, None))),
        Group(2, (rollout(2, 0, 0.5), rollout(2, 1, 0.0))),
        Group(3, (rollout(3, 0, None), rollout(3, 1, None))),
    ]
    parts = {0: "sums", 1: "sums", 2: "keys", 3: "lost"}
    assert score(groups, parts=parts).metrics == {
        "reward": 0.55,
        # A sample that could not be judged solves nothing, and has no reward.
        "sums/accuracy": 0.5,
        "sums/reward": 0.75,
        "keys/accuracy": 0.0,
        "keys/reward": 0.25,
        "lost/accuracy": 0.0,
    }
    alone = score(groups, parts=dict.fromkeys(range(4), ""))
    assert alone.metrics == {"reward": 0.55}


def test_score_of_failures_alone_is_an_error():
    with pytest.raises(FailedRolloutsError, match=r"none of 1 samples.*timeout: 10 s"):
        score([Group(0, (rollout(0, 0, None),))])


def test_pass_at_k_is_the_mean_over_all_sets_of_k():
    rewards = [(1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (0, 0, 0, 0, 0)]
    groups = [
        Group(task, tuple(rollout(task, i, float(r)) for i, r in enumerate(row)))
        for task, row in enumerate(rewards)
    ]
    expected = {
        k: np.mean([[any(s) for s in itertools.combinations(r, k)] for r in rewards])
        for k in (2, 4, 5)
    }
    assert score(groups).pass_at == pytest.approx(expected)
    assert score([Group(0, (rollout(0, 0, 1.0),))]).pass_at == {}


def test_one_sample_a_task_is_an_independent_observation():
    shares = [1.0] * 81 + [0.0] * (263 - 81)
    found = interval_over_tasks(shares, 263)
    assert found == pytest.approx(wilson_interval(81 / 263, 263), abs=1e-12)


@pytest.mark.parametrize(
    ("shares", "samples", "worth"),
    [
        # Worth by hand: p (1 - p) = 1/4, s^2 = 1/24, n = 4: 24.
        ([0.25, 0.75, 0.5, 0.5], 64, 24.0),
        # No more than there are samples, and no less than there are tasks.
        ([0.25, 0.75, 0.5, 0.5], 16, 16.0),
        ([0.5] * 5, 20, 20.0),
        ([0.0, 0.0, 1.0], 9, 3.0),
        ([0.0] * 6, 48, 6.0),
        ([0.5], 8, 1.0),
    ],
)
def test_what_samples_are_worth(shares, samples, worth):
    expected = wilson_interval(float(np.mean(shares)), worth)
    assert interval_over_tasks(shares, samples) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("alpha", "beta"), [(0.3, 0.7), (2.0, 2.0), (0.5, 9.5), (60.0, 40.0)]
)
def test_the_interval_covers_the_truth_as_often_as_it_says(alpha, beta):
    """Tasks of a Beta distribution of difficulties, eight samples each."""
    random, tasks, samples = np.random.default_rng(0), 60, 8
    truth, covered, pooled, trials = alpha / (alpha + beta), 0, 0, 1500
    for _ in range(trials):
        chances = random.beta(alpha, beta, tasks)
        shares = random.binomial(samples, chances) / samples
        low, high = interval_over_tasks(shares.tolist(), tasks * samples)
        covered += low <= truth <= high
        low, high = wilson_interval(float(shares.mean()), tasks * samples)
        pooled += low <= truth <= high
    assert 0.93 <= covered / trials <= 0.98
    # As if all samples were independent: too sure, unless all tasks are as hard.
    assert pooled / trials < (0.91 if alpha < 60 else 0.96)


@pytest.mark.processes
def test_answers_that_cannot_be_judged_are_no_zeros_of_an_evaluation(coin):
    for broken in range(5, 40, 5):
        environment = coin.Coin(broken=broken)
        config = changed("rollout", max_failed_share=0.9)
        with WorkerPool(environment) as judges:
            found = make_trainer(environment, judges, config).evaluate()
        judged = [g.episodes[0].reward for g in found.groups if g.valid[0]]
        if found.scores.failed:
            break
    assert 0 < found.scores.failed == len(found.groups) - len(judged)
    assert found.scores.mean_reward == pytest.approx(np.mean(judged))
    # They solve nothing either.
    solved = judged.count(1.0)
    assert found.scores.accuracy == pytest.approx(solved / len(found.groups))


@pytest.mark.processes
def test_accuracy_is_the_share_of_what_is_solved_and_no_mean_reward(coin):
    """A reward of 0.4 for every answer is no accuracy of 40 %."""
    environment = Rubric(
        coin.Coin(), {"half": Criterion(coin.forty_percent)}, own_weight=0
    )
    with WorkerPool(environment) as judges:
        found = make_trainer(environment, judges).evaluate().scores
        config = changed("eval", solved_reward=0.4)
        lenient = make_trainer(environment, judges, config).evaluate().scores
    assert found.mean_reward == pytest.approx(0.4)
    assert found.accuracy == 0.0
    assert found.interval[0] == 0 < found.interval[1] < 0.5
    assert lenient.accuracy == 1.0


@pytest.mark.processes
def test_an_evaluation_that_fails_stops_the_run(coin):
    environment = coin.Coin(broken=40)
    with WorkerPool(environment) as judges:
        trainer = make_trainer(environment, judges)
        with pytest.raises(
            FailedRolloutsError, match=r"evaluation: 6 of 6 rollouts failed; --roll"
        ):
            trainer.evaluate()
