"""Steps that leave episodes unfinished: which groups they take, and what resumes."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxrl_post.config.rl import RLConfig
from jaxrl_post.envs import Task, TaskSequence, WorkerPool
from jaxrl_post.programs.build.engine import make_engine
from jaxrl_post.programs.rl import OnlineTrainer
from jaxrl_post.records.metric_table import UNSTEADY
from jaxrl_post.rollout.episode import Group
from jaxrl_post.rollout.flight import ChangedTaskError
from tests.packed_rows import sequences_in
from tests.programs.trainers import RL, assert_same, changed, make_trainer
from tests.rollout.test_batch import turns_of

pytestmark = pytest.mark.processes

# Slow machines change nothing: judges have half a minute.
CONFIG = changed(
    "rollout", partial=8, max_turns=3, max_prompt_tokens=16, reward_grace_s=30.0
)


@pytest.fixture(scope="module")
def judges(coin) -> Iterator[WorkerPool]:
    with WorkerPool(coin.Relay()) as pool:
        yield pool


def facts(metrics: dict[str, float]) -> dict[str, float]:
    clocks = UNSTEADY
    return {k: v for k, v in metrics.items() if not k.startswith(clocks)}


def with_credit(config: RLConfig, **options) -> RLConfig:
    algorithm = dataclasses.replace(config.algorithm, **options)
    return dataclasses.replace(config, algorithm=algorithm)


def test_a_step_takes_the_first_groups_and_the_others_go_on(coin, judges):
    trainer = make_trainer(coin.Relay(), judges, CONFIG)
    seen: Counter[int] = Counter()
    ages = set()
    for number in range(1, 9):
        metrics, groups = trainer.step(number)
        assert len(groups) == 4
        seen.update(group.prompt_id for group in groups)
        version = number - 1
        # Only rounding, for tokens of the newest parameters; without
        # such tokens nothing is compared.
        newest = [
            (e.tokens.versions == version).any() for g in groups for e in g.episodes
        ]
        compared = {"token_mult_prob_error", "kl", "unequal"}
        found = {name for name in compared if f"mismatch/{name}" in metrics}
        assert found == (compared if any(newest) else set())
        if any(newest):
            error = metrics["mismatch/token_mult_prob_error"]
            assert error == pytest.approx(1, abs=1e-5)
        for episode in (e for group in groups for e in group.episodes):
            tokens = episode.tokens
            versions = tokens.versions[tokens.sampled]
            assert versions.max() <= version
            assert (np.diff(versions) >= 0).all()
            ages |= set((version - versions).tolist())
        waiting = len(trainer.buffer)
        # Eight more prompts than a step needs were drawn before it was taken.
        assert metrics["rollout/in_flight"] + waiting == 8
        assert trainer.experience.drawn == 4 * number + 8
        assert not trainer.weights.engine.busy
    # Every prompt once; missing ones are still running, or wait.
    assert set(seen.values()) == {1}
    state = trainer.meta()
    rest = [g["prompt_id"] for g in (*state["flights"], *state["queue"]["groups"])]
    assert sorted([*seen, *rest]) == list(range(trainer.experience.drawn))
    assert 1 in ages, "no sample was under way across an update"


@pytest.mark.parametrize("bound", [None, 2])
def test_a_step_waits_for_a_group_that_would_be_older_than_the_bound(
    coin, judges, bound
):
    config = changed(
        "rollout", partial=8, max_turns=3, max_prompt_tokens=16,
        reward_grace_s=30.0, staleness=bound,
    )  # fmt: skip
    trainer = make_trainer(coin.Relay(), judges, config)
    episodes, held, rounds = trainer.experience.collector.episodes, [], 0
    whole_round = episodes.round

    def slow_round(*arguments) -> list:
        """The episodes of the first prompt end 150 rounds late."""
        nonlocal rounds
        rounds += 1
        ended = whole_round(*arguments)
        held.extend(each for each in ended if each.prompt_id == 0)
        if rounds < 150:
            return [each for each in ended if each.prompt_id]
        late, held[:] = [*held], []
        return [*late, *(each for each in ended if each.prompt_id)]

    episodes.round = slow_round
    taken, oldest = dict[int, int](), 0.0
    for number in range(1, 5):
        metrics, groups = trainer.step(number)
        assert len(groups) == 4
        taken |= {group.prompt_id: number for group in groups}
        oldest = max(oldest, metrics["rollout/staleness_max"])
    # Group 0 was begun for step 1.
    assert taken.get(0) == (None if bound is None else 1 + bound)
    assert oldest == bound or bound is None


def test_what_was_sampled_across_an_update_is_what_the_trainer_scores(coin, judges):
    """Each token's log-prob comes from its own version, for the whole prefix."""
    trainer = make_trainer(coin.Relay(), judges, CONFIG)
    versions = {}
    checked = 0
    for number in range(1, 6):
        versions[number - 1] = jax.tree.map(np.array, trainer.updater.state.params)
        trainer.updater.learner.seen.clear()
        trainer.step(number)
        ((_, batch),) = trainer.updater.learner.seen
        for version in np.unique(batch.versions[batch.loss_mask]):
            predicted = trainer.updater.learner.scorer.predict(
                versions[int(version)], batch
            )
            those = batch.loss_mask & (batch.versions == version)
            np.testing.assert_allclose(
                batch.behavior_logprobs[those],
                np.asarray(predicted.logprobs)[those],
                atol=1e-5,
            )
            checked += int(version) < number - 1
    assert checked > 2, "the test shows nothing"


@pytest.mark.parametrize(
    ("name", "coefficient"),
    [
        pytest.param("distillation", 0.0, marks=pytest.mark.all),
        ("reinforce_plus_plus", 0.1),
        # Without a KL the same log-probs are compared with nothing.
        pytest.param("reinforce_plus_plus", 0.0, marks=pytest.mark.all),
    ],
)
@pytest.mark.slow("compiles a trainer with a reference and partial episodes")
def test_credit_compares_what_the_parameters_say_now(coin, judges, name, coefficient):
    """Log-probs of older parameters would bias the KL that is an advantage."""
    reference = "teacher" if name == "distillation" else None
    config = with_credit(
        CONFIG, name=name, kl_coefficient=coefficient, reference=reference
    )
    trainer = make_trainer(coin.Relay(), judges, config)
    updater = trainer.updater
    credit, read_by = jax.jit(updater.algorithm.credit), []
    updater.__dict__["_credit"] = lambda batch: read_by.append(batch) or credit(batch)
    stale = 0
    for number in range(1, 5):
        start = jax.tree.map(np.array, updater.state.params)
        updater.learner.seen.clear()
        trainer.step(number)
        ((_, batch),) = updater.learner.seen
        # The one update of the batch is its own start.
        assert batch.proximal_logprobs is None
        count, mask = len(batch.tokens), batch.loss_mask
        now = np.asarray(updater.learner.scorer.predict(start, batch).logprobs)[mask]
        read = read_by[-1].proximal_logprobs
        if name == "reinforce_plus_plus" and not coefficient:
            assert read is None
            continue
        if not batch.stale.any():
            assert read is None
            np.testing.assert_allclose(batch.behavior_logprobs[mask], now, atol=1e-5)
            continue
        old = batch.stale[mask]
        stale += int((abs(batch.behavior_logprobs[mask] - now)[old] > 1e-3).sum())
        np.testing.assert_allclose(read[:count][mask], now, atol=1e-5)
        if name == "distillation":
            expected = batch.reference_logprobs[mask] - now
            np.testing.assert_allclose(batch.advantages[mask], expected, atol=1e-5)
    assert stale > 2 or not (coefficient or reference), "the test shows nothing"


@pytest.mark.parametrize("stop", [1, 2])
def test_a_checkpoint_holds_the_episodes_under_way(coin, judges, stop):
    """A run resumed from it equals, to the last bit, one that never stopped."""
    whole = make_trainer(coin.Relay(), judges, CONFIG)
    expected = [whole.step(number) for number in range(1, 6)]
    first = make_trainer(coin.Relay(), judges, CONFIG)
    for number in range(1, stop + 1):
        first.step(number)
    meta = json.loads(json.dumps(first.meta()))
    assert meta["flights"], "nothing is under way: the test shows nothing"
    place = first.experience.indices.get_state()
    snapshot = jax.tree.map(jax.numpy.array, first.snapshot())
    # An evaluation between the two leaves no trace.
    first.evaluate()
    again = make_trainer(coin.Relay(), judges, CONFIG)
    again.experience.indices.set_state(place)
    again.restore(snapshot, meta)
    for number in range(stop + 1, 6):
        metrics, groups = again.step(number)
        assert facts(metrics) == facts(expected[number - 1][0])
        assert groups == expected[number - 1][1]
    assert_same(again.snapshot(), whole.snapshot())


def in_short_bursts(judges: WorkerPool, relay, *, recompute: bool) -> OnlineTrainer:
    """A trainer whose steps find samples in the middle of a turn."""
    rollout = dataclasses.replace(
        CONFIG.rollout, num_slots=20, steps_per_call=1, recompute_cache=recompute
    )
    config = dataclasses.replace(CONFIG, rollout=rollout)
    trainer = make_trainer(relay, judges, config)
    trainer.weights.engine = make_engine(
        rollout, trainer.updater.model, trainer.weights.layout, seed=0
    )
    return trainer


def test_samples_that_go_on_may_keep_their_keys(coin, judges):
    """Less is prefilled, and what is sampled with older keys is no version's policy."""
    prefilled, errors, versions = {}, {}, {}
    for recompute in (True, False):
        trainer = in_short_bursts(judges, coin.Relay(), recompute=recompute)
        engine, learner = trainer.weights.engine, trainer.updater.learner
        error, left = {False: 0.0, True: 0.0}, 0
        for number in range(1, 7):
            versions[number - 1] = jax.tree.map(np.array, trainer.updater.state.params)
            learner.seen.clear()
            trainer.step(number)
            left += engine.busy
            ((_, batch),) = learner.seen
            for version in np.unique(batch.versions[batch.loss_mask]):
                scored = learner.scorer.predict(versions[int(version)], batch)
                gap = np.abs(batch.behavior_logprobs - np.asarray(scored.logprobs))
                for row, there in sequences_in(batch):
                    # A turn is prefilled again, after every kind of earlier turn.
                    chosen = batch.loss_mask[row] & (batch.versions[row] == version)
                    mine = np.intersect1d(np.flatnonzero(chosen), there)
                    if mine.size:
                        mixed = bool((batch.versions[row][there] < version).any())
                        error[mixed] = max(error[mixed], gap[row][mine].max())
        assert left == 0 if recompute else left > 1, "the test shows nothing"
        # A checkpoint takes the samples back.
        assert trainer.meta()["flights"]
        assert not engine.busy
        prefilled[recompute] = engine.prefilled_tokens
        errors[recompute] = error
    assert prefilled[False] < prefilled[True]
    assert max(errors[True].values()) < 1e-5
    assert errors[False][False] < 1e-5
    assert errors[False][True] > 1e-4


def test_a_checkpoint_and_an_evaluation_compute_kept_keys_again(coin, judges):
    """A run that resumes equals, to the last bit, the one that continued."""
    first = in_short_bursts(judges, coin.Relay(), recompute=False)
    for number in range(1, 3):
        first.step(number)
    first.evaluate()
    meta = json.loads(json.dumps(first.meta()))
    assert meta["flights"], "nothing is under way: the test shows nothing"
    place = first.experience.indices.get_state()
    snapshot = jax.tree.map(jax.numpy.array, first.snapshot())
    expected = [first.step(number) for number in range(3, 6)]
    again = in_short_bursts(judges, coin.Relay(), recompute=False)
    again.experience.indices.set_state(place)
    again.restore(snapshot, meta)
    for number, (told, groups) in zip(range(3, 6), expected, strict=True):
        metrics, found = again.step(number)
        assert facts(metrics) == facts(told)
        assert found == groups
    assert_same(again.snapshot(), first.snapshot())


def test_a_step_computes_what_an_evaluation_computed_before(coin):
    """A run that resumes here has nothing else; where keys begin decides last bits."""

    class Same(coin.Coin):
        def tasks(self, split: str) -> TaskSequence:
            return super().tasks("train")

    prefilled = []
    with WorkerPool(coin.Coin()) as pool:
        trainer = make_trainer(Same(size=4), pool, RL)
        for number in (1, 2):
            if number == 2:
                trainer.evaluate()
            before = trainer.weights.engine.prefilled_tokens
            trainer.step(number)
            prefilled.append(trainer.weights.engine.prefilled_tokens - before)
    # The same four prompts in each.
    assert prefilled[0] == prefilled[1] > 0


def test_sessions_do_what_a_pure_step_does_resumed_or_not(coin, judges):
    """To the last bit: also where a session was lost with its process."""
    stateless = make_trainer(coin.Relay(), judges, CONFIG)
    expected = [stateless.step(number) for number in range(1, 5)]
    with WorkerPool(coin.StatefulRelay(), 2) as pool:
        first = make_trainer(coin.StatefulRelay(), pool, CONFIG)
        for number in range(1, 3):
            metrics, groups = first.step(number)
            assert facts(metrics) == facts(expected[number - 1][0])
        meta = json.loads(json.dumps(first.meta()))
        place = first.experience.indices.get_state()
        snapshot = jax.tree.map(jax.numpy.array, first.snapshot())
    turns = [len(e["episode"]["turns"]) for g in meta["flights"] for e in g["flights"]]
    assert max(turns) > 0, "no session is lost in the middle: the test shows nothing"
    with WorkerPool(coin.StatefulRelay(), 2) as pool:
        again = make_trainer(coin.StatefulRelay(), pool, CONFIG)
        again.experience.indices.set_state(place)
        again.restore(snapshot, meta)
        for number in range(3, 5):
            metrics, groups = again.step(number)
            assert facts(metrics) == facts(expected[number - 1][0])
            assert groups == expected[number - 1][1]
    assert_same(again.snapshot(), stateless.snapshot())


def test_a_flight_does_not_come_back_to_another_version(coin, judges):
    trainer = make_trainer(coin.Relay(), judges, CONFIG)
    trainer.step(1)

    @dataclasses.dataclass(frozen=True)
    class Newer(coin.Relay):
        version: str = "2"

    other = make_trainer(Newer(), judges, CONFIG)
    with pytest.raises(
        ChangedTaskError, match=r"version '' of environment relay.* is version '2'"
    ):
        other.restore(other.snapshot(), trainer.meta())


def test_a_flight_does_not_come_back_to_other_tasks(coin, judges):
    trainer = make_trainer(coin.Relay(), judges, CONFIG)
    trainer.step(1)
    meta = trainer.meta()

    class Changed(coin.Relay):
        def tasks(self, split):
            tasks = super().tasks(split)
            change = lambda t: Task(t.id, t.messages, "another reference")  # noqa: E731
            return dataclasses.replace(tasks, make=lambda i: change(tasks[i]))

    other = make_trainer(Changed(), judges, CONFIG)
    with pytest.raises(ChangedTaskError, match=r"Resume with the environment and data"):
        other.restore(other.snapshot(), meta)


def test_dynamic_sampling_takes_the_first_groups_with_spread(coin):
    environment = coin.Coin()
    config = changed("rollout", partial=2, dynamic_sampling=True, reward_grace_s=30.0)
    with WorkerPool(environment) as judges:
        trainer = make_trainer(environment, judges, config)
        for number in range(1, 5):
            metrics, groups = trainer.step(number)
            assert len(groups) == 4
            assert all(group.has_spread for group in groups)
            # One task in three has none: these were drawn with the others.
            assert metrics["rollout/groups_with_spread"] < 1
        assert trainer.experience.drawn > 4 * 4 + 2


def test_dynamic_sampling_keeps_groups_whose_turns_differ(coin, judges):
    def group(first: float, second: float) -> Group:
        return Group(
            1, (turns_of(first, 1 - first), turns_of(second, 1 - second, index=1))
        )

    config = changed(
        "rollout", max_turns=3, max_prompt_tokens=16, dynamic_sampling=True
    )
    for options, kept in (
        ({"turn_credit": "turns"}, [(0.0, 1.0)]),
        ({"turn_credit": "turns", "turn_discount": 0.5}, [(0.0, 1.0)]),
        ({}, []),
    ):
        trainer = make_trainer(coin.Relay(), judges, with_credit(config, **options))
        trainer.buffer.put([group(0.0, 1.0), group(0.5, 0.5)])
        found = trainer.buffer.take()
        assert found == [group(*rewards) for rewards in kept]


@pytest.mark.parametrize(
    ("name", "discount"),
    [("grpo", 1.0), ("grpo", 0.0), ("ppo", 1.0), ("reinforce_plus_plus", 1.0)],
)
def test_rewards_stay_with_their_turns(coin, judges, name, discount):
    credit = {"turn_credit": "turns", "turn_discount": discount}
    config = with_credit(
        changed("rollout", max_turns=3, max_prompt_tokens=16), name=name, **credit
    )
    trainer = make_trainer(coin.Relay(), judges, config)
    trainer.updater.learner.seen.clear()
    metrics, groups = trainer.step(1)
    assert metrics["rollout/turns"] > 1
    ((_, batch),) = trainer.updater.learner.seen
    by_ids = {}
    for group in groups:
        for episode in group.episodes:
            by_ids[tuple(episode.tokens.ids.tolist())] = (group, episode)
    told_apart = 0
    for row, there in sequences_in(batch):
        group, episode = by_ids[tuple(batch.tokens[row][there].tolist())]
        turns, advantages = episode.turn_ids, batch.advantages[row][there]
        for turn, found in enumerate(episode.turns, 1):
            mine = turns == turn
            if name == "grpo":
                # Compared with the same turn of the group's other samples.
                others = [e for e in group.episodes if len(e.turns) >= turn]
                end = None if discount else turn
                returns = np.float32(
                    [sum(t.reward for t in e.turns[turn - 1 : end]) for e in others]
                )
                own = sum(t.reward for t in episode.turns[turn - 1 : end])
                spread = returns.std(ddof=1) if len(returns) > 1 else 0.0
                expected = (own - returns.mean()) / (spread + 1e-4)
                np.testing.assert_allclose(
                    advantages[mine], expected, rtol=2e-3, atol=2e-3
                )
            else:
                rewards = batch.token_rewards[row][there]
                last = np.flatnonzero(mine)[-1]
                assert rewards[last] == found.reward
                assert not rewards[mine][:-1].any()
        told_apart += len(set(advantages[turns > 0].tolist())) > 1
    assert told_apart, "the test shows nothing"


def test_limits_that_end_an_episode_are_counted(coin, judges):
    config = changed("rollout", max_turns=2, max_prompt_tokens=16)
    metrics, groups = make_trainer(coin.Relay(), judges, config).step(1)
    ends = Counter(e.finish_reason for group in groups for e in group.episodes)
    assert set(ends) <= {"turn_limit", "token_limit", "length"}
    assert ends["turn_limit"] > 0
    for name in ("turn_limit", "token_limit"):
        assert metrics[f"rollout/{name}"] == ends[name] / 16
    # Rewards of earlier turns are kept.
    assert sum(e.reward for g in groups for e in g.episodes) > 0
    assert RL.rollout.truncated == "reward"
