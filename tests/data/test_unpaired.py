"""Judged answers: how they are read, made from pairs, and given to other prompts."""

import json
from collections import Counter

import pytest

from jaxrl_post.data.held_out import split
from jaxrl_post.data.preferences import (
    JudgedAnswer,
    Message,
    Preference,
    read_preferences,
)
from jaxrl_post.data.unpaired import answers_to_others, unpaired

USER, ANSWER = {"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "A"}
ROW = {"prompt": "Hi!", "completion": "A", "label": True}
ONE = JudgedAnswer((Message("user", "Hi!"),), "A", True, "Hi!")


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows: dict):
        path = tmp_path / "judged.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def judged(prompt: str, answer: str, desirable: bool = True) -> JudgedAnswer:
    return JudgedAnswer((Message("user", prompt),), answer, desirable, prompt)


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        ROW | {"prompt": [USER], "note": 3},
        ROW | {"completion": [ANSWER]},
        ROW | {"prompt": [USER], "completion": [USER, ANSWER]},
    ],
)
def test_a_judged_answer_as_text_and_as_messages(jsonl, row):
    answers, report = read_preferences(jsonl(row, row | {"label": False}, row))
    assert answers == [ONE, judged("Hi!", "A", False), ONE]
    assert (report.num_rows, report.num_bad) == (3, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": 1}, r"field 'label' must be bool \(true: desirable\), got int"),
        ({"label": None}, r"field 'label' must be bool \(true: .*\), got NoneType"),
        ({"completion": " "}, "the answer is empty"),
        ({"completion": 3}, "'completion' must be str or list of messages, got int"),
        ({"completion": [USER]}, "'completion' must end with role 'assistant', got 'u"),
        ({"prompt": ""}, "the prompt is empty"),
    ],
)
def test_a_bad_row_fails_with_its_line(jsonl, change, reason):
    with pytest.raises(ValueError, match=rf"judged\.jsonl:2: .*{reason}"):
        read_preferences(jsonl(ROW, ROW | change))


def test_pairs_and_judged_answers_do_not_mix(jsonl):
    pair = {"prompt": "Hi!", "chosen": "A", "rejected": "B"}
    with pytest.raises(ValueError, match=":2: no field 'completion', which line 1 has"):
        read_preferences(jsonl(ROW, pair))


def test_the_split_keeps_answers_to_one_prompt_together():
    answers = [judged(f"{i}?", text) for i in range(100) for text in "AB"]
    train, held_out = split(answers)
    assert len(train) + len(held_out) == 200
    assert not {each.group for each in train} & {each.group for each in held_out}


def test_pairs_are_taken_apart_and_equal_answers_count_once():
    def pair(prompt, chosen, rejected):
        return Preference((Message("user", prompt),), chosen, rejected, prompt)

    # B is worse than A and better than C, so it is judged both ways.
    pairs = [pair("1?", "A", "B"), pair("1?", "A", "C"), pair("1?", "B", "C")]
    assert unpaired([*pairs, pair("2?", "A", "B")]) == [
        judged("1?", "A"),
        judged("1?", "B", False),
        judged("1?", "C", False),
        judged("1?", "B"),
        judged("2?", "A"),
        judged("2?", "B", False),
    ]


@pytest.mark.parametrize(
    "sizes", [[1, 1], [2, 2], [1, 2, 1], [3, 1, 2], [2, 3, 1, 4], [1] * 7]
)
def test_every_answer_is_given_once_and_to_another_prompt(sizes):
    # Interleaved, so that the order of the file is not the prompts' order.
    answers = [
        judged(str(group), f"{group}.{place}")
        for place in range(max(sizes))
        for group, size in enumerate(sizes)
        if place < size
    ]
    given = answers_to_others(answers)
    assert Counter(given) == Counter(each.answer for each in answers)
    for each, other in zip(answers, given, strict=True):
        assert other.split(".")[0] != each.group


@pytest.mark.parametrize(
    ("sizes", "got"), [([1], "1 of 1"), ([3, 2], "3 of 5"), ([1, 4, 2], "4 of 7")]
)
def test_a_prompt_with_more_than_half_of_the_answers_is_refused(sizes, got):
    answers = [
        judged(str(group), str(place))
        for group, size in enumerate(sizes)
        for place in range(size)
    ]
    with pytest.raises(
        ValueError, match=rf"no prompt may have more than half .* got {got} answers"
    ):
        answers_to_others(answers)
