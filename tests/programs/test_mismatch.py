"""Bounds on the difference of sampler and trainer, which is 0 in exact mode."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.rl import MismatchConfig
from jaxrl_post.config.run import flattened
from jaxrl_post.envs import WorkerPool
from jaxrl_post.learner.learner import MismatchError
from jaxrl_post.watch.alarms import RunWatch
from jaxrl_post.watch.rule import default_rules
from tests.programs.trainers import RL, make_trainer
from tests.tiers import daily

TWICE = dataclasses.replace(RL.update, minibatches=2)
CUT = dataclasses.replace(RL.rollout, top_k=20)
EXACT = dataclasses.replace(RL, exact=True, update=TWICE, rollout=CUT)


@pytest.fixture(scope="module")
def judges(coin) -> Iterator[WorkerPool]:
    with WorkerPool(coin.Coin()) as pool:
        yield pool


@pytest.fixture
def trainer(coin, judges):
    return make_trainer(coin.Coin(), judges, EXACT)


def test_exact_mode_needs_no_pass_for_old_log_probs(trainer):
    """The omitted pass would have computed the recorded log-probs, to the last bit."""
    updater, scorer = trainer.updater, trainer.updater.learner.scorer
    scored = []
    original = updater._scored

    def watched(batch, needs_proximal):
        assert needs_proximal
        whole = updater.model.whole(updater.state.params)
        computed = np.asarray(scorer.predict(whole, batch).logprobs)
        found = original(batch, needs_proximal)
        scored.append((computed, found, batch.loss_mask))
        return found

    updater._scored = watched
    for number in range(1, 4):
        metrics, _ = trainer.step(number)
        assert metrics["mismatch/unequal"] == 0
        assert metrics["mismatch/token_mult_prob_error"] == 1
        assert metrics["mismatch/kl"] == 0
    assert len(scored) == 6
    for computed, found, mask in scored:
        assert mask.sum() > 4
        np.testing.assert_array_equal(computed[mask], found.proximal_logprobs[mask])


@pytest.mark.parametrize("support", daily(["kept", "full"], {"kept"}))
def test_truncated_sampling_is_scored_as_it_sampled(coin, judges, support):
    algorithm = dataclasses.replace(
        RL.algorithm, support=support, kl_coefficient=1e-3, kl_estimator="k3"
    )
    config = dataclasses.replace(RL, update=TWICE, rollout=CUT, algorithm=algorithm)
    trainer = make_trainer(coin.Coin(), judges, config)
    updater, scored, sampled = trainer.updater, [], []
    score, minibatches = updater._scored, updater._minibatches

    def watched(sequences, number):
        sampled.extend(each.tokens for each in sequences)
        return minibatches(sequences, number)

    def watched_too(batch, needs_proximal):
        scored.append(score(batch, needs_proximal))
        return scored[-1]

    updater._minibatches, updater._scored = watched, watched_too
    metrics, _ = trainer.step(1)
    # The policy is on-policy in both: it is compared with what it was scored as.
    assert metrics["mismatch/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    assert metrics["mismatch/truncation_kl"] > 1
    assert metrics["rollout/kept_unrecorded"] == (support == "full")
    log_masses = np.concatenate([each.log_masses[each.sampled] for each in sampled])
    assert len(log_masses) > 16
    # The reference has the policy's parameters and all tokens.
    differs = np.concatenate(
        [(b.reference_logprobs - b.proximal_logprobs)[b.loss_mask] for b in scored]
    )
    expected = log_masses if support == "kept" else np.zeros_like(log_masses)
    np.testing.assert_allclose(np.sort(differs), np.sort(expected), atol=1e-5)


def test_older_tokens_are_scored_again(trainer):
    """Groups may wait for a step; its parameters did not compute their log-probs."""
    updater, given, scored = trainer.updater, [], []
    update, score = updater.update, updater._scored

    def watched(sequences, number):
        given.extend(sequences)
        return update(sequences, number)

    def watched_too(batch, needs_proximal):
        scored.append(score(batch, needs_proximal))
        return scored[-1]

    updater.update = watched
    trainer.step(1)
    updater._scored = watched_too
    metrics = update(given, 2).metrics
    # No token is of the current parameters, so there is nothing to compare.
    for name in ("unequal", "token_mult_prob_error", "kl"):
        assert f"mismatch/{name}" not in metrics
    assert metrics["mismatch/stale_kl"] > 0
    for batch in scored:
        np.testing.assert_array_equal(batch.stale, batch.loss_mask)
        moved = batch.proximal_logprobs != batch.behavior_logprobs
        assert moved[batch.loss_mask].mean() > 0.9


def test_exact_mode_stops_at_the_first_difference(trainer):
    updater = trainer.updater
    original = updater._minibatches

    def changed(*arguments):
        batches, metrics = original(*arguments)
        first = batches[0].behavior_logprobs
        place = tuple(np.argwhere(batches[0].loss_mask)[0])
        first[place] = np.nextafter(first[place], -np.inf, dtype=np.float32)
        return batches, metrics

    updater._minibatches = changed
    before = np.asarray(updater.state.params.embedding)
    with pytest.raises(MismatchError, match=r"step 1, .*--exact promises"):
        trainer.step(1)
    np.testing.assert_array_equal(before, updater.state.params.embedding)


def test_without_exact_mode_the_bounds_warn_and_stop(coin, judges):
    bounds = MismatchConfig(warn=1.05, stop=1.5)
    trainer = make_trainer(
        coin.Coin(), judges, dataclasses.replace(RL, mismatch=bounds)
    )
    shift, original = 0.0, trainer.updater._minibatches

    def changed(*arguments):
        batches, metrics = original(*arguments)
        moved = [
            batch.replace(behavior_logprobs=batch.behavior_logprobs - np.float32(shift))
            for batch in batches
        ]
        return moved, metrics

    trainer.updater._minibatches = changed
    trainer.step(1)
    shift = 0.2
    metrics, _ = trainer.step(2)
    assert metrics["mismatch/token_mult_prob_error"] == pytest.approx(np.exp(0.2), 1e-3)
    # The rule `mismatch` warns.
    options = flattened(dataclasses.asdict(trainer.config))
    rule = [rule for rule in default_rules() if rule.name == "mismatch"]
    [alarm] = RunWatch(rule, options).look(2, metrics)
    assert alarm.evidence == "mismatch/token_mult_prob_error 1.221, above 1.05"
    shift = 0.5
    with pytest.raises(MismatchError, match=r"step 3.*--mismatch.stop is 1\.5"):
        trainer.step(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mismatch": MismatchConfig(warn=3.0, stop=2.0)},
            "--mismatch.warn: must be at most --mismatch.stop, 2; got 3",
        ),
        (
            {
                "exact": True,
                "rollout": dataclasses.replace(RL.rollout, dtype="bfloat16"),
            },
            "--rollout.dtype: with --exact",
        ),
        (
            {
                "exact": True,
                "rollout": dataclasses.replace(RL.rollout, weights="int8"),
            },
            "--rollout.weights: with --exact",
        ),
        (
            {
                "exact": True,
                "update": dataclasses.replace(RL.update, precision="float8"),
            },
            "--update.precision: with --exact",
        ),
        (
            {
                "lora": AdapterConfig(rank=4, quantize="nf4"),
                "rollout": dataclasses.replace(RL.rollout, weights="int8"),
            },
            "--rollout.weights: the base of the adapter is quantised already, by "
            "--lora.quantize nf4; got int8",
        ),
    ],
)
def test_options_that_contradict_each_other(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_options(dataclasses.replace(RL, env="arithmetic", **changes))
