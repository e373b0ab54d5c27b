"""Replies of each family, taken apart; and piece by piece, as a stream has them."""

import json
from typing import get_args

import pytest

from jaxrl_post.data.replies import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEPARATOR,
    CALLS_BEGIN,
    CALLS_END,
    Format,
    FormatName,
    format_of,
    parse,
)

HERMES = Format("hermes", thinks=True)
CODER = Format("qwen_coder")
GLM = Format("glm", thinks=True)
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
MUL = '{"name": "mul", "arguments": {}}'


def calls(reply):
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


WHOLE = {
    "hermes": (
        f"I add.<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{MUL}</tool_call>",
        HERMES,
        "I add.",
        [("add", {"a": 1, "b": [2]}), ("mul", {})],
    ),
    "hermes, no end mark": (
        f"<tool_call>\n{MUL}",
        HERMES,
        "",
        [("mul", {})],
    ),
    "qwen_coder": (
        "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\ntwo\nlines\n\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=mul>\n</function>\n</tool_call>",
        CODER,
        "I add.",
        [("add", {"a": "1", "b": "two\nlines\n"}), ("mul", {})],
    ),
    "qwen_coder, no end mark": (
        "<tool_call>\n<function=f>\n<parameter=a>\n<b> & {}\n</parameter>\n</function>",
        CODER,
        "",
        [("f", {"a": "<b> & {}"})],
    ),
    "glm 4.5": (
        "\nI add.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value> 1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value></arg_value>\n</tool_call>\n"
        "<tool_call>mul\n</tool_call>",
        GLM,
        "\nI add.",
        [("add", {"a": " 1", "b": ""}), ("mul", {})],
    ),
    "glm 4.7": (
        "<tool_call>add<arg_key>a</arg_key><arg_value>two\nlines</arg_value>"
        "<arg_key>b</arg_key><arg_value>[2]</arg_value></tool_call>"
        "<tool_call>mul</tool_call>",
        GLM,
        "",
        [("add", {"a": "two\nlines", "b": "[2]"}), ("mul", {})],
    ),
    "llama": (
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        Format("llama"),
        "",
        [("add", {"a": 1})],
    ),
    "llama, two": (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "f", "parameters": {}}',
        Format("llama"),
        "",
        [("add", {"a": 1}), ("f", {})],
    ),
    "mistral, a list": (
        f"Well.[TOOL_CALLS][{ADD}, {MUL}]",
        Format("mistral"),
        "Well.",
        [("add", {"a": 1, "b": [2]}), ("mul", {})],
    ),
    "mistral, by name": (
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}',
        Format("mistral"),
        "",
        [("add", {"a": 1}), ("f", {})],
    ),
    "deepseek, fenced": (
        f"{CALLS_BEGIN}{CALL_BEGIN}function{CALL_SEPARATOR}add\n"
        '```json\n{"a": 1}\n```'
        f"{CALL_END}\n{CALL_BEGIN}function{CALL_SEPARATOR}f\n"
        "```json\n{}\n```"
        f"{CALL_END}{CALLS_END}",
        Format("deepseek"),
        "",
        [("add", {"a": 1}), ("f", {})],
    ),
    "deepseek, plain": (
        f"So.{CALLS_BEGIN}{CALL_BEGIN}add{CALL_SEPARATOR}"
        f'{{"a": 1}}{CALL_END}{CALLS_END}',
        Format("deepseek"),
        "So.",
        [("add", {"a": 1})],
    ),
    "harmony": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
        "commentary to=functions.add <|constrain|>json<|message|>"
        '{"a": 1}<|call|>',
        Format("harmony"),
        "",
        [("add", {"a": 1})],
    ),
    "harmony, addressed before the channel": (
        "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}",
        Format("harmony"),
        "",
        [("f", {})],
    ),
}


@pytest.mark.parametrize("case", WHOLE)
def test_calls_of_each_family(case):
    text, form, content, expected = WHOLE[case]
    reply = parse(text, form)
    assert reply.content == content
    assert calls(reply) == expected
    assert reply.broken == 0


@pytest.mark.parametrize("case", WHOLE)
def test_without_tools_calls_are_text(case):
    text, form, *_ = WHOLE[case]
    reply = parse(text, form, tools=False)
    assert not reply.calls
    if form.name != "harmony":
        assert reply.content == text


def test_a_message_of_harmony_without_its_end_takes_no_other_with_it():
    start, channel = "<|start|>assistant", "<|channel|>"
    final = f"{start}{channel}final<|message|>4"
    reply = parse(f"{channel}analysis<|message|>Hm.{final}", Format("harmony"))
    assert (reply.reasoning, reply.content) == ("Hm.", "4")
    call = f"{channel}commentary to=functions.f<|message|>{{"
    reply = parse(call + final, Format("harmony"))
    assert (reply.content, reply.broken, reply.calls) == (call + "4", 1, ())


@pytest.mark.parametrize("case", WHOLE)
def test_a_stream_only_grows(case):
    text, form, *_ = WHOLE[case]
    whole, before = parse(text, form), parse("", form, finished=False)
    for size in range(len(text) + 1):
        reply = parse(text[:size], form, finished=False)
        assert reply.content.startswith(before.content.rstrip("\n"))
        assert whole.content.startswith(reply.content.rstrip("\n"))
        assert reply.calls[: len(before.calls)] == before.calls
        assert whole.calls[: len(reply.calls)] == reply.calls
        assert (whole.reasoning or "").startswith(reply.reasoning or "")
        before = reply


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('<tool_call>{"name": "f", </tool_call>', HERMES),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', HERMES),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', HERMES),
        ("<tool_call>[]</tool_call>", HERMES),
        ('<tool_call>{"name": "f"}</tool_call>', HERMES),
        ('<tool_call>{"name": "f", "arguments": {}, "parameters": {}}', HERMES),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>', HERMES),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", HERMES),
        ('{"name": "f", "parameters": ', Format("llama")),
        ('[TOOL_CALLS][{"name": "f"', Format("mistral")),
        ("[TOOL_CALLS]f[ARGS]{", Format("mistral")),
        ("[TOOL_CALLS]f[ARGS]{}.", Format("mistral")),
        ("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]", Format("mistral")),
        (f"{CALL_BEGIN}f{CALL_SEPARATOR}{{{CALL_END}", Format("deepseek")),
        # JSON has no NaN, and 1e999 is an infinity to Python.
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', HERMES),
        (
            '<tool_call>{"name": "f", "arguments": {"a": [-Infinity]}}</tool_call>',
            HERMES,
        ),
        ('{"name": "f", "parameters": {"a": 1e999}}', Format("llama")),
        # Templates would fail on it.
        (
            '<tool_call>{"name": "f", "arguments": {"a": '
            + "[" * 100
            + "]" * 100
            + "}}</tool_call>",
            HERMES,
        ),
        ("<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>", GLM),
        ("<tool_call>f g\n</tool_call>", GLM),
        ("<tool_call></tool_call>", GLM),
        ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>.</tool_call>", GLM),
        # A cut call may have lost arguments.
        ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n", GLM),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', CODER),
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n", CODER),
        ("<tool_call><function=f><parameter=a>1</function></tool_call>", CODER),
        ("<tool_call><function=f g></function></tool_call>", CODER),
        # A value without its end would take the next argument with it.
        (
            "<tool_call><function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n"
            "</parameter>\n</function></tool_call>",
            CODER,
        ),
        (
            "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key>"
            "<arg_value>2</arg_value></tool_call>",
            GLM,
        ),
        (
            "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_value>2</arg_value>"
            "</tool_call>",
            GLM,
        ),
        (
            f"{CALL_BEGIN}f{CALL_SEPARATOR}{{}}{CALL_BEGIN}f{CALL_SEPARATOR}{{}}",
            Format("deepseek"),
        ),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}', Format("mistral")),
    ],
)
def test_a_call_that_cannot_be_read_stays_in_the_text_and_is_counted(text, form):
    reply = parse(text, form)
    assert reply.calls == ()
    assert reply.content == text
    assert reply.broken == 1


def test_a_broken_call_beside_a_good_one():
    reply = parse(f"<tool_call>{{</tool_call><tool_call>{MUL}</tool_call>", HERMES)
    assert calls(reply) == [("mul", {})]
    assert reply.broken == 1
    assert reply.content == "<tool_call>{</tool_call>"


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (r'<tool_call>{"name": "f\ud800", "arguments": {"\udc00": "\ud83d!"}}', HERMES),
        (r'{"name": "f\ud800", "parameters": {"\udc00": "\ud83d!"}}', Format("llama")),
        (
            '[TOOL_CALLS]f\ufffd[ARGS]{"\\udc00": "\\ud83d!"}',
            Format("mistral"),
        ),
        (
            "<|channel|>commentary to=functions.f\ufffd<|message|>"
            r'{"\udc00": "\ud83d!"}<|call|>',
            Format("harmony"),
        ),
    ],
)
def test_half_of_a_surrogate_pair_is_a_replacement_character(text, form):
    [call] = parse(text, form).calls
    assert call.name == "f\ufffd"
    assert call.arguments == '{"\ufffd": "\ufffd!"}'
    # A whole pair is a character.
    [call] = parse(text.replace(r"\ud83d!", r"\ud83d\ude00"), form).calls
    assert json.loads(call.arguments) == {"\ufffd": "\N{GRINNING FACE}"}


POINT = {"type": "object", "properties": {"x": {"type": "number"}}}
# A schema; what a text means; texts that have none of its types.
TYPES = [
    ({}, {"1": "1", "null": "null", ' "a" ': ' "a" '}, []),
    ({"type": "string"}, {"1": "1", "": "", "{}": "{}"}, []),
    ({"type": "integer"}, {"1": 1, " -2\n": -2, "3.0": 3}, ["", "1.5", "x", "true"]),
    ({"type": "number"}, {"1": 1, "1.5": 1.5, "1e-07": 1e-07}, ["NaN", "1e999", "one"]),
    ({"type": "boolean"}, {"true": True, "False": False}, ["1", "yes", "None"]),
    ({"type": "null"}, {"null": None, "None": None}, ["", "0"]),
    ({"type": "array"}, {'[1, "a"]': [1, "a"]}, ["1, 2", "{}"]),
    ({"type": "object"}, {'{"a": null}': {"a": None}}, ["[]", "{'a': 1}"]),
    ({"type": ["string", "null"]}, {"null": None, "1": "1"}, []),
    ({"type": ["string", "integer"]}, {"1": 1, "1.5": "1.5"}, []),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"1": 1, "null": None}, ["x"]),
    ({"oneOf": [{"type": "boolean"}, {}]}, {"true": True, "x": "x"}, []),
    ({"enum": [1, 2]}, {"1": 1, "7": 7}, ["x"]),
    ({"enum": ["1", "2"]}, {"1": "1"}, []),
    ({"const": True}, {"true": True}, ["x"]),
    ({"$ref": "#/$defs/Point"}, {'{"x": 1}': {"x": 1}}, ["x"]),
    ({"allOf": [{"$ref": "#/$defs/Point"}]}, {"{}": {}}, ["x"]),
    ({"$ref": "#/$defs/Itself"}, {"1": "1"}, []),
    ({"items": {"type": "integer"}}, {"[1]": [1]}, ["1"]),
    # An invalid schema gives no types.
    ({"type": "int"}, {"1": "1"}, []),
    ({"type": [7], "anyOf": 3}, {"1": "1"}, []),
    (True, {"1": "1"}, []),
]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"),
        (
            CODER,
            "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>",
        ),
    ],
)
@pytest.mark.parametrize("case", TYPES)
def test_the_schema_gives_a_text_between_tags_its_type(form, said, case):
    schema, meanings, wrong = case
    tools = {
        "f": {
            "properties": {"a": schema},
            "$defs": {"Point": POINT, "Itself": {"$ref": "#/$defs/Itself"}},
        }
    }
    for text, value in meanings.items():
        reply = parse(said.replace("{}", text, 1), form, schemas=tools)
        assert (calls(reply), reply.broken) == ([("f", {"a": value})], 0)
        assert type(json.loads(reply.calls[0].arguments)["a"]) is type(value)
    for text in wrong:
        reply = parse(said.replace("{}", text, 1), form, schemas=tools)
        assert (reply.calls, reply.broken) == ((), 1), text


def test_other_arguments_have_the_type_of_additional_properties():
    tools = {"f": {"additionalProperties": {"type": "integer"}}}
    said = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert calls(parse(said, GLM, schemas=tools)) == [("f", {"a": 1})]
    assert calls(parse(said, GLM, schemas={"g": {}})) == [("f", {"a": "1"})]


@pytest.mark.parametrize(
    "text",
    [
        '{"colour": "red"}',
        '{"name": "Ada"}',
        '{"name": "Ada", "age": 36}',
        '{"name": "Ada", "parameters": {"height": 2}, "age": 36}',
        '{"type": "person", "name": "Ada", "parameters": {}}',
    ],
)
def test_an_answer_in_json_is_no_call_of_llama(text):
    reply = parse(text, Format("llama"))
    assert (reply.calls, reply.content, reply.broken) == ((), text, 0)


@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_a_call_of_llama_may_say_that_it_is_a_function(key):
    text = f'\n<|python_tag|>{{"type": "function", "name": "f", "{key}": {{"a": 1}}}}'
    assert calls(parse(text, Format("llama"))) == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("said", "form", "marks"),
    [
        (
            'So.<tool_call>{"name": "f", "arguments": {"a": "MARKS"}}</tool_call>',
            HERMES,
            r"</tool_call>\"<tool_call>",
        ),
        (
            'So.<tool_call>{"name": "f", "arguments": {"a": "MARKS"}}',
            HERMES,
            "</tool_call>",
        ),
        (
            '[TOOL_CALLS]f[ARGS]{"a": "MARKS"}[TOOL_CALLS]g[CALL_ID]1[ARGS]{}',
            Format("mistral"),
            r"[ARGS]\"[TOOL_CALLS][CALL_ID]",
        ),
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": "MARKS"}}]',
            Format("mistral"),
            "[ARGS][TOOL_CALLS]",
        ),
        (
            f'{CALL_BEGIN}f{CALL_SEPARATOR}{{"a": "MARKS"}}{CALL_END}',
            Format("deepseek"),
            CALL_END + CALL_BEGIN,
        ),
        (
            "<|channel|>commentary to=functions.f<|message|>"
            '{"a": "MARKS"}<|call|><|channel|>final<|message|>So.<|end|>',
            Format("harmony"),
            r"<|end|>\\<|call|>\"<|channel|>final<|message|>",
        ),
        (
            '<|channel|>commentary to=functions.f<|message|>{"a": "MARKS"}',
            Format("harmony"),
            "<|end|>",
        ),
    ],
)
def test_marks_inside_of_the_strings_of_a_call_are_text(said, form, marks):
    reply = parse(said.replace("MARKS", marks), form)
    assert reply.broken == 0
    assert calls(reply)[0] == ("f", {"a": json.loads(f'"{marks}"')})
    assert reply.content == ("So." if "So." in said else "")


def test_a_call_with_a_quotation_mark_too_many_takes_no_other_with_it():
    broken = '<tool_call>{"name": "f, "arguments": {}}</tool_call>'
    reply = parse(f"{broken}<tool_call>{MUL}</tool_call>", HERMES)
    assert (reply.content, reply.broken) == (broken, 1)
    assert calls(reply) == [("mul", {})]


@pytest.mark.parametrize("text", ["7", "{", "<|python_tag|>print(1)"])
def test_text_of_llama_is_text(text):
    assert parse(text, Format("llama")).content == text


def test_arguments_written_as_text_are_read():
    written = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert calls(parse(written, HERMES)) == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("Hm.", True, "Hm.", ""),
        ("Yes.", False, None, "Yes."),
        ("Yes <think>.", False, None, "Yes <think>."),
    ],
)
def test_reasoning(text, thinking, reasoning, content):
    reply = parse(text, HERMES, thinking=thinking)
    assert (reply.reasoning, reply.content) == (reasoning, content)


def test_reasoning_of_harmony():
    text = "<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>Yes."
    reply = parse(text, Format("harmony"))
    assert (reply.reasoning, reply.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("So: <|channel|>final<|message|>7<|end|>", None, "So: 7"),
        ("<|channel|>analysis<|message|>Hm.<|end|>It is 7.", "Hm.", "It is 7."),
        ("<|channel|>final<|message|>7<|end|>\n<|start|>assistant", None, "7"),
        ("<|channel|>final<|message|>7<|end|> to=x<|channel|>comm", None, "7"),
        (
            "<|channel|>commentary to=functions.f<|message|>{<|call|>It is 7.",
            None,
            "<|channel|>commentary to=functions.f<|message|>{<|call|>It is 7.",
        ),
    ],
)
def test_text_outside_of_the_channels_of_harmony_is_not_lost(text, reasoning, content):
    reply = parse(text, Format("harmony"))
    assert (reply.reasoning, reply.content) == (reasoning, content)


@pytest.mark.parametrize("text", ["", "plain text", "a < b"])
def test_a_reply_without_marks_is_its_text(text):
    for name in (*get_args(FormatName.__value__), None):
        assert parse(text, Format(name)).content == text


def test_a_template_tells_the_format():
    assert format_of(None) == Format()
    assert format_of("<tool_call> </think>") == Format("hermes", thinks=True)
    assert format_of(CALL_BEGIN).name == "deepseek"
    assert format_of("<|channel|> <|python_tag|>").name == "harmony"
    assert format_of("<tool_call><arg_key></think>") == Format("glm", thinks=True)
    assert format_of("<tool_call><function=<parameter=").name == "qwen_coder"
    # Seed-OSS has tags of its own.
    assert format_of("<seed:tool_call><function=<parameter=").name is None
    assert format_of("[TOOL_CALLS]").name == "mistral"
    assert format_of("<|python_tag|>").name == "llama"
