import pickle
import subprocess
import sys

import pytest

from jaxrl_post.envs import Message, Step, Task, TaskSequence, response
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.envs.tasks.gsm8k import GSM8K
from jaxrl_post.envs.tasks.mathematics.answers import final_answer
from jaxrl_post.jsonl import gather


def tasks(size: int) -> TaskSequence:
    return TaskSequence(size, lambda i: Task(i, (), str(i)))


def test_sequence_is_made_on_demand():
    made = []

    def make(index: int) -> Task:
        made.append(index)
        return Task(index, (), "")

    sequence = TaskSequence(10**9, make)
    assert len(sequence) == 10**9
    assert sequence[-1].id == 10**9 - 1
    assert made == [10**9 - 1]


def test_sequence_has_the_indices_of_a_list():
    expected = [Task(i, (), str(i)) for i in range(7)]
    sequence = tasks(7)
    assert list(sequence) == expected
    assert list(sequence[1:6:2]) == expected[1:6:2]
    assert list(sequence[::-1][2:4]) == expected[::-1][2:4]
    assert expected[3] in sequence
    with pytest.raises(IndexError):
        sequence[7]
    with pytest.raises(IndexError):
        sequence[-8]


@pytest.mark.parametrize(
    ("conversation", "last"), [((), "nothing"), ((Message("user", "?"),), "user")]
)
def test_response_wants_an_assistant_turn(conversation, last):
    with pytest.raises(ValueError, match=f"assistant message, got {last}: append"):
        response(conversation)


def test_values_pickle():
    task = Task(3, (Message("user", "?"),), "4", {"entry": {"a": [1]}})
    step = Step(1.0, done=True, metrics={"correct": 1.0})
    assert pickle.loads(pickle.dumps((task, step))) == (task, step)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: Message("robot", ""), r"role must be one of (.*), got 'robot'"),
        (
            lambda: GSM8K("a", extraction="loose"),
            "must be 'flexible' or 'strict', got 'loose'",
        ),
        (
            lambda: GSM8K("a", on_bad_row="log"),
            "on_bad_row must be 'fail' or 'skip', got 'log'",
        ),
        (
            lambda: final_answer("", extraction=""),
            "must be 'flexible' or 'strict', got ''",
        ),
        (
            lambda: gather("a", [], None, on_bad_row=""),
            "must be 'fail' or 'skip', got ''",
        ),
        (
            lambda: Arithmetic(terms="2"),
            r"terms must be an integer in \[2, 8\], got '2'",
        ),
        (lambda: Arithmetic(seed=0.5), "seed must be an integer, got 0.5"),
    ],
)
def test_values_outside_their_type_are_named(made, told):
    with pytest.raises(ValueError, match=told):
        made()


@pytest.mark.processes
def test_importing_environments_imports_neither_jax_nor_numpy_nor_an_extra():
    program = (
        "import sys, pkgutil, importlib, jaxrl_post.envs as envs\n"
        "for each in pkgutil.walk_packages(envs.__path__, 'jaxrl_post.envs.'):\n"
        "    importlib.import_module(each.name)\n"
        "found = {'jax', 'numpy', 'math_verify', 'reasoning_gym'} & set(sys.modules)\n"
        "assert 'jaxrl_post.envs.workers.worker' in sys.modules\n"
        "sys.exit(f'imported {found}' if found else 0)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
