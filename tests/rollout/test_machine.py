"""Episodes: what a transition adds to the tokens, and when an episode ends."""

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.envs import Answer, Message, Step, Task
from jaxrl_post.rollout import machine
from jaxrl_post.rollout.machine import Limits
from jaxrl_post.sampler.requests import Completion

TASK = Task(3, (Message("system", "be brief"), Message("user", "hi")), "")
LONG = Limits(max_turns=9, max_prompt_tokens=1000)


def generated(*tokens: int, version: int = 4, reason="stop") -> machine.Generated:
    size = len(tokens)
    logprobs = tuple(-token / 10 for token in tokens)
    completion = Completion(
        11, 2, tokens, logprobs, (-0.5,) * size, (version,) * size, reason
    )
    return machine.Generated(completion, f"said {tokens[0]}")


def judged(reward: float, *reply: int, done: bool = False, **metrics) -> machine.Judged:
    messages = (Message("user", "more"),) if reply else ()
    return machine.Judged(Step(reward, done, messages, metrics), reply)


def play(*events: machine.Event, limits: Limits = LONG):
    episode, effect = machine.begin(11, 2, TASK, (1, 2, 3))
    effects = [effect]
    for event in events:
        episode, effect = machine.transition(episode, event, limits)
        effects.append(effect)
    return episode, effects


def test_two_turns_token_by_token():
    _, effects = play(
        generated(4, 5),
        judged(0.25, 8, 9, first=1.0, both=1.0),
        generated(6, version=5, reason="length"),
        judged(0.5, done=True, both=2.0),
    )
    generate, judge, again, judge_again, finish = effects
    assert generate == machine.Generate((1, 2, 3))
    said = Answer("assistant", "said 4", "stop", 2)
    assert judge == machine.Judge((*TASK.messages, said))
    assert again == machine.Generate((1, 2, 3, 4, 5, 8, 9))
    more = (Message("user", "more"), Answer("assistant", "said 6", "length", 1))
    assert judge_again == machine.Judge((*TASK.messages, said, *more))
    rollout = finish.rollout
    assert rollout.tokens == (1, 2, 3, 4, 5, 8, 9, 6)
    assert rollout.loss_mask == (False,) * 3 + (True, True, False, False, True)
    assert rollout.logprobs == (0, 0, 0, -0.4, -0.5, 0, 0, -0.6)
    assert rollout.log_masses == (0, 0, 0, -0.5, -0.5, 0, 0, -0.5)
    assert rollout.versions == (-1, -1, -1, 4, 4, -1, -1, 5)
    assert (rollout.reward, rollout.error) == (0.75, "")
    assert rollout.metrics == {"first": 1.0, "both": 2.0}
    assert rollout.num_sampled == 3
    assert (rollout.prompt_id, rollout.sample_index, rollout.task_id) == (11, 2, 3)
    assert rollout.prompt_text == "be brief\nhi"
    assert (rollout.response_text, rollout.finish_reason) == ("said 6", "length")


@pytest.mark.parametrize(
    ("reason", "stop_id"), [("stop", 5), ("length", None), ("stop_string", None)]
)
def test_the_stop_token_of_a_turn_is_one_that_was_sampled_as_such(reason, stop_id):
    first, _ = play(generated(4, 6))
    assert first.stop_id == 6
    last, _ = play(generated(4, 6), judged(0.0, 8), generated(4, 5, reason=reason))
    assert last.stop_id == stop_id


def test_a_single_turn_is_the_case_of_one_judgement():
    _, effects = play(generated(4), judged(1.0, done=True))
    assert [type(effect).__name__ for effect in effects] == [
        "Generate",
        "Judge",
        "Finish",
    ]
    assert effects[-1].rollout.tokens == (1, 2, 3, 4)


def test_the_last_turn_of_the_limit_ends_with_the_reward_so_far():
    limits = Limits(max_turns=2, max_prompt_tokens=1000)
    _, effects = play(
        generated(4), judged(1.0, 8), generated(5), judged(2.0, 9), limits=limits
    )
    assert effects[-1].rollout.reward == 3.0
    # The reply to a turn that does not come is not part of the episode.
    assert effects[-1].rollout.tokens == (1, 2, 3, 4, 8, 5)


@pytest.mark.parametrize(("longest", "goes_on"), [(6, True), (5, False)])
def test_a_prompt_may_be_as_long_as_the_limit_and_no_longer(longest, goes_on):
    limits = Limits(max_turns=9, max_prompt_tokens=longest)
    _, effects = play(generated(4, 5), judged(1.0, 8), limits=limits)
    if goes_on:
        assert effects[-1] == machine.Generate((1, 2, 3, 4, 5, 8))
    else:
        assert effects[-1].rollout.reward == 1.0
        assert effects[-1].rollout.tokens == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "before",
    [(), (generated(4),), (generated(4), judged(5.0, 8), generated(6))],
    ids=["at once", "first turn", "second turn"],
)
def test_a_failure_ends_the_episode_without_a_reward(before):
    _, effects = play(*before, machine.Failed("timeout: 10 s"))
    rollout = effects[-1].rollout
    assert rollout.reward is None
    assert rollout.error == "timeout: 10 s"


events = st.lists(
    st.tuples(
        st.lists(st.integers(1, 99), min_size=1, max_size=5),
        st.lists(st.integers(100, 199), max_size=4),
        st.floats(-10, 10),
    ),
    min_size=1,
    max_size=6,
)


@given(events, st.integers(1, 6), st.integers(3, 40))
def test_laws_of_any_episode(turns, max_turns, max_prompt_tokens):
    limits = Limits(max_turns, max_prompt_tokens)
    episode, effect = machine.begin(11, 2, TASK, (1, 2, 3))
    rewards, sampled = [], []
    for tokens, reply, reward in turns:
        assert effect == machine.Generate(episode.tokens)
        assert len(episode.tokens) <= max_prompt_tokens
        for event in (generated(*tokens), judged(reward, *reply)):
            before, kept = episode, copy.deepcopy(episode)
            episode, effect = machine.transition(before, event, limits)
            # Pure: the state before is as it was, and leads to the same state again.
            assert before == kept
            assert machine.transition(before, event, limits) == (episode, effect)
            # What the sampler saw stays as it was, whatever follows.
            assert episode.tokens[: len(before.tokens)] == before.tokens
        sampled += tokens
        rewards.append(reward)
        if isinstance(effect, machine.Finish):
            break
    else:
        episode, effect = machine.transition(episode, machine.Failed("over"), limits)
    rollout = effect.rollout
    aligned = (
        rollout.loss_mask,
        rollout.logprobs,
        rollout.log_masses,
        rollout.versions,
    )
    assert all(len(values) == len(rollout.tokens) for values in aligned)
    marked = zip(rollout.tokens, rollout.loss_mask, strict=True)
    assert [token for token, mask in marked if mask] == sampled
    # The environment's tokens are those from 100 on: never trained on.
    assert all(
        mask == (index >= 3 and token < 100) and (version == -1) == (not mask)
        for index, (token, mask, version) in enumerate(
            zip(rollout.tokens, rollout.loss_mask, rollout.versions, strict=True)
        )
    )
    assert len(rewards) <= max_turns
    if rollout.reward is not None:
        assert math.isclose(rollout.reward, sum(rewards), abs_tol=1e-9)


def test_an_ended_turn_that_nobody_answers_is_an_error():
    """Sampled on, it would be two turns of the policy with nothing between them."""
    _, effects = play(generated(4, 5), judged(0.25))
    rollout = effects[-1].rollout
    assert rollout.reward is None
    assert "is not done, and said nothing" in rollout.error
    # A turn that was cut may go on; the last one needs no answer.
    _, effects = play(generated(4, 5, reason="length"), judged(0.25))
    assert effects[-1] == machine.Generate((1, 2, 3, 4, 5))
    _, effects = play(generated(4, 5), judged(0.25), limits=Limits())
    assert effects[-1].rollout.reward == 0.25
