"""Episodes with tools: the policy is answered for every act of a call."""

import json
from dataclasses import dataclass

import pytest

from jaxrl_post.envs import Answer, Message, Step, Task, ToolCall, WorkerPool, response
from jaxrl_post.envs.env import NeedsPreparation, TaskSequence
from jaxrl_post.envs.tools import (
    ERROR_KINDS,
    Functions,
    Interpreter,
    ToolEnvironment,
    ToolError,
    make_toolset,
)
from jaxrl_post.envs.workers.wire import decode_step, encode_step
from tests.envs.sandbox import available


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def fail() -> str:
    """Fails."""
    raise RuntimeError("no luck")


def long() -> str:
    """Says much."""
    return "x" * 100_000


def echo(text: str) -> str:
    """Says it again."""
    return text


def parts(text: str) -> list[str]:
    """Raises what it heard."""
    raise KeyError(f"{text}?")


FUNCTIONS = [add, fail, long]
NOTHING = ()


@dataclass(frozen=True)
class Sums:
    """Is right if the answer is 5, and says how many messages it saw."""

    name: str = "sums"

    def tasks(self, split):
        del split
        return TaskSequence(3, lambda i: Task(i, (Message("user", "2+3="),), "5"))

    def step(self, task, conversation):
        right = response(conversation) == task.reference
        return Step(float(right), True, metrics={"seen": float(len(conversation))})

    def demonstration(self, task):
        return task.reference


def calls(*wanted, broken=0, reason="tool") -> Answer:
    made = tuple(
        ToolCall(name, json.dumps(arguments), f"{place:09d}")
        for place, (name, arguments) in enumerate(wanted)
    )
    return Answer("assistant", "", "stop", 3, tool_calls=made, broken_calls=broken)


def opened(**options):
    environment = ToolEnvironment(Sums(), (Functions(*FUNCTIONS),), **options)
    (task, *_) = environment.tasks("train")
    return environment, task, environment.open(task)


def errors_of(step) -> dict[str, float]:
    prefix = "tools/errors/"
    found = {k: value for k, value in step.metrics.items() if k.startswith(prefix)}
    assert [k.removeprefix(prefix) for k in found] == list(ERROR_KINDS)
    return {k.removeprefix(prefix): value for k, value in found.items() if value}


def test_tasks_have_the_tools():
    environment, task, _ = opened()
    assert [tool["function"]["name"] for tool in task.tools] == ["add", "fail", "long"]
    assert environment.tasks("eval")[2].id == 2
    assert environment.demonstration(task) == "5"


def test_calls_are_answered_in_order_and_the_answer_is_judged():
    _, _, session = opened()
    step = session.step(calls(("add", {"a": 2, "b": 3}), ("add", {"a": 5, "b": 1})))
    assert step == Step(
        0.0,
        False,
        (
            Message("tool", "5", tool_call_id="000000000", name="add"),
            Message("tool", "6", tool_call_id="000000001", name="add"),
        ),
        {"tools/calls": 2.0, "tools/failed": 0.0, "tools/broken": 0.0}
        | {f"tools/errors/{kind}": 0.0 for kind in ERROR_KINDS},
    )
    last = session.step(Answer("assistant", "5"))
    assert (last.reward, last.done) == (1.0, True)
    # The question, the calls, two results, the answer; counts are of the episode.
    assert last.metrics["seen"] == 5
    assert last.metrics["tools/calls"] == 2
    session.close()


@pytest.mark.parametrize(
    ("call", "told", "kind"),
    [
        (("add", {"a": 1}), "error: wrong arguments: b: ", "bad_arguments"),
        (
            ("subtract", {}),
            "error: there is no tool 'subtract'; there ",
            "unknown_tool",
        ),
        (("fail", {}), "error: RuntimeError: no luck", "tool_failed"),
    ],
)
def test_a_call_that_fails_is_answered(call, told, kind):
    _, _, session = opened()
    step = session.step(calls(call))
    assert step.messages[0].content.startswith(told)
    assert step.metrics["tools/failed"] == 1
    assert errors_of(step) == {kind: 1}
    assert not step.done


def test_what_cannot_be_read_is_answered():
    _, _, session = opened()
    step = session.step(calls(broken=2))
    assert step.messages == (
        Message(
            "user",
            "2 of the calls could not be read: a call has a name and arguments of the "
            "tool's types, in the form of this chat",
        ),
    )
    both = session.step(calls(("add", {"a": 1, "b": 1}), broken=1))
    assert [message.role for message in both.messages] == ["tool", "user"]
    assert both.metrics["tools/broken"] == 3
    assert errors_of(both) == {"unreadable": 3}


def test_half_of_a_surrogate_pair_is_no_text_of_a_result():
    # JSON can write it, no tokenizer can read it.
    answer = calls(("echo", {"text": "\ud83d"}), ("parts", {"text": "\udc00"}))
    environment = ToolEnvironment(Sums(), (Functions(echo, parts),))
    task = environment.tasks("train")[0]
    step = environment.open(task).step(answer)
    assert [message.content for message in step.messages] == [
        "\ufffd",
        r"error: KeyError: '\udc00?'",
    ]
    # The same in a new session, by which it is known as the same.
    assert environment.open(task).step(answer).messages == step.messages
    assert decode_step(encode_step(step)).messages == step.messages


def test_a_turn_that_was_cut_is_judged():
    _, _, session = opened()
    cut = Answer("assistant", "<tool_call>{", "length", 9, broken_calls=1)
    assert session.step(cut).done


def test_calls_are_bounded_in_number_time_and_length():
    _, _, session = opened(max_calls=1)
    step = session.step(calls(("long", {}), ("add", {"a": 1, "b": 1})))
    assert len(step.messages[0].content) == 2**16
    assert step.messages[1].content.startswith("error: a turn may have 1 calls")
    assert errors_of(step) == {"too_many": 1}
    _, _, session = opened(turn_seconds=-1.0)
    step = session.step(calls(("add", {"a": 1, "b": 1})))
    assert step.messages[0].content.startswith("error: the earlier calls took too long")
    assert errors_of(step) == {"too_late": 1}


def test_arguments_that_are_no_json_are_bad_arguments():
    _, _, session = opened()
    call = ToolCall("add", "{a", "0")
    step = session.step(Answer("assistant", "", "stop", 3, tool_calls=(call,)))
    assert step.messages[0].content.startswith("error: the arguments must be a JSON")
    assert errors_of(step) == {"bad_arguments": 1}


def test_an_error_has_one_of_the_known_kinds():
    assert ToolError("no").kind == "tool_failed"
    with pytest.raises(ValueError, match=r"kind must be one of .* got 'rain'"):
        ToolError("no", kind="rain")


def test_what_makes_no_environment_is_refused():
    with pytest.raises(ValueError, match="names of their own, got \\['add', 'add'\\]"):
        ToolEnvironment(Sums(), (Functions(add), Functions(add)))
    with pytest.raises(ValueError, match="judges an answer by `step`"):
        ToolEnvironment(opened()[0], (Functions(add),))
    with pytest.raises(ValueError, match="max_calls must be at least 1"):
        ToolEnvironment(Sums(), (Functions(add),), max_calls=0)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
def test_python_keeps_its_names_for_an_episode(name):
    requirement = available.require(name)
    found = make_toolset(f"shell?sandbox={requirement}&seconds=20")
    assert isinstance(found, NeedsPreparation)
    found.prepare()
    one, two = (found.open(Task(0, (), "")) for _ in range(2))
    try:
        assert one.mechanism == name
        assert one.call("python", {"code": "x = 6"}) == "[nothing was printed]"
        assert one.call("python", {"code": "print('a')\nx * 7"}) == "a\n42"
        assert "NameError" in two.call("python", {"code": "x"})
        one.call("python", {"code": "open('f', 'w').write('kept')"})
        assert one.call("shell", {"command": "cat f"}) == "kept"
        told = one.call("shell", {"command": "echo a; exit 3"})
        assert told == "a\n\n[ended with status 3]"
        gone = one.call("python", {"code": "import os; os._exit(7)"})
        assert gone == "[ended with status 7]"
        with pytest.raises(ToolError, match="takes one, 'code', a text"):
            one.call("python", {"program": "1"})
        with pytest.raises(ToolError, match="it could not be run"):
            one.call("python", {"code": "x" * (65 << 20)})
    finally:
        one.close()
        two.close()


@pytest.mark.processes
def test_a_place_that_broke_is_replaced_and_the_policy_is_told():
    requirement = available.require("landlock")
    tools = Interpreter(sandbox=requirement).open(Task(0, (), ""))
    try:
        assert tools.call("python", {"code": "x = 1"}) == "[nothing was printed]"
        tools._place.close()
        told = tools.call("python", {"code": "print(2)"})
        assert told == "names and files of earlier calls are gone\n2"
    finally:
        tools.close()


@pytest.mark.processes
def test_episodes_run_in_worker_processes_and_tell_their_sandbox():
    requirement = available.require("landlock")
    environment = ToolEnvironment(
        Sums(), (make_toolset(f"python?sandbox={requirement}&seconds=20"),)
    )
    (task, *_) = environment.tasks("train")
    turn = calls(("python", {"code": "print(2 + 3)"}))
    with WorkerPool(environment, 1, deadline_s=60.0) as pool:
        first = pool.submit(task, (*task.messages, turn), session="a").result(60)
        assert first.step is not None, first.error
        assert first.step.messages[0].content == "5"
        assert first.step.metrics["sandbox/landlock"] == 1.0
        conversation = (*task.messages, turn, *first.step.messages)
        last = (*conversation, Answer("assistant", "5"))
        assert pool.submit(task, last, session="a").result(60).step.reward == 1.0
        # Another process, or a resumed run: the turns are taken again.
        again = pool.submit(task, last, session="b").result(60)
        assert again.step is not None, again.error
        assert again.step.reward == 1.0


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("perl", "no tools 'perl'; there are python, shell, search, http, mcp"),
        ("python?second=2", "tool 'python' has no option 'second'.*'seconds'"),
        ("http?url=http://127.0.0.1:9", "needs the option 'tools'"),
        ("no.such.module:f", "there is no module 'no'"),
        (f"{__name__}:nothing", "has no 'nothing'"),
        (f"{__name__}:NOTHING", None),
        (f"{__name__}:FUNCTIONS?a=1", "takes no options"),
    ],
)
def test_specifications_that_name_nothing(spec, told):
    if told is None:
        environment = make_toolset(spec)
        with pytest.raises(ValueError, match="names of their own, got \\[\\]"):
            ToolEnvironment(Sums(), (environment,))
        return
    with pytest.raises(ValueError, match=told):
        make_toolset(spec)


def test_specifications_of_functions():
    many = make_toolset(f"{__name__}:FUNCTIONS")
    assert [tool.name for tool in many.tools()] == ["add", "fail", "long"]
    one = make_toolset(f"{__name__}:add")
    assert one.open(Task(0, (), "")).call("add", {"a": 1, "b": 2}) == "3"
