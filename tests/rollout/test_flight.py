"""Episodes: what a transition adds to the tokens, and when an episode ends."""

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.envs import Answer, Message, Step, Task, ToolCall
from jaxrl_post.rollout import flight as flights
from jaxrl_post.rollout.flight import ChangedTaskError, EpisodeLimits, Flight
from jaxrl_post.tokens import Tokens
from tests.rollout.scripts import sampled

TASK = Task(3, (Message("system", "be brief"), Message("user", "hi")), "")
LONG = EpisodeLimits(max_turns=9, max_prompt_tokens=1000)


def generated(*tokens: int, version: int = 4, reason="stop") -> flights.Generated:
    made = sampled(tokens, version=version)
    return flights.Generated(made, f"said {tokens[0]}", reason)


def judged(
    reward: float, *reply: int, done: bool = False, **metrics
) -> flights.Answered:
    messages = (Message("user", "more"),) if reply else ()
    return flights.Answered(Step(reward, done, messages, metrics), reply)


def play(*events: flights.Event, limits: EpisodeLimits = LONG):
    flight = flights.begin(11, 2, TASK, (1, 2, 3))
    effects = [flights.effect_of(flight)]
    for event in events:
        flight, effect = flights.transition(flight, event, limits)
        effects.append(effect)
    return flight, effects


def test_every_token_of_two_turns_keeps_the_experts_that_read_it():
    """The sampler tells of the whole prompt, and again of one that it continues."""

    def told(ids: tuple[int, ...], before: int, mark: int) -> Tokens:
        # Place p of the sequence has the experts [p, mark].
        rows = [[[place, mark]] for place in range(before + len(ids))]
        rows = np.array(rows, np.int16)
        rows[0] = -1
        made = Tokens.generated(ids, [-1.0] * len(ids), version=4,
                                experts=rows[before:])  # fmt: skip
        return made.led_by(rows[:before])

    flight, _ = play(
        flights.Interrupted(told((4,), 3, 0)),
        flights.Generated(told((5,), 4, 1), "said", "stop"),
        judged(0.25, 8, 9),
    )
    flight = Flight.from_json(json.loads(json.dumps(flight.to_json())), TASK)
    last = flights.Generated(told((6, 7), 7, 2), "said", "length")
    flight, _ = flights.transition(flight, last, LONG)
    tokens = flight.episode.tokens
    assert tokens.ids.tolist() == [1, 2, 3, 4, 5, 8, 9, 6, 7]
    assert tokens.experts[1:, 0, 0].tolist() == list(range(1, 9))
    assert tokens.experts[0].tolist() == [[-1, -1]]
    assert tokens.experts[1:, 0, 1].tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    # The experts of a context are stored once.
    assert all(not len(turn.sampled.lead) for turn in flight.episode.turns)


def test_two_turns_token_by_token():
    _, effects = play(
        generated(4, 5),
        judged(0.25, 8, 9, first=1.0, both=1.0),
        generated(6, version=5, reason="length"),
        judged(0.5, done=True, both=2.0),
    )
    generate, judge, again, judge_again, finish = effects
    assert generate == flights.Generate((1, 2, 3))
    said = Answer("assistant", "said 4", "stop", 2)
    assert judge == flights.Ask((*TASK.messages, said))
    assert again == flights.Generate((1, 2, 3, 4, 5, 8, 9))
    more = (Message("user", "more"), Answer("assistant", "said 6", "length", 1))
    assert judge_again == flights.Ask((*TASK.messages, said, *more))
    episode = finish.episode
    tokens = episode.tokens
    assert tokens.ids.tolist() == [1, 2, 3, 4, 5, 8, 9, 6]
    assert tokens.sampled.tolist() == [False] * 3 + [True, True, False, False, True]
    np.testing.assert_allclose(
        tokens.logprobs, [0, 0, 0, -0.004, -0.005, 0, 0, -0.006], rtol=1e-6
    )
    assert tokens.log_masses.tolist() == [0, 0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert tokens.versions.tolist() == [-1, -1, -1, 4, 4, -1, -1, 5]
    assert (episode.reward, episode.error) == (0.75, "")
    # Each turn keeps what it earned.
    assert [turn.reward for turn in episode.turns] == [0.25, 0.5]
    assert episode.metrics == {"first": 1.0, "both": 2.0}
    assert episode.num_sampled == 3
    assert (episode.prompt_id, episode.sample_index, episode.task_id) == (11, 2, 3)
    assert episode.prompt_text == "be brief\nhi"
    assert (episode.response_text, episode.finish_reason) == ("said 6", "length")
    assert [turn.heard for turn in episode.turns] == ["be brief\nhi", "more"]
    # By role, where their text does not say it: one message is the user's.
    assert [turn.messages for turn in episode.turns] == [TASK.messages, ()]


def test_a_turn_keeps_results_of_tools_and_its_answer_in_parts():
    call = ToolCall("look", "{}", "7")
    result = Message("tool", "5", tool_call_id="7", name="look")
    asks = dataclasses.replace(
        generated(4),
        message=Message("assistant", "", tool_calls=(call,)),
        broken_calls=1,
    )
    flight, _ = play(
        asks, flights.Answered(Step(0.0, False, (result,)), (8,)), generated(5)
    )
    first, second = flight.episode.turns
    assert first.said == flight.conversation[2]
    assert first.said.tool_calls == (call,)
    assert first.said.broken_calls == 1
    assert (second.messages, second.said) == ((result,), None)


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
        "Ask",
        "Finish",
    ]
    assert effects[-1].episode.tokens.ids.tolist() == [1, 2, 3, 4]


def test_the_last_turn_of_the_limit_ends_with_the_reward_so_far():
    limits = EpisodeLimits(max_turns=2, max_prompt_tokens=1000)
    _, effects = play(
        generated(4), judged(1.0, 8), generated(5), judged(2.0, 9), limits=limits
    )
    assert effects[-1].episode.reward == 3.0
    assert effects[-1].episode.finish_reason == "turn_limit"
    # The reply to a turn that does not come is not part of the episode.
    assert effects[-1].episode.tokens.ids.tolist() == [1, 2, 3, 4, 8, 5]


@pytest.mark.parametrize(("longest", "goes_on"), [(6, True), (5, False)])
def test_a_prompt_may_be_as_long_as_the_limit_and_no_longer(longest, goes_on):
    limits = EpisodeLimits(max_turns=9, max_prompt_tokens=longest)
    _, effects = play(generated(4, 5), judged(1.0, 8), limits=limits)
    if goes_on:
        assert effects[-1] == flights.Generate((1, 2, 3, 4, 5, 8))
    else:
        assert effects[-1].episode.reward == 1.0
        assert effects[-1].episode.finish_reason == "token_limit"
        assert effects[-1].episode.tokens.ids.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "before",
    [(), (generated(4),), (generated(4), judged(5.0, 8), generated(6))],
    ids=["at once", "first turn", "second turn"],
)
def test_a_failure_ends_the_episode_without_a_reward(before):
    _, effects = play(*before, flights.Failed("timeout: 10 s"))
    episode = effects[-1].episode
    assert episode.reward is None
    assert (episode.error, episode.finish_reason) == ("timeout: 10 s", "failed")


events = st.lists(
    st.tuples(
        st.lists(st.integers(1, 99), min_size=1, max_size=5),
        st.lists(st.integers(100, 199), max_size=4),
        st.floats(-10, 10),
    ),
    min_size=1,
    max_size=6,
)


@given(events, st.integers(1, 6), st.integers(3, 40), st.integers(0, 3))
def test_laws_of_any_episode(turns, max_turns, max_prompt_tokens, cut):
    limits = EpisodeLimits(max_turns, max_prompt_tokens)
    flight = flights.begin(11, 2, TASK, (1, 2, 3))
    effect = flights.effect_of(flight)
    rewards, produced = [], []
    for tokens, reply, reward in turns:
        seen = (flight.episode.tokens + flight.context).ids.tolist()
        assert effect == flights.Generate(tuple(seen))
        assert len(seen) <= max_prompt_tokens
        # The turn may come in two parts.
        parts = [flights.Interrupted(sampled(tokens[:cut]))]
        if len(tokens) <= cut:
            parts, cut = [], 0
        for event in (*parts, generated(*tokens[cut:]), judged(reward, *reply)):
            before, kept = flight, copy.deepcopy(flight)
            flight, effect = flights.transition(before, event, limits)
            # Pure: the state before is as it was, and leads to the same state again.
            assert before == kept
            assert flights.transition(before, event, limits) == (flight, effect)
            # The sampler's prompt stays as it was, for every continuation.
            size = len(before.episode.tokens)
            assert flight.episode.tokens[:size] == before.episode.tokens
            # The way to a checkpoint and back.
            written = json.loads(json.dumps(flight.to_json()))
            assert Flight.from_json(written, TASK) == flight
            assert flights.effect_of(flight) == effect
        produced += tokens
        rewards.append(reward)
        if isinstance(effect, flights.Finish):
            break
    else:
        flight, effect = flights.transition(flight, flights.Failed("over"), limits)
    episode = effect.episode
    tokens = episode.tokens
    assert tokens.ids[tokens.sampled].tolist() == produced
    # The environment's tokens are those from 100 on: never trained on.
    for index, (token, mask, version) in enumerate(
        zip(tokens.ids, tokens.sampled, tokens.versions, strict=True)
    ):
        assert mask == (index >= 3 and token < 100)
        assert (version == -1) == (not mask)
    assert len(rewards) <= max_turns
    assert [turn.reward for turn in episode.turns] == rewards
    if episode.reward is not None:
        assert math.isclose(episode.reward, sum(rewards), abs_tol=1e-9)


def test_an_interrupted_turn_goes_on_where_it_was():
    _, effects = play(
        generated(4),
        judged(0.0, 8),
        flights.Interrupted(sampled((5, 6), version=4)),
        flights.Interrupted(sampled((), version=5)),
        flights.Interrupted(sampled((7,), version=5)),
        generated(9, version=6),
        judged(1.0, done=True),
    )
    assert effects[3] == flights.Generate((1, 2, 3, 4, 8, 5, 6), num_sampled=2)
    assert effects[4] == effects[3]
    assert effects[5] == flights.Generate((1, 2, 3, 4, 8, 5, 6, 7), num_sampled=3)
    # The environment hears of all the tokens of the turn.
    assert effects[6].conversation[-1] == Answer("assistant", "said 9", "stop", 4)
    tokens = effects[-1].episode.tokens
    assert tokens.ids.tolist() == [1, 2, 3, 4, 8, 5, 6, 7, 9]
    assert tokens.versions.tolist() == [-1, -1, -1, 4, -1, 4, 4, 5, 6]


def test_a_flight_does_not_come_back_to_another_task():
    flight, _ = play(generated(4), judged(0.0, 8))
    written = flight.to_json()
    for changed in (
        dataclasses.replace(TASK, reference="other"),
        dataclasses.replace(TASK, messages=TASK.messages[:1]),
    ):
        with pytest.raises(
            ChangedTaskError, match=r"task 3 is not the one that an unf"
        ):
            Flight.from_json(written, changed)


def test_an_ended_turn_that_nobody_answers_is_an_error():
    """Sampled on, it would be two turns of the policy with nothing between them."""
    _, effects = play(generated(4, 5), judged(0.25))
    episode = effects[-1].episode
    assert episode.reward is None
    assert "is not done, and said nothing" in episode.error
    # A turn that was cut may continue; the last one needs no answer.
    _, effects = play(generated(4, 5, reason="length"), judged(0.25))
    assert effects[-1] == flights.Generate((1, 2, 3, 4, 5))
    _, effects = play(generated(4, 5), judged(0.25), limits=EpisodeLimits())
    assert effects[-1].episode.reward == 0.25
