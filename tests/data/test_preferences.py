"""Preference pairs: the layouts, what makes a row bad, and the held-out split."""

import json
import re
import sys
from pathlib import Path

import pytest

from jaxrl_post.data.chat import render
from jaxrl_post.data.held_out import split
from jaxrl_post.data.preferences import Preference, read_preferences
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.messages import Message

DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "gsm8k"
SOLUTIONS = DATA / "example_model_solutions.jsonl"


def said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def marked(correct: bool, solution: str) -> dict:
    return {"is_correct": correct, "solution": solution}


def scores(chosen: float, rejected: float) -> dict:
    return {"score_chosen": chosen, "score_rejected": rejected}


USER, GOOD, BAD = said("user", "Hi!"), said("assistant", "A"), said("assistant", "B")
LONG = [said("system", "S"), USER, said("assistant", "Yes?"), said("user", "Go on.")]
LONG_MESSAGES = tuple(Message(each["role"], each["content"]) for each in LONG)
PROMPTED = {"prompt": "Hi!", "chosen": "A", "rejected": "B"}
PAIRED = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
SOLVED = {
    "question": "Hi!",
    "ground_truth": "G",
    "a": marked(True, "A"),
    "b": marked(False, "B"),
}
ONE = Preference((Message("user", "Hi!"),), "A", "B", "Hi!")


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows: dict, name: str = "pairs.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra 'parquet'")
    files = pytest.importorskip("pyarrow.parquet", reason="needs the extra 'parquet'")

    def write(*rows: dict, **options) -> Path:
        path = tmp_path / "pairs.parquet"
        table = pyarrow.Table.from_pylist(list(rows))
        files.write_table(table, path, **options)
        return path

    return write


# One preference each, of the user's "Hi!".
SHORT = [
    PROMPTED,
    {**PROMPTED, "prompt": [USER], "note": 3},
    {**PROMPTED, "chosen": [GOOD], "rejected": [BAD]},
    {**PROMPTED, "chosen": [USER, GOOD]},
    PAIRED,
    {
        "chosen": "\n\nHuman: Hi!\n\nAssistant: A",
        "rejected": "\n\nHuman: Hi!\n\nAssistant: B",
    },
    {"chosen": "Human:Hi!\n\nAssistant:A\n", "rejected": [USER, BAD]},
    SOLVED,
]


@pytest.mark.parametrize("row", SHORT)
def test_every_layout_gives_the_same_preference(jsonl, parquet, row):
    for name in ("pairs.jsonl", "pairs.json", "PAIRS.JSONL"):
        preferences, report = read_preferences(jsonl(row, name=name))
        assert preferences == [ONE]
        assert (report.num_rows, report.num_unused, report.num_bad) == (1, 0, 0)
    assert read_preferences(parquet(row))[0] == [ONE]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": LONG, "chosen": "A", "rejected": "B"},
        {"prompt": LONG, "chosen": [*LONG, GOOD], "rejected": [BAD]},
        {"chosen": [*LONG, GOOD], "rejected": [*LONG, BAD]},
    ],
)
def test_a_prompt_of_several_messages(jsonl, parquet, row):
    group = "S\n\nHi!\n\nYes?\n\nGo on."
    expected = Preference(LONG_MESSAGES, "A", "B", group)
    assert read_preferences(jsonl(row))[0] == [expected]
    assert read_preferences(parquet(row))[0] == [expected]


def test_a_dialogue_as_text_may_have_empty_lines_in_its_turns(jsonl):
    begin = "\n\nHuman: Hi!\n\nAssistant: So?\nHuman: yes."
    begin += "\n\nHuman: Go\n\non.\n\nAssistant:"
    (found,), _ = read_preferences(
        jsonl({"chosen": begin + " A\n\nA", "rejected": begin + " B"})
    )
    assert found.messages == (
        Message("user", "Hi!"),
        Message("assistant", "So?\nHuman: yes."),
        Message("user", "Go\n\non."),
    )
    assert (found.chosen, found.rejected) == ("A\n\nA", "B")


def test_messages_are_what_chat_renders(jsonl):
    (found,), _ = read_preferences(jsonl(PROMPTED))
    tokenizer = Tokenizer.train(["Hi!"])
    assert tokenizer.decode(render(tokenizer, found.messages)) == "Hi!"


def test_every_correct_solution_is_preferred_to_every_incorrect_one(jsonl):
    first = {"question": "1?", "ground_truth": "G", "level": 3}
    first |= {"m": marked(False, "x"), "n": marked(True, "1"), "o": marked(False, "y")}
    first |= {"p": marked(True, "one"), "q": marked(True, "1"), "r": marked(False, "x")}
    second = {"question": "2?", "ground_truth": "G", "m": marked(True, "2")}
    third = {"question": "3?", "ground_truth": "G", "m": marked(False, "2")}
    found, report = read_preferences(jsonl(first, second, third))
    pairs = [(each.group, each.chosen, each.rejected) for each in found]
    assert pairs == [
        ("1?", "1", "x"),
        ("1?", "1", "y"),
        ("1?", "one", "x"),
        ("1?", "one", "y"),
    ]
    assert (report.num_rows, report.num_unused, report.num_bad) == (3, 2, 0)
    assert "3 rows read (2 of them unused), 0 skipped" in str(report)


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("score_chosen", "score_rejected"),
        ("chosen_score", "rejected_score"),
        ("chosen-rating", "rejected-rating"),
        ("chosen_rating", "rejected_rating"),
    ],
)
def test_scores_give_a_margin(jsonl, parquet, chosen, rejected):
    rows = [PROMPTED | {chosen: 7.5, rejected: 9}, PAIRED | {chosen: 3, rejected: 3.0}]
    for row, margin in zip(rows, (-1.5, 0.0), strict=True):
        assert read_preferences(jsonl(row))[0][0].margin == margin
        assert read_preferences(parquet(row))[0][0].margin == margin
    (without,), _ = read_preferences(jsonl(PROMPTED | {chosen: None, rejected: None}))
    assert without.margin is None


# (a good row, what is changed in a copy of it, what is then wrong)
CHANGES = [
    (PROMPTED, {"prompt": 3}, "'prompt' must be str or list of messages, got int"),
    (PROMPTED, {"prompt": " \n"}, "the prompt is empty"),
    (PROMPTED, {"prompt": []}, "field 'prompt' has no message"),
    (PROMPTED, {"prompt": [said("user", "")]}, "the prompt is empty"),
    (
        PROMPTED,
        {"prompt": [USER, GOOD]},
        "the prompt must end with a message to answer",
    ),
    (PROMPTED, {"prompt": [said("user", "\ud800")]}, "message 1: 'content' holds half"),
    (PROMPTED, {"chosen": None}, "'chosen' must be str or list .*, got NoneType"),
    (PROMPTED, {"chosen": " "}, "the chosen answer is empty"),
    (PROMPTED, {"rejected": ""}, "the rejected answer is empty"),
    (PROMPTED, {"rejected": []}, "field 'rejected' has no message"),
    (
        PROMPTED,
        {"rejected": "A"},
        "the chosen and the rejected answer are the same text",
    ),
    (PROMPTED, {"chosen": "\ud800"}, "field 'chosen' holds half of a surrogate pair"),
    (
        PROMPTED,
        {"chosen": [USER]},
        "'chosen' must end with role 'assistant', got 'user'",
    ),
    (
        PROMPTED,
        {"chosen": [said("system", "S"), USER, GOOD]},
        "'chosen' must be the answer alone or begin with the prompt's messages, got "
        "another beginning at message 1",
    ),
    (
        PROMPTED,
        {"chosen": [USER, GOOD, USER, GOOD]},
        "field 'chosen' must have one message after the prompt's, got 3",
    ),
    (PROMPTED, {"prompt": LONG, "chosen": [*LONG[:2], GOOD]}, "beginning at message 3"),
    (PROMPTED, {"prompt": LONG, "chosen": LONG[:3]}, "beginning at message 4"),
    (PROMPTED, {"chosen": ["A"]}, "'chosen', message 1 must be an object, got str"),
    (PROMPTED, {"chosen": [USER, {"content": "A"}]}, "'chosen', message 2: no 'role'"),
    (PROMPTED, {"chosen": [USER, {"role": "user"}]}, "message 2: no 'content'"),
    (PROMPTED, {"chosen": [said("gpt", "A")]}, "1: 'role' must be one .*, got 'gpt'"),
    (PROMPTED, {"chosen": [said("user", None)]}, "no 'content'"),
    (PROMPTED, {"score_chosen": 1}, "no field 'score_rejected', whose counterpart is"),
    (PROMPTED, scores("1", 0), "field 'score_chosen' must be a number, got str"),
    (PROMPTED, scores(1, True), "field 'score_rejected' must be a number, got bool"),
    (PROMPTED, scores(float("nan"), 0), "NaN is not JSON"),
    (PROMPTED, scores(10**400, 0), "field 'score_chosen' must be finite, got inf"),
    (PROMPTED, scores(1e308, -1e308), "'score_rejected': the difference is not finite"),
    (
        PAIRED,
        {"rejected": [USER]},
        "'rejected' must end with role 'assistant', got 'us",
    ),
    (PAIRED, {"chosen": [GOOD], "rejected": [BAD]}, "the prompt is empty"),
    (
        PAIRED,
        {"chosen": [*LONG, GOOD]},
        "'chosen' and 'rejected' must differ in the last message alone, got 5 and 2 "
        "messages that part at message 1",
    ),
    (PAIRED, {"chosen": [USER, BAD, USER, GOOD]}, "got 4 and 2 .* part at message 3"),
    (
        PAIRED,
        {"chosen": [USER, BAD, GOOD], "rejected": [USER, BAD, BAD]},
        "the prompt must end with a message to answer, got one of the assistant",
    ),
    (
        PAIRED,
        {"chosen": "Hi! A", "rejected": "Hi! B"},
        r"field 'chosen' without a 'prompt' must be a list of messages or begin with "
        r"'\\n\\nHuman:', got 'Hi! A'",
    ),
    (
        PAIRED,
        {"chosen": "Oh. \n\nHuman: Hi!\n\nAssistant: A"},
        r"begin with '\\n\\nHuman:', got 'Oh. ",
    ),
    (PAIRED, {"chosen": "\n\nHuman: Hi!"}, "'chosen' must end with role 'assistant'"),
    (PAIRED, {"chosen": "\n\nHuman: Hi!\n\nAssistant:"}, "the chosen answer is empty"),
    (SOLVED, {"question": 1}, "field 'question' must be str, got int"),
    (SOLVED, {"question": ""}, "the prompt is empty"),
    (SOLVED, {"ground_truth": 1}, "field 'ground_truth' must be str, got int"),
    (SOLVED, {"a": {"solution": "A"}}, "field 'a': no 'is_correct'"),
    (SOLVED, {"a": {"is_correct": True}}, "field 'a': no 'solution'"),
    (SOLVED, {"a": marked(1, "A")}, "field 'a': 'is_correct' must be bool, got int"),
    (SOLVED, {"a": marked(True, 3)}, "field 'a': 'solution' must be str, got int"),
    (SOLVED, {"a": marked(False, " ")}, "field 'a': 'solution' is empty"),
    (SOLVED, {"a": marked(True, "B")}, "fields 'a' and 'b' have the same solution"),
    (
        SOLVED,
        {"a": "A", "b": "B"},
        r"must have a field {'is_correct', .* of other types",
    ),
]
# (a good row, another one, what is wrong with it after the first)
MIXTURES = [
    (
        PROMPTED,
        {"prompt": "Hi!", "chosen": "A"},
        r"no field 'rejected', which line 1 has \(fields: 'prompt', 'chosen'\)",
    ),
    (PROMPTED, PAIRED, "no field 'prompt', which line 1 has"),
    (PROMPTED, SOLVED, "no field 'prompt', which line 1 has"),
    (SOLVED, PROMPTED, "no field 'question', which line 1 has"),
    (PROMPTED, {}, r"no field 'prompt', which line 1 has \(fields: none\)"),
    (
        PAIRED,
        PROMPTED,
        r"must have the layout of line 1 \('chosen', 'rejected'\), got the layout "
        r"\('prompt', 'chosen', 'rejected'\)",
    ),
]
BAD_ROWS = [
    (good, good | change, reason) for good, change, reason in CHANGES
] + MIXTURES


@pytest.mark.parametrize(
    ("good", "bad", "reason"), BAD_ROWS, ids=[str(i) for i in range(len(BAD_ROWS))]
)
def test_a_bad_row_fails_with_its_line_or_is_skipped_and_listed(
    jsonl, good, bad, reason
):
    path = jsonl(good, bad, good)
    with pytest.raises(
        ValueError, match=rf"pairs\.jsonl:2: .*{reason}.*on_bad_row='skip'"
    ):
        read_preferences(path)
    preferences, report = read_preferences(path, on_bad_row="skip")
    assert preferences == [ONE, ONE]
    assert (report.num_rows, report.num_bad) == (2, 1)
    assert report.first_bad[0].line == 2
    assert re.search(reason, report.first_bad[0].reason)


def test_a_row_without_the_fields_of_any_layout_is_told_them(jsonl):
    with pytest.raises(
        ValueError,
        match=r":1: must have the fields \('prompt', 'chosen', 'rejected'\) or "
        r"\('chosen', 'rejected'\) or \('question', 'ground_truth'\) or "
        r"\('prompt', 'completion', 'label'\) or .* of Alpaca, got \('text'\); fields "
        r"with other names are given as in --data.columns prompt=FIELD\.",
    ):
        read_preferences(jsonl({"text": "Hi!"}))


def test_the_first_good_row_tells_the_layout(jsonl):
    path = jsonl({"text": ""}, PROMPTED | {"chosen": ""}, PAIRED, PROMPTED, PAIRED)
    preferences, report = read_preferences(path, on_bad_row="skip")
    assert preferences == [ONE, ONE]
    assert [bad.line for bad in report.first_bad] == [1, 2, 4]
    assert report.first_bad[2].reason.startswith("must have the layout of line 3")


def test_a_file_without_a_row_or_a_pair_is_an_error(jsonl):
    with pytest.raises(ValueError, match=r"pairs\.jsonl: empty data set, the file has"):
        read_preferences(jsonl())
    with pytest.raises(
        ValueError, match=r"pairs\.jsonl: .*every row is bad:\n.*1 skip"
    ):
        read_preferences(jsonl({}), on_bad_row="skip")
    del (unpaired := dict(SOLVED))["b"]
    with pytest.raises(
        ValueError,
        match=r"pairs\.jsonl: empty data set, no row has both a correct and an "
        r"incorrect solution:\n.*1 rows read \(1 of them unused\)",
    ):
        read_preferences(jsonl(unpaired))


@pytest.mark.parametrize("name", ["pairs.csv", "pairs", "pairs.jsonl.gz"])
def test_another_kind_of_file_is_refused_by_name(tmp_path, name):
    suffix = Path(name).suffix
    with pytest.raises(
        ValueError, match=rf"\.jsonl, \.json or \.parquet, got '{suffix}' in '.*{name}'"
    ):
        read_preferences(tmp_path / name)


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.parquet"])
def test_an_absent_file_is_named(tmp_path, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="needs the extra 'parquet'")
    with pytest.raises(FileNotFoundError, match=name):
        read_preferences(tmp_path / name)


def test_parquet_in_batches_keeps_order_and_row_numbers(parquet):
    rows = [{**PROMPTED, "prompt": f"{i}?"} for i in range(3000)]
    rows[2499] = {**PROMPTED, "prompt": None}
    path = parquet(*rows, row_group_size=700)
    with pytest.raises(
        ValueError, match=r"pairs\.parquet:2500: no field 'prompt', which line 1 has"
    ):
        read_preferences(path)
    preferences, report = read_preferences(path, on_bad_row="skip")
    assert [each.group for each in preferences] == [
        f"{i}?" for i in range(3000) if i != 2499
    ]
    assert (report.num_rows, report.num_bad) == (2999, 1)


def test_parquet_with_what_json_cannot_say(parquet, tmp_path):
    path = parquet(PROMPTED | scores(1.0, 0.0), PROMPTED | scores(float("nan"), 0.0))
    with pytest.raises(
        ValueError, match=r"parquet:2: field 'score_chosen' must be finite, got nan"
    ):
        read_preferences(path)

    import pyarrow
    import pyarrow.parquet

    texts = {name: [text, text] for name, text in PROMPTED.items()}
    # Arrow believes that a text is UTF-8 until somebody reads it.
    broken = pyarrow.array([b"A", b"\xff"]).view(pyarrow.string())
    table = pyarrow.table(texts | {"chosen": broken})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(
        ValueError, match=r"parquet:2: field 'chosen' is not UTF-8 \(inv"
    ):
        read_preferences(path)

    twice = pyarrow.Table.from_arrays([table[0], table[0]], names=["chosen", "chosen"])
    pyarrow.parquet.write_table(twice, path)
    with pytest.raises(
        ValueError, match=r"a column appears twice \('chosen', 'chosen'"
    ):
        read_preferences(path)


def test_damaged_parquet_is_an_error_that_names_the_file(parquet):
    path = parquet(*[PROMPTED] * 100)
    whole = path.read_bytes()
    damaged = whole[:4] + b"\xff" * 50 + whole[54:]
    for content in (b"", b'{"prompt": "Hi!"}', whole[:-9], damaged):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"pairs\.parquet: not Parquet that can be"
        ):
            read_preferences(path, on_bad_row="skip")


def test_parquet_without_its_extra_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"pairs\.parquet: .*'pyarrow': pip install -e '.*\[parquet\]'",
    ):
        read_preferences(tmp_path / "pairs.parquet")


@pytest.mark.skipif(
    not SOLUTIONS.is_file(), reason=f"needs {SOLUTIONS.name} in ../shared/data/gsm8k"
)
def test_real_model_solutions():
    pairs = set()
    with open(SOLUTIONS, encoding="utf-8") as file:
        for row in map(json.loads, file):
            models = [value for value in row.values() if isinstance(value, dict)]
            assert len(models) == 4
            pairs |= {
                (row["question"], a["solution"], b["solution"])
                for a in models
                for b in models
                if a["is_correct"] > b["is_correct"]
            }
    preferences, report = read_preferences(SOLUTIONS)
    found = [(each.group, each.chosen, each.rejected) for each in preferences]
    assert len(found) == len(pairs) == 2426
    assert set(found) == pairs
    assert (report.num_rows, report.num_unused, report.num_bad) == (1319, 588, 0)
    train, held_out = split(preferences)
    assert len(train) + len(held_out) == 2426
    assert len({each.group for each in held_out}) == pytest.approx(73.1, abs=4 * 8.1)


def pairs_of(groups) -> list[Preference]:
    return [Preference((Message("user", g),), "A", "B", g) for g in groups]


def test_the_split_is_a_function_of_the_group():
    groups = [f"Question {i}?" for i in range(1000)]
    train, held_out = split(pairs_of(groups + groups[::-3]))
    assert len(train) + len(held_out) == 1334
    first, second = ({each.group for each in side} for side in (train, held_out))
    assert not first & second
    # Binomial(1000, 0.1): standard deviation 9.5.
    assert abs(len(second) - 100) < 4 * 9.5
    # Fewer rows, in another order.
    again = split(pairs_of(groups[::-2]))
    assert {each.group for each in again[1]} == second & set(groups[::-2])
    assert [each.group for each in again[0]] == [g for g in groups[::-2] if g in first]
    # A larger share holds out more, and the same ones.
    more = {each.group for each in split(pairs_of(groups), eval_share=0.5)[1]}
    assert second < more
    assert abs(len(more) - 500) < 4 * 16


def test_the_split_is_the_same_in_every_process_and_version():
    # blake2b-64 of the text, big-endian, below a tenth of 2**64.
    groups = [f"Question {i}?" for i in range(40)]
    _, held_out = split(pairs_of(groups))
    assert [groups.index(each.group) for each in held_out] == [11, 27, 39]


def test_a_split_with_an_empty_side_is_an_error():
    for preferences, share, message in [
        ([], 0.1, "both splits, got 0 prompts, none of them in 'train'"),
        (
            pairs_of(["a", "a"]),
            1e-9,
            "got 1 prompts, none of them in 'eval'; give more",
        ),
        (pairs_of(["a"]), 1 - 1e-9, "in 'train'.* another eval_share than 0.999"),
    ]:
        with pytest.raises(ValueError, match=message):
            split(preferences, eval_share=share)


@pytest.mark.parametrize("share", [0, 1, -0.1, 10, float("nan")])
def test_a_share_outside_its_range_is_an_error(share):
    with pytest.raises(
        ValueError, match=rf"eval_share must be in \(0, 1\), got {share}"
    ):
        split(pairs_of("ab"), eval_share=share)


CALLS = {**GOOD, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
THOUGHT = {**GOOD, "reasoning_content": "because"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (PROMPTED | {"chosen": [CALLS]}, "'chosen', message 1: 'tool_calls' is not re"),
        (
            PAIRED | {"rejected": [USER, THOUGHT]},
            "'rejected', message 2: 'reasoning_content' is not read here",
        ),
        (
            {"prompt": "a", "completion": [THOUGHT], "label": True},
            "'completion', message 1: 'reasoning_content' is not read here",
        ),
        (
            PROMPTED
            | {
                "chosen": [
                    {
                        "role": "assistant",
                        "content": "a",
                        "function_call": {"name": "f"},
                    }
                ]
            },
            "'chosen', message 1: 'function_call' is not read here",
        ),
        (PROMPTED | {"tools": [{"type": "function"}]}, "field 'tools' is not read he"),
        (PAIRED | {"tools": [{"type": "function"}]}, "field 'tools' is not read here"),
        (
            {"prompt": "a", "completion": "b", "label": True, "tools": [{"a": 1}]},
            "field 'tools' is not read here",
        ),
    ],
)
def test_what_a_pair_would_lose_is_refused(jsonl, row, reason):
    with pytest.raises(ValueError, match=reason):
        read_preferences(jsonl(row))


def test_empty_fields_lose_nothing(jsonl):
    empty = {**GOOD, "tool_calls": [], "reasoning_content": None}
    found, _ = read_preferences(jsonl(PROMPTED | {"chosen": [empty], "tools": []}))
    assert found == [ONE]
