"""The loop, step by step: what is collected, what is trained on, and what is not."""

import dataclasses
import json
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxrl_post.config.algorithm import AlgorithmConfig, DistillConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.envs import WorkerPool
from jaxrl_post.envs.rubric import Criterion, Rubric
from jaxrl_post.learner.learner import DivergenceError
from jaxrl_post.records.metric_table import UNSTEADY
from jaxrl_post.rollout import batch as batching
from jaxrl_post.rollout.batch import GroupFacts
from jaxrl_post.rollout.collector import FailedRolloutsError
from jaxrl_post.rollout.episode import Episode, Group, Turn
from jaxrl_post.tokens import Tokens
from tests.packed_rows import sequences_in
from tests.programs.trainers import (
    RL,
    assert_same,
    changed,
    host,
    make_trainer,
    with_last_turn,
)

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def judges(coin) -> Iterator[WorkerPool]:
    with WorkerPool(coin.Coin()) as pool:
        yield pool


def test_dynamic_sampling_trains_on_spread_and_keeps_the_surplus(coin, judges):
    config = changed("rollout", dynamic_sampling=True)
    trainer = make_trainer(coin.Coin(), judges, config)
    waiting: list[int] = []
    refilled = kept = 0
    for number in range(1, 6):
        drawn, version = trainer.experience.drawn, int(trainer.updater.state.step)
        metrics, groups = trainer.step(number)
        assert len(groups) == 4
        assert all(group.has_spread for group in groups)
        # The oldest first: what waited is used before anything that was just drawn.
        ids = [group.prompt_id for group in groups]
        assert ids[: len(waiting)] == waiting[:4]
        assert all(prompt_id >= drawn for prompt_id in ids[len(waiting) :])
        ages = [
            version - r.tokens.versions.max()
            for group in groups
            for r in group.episodes
        ]
        assert sorted(set(ages)) in ([0], [0, 1], [1])
        assert ages.count(1) == 4 * len(waiting)
        turns = [t for g in groups for e in g.episodes for t in e.turns]
        mean = np.concatenate([version - t.sampled.versions for t in turns]).mean()
        assert metrics["rollout/staleness"] == pytest.approx(mean)
        assert (trainer.experience.drawn - drawn) % 4 == 0
        refilled += trainer.experience.drawn - drawn > 4
        waiting = [value["prompt_id"] for value in trainer.meta()["queue"]["groups"]]
        kept += len(waiting) > 0
    assert refilled, "no step needed a second draw: the test shows nothing"
    assert kept, "no group ever waited: the test shows nothing"


@pytest.mark.parametrize(
    ("weights", "spread"), [((), True), (("a=1",), True), (("c=1", "a=0"), False)]
)
def test_a_group_whose_parts_differ_is_kept_where_parts_are_compared(
    coin, judges, weights, spread
):
    """Two samples of the same sum, by a and b, and the same c."""
    turn = Turn(Tokens.context([1]), Tokens.context([]), "", "", "stop", 1.5)
    parts = [{"a": 1.0, "b": 0.0, "c": 0.5}, {"a": 0.0, "b": 1.0, "c": 0.5}]
    group = Group(0, tuple(
        Episode(0, i, 0, "", (dataclasses.replace(turn, rewards=each),), "stop")
        for i, each in enumerate(parts)
    ))  # fmt: skip
    config = changed("rollout", dynamic_sampling=True)
    kept = []
    for options in (AlgorithmConfig("gdpo", reward_weights=weights), AlgorithmConfig()):
        config = dataclasses.replace(config, algorithm=options)
        buffer = make_trainer(coin.Coin(), judges, config).buffer
        buffer.put([group])
        kept.append(len(buffer))
    assert kept == [int(spread), 0]


def test_dynamic_sampling_is_bounded(coin):
    config = changed("rollout", dynamic_sampling=True, max_draws=2)
    environment = coin.Coin(hopeless=True)
    with WorkerPool(environment) as judges:
        trainer = make_trainer(environment, judges, config)
        with pytest.raises(
            FailedRolloutsError,
            match=r"step 1: none of 8 groups had rewards that differ; turn "
            "--rollout.dynamic-sampling off",
        ):
            trainer.step(1)
    assert trainer.experience.drawn == 8
    assert int(trainer.updater.state.step) == 0


def test_a_step_makes_do_with_the_groups_of_its_last_draw(coin, judges):
    config = changed("rollout", dynamic_sampling=True, max_draws=1)
    trainer = make_trainer(coin.Coin(), judges, config)
    sizes = []
    for number in range(1, 3):
        _, groups = trainer.step(number)
        sizes.append(len(groups))
        assert all(group.has_spread for group in groups)
    assert trainer.experience.drawn == 8
    assert 1 <= min(sizes) < 4, sizes


def test_without_dynamic_sampling_every_group_is_trained_on(coin, judges):
    trainer = make_trainer(coin.Coin(), judges)
    metrics, groups = trainer.step(1)
    assert [group.prompt_id for group in groups] == [0, 1, 2, 3]
    assert trainer.meta()["queue"] == {"groups": [], "begun": []}
    assert metrics["rollout/staleness"] == 0
    assert metrics["publish/bytes_moved"] == 0
    rewards = [r.reward for group in groups for r in group.episodes]
    assert metrics["reward/mean"] == pytest.approx(np.mean(rewards))
    spread = np.mean([group.has_spread for group in groups])
    assert metrics["rollout/groups_with_spread"] == pytest.approx(spread)
    phases = [
        value
        for name, value in metrics.items()
        if name.startswith("time/") and name != "time/step"
        if not name.endswith("compilations")
    ]
    assert len(phases) >= 5
    assert sum(phases) <= metrics["time/step"]


def test_meta_brings_buffer_and_numbering_back(coin, judges):
    config = changed("rollout", dynamic_sampling=True)
    trainer = make_trainer(coin.Coin(), judges, config)
    for number in range(1, 9):
        trainer.step(number)
        if len(trainer.buffer):
            break
    assert len(trainer.buffer), "no group waits: the test shows nothing"
    meta = json.loads(json.dumps(trainer.meta()))
    other = make_trainer(coin.Coin(), judges, config)
    other.restore(other.snapshot(), meta)
    assert other.experience.drawn == trainer.experience.drawn
    assert other.buffer.take() == trainer.buffer.take()


def test_failed_rollouts_are_counted_named_and_left_out(coin, caplog):
    environment = coin.Coin(broken=10)
    config = changed("rollout", max_failed_share=0.9)
    with WorkerPool(environment) as judges:
        trainer = make_trainer(environment, judges, config)
        while True:
            metrics, groups = trainer.step(trainer.experience.drawn // 4 + 1)
            failed = [r for g in groups for r in g.episodes if r.reward is None]
            if failed:
                break
    assert 0 < len(failed) < 16
    assert metrics["rollout/failed"] == len(failed)
    told = f"{len(failed)} of 16 rollouts failed: raised: RuntimeError: out of order"
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        told
    ]
    assert all("out of order" in r.error for r in failed)
    rewards = [r.reward for g in groups for r in g.episodes if r.reward is not None]
    assert metrics["reward/mean"] == pytest.approx(np.mean(rewards))
    assert metrics["reward/trained_mean"] == pytest.approx(np.mean(rewards))


@pytest.mark.parametrize(("share", "broken"), [(0.25, 30), (1.0, 40)])
def test_more_failures_than_the_share_stop_the_run(coin, share, broken):
    environment = coin.Coin(broken=broken)
    config = changed("rollout", max_failed_share=share)
    with WorkerPool(environment) as judges:
        trainer = make_trainer(environment, judges, config)
        start = host(trainer.updater.state)
        with pytest.raises(
            FailedRolloutsError,
            match=rf"step 1: \d+ of 16 rollouts failed; --rollout.max-failed-share "
            rf"allows a share of {share:g}, and never all of them. The first: "
            r"(?s:.*)out of order",
        ):
            trainer.step(1)
    assert_same(start, trainer.updater.state)


def test_a_loss_that_is_not_finite_changes_nothing(coin, judges):
    trainer = make_trainer(coin.Coin(), judges)
    trainer.updater.algorithm = trainer.updater.algorithm._replace(
        advantages=lambda rewards, valid: rewards * np.nan
    )
    before = host(trainer.updater.state)
    with pytest.raises(
        DivergenceError,
        match=r"step 1, epoch 1, minibatch 1: train/loss is nan; no optimizer step was "
        r"taken\. Lower .*; the update before it may be the cause$",
    ):
        trainer.step(1)
    assert_same(before, trainer.updater.state)


def test_every_update_of_a_batch_is_clipped_against_the_same_policy(coin, judges):
    config = changed("update", minibatches=2, epochs=2)
    trainer = make_trainer(coin.Coin(), judges, config)
    seen = trainer.updater.learner.seen
    start = jax.tree.map(np.array, trainer.updater.state.params)
    seen.clear()
    metrics, groups = trainer.step(1)
    assert int(trainer.updater.state.step) == 4
    assert [where for where, _ in seen] == [
        f"step 1, epoch {e}, minibatch {m}" for e in (1, 2) for m in (1, 2)
    ]
    for _, batch in seen:
        expected = trainer.updater.learner.scorer.predict(start, batch).logprobs
        np.testing.assert_allclose(batch.proximal_logprobs, expected, atol=1e-6)
    for (_, first), (_, second) in zip(seen[:2], seen[2:], strict=True):
        np.testing.assert_array_equal(first.tokens, second.tokens)
    sampled = sum(r.num_sampled for group in groups for r in group.episodes)
    assert sum(int(batch.loss_mask.sum()) for _, batch in seen[:2]) == sampled
    # Later updates are off the policy that the ratio is taken against.
    assert abs(metrics["policy/ratio"] - 1) > 1e-6


def test_one_update_needs_no_proximal_policy(coin, judges):
    trainer = make_trainer(coin.Coin(), judges)
    seen = trainer.updater.learner.seen
    trainer.step(1)
    _, batch = seen[-1]
    assert batch.proximal_logprobs is None
    assert batch.reference_logprobs is None


def test_the_reference_is_the_start_and_stays_there(coin, judges):
    config = changed("algorithm", kl_coefficient=0.1)
    trainer = make_trainer(coin.Coin(), judges, config)
    start = jax.tree.map(np.array, trainer.updater.state.params)
    divergences = []
    for number in range(1, 4):
        metrics, _ = trainer.step(number)
        divergences.append(metrics["policy/kl_to_reference"])
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert min(divergences[1:]) > 1e-6
    assert_same(trainer.updater.reference.params, start)
    assert any(
        np.any(one != other)
        for one, other in zip(
            host(trainer.updater.state.params), host(start), strict=True
        )
    )


def test_an_evaluation_leaves_no_trace(coin, judges):
    plain = make_trainer(coin.Coin(), judges)
    looked_at = make_trainer(coin.Coin(), judges)
    for number in range(1, 4):
        expected, _ = plain.step(number)
        evaluations = [looked_at.evaluate(), looked_at.evaluate()]
        found, _ = looked_at.step(number)
        for name, value in expected.items():
            if not name.startswith(UNSTEADY):
                assert found[name] == value, name
        # Its time is not counted as the step's rollouts.
        assert found["time/rollout"] + found["time/reward"] <= found["time/step"]
    assert_same(plain.updater.state, looked_at.updater.state)
    assert plain.meta() == looked_at.meta()
    one, other = evaluations
    assert one.scores == other.scores
    assert one.groups == other.groups
    assert len(one.groups) == 6
    assert all("eval" in group.episodes[0].prompt_text for group in one.groups)


def test_an_answer_that_was_cut_earns_what_the_option_says(coin, judges):
    rollouts, trained = {}, {}
    for mode in ("reward", "zero", "mask"):
        # Half of the answers have one of these, and end with it.
        ends = tuple("abcdefghijklmnopqrstuvwxyz0123456789=")
        config = changed("rollout", truncated=mode, stop_strings=ends)
        trainer = make_trainer(coin.Coin(), judges, config)
        metrics, groups = trainer.step(1)
        rollouts[mode] = [r for group in groups for r in group.episodes]
        batch = trainer.updater.learner.seen[-1][1]
        trained[mode] = int(batch.loss_mask.sum())
        rewards = [r.reward for r in rollouts[mode]]
        assert metrics["reward/mean"] == pytest.approx(np.mean(rewards))
        # An evaluation judges them as training does; here no greedy answer ends.
        trainer.experience.config = changed("rollout", truncated=mode)
        evaluated = trainer.evaluate().groups
        cut = [g.episodes[0].reward for g in evaluated if g.episodes[0].truncated]
        assert cut
        assert any(cut) == (mode != "zero")
    before = rollouts["reward"]
    assert 0 < sum(r.truncated for r in before) < len(before)
    assert sum(r.reward for r in before if r.truncated) > 0
    for one, other, masked in zip(
        before, rollouts["zero"], rollouts["mask"], strict=True
    ):
        assert one.tokens == other.tokens == masked.tokens
        assert other.reward == (0.0 if one.truncated else one.reward)
        assert masked.reward == one.reward
    every = sum(r.num_sampled for r in before)
    assert trained["reward"] == trained["zero"] == every
    cut = sum(r.num_sampled for r in before if r.truncated)
    assert trained["mask"] == every - cut


def test_a_step_of_which_everything_was_cut_says_so(coin, judges):
    config = changed("rollout", truncated="mask")
    trainer = make_trainer(coin.Coin(), judges, config)
    groups = trainer.experience.collector.run(
        trainer.weights.publish(),
        trainer.experience._draw(4),
        4,
        trainer.experience.sampling(),
    )
    cut = [
        dataclasses.replace(
            group,
            episodes=tuple(
                with_last_turn(e, finish_reason="length") for e in group.episodes
            ),
        )
        for group in groups
    ]
    trainer.buffer.put(cut)
    with pytest.raises(
        FailedRolloutsError, match=r"step 1: every answer was cut at --rollout.max-tok"
    ):
        trainer.step(1)


def ppo(**critic) -> RLConfig:
    config = changed("algorithm", name="ppo", kl_coefficient=0.1)
    return dataclasses.replace(
        config, critic=dataclasses.replace(config.critic, **critic)
    )


def test_a_critic_is_asked_before_each_token_and_trained_on_the_same_batch(
    coin, judges
):
    trainer = make_trainer(coin.Coin(), judges, ppo())
    seen = trainer.updater.learner.seen
    seen.clear()
    start = jax.tree.map(jax.numpy.copy, trainer.updater.critic.state.params)
    start = start.replace(value_head=start.value_head + 0.5)
    trainer.updater.critic.state = trainer.updater.critic.state.replace(
        params=jax.tree.map(jax.numpy.copy, start)
    )
    metrics, _ = trainer.step(1)
    ((_, batch),) = seen
    after = trainer.updater.critic.learner.scorer.predict(start, batch).values_after
    rows, columns = np.nonzero(batch.loss_mask)
    assert np.ptp(batch.values_before[rows, columns]) > 0
    np.testing.assert_allclose(
        batch.values_before[rows, columns],
        after[rows, np.asarray(batch.previous)[rows, columns]],
        rtol=1e-5,
        atol=1e-6,
    )
    # lambda is 1 for the critic: its targets are the returns, penalties included.
    assert np.isfinite(batch.returns).all()
    assert (
        int(trainer.updater.critic.state.step) == int(trainer.updater.state.step) == 1
    )
    assert metrics["critic/grad_norm"] > 0
    assert metrics["critic/explained_variance"] <= 1
    assert metrics["advantage/token_std"] == pytest.approx(1, abs=0.02)
    # An episode has a reward, and no advantage.
    assert not {"advantage/mean", "advantage/std"} & metrics.keys()


def test_a_critic_can_learn_alone_at_first(coin, judges):
    trainer = make_trainer(coin.Coin(), judges, ppo(warmup_steps=2))
    start = jax.tree.map(np.array, trainer.updater.state.params)
    for number in (1, 2):
        metrics, _ = trainer.step(number)
        assert "train/loss" not in metrics
    assert_same(trainer.updater.state.params, start)
    assert int(trainer.updater.critic.state.step) == 2
    metrics, _ = trainer.step(3)
    assert int(trainer.updater.state.step) == 1
    assert "train/loss" in metrics


def test_a_snapshot_holds_the_critic_too(coin, judges):
    trainer = make_trainer(coin.Coin(), judges, ppo())
    trainer.step(1)
    snapshot = jax.tree.map(np.array, trainer.snapshot())
    other = make_trainer(coin.Coin(), judges, ppo())
    other.restore(snapshot, trainer.meta())
    assert_same(other.updater.critic.state, trainer.updater.critic.state)
    assert_same(other.updater.state, trainer.updater.state)
    assert other.updater.state.critic is None
    structures = [jax.tree.structure(t.snapshot()) for t in (trainer, other)]
    assert structures[0] == jax.tree.structure(trainer.layout) == structures[1]


def test_a_teacher_grades_every_token(coin, judges):
    config = changed("algorithm", name="distillation", reference="itself")
    trainer = make_trainer(coin.Coin(), judges, config)
    seen = trainer.updater.learner.seen
    seen.clear()
    worse = jax.tree.map(lambda leaf: leaf * 0.5, trainer.updater.reference.params)
    trainer.updater.reference = dataclasses.replace(
        trainer.updater.reference, params=worse
    )
    trainer.step(1)
    ((_, batch),) = seen
    gap = batch.reference_logprobs - batch.behavior_logprobs
    mask = batch.loss_mask
    np.testing.assert_allclose(batch.advantages[mask], gap[mask], atol=1e-5)
    assert np.ptp(gap[mask]) > 0


def taught(**distill) -> RLConfig:
    config = changed("algorithm", name="distillation", reference="itself")
    return dataclasses.replace(config, distill=DistillConfig(**distill))


def with_another_teacher(trainer) -> None:
    predictor = trainer.updater.learner.predictor
    worse = jax.tree.map(lambda leaf: leaf * 0.5, predictor.params)
    predictor = dataclasses.replace(predictor, params=worse)
    trainer.updater.learner = dataclasses.replace(
        trainer.updater.learner, predictor=predictor
    )


def test_whole_distributions_of_samples_need_no_scoring(coin, judges):
    config = dataclasses.replace(
        taught(divergence="jsd"), update=dataclasses.replace(RL.update, minibatches=2)
    )
    trainer = make_trainer(coin.Coin(), judges, config)
    same, _ = trainer.step(1)
    assert same["train/loss"] == pytest.approx(0, abs=1e-6)
    with_another_teacher(trainer)
    metrics, groups = trainer.step(2)
    assert len(groups) == 4
    assert metrics["distill/divergence"] > 1e-4
    assert "rollout/staleness" in metrics
    assert not any(name.startswith("advantage/") for name in metrics)
    for where, batch in trainer.updater.learner.seen:
        assert batch.proximal_logprobs is None, where
        assert batch.reference_logprobs is None, where
    assert len(trainer.updater.learner.seen) == 2


def test_demonstrations_take_the_place_of_rollouts(coin, judges):
    environment = coin.Coin()
    config = taught(divergence="forward_kl", data="demonstrations")
    trainer = make_trainer(environment, judges, config)
    with_another_teacher(trainer)
    sampled = trainer.weights.engine.compilations.total()
    metrics, groups = trainer.step(1)
    assert groups == []
    assert trainer.weights.engine.compilations.total() == sampled
    assert not any(name.startswith(("rollout/", "reward/")) for name in metrics)
    ((_, batch),) = trainer.updater.learner.seen
    tokenizer = trainer.updater.model.tokenizer
    found = set()
    for row, places in sequences_in(batch):
        found.add(tokenizer.decode(batch.tokens[row][places].tolist()))
    tasks = environment.tasks("train")
    shown = {
        tasks[i].messages[0].content + environment.demonstration(tasks[i])
        for i in range(len(tasks))
    }
    # Four prompts of four samples each would have been drawn.
    assert len(list(sequences_in(batch))) == 16
    assert found <= shown
    after = trainer.updater.learner.evaluate(trainer.updater.state.params, batch)
    assert after["loss"] < metrics["train/loss"]
    assert len(trainer.evaluate().groups) == 6


def test_completions_near_the_limit_lose_reward_where_that_is_asked_for(coin, judges):
    seen = []
    for buffer in (0, 2):
        config = changed("rollout", overlong_buffer=buffer, overlong_penalty=4.0)
        trainer = make_trainer(coin.Coin(), judges, config)
        trainer.updater._estimate = lambda facts: (
            seen.append(facts.rewards) or facts.rewards
        )
        metrics, groups = trainer.step(1)
    plain, shaped = seen
    lengths = np.stack([group.lengths for group in groups])
    penalty = np.clip(lengths - 2, 0, 2) / 2 * 4.0
    np.testing.assert_allclose(shaped, plain - penalty, atol=1e-6)
    # The report has the judged answers.
    assert metrics["reward/trained_mean"] == pytest.approx(plain.mean())


def test_remax_compares_with_the_greedy_answer(coin, judges):
    config = dataclasses.replace(RL, algorithm=AlgorithmConfig(name="remax"))
    trainer = make_trainer(coin.Coin(), judges, config)
    metrics, groups = trainer.step(1)
    greedy = [group.greedy for group in groups]
    assert all(each.sample_index == 0 and each.reward is not None for each in greedy)
    assert metrics["reward/greedy"] == pytest.approx(
        np.mean([g.reward for g in greedy])
    )
    values = {}
    for group in groups:
        for rollout in group.episodes:
            assert None not in (rollout.reward, group.greedy.reward)
            values[tuple(rollout.tokens.ids.tolist())] = float(rollout.reward) - float(
                group.greedy.reward
            )
    batch = trainer.updater.learner.seen[-1][1]
    for row, places in sequences_in(batch):
        tokens = tuple(batch.tokens[row][places].tolist())
        trained = batch.loss_mask[row][places]
        found = batch.advantages[row][places][trained]
        assert set(found.tolist()) == {values[tokens]}
    # Greedy: the same prompt has the same answer, regardless of the noise.
    trainer.buffer.put(groups)
    saved = json.loads(json.dumps(trainer.buffer.to_json()))
    trainer.buffer.load(saved)
    assert trainer.buffer.take() == groups


def test_opo_weighs_the_mean_reward_by_length(coin, judges):
    config = dataclasses.replace(RL, algorithm=AlgorithmConfig(name="opo"))
    trainer = make_trainer(coin.Coin(), judges, config)
    _, groups = trainer.step(1)
    group = next(g for g in groups if g.has_spread)
    baseline = np.average(group.rewards, weights=group.lengths)
    values = trainer.updater._estimate(
        GroupFacts(
            group.rewards[None], group.valid[None], group.lengths[None], None, None
        )
    )
    np.testing.assert_allclose(values[0], group.rewards - baseline, atol=1e-6)


def test_gdpo_normalises_each_part_of_the_reward(coin):
    rubric = Rubric(coin.Coin(), {"brief": Criterion(coin.brevity, weight=3.0)})
    with WorkerPool(rubric) as judges:
        weighted = AlgorithmConfig(name="gdpo", reward_weights=("brief=0.5", "own=2"))
        config = dataclasses.replace(RL, algorithm=weighted)
        trainer = make_trainer(rubric, judges, config)
        metrics, groups = trainer.step(1)
        rollouts = [r for group in groups for r in group.episodes]
        assert metrics["reward/brief"] == pytest.approx(
            np.mean([r.rewards["brief"] for r in rollouts])
        )
        assert metrics["reward/own"] <= 1
        components = np.array(
            [
                [[r.rewards["brief"], r.rewards["own"]] for r in g.episodes]
                for g in groups
            ]
        )
        centred = components - components.mean(axis=1, keepdims=True)
        std = components.std(axis=1, ddof=1, keepdims=True)
        total = (centred / np.sqrt(std**2 + 1e-12) * [0.5, 2.0]).sum(axis=-1)
        expected = total / total.std(ddof=1)
        found = batching.advantages(
            groups, trainer.updater._estimate, None, ("brief", "own")
        )
        np.testing.assert_allclose(found, expected, atol=2e-3)
        unknown = dataclasses.replace(weighted, reward_weights=("style=1",))
        trainer.updater.config = dataclasses.replace(RL, algorithm=unknown)
        with pytest.raises(
            ConfigError, match=r"reports the rewards brief, own, not st"
        ):
            trainer.updater._parts(groups)
        plain = [
            dataclasses.replace(
                group,
                episodes=tuple(with_last_turn(e, rewards={}) for e in group.episodes),
            )
            for group in groups
        ]
        # Where an environment names parts, the reward of another one is a part too.
        config = dataclasses.replace(RL, algorithm=AlgorithmConfig(name="gdpo"))
        updater = make_trainer(rubric, judges, config).updater
        both = updater._parts([*groups, *plain])
        assert both == ("brief", "environment", "own")
        assert updater._parts(plain) == ("environment",)
        found = batching.advantages(plain, updater._estimate, None, both)
        spread = [group.has_spread for group in plain]
        assert (abs(found).max(axis=1) > 0.5).tolist() == spread
        assert [group.has_part_spread() for group in plain] == spread
        assert any(spread)
        updater = make_trainer(rubric, judges, config).updater
        with pytest.raises(ConfigError, match=r"reports the rewards of no parts"):
            updater._parts(plain)
