"""Inputs of a template, its permissions, and its errors."""

import datetime
import enum
import time
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers

from jaxrl_post.data import templates
from jaxrl_post.data.chat import MessageLike, Options, render, render_text
from jaxrl_post.data.learned import answered
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.envs import Message

PLAIN = Tokenizer.train(["user assistant 1+2=3"] * 3, vocab_size=280)
USER = {"role": "user", "content": "1+2="}
ANSWER = {"role": "assistant", "content": "3"}
TOOL = {"type": "function", "function": {"name": "add"}}


def templated(template, **special_tokens):
    backend = tokenizers.Tokenizer.from_str(PLAIN.backend.to_str())
    return Tokenizer(
        backend, stop_ids=(1,), chat_template=template, special_tokens=special_tokens
    )


def text_of(template, messages=(USER,), options=None, **more):
    return render_text(templated(template), messages, options or Options(), **more)


# Inputs of a template.


@dataclass(frozen=True)
class Call:
    role: str
    content: str
    tool_calls: Any = None
    name: str | None = None


def test_a_turn_with_more_than_text_is_what_a_mapping_is():
    template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    calls = ({"function": {"name": "add", "arguments": {"a": 1}}},)
    turn = Call("assistant", "", tool_calls=calls)
    assert isinstance(turn, MessageLike)
    expected = (
        '{"role": "assistant", "content": "", "tool_calls": '
        '[{"function": {"name": "add", "arguments": {"a": 1}}}]}\n'
    )
    assert text_of(template, [turn]) == expected
    mapping = {"role": "assistant", "content": "", "tool_calls": calls, "name": None}
    assert text_of(template, [mapping]) == expected
    plain = text_of(template, [Message("user", "<ü>")])
    assert plain == '{"role": "user", "content": "<ü>"}\n'


def test_a_template_sees_plain_values_alone():
    class Color(enum.StrEnum):
        RED = "red"

    template = "{{ messages[0].content }} {{ messages[0].content.name is defined }}"
    assert text_of(template, [{"role": "user", "content": Color.RED}]) == "red False"
    with pytest.raises(
        TokenizerError, match=r"tools must be made of what JSON has"
    ) as e:
        text_of("{{ tools }}", options=Options(tools=[{"type": object()}]))
    assert "of type object" in str(e.value)
    with pytest.raises(TokenizerError, match=r"messages\[1\] must be made of"):
        text_of("", [USER, {"role": "user", "content": {1, 2}}])


def test_a_message_without_a_role_is_refused():
    with pytest.raises(
        TokenizerError, match=r"^chat: a message needs a role; got {'co"
    ):
        text_of("", [{"content": "?"}])


def test_a_conversation_without_messages_is_refused():
    with pytest.raises(TokenizerError, match=r"at least one message; got none"):
        text_of("", [])


def test_variables_and_special_tokens_have_names():
    tokenizer = templated("{{ eos_token }}{{ tools }}{{ mood }}", eos_token="<|eos|>")
    assert render_text(tokenizer, [USER]) == "<|eos|>None"
    options = Options(variables={"mood": "calm", "eos_token": "<end>"})
    assert render_text(tokenizer, [USER], options) == "<end>Nonecalm"
    with pytest.raises(
        ValueError, match=r"^Options: variables must not be named .*; got t"
    ):
        Options(variables={"tools": []})


def test_the_time_is_an_option():
    template = "{{ strftime_now('%d %b %Y') }}"
    options = Options(now=datetime.datetime(2024, 7, 26))
    assert text_of(template, options=options) == "26 Jul 2024"
    assert text_of("{{ strftime_now('%Y') | int > 2000 }}") == "True"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(), "plain"),
        (Options(tools=[TOOL]), "with tools"),
        (Options(tools=[]), "with tools"),
        (Options(tools=[TOOL], template="default"), "plain"),
        (Options(template="rag"), "documents"),
    ],
)
def test_which_of_several_templates_serves(options, expected):
    named = {"default": "plain", "tool_use": "with tools", "rag": "documents"}
    assert text_of(named, options=options) == expected


def test_a_template_that_is_not_there_is_named():
    with pytest.raises(TokenizerError, match=r"no chat template 'x'; .*; got default$"):
        text_of("plain", options=Options(template="x"))
    with pytest.raises(
        TokenizerError, match=r"no chat template 'default'; .*; got rag$"
    ):
        text_of({"rag": "documents"})
    with pytest.raises(
        TokenizerError, match=r"no chat template 'default'; .*; got none"
    ):
        text_of(None)


@pytest.mark.parametrize("single", ["$A <|eos|>", "<|eos|> $A <|eos|>", "<|eos|> $A"])
def test_a_prompt_does_not_end_with_an_eos_that_the_tokenizer_appends(single):
    tokenizer = Tokenizer(
        tokenizers.Tokenizer.from_str(PLAIN.backend.to_str()), stop_ids=PLAIN.stop_ids
    )
    tokenizer.backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, special_tokens=[("<|eos|>", PLAIN.eos_id)]
    )
    before = (PLAIN.eos_id,) * single.startswith("<|eos|>")
    text = PLAIN.encode("1+2=")
    assert render(tokenizer, [Message("user", "1+2=")]) == (*before, *text)
    prompt, answer = answered(tokenizer, [Message("user", "1+2=")], "3")
    assert (prompt, answer) == ((*before, *text), (*PLAIN.encode("3"), PLAIN.eos_id))
    # One that stands in the text is of the text.
    own = render(tokenizer, [Message("user", "1<|eos|>")])
    assert own == (*before, *PLAIN.encode("1<|eos|>"))


def test_without_a_template_a_message_is_its_text():
    with pytest.raises(
        TokenizerError, match=r"without a chat template a message is its"
    ):
        render(PLAIN, [{"role": "user", "content": [{"text": "1"}]}])


# A message that is continued.

SHOUTING = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}end"


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("<{{ messages[-1].content }}>end", " 1 + ", "< 1 + "),
        ("<{{ messages[-1].content | trim }}>end", " 1 + ", "<1 +"),
        (
            "<{{ messages[-1].content[1].text }}>end",
            [{"text": "no"}, {"text": "1+"}],
            "<1+",
        ),
    ],
)
def test_a_continued_message_is_left_open(template, content, expected):
    messages = [USER, {"role": "assistant", "content": content}]
    tokenizer = templated(template)
    text = render_text(tokenizer, messages, prompt=False, continue_final=True)
    assert text == expected
    assert render(tokenizer, messages, continue_final=True) == tokenizer.encode(
        expected
    )


@pytest.mark.parametrize(
    ("template", "content", "prompt", "message"),
    [
        ("{{ messages[0].role }}", "1+", False, r"does not write the last message as"),
        ("{{ messages[-1].content | replace('1', 'I') }}", "1+", False, "got '1\\+'"),
        (
            "{{ messages[-1].content }}",
            None,
            False,
            r"no text to be continued; got None",
        ),
        ("{{ messages[-1].content }}", "1+", True, r"ask for one of them"),
    ],
)
def test_what_cannot_be_continued_is_refused(template, content, prompt, message):
    messages = [USER, {"role": "assistant", "content": content}]
    with pytest.raises(TokenizerError, match=f"^chat: .*{message}"):
        text_of(template, messages, prompt=prompt, continue_final=True)


# Permissions of a template.


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r if a == b %}x"
        "{% endfor %}{% endfor %}",
        "{% macro m(n) %}{{ m(n - 1) ~ m(n - 1) if n }}{% endmacro %}{{ m(60) }}",
    ],
    ids=["loops", "loops with a condition", "macros"],
)
def test_a_template_that_does_not_end_is_refused(template):
    begin = time.process_time()
    with pytest.raises(TokenizerError, match=r"more than 1,000,000 steps; does it end"):
        text_of(template)
    assert time.process_time() - begin < 60


def test_a_template_may_look_through_all_messages_for_each():
    """As GPT-OSS's does, of an agent that called five hundred tools."""
    template = (
        "{% for m in messages %}{% for other in messages[loop.index:] %}{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )
    messages = [USER, {"role": "assistant", "content": "a"}] * 500
    assert text_of(template, messages) == f"{USER['content']}a" * 500


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("\n{% for %}", "failed in line 2: "),
        ("a\nb\n{{ raise_exception('no system') }}", "failed in line 3: no system"),
        ("{{ messages[0].content + 1 }}", "failed in line 1: TypeError "),
        ("{% for x in range(10 ** 6) %}{% endfor %}", "OverflowError Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError "),
        ("{{ messages[0].update(role='x') }}", "failed in line 1: "),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% generation %}", "failed in line 1: "),
    ],
)
def test_a_failure_says_where_and_why(template, message):
    with pytest.raises(TokenizerError) as caught:
        text_of(template)
    assert str(caught.value).startswith("chat: the chat template failed")
    assert message in str(caught.value)


def test_loops_keep_what_they_know_of_themselves():
    template = (
        "{% for x in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ x }}"
        "{{ loop.previtem }}{{ loop.nextitem }}{{ loop.last }} {% endfor %}"
        "{% for x in [] %}{% else %}none{% endfor %}"
        "{% for x in [[1, [2]], [3]] recursive %}{% if x is iterable %}"
        "({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}"
    )
    expected = "1/3abFalse 2/3bacFalse 3/3cbTrue none(1(2))(3)"
    assert templates.run(template, {}).text == expected


def test_one_rendering_does_not_count_for_the_next():
    template = (
        "{% for a in range(300) %}{% for b in range(400) %}{% endfor %}{% endfor %}"
    )
    assert [templates.run(template, {}).text for _ in range(2)] == ["", ""]


# Generation blocks.


def test_generation_blocks_have_places():
    template = (
        "a{% generation %}bc{% endgeneration %}d{% generation %}{% endgeneration %}"
    )
    rendered = templates.run(template, {})
    assert rendered.text == "abcd"
    assert rendered.generated == ((1, 3), (4, 4))
    assert templates.run("abcd", {}).generated is None
    unreached = "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert templates.run(unreached, {}).generated == ()


def test_a_block_whose_place_is_unknown_does_not_count():
    template = (
        "{% macro turn(x) %}<{% generation %}{{ x }}{% endgeneration %}>{% endmacro %}"
        "ab{{ turn('c') }}"
    )
    assert templates.run(template, {}) == templates.Rendered("ab<c>", None)
