"""Conversations and texts to fine-tune on: three layouts, and what is refused."""

import json

import pytest

from jaxrl_post.data.chats import Chat, Text, read_chats
from tests.row_files import write_rows

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def user(content):
    return {"role": "user", "content": content}


def said(content):
    return {"role": "assistant", "content": content}


@pytest.fixture
def file(tmp_path):
    def write(*rows, name="chats.jsonl"):
        return write_rows(tmp_path / name, rows)

    return write


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet"])
def test_messages(file, name):
    turns = [{"role": "system", "content": "Add."}, user("1+1="), said("2")]
    longer = [*turns, user("+1="), said("3")]
    found, report = read_chats(
        file({"messages": turns}, {"messages": longer}, name=name)
    )
    assert found == [
        Chat(tuple(turns), "Add.\n\n1+1="),
        Chat(tuple(longer), "Add.\n\n1+1="),
    ]
    assert report.num_rows == 2


def test_tools_and_calls_are_kept(file):
    turns = [
        user("1+1="),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        said("2"),
    ]
    tool = {"type": "function", "function": {"name": "add"}}
    (found,), _ = read_chats(file({"messages": turns, "tools": [tool]}))
    assert found.tools == (tool,)
    assert found.messages[1] == {"role": "assistant", "tool_calls": [CALL]}
    assert found.messages[2] == turns[2]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": [user("1+1=")], "completion": [said("2")]},
    ],
)
def test_a_prompt_and_its_completion(file, row):
    (found,), _ = read_chats(file(row))
    assert found == Chat((user("1+1="), said("2")), "1+1=", only_last=True)


def test_texts(file):
    found, _ = read_chats(file({"text": "One."}, {"text": "Two.", "id": 2}))
    assert found == [Text("One."), Text("Two.")]
    assert found[0].group == "One."


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"question": "1"},
            r"must have the fields \('messages'\) or \('prompt', ",
        ),
        ({"messages": "Hi"}, "field 'messages' must be a list of messages, got str"),
        ({"messages": []}, "no turn of the assistant"),
        ({"messages": [user("Hi")]}, "no turn of the assistant, so there is nothing"),
        ({"messages": [1]}, "message 1 must be an object, got int"),
        ({"messages": [{"from": "human"}]}, "'role' must be one of .*, got None"),
        ({"messages": [{"role": "bot", "content": ""}]}, "one of .*, got 'bot'"),
        (
            {"messages": [user(["Hi"])]},
            "message 1: part 1: must be an object with a type",
        ),
        ({"messages": [user("a"), {"role": "assistant"}]}, "2: 'content' must be str"),
        ({"messages": [user("a"), said(" ")]}, "message 2: the assistant says nothing"),
        (
            {"messages": [user("a"), {**said("b"), "weight": 0}]},
            "message 2: the key 'weight' is not known",
        ),
        (
            {"messages": [user("a"), said("b")], "tools": "add"},
            "'tools' must be a",
        ),
        ({"prompt": "a", "completion": ""}, "the completion is empty"),
        ({"prompt": "", "completion": "a"}, "the prompt is empty"),
        ({"text": 1}, "field 'text' must be str, got int"),
        ({"text": " \n"}, "field 'text' is empty"),
    ],
)
def test_a_bad_row_is_named_with_its_line(file, row, reason):
    with pytest.raises(ValueError, match=rf"chats\.jsonl:1: .*{reason}"):
        read_chats(file(row))


def test_a_row_of_another_layout_is_a_bad_row(file):
    path = file({"text": "a"}, {"prompt": "a", "completion": "b"})
    with pytest.raises(ValueError, match=r"chats\.jsonl:2: no field 'text', which"):
        read_chats(path)
    found, report = read_chats(path, on_bad_row="skip")
    assert (len(found), report.num_bad) == (1, 1)


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calls(name, **arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_rows_of_parquet_have_nothing_of_the_tools_of_other_rows(file):
    rows = [
        {
            "messages": [user("w?"), calls("weather", city="Paris")],
            "tools": [tool("weather", city={"type": "string"})],
        },
        {
            "messages": [user("t?"), calls("time", zone="CET", hours=[1, None])],
            "tools": [tool("time", zone={"type": "string", "enum": ["CET"]})],
        },
    ]
    found, _ = read_chats(file(*rows, name="chats.parquet"))
    for chat, row in zip(found, rows, strict=True):
        assert list(chat.messages) == row["messages"]
        assert list(chat.tools) == row["tools"]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet"])
def test_a_completion_keeps_its_calls_its_reasoning_and_the_tools(file, whole, name):
    prompt = [user("w?"), said("Where?"), user("Here.")]
    reply = {**calls("weather", city="Paris"), "reasoning_content": "Look."}
    add = tool("weather", city={"type": "string"})
    row = {
        "prompt": prompt,
        "completion": [*prompt, reply] if whole else [reply],
        "tools": [add],
    }
    (found,), _ = read_chats(file(row, name=name))
    expected = Chat((*prompt, reply), "w?\n\nWhere?\n\nHere.", True, (add,))
    assert found == expected


def test_tools_alone_go_with_texts(file):
    row = {"prompt": "w?", "completion": "Rain.", "tools": [tool("weather")]}
    (found,), _ = read_chats(file(row))
    assert found == Chat((user("w?"), said("Rain.")), "w?", True, (tool("weather"),))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": "a", "completion": [user("b"), calls("f")]},
            r"the assistant's message, alone or after .* \['user', 'assistant'\]",
        ),
        (
            {"prompt": [user("a"), calls("f")], "completion": "b"},
            "the prompt must end with a message to answer",
        ),
        ({"prompt": [], "completion": [calls("f")]}, "field 'prompt' must be str or"),
        (
            {"prompt": "a", "completion": [{**calls("f"), "weight": 1}]},
            "field 'completion', message 1: the key 'weight' is not known",
        ),
    ],
)
def test_completions_with_calls_that_are_refused(file, row, reason):
    with pytest.raises(ValueError, match=reason):
        read_chats(file(row))


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_named(tmp_path, indent):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=indent))
    with pytest.raises(ValueError, match=r"rows.json:1: the file is one JSON array, a"):
        read_chats(path)


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.parquet"])
def test_nulls_that_a_table_filled_in_are_absent(file, name):
    """Arrow gives all structs of a column the same fields, and writes them so."""
    call = {"id": None, "function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    turns = [
        {**user("1"), "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        said("2"),
    ]
    properties = {"a": {"type": "integer", "enum": None}, "b": None}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    row = {"messages": turns, "tools": [tool], "prompt": None, "completion": None}
    (found,), _ = read_chats(file(row, name=name))
    arguments = {"name": "f", "arguments": {"a": 1}}
    called = {"role": "assistant", "tool_calls": [{"function": arguments}]}
    assert found.messages == (user("1"), called, said("2"))
    kept = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert found.tools[0]["function"]["parameters"] == kept


def test_rows_of_several_layouts_in_one_table_have_that_of_their_fields(file):
    row = {"messages": None, "text": None, "prompt": "1+1=", "completion": "2"}
    (found,), _ = read_chats(file(row))
    assert found.only_last
    assert found.messages == (user("1+1="), said("2"))


@pytest.mark.parametrize("arguments", ['{"a": 1, "b": null}', {"a": 1, "b": 2}])
def test_arguments_of_a_call_become_an_object(file, arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [user("1"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    (found,), _ = read_chats(file({"messages": turns}))
    [read] = found.messages[1]["tool_calls"]
    assert read["function"]["arguments"]["a"] == 1
    # A null in a text is one that somebody wrote.
    assert "b" in read["function"]["arguments"]


@pytest.mark.parametrize("calls", ['[{"function": {}}]', [3], {"name": "f"}])
def test_calls_that_are_no_list_of_calls_are_refused(file, calls):
    turns = [user("1"), {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(ValueError, match=r"message 2: .*tool_calls"):
        read_chats(file({"messages": turns}))


def test_a_call_whose_arguments_are_no_object_is_a_bad_row(file):
    def row(arguments):
        call = {"function": {"name": "f", "arguments": arguments}}
        return {"messages": [user("1"), {"role": "assistant", "tool_calls": [call]}]}

    path = file(row("{}"), row("a=1"), row([1]))
    with pytest.raises(ValueError, match=r":2: .*message 2: .*call 'f' must be an obj"):
        read_chats(path)
    found, report = read_chats(path, on_bad_row="skip")
    assert (len(found), report.num_bad) == (1, 2)
