"""Groups: their rewards, and the way to a checkpoint and back."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_post.envs.env import Answer, Message, ToolCall
from jaxrl_post.programs.scores import score
from jaxrl_post.rollout import Admission, Buffer, Episode, Group, Turn
from jaxrl_post.rollout.metrics import rollout_metrics, sampling_metrics
from jaxrl_post.tokens import Tokens

CONTEXT = Tokens.context([1])


def answer(reward: float | None, **changes) -> Turn:
    tokens = Tokens.generated([2, 3], [-0.1, -1e-30], version=3, log_masses=[-0.25, 0])
    turn = Turn(CONTEXT, tokens, "1+1=", "2", "stop", reward, metrics={"correct": 1.0})
    return dataclasses.replace(turn, **changes)


def make_episode(reward: float | None, index: int = 0, **changes) -> Episode:
    return Episode(
        prompt_id=5,
        sample_index=index,
        task_id=2**32 - 1,
        prompt_text="1+1=",
        turns=(answer(reward, **changes),),
        finish_reason="stop" if reward is not None else "failed",
        error="" if reward is not None else "error: boom",
    )


def make_group(*rewards: float | None) -> Group:
    return Group(5, tuple(make_episode(r, i) for i, r in enumerate(rewards)))


@pytest.mark.parametrize(
    ("rewards", "greedy", "spread"),
    [
        ((1.0, 1.0), 0.0, True),
        ((1.0, 1.0), 1.0, False),
        ((1.0, None), 0.0, True),
        ((None, None), 0.0, False),
        ((1.0, 0.0), None, False),  # without a judgement nothing is compared
    ],
)
def test_with_a_greedy_answer_rewards_are_compared_to_its_reward(
    rewards, greedy, spread
):
    group = dataclasses.replace(make_group(*rewards), greedy=make_episode(greedy))
    assert group.has_spread == spread


@pytest.mark.parametrize(
    ("rewards", "spread"),
    [
        ((1.0, 0.0), True),
        ((1.0, 1.0), False),
        ((0.0, 0.0, 0.0), False),
        ((1.0, 1.0, None), False),  # the 0 of a failed rollout is no reward
        ((0.0, None, 1e-6), True),
        ((1.0, None), False),
        ((None, None), False),
    ],
)
def test_spread_is_that_of_the_rewards_that_are_there(rewards, spread):
    assert make_group(*rewards).has_spread is spread


@pytest.mark.parametrize(
    ("parts", "names", "spread"),
    [
        # Equal sums.
        (({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}), None, True),
        (({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}), ("b",), True),
        (({"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5}), None, False),
        # The part that differs does not count.
        (({"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 0.5}), ("b",), False),
        (({"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 0.5}), (), False),
        # A missing part is 0; a failed episode has none.
        (({"a": 1.0}, {}), None, True),
        (({"a": 0.0}, {}), None, False),
        (({"a": 1.0}, {"a": 1.0}, None), None, False),
        (({"a": 1.0}, None), None, False),
    ],
)
def test_spread_of_parts_is_that_of_any_part_that_counts(parts, names, spread):
    episodes = tuple(
        make_episode(None, index)
        if each is None
        else make_episode(sum(each.values()), index, rewards=each)
        for index, each in enumerate(parts)
    )
    assert Group(5, episodes).has_part_spread(names) is spread


def test_rewards_and_validity():
    group = make_group(1.5, None, -2.0)
    np.testing.assert_array_equal(group.rewards, np.float32([1.5, 0, -2]))
    assert group.rewards.dtype == np.float32
    np.testing.assert_array_equal(group.valid, [True, False, True])


def test_an_episode_is_the_sum_of_its_turns():
    first = answer(0.25, rewards={"a": 1.0}, metrics={"x": 1.0, "y": 1.0})
    last = answer(
        -1.0,
        context=Tokens.context([8, 9]),
        heard="and\nmore",
        rewards={"a": 0.5, "b": 2.0},
        text="end",
        finish_reason="length",
        metrics={"y": 2.0},
    )
    episode = dataclasses.replace(make_episode(0.0), turns=(first, last))
    assert episode.tokens.ids.tolist() == [1, 2, 3, 8, 9, 2, 3]
    assert episode.turn_ids.tolist() == [0, 1, 1, 0, 0, 2, 2]
    assert episode.num_sampled == 4
    assert episode.reward == -0.75
    assert episode.rewards == {"a": 1.5, "b": 2.0}
    assert episode.metrics == {"x": 1.0, "y": 2.0}
    assert (episode.response_text, episode.truncated) == ("end", True)
    assert episode.transcript == "2\n\n> and\n> more\n\nend"
    # An episode that failed has no reward, for all rewards of its turns.
    assert dataclasses.replace(episode, error="boom").reward is None


def test_the_buffer_comes_back_exactly_through_json():
    random = np.random.default_rng(0)
    logprobs = -random.exponential(size=2).astype(np.float32)
    tokens = Tokens.generated([2, 3], logprobs, version=3)
    odd = "a\ud800 \u2028 \x00 é"
    groups = [
        make_group(0.1, None, 1 / 3),
        Group(6, (make_episode(-0.0, sampled=tokens, text=odd),)),
        Group(7, (make_episode(1.0, metrics={}), make_episode(None, context=tokens))),
        Group(8, (make_episode(1.0, rewards={"a": 0.1}),), make_episode(0.3)),
        Group(2**31, (dataclasses.replace(make_episode(None), turns=()),)),
    ]
    buffer, restored = Buffer(Admission(5)), Buffer(Admission(5))
    buffer.put(groups)
    text = json.dumps(buffer.to_json())
    restored.load(json.loads(text))
    assert len(buffer) == 5, "looking is not taking"
    assert json.dumps(restored.to_json()) == text
    assert restored.take() == groups


def test_a_turn_comes_back_with_what_was_said_in_parts():
    call = ToolCall("look", '{"key": "1"}', "3")
    said = Answer("assistant", "a", "stop", 2, reasoning="b", tool_calls=(call,))
    heard = (Message("tool", "5", tool_call_id="3", name="look"), Message("user", "6"))
    turn = answer(1.0, messages=heard, said=said, branched_from=0)
    again = Turn.from_json(json.loads(json.dumps(turn.to_json())))
    assert again == turn
    assert isinstance(again.said, Answer)


def test_turns_of_earlier_versions_are_read_and_plain_ones_stay_as_small():
    value = answer(1.0).to_json()
    assert set(value) == {
        *("context", "sampled", "heard", "text", "finish_reason"),
        *("reward", "rewards", "metrics"),
    }
    turn = Turn.from_json(value)
    assert (turn.messages, turn.said, turn.branched_from) == ((), None, None)


def test_a_turn_continues_the_one_before_unless_it_begins_a_sequence():
    turns = [answer(0.0) for _ in range(5)]
    turns[3] = answer(0.0, branched_from=1)
    episode = dataclasses.replace(make_episode(0.0), turns=tuple(turns))
    assert episode.parents == [None, 0, 1, 2, 3]
    branched = dataclasses.replace(episode, segments=(2, 3))
    assert branched.parents == [None, 0, None, 1, 3]


def test_the_buffer_gives_the_oldest_first_and_what_it_has():
    groups = [Group(i, ()) for i in range(5)]
    buffer = Buffer(Admission(3))
    buffer.put(groups[:2])
    buffer.put(groups[2:])
    assert buffer.take() == groups[:3]
    assert buffer.take() == groups[3:]
    assert buffer.take() == []


@pytest.mark.parametrize(
    ("cut", "reason", "stopped"),
    [
        (False, "stop", True),
        (False, "stop_string", True),
        (True, "length", False),
        (True, "turn_limit", False),
        (False, "turn_limit", False),
        (False, "token_limit", False),
    ],
)
def test_an_episode_that_a_limit_ended_did_not_end_by_itself(cut, reason, stopped):
    turn = answer(1.0, finish_reason="length" if cut else "stop")
    episode = dataclasses.replace(
        make_episode(0.0), turns=(turn,), finish_reason=reason
    )
    assert episode.stopped is stopped
    # Evaluations and steps count the same.
    group = Group(0, (episode,))
    assert score([group]).stopped == stopped
    found = sampling_metrics([group], lambda group: True, {0: ""}, turns=False)
    assert found["rollout/truncated_fraction"] == 1 - stopped


def test_lengths_of_answers_and_of_those_that_ended():
    ends = (("stop", 3), ("length", 8), ("stop", 5))
    episodes = tuple(
        dataclasses.replace(
            make_episode(0.0),
            turns=(
                answer(
                    1.0,
                    sampled=Tokens.generated([2] * count, [-0.5] * count, version=0),
                    finish_reason=reason,
                ),
            ),
            finish_reason=reason,
        )
        for reason, count in ends
    )
    found = rollout_metrics([Group(0, episodes)], None, 0)
    prefix = "rollout/completion_length"
    assert [found[prefix + each] for each in ("", "_min", "_max", "_ended")] == [
        pytest.approx(16 / 3), 3, 8, 4,
    ]  # fmt: skip
    assert f"{prefix}_ended" not in rollout_metrics([Group(0, episodes[1:2])], None, 0)


def test_a_mean_over_some_episodes_has_their_number():
    episodes = tuple(
        dataclasses.replace(make_episode(1.0), turns=(answer(1.0, metrics=metrics),))
        for metrics in ({"a": 1.0, "b": 2.0}, {"a": 3.0}, {"a": 2.0, "b": 4.0})
    )
    found = sampling_metrics(
        [Group(0, episodes)], lambda group: True, {0: ""}, turns=False
    )
    assert {k: v for k, v in found.items() if k.startswith("env/")} == {
        "env/a": 2.0,
        "env/b": 3.0,
        "env/b/episodes": 2.0,
    }


def test_statistics_of_advantages_leave_out_what_does_not_exist():
    turn = answer(1.0)
    episodes = (
        dataclasses.replace(make_episode(0.0), turns=(turn,)),
        dataclasses.replace(make_episode(0.0, 1), turns=(turn, turn)),
        dataclasses.replace(make_episode(None, 2), turns=(turn, turn, turn)),
    )
    group = Group(0, episodes)
    by_turn = np.float32([[[4, 0, 0], [1, 1, 0], [9, 9, 9]]])
    found = rollout_metrics([group], by_turn, 0)
    assert found["advantage/mean"] == 2.0
    assert found["advantage/std"] == pytest.approx(np.std([4.0, 1.0, 1.0]))
    found = rollout_metrics([group], np.float32([[1, 2, 9]]), 0)
    assert (found["advantage/mean"], found["advantage/std"]) == (1.5, 0.5)
    # Rewards that an algorithm makes advantages of later are none.
    assert not any(
        k.startswith("advantage/") for k in rollout_metrics([group], None, 0)
    )
