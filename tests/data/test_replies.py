"""Replies of each family, taken apart; and piece by piece, as a stream has them."""

import json

import pytest

from jaxrl_post.data.replies import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEPARATOR,
    CALLS_BEGIN,
    CALLS_END,
    Format,
    format_of,
    parse,
)

HERMES = Format("hermes", thinks=True)
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
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", HERMES),
        ('{"name": "f", "parameters": ', Format("llama")),
        ('[TOOL_CALLS][{"name": "f"', Format("mistral")),
        ("[TOOL_CALLS]f[ARGS]{", Format("mistral")),
        (f"{CALL_BEGIN}f{CALL_SEPARATOR}{{{CALL_END}", Format("deepseek")),
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


def test_an_answer_in_json_is_no_call_of_llama():
    reply = parse('{"colour": "red"}', Format("llama"))
    assert (reply.content, reply.broken) == ('{"colour": "red"}', 0)


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


@pytest.mark.parametrize("text", ["", "plain text", "a < b"])
def test_a_reply_without_marks_is_its_text(text):
    for name in ("hermes", "llama", "mistral", "deepseek", "harmony", None):
        assert parse(text, Format(name)).content == text


def test_a_template_tells_the_format():
    assert format_of(None) == Format()
    assert format_of("<tool_call> </think>") == Format("hermes", thinks=True)
    assert format_of(CALL_BEGIN).name == "deepseek"
    assert format_of("<|channel|> <|python_tag|>").name == "harmony"
    assert format_of("[TOOL_CALLS]").name == "mistral"
    assert format_of("<|python_tag|>").name == "llama"
