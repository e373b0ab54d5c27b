"""Groups: their rewards, and the way to a checkpoint and back."""

import dataclasses
import json

import numpy as np
import pytest

from jaxrl_post.rollout import Group, Rollout
from jaxrl_post.rollout.buffer import GroupBuffer


def make_rollout(reward: float | None, index: int = 0, **changes) -> Rollout:
    rollout = Rollout(
        prompt_id=5,
        sample_index=index,
        task_id=2**32 - 1,
        tokens=(1, 2, 3),
        loss_mask=(False, True, True),
        logprobs=(0.0, -0.1, -1e-30),
        log_masses=(0.0, -0.25, 0.0),
        versions=(-1, 3, 3),
        reward=reward,
        error="" if reward is not None else "error: boom",
        finish_reason="stop",
        prompt_text="1+1=",
        response_text="2",
        metrics={"correct": 1.0},
    )
    return dataclasses.replace(rollout, **changes)


def make_group(*rewards: float | None) -> Group:
    return Group(5, tuple(make_rollout(r, i) for i, r in enumerate(rewards)))


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


def test_rewards_and_validity():
    group = make_group(1.5, None, -2.0)
    np.testing.assert_array_equal(group.rewards, np.float32([1.5, 0, -2]))
    assert group.rewards.dtype == np.float32
    np.testing.assert_array_equal(group.valid, [True, False, True])


def test_the_buffer_comes_back_exactly_through_json():
    random = np.random.default_rng(0)
    logprobs = (0.0, *(-random.exponential(size=2).astype(np.float32)).tolist())
    odd = "a\ud800 \u2028 \x00 é"
    groups = [
        make_group(0.1, None, 1 / 3),
        Group(2**31, (make_rollout(-0.0, logprobs=logprobs, response_text=odd),)),
        Group(7, (make_rollout(1.0, metrics={}), make_rollout(None, loss_mask=()))),
        Group(8, (make_rollout(1.0, rewards={"a": 0.1}),), make_rollout(0.3)),
    ]
    buffer = GroupBuffer(groups)
    text = json.dumps(buffer.to_json())
    restored = GroupBuffer.from_json(json.loads(text))
    assert len(buffer) == 4, "looking is not taking"
    assert restored.take(9) == groups
    assert json.dumps(GroupBuffer(groups).to_json()) == text


def test_the_buffer_gives_the_oldest_first_and_what_it_has():
    groups = [Group(i, ()) for i in range(5)]
    buffer = GroupBuffer(groups[:2])
    buffer.extend(groups[2:])
    assert buffer.take(3) == groups[:3]
    assert buffer.take(3) == groups[3:]
    assert buffer.take(3) == []
