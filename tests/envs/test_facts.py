"""Questions about people, whose answers a search finds."""

import pickle

import pytest

from jaxrl_post.envs import Answer, Message, StatefulEnvironment, make
from jaxrl_post.envs.tasks.facts import facts


def names(environment, split, count=None):
    tasks = environment.tasks(split)
    return {task.data["name"] for task in tasks[:count]}


def played(environment, task, *turns):
    """The steps of an episode."""
    session = environment.open(task)
    try:
        return [session.step(turn) for turn in turns]
    finally:
        session.close()


def test_who_searches_is_told_the_answer():
    environment = pickle.loads(pickle.dumps(facts()))
    assert isinstance(environment, StatefulEnvironment)
    environment.prepare()
    for task in environment.tasks("eval"):
        searching = environment.demonstration(task)
        [call] = searching.tool_calls
        assert call.name == "search"
        turn = Answer("assistant", "", tool_calls=searching.tool_calls)
        answer = Answer("assistant", f"in {task.reference}")
        found, judged = played(environment, task, turn, answer)
        [message] = found.messages
        name = task.data["name"]
        assert f"[1] {name} lives in {task.reference}." in message.content
        assert message.content.count("lives in") == 2
        assert (judged.reward, judged.metrics["correct"]) == (2 / 3, 0.0)
    [judged] = played(environment, task, Answer("assistant", task.reference))
    assert judged.reward == 1.0


def test_nobody_is_asked_about_in_both_splits():
    environment = make("facts")
    train, held_out = names(environment, "train"), names(environment, "eval")
    assert not train & held_out
    assert len(held_out) == len(environment.tasks("eval")) == 99
    assert len(train | held_out) == 400
    assert names(make("facts?eval_size=10"), "eval") < held_out
    assert make("facts?seed=1").tasks("train")[3] != environment.tasks("train")[3]


def test_half_of_the_training_prompts_hold_the_search():
    environment = make("facts?passages=1")
    begun = 0
    for task in environment.tasks("train")[:400]:
        if len(task.messages) > 1:
            begun += 1
            question, asked, found = task.messages
            [call] = asked.tool_calls
            assert question.content == f"Where does {task.data['name']} live?"
            assert found.tool_call_id == call.id
            town = f"{task.data['name']} lives in {task.reference}."
            assert found.content == f"[1] {town}"
            assert environment.demonstration(task) == task.reference
    assert 160 < begun < 240


@pytest.mark.parametrize(
    ("slips", "least", "most"), [(0, 0, 0), (0.6, 100, 140), (1, 200, 200)]
)
def test_slips_are_first_turns_without_a_search(slips, least, most):
    environment = make(f"facts?slips={slips}")
    first = [t for t in environment.tasks("train")[:800] if len(t.messages) == 1][:200]
    shown = [environment.demonstration(task) for task in first]
    said = [each for each in shown if not isinstance(each, Message)]
    assert least <= len(said) <= most
    assert set(said) <= {"unknown"}
    [judged] = played(environment, first[0], Answer("assistant", "unknown"))
    assert judged.reward == 0.0


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("slips=2", r"slips must be a share in \[0, 1\], got 2"),
        ("passages=0", r"passages must be an integer in \[1, 10\], got 0"),
        ("train_size=0", r"train_size must be an integer in"),
    ],
)
def test_options_are_checked(option, told):
    with pytest.raises(ValueError, match=told):
        make(f"facts?{option}")
