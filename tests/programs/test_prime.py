"""Steps of prime: the reward model is taught by outcomes, and rewards each token."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.envs import WorkerPool
from jaxrl_post.learner.credit import outcome_labels
from jaxrl_post.rollout.episode import Group
from jaxrl_post.types import TokenBatch
from tests.packed_rows import sequences_in
from tests.programs.trainers import RL, assert_same, host, make_trainer

pytestmark = pytest.mark.processes

BETA = 1.0
# Far from the policy, so that process rewards are as large as outcomes.
MOVED = 2.0


@pytest.fixture(scope="module")
def judges(coin) -> Iterator[WorkerPool]:
    with WorkerPool(coin.Coin()) as pool:
        yield pool


def prime(
    *, rollout: dict | None = None, update: dict | None = None, **prm
) -> RLConfig:
    return dataclasses.replace(
        RL,
        algorithm=dataclasses.replace(RL.algorithm, name="prime"),
        rollout=dataclasses.replace(RL.rollout, **(rollout or {})),
        update=dataclasses.replace(RL.update, **(update or {})),
        prm=PrmConfig(
            beta=BETA,
            optimizer=dataclasses.replace(PrmConfig().optimizer, learning_rate=1e-2),
            **prm,
        ),
    )


def with_other_prm(trainer) -> None:
    """The reward model begins elsewhere than the policy and the reference."""
    companion = trainer.updater.prm
    random = np.random.default_rng(0)

    def other(leaf):
        moved = MOVED * random.normal(size=leaf.shape) * np.abs(leaf).mean()
        return jnp.asarray(leaf + moved, leaf.dtype)

    params = jax.tree.map(other, companion.state.params)
    companion.state = companion.state.replace(params=params)


def alone(trainer, params, tokens) -> np.ndarray:
    """Log-probs of a sequence, each token's, by itself in a row."""
    count = len(tokens)
    batch = TokenBatch(
        tokens=np.asarray(tokens.ids)[None],
        positions=np.arange(count, dtype=np.int32)[None],
        ends=np.full((1, count), count, np.int32),
        loss_mask=np.asarray(tokens.sampled)[None],
        advantages=np.zeros((1, count), np.float32),
        behavior_logprobs=np.zeros((1, count), np.float32),
        versions=np.zeros((1, count), np.int32),
    )
    found = trainer.updater.learner.scorer.predict(params, batch).logprobs
    return np.asarray(found, np.float64)[0][tokens.sampled]


def by_hand(trainer, groups: list[Group], prm) -> dict[tuple, np.ndarray]:
    """Advantages of each episode's sampled tokens, by its ids, in float64."""
    reference = trainer.updater.reference.params
    found = {}
    for group in groups:
        rewards, outcomes = [], [e.reward for e in group.episodes]
        for episode in group.episodes:
            pair = (alone(trainer, each, episode.tokens) for each in (prm, reference))
            said, told = pair
            rewards.append(BETA * (said - told))
        for place, episode in enumerate(group.episodes):
            others = [n for n in range(len(rewards)) if n != place]
            baseline = np.mean([rewards[n].mean() for n in others])
            outcome = outcomes[place] - np.mean([outcomes[n] for n in others])
            own = rewards[place] - baseline
            process = [own[t:].sum() for t in range(len(own))]
            key = (group.prompt_id, *episode.tokens.ids.tolist())
            found[key] = outcome + np.array(process)
    return found


def trained(groups: list[Group], batches) -> dict[tuple, np.ndarray]:
    """Advantages with which the policy was trained, by the ids of the sequence."""
    numbers = {
        tuple(e.tokens.ids.tolist()): g.prompt_id for g in groups for e in g.episodes
    }
    found = {}
    for batch in batches:
        for row, places in sequences_in(batch):
            ids = tuple(batch.tokens[row][places].tolist())
            own = batch.loss_mask[row][places]
            found[numbers[ids], *ids] = batch.advantages[row][places][own]
    return found


@pytest.fixture(scope="module")
def relays(coin) -> Iterator[WorkerPool]:
    with WorkerPool(coin.Relay()) as pool:
        yield pool


def test_what_the_environment_says_between_turns_has_no_reward(coin, relays):
    """Advantages of episodes of several turns, from the sampled tokens alone."""
    config = prime(rollout={"max_turns": 3}, solved_reward=2.0)
    trainer = make_trainer(coin.Relay(), relays, config)
    with_other_prm(trainer)
    seen = trainer.updater.learner.seen
    seen.clear()
    before = jax.tree.map(np.array, trainer.updater.prm.state.params)
    metrics, groups = trainer.step(1)
    episodes = [e for group in groups for e in group.episodes]
    assert max(len(e.turns) for e in episodes) > 1
    expected = by_hand(trainer, groups, before)
    found = trained(groups, [batch for _, batch in seen])
    assert found.keys() == expected.keys()
    for key, advantages in expected.items():
        np.testing.assert_allclose(found[key], advantages, rtol=1e-4, atol=1e-4)
    right = [(e.reward or 0.0) >= 2 for e in episodes]
    assert 0 < np.mean(right) < 1
    labels = outcome_labels(groups, 2.0)
    np.testing.assert_array_equal(labels.reshape(-1), right)
    assert metrics["audit/unsampled"] == metrics["audit/untrained"] == 0


@pytest.mark.parametrize("scores", ["before", "after"])
def test_a_token_is_rewarded_by_the_models_log_ratio(coin, judges, scores):
    config = prime(scores=scores, update={"minibatches": 2})
    trainer = make_trainer(coin.Coin(), judges, config)
    with_other_prm(trainer)
    seen = trainer.updater.learner.seen
    seen.clear()
    before = jax.tree.map(np.array, trainer.updater.prm.state.params)
    metrics, groups = trainer.step(1)
    after = trainer.updater.prm.state.params
    moved = [
        np.abs(a - b).max() for a, b in zip(host(before), host(after), strict=True)
    ]
    assert min(moved) > 1e-3
    expected = by_hand(trainer, groups, before if scores == "before" else after)
    found = trained(groups, [batch for _, batch in seen])
    assert found.keys() == expected.keys()
    largest = 0.0
    for key, advantages in expected.items():
        np.testing.assert_allclose(found[key], advantages, rtol=1e-4, atol=1e-4)
        largest = max(largest, float(np.ptp(advantages)))
    assert largest > 0.2, "all tokens of an answer have one advantage: nothing is shown"
    # One pass over the batch, however many the policy takes.
    assert int(trainer.updater.prm.state.step) == 2
    values = np.concatenate([*found.values()])
    assert metrics["advantage/token_std"] == pytest.approx(values.std(), rel=1e-4)


def test_the_model_learns_the_outcomes_and_the_reference_stays(coin, judges):
    trainer = make_trainer(coin.Coin(), judges, prime(update={"epochs": 2}))
    start = host(trainer.updater.reference.params)
    metrics, groups = trainer.step(1)
    # It begins as the reference: no answer has a reward above 0.
    right = np.mean([e.reward == 0 for g in groups for e in g.episodes])
    assert metrics["prm/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert metrics["prm/accuracy"] == pytest.approx(right)
    assert metrics["prm/answer_reward"] == pytest.approx(0, abs=1e-5)
    assert metrics["prm/process_reward"] == pytest.approx(0, abs=1e-6)
    assert metrics["prm/learning_rate"] == pytest.approx(1e-2)
    assert metrics["prm/grad_norm"] > 0
    assert metrics["policy/entropy"] > 0
    assert int(trainer.updater.prm.state.step) == 1
    assert int(trainer.updater.state.step) == 2
    # Taught the same answers again and again, it tells them apart.
    config = prime()
    trainer = make_trainer(coin.Coin(), judges, config)
    _, groups = trainer.step(1)
    losses = []
    for _ in range(30):
        sequences, *_ = trainer.updater.sequences(groups)
        pieces, _ = trainer.updater._minibatches(sequences, 1)
        _, found = trainer.updater._taught(trainer.updater._with_scores(pieces), 1)
        losses.append(found["prm/loss"])
    assert losses[-1] < 0.5 * losses[0]
    assert found["prm/accuracy"] > 0.9
    assert_same(trainer.updater.reference.params, start)


def test_a_snapshot_holds_the_model_too(coin, judges):
    trainer = make_trainer(coin.Coin(), judges, prime())
    trainer.step(1)
    snapshot = jax.tree.map(jnp.copy, trainer.snapshot())
    other = make_trainer(coin.Coin(), judges, prime())
    other.restore(snapshot, trainer.meta())
    assert_same(other.updater.prm.state, trainer.updater.prm.state)
    assert int(other.updater.prm.state.step) == 1
    assert other.updater.state.prm is None
    structures = [jax.tree.structure(t.snapshot()) for t in (trainer, other)]
    assert structures[0] == jax.tree.structure(trainer.layout) == structures[1]


def test_groups_within_bounds_are_kept(coin, judges):
    config = prime(
        rollout={
            "dynamic_sampling": True,
            "group_reward_low": 0.3,
            "group_reward_high": 0.8,
        }
    )
    trainer = make_trainer(coin.Coin(), judges, config)
    means = []
    for number in range(1, 4):
        _, groups = trainer.step(number)
        means += [float(np.mean(group.rewards)) for group in groups]
    # A group of four with one right answer has spread, and is left out.
    assert {0.5, 0.75} == set(means)


def test_rewards_that_are_no_labels_are_refused(coin, judges):
    trainer = make_trainer(coin.Coin(), judges, prime())
    _, groups = trainer.step(1)
    np.testing.assert_array_equal(
        outcome_labels(groups, None), [g.rewards for g in groups]
    )

    def paid(factor: float) -> list[Group]:
        return [
            dataclasses.replace(
                group,
                episodes=tuple(
                    dataclasses.replace(
                        episode,
                        turns=tuple(
                            dataclasses.replace(
                                turn, reward=factor * (turn.reward or 0.0)
                            )
                            for turn in episode.turns
                        ),
                    )
                    for episode in group.episodes
                ),
            )
            for group in groups
        ]

    labels = outcome_labels(paid(3.0), 2.5)
    np.testing.assert_array_equal(labels, [g.rewards for g in groups])
    for factor in (3.0, -1.0):
        with pytest.raises(
            ConfigError,
            match=rf"^--prm\.solved-reward: the outcome .* has the reward {factor:g};",
        ):
            trainer.updater.sequences(paid(factor))
