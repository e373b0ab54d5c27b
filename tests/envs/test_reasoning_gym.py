import pickle
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from jaxrl_post.envs import Message, WorkerPool
from jaxrl_post.envs.tasks import reasoning_gym
from jaxrl_post.envs.tasks.reasoning_gym import ReasoningGym


def small(task: str, options: Mapping[str, Any] | None = None, seed: int = 0):
    return ReasoningGym(task, options or {}, seed, train_size=20, eval_size=10)


@pytest.fixture
def library():
    return pytest.importorskip("reasoning_gym", reason="needs the extra 'envs'")


def questions(environment, split) -> list[str]:
    return [task.messages[0].content for task in environment.tasks(split)]


def grade(environment, task, text):
    return environment.step(task, (*task.messages, Message("assistant", text)))


def library_questions(library, size, **options) -> list[str]:
    dataset = library.create_dataset("chain_sum", size=size, **options)
    return [dataset[index]["question"] for index in range(size)]


def test_tasks_are_those_of_the_library(library):
    environment = small("chain_sum", {"max_terms": 2}, seed=3)
    expected = library_questions(library, 20, max_terms=2, seed=3)
    found = questions(environment, "train")
    same = [a == b for a, b in zip(found, expected, strict=True)]
    assert sum(same) >= 12, "one in five is held out"
    task = environment.tasks("train")[same.index(True)]
    entry = library.create_dataset("chain_sum", max_terms=2, seed=3)[task.id]
    assert (task.reference, task.data["entry"]) == (entry["answer"], entry)
    assert task.messages[0].role == "user"
    assert environment.demonstration(task) == entry["answer"]


def test_a_problem_is_held_out_at_every_seed_and_size(library):
    few = {"max_terms": 2, "max_digits": 1}
    held_out, train = set[str](), set[str]()
    for seed in range(3):
        environment = ReasoningGym("chain_sum", few, seed, train_size=300, eval_size=30)
        held_out.update(questions(environment, "eval"))
        train.update(questions(environment, "train"))
    assert not train & held_out
    assert len(train | held_out) > 150, "both splits have what they can of 200"
    assert len(held_out) > 20


def test_held_out_problems_are_distinct_and_as_many_as_there_are(library):
    few = {"max_terms": 2, "max_digits": 1}
    found = questions(ReasoningGym("chain_sum", few), "eval")
    every = set(library_questions(library, 4000, seed=0, **few))
    assert len(every) == 200
    assert len(found) == len(set(found))
    train = set(questions(ReasoningGym("chain_sum", few, train_size=2000), "train"))
    assert set(found) | train == every
    many = questions(small("chain_sum"), "eval")
    assert len(many) == len(set(many)) == 10


@pytest.mark.parametrize(("one_in", "split"), [(1, "train"), (10**12, "eval")])
def test_a_split_without_a_problem_is_refused(library, monkeypatch, one_in, split):
    monkeypatch.setattr(reasoning_gym, "_HELD_OUT_ONE_IN", one_in)
    environment = small("chain_sum", {"max_terms": 2, "max_digits": 1}, seed=11)
    with pytest.raises(ValueError, match="so that none is left to"):
        environment.tasks(split)


def test_the_scorer_of_the_library_judges(library):
    environment = small("chain_sum")
    task = environment.tasks("train")[0]
    right = grade(environment, task, f" {task.reference}\n")
    assert (right.reward, right.done) == (1.0, True)
    assert right.metrics == {"score": 1.0, "scorer_raised": 0.0}
    assert grade(environment, task, "no number").reward < 0.1


def test_partial_credit_is_passed_on(library):
    environment = small("letter_counting")
    task = environment.tasks("train")[0]
    # The default scorer gives len(reference) / len(answer) to one that contains it.
    text = f"it is {task.reference}"
    assert grade(environment, task, text).reward == len(task.reference) / len(text)


def test_a_scorer_that_raises_means_no_reward(library):
    environment = small("boxnet")
    task = environment.tasks("train")[0]
    step = grade(environment, task, "1")
    assert step.reward == 0.0
    assert step.metrics == {"score": 0.0, "scorer_raised": 1.0}


@pytest.mark.parametrize("error", [ImportError, MemoryError])
def test_an_error_that_says_nothing_of_the_answer_is_no_reward(
    library, monkeypatch, error
):
    environment = small("chain_sum")
    task = environment.tasks("train")[0]

    def score(self, answer, entry):
        raise error("scipy")

    monkeypatch.setattr(type(environment._dataset("eval")), "score_answer", score)
    with pytest.raises(error, match="scipy"):
        grade(environment, task, "3")


def test_a_task_of_many_right_answers_has_no_demonstration(library):
    environment = small("graph_color")
    task = environment.tasks("train")[0]
    assert task.reference == ""
    assert environment.demonstration(task) is None


@pytest.mark.processes
@pytest.mark.parametrize("name", ["word_ladder", "countdown"])
def test_scores_in_a_worker_are_those_here(library, name):
    environment = small(name)
    assert pickle.loads(pickle.dumps(environment)) == environment
    with WorkerPool(environment) as pool:
        for task in environment.tasks("eval")[:3]:
            for text in (task.reference, "nonsense", "3 + 4"):
                turn = (*task.messages, Message("assistant", text))
                outcome = pool.submit(task, turn).result(timeout=60)
                assert outcome.kind == "ok"
                assert outcome.step == environment.step(task, turn)


def test_an_unknown_task_is_answered_with_close_matches(library):
    with pytest.raises(
        ValueError, match=r"no task 'chainsum' among its 1\d\d: did you mean chain_sum"
    ):
        ReasoningGym("chainsum")
    with pytest.raises(ValueError, match=r"no task 'qqqq' .*: see its gallery"):
        ReasoningGym("qqqq")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_term": 2}, "'chain_sum' .*no option 'max_term'; it has .*max_terms"),
        (
            {"max_terms": 0},
            r"rejects .*'max_terms': 0.*: max_terms must be >= min_terms",
        ),
        ({"max_terms": "two"}, "rejects the options .*two.*not supported between"),
        ({"seed": 1}, "must not hold 'seed': it is an argument of ReasoningGym"),
        ({"size": 1}, "must not hold 'size': pass train_size and eval_size"),
    ],
)
def test_options_are_checked(library, options, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGym("chain_sum", options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, r"seed must be an integer in \[0, 1073731824\], got -1"),
        ({"seed": 2**30}, "seed must be an integer in .*, got 1073741824"),
        ({"train_size": 0}, r"train_size must be an integer in \[1, 2\*\*30\), got 0"),
        ({"eval_size": 2**30}, r"eval_size must be an integer in .*, got 1073741824"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGym("chain_sum", **arguments)


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '.*\[envs\]'"):
        ReasoningGym("chain_sum")
