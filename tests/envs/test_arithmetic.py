import itertools
import pickle
import re
from dataclasses import replace

import pytest

from jaxrl_post.envs import Message
from jaxrl_post.envs.tasks.arithmetic import LEVELS, Arithmetic


def prompt(task) -> str:
    (message,) = task.messages
    assert message.role == "user"
    return message.content


def grade(environment, task, text) -> float:
    step = environment.step(task, (*task.messages, Message("assistant", text)))
    assert step.done
    assert step.messages == ()
    return step.reward


def find(environment, text):
    for split in ("train", "eval"):
        for task in environment.tasks(split):
            if prompt(task) == text:
                return task
    raise AssertionError(f"{text} is in neither split")


@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_those_of_python(level):
    environment = Arithmetic.at_level(level)
    for task in itertools.chain(
        environment.tasks("train")[:200], environment.tasks("eval")[:50]
    ):
        # Python's own grammar is the oracle; leading zeros would not parse.
        sides = prompt(task).removesuffix("=").split(">")
        assert task.reference == str(max(eval(side) for side in sides))
        assert environment.demonstration(task) == task.reference
        assert grade(environment, task, task.reference) == 1.0


@pytest.mark.parametrize(
    ("level", "pattern", "sizes"),
    [
        (1, r"\d\+\d=", 100),
        (2, r"\d[+-]\d=", 200),
        (3, r"\d{1,2}[+-]\d{1,2}=", 20_000),
    ],
)
def test_small_spaces_are_split_without_a_rest(level, pattern, sizes):
    environment = Arithmetic.at_level(level, train_size=10**6, eval_size=10**6)
    train, held_out = (
        [prompt(task) for task in environment.tasks(split)]
        for split in ("train", "eval")
    )
    assert len(set(train)) == len(train)
    assert len(set(held_out)) == len(held_out)
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == sizes
    assert all(re.fullmatch(pattern, text) for text in train + held_out)
    # A hash splits one to nine; sqrt(n * 0.09) is its standard deviation.
    assert abs(len(held_out) - sizes / 10) < 4 * (sizes * 0.09) ** 0.5


def test_large_spaces_are_drawn_from_and_stay_disjoint():
    environment = Arithmetic.at_level(5, train_size=10**9, eval_size=10**6)
    train, held_out = environment.tasks("train"), environment.tasks("eval")
    assert (len(train), len(held_out)) == (10**9, 10**6)
    seen = {prompt(task) for task in train[:1000]}
    assert len(seen) == 1000
    assert not seen & {prompt(task) for task in held_out[:500]}
    assert all(re.fullmatch(r"\d{1,3}[-+*]\d{1,3}[-+*]\d{1,3}=", text) for text in seen)


def test_operands_and_operations_are_uniform():
    tasks = Arithmetic.at_level(5).tasks("train")[:2000]
    operations = [sign for task in tasks for sign in re.findall(r"[-+*]", prompt(task))]
    operands = [int(n) for task in tasks for n in re.findall(r"\d+", prompt(task))]
    for sign in "+-*":
        # Binomial(4000, 1/3): mean 1333.3, standard deviation 29.8.
        assert abs(operations.count(sign) - 4000 / 3) < 4 * 29.8
    # Uniform on 0..999: mean 499.5, deviation 288.7 / sqrt(6000) = 3.7.
    assert abs(sum(operands) / len(operands) - 499.5) < 4 * 3.7
    assert min(operands) == 0
    assert max(operands) == 999


@pytest.mark.parametrize("operations", ["+", "-", "*", "+-", "+*", "-*", "+-*"])
def test_no_split_of_the_smallest_spaces_is_empty(operations):
    environment = Arithmetic(operations=operations, terms=2, digits=1)
    assert len(environment.tasks("eval")) >= 1


def test_what_is_held_out_does_not_depend_on_seed_or_level():
    held_out = {prompt(t) for t in Arithmetic.at_level(1, seed=0).tasks("eval")}
    assert held_out == {prompt(t) for t in Arithmetic.at_level(1, seed=9).tasks("eval")}
    for level, seed in ((2, 5), (3, 0)):
        train = Arithmetic.at_level(level, seed=seed, train_size=5000).tasks("train")
        assert not held_out & {prompt(task) for task in train}


def test_tasks_depend_on_seed_and_index_alone():
    # Written down, so that a change of the generator is a decision and not an accident.
    assert [prompt(t) for t in Arithmetic.at_level(1).tasks("train")[:4]] == LEVEL_1
    assert [prompt(t) for t in Arithmetic.at_level(4).tasks("train")[:4]] == LEVEL_4
    for environment in (Arithmetic.at_level(2), Arithmetic.at_level(4)):
        again = pickle.loads(pickle.dumps(environment))
        shorter = replace(environment, train_size=20, eval_size=5)
        other = replace(environment, seed=1)
        first = list(environment.tasks("train")[:20])
        assert first == list(again.tasks("train")[:20])
        assert first == list(shorter.tasks("train"))
        assert [prompt(t) for t in first] != [
            prompt(t) for t in other.tasks("train")[:20]
        ]


LEVEL_1 = ["6+5=", "8+7=", "6+6=", "0+8="]
LEVEL_4 = ["51-46-40=", "28+30-92=", "45+55+58=", "84+72+40="]


def test_only_the_canonical_integer_is_right():
    environment = Arithmetic(operations="+-", terms=2, digits=1)
    task = find(environment, "7+5=")
    for right in ("12", " 12", "12\n", "\t12 \n"):
        assert grade(environment, task, right) == 1.0
    for wrong in ("", "13", "+12", "012", "12.", "12.0", "1 2", "7+5=12", "-12", "١٢"):
        assert grade(environment, task, wrong) == 0.0
    negative, zero = find(environment, "3-7="), find(environment, "7-7=")
    assert grade(environment, negative, "-4") == 1.0
    assert grade(environment, negative, "- 4") == 0.0
    assert grade(environment, zero, "0") == 1.0
    assert grade(environment, zero, "-0") == 0.0


@pytest.mark.parametrize(
    ("text", "well_formed"),
    [(text, 1.0) for text in ("12", "-4", "0", "9" * 500)]
    + [(text, 0.0) for text in ("-0", "007", "", "-", "--4", "4-", "1e3", "1_0")]
    + [(text, 0.0) for text in ("\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT THREE}")],
)
def test_well_formed_says_whether_an_integer_was_answered(text, well_formed):
    environment = Arithmetic()
    task = environment.tasks("train")[0]
    step = environment.step(task, (Message("assistant", text),))
    assert step.metrics == {"correct": 0.0, "well_formed": well_formed}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": ""}, r"operations must be distinct .* '\+-\*>', got ''"),
        ({"operations": "+/"}, r"operations must be distinct .*, got '\+/'"),
        ({"operations": "++"}, r"operations must be distinct .*, got '\+\+'"),
        ({"terms": 1}, r"terms must be an integer in \[2, 8\], got 1"),
        ({"digits": 10}, r"digits must be an integer in \[1, 9\], got 10"),
        ({"train_size": 0}, r"train_size must be an integer in \[1, .*\], got 0"),
        ({"eval_size": -3}, r"eval_size must be an integer in \[1, .*\], got -3"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic(**options)


def test_unknown_level_says_which_there_are():
    with pytest.raises(ValueError, match=r"one of \[0, 1, 2, 3, 4, 5\], got 6"):
        Arithmetic.at_level(6)


def test_slips_are_the_first_number_in_the_share_that_was_asked_for():
    environment = Arithmetic.at_level(0, slips=0.3)
    tasks = environment.tasks("train")[:2000]
    wrong = 0
    for task in tasks:
        answer = environment.demonstration(task)
        first = prompt(task).partition(">")[0]
        assert answer in (task.reference, first)
        wrong += answer != task.reference
    # A slip is wrong unless the first number is the largest, one time in three:
    # binomial(2000, 0.3 * 2 / 3) has mean 400 and standard deviation 18.
    assert abs(wrong - 400) < 4 * 18
    # The rewarded answers do not slip.
    assert grade(environment, tasks[0], tasks[0].reference) == 1.0
    with pytest.raises(ValueError, match=r"slips must be a share in \[0, 1\], got 2"):
        Arithmetic(slips=2.0)


def test_the_largest_of_three_numbers():
    tasks = Arithmetic.at_level(0).tasks("eval")[:50]
    for task in tasks:
        numbers = [int(n) for n in prompt(task).removesuffix("=").split(">")]
        assert len(numbers) == 3
        assert task.reference == str(max(numbers))


def test_a_sum_binds_tighter_than_a_maximum():
    environment = Arithmetic("+>", terms=3, digits=1, eval_size=1000)
    tasks = [*environment.tasks("train"), *environment.tasks("eval")]
    answers = {prompt(task): task.reference for task in tasks}
    assert answers["1+4>3="] == "5"
    assert answers["9>1+4="] == "9"
