"""Parts that a chat template leaves out are found, counted, and handled."""

import json
import logging
from pathlib import Path

import pytest
import tokenizers

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data.call_forms import calls_of, taken_by
from jaxrl_post.data.chat import Options
from jaxrl_post.data.chats import Chat, Text
from jaxrl_post.data.learned import unwritten
from jaxrl_post.data.preferences import JudgedAnswer, Preference
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.envs import Message, Task
from jaxrl_post.examples.chats import Chats
from jaxrl_post.examples.packed import JudgedExamples, Pairs
from jaxrl_post.examples.tasks import fully_written

PARITY = Path(__file__).parents[1] / "parity"
CHATS = json.loads((PARITY / "fixtures" / "chat.json").read_text(encoding="utf-8"))
# Writes the roles of users and of the assistant alone, and nothing but contents.
BARE = (
    "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}]"
    "{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASK = {"role": "user", "content": "What is the weather?"}
SAID = {"role": "assistant", "content": "It is warm."}
CALL = {"function": {"name": "look", "arguments": {"city": "Paris"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "20", "name": "look"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
SYSTEM = {"role": "system", "content": "Be brief."}


def tokenizer_of(template):
    file = PARITY / "chat_templates" / f"{template}.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else template
    backend = tokenizers.Tokenizer.from_str(json.dumps(CHATS["tokenizer"]))
    stops = [backend.token_to_id(stop) for stop in ("</s>", "<|im_end|>", "<|call|>")]
    return Tokenizer(
        backend,
        stop_ids=stops,
        chat_template=source,
        special_tokens=CHATS["special_tokens"],
    )


@pytest.mark.parametrize(
    ("rows", "tools", "expected"),
    [
        ([ASK, SAID], None, ()),
        ([ASK, SAID], TOOLS, ("tools",)),
        ([ASK, CALLED, RESULT, SAID], None, ("tool calls", "messages of role 'tool'")),
        ([SYSTEM, ASK, SAID], None, ("messages of role 'system'",)),
        ([ASK, {**SAID, "reasoning_content": "warm"}], None, ("reasoning",)),
        ([{**ASK, "name": "Ada"}, SAID], None, ("names of speakers",)),
        # It stands in the text of the question, and is left out all the same.
        (
            [{**SYSTEM, "content": "What"}, ASK, SAID],
            None,
            ("messages of role 'system'",),
        ),
        # Nothing of what follows the last answer is taken.
        ([ASK, SAID, RESULT], None, ()),
    ],
)
def test_what_is_left_out_is_found(rows, tools, expected):
    options = Options(tools=tools, adapt=True)
    assert unwritten(tokenizer_of(BARE), rows, options) == expected


@pytest.mark.parametrize("template", ["qwen3", "harmony"])
def test_what_is_written_with_escapes_is_written(template):
    """JSON in JSON, quotation marks, characters beyond ASCII."""
    odd = 'a "b" \\ <c> Köln\n'
    call = {"function": {"name": "look", "arguments": {"city": odd, "n": [1, None]}}}
    rows = [
        {**SYSTEM, "content": odd},
        *({**ASK, "content": odd}, {**CALLED, "tool_calls": [call]}),
        *({**RESULT, "content": odd}, {**SAID, "content": odd}),
    ]
    options = Options(tools=CHATS["tools"], adapt=True)
    assert unwritten(tokenizer_of(template), rows, options) == ()


def test_of_several_calls_the_second_may_be_left_out():
    other = {"function": {"name": "look", "arguments": {}}}
    rows = [ASK, {**CALLED, "tool_calls": [CALL, other]}, RESULT, SAID]
    assert unwritten(tokenizer_of("harmony"), rows) == ("tool calls",)


def test_reasoning_of_turns_that_are_not_learned_does_not_count():
    rows = [ASK, {**SAID, "reasoning_content": "hm"}, ASK, SAID]
    tokenizer = tokenizer_of("qwen2_5")
    assert unwritten(tokenizer, rows, learned="last") == ()
    assert unwritten(tokenizer, rows[:3], learned="none") == ()
    assert unwritten(tokenizer, rows) == ("reasoning",)


def test_a_tool_that_nothing_called_is_named_in_its_result():
    rows = [ASK, CALLED, {**RESULT, "name": "other"}, SAID]
    options = Options(tools=TOOLS, adapt=True)
    assert unwritten(tokenizer_of("qwen3"), rows, options) == ("names of speakers",)


GOOD = Chat((ASK, SAID), "a")
BAD = Chat((ASK, {**SAID, "reasoning_content": "hm"}), "b")


def test_chats_are_counted_and_refused_left_out_or_taken(caplog):
    tokenizer = tokenizer_of(BARE)
    with pytest.raises(
        ConfigError,
        match=r"--data.on-unwritten: of 2 of 3 train examples .* out: reasoning \(2\); "
        r"the first is number 2.* allow, .* drop$",
    ):
        Chats([GOOD, BAD, BAD], []).fitting(tokenizer, 100)
    with pytest.raises(ConfigError, match=r"--data\.on-unwritten"):
        Chats([BAD], []).encode(tokenizer, "train", 0)
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        dropped = Chats([GOOD, BAD], [], "drop").fitting(tokenizer, 100)
        allowed = Chats([GOOD, BAD], [], "allow").fitting(tokenizer, 100)
    assert (dropped.size("train"), allowed.size("train")) == (1, 2)
    assert [message.count("reasoning (1)") for message in caplog.messages] == [1, 1]
    assert len(allowed.encode(tokenizer, "train", 1)) == 1
    with pytest.raises(ConfigError, match=r"of 1 of 1 train"):
        Chats([BAD], [], "drop").fitting(tokenizer, 100)


def test_a_turn_of_which_nothing_is_written_is_counted_too():
    """Such a turn is an error of its own, which says less."""
    silent = "{% if m.content %}[{{ m.role }}]{{ m.content }}</s>{% endif %}"
    template = BARE.replace("[{{ m.role }}]{{ m.content }}</s>", silent)
    called = Chat((ASK, CALLED), "b")
    with pytest.raises(
        ConfigError, match=r"of 1 of 2 train examples .*tool calls \(1\)"
    ):
        Chats([GOOD, called], []).fitting(tokenizer_of(template), 100)
    kept = Chats([GOOD, called], [], "drop").fitting(tokenizer_of(template), 100)
    assert kept.size("train") == 1


def test_pairs_and_judged_answers_and_prompts_are_looked_at():
    prompt = (Message("system", "Be brief."), Message("user", "What is it?"))
    tokenizer = tokenizer_of(BARE)
    pair = Preference(prompt, "A", "B", "it")
    match = (
        r"--data.on-unwritten: of 1 of 1 train \w+ .* messages of role 'system' \(1\)"
    )
    with pytest.raises(ConfigError, match=match):
        Pairs([pair], []).fitting(tokenizer, 100)
    with pytest.raises(ConfigError, match=match):
        JudgedExamples([JudgedAnswer(prompt, "A", True, "it")], []).fitting(
            tokenizer, 100
        )
    with pytest.raises(ConfigError, match=match):
        fully_written([Task(0, prompt, "A")], tokenizer, "train", "sums", "fail")
    tasks = [Task(0, prompt, "A"), Task(1, prompt[1:], "A")]
    assert fully_written(tasks, tokenizer, "train", "sums", "drop") == [1]
    kept = Pairs([pair], [], on_unwritten="allow").fitting(tokenizer, 100)
    assert kept.size("train") == 1


# The form in which a template takes calls.

TEXT_ALONE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<{{ c.name + ':' + "
)
TEXT_ALONE += "c.arguments }}>{% endfor %}{{ m.content or '' }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # Concatenates, so that an object is an error.
        ("c.name + ':' + c.arguments", '{"a": 1}'),
        # Writes an object as Python does.
        ("c.arguments", '{"a": 1}'),
        ("c.arguments ~ ''", '{"a": 1}'),
        ("c.arguments | tojson", {"a": 1}),
        ("c.arguments.items()", {"a": 1}),
        ("c.arguments if c.arguments is string else c.arguments | tojson", {"a": 1}),
    ],
)
def test_arguments_are_given_as_the_template_takes_them(template, expected):
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% set c = c.function %}"
        f"{{{{ {template} }}}}{{% endfor %}}{{{{ m.content or '' }}}}{{% endfor %}}"
    )
    for arguments in ({"a": 1}, '{"a": 1}'):
        calls = calls_of([{"function": {"name": "f", "arguments": arguments}}])
        [row] = taken_by(source, {}, [{"role": "assistant", "tool_calls": calls}])
        assert row["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ m.content }}", ""),
        ("{{ m.content or '' }}", ""),
        ("{% if m.content is not none %}[{{ m.content }}]{% endif %}", None),
        ("{{ m.content + '' }}", ""),
    ],
)
def test_a_content_that_says_nothing_is_what_the_template_takes(written, expected):
    source = (
        f"{{% for m in messages %}}{written}{{% for c in m.tool_calls or [] %}}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": {}}}]
    for content in ({}, {"content": ""}):
        row = {"role": "assistant", "tool_calls": calls, **content}
        assert taken_by(source, {}, [row])[0]["content"] == expected


@pytest.mark.parametrize("value", ["[]", 3, [3], [{"function": {}}], [{"name": 1}]])
def test_calls_that_are_none_are_refused(value):
    with pytest.raises(TokenizerError, match="tool_calls"):
        calls_of(value)


def arguments_of(strict=False, **more):
    return calls_of([{"name": "f", **more}], strict=strict)[0]["arguments"]


@pytest.mark.parametrize("strict", [False, True])
def test_arguments_are_unpacked_and_absent_ones_are_empty(strict):
    for arguments in ({"a": '{"b": 1}'}, {}, {"a": [1]}):
        text = json.dumps(arguments)
        for given in (arguments, text, json.dumps(text), json.dumps(json.dumps(text))):
            assert arguments_of(strict, arguments=given) == arguments
    for given in ({}, {"arguments": None}, {"arguments": ""}, {"arguments": '" "'}):
        assert arguments_of(strict, **given) == {}


@pytest.mark.parametrize(
    "arguments",
    [
        "no JSON",
        "[1]",
        '"a"',
        "null",
        "3",
        [1],
        3,
        '{"a": ',
        pytest.param("[" * 5000, id="deep"),
    ],
)
def test_arguments_that_are_no_object_stay_in_a_history_and_are_not_learned(arguments):
    assert arguments_of(arguments=arguments) == arguments
    with pytest.raises(TokenizerError, match="call 'f' must be an object, or the JSON"):
        arguments_of(True, arguments=arguments)


def test_of_a_text_nothing_is_left_out():
    assert Chats([Text("a")], []).fitting(tokenizer_of(BARE), 100).size("train") == 1
