"""BFCL: right episodes score 1, every other one 0."""

import json
import sys
from typing import get_args

import pytest

from jaxrl_post.envs import Answer, ToolCall, WorkerPool, make
from jaxrl_post.envs.tasks.bfcl import Bfcl, Category, gold_calls

DONE = Answer("assistant", "Done.", "stop", 3)


@pytest.fixture
def package():
    pytest.importorskip("bfcl_eval", reason="needs bfcl-eval: make check-bfcl")


def played(environment, task, turns) -> tuple[float, float, int]:
    """Reward, right turns, and number of user turns of an episode of these calls."""
    session = environment.open(task)
    reward = right = users = 0.0
    try:
        for calls in turns:
            if calls:
                step = session.step(calling(calls))
                assert not step.done
                assert [message.role for message in step.messages] == ["tool"] * len(
                    calls
                )
            step = session.step(DONE)
            users += 1
            reward += step.reward
            right = step.metrics["bfcl/right_turns"]
            if step.done:
                break
            assert {message.role for message in step.messages} == {"user"}
        assert step.done
    finally:
        session.close()
    return reward, right, int(users)


def calling(calls) -> Answer:
    return Answer("assistant", "", "stop", 3, tool_calls=tuple(calls))


@pytest.mark.parametrize("category", get_args(Category.__value__))
def test_every_right_episode_scores_one(package, category):
    environment = make(f"bfcl?category={category}")
    environment.prepare()
    tasks = environment.tasks("eval")
    assert len(tasks) == 200
    for task in tasks:
        turns = gold_calls(task)
        found = played(environment, task, turns)
        assert found == (1.0, float(len(turns)), len(turns)), task.data["row"]["id"]


def test_every_episode_without_its_last_calls_scores_zero(package):
    """The last turn that asks for something is answered without a call."""
    environment = Bfcl()
    for task in environment.tasks("eval"):
        turns = gold_calls(task)
        last = max(number for number, calls in enumerate(turns) if calls)
        turns[last] = ()
        reward, right, users = played(environment, task, turns)
        assert (reward, right, users) == (0.0, last, last + 1)


def test_other_calls_score_zero(package):
    environment = Bfcl()
    task = environment.tasks("eval")[0]
    turns = gold_calls(task)
    wrong = {
        "another state": [
            ToolCall("mkdir", '{"dir_name": "tmp"}') if call.name == "mkdir" else call
            for call in turns[0]
        ],
        "too little": turns[0][:-1],
        "too much": [*turns[0], ToolCall("touch", '{"file_name": "a"}')],
        "no such function": [ToolCall("chmod", "{}")],
    }
    for name, calls in wrong.items():
        found = played(environment, task, [calls, *turns[1:]])
        assert found == (0.0, 0.0, 1), name
    # The state is right, but nothing was looked up.
    found = played(environment, task, [turns[0], turns[1][:-1], *turns[2:]])
    assert found == (0.0, 1.0, 2)
    # A call more, which changes nothing, is no harm.
    more = [ToolCall("pwd", "{}"), *turns[0]]
    assert played(environment, task, [more, *turns[1:]])[0] == 1.0


def test_what_a_model_writes_is_never_evaluated(package, tmp_path):
    environment = Bfcl()
    task = environment.tasks("eval")[0]
    marker = tmp_path / "evaluated"
    code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    session = environment.open(task)
    step = session.step(
        calling(
            [
                ToolCall("mkdir", json.dumps({"dir_name": f"' + str({code}) + '"})),
                ToolCall("mkdir", json.dumps({f"dir_name={code}, x": 1})),
                ToolCall(code, "{}"),
                ToolCall("_load_scenario", '{"scenario": {}}'),
                ToolCall("__init__", "{}"),
                ToolCall("__class__", "{}"),
                ToolCall("get_long_context", "{}"),
            ]
        )
    )
    said = [message.content for message in step.messages]
    assert "Error during execution" in said[1]
    assert all(text.startswith("error: there is no tool") for text in said[2:])
    assert not marker.exists()
    session.close()


def test_a_turn_has_twenty_steps(package):
    environment = Bfcl()
    task = environment.tasks("eval")[0]
    session = environment.open(task)
    for _ in range(20):
        assert not session.step(calling([ToolCall("pwd", "{}")])).done
    step = session.step(calling([ToolCall("pwd", "{}")]))
    assert (step.reward, step.done) == (0.0, True)
    session.close()


def test_a_task_has_the_first_question_and_the_functions(package):
    task = Bfcl().tasks("eval")[0]
    (question,) = task.messages
    assert question.content.startswith("Move 'final_report.pdf'")
    tools = {tool["function"]["name"]: tool["function"] for tool in task.tools}
    assert {"cd", "mkdir", "grep", "post_tweet"} <= tools.keys()
    parameters = tools["cd"]["parameters"]
    assert parameters["type"] == "object"
    assert parameters["properties"]["folder"]["type"] == "string"
    shown = json.dumps(
        [
            tool["function"]["parameters"]
            for t in Bfcl().tasks("eval")
            for tool in t.tools
        ]
    )
    assert all(f'"type": "{kind}"' not in shown for kind in ("dict", "float", "any"))


def test_no_prompt_tells_a_function_that_is_missing(package):
    environment = Bfcl("multi_turn_miss_func")
    for task in environment.tasks("eval"):
        names = {tool["function"]["name"] for tool in task.tools}
        (missing,) = task.data["row"]["missed_function"].values()
        assert missing
        assert not names & set(missing)


@pytest.mark.processes
def test_a_lost_session_is_taken_again(package):
    environment = Bfcl()
    task = environment.tasks("eval")[0]
    first, second, *_ = gold_calls(task)
    with WorkerPool(environment, 1, deadline_s=60.0) as pool:
        conversation = task.messages
        for number, turn in enumerate([calling(first), DONE, calling(second), DONE]):
            conversation = (*conversation, turn)
            # Each turn in a session of its own.
            step = pool.submit(task, conversation, session=number).result(60).step
            assert step is not None
            conversation = (*conversation, *step.messages)
        assert step.metrics["bfcl/right_turns"] == 2.0


def test_there_is_nothing_to_train_on(package):
    with pytest.raises(ValueError, match="bfcl is a benchmark and has nothing to"):
        Bfcl().tasks("train")
    assert Bfcl().demonstration(Bfcl().tasks("eval")[0]) is None


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps bfcl-eval"):
        make("bfcl")
