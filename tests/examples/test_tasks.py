"""Held out means held out, and no task that is drawn is too long."""

import logging
from dataclasses import dataclass

import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Message, Step, Task, TaskSequence
from jaxrl_post.examples import tasks as tasks_of_a_run
from jaxrl_post.examples.tasks import TaskSets, distinct, fitting_prompts, open_tasks

TOKENIZER = Tokenizer.train(["1+1=2"])


@dataclass(frozen=True)
class Prompts:
    """Prompts of one's choice."""

    train: tuple[str, ...] = ("1", "1+1=")
    eval: tuple[str, ...] = ("2",)
    lazy: bool = True
    name: str = "prompts"

    def tasks(self, split):
        texts = self.train if split == "train" else self.eval
        made = TaskSequence(
            len(texts), lambda i: Task(i, (Message("user", texts[i]),), "")
        )
        return made if self.lazy else tuple(made)

    def step(self, task, conversation):
        return Step(0.0, done=True)

    def demonstration(self, task):
        return "7"


def prompts(tasks):
    return [task.messages[0].content for task in tasks]


def fitted(environment, limit, context=99, tokenizer=None):
    return fitting_prompts(
        open_tasks(environment, "fail"),
        tokenizer or TOKENIZER,
        limit,
        "--option",
        context=context,
    )


def test_equal_prompts_are_held_out_once(caplog):
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        found = open_tasks(Prompts(eval=("2", "3", "2", "2")), "fail")
    assert prompts(found.eval) == ["2", "3"]
    assert caplog.messages == [
        "2 of 4 eval tasks of prompts left out: an earlier one has the same prompt"
    ]
    assert distinct(Prompts(train=("1", "1", "2", "3")).tasks("train"), 2) == [0, 2]


OVERLAP = Prompts(train=("1", "2", "1", "3"), eval=("2", "4"))


def test_a_prompt_that_is_trained_on_and_held_out_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"--data.on-overlap: 1 of 4 train tasks of prompts have the prompt of a "
        r"held-out task; .* --data.on-overlap drop",
    ):
        open_tasks(OVERLAP, "fail")


def test_an_overlap_is_left_out_of_training_or_allowed(caplog):
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        found = open_tasks(OVERLAP, "drop")
    assert prompts(found.train) == ["1", "1", "3"]
    assert prompts(found.eval) == ["2", "4"]
    assert caplog.messages == [
        "1 of 4 train tasks of prompts left out: their prompts are held out "
        "(--data.on-overlap drop)"
    ]
    assert prompts(open_tasks(OVERLAP, "allow").train) == ["1", "2", "1", "3"]


def test_an_overlap_of_everything_leaves_nothing_to_drop():
    with pytest.raises(ConfigError, match=r"all 2 train tasks of .* none is left"):
        open_tasks(Prompts(train=("2", "2")), "drop")


def test_the_same_text_of_another_role_is_another_prompt():
    class Roles(Prompts):
        def tasks(self, split):
            role = "system" if split == "train" else "user"
            return (Task(0, (Message(role, "2"), Message("user", "2")), ""),)

    assert len(open_tasks(Roles(), "fail").train) == 1


@pytest.mark.parametrize("lazy", [True, False])
def test_prompts_that_are_too_long_are_left_out_and_counted(caplog, lazy):
    environment = Prompts(train=("1", "1" * 50, "1+1="), lazy=lazy)
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        found, limit = fitted(environment, 10)
    assert limit == 10
    assert prompts(found.train) == ["1", "1+1="]
    assert caplog.messages == [
        "1 of 3 train tasks of prompts left out: a prompt of more tokens than "
        "--option 10"
    ]
    assert prompts(found.tasks("eval")) == ["2"]


def test_the_last_of_many_tasks_is_measured_too():
    texts = ("1",) * 20_000 + ("1" * 50,)
    found, _ = fitted(Prompts(train=texts), 10)
    assert len(found.train) == 20_000


def test_without_a_limit_it_is_the_longest_prompt():
    environment = Prompts(train=("1+1=", "1" * 30, "1", "12" * 5))
    _, limit = fitted(environment, 0)
    assert limit == max(
        len(TOKENIZER.encode(text, special=True)) for text in environment.train
    )


def test_without_a_limit_the_context_is_one(caplog):
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        found, limit = fitted(Prompts(train=("1+1=", "1" * 50)), 0, context=20)
    assert prompts(found.train) == ["1+1="]
    assert limit == 4
    assert "of more tokens than 20, which --option leaves of the" in caplog.text


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [(0, ", which is left of the model's context; lower the"), (3, "; raise the")],
)
def test_a_split_of_which_nothing_fits_is_refused(limit, remedy):
    with pytest.raises(
        ConfigError,
        match=r"--option: all 1 eval tasks of prompts have a prompt of more than 3 "
        f"tokens{remedy} option",
    ):
        fitted(Prompts(eval=("2222",)), limit, context=3)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_empty_split_is_an_empty_data_set(split):
    with pytest.raises(
        ConfigError, match=rf"--env: prompts has no {split} tasks; the data set is"
    ):
        open_tasks(Prompts(**{split: ()}), "fail")


def test_an_endless_number_of_tasks_is_refused():
    class Endless(Prompts):
        def tasks(self, split):
            return TaskSequence(2**32, lambda i: Task(i, (), ""))

    with pytest.raises(
        ConfigError, match=r"has 4,294,967,296 train .*'\?train_size=1000000'"
    ):
        TaskSets.of(Endless())


def test_more_tasks_than_are_kept_are_made_again(monkeypatch):
    monkeypatch.setattr(tasks_of_a_run, "KEPT_TASKS", 2)
    found, _ = fitted(Prompts(train=("1", "1" * 50, "1+1=")), 10)
    assert isinstance(found.train, TaskSequence)
    assert prompts(found.train) == ["1", "1+1="]


def test_a_prompt_that_a_template_refuses_is_named():
    tokenizer = Tokenizer(
        TOKENIZER.backend,
        stop_ids=TOKENIZER.stop_ids,
        chat_template="{% if messages[0].content == '1+1=' %}"
        "{{ raise_exception('no sums') }}{% endif %}{{ messages[0].content }}",
    )
    with pytest.raises(ConfigError, match=r"--env: train task 1 of prompts: .*no sums"):
        fitted(Prompts(), 10, tokenizer=tokenizer)
