"""Grading functions: what they are given, what they may return, and several of them."""

import functools
import itertools
import json
import sys
import types
from dataclasses import dataclass

import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.envs import Answer, Message, make
from jaxrl_post.envs.real_number import NumberError
from jaxrl_post.envs.tasks.graders import Grader
from jaxrl_post.envs.tasks.grading_functions import NAMES
from jaxrl_post.envs.tasks.prompt_answers import PromptAnswers
from jaxrl_post.examples.environment import check_functions

ROW = {"prompt": "2+2=", "answer": "4", "level": 3, "tags": ["sum"]}
NUMBERS = itertools.count()
# In seconds, of a judgement that is not to be stopped.
LONG = 120.0


@pytest.fixture
def graders(monkeypatch):
    """A module of graders, of another name in each test, as functions are kept."""
    module = types.ModuleType(f"graders_{next(NUMBERS)}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def opened(tmp_path, graders):
    """The environment of some rows and functions, and its first task."""

    def build(functions, rows=(ROW,), **options):
        names = []
        for name, function in functions.items():
            setattr(graders, name, function)
            names.append(f"{graders.__name__}:{name}")
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options.setdefault("grader", ",".join(names))
        environment = PromptAnswers(str(path), str(path), **options)
        return environment, environment.tasks("train")[0]

    return build


def judged(environment, task, content="4", finish_reason="stop", num_tokens=2):
    answer = Answer("assistant", content, finish_reason, num_tokens)
    return environment.step(task, (*task.messages, answer))


class Recorder:
    """A grader that keeps what it was called with."""

    def __init__(self):
        self.seen = {}

    def __call__(self, response, *, row, **rest):
        self.seen = {"response": response, "row": row, **rest}
        return 1.0


def positional(response, answer, /):
    return response == answer


def positional_and_named(answer, /, response, *, task):
    return response == answer == task.reference


def behind_a_default(own=1, answer="none", /, response=""):
    return own == 1 and answer == "none" and response == "4"


def swallowing(response, *rest, scale=1, **kwargs):
    return not rest and scale == 1 and {*kwargs} == {*NAMES} - {"response"}


def passing_on(*args, **kwargs):
    return positional(kwargs["response"], kwargs["answer"])


@functools.wraps(positional)
def wrapped(*args, **kwargs):
    return positional(*args, **kwargs)


@dataclass
class Scorer:
    least: int = 1

    def score(self, num_tokens, finish_reason="length"):
        return num_tokens > self.least and finish_reason == "stop"


def test_a_function_gets_what_it_names(opened):
    recorder = Recorder()
    environment, task = opened({"recorder": recorder}, system="Add.", instruction="Go.")
    step = judged(environment, task, "five", "length", 7)
    assert (step.reward, dict(step.rewards)) == (1.0, {})
    assert recorder.seen == {
        "response": "five", "answer": "4", "prompt": "2+2=", "row": ROW,
        "finish_reason": "length", "num_tokens": 7, "task": task,
    }  # fmt: skip
    # A message that is no turn of a policy ended by itself.
    environment.step(task, (*task.messages, Message("assistant", "5")))
    assert recorder.seen["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "function",
    [
        positional,
        positional_and_named,
        behind_a_default,
        swallowing,
        passing_on,
        wrapped,
        Scorer().score,
        lambda answer: answer == "4",
        lambda row: row["level"] == 3,
        functools.partial(lambda response, answer: response == answer, answer="4"),
        functools.partial(lambda answer, **rest: rest["task"] == 3, task=3),
        functools.partial(lambda own, prompt: own == prompt, "2+2="),
    ],
)
def test_all_kinds_of_functions_grade(opened, function):
    environment, task = opened({"f": function})
    assert judged(environment, task).reward == 1.0


async def awaited(response):
    return 1.0


def generated(response):
    yield 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda response, expected: 0, r"'expected' without a default, and a grader "
         r"gets response, answer, prompt, row, finish_reason, num_tokens, task; re"),
        (lambda a, b, /: 0, "the parameter 'a' without a default"),
        (lambda response, *, weight: 0, "the parameter 'weight' without a default"),
        (lambda: 0, "must take at least one of response, answer"),
        (lambda *args: 0, "must take at least one of response, answer"),
        (Scorer.score, "the parameter 'self' without a default"),
        (Scorer, "is a class; name a function, or an object"),
        (print.__class__, "is a class"),
        (awaited, "is an async function"),
        (functools.partial(awaited, "x"), "is an async function"),
        (generated, "is a generator"),
        (max, "its parameters are unknown"),
    ],
)  # fmt: skip
def test_other_functions_are_refused_with_the_options(opened, function, message):
    with pytest.raises(ValueError, match=rf"grader 'graders_\d+:f'.* {message}"):
        opened({"f": function})


def test_rows_need_an_answer_only_if_a_grader_does(opened):
    rows = [{"prompt": "Say something.", "level": 2}]
    environment, task = opened({"f": lambda num_tokens: num_tokens}, rows)
    assert task.reference == ""
    assert judged(environment, task, num_tokens=5).reward == 5.0
    environment, task = opened(
        {"g": lambda response, answer=None: answer is None}, rows
    )
    assert judged(environment, task).reward == 1.0
    needs = {"h": lambda response, answer: 1.0}
    for functions, options in (
        (needs, {}),
        ({}, {"grader": "exact"}),
        # A field that was named is meant.
        ({"g": lambda response, answer=None: 1.0}, {"answer": "gold"}),
    ):
        with pytest.raises(ValueError, match=r"rows.jsonl:1: no field '(answer|gold)'"):
            opened(functions, rows, **options)


def test_a_task_has_no_more_of_its_row_than_is_asked(opened):
    _, task = opened({"f": lambda response: 1.0})
    assert task.data.keys() == {"solution", "answer"}
    _, task = opened({"g": lambda response, row: 1.0})
    assert task.data["row"] == ROW


def test_the_parts_of_a_reward_are_reported(opened):
    parts = {"format": 0.25, "right": True}
    environment, task = opened({"f": lambda response: parts})
    step = judged(environment, task)
    assert (step.reward, dict(step.rewards)) == (1.25, {"format": 0.25, "right": 1.0})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, r"what grader '.*:f' returns must be a number or name parts, got \{\}"),
        ({3: 1.0}, r"what grader '.*:f' returns: the name of a part .* got 3 \(int\)"),
        ({"": 1.0}, "the name of a part must be a text, got ''"),
        ({"a": 1.0, "b": float("nan")}, "part 'b' of what grader '.*:f' returns must "),
        ({"a": None}, "part 'a' of what grader .* must be a finite number, got None"),
        ({"a": {"b": 1.0}}, "part 'a' of what grader .* must be a finite number"),
        ({"a": 1e308, "b": 1e308}, "the sum of what grader .* must be a finite number"),
        ([1.0], r"what grader '.*:f' returns must be a finite number, got \[1.0\]"),
        ((1.0, {}), "what grader '.*:f' returns must be a finite number"),
    ],
)
def test_other_values_are_refused_by_the_name_of_their_part(graders, value, message):
    graders.f = lambda response: value
    with pytest.raises(NumberError, match=message):
        Grader(f"{graders.__name__}:f").grade("", "")


def test_several_graders_add_up_with_their_weights(opened, graders):
    def brevity(num_tokens):
        return {"short": num_tokens < 3, "long": -1.0}

    graders.brevity = brevity
    environment, task = opened(
        {}, grader=f"exact, f1,{graders.__name__}:brevity", weights="1,0.5,-2"
    )
    step = judged(environment, task, "4 apples")
    # F1: one word of two said, and of one asked, is right.
    assert dict(step.rewards) == {
        "exact": 0.0,
        "f1": pytest.approx(2 / 3),
        "brevity": 0,
    }
    assert step.reward == pytest.approx(1 / 3)
    assert step.metrics == {
        "correct": 0.0, "answered": 1.0, "brevity/short": 1.0, "brevity/long": -1.0,
    }  # fmt: skip
    assert environment.demonstration(task) == task.reference == "4"


def test_functions_of_one_name_are_told_apart(opened, graders, monkeypatch):
    other = types.ModuleType(f"{graders.__name__}_other")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    graders.exact = other.f = graders.f = lambda response: len(response)
    names = [f"{graders.__name__}:f", f"{other.__name__}:f", "exact"]
    environment, task = opened({}, grader=",".join(names))
    step = judged(environment, task)
    assert list(step.rewards) == [
        f"{graders.__name__}.f", f"{other.__name__}.f", "exact"
    ]  # fmt: skip
    assert step.reward == 3.0
    environment, task = opened({}, grader=f"exact,{graders.__name__}:exact")
    assert list(judged(environment, task).rewards) == [
        "exact", f"{graders.__name__}.exact"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grader": "exact,f1", "weights": 1}, "weights must be one finite number for "
         "each grader, with commas between; got 1 for exact, f1"),
        ({"grader": "exact,f1", "weights": "1,0.5,2"}, "weights must be one finite"),
        ({"grader": "exact,f1", "weights": "1,a"}, "weights must be one finite"),
        ({"grader": "exact,f1", "weights": "1,nan"}, "weights must be one finite"),
        ({"grader": "exact", "weights": "1,"}, "weights must be one finite number"),
        ({"grader": "exact,f1,exact"}, "grader 'exact' is given twice"),
        ({"grader": "exact,"}, "no grader ''; there are exact, f1"),
        ({"grader": "exact,absent:f"}, "no grader 'absent:f': there is no module"),
        ({"grader": "exact,regex", "extraction": "flexible"}, "for the grader 'math'"),
        ({"grader": 3}, "grader must be a text, got 3"),
    ],
)  # fmt: skip
def test_options_of_several_graders_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        PromptAnswers("rows.jsonl", **options)


def test_a_specification_names_several_graders(opened, graders):
    graders.length = lambda response: len(response)
    environment, _ = opened({"length": graders.length})
    spec = f"jsonl?grader=exact,{graders.__name__}:length&weights=1,0.5&extract=\\d"
    environment = make(spec, options={"path": environment.path, "eval_path": None})
    task = environment.tasks("train")[0]
    # A function gets the whole response, the others what the expression finds.
    assert judged(environment, task, "is 4").reward == 1.0 + 0.5 * 4


FILE = """
import time


def of_level(response, row):
    return row["level"] / len(row["tags"])


def empty(response):
    return 1 / len(response)


def leaving(response, finish_reason):
    raise SystemExit(f"at {finish_reason}")


def slow(response):
    time.sleep(600)


def good(response, row, num_tokens):
    return {"tokens": num_tokens}
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A module in a file, which workers import."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "graders_of_a_file.py").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "graders_of_a_file"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("of_level", [ROW, {"prompt": "3+3=", "answer": "6"}],
         r"the answer '6' to train task 1, '3\+3=', could .*raised.*KeyError: 'level"),
        ("empty", [ROW], r"the answer '' to train task 0, '2\+2=', could not be judged "
         r"\(raised\): .*ZeroDivisionError"),
        ("leaving", [ROW], r"the answer '4' to train task 0.*SystemExit: at stop"),
    ],
)  # fmt: skip
def test_functions_are_tried_on_the_first_rows(opened, file, name, rows, message):
    environment, _ = opened({}, rows, grader=f"exact,{file}:{name}")
    with pytest.raises(ConfigError, match=rf"(?s)--env: jsonl: {message}"):
        check_functions(environment, LONG)


@pytest.mark.processes
def test_functions_are_tried_on_held_out_rows_too(opened, file, tmp_path):
    environment, _ = opened({}, grader=f"{file}:of_level")
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text('{"prompt": "1=", "answer": "1"}')
    environment = PromptAnswers(
        environment.path, str(held_out), grader=environment.grader
    )
    check_functions(environment, LONG, ("train",))
    with pytest.raises(ConfigError, match=r"'1' to eval task 0, '1=', could not"):
        check_functions(environment, LONG)


@pytest.mark.processes
def test_a_slow_function_is_stopped(opened, file):
    environment, _ = opened({}, grader=f"{file}:slow")
    with pytest.raises(
        ConfigError, match=r"(?s)\(timeout\).*raise the option reward-d"
    ):
        check_functions(environment, 1.0)


@pytest.mark.processes
def test_a_good_function_passes(opened, file):
    environment, _ = opened({}, [ROW] * 5, grader=f"{file}:good", weights=2)
    check_functions(environment, LONG)
