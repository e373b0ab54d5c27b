"""Sessions of BFCL with a small package in the place of bfcl-eval."""

import pathlib
import sys

import pytest

from jaxrl_post.envs import Answer, Message, ToolCall
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
    # The next turn of the user begins to count anew.
    assert not session.step(DONE).done
    for _ in range(20):
        assert not session.step(calling(("look", "{}"))).done
    step = session.step(calling(("look", "{}")))
    assert (step.reward, step.done) == (0.0, True)
    session.close()
