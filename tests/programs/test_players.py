"""Two players and one policy: each one's tokens are trained by its own result."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.envs.tasks.nim import Nim
from jaxrl_post.records.report.trees import tree
from jaxrl_post.records.rows.conversations import conversation
from jaxrl_post.rollout.episode import Episode
from tests.programs import trainers
from tests.programs.agent_letters import Duel, Lenient
from tests.programs.test_agents import fed, published, served, step_as_served, training
from tests.tiers import daily

pytestmark = pytest.mark.processes

__all__ = ["served"]

CONFIG = trainers.changed("rollout", max_turns=6, prompts_per_step=2)
# Two moves of each player, and numbers of one digit: prompts have 16 tokens at most.
SIZES = {"least": 4, "most": 4, "instruction": "", "train_size": 4, "eval_size": 4}
GAME = Lenient(**SIZES)


def groups_of(trainer):
    return fed(trainer, published(trainer, 1), 1)


def test_every_row_of_a_game_trains_what_was_served(served):
    with training(GAME, CONFIG) as trainer:
        for number in (1, 2, 3):
            metrics, groups = step_as_served(trainer, served, number)
            assert metrics["env/agent_edited"] == 0
            assert metrics["env/agent_first"] == 2
            assert metrics["reward/mean"] == 0
            first = metrics["reward/player/first"]
            assert metrics["reward/player/second"] == -first
            for group in groups:
                for episode in group.episodes:
                    check_game(episode)


def check_game(episode):
    """The two sides of a game are two sequences, and one of them won."""
    turns = episode.turns
    [second] = episode.segments
    sides = [
        {turn.player for turn in each} for each in (turns[:second], turns[second:])
    ]
    assert sides in ([{"first"}, {"second"}], [{"second"}, {"first"}])
    last = episode.last_turns
    assert {last["first"].reward, last["second"].reward} == {1.0, -1.0}
    assert sum(abs(turn.reward) for turn in turns) == 2
    assert Episode.from_json(episode.to_json()) == episode
    rows = conversation(episode, trained=True)["turns"]
    assert [row["player"] for row in rows] == [turn.player for turn in turns]
    assert [row["parent"] for row in rows][second] is None
    labels = [chain["label"] for chain in tree({"turns": rows})["chains"]]
    assert labels == [f"player {turns[at].player}" for at in (0, second)]


@pytest.mark.parametrize("credit", daily(["outcome", "turns"], {"turns"}))
def test_the_tokens_of_a_player_have_the_sign_of_its_result(credit):
    algorithm = AlgorithmConfig(turn_credit=credit)
    with training(GAME, CONFIG) as trainer:
        groups, _ = groups_of(trainer)
        trainer.updater.config = dataclasses.replace(CONFIG, algorithm=algorithm)
        made, *_ = trainer.updater.sequences(groups)
    episodes = [episode for group in groups for episode in group.episodes]
    assert len(made) == 2 * len(episodes)
    differ = 0
    for group in groups:
        results = [each.last_turns["first"].reward for each in group.episodes]
        assert group.has_spread is (len(set(results)) == 2)
        for episode, result in zip(group.episodes, results, strict=True):
            assert result is not None
            for turn in (0, *episode.segments):
                sequence = made.pop(0)
                own = sequence.advantages[sequence.loss_mask]
                assert np.all(sequence.advantages[~sequence.loss_mask] == 0)
                sign = result if episode.turns[turn].player == "first" else -result
                if group.has_spread:
                    differ += 1
                    # Later turns have fewer games to be compared with.
                    size = len(episode.turns[turn].sampled)
                    assert np.all(np.sign(own[:size]) == sign)
    assert differ


def test_players_who_hear_the_same_share_no_sequence(served):
    with training(Duel(), CONFIG) as trainer:
        groups, metrics = groups_of(trainer)
    assert metrics["env/agent_bridged"] == 2
    assert metrics["env/agent_again"] == 0
    whole = {(*prompt, *ids) for prompt, ids in served}
    for group in groups:
        for episode in group.episodes:
            players = [turn.player for turn in episode.turns]
            assert players == ["left", "left", "right", "right"]
            assert episode.segments == (2,)
            for span in episode.spans:
                assert tuple(episode.tokens[span].ids.tolist()) in whole
            assert [turn.heard for turn in episode.turns[::2]] == ["0=", "0="]


def test_posted_rewards_are_those_of_the_players_last_turns():
    with training(Duel(posted=True), CONFIG) as trainer:
        groups, metrics = groups_of(trainer)
    for group in groups:
        for episode in group.episodes:
            assert [turn.reward for turn in episode.turns] == [1.0, 2.0, 1.0, 2.0]
    assert metrics["reward/mean"] == 6
    assert metrics["reward/player/left"] == 3


@pytest.mark.parametrize(
    ("duel", "error"),
    [
        (Duel(rewarded=(("middle", 1.0),)), "'middle' is rewarded, but had no turn"),
        (Duel(rewarded=(("left", 1.0),), whole=1.0), "Use Step.players, or POST"),
    ],
)
def test_a_reward_that_no_player_can_have_fails_the_episode(duel, error):
    config = trainers.changed("rollout", max_turns=6, max_failed_share=1.0)
    with training(duel, config) as trainer:
        tasks = [(0, duel.tasks("train")[0])]
        sampling = trainer.experience.sampling()
        collector, sampler = trainer.experience.collector, published(trainer, 0)
        [group] = collector.run(sampler, tasks, 2, sampling)
    for episode in group.episodes:
        assert episode.reward is None
        assert error in episode.error
        assert len(episode.turns) == 4


def test_the_game_is_evaluated_against_its_opponent():
    with training(Nim(**SIZES), CONFIG) as trainer:
        found = trainer.experience.evaluate(published(trainer, 0))
        [group] = trainer.experience.collector.run(
            published(trainer, 0),
            [(0, trainer.experience.environment.tasks("train")[0])],
            1,
            trainer.experience.sampling(),
        )
    episodes = [episode for each in found.groups for episode in each.episodes]
    assert {turn.player for episode in episodes for turn in episode.turns} == {""}
    assert {episode.reward for episode in episodes} <= {0.0, 1.0}
    # A model that knows no digits loses with its first answer, and no player wins.
    [turn] = group.episodes[0].turns
    assert (turn.player, turn.reward) == ("first", -1.0)
    assert group.episodes[0].metrics["illegal"] == 1
