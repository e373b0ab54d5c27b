"""Advantages by player, by hand: two players of one policy, in one episode."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post.learner.credit import outcome_labels
from jaxrl_post.rollout import Episode, Group, Turn, batch
from jaxrl_post.tokens import Tokens
from tests.rollout.test_batch import centred, estimate


def play(index: int, *turns: tuple[str, float], begins: tuple[int, ...] = ()):
    """An episode of turns (player, reward) of two tokens each."""
    made = tuple(
        Turn(
            Tokens.context([9]),
            Tokens.generated([10 * k, 10 * k + 1], [0.0, 0.0], version=0),
            "",
            "",
            "stop",
            reward,
            player=player,
        )
        for k, (player, reward) in enumerate(turns, 1)
    )
    return Episode(1, index, 0, "", made, "stop", segments=begins)


def game(index: int, result: float) -> Episode:
    """Two turns of a, then one of b; what a wins, b loses."""
    turns = ("a", 0.0), ("a", result), ("b", -result)
    return play(index, *turns, begins=(2,))


def test_a_game_without_a_sum_has_spread():
    group = Group(1, (game(0, 1.0), game(1, -1.0)))
    assert group.rewards.tolist() == [0.0, 0.0]
    assert group.players == ("a", "b")
    assert group.has_spread
    assert not Group(1, (game(0, 1.0), game(1, 1.0))).has_spread
    # Turn by turn each player is compared with itself, too.
    one, other = (
        play(i, ("a", 0.0 + i), ("b", 1.0), ("a", 1.0 - i), ("b", 0.0)) for i in (0, 1)
    )
    assert not Group(1, (one, other)).has_spread
    assert Group(1, (one, other)).has_turn_spread(1.0)
    assert not Group(1, (one, one)).has_turn_spread(1.0)
    # One sample of b's is nothing to compare; nor is a failed one.
    alone = play(1, ("a", 1.0))
    assert not Group(1, (game(0, 1.0), alone)).has_spread
    failed = dataclasses.replace(game(1, -1.0), error="boom")
    assert not Group(1, (game(0, 1.0), failed)).has_spread


def test_a_player_is_compared_with_itself():
    """By hand, against the mean of the others: a wins 1, -1, -1, so 2, -1, -1."""
    group = Group(1, (game(0, 1.0), game(1, -1.0), game(2, -1.0)))
    values = batch.advantages([group], estimate)
    expected = [[2, 2, -2], [-1, -1, 1], [-1, -1, 1]]
    np.testing.assert_allclose(values, [expected], atol=1e-6)
    made = batch.sequences([group], values)
    assert [sequence.ids.tolist() for sequence in made[:2]] == [
        [9, 10, 11, 9, 20, 21],
        [9, 30, 31],
    ]
    np.testing.assert_allclose(made[0].advantages, [0, 2, 2, 0, 2, 2], atol=1e-6)
    np.testing.assert_allclose(made[1].advantages, [0, -2, -2], atol=1e-6)


def test_a_player_that_had_no_turn_is_left_out_of_the_comparison():
    """b has 1 and -3; of a there are also the 4 of the sample without b."""
    group = Group(
        1,
        (
            play(0, ("a", 0.0), ("b", 1.0)),
            play(1, ("a", 2.0), ("b", -3.0)),
            play(2, ("a", 4.0)),
        ),
    )
    values = batch.advantages([group], centred)
    np.testing.assert_allclose(values, [[[-2, 2], [0, -2], [2, 0]]], atol=1e-6)


def test_turns_are_counted_and_summed_for_each_player():
    """Returns of a, discounted by 1/2: [0.5, 1] and [1, 2]; of b: [-1], [3]."""
    group = Group(
        1,
        (
            play(0, ("a", 0.0), ("b", -1.0), ("a", 1.0)),
            play(1, ("b", 3.0), ("a", 0.0), ("a", 2.0)),
        ),
    )
    values = batch.turn_advantages([group], centred, discount=0.5)
    expected = [[-0.25, -2.0, -0.5], [2.0, 0.25, 0.5]]
    np.testing.assert_allclose(values, [expected], atol=1e-6)


def test_shaping_and_lengths_are_those_of_the_players_turns():
    seen = []
    group = Group(1, (game(0, 1.0), game(1, -1.0)))

    def longer_is_worse(lengths: np.ndarray) -> np.ndarray:
        return -0.1 * lengths.astype(np.float32)

    batch.advantages(
        [group], lambda facts: seen.append(facts) or facts.rewards, longer_is_worse
    )
    a, b = seen
    assert (a.lengths.tolist(), b.lengths.tolist()) == ([[4, 4]], [[2, 2]])
    np.testing.assert_allclose(a.rewards, [[0.8, -1.2]], atol=1e-6)
    np.testing.assert_allclose(b.rewards, [[-1.2, 0.8]], atol=1e-6)
    rewards, mask = batch.turn_rewards([group], longer_is_worse)
    np.testing.assert_allclose(rewards, [[[0, 0.8, -1.2], [0, -1.2, 0.8]]], atol=1e-6)
    assert mask.all()
    made = batch.sequences([group], rewards, rewards=rewards)
    # The last token of a turn, in the sequence of its player.
    np.testing.assert_allclose(made[0].rewards, [0, 0, 0, 0, 0, 0.8], atol=1e-6)
    np.testing.assert_allclose(made[1].rewards, [0, 0, -1.2], atol=1e-6)


def test_the_parts_of_a_players_rewards_have_a_spread_of_their_own():
    parts = [
        [{"own": 1.0}, {"own": -1.0}],
        [{"own": -1.0}, {"own": 1.0}],
    ]
    one, other = (
        dataclasses.replace(
            whole := play(index, ("a", 0.0), ("b", 0.0)),
            turns=tuple(
                dataclasses.replace(turn, rewards=each)
                for turn, each in zip(whole.turns, found, strict=True)
            ),
        )
        for index, found in enumerate(parts)
    )
    assert one.rewards == other.rewards == {"own": 0.0}
    assert Group(1, (one, other)).has_part_spread()
    assert not Group(1, (one, one)).has_part_spread()


@pytest.mark.parametrize("cut", [(0,), (1,), (2,), (0, 2)])
def test_each_sequence_of_an_agent_is_marked_by_its_own_last_turn(cut):
    """Turns 0 and 1 are the first sequence, turn 2 is the second."""
    whole = play(0, ("", 0.0), ("", 0.0), ("", 1.0), begins=(2,))
    turns = tuple(
        dataclasses.replace(turn, finish_reason="length" if number in cut else "stop")
        for number, turn in enumerate(whole.turns)
    )
    group = Group(1, (dataclasses.replace(whole, turns=turns),))
    made = batch.sequences([group], np.zeros((1, 1), np.float32), mark_truncated=True)
    assert [sequence.truncated for sequence in made] == [1 in cut, 2 in cut]


def test_each_player_has_an_outcome_and_a_group_of_its_own():
    # The player b loses where a wins, and is compared with b alone.
    group = Group(1, (game(0, 1.0), game(1, -1.0)))
    labels = outcome_labels([group], 1.0)
    np.testing.assert_array_equal(labels, [[[1, 1, 0], [0, 0, 1]]])
    made = batch.sequences([group], labels, outcomes=labels)
    found = [
        tuple(a[s.loss_mask].tolist()[0] for a in (s.labels, s.answers, s.groups))
        for s in made
    ]
    assert found == [(1.0, 1, 1), (0.0, 2, 2), (0.0, 3, 1), (1.0, 4, 2)]


def test_an_answer_that_was_cut_marks_its_players_sequence():
    whole = game(0, 1.0)
    cut = dataclasses.replace(whole.turns[1], finish_reason="length")
    episode = dataclasses.replace(whole, turns=(whole.turns[0], cut, whole.turns[2]))
    assert episode.truncated
    group = Group(1, (episode,))
    values = np.zeros((1, 1, 3), np.float32)
    made = batch.sequences([group], values, mark_truncated=True)
    assert [sequence.truncated for sequence in made] == [True, False]
    assert not batch.sequences([group], values, skip_truncated=True)


@pytest.mark.parametrize("player", ["", "first"])
def test_the_player_stays_in_a_checkpoint(player):
    episode = play(0, (player, 1.0))
    value = episode.turns[0].to_json()
    assert ("player" in value) is bool(player)
    assert Episode.from_json(episode.to_json()) == episode


def test_turns_without_a_name_are_of_another_player():
    group = Group(1, (play(0, ("", 1.0), ("a", 0.0)), play(1, ("", 0.0), ("a", 0.0))))
    assert group.players == ("", "a")
    values = batch.advantages([group], centred)
    np.testing.assert_allclose(values, [[[0.5, 0], [-0.5, 0]]], atol=1e-6)
