"""A mixture in a run: the rewards of each environment, apart from the others'."""

import json
import re
from collections import defaultdict

import jax
import numpy as np
import pytest

from jaxrl_post.data.tools import expresses_tools
from jaxrl_post.envs import WorkerPool
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.envs.tasks.lookup import lookup
from jaxrl_post.envs.tasks.mixture import Part, mixture
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.programs.build.agents import check_agents
from jaxrl_post.programs.build.collector import open_collector
from jaxrl_post.programs.rl import _evaluated
from tests.programs.agent_letters import Duel, Letters
from tests.programs.trainers import changed, make_trainer

pytestmark = pytest.mark.processes


def by_part(joined, groups, split="train"):
    """The rewards of all episodes, by the name of their environment."""
    tasks, found = joined.tasks(split), defaultdict(list)
    for episode in (each for group in groups for each in group.episodes):
        found[tasks[episode.task_id].part].append(episode.reward)
    return found


def rewards_of(metrics, prefix):
    """The metrics PREFIX/NAME/reward by NAME."""
    found = {re.fullmatch(f"{prefix}/(.+)/reward", name): name for name in metrics}
    return {match[1]: metrics[name] for match, name in found.items() if match}


SUMS = Arithmetic.at_level(1)
# Tasks of an epoch: first the step's, two of each environment.
SIZE = 4


def coins(coin):
    parts = [Part(coin.Coin(), 1, "coin"), Part(coin.Coin(hopeless=True), 1, "no")]
    return mixture(parts, SIZE)


def test_a_preset_can_call_the_tools_of_any_environment():
    joined = mixture([Part(SUMS, 3, "sums"), Part(lookup(), 1, "keys")])
    assert not joined.tasks("train")[0].tools
    assert expresses_tools(environment_tokenizer(joined, 320))
    assert not expresses_tools(environment_tokenizer(SUMS, 320))


def test_rewards_of_each_environment(coin):
    joined = coins(coin)
    with WorkerPool(joined) as judges:
        trainer = make_trainer(joined, judges)
        metrics, groups = trainer.step(1)
        evaluation = trainer.evaluate()
    found = by_part(joined, groups)
    assert set(found) == {"coin", "no"}
    assert 0 < np.mean(found["coin"]) < 1
    expected = {name: np.mean(rewards) for name, rewards in found.items()}
    assert rewards_of(metrics, "env") == pytest.approx(expected)
    held_out = by_part(joined, evaluation.groups, "eval")
    assert [len(held_out[name]) for name in ("coin", "no")] == [3, 3]
    measured = _evaluated(evaluation)
    expected = {name: np.mean(rewards) for name, rewards in held_out.items()}
    assert rewards_of(measured, "eval") == pytest.approx(expected)
    # Coins pay 1 or nothing.
    for name, mean in expected.items():
        assert measured[f"eval/{name}/accuracy"] == pytest.approx(mean)
    assert measured["eval/no/accuracy"] == 0.0 < measured["eval/coin/accuracy"]


def test_a_resumed_run_still_knows_whose_tasks_were_under_way(coin):
    joined, config = coins(coin), changed("rollout", partial=8, reward_grace_s=30.0)
    with WorkerPool(joined) as judges:
        trainer = make_trainer(joined, judges, config)
        trainer.step(1)
        meta = json.loads(json.dumps(trainer.meta()))
        # Copies, because a step donates its parameters.
        snapshot = jax.tree.map(lambda leaf: leaf.copy(), trainer.snapshot())
        place = trainer.experience.indices.get_state()
        metrics, _ = trainer.step(2)
        resumed = make_trainer(joined, judges, config)
        resumed.restore(snapshot, meta)
        resumed.experience.indices.set_state(place)
        again, _ = resumed.step(2)
    assert rewards_of(metrics, "env")
    assert rewards_of(again, "env") == rewards_of(metrics, "env")


def test_agents_of_two_environments_in_one_run():
    """Rewards that agents post, and players' rewards, count for their environment."""
    agents = {"letters": Letters(credited=True), "duel": Duel(posted=True)}
    joined = mixture([Part(each, 1, name) for name, each in agents.items()], SIZE)
    config = changed("rollout", max_turns=4)
    check_agents(joined, config)
    with WorkerPool(joined, 2, deadline_s=60.0) as judges:
        trainer = make_trainer(joined, judges, config)
        with open_collector(
            config, trainer.updater.model, joined, judges, trainer.weights.unbound
        ) as collector:
            trainer.experience.collector = collector
            metrics, groups = trainer.step(1)
            measured = _evaluated(trainer.evaluate())
    found = by_part(joined, groups)
    assert set(found) == {"letters", "duel"}
    # Each player of a duel posts 1 and then 2.
    assert metrics["env/duel/reward"] == measured["eval/duel/reward"] == 6.0
    assert metrics["env/letters/reward"] == pytest.approx(np.mean(found["letters"]))
    assert measured["eval/duel/accuracy"] == 1.0
