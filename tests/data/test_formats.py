"""ShareGPT, Alpaca, and columns with other names: what is read, and what is refused."""

import json
import re

import pytest

from jaxrl_post.data.chats import Chat, Text, read_chats
from jaxrl_post.data.preferences import JudgedAnswer, read_preferences
from jaxrl_post.data.steps import read_steps
from jaxrl_post.messages import Message
from tests.row_files import write_rows


def user(content):
    return {"role": "user", "content": content}


def said(content):
    return {"role": "assistant", "content": content}


def turn(speaker, value, **more):
    return {"from": speaker, "value": value, **more}


HUMAN, GPT = turn("human", "1+1="), turn("gpt", "2")
ADD = {"name": "add", "arguments": {"a": 1}}
SHARED = {"conversations": [HUMAN, GPT]}
ALPACA = {"instruction": "Add.", "input": "1 1", "output": "2"}


@pytest.fixture(params=["jsonl", "parquet"])
def file(request, tmp_path):
    """Writes rows as JSON lines, and as a table in which absent fields are null."""

    def write(*rows):
        return write_rows(tmp_path / f"rows.{request.param}", rows)

    return write


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def refused(read, path, *told, **options):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, told))):
        read(path, **options)


@pytest.mark.parametrize("form", ["auto", "sharegpt"])
def test_turns_of_sharegpt_are_messages(file, form):
    rows = [
        {**SHARED, "system": "Add."},
        {"conversations": [turn("system", "Add."), HUMAN, GPT, turn("user", "+1=")]},
        {"conversations": [HUMAN, turn("assistant", "2")]},
    ]
    found, report = read_chats(file(*rows), file_format=form)
    system = {"role": "system", "content": "Add."}
    assert found == [
        Chat((system, user("1+1="), said("2")), "Add.\n\n1+1="),
        Chat((system, user("1+1="), said("2"), user("+1=")), "Add.\n\n1+1="),
        Chat((user("1+1="), said("2")), "1+1="),
    ]
    assert report.remark == "read as ShareGPT"


def test_calls_and_tools_of_sharegpt_are_those_of_messages(file):
    turns = [
        HUMAN,
        turn("function_call", json.dumps(ADD)),
        turn("observation", "2"),
        GPT,
    ]
    both = [
        HUMAN,
        turn("function_call", json.dumps([ADD, ADD])),
        turn("tool", "2"),
        GPT,
    ]
    tools = [{"name": "add", "parameters": {"type": "object"}}]
    rows = [
        {"conversations": turns, "tools": json.dumps(tools)},
        {"conversations": both, "tools": ""},
    ]
    (one, two), _ = read_chats(file(*rows))
    call = {"type": "function", "function": ADD}
    assert one.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert one.messages[2] == {"role": "tool", "content": "2"}
    assert one.tools == ({"type": "function", "function": tools[0]},)
    assert two.messages[1]["tool_calls"] == [call, call]
    assert two.tools is None


@pytest.mark.parametrize("form", ["auto", "alpaca"])
def test_an_instruction_and_its_output_are_a_prompt_and_its_completion(file, form):
    rows = [{**ALPACA, "system": None}, {**ALPACA, "input": "", "system": "S"}]
    found, report = read_chats(file(*rows), file_format=form)
    assert found == [
        Chat((user("Add.\n1 1"), said("2")), "Add.\n1 1", only_last=True),
        Chat(
            ({"role": "system", "content": "S"}, user("Add."), said("2")),
            "S\n\nAdd.",
            only_last=True,
        ),
    ]
    assert report.remark == "read as Alpaca"


def test_answers_of_a_history_are_learned_too(file):
    (found,), _ = read_chats(file({**ALPACA, "history": [["Hi", "Hello"]]}))
    turns = (user("Hi"), said("Hello"), user("Add.\n1 1"), said("2"))
    assert found == Chat(turns, "Hi")


def test_the_package_s_own_fields_come_first_and_the_others_are_told(file):
    found, report = read_chats(file({**ALPACA, "text": "All of it."}))
    assert found == [Text("All of it.")]
    assert "read by its 'text'" in report.remark
    assert "--data.format alpaca" in report.remark
    found, report = read_chats(file({**SHARED, "messages": [user("a"), said("b")]}))
    assert found[0].messages == (user("a"), said("b"))
    assert "--data.format sharegpt" in report.remark
    found, report = read_chats(
        file({**SHARED, "messages": [user("a"), said("b")]}), file_format="sharegpt"
    )
    assert found[0].messages == (user("1+1="), said("2"))


def test_messages_that_are_turns_of_sharegpt_are_read_as_such(file):
    (found,), report = read_chats(file({"messages": [HUMAN, GPT]}))
    assert found.messages == (user("1+1="), said("2"))
    assert report.remark == "read as ShareGPT"


def test_a_plain_file_has_no_remark(file):
    assert read_chats(file({"messages": [user("a"), said("b")]}))[1].remark == ""
    assert read_chats(file({"text": "a"}), file_format="plain")[1].remark == ""


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"conversations": [turn("robot", "a"), GPT]}, "got 'robot'"),
        ({"conversations": [turn(3, "a"), GPT]}, "'from' must be one of"),
        ({"conversations": [{"from": "human"}, GPT]}, "turn 1: no 'value'"),
        ({"conversations": [turn("human", None), GPT]}, "turn 1: no 'value'"),
        ({"conversations": [turn("human", 3), GPT]}, "'value' must be str, got int"),
        ({"conversations": [HUMAN, {"value": "2"}]}, "turn 2: no 'from'"),
        ({"conversations": [HUMAN, turn("gpt", "")]}, "message 2: the assistant says"),
        ({"conversations": [HUMAN, turn("gpt", "2", weight=0)]}, "the key 'weight'"),
        (
            {"conversations": [HUMAN, turn("gpt", "2", role="user")]},
            "'from' and 'role'",
        ),
        (
            {"conversations": [HUMAN, turn("gpt", "2", content="")]},
            "'value' and 'conte",
        ),
        ({"conversations": [HUMAN]}, "no turn of the assistant"),
        ({"conversations": []}, "has no turn"),
        ({"conversations": "Hi"}, "must be a list of turns, got str"),
        ({"conversations": [HUMAN, "2"]}, "turn 2 must be an object, got str"),
        (
            {"conversations": [HUMAN, turn("function_call", "add(1)")]},
            "'value' of a function_call must be JSON",
        ),
        (
            {"conversations": [HUMAN, turn("function_call", '{"arguments": {}}')]},
            "has name and arguments",
        ),
        ({"conversations": [HUMAN, turn("function_call", "3")]}, "must be an object"),
        ({**SHARED, "tools": "{"}, "field 'tools' must be JSON"),
        ({**SHARED, "tools": '{"name": "a"}'}, "'tools' must be a list of objects"),
        ({**SHARED, "system": 3}, "field 'system' must be str, got int"),
        (
            {"conversations": [turn("system", "a"), HUMAN, GPT], "system": "b"},
            "both system messages",
        ),
        ({"conversations": [user("a"), said("b")]}, "--data.columns messages=FIELD"),
    ],
)
@pytest.mark.parametrize("form", ["auto", "sharegpt"])
def test_a_bad_row_of_sharegpt_is_named(jsonl, row, told, form):
    refused(read_chats, jsonl(row), "rows.jsonl:1: ", told, file_format=form)
    refused(read_chats, jsonl(SHARED, row), "rows.jsonl:2: ", told, file_format=form)
    found, report = read_chats(jsonl(SHARED, row), file_format=form, on_bad_row="skip")
    assert (len(found), report.num_bad) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"instruction": 3}, "field 'instruction' must be str, got int"),
        ({"instruction": " ", "input": ""}, "'instruction' and 'input' are empty"),
        ({"input": 3}, "field 'input' must be str, got int"),
        ({"output": None}, "field 'output' must be str, got NoneType"),
        ({"output": ["2"]}, "field 'output' must be str, got list"),
        ({"output": " "}, "field 'output' is empty"),
        ({"system": 3}, "field 'system' must be str, got int"),
        ({"history": "Hi"}, "field 'history' must be a list of pairs, got str"),
        ({"history": [["Hi"]]}, "field 'history', pair 1 must be an instruction and"),
        ({"history": [["Hi", None]]}, "field 'history', pair 1 must be str"),
        ({"history": [["Hi", ""]]}, "message 2: the assistant says nothing"),
    ],
)
@pytest.mark.parametrize("form", ["auto", "alpaca"])
def test_a_bad_row_of_alpaca_is_named(jsonl, changes, told, form):
    row = {**ALPACA, **changes}
    refused(read_chats, jsonl(row), "rows.jsonl:1: ", told, file_format=form)
    refused(read_chats, jsonl(ALPACA, row), "rows.jsonl:2: ", told, file_format=form)


def test_a_row_of_another_format_is_refused(jsonl):
    refused(read_chats, jsonl(SHARED, ALPACA), "rows.jsonl:2: ", "'conversations'")
    refused(
        read_chats, jsonl(SHARED), "('instruction', 'output')", file_format="alpaca"
    )
    refused(
        read_chats, jsonl(ALPACA), "--data.columns messages=FIELD", file_format="plain"
    )


@pytest.mark.parametrize(
    "row",
    [
        {
            **SHARED,
            "conversations": [HUMAN],
            "chosen": GPT,
            "rejected": turn("gpt", "3"),
        },
        {"instruction": "1+1=", "input": None, "chosen": "2", "rejected": "3"},
        {"instruction": "1+1=", "chosen": "2", "rejected": "3", "system": ""},
    ],
)
def test_pairs_of_both_formats(file, row):
    (found,), report = read_preferences(file(row))
    assert found.messages == (Message("user", "1+1="),)
    assert (found.chosen, found.rejected) == ("2", "3")
    assert report.remark.startswith("read as ")


@pytest.mark.parametrize(
    "row",
    [
        {**SHARED, "kto_tag": True},
        {"instruction": "1+1=", "output": "2", "kto_tag": True},
    ],
)
def test_judged_answers_of_both_formats(file, row):
    found, _ = read_preferences(file(row), columns={"label": "kto_tag"})
    prompt = (Message("user", "1+1="),)
    assert found == [JudgedAnswer(prompt, "2", True, "1+1=")]


def test_pairs_of_messages_with_an_instruction_are_plain(file):
    row = {
        "instruction": "1+1=",
        "chosen": [user("1+1="), said("2")],
        "rejected": [user("1+1="), said("3")],
    }
    (found,), report = read_preferences(file(row))
    assert (found.chosen, found.rejected, report.remark) == ("2", "3", "")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"chosen": turn("robot", "2"), "rejected": GPT},
            "field 'chosen': 'from' must",
        ),
        ({"chosen": GPT, "rejected": {"from": "gpt"}}, "field 'rejected': no 'value'"),
        ({"chosen": GPT, "rejected": HUMAN}, "must end with role 'assistant'"),
        ({"chosen": GPT, "rejected": GPT}, "are the same text"),
        ({"chosen": GPT, "rejected": "3"}, "field 'rejected' must be an object"),
        (
            {"chosen": GPT, "rejected": turn("function_call", json.dumps(ADD))},
            "'tool_calls' is not read here",
        ),
    ],
)
def test_a_bad_pair_of_sharegpt_is_named(jsonl, row, told):
    good = {"conversations": [HUMAN], "chosen": GPT, "rejected": turn("gpt", "3")}
    refused(read_preferences, jsonl(good, good | row), "rows.jsonl:2: ", told)


@pytest.mark.parametrize(
    ("read", "row", "columns"),
    [
        (read_chats, {"messages": [user("a"), said("b")]}, {"messages": "talk"}),
        (
            read_chats,
            {"messages": [user("a"), said("b")], "tools": [{"name": "f"}]},
            {"messages": "talk", "tools": "functions"},
        ),
        (
            read_chats,
            {"prompt": "a", "completion": "b"},
            {"prompt": "question", "completion": "answer"},
        ),
        (read_chats, {"text": "a"}, {"text": "content"}),
        (read_chats, SHARED, {"conversations": "talk"}),
        (read_chats, ALPACA, {"output": "response", "input": "context"}),
        (
            read_preferences,
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "question", "chosen": "better", "rejected": "worse"},
        ),
        (
            read_preferences,
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"chosen": "rejected", "rejected": "chosen"},
        ),
        (
            read_preferences,
            {"prompt": "a", "completion": "b", "label": True},
            {"label": "good"},
        ),
        (
            read_steps,
            {"prompt": "a", "completions": ["b"], "labels": [1]},
            {"completions": "steps", "labels": "right"},
        ),
    ],
)
def test_columns_with_other_names_are_read_as_if_they_had_ours(
    file, read, row, columns
):
    plain, _ = read(file(row))
    other = {columns.get(name, name): value for name, value in row.items()}
    assert read(file(other), columns=columns)[0] == plain


def test_a_named_column_stands_for_ours(jsonl):
    row = {"prompt": "a", "question": "b", "completion": "c"}
    (found,), _ = read_chats(jsonl(row), columns={"prompt": "question"})
    assert found.messages[0] == user("b")


def test_named_columns_choose_the_layout(jsonl):
    row = {"messages": [user("a"), said("b")], "question": "c", "answer": "d"}
    columns = {"prompt": "question", "completion": "answer"}
    (found,), _ = read_chats(jsonl(row), columns=columns)
    assert found.messages == (user("c"), said("d"))


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"messages": "talk"}, "rows.jsonl:1: no field 'talk' (fields: 'text')"),
        ({"messages": "a", "prompt": "b"}, "no layout with 'messages', 'prompt'"),
        ({"massages": "text"}, "no layout with 'massages'"),
        ({"chosen": "text"}, "no layout with 'chosen'"),
    ],
)
def test_columns_that_cannot_be_are_refused(jsonl, columns, told):
    refused(read_chats, jsonl({"text": "a"}), told, columns=columns)


def test_an_optional_column_that_no_row_has_is_refused(jsonl):
    row = {"messages": [user("a"), said("b")]}
    refused(
        read_chats,
        jsonl(row, {**row, "tools": []}),
        "no row has the field 'fnctions', which --data.columns tools=fnctions names",
        columns={"tools": "fnctions"},
    )
    rows = jsonl(row, {**row, "functions": [{"name": "f"}]})
    assert len(read_chats(rows, columns={"tools": "functions"})[0]) == 2
