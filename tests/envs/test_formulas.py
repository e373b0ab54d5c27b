"""Formulas in words, as problems with Python at hand and as functions to write."""

import itertools
import random

import pytest

from jaxrl_post.envs import Answer, Message, make
from jaxrl_post.envs.tasks.held_out import split_of
from jaxrl_post.envs.tasks.programs.formulas import drawn
from tests.envs.sandbox import available

NAMES = "abcdef"


def formulas(count):
    """Formulas whose names are all different."""
    rng = random.Random(1)
    for number in range(count):
        names = itertools.cycle(rng.sample(NAMES, len(NAMES)))
        yield drawn(rng, names.__next__, 2 + number % 4)


def at(point):
    """Values of the names; others at each point."""
    rng = random.Random(point)
    return {name: rng.randrange(2, 10**6) for name in NAMES}


def test_python_computes_the_value_and_needs_each_parenthesis():
    for formula in formulas(400):
        code = formula.python()
        assert eval(code, at(0)) == formula.value(at(0))
        assert "(" in code
        # Without one of its pairs it is another formula.
        for start in (i for i, each in enumerate(code) if each == "("):
            without = removed(code, start)
            assert any(eval(code, at(i)) != eval(without, at(i)) for i in range(8))


def removed(code, start):
    """A formula without the pair of parentheses that begins at `start`."""
    depth = 0
    for end in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[end], 0)
        if depth == 0:
            return code[:start] + code[start + 1 : end] + code[end + 1 :]
    raise AssertionError(code)


def test_words_tell_formulas_apart():
    told = {}
    for formula in formulas(4000):
        assert told.setdefault(formula.words(), formula) == formula


@pytest.mark.parametrize("name", ["calculate", "functions"])
def test_no_text_is_in_both_splits(name):
    environment = make(f"{name}?train_size=1000&eval_size=300")
    train, held_out = (
        {task.messages[0].content for task in environment.tasks(split)}
        for split in ("train", "eval")
    )
    assert len(train) > 600
    assert len(held_out) > 150
    assert {split_of(text) for text in train} == {"train"}
    assert {split_of(text) for text in held_out} == {"eval"}
    again = make(f"{name}?train_size=1000&eval_size=300")
    assert again.tasks("train")[7] == environment.tasks("train")[7]
    other = make(f"{name}?train_size=1000&eval_size=300&seed=1")
    assert other.tasks("train")[7].messages != environment.tasks("train")[7].messages


def test_the_tests_of_a_function_find_what_has_no_parentheses():
    right, slipped = (
        make(f"functions?slips={slips}&eval_size=300").tasks("eval") for slips in (0, 1)
    )
    for one, other in zip(right, slipped, strict=True):
        assert one.messages == other.messages
        for code, expected in ((one.data["shown"], True), (other.data["shown"], False)):
            found = [
                eval(code, dict(zip("abc", test["arguments"], strict=True)))
                == test["result"]
                for test in one.data["tests"]
            ]
            assert all(found) == expected, (one.messages, code)


@pytest.mark.parametrize("name", ["calculate", "functions"])
def test_slips_are_a_share_of_the_texts(name):
    tasks = make(f"{name}?slips=0.7").tasks("eval")
    share = sum("(" not in task.data["shown"] for task in tasks) / len(tasks)
    assert 0.6 < share < 0.8


@pytest.mark.parametrize("name", ["calculate", "functions"])
@pytest.mark.parametrize("option", ["operations=1", "operations=7", "slips=2"])
def test_options_outside_their_range(name, option):
    with pytest.raises(ValueError, match=option.partition("=")[0]):
        make(f"{name}?{option}")


@pytest.mark.processes
def test_a_function_is_called():
    environment = make(f"functions?sandbox={available.require('bubblewrap')}")
    environment.prepare()
    task = environment.tasks("eval")[0]

    def reward(text):
        answer = Message("assistant", text)
        return environment.step(task, (*task.messages, answer)).reward

    right = environment.demonstration(task)
    assert right == "def f(a, b, c): return a-(3-c)"
    assert reward(right) == 1.0
    assert reward(f"So:\n```python\n{right}\n```\n") == 1.0
    assert reward("def f(a, b, c): return a-3-c") == 0.0
    assert reward(right.replace("f(", "g(", 1)) == 0.0
    assert reward("a-(3-c)") == 0.0


@pytest.mark.processes
def test_a_problem_is_solved_with_python():
    environment = make(f"calculate?sandbox={available.require('bubblewrap')}")
    environment.prepare()
    task = environment.tasks("eval")[0]
    shown = environment.demonstration(task)
    assert shown.tool_calls[0].arguments == '{"code": "96*(12+83)"}'
    for said, expected in (("9120", 1.0), ("It is 9,120.", 1.0), ("9121", 0.0)):
        session = environment.open(task)
        step = session.step(Answer("assistant", "", tool_calls=shown.tool_calls))
        assert not step.done
        assert step.messages[0].content == "9120"
        step = session.step(Answer("assistant", said))
        session.close()
        assert step.done
        assert step.reward == expected
    # A training prompt may hold the call; then the value is what to say.
    for task in environment.tasks("train"):
        if len(task.messages) > 1:
            assert task.messages[-1].content == task.reference
            assert environment.demonstration(task) == task.reference
            break
    else:
        raise AssertionError("no prompt held a call")
