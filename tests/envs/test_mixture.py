"""Environments joined to one: shares, evaluation in turn, and whose answer it is."""

import json
import pickle
from collections import Counter

import pytest

from jaxrl_post import envs
from jaxrl_post.envs import Answer
from jaxrl_post.envs.env import (
    AgentEnvironment,
    NeedsTurns,
    StatefulEnvironment,
    StatelessEnvironment,
    Step,
)
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.envs.tasks.guess import Guess
from jaxrl_post.envs.tasks.mixture import Part, mixture
from jaxrl_post.envs.tasks.nim import Nim
from jaxrl_post.envs.tools import ToolEnvironment, make_toolset
from tests.programs.agent_letters import Letters

SUMS, PRODUCTS = Arithmetic.at_level(1), Arithmetic(operations="*")


def parts_of(tasks) -> list[int]:
    return [task.data["part"] for task in tasks]


def test_an_epoch_has_every_task_and_shares_by_weight():
    joined = mixture([Part(SUMS, 1, "sums"), Part(Guess(), 3, "guess")])
    tasks = joined.tasks("train")
    few, many = len(SUMS.tasks("train")), len(Guess().tasks("train"))
    # The larger need decides: a quarter of the tasks are sums, three quarters guesses.
    size = max(4 * few, -(-many * 4 // 3))
    assert len(tasks) == pytest.approx(size, abs=1)
    counts = Counter(parts_of(tasks))
    assert counts[1] / counts[0] == pytest.approx(3, rel=0.02)
    for number, part in enumerate((SUMS, Guess())):
        shown = Counter(
            task.data["task"].id for task in tasks if task.data["part"] == number
        )
        assert set(shown) == {task.id for task in part.tasks("train")}
        # No task comes more than once more than another.
        assert max(shown.values()) - min(shown.values()) <= 1
    assert [task.id for task in tasks] == [*range(len(tasks))]


def test_a_size_takes_tasks_at_equal_distances():
    joined = mixture([Part(SUMS, 1, "a"), Part(PRODUCTS, 1, "b")], size=10)
    tasks = joined.tasks("train")
    own = SUMS.tasks("train")
    assert parts_of(tasks) == [0, 1] * 5
    expected = [own[i * len(own) // 5].messages for i in range(5)]
    assert [task.messages for task in tasks[::2]] == expected


def test_the_first_tasks_are_of_all_environments_by_weight():
    joined = mixture([Part(SUMS, 3, "sums"), Part(Guess(), 1, "guess")], size=400)
    parts = parts_of(joined.tasks("train"))
    for first in (4, 40, 100):
        assert parts[:first].count(0) == 3 * first // 4


def test_the_evaluation_takes_them_in_turn_until_each_has_shown_all():
    sizes = 2, 5, 3
    parts = [Part(Guess(size=7, eval_size=size), 1, f"g{size}") for size in sizes]
    tasks = mixture(parts).tasks("eval")
    assert parts_of(tasks) == [0, 1, 2, 0, 1, 2, 1, 2, 1, 1]
    for number, part in enumerate(parts):
        own = [task.data["task"] for task in tasks if task.data["part"] == number]
        assert own == list(part.environment.tasks("eval"))
    with pytest.raises(IndexError):
        tasks[10]


def test_of_environments_that_judge_one_answer_a_mixture_does_too():
    joined = pickle.loads(
        pickle.dumps(mixture([Part(SUMS, 1, "a"), Part(PRODUCTS, 1, "b")]))
    )
    assert isinstance(joined, StatelessEnvironment)
    assert joined.name == "a+b"
    for task in (joined.tasks("train")[0], joined.tasks("train")[-1]):
        assert task.part == "ab"[task.data["part"]]
        for said, reward in ((task.reference, 1.0), ("no", 0.0)):
            step = joined.step(task, (*task.messages, Answer("assistant", said)))
            assert step.reward == reward
        assert joined.demonstration(task) == task.reference
    # So it can be given tools.
    tools = ToolEnvironment(joined, (make_toolset("jaxrl_post.jsonl:is_unicode"),))
    assert tools.tasks("eval")[0].tools


def test_sessions_and_single_answers_mix():
    joined = mixture(
        [Part(SUMS, 1, "sums"), Part(Guess(size=7, guesses=3), 1, "guess")]
    )
    assert isinstance(joined, StatefulEnvironment)
    assert not isinstance(joined, StatelessEnvironment)
    sums = next(task for task in joined.tasks("eval") if task.data["part"] == 0)
    session = joined.open(sums)
    step = session.step(Answer("assistant", sums.reference))
    assert (step.reward, step.done) == (1.0, True)
    session.close()
    guess = next(task for task in joined.tasks("eval") if task.data["part"] == 1)
    session, own = joined.open(guess), Guess(size=7, guesses=3).open(guess.data["task"])
    wrong = "1" if guess.reference != "1" else "2"
    for said in (wrong, guess.reference):
        step, alone = (
            session.step(Answer("assistant", said)),
            own.step(Answer("assistant", said)),
        )
        assert (step.reward, step.done, step.messages) == (
            alone.reward, alone.done, alone.messages
        )  # fmt: skip
    assert step.done


def test_a_file_names_environments_weights_and_names(tmp_path):
    path = tmp_path / "mixture.json"
    path.write_text(
        json.dumps(
            [
                {"env": "arithmetic?level=1", "weight": 3, "name": "sums"},
                {"env": "guess?size=7"},
            ]
        )
    )
    joined = envs.make(f"mixture?path={path}&size=8")
    assert [(part.name, part.weight) for part in joined.parts] == [
        ("sums", 3),
        ("guess(7,3)", 1),
    ]
    assert Counter(parts_of(joined.tasks("train"))) == {0: 6, 1: 2}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({}, "must be a JSON list of environments"),
        ([], "at least one environment, got none"),
        ([{"weight": 1}], "environment 0 must have the field 'env'"),
        ([{"env": "guess", "share": 1}], r"fields \['share'\]; there are env, weight"),
        (
            [{"env": "guess", "weight": 0}],
            "weight of 'guess.*' must be positive, got 0",
        ),
        ([{"env": "guess", "weight": "2"}], "must be a number, got '2'"),
        ([{"env": "guess"}, {"env": "guess"}], "names of their own"),
        ([{"env": "guss"}], "environment 0: no environment 'guss'"),
        ([{"env": "mixture?path=x"}], "environment 0 is a mixture"),
    ],
)
def test_bad_files_are_named(tmp_path, rows, told):
    path = tmp_path / "mixture.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=told):
        envs.make(f"mixture?path={path}")


@pytest.mark.parametrize(
    ("written", "told"),
    [("[", "must be a JSON list: .*Expecting"), (None, "does not exist")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, written, told):
    path = tmp_path / "mixture.json"
    if written is not None:
        path.write_text(written)
    with pytest.raises(ValueError, match=f"mixture: {path} {told}"):
        envs.make(f"mixture?path={path}")


def test_agents_mix_with_agents():
    joined = mixture([Part(Letters(), 1, "letters"), Part(Nim(most=9), 1, "nim")])
    assert isinstance(joined, AgentEnvironment)
    assert not isinstance(joined, StatelessEnvironment | StatefulEnvironment)
    # Letters does not say how often it calls.
    assert isinstance(joined, NeedsTurns)
    assert joined.most_calls == Nim(most=9).most_calls
    assert mixture([Part(Letters(), 1, "letters")]).most_calls == 1
    # Its agent gets the task as its own environment has it.
    joined = mixture([Part(Letters(), 1, "loud"), Part(Letters(silent=1), 1, "quiet")])
    task = joined.tasks("eval")[3]
    assert (task.id, task.part, task.data["task"].id) == (3, "quiet", 1)
    assert joined.run(task, "http://127.0.0.1:1/v1") == Step(0.0, done=True)


def test_agents_do_not_mix_with_environments_that_answer_turns():
    told = "'letters': agents call a server of the run, and 'sums' answer turns"
    with pytest.raises(ValueError, match=told):
        mixture([Part(SUMS, 1, "sums"), Part(Letters(), 1, "letters")])


def test_sizes_that_hold_nothing_are_refused():
    for size in (1, 100_001):
        with pytest.raises(ValueError, match="size must be an integer in"):
            mixture([Part(SUMS, 1, "a"), Part(PRODUCTS, 1, "b")], size=size)


def test_the_parts_are_the_whole():
    names = "abc"
    for size in (3, 10, 11, 100):
        tasks = mixture([Part(SUMS, 1, name) for name in names], size).tasks("train")
        counts = Counter(parts_of(tasks))
        assert len(tasks) == size
        assert max(counts.values()) - min(counts.values()) <= 1
    tiny = mixture([Part(SUMS, 1, "a"), Part(PRODUCTS, 1e-9, "b")], size=4)
    assert parts_of(tiny.tasks("train")) == [0, 0, 1, 0, 0]


@pytest.mark.processes
def test_in_workers_each_task_is_judged_by_its_own_environment():
    joined = mixture([Part(SUMS, 1, "sums"), Part(Guess(size=7), 1, "guess")], size=6)
    with envs.WorkerPool(joined, 2) as pool:
        tasks = joined.tasks("train")
        found = [
            pool.submit(
                task, (*task.messages, Answer("assistant", task.reference)), task.id
            )
            for task in tasks
        ]
        steps = [outcome.result(timeout=60).step for outcome in found]
    assert [step.reward for step in steps] == [1.0] * 6
    assert [task.part for task in tasks] == ["sums", "guess"] * 3
