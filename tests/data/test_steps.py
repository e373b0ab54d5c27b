"""Solutions in steps: the layout, what makes a row bad, and which tokens are judged."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post.data import chat
from jaxrl_post.data.held_out import one_a_group, split
from jaxrl_post.data.packing import pack
from jaxrl_post.data.steps import Solution, judged_tokens, read_steps
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.messages import Message

USER = {"role": "user", "content": "1+1+1="}
ROW = {"prompt": "1+1+1=", "completions": ["2+1", "4"], "labels": [True, False]}
ONE = Solution((Message("user", "1+1+1="),), ("2+1", "4"), (1.0, 0.0), "1+1+1=")


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows: dict) -> Path:
        path = tmp_path / "steps.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {**ROW, "labels": [1, 0]},
        {**ROW, "labels": [1.0, 0.0], "note": 3},
        {**ROW, "prompt": [USER]},
    ],
)
def test_every_way_to_write_a_row_gives_the_same_solution(jsonl, tmp_path, row):
    solutions, report = read_steps(jsonl(row, row))
    assert solutions == [ONE, ONE]
    assert (report.num_rows, report.num_bad) == (2, 0)
    assert {type(label) for label in solutions[0].labels} == {float}
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra 'parquet'")
    files = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'parquet'")
    path = tmp_path / "steps.parquet"
    files.write_table(pyarrow.Table.from_pylist([row]), path)
    assert read_steps(path)[0] == [ONE]


def test_labels_may_be_shares(jsonl):
    (solution,), _ = read_steps(jsonl({**ROW, "labels": [0.75, 0]}))
    assert solution.labels == (0.75, 0.0)


BAD = [
    ({"prompt": 3}, "'prompt' must be str or list of messages, got int"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"completions": "2"}, "field 'completions' must be a list, got str"),
    ({"labels": True}, "field 'labels' must be a list, got bool"),
    ({"completions": [], "labels": []}, "field 'completions' has no step"),
    ({"completions": ["2", 4]}, "'completions', step 2 must be str, got int"),
    ({"completions": ["2", " \n"]}, "field 'completions', step 2 is empty"),
    ({"completions": ["2", "\ud800"]}, "step 2 holds half of a surrogate pair"),
    ({"labels": [1]}, "must be equally long, got 2 and 1"),
    ({"labels": [1, "0"]}, "label 2 must be a bool or a number, got str"),
    ({"labels": [1, None]}, "label 2 must be a bool or a number, got NoneType"),
    ({"labels": [1.5, 0]}, r"label 1 must be in \[0, 1\], got 1\.5"),
    ({"labels": [1, -1]}, r"label 2 must be in \[0, 1\], got -1"),
    ({"labels": [1, float("nan")]}, "NaN is not JSON"),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_a_bad_row_fails_with_its_line_or_is_skipped_and_listed(jsonl, change, reason):
    path = jsonl(ROW, ROW | change, ROW)
    with pytest.raises(
        ValueError, match=rf"steps\.jsonl:2: .*{reason}.*on_bad_row='skip'"
    ):
        read_steps(path)
    solutions, report = read_steps(path, on_bad_row="skip")
    assert solutions == [ONE, ONE]
    assert (report.num_rows, report.num_bad) == (2, 1)
    assert re.search(reason, report.first_bad[0].reason)


def test_another_layout_is_refused_by_its_fields(jsonl):
    row = {"prompt": "Hi!", "chosen": "A", "rejected": "B"}
    with pytest.raises(
        ValueError,
        match=r"must have the fields \('prompt', 'completions', 'labels'\), got \(",
    ):
        read_steps(jsonl(row))


def test_solutions_of_one_prompt_are_held_out_together_and_one_of_each_is_kept():
    solutions = [
        Solution((Message("user", f"{i}="),), (str(i), str(j)), (1.0, 0.0), f"{i}=")
        for i in range(40)
        for j in range(3)
    ]
    train, held_out = split(solutions, eval_share=0.3)
    assert not {each.group for each in train} & {each.group for each in held_out}
    assert len(train) + len(held_out) == 120
    kept = one_a_group(held_out)
    assert [each.group for each in kept] == list(
        dict.fromkeys(each.group for each in held_out)
    )
    assert set(kept) <= set(held_out)
    # Not always the same one of a prompt's.
    assert len({each.steps[1] for each in kept}) == 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Has a token for two line breaks, as most do."""
    return Tokenizer.train(["a =\n\n"] * 5, vocab_size=270)


def test_the_judged_token_is_the_last_of_the_separator(tokenizer):
    messages = [Message("user", "a =")]
    sequence = judged_tokens(tokenizer, messages, ["bb", "c"], [0.25, 1.0], "#\n\n")
    mark = tokenizer.encode("#\n\n")
    assert len(mark) == 2
    prompt = chat.render(tokenizer, messages)
    expected = [*prompt, *tokenizer.encode("bb"), *mark, *tokenizer.encode("c"), *mark]
    assert sequence.ids.tolist() == expected
    assert tokenizer.decode(sequence.ids.tolist()) == "a =bb#\n\nc#\n\n"
    first = len(prompt) + 2 + len(mark) - 1
    second = len(expected) - 1
    assert np.flatnonzero(sequence.loss_mask).tolist() == [first, second]
    assert sequence.labels[[first, second]].tolist() == [0.25, 1.0]
    assert np.count_nonzero(sequence.labels) == 2
    # Nothing is cut from it where it is packed.
    batch = pack([sequence], length=len(expected), row_multiple=1)
    np.testing.assert_array_equal(batch.loss_mask[0], sequence.loss_mask)
    np.testing.assert_array_equal(batch.labels[0], sequence.labels)


def test_the_ids_of_a_step_do_not_depend_on_what_follows(tokenizer):
    messages = [Message("user", "a")]
    long = judged_tokens(tokenizer, messages, ["a =", "=\n"], [1, 0], "\n")
    short = judged_tokens(tokenizer, messages, ["a ="], [1], "\n")
    size = len(short.tokens)
    assert long.ids[:size].tolist() == short.ids.tolist()
    assert np.flatnonzero(long.loss_mask)[0] == size - 1
    # The text as a whole has other ids: here a step's end and the separator are one.
    whole = tokenizer.encode("aa =\n=\n\n")
    assert len(whole) < len(long.tokens)


def test_steps_follow_what_makes_the_assistant_answer(tokenizer):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chatty = Tokenizer(
        tokenizer.backend, stop_ids=tokenizer.stop_ids, chat_template=template
    )
    sequence = judged_tokens(chatty, [Message("user", "a =")], ["b"], [1.0], "\n")
    assert chatty.decode(sequence.ids.tolist()) == "[user]a =[assistant]b\n"
    assert np.flatnonzero(sequence.loss_mask).tolist() == [len(sequence.tokens) - 1]


def test_a_separator_without_a_token_is_refused(tokenizer):
    with pytest.raises(
        ValueError, match="separator must have a token, at which a step is judged; got"
    ):
        judged_tokens(tokenizer, [Message("user", "a")], ["b"], [1], "")
