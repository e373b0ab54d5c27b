"""Environments, graders, tools and agents of somebody's: a fault names the option."""

import json
import sys
import types
from dataclasses import dataclass

import pytest

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.envs import Message, Step, Task
from jaxrl_post.envs.tools import Tool
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.examples.tasks import open_tasks


@pytest.fixture
def module(monkeypatch):
    """A module whose attributes are somebody's."""
    made = types.ModuleType("somebodys")
    monkeypatch.setitem(sys.modules, "somebodys", made)
    return made


@dataclass(frozen=True)
class Good:
    level: int = 1
    name: str = "good"

    def tasks(self, split):
        return [Task(i, (Message("user", f"{split}{i}"),), "a") for i in range(4)]

    def step(self, task, conversation):
        return Step(1.0, done=True)

    def demonstration(self, task):
        return "a"


@dataclass(frozen=True)
class Agent:
    name: str = "agent"

    def tasks(self, split):
        return Good().tasks(split)

    def run(self, task, base_url):
        return Step(1.0, done=True)

    def demonstration(self, task):
        return "a"


async def later(self, *arguments):
    return Step(1.0, done=True)


def each(self, *arguments):
    yield Step(1.0, done=True)


def with_method(kind, name, method):
    """A class whose method is another one."""
    return type("Mine", (kind,), {name: method})


def raises(*_):
    raise KeyError("gone")


def made(module, mine, spec="somebodys:mine"):
    module.mine = mine
    environment = make_environment(spec, DataConfig())
    tasks = open_tasks(environment, "fail")
    return tasks.demonstration(tasks.train[0])


LINE = r"\(.*test_own_environment.py:\d+\)"


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        (lambda: None, "must return an environment .*, got NoneType"),
        (lambda: Good, "got the class Good itself; call it"),
        (Good(), "no function or class 'mine', which is a value of type Good"),
        (raises, f"somebodys:mine: KeyError: 'gone' {LINE}"),
        (lambda: Good(lvel=2), rf"unexpected keyword argument 'lvel'.*{LINE}"),
        (later, "'somebodys:mine' is an async function"),
        (each, "'somebodys:mine' is a generator"),
        (with_method(Good, "step", later), "'somebodys:mine': step is an async"),
        (with_method(Agent, "run", later), "'somebodys:mine': run is an async"),
        (with_method(Agent, "run", each), "'somebodys:mine': run is a generator"),
        (
            with_method(Agent, "run", lambda self, task: None),
            r"run must take \(task, base_url\), got a function of \(task\)",
        ),
        (
            with_method(Good, "step", lambda self, conversation: None),
            r"step must take \(task, conversation\), got .*\(conversation\)",
        ),
        (with_method(Good, "tasks", each), "tasks is a generator, which yields"),
        (
            with_method(Good, "tasks", lambda self: []),
            r"tasks must take \(split\), got a function of \(\)",
        ),
        (with_method(Good, "tasks", raises), f"good: tasks: KeyError: 'gone' {LINE}"),
        (
            with_method(Good, "tasks", lambda self, split: None),
            r"good: tasks\('train'\) must return a sequence of Tasks.*got NoneType",
        ),
        (
            with_method(Good, "tasks", lambda self, split: ["a"]),
            "good: train task 0 must be a Task, got 'a'",
        ),
        (
            with_method(Good, "tasks", lambda self, split: [Task(0, "question", "a")]),
            "task 0: messages must be a tuple of Messages of text, got 'question'",
        ),
        (
            with_method(Good, "demonstration", lambda self, task: 3),
            "demonstration must return a text, a Message or None, got 3",
        ),
        (with_method(Good, "demonstration", raises), f"demonstration: KeyErr.*{LINE}"),
        (lambda: Good(name=None), "name must be a text, a field or a property; got No"),
    ],
)
def test_a_wrong_environment_or_agent_is_told(module, mine, told):
    with pytest.raises(ConfigError, match=f"^--env: .*{told}"):
        made(module, mine)


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("levl=2", "no option 'levl'; it has level, name; did you mean 'level'"),
        ("level=x", "level must be an integer, got 'x'"),
        ("level=1.5", "level must be an integer, got 1.5"),
        ("name=3", 'name must be of type str, got 3; .*write name="3"'),
    ],
)
def test_a_wrong_option_of_an_environment_is_told(module, query, told):
    with pytest.raises(ConfigError, match=f"^--env: .*'somebodys:mine'.*{told}"):
        made(module, Good, f"somebodys:mine?{query}")
    assert made(module, Good, "somebodys:mine?level=3") == "a"


def grading(response, reply):
    return 1.0


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        (grading, "it has the parameter 'reply' without a default, and a grader gets"),
        (later, "is an async function"),
        (each, "is a generator"),
        (Good(), "has no function or class 'mine', which is a value of type Good"),
    ],
)
def test_a_wrong_grader_is_told(module, tmp_path, monkeypatch, mine, told):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i}", "answer": "a"} for i in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)))
    module.mine = mine
    spec = "jsonl?grader=somebodys:mine"
    with pytest.raises(ConfigError, match=f"^--env: .*grader 'somebodys:mine'.*{told}"):
        make_environment(spec, DataConfig(path=str(path)))


class Tools:
    def tools(self):
        return [Tool("now", "The time.")]

    def open(self, task):
        return self

    def call(self, name, arguments):
        return "noon"

    def close(self):
        pass


def bare(city):
    return city


async def waiting(city: str) -> str:
    return city


def yielding(city: str):
    yield city


def found(city: str) -> str:
    return city


@pytest.mark.parametrize(
    ("mine", "told"),
    [
        (bare, "parameters must be annotated.*; got city of bare"),
        (waiting, "is an async function"),
        ([waiting], "the function waiting is an async function"),
        (yielding, "is a generator"),
        (lambda city: city, "a tool needs a name, got .*; define it with def"),
        (3, "must be a function, functions, or a toolset .*, got int"),
        ([found, 3], "must be a function, functions, or a toolset"),
        (
            with_method(Tools, "tools", lambda self: ["x"]),
            "Mine.tools must return Tools",
        ),
        (with_method(Tools, "tools", raises), f"Mine.tools: KeyError: 'gone' {LINE}"),
        (with_method(Tools, "tools", later), "Mine.tools is an async function"),
        (with_method(Tools, "open", later), "Mine.open is an async function"),
        (with_method(Tools, "open", lambda self: self), r"open must take \(task\)"),
        (with_method(Tools, "__init__", raises), f"somebodys:mine: KeyErr.*{LINE}"),
    ],
)
def test_a_wrong_tool_is_told(module, mine, told):
    pytest.importorskip("docstring_parser", reason="needs the extra 'tools'")
    module.mine = mine
    with pytest.raises(ConfigError, match=f"^--tools: .*{told}"):
        make_environment("arithmetic", DataConfig(), ("somebodys:mine",))


@pytest.mark.parametrize("call", [later, lambda self, name, arguments: 3])
def test_a_call_without_a_text_is_an_error_of_the_tool(module, call):
    module.mine = with_method(Tools, "call", call)
    environment = make_environment("arithmetic", DataConfig(), ("somebodys:mine",))
    [task, *_] = environment.tasks("train")[:1]
    session = environment.open(task)
    outcome, kind = session._outcome(
        types.SimpleNamespace(name="now", arguments="{}"), 0, float("inf")
    )
    assert kind == "tool_failed"
    assert "Mine.call" in outcome


@pytest.mark.parametrize("name", ["gsm9k", "jsonk", "arithmetics"])
@pytest.mark.parametrize(
    "data",
    [DataConfig(), DataConfig("rows.jsonl"), DataConfig(columns=("prompt=question",))],
)
def test_the_nearest_environment_is_named_with_and_without_a_file(name, data):
    nearest = {"gsm9k": "gsm8k", "jsonk": "jsonl", "arithmetics": "arithmetic"}[name]
    with pytest.raises(
        ConfigError, match=f"--env: no environment '{name}'.*did you mean '{nearest}'?"
    ):
        make_environment(name, data)


def test_a_name_that_is_near_to_none_gets_no_guess():
    with pytest.raises(ConfigError, match=r"no environment 'zzz'; there are [^?]*$"):
        make_environment("zzz", DataConfig("rows.jsonl"))


def test_columns_are_the_fields_of_an_environment(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"{i}=", "reply": f"{i}", "how": "so"} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("prompt=question", "answer=reply", "solution=how")
    made = make_environment("jsonl", DataConfig(str(path), columns=columns))
    (task, *_) = made.tasks("train")
    assert (task.reference, made.demonstration(task)) == (task.data["answer"], "so")
    made = make_environment("jsonl", DataConfig(str(path), columns=columns[1:2]))
    with pytest.raises(ValueError, match="no field 'prompt'"):
        made.tasks("train")


@pytest.mark.parametrize(
    ("spec", "columns", "told"),
    [
        ("jsonl", ("completion=a",), "completion=a: .* prompt, answer, solution"),
        ("jsonl", ("prompt=a", "messages=b"), "messages=b: .* each once"),
        ("jsonl?prompt=a", ("prompt=b",), "option 'prompt' is given twice"),
        ("gsm8k", ("prompt=a",), "environment 'gsm8k' lets you name none"),
        ("arithmetic", ("prompt=a",), "'arithmetic' reads no file"),
        ("text2sql", ("prompt=a",), "'text2sql' lets you name none"),
    ],
)
def test_columns_that_an_environment_lacks_are_refused(spec, columns, told):
    path = None if spec in ("arithmetic", "text2sql") else "rows.jsonl"
    with pytest.raises(ConfigError, match=told):
        make_environment(spec, DataConfig(path, columns=columns))
