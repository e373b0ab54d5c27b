"""Sessions of BFCL with a small package in the place of bfcl-eval."""

import json
import pathlib
import sys

import pytest

from jaxrl_post.envs import Answer, Message, Repeats, ToolCall
from jaxrl_post.envs.tasks import bfcl

SMALL = pathlib.Path(__file__).with_name("small")
DONE = Answer("assistant", "Done.", "stop", 3)


def forgotten() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "bfcl_eval"]:
        del sys.modules[name]
    for cached in (bfcl._tasks, bfcl._api, bfcl._rows):
        cached.cache_clear()


@pytest.fixture
def tasks(monkeypatch):
    forgotten()
    monkeypatch.syspath_prepend(str(SMALL))
    environment = bfcl.Bfcl()
    environment.prepare()
    yield environment.tasks("eval")
    forgotten()


def calling(*calls) -> Answer:
    made = tuple(ToolCall(name, arguments) for name, arguments in calls)
    return Answer("assistant", "", "stop", 3, tool_calls=made)


def results(step) -> list[str]:
    return [message.content for message in step.messages]


def test_a_right_episode_goes_through_the_turns_of_the_user(tasks):
    session = bfcl.Bfcl().open(tasks[0])
    assert tasks[0].messages == (Message("user", "Dim by 2."),)
    step = session.step(calling(("dim", '{"by": 2}')))
    assert (results(step), step.reward, step.done) == (['{"level": 7}'], 0.0, False)
    step = session.step(DONE)
    assert step.messages == (Message("user", "Fly."),)
    # Nothing is asked that could be done: the benchmark checks nothing.
    step = session.step(DONE)
    assert step.messages == (Message("user", "Dim by 1, twice, and look."),)
    step = session.step(calling(("dim", '{"by": 1, "twice": true}')))
    step = session.step(calling(("look", "{}")))
    assert results(step) == ["dark"]
    step = session.step(DONE)
    assert (step.reward, step.done) == (1.0, True)
    assert step.metrics["bfcl/right_turns"] == 3.0
    assert step.metrics["tools/calls"] == 3.0
    session.close()


def test_a_call_that_came_too_late_is_not_made_again(tasks):
    call = calling(("dim", '{"by": 2}'))
    session = bfcl.Bfcl().open(tasks[0])
    session._tools._turn_seconds = -1.0
    said = session.step(call).messages
    assert "the earlier calls took too long" in said[0].content
    # In another worker there was time enough.
    again = bfcl.Bfcl().open(tasks[0])
    assert isinstance(again, Repeats)
    assert again.repeat(call, said).messages == said
    assert results(again.step(call)) == ['{"level": 7}']
    assert again.step(DONE).metrics["bfcl/right_turns"] == 1.0


@pytest.mark.parametrize(
    "calls",
    [
        (),
        (("dim", '{"by": 1}'),),
        (("dim", '{"by": 1}'), ("dim", '{"by": 0}'), ("dim", '{"by": 1, "x": 1}')),
        (("dim", '{"by": 1, "twice": true}'), ("dim", '{"by": 1}')),
        (("reset", "{}"), ("dim", '{"by": 2, "by ": 1}')),
    ],
)
def test_a_wrong_turn_ends_the_episode(tasks, calls):
    session = bfcl.Bfcl().open(tasks[0])
    if calls:
        session.step(calling(*calls))
    step = session.step(DONE)
    assert (step.reward, step.done) == (0.0, True)
    assert step.metrics["bfcl/right_turns"] == 0.0
    session.close()


def test_a_right_state_is_not_enough(tasks):
    session = bfcl.Bfcl().open(tasks[0])
    session.step(calling(("dim", '{"by": 2}')))
    session.step(DONE)
    session.step(DONE)
    # The lamp is as it should be, but the user wants to hear how it looks.
    session.step(calling(("dim", '{"by": 1, "twice": true}')))
    step = session.step(DONE)
    assert (step.reward, step.done) == (0.0, True)
    assert step.metrics["bfcl/right_turns"] == 2.0
    session.close()


def test_looking_is_no_change_but_asked_for(tasks):
    for calls, reward in (((), 0.0), ((("look", "{}"),), 1.0)):
        session = bfcl.Bfcl().open(tasks[1])
        if calls:
            session.step(calling(*calls))
        assert session.step(DONE).reward == reward
        session.close()


def test_functions_that_are_missing_are_described_in_a_later_turn(tasks):
    environment = bfcl.Bfcl("multi_turn_miss_func")
    (task,) = environment.tasks("eval")
    assert [tool["function"]["name"] for tool in task.tools] == ["look"]
    session = environment.open(task)
    told = results(session.step(calling(("fly", "{}"))))
    assert told == ["error: there is no tool 'fly'; there are look"]
    (said,) = session.step(DONE).messages
    described, asked = said.content.split("\n")
    assert (said.role, asked) == ("user", "There are more now.")
    assert json.loads(described) == tasks[0].tools[0]
    told = results(session.step(calling(("fly", "{}"))))
    assert told == ["error: there is no tool 'fly'; there are dim, look"]
    session.step(calling(("dim", '{"by": 2}')))
    assert session.step(DONE).messages == (Message("user", "Look."),)
    session.step(calling(("look", "{}")))
    assert session.step(DONE).reward == 1.0
    session.close()


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        # It is carried out before it is offered, as in the benchmark: the state and
        # the results are right in the end, but the turn needs a call.
        ([("dim", '{"by": 2}')], 0.0),
        ([("dim", '{"by": 2}'), ("look", "{}"), ("look", "{}")], 1.0),
        ([("look", "{}"), ("look", "{}")], 0.0),
    ],
)
def test_a_function_that_is_missing_can_be_called(tasks, turns, reward):
    environment = bfcl.Bfcl("multi_turn_miss_func")
    session = environment.open(environment.tasks("eval")[0])
    found = 0.0
    for call in turns:
        session.step(calling(call))
        step = session.step(DONE)
        found += step.reward
    while not step.done:
        step = session.step(DONE)
        found += step.reward
    assert found == reward
    session.close()


def test_only_what_is_offered_is_called(tasks):
    session = bfcl.Bfcl().open(tasks[0])
    step = session.step(
        calling(
            ("reset", "{}"),
            ("_load_scenario", '{"scenario": {"level": 7}}'),
            ("__init__", "{}"),
            ("dim", '{"by": -1}'),
            ("dim", '{"by": "__import__"}'),
        )
    )
    said = results(step)
    assert all(text.startswith("error: there is no tool") for text in said[:3])
    assert said[3] == "Error during execution: by must not be negative"
    assert said[4].startswith("Error during execution: ")
    assert session._models["Lamp"].level == 9
    session.close()


def test_right_calls_are_read_and_never_evaluated(tasks):
    assert [[call[:2] for call in turn] for turn in bfcl.gold_calls(tasks[0])] == [
        [("dim", '{"by": 2}')],
        [],
        [("dim", '{"by": 1, "twice": true}'), ("look", "{}")],
    ]
    for text in ("dim(by=open('a'))", "a.dim(1)", "dim"):
        with pytest.raises(ValueError, match=r"malformed node|must be of a name"):
            bfcl._parsed(text)


def test_schemas_are_json_schemas(tasks):
    dim = tasks[0].tools[0]["function"]
    assert dim["parameters"]["type"] == "object"
    assert dim["parameters"]["properties"]["by"]["type"] == "number"
    assert dim["description"].endswith('following schema: {"type": "dict"}')
    assert [tool["function"]["name"] for tool in tasks[0].tools] == ["dim", "look"]


def test_a_user_waits_for_twenty_steps(tasks):
    session = bfcl.Bfcl().open(tasks[0])
    session.step(calling(("dim", '{"by": 2}')))
    for _ in range(19):
        assert not session.step(calling(("look", "{}"))).done
    # The next turn of the user restarts the count.
    assert not session.step(DONE).done
    for _ in range(20):
        assert not session.step(calling(("look", "{}"))).done
    step = session.step(calling(("look", "{}")))
    assert (step.reward, step.done) == (0.0, True)
    session.close()
