"""A stream of a reply is always a prefix of the whole reply."""

import random
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
    parse,
)

CALL = '{"name": "f", "arguments": {}}'
TAGS = ("<tool_call>", "</tool_call>")
# Pieces of replies of a format, whole and broken.
PARTS = {
    "hermes": (
        *(*TAGS, CALL, '{"name": "f", "arguments": {"a": "</tool_call>"}}', "{", '"'),
        "<tool",
    ),
    "qwen_coder": (
        *(*TAGS, "\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"),
        "<function=f>",
    ),
    "glm": (
        *(*TAGS, "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n", "f"),
        "<arg_key>",
    ),
    "llama": (
        *("<|python_tag|>", '{"name": "f", "parameters": {}}', '{"name": "Ada"}'),
        *("{", ";", "print(1)"),
    ),
    "mistral": (
        *("[TOOL_CALLS]", f"[{CALL}]", '[{"name": "f", "arguments": {"a": "[ARGS]"}}]'),
        *("f", "[ARGS]", '{"a": 1}', '{"a": "[TOOL_CALLS]"}', "[CALL_ID]12"),
    ),
    "deepseek": (
        *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, CALL_SEPARATOR),
        f"f{CALL_SEPARATOR}{{}}",
        f'function{CALL_SEPARATOR}f\n```json\n{{"a": "{CALL_END}"}}\n```',
    ),
    "harmony": (
        *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>"),
        *("<|constrain|>json", "assistant", " to=functions.f", "{}", '{"a": "<|end|>"'),
        *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "}"),
        "<|start|>assistant<|channel|>commentary to=functions.f<|message|>",
    ),
    None: (),
}
SHARED = ("x", " y", "\n", "\n\n", " ", "<think>", "</think>", "<", "</thi")


def check(pieces, form, thinking, tools):
    """Reads what a stream has so far, after every piece and then whole."""
    options = {"thinking": thinking, "tools": tools}
    whole = parse("".join(pieces), form, **options)
    said = ""
    content = reasoning = ""
    calls = ()
    for piece in pieces:
        said += piece
        told = parse(said, form, finished=False, **options)
        assert told.content.startswith(content)
        assert (told.reasoning or "").startswith(reasoning)
        assert told.calls[: len(calls)] == calls
        content, reasoning, calls = told.content, told.reasoning or "", told.calls
        assert whole.content.startswith(content)
        assert (whole.reasoning or "").startswith(reasoning)
        assert whole.calls[: len(calls)] == calls


@pytest.mark.parametrize("name", [*get_args(FormatName.__value__), None])
@pytest.mark.parametrize("letters", [False, True])
def test_what_was_told_is_never_taken_back(name, letters):
    draw = random.Random(f"{name} {letters}")
    for _ in range(100 if letters else 1000):
        form = Format(name, thinks=draw.random() < 0.6 and name != "harmony")
        thinking = form.thinks and draw.random() < 0.3
        pieces = draw.choices(PARTS[name] + SHARED, k=draw.randint(1, 8))
        if letters:
            pieces = list("".join(pieces))
        check(pieces, form, thinking, tools=draw.random() < 0.8)


@pytest.mark.parametrize(
    ("before", "said", "content"),
    [
        ("\n", "<think>Why</think>\n\nHello", "Hello"),
        ("\n\n", "<think>\nWhy\n</think>\n\n42", "42"),
        (" ", "7", " 7"),
    ],
)
def test_white_space_waits_for_reasoning_that_may_follow(before, said, content):
    form = Format("hermes", thinks=True)
    assert parse(before, form, finished=False).content == ""
    assert parse(before + said, form).content == content


def test_the_parts_of_a_stream():
    form = Format("hermes", thinks=True)
    said = ["\n<think>", "\nWhy \n", "</think>", "\n\nI look.", "\n", "<tool_call>"]
    said += [CALL, "</tool_call>"]
    told = []
    for size in range(1, len(said) + 1):
        reply = parse("".join(said[:size]), form, finished=False)
        told.append((reply.reasoning, reply.content, len(reply.calls)))
    assert told == [
        # A mark may be the beginning of a longer one.
        (None, "", 0),
        ("Why", "", 0),
        ("Why", "", 0),
        ("Why", "I look.", 0),
        ("Why", "I look.", 0),
        ("Why", "I look.", 0),
        ("Why", "I look.", 0),
        ("Why", "I look.", 1),
    ]
