"""An agent's served turns as an episode that is trained on."""

import numpy as np
import pytest

from jaxrl_post.envs.env import Message, Step, Task
from jaxrl_post.envs.workers.interface import Judgement
from jaxrl_post.rollout import batch
from jaxrl_post.rollout.episode import Group
from jaxrl_post.sampler import SamplingParams
from jaxrl_post.serve.agents import _episode
from jaxrl_post.serve.recorded import sampled_as
from jaxrl_post.serve.recordings import Recording
from jaxrl_post.tokens import Tokens

RUN = SamplingParams(max_tokens=8, stop_ids=(2,))
TASK = Task(0, (Message("user", "q"),), "")


def served(index: int, sampled: list[int], step: Step, reward: float = 0.0):
    """An episode of one answer, which ended at a limit; the agent posts a reward."""
    recording = Recording(f"e{index}", sampling=RUN, most_turns=4)
    begun = recording.begin_tokens((5, 6))
    tokens = Tokens.generated(
        np.asarray(sampled, np.int32),
        np.full(len(sampled), -0.5, np.float32),
        version=0,
    )
    recording.add(begun, tokens, None, "length")
    if reward:
        recording.credit(reward)
    outcome = Judgement(step, None, "ok", 0.0)
    return _episode((0, index), TASK, recording, outcome, lambda ids: str(list(ids)))


@pytest.mark.parametrize(("asked", "limit"), [(1, 1), (7, 7), (8, 8), (100, 8)])
def test_an_answer_as_long_as_the_agent_wanted_it_was_not_cut_off(asked, limit):
    recording = Recording("one", sampling=RUN)
    assert sampled_as(SamplingParams(max_tokens=asked), recording).max_tokens == limit
    episodes = [
        served(index, [7 + index] * limit, Step(reward, done=True))
        for index, reward in enumerate((1.0, 0.0))
    ]
    cut = limit == RUN.max_tokens
    assert [episode.truncated for episode in episodes] == [cut, cut]
    assert [e.finish_reason for e in episodes] == ["length" if cut else "stop"] * 2
    group = Group(0, tuple(episodes))
    [found] = batch.worthless_if_truncated([group])
    assert found.rewards.tolist() == ([0, 0] if cut else [1, 0])
    trained = batch.sequences(
        [group], np.zeros((1, 2), np.float32), skip_truncated=True
    )
    assert len(trained) == (0 if cut else 2)


def test_what_was_posted_is_a_part_of_the_reward():
    parts = {"a": 1.0}
    both = served(0, [7], Step(1.0, done=True, rewards=parts), reward=5.0)
    assert (both.reward, both.parts) == (6.0, {"a": 1.0, "posted": 5.0})
    without = served(0, [7], Step(1.0, done=True, rewards=parts))
    assert (without.reward, without.parts) == (1.0, {"a": 1.0})
    plain = served(0, [7], Step(1.0, done=True), reward=5.0)
    assert (plain.rewards, plain.parts) == ({}, {"environment": 6.0})
