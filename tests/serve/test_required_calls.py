"""`tool_choice`: in every format what is required can be written, and is read back."""

import functools
import json

import httpx
import numpy as np
import pytest

from jaxrl_post.data import replies
from jaxrl_post.data.replies import format_of, parse
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.serve.grammars.compiler import GrammarError, Grammars
from tests.serve.conftest import CONFIG, listening, make_served

CHATS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
)
CALLS = replies.CALLS_BEGIN + replies.CALL_BEGIN
ENDS = replies.CALL_END + replies.CALLS_END
SEPARATOR = replies.CALL_SEPARATOR
HARMONY = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{args}"


def text_of(value):
    """A value between tags."""
    return value if isinstance(value, str) else json.dumps(value)


def qwen_coder(name, args):
    pairs = "".join(
        f"<parameter={key}>\n{text_of(value)}\n</parameter>\n"
        for key, value in json.loads(args).items()
    )
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def glm(line, name, args):
    pairs = "".join(
        f"<arg_key>{key}</arg_key>{line}<arg_value>{text_of(value)}</arg_value>{line}"
        for key, value in json.loads(args).items()
    )
    return f"<tool_call>{name}{line}{pairs}</tool_call>"


# By model: what its template writes, and a call of it as it writes it.
MODELS = {
    "qwen 3": (
        "<tool_call></tool_call></think>",
        '<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>',
    ),
    "qwen3-coder": ("<tool_call><function=<parameter=</tool_call>", qwen_coder),
    "glm 4.5": (
        "<tool_call><arg_key></tool_call></think>",
        functools.partial(glm, "\n"),
    ),
    "glm 4.7": (
        "<tool_call></arg_key><arg_value><arg_key></tool_call></think>",
        functools.partial(glm, ""),
    ),
    "llama 3.1": ("<|python_tag|>", '{{"name": "{name}", "parameters": {args}}}'),
    "llama 3.2": (
        "<|start_header_id|>ipython",
        '{{"name": "{name}", "parameters": {args}}}',
    ),
    "mistral": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS][{{"name": "{name}", "arguments": {args}}}]',
    ),
    "mistral with [ARGS]": ("[TOOL_CALLS][ARGS]", "[TOOL_CALLS]{name}[ARGS]{args}"),
    "deepseek v3": (
        CALLS + "function" + SEPARATOR + "```json" + ENDS,
        f"{CALLS}function{SEPARATOR}{{name}}\n```json\n{{args}}\n```{ENDS}",
    ),
    "deepseek v3.1": (
        CALLS + SEPARATOR + ENDS,
        f"{CALLS}{{name}}{SEPARATOR}{{args}}{ENDS}",
    ),
    "deepseek r1": (
        CALLS + SEPARATOR + "```json" + ENDS + "</think>",
        f"{CALLS}function{SEPARATOR}{{name}}\n```json\n{{args}}\n```{ENDS}",
    ),
    "gpt-oss": ("<|channel|>", HARMONY),
}
MARKS = [
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]",
    replies.CALLS_BEGIN, replies.CALLS_END, replies.CALL_BEGIN, replies.CALL_END,
    SEPARATOR, "<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>",
    "<|end|>", "<|constrain|>", "<|call|>", "<|return|>",
]  # fmt: skip


def schema(*values):
    return {
        "type": "object",
        "properties": {"a": {"enum": list(values)}},
        "required": ["a"],
        "additionalProperties": False,
    }


TOOLS = {"add": schema(1, 2), "look_up": schema("x")}


def tokenizer_of(model, marks):
    """A tokenizer with the model's marks as tokens, or as text."""
    texts = ['commentary analysis {"name": "add", "arguments": {"a": 1}} look_up'] * 3
    trained = Tokenizer.train(texts, vocab_size=290)
    if marks:
        trained.backend.add_special_tokens(MARKS)
    named = ("<|return|>", "<|call|>") if model == "gpt-oss" else ()
    ids = [trained.backend.token_to_id(name) for name in named]
    return Tokenizer(
        trained.backend,
        stop_ids=(*(i for i in ids if i is not None), trained.eos_id),
        chat_template=CHATS + "{% if never %}" + MODELS[model][0] + "{% endif %}",
        special_tokens=trained.special_tokens,
        num_embeddings=CONFIG.vocab_size,
    )


class Walk:
    """A constraint, and which texts it allows."""

    def __init__(self, tokenizer, tools, thinking=False):
        self.tokenizer = tokenizer
        form = format_of(tokenizer.chat_template)
        grammars = Grammars(tokenizer, CONFIG.vocab_size)
        self.make = grammars.call(form, tools, thinking=thinking)

    def after(self, text):
        """Tokens that may follow a text; None if it is not allowed to its end."""
        constraint = self.make()
        for token in self.tokenizer.encode(text):
            # Nothing may end before the text does.
            assert not set(self.tokenizer.stop_ids) & allowed(constraint)
            if token not in allowed(constraint):
                return None
            constraint.advance(token)
        return allowed(constraint)


def allowed(constraint):
    bits = np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def written(model, name, arguments):
    form = MODELS[model][1]
    return (
        form(name, arguments)
        if callable(form)
        else form.format(name=name, args=arguments)
    )


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("model", MODELS)
def test_a_required_call_is_one_of_the_tools(model, marks):
    tokenizer = tokenizer_of(model, marks)
    form, walk = format_of(tokenizer.chat_template), Walk(tokenizer, TOOLS)
    last = tokenizer.stop_ids
    if model == "gpt-oss" and marks:
        last = (tokenizer.backend.token_to_id("<|call|>"),)
    for name, arguments in (("add", '{"a": 2}'), ("look_up", '{"a": "x"}')):
        text = written(model, name, arguments)
        # Nothing but the end comes after it.
        assert walk.after(text) == set(last)
        [call] = parse(text, form, schemas=TOOLS).calls
        assert (call.name, json.loads(call.arguments)) == (name, json.loads(arguments))
    for name, arguments in (
        ("add", '{"a": 3}'),
        ("add", '{"a": "x"}'),
        ("remove", '{"a": 1}'),
    ):
        assert walk.after(written(model, name, arguments)) is None
    assert walk.after("I would rather talk.") is None


@pytest.mark.parametrize("model", MODELS)
def test_a_named_call_is_of_this_tool(model):
    walk = Walk(tokenizer_of(model, True), {"add": TOOLS["add"]})
    assert walk.after(written(model, "add", '{"a": 1}'))
    assert walk.after(written(model, "look_up", '{"a": "x"}')) is None


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("model", ["qwen 3", "deepseek r1", "glm 4.5", "glm 4.7"])
def test_reasoning_that_the_prompt_has_begun_comes_before_the_call(model, marks):
    tokenizer = tokenizer_of(model, marks)
    form, walk = format_of(tokenizer.chat_template), Walk(tokenizer, TOOLS, True)
    call = written(model, "add", '{"a": 1}')
    text = f"Two\nlines.</think>\n\n{call}"
    assert walk.after(text) == set(tokenizer.stop_ids)
    reply = parse(text, form, thinking=True, schemas=TOOLS)
    assert (reply.reasoning, len(reply.calls)) == ("Two\nlines.", 1)
    # After the thoughts there is a call.
    assert walk.after("Two.</think>\n\nNo") is None


def test_gpt_oss_may_think_in_its_channel_first():
    tokenizer = tokenizer_of("gpt-oss", True)
    walk = Walk(tokenizer, TOOLS)
    begin = "<|channel|>analysis<|message|>Two\nlines."
    text = f"{begin}<|end|><|start|>assistant{written('gpt-oss', 'add', '{"a": 1}')}"
    assert walk.after(text) == {tokenizer.backend.token_to_id("<|call|>")}
    reply = parse(text, format_of(tokenizer.chat_template))
    assert (reply.reasoning, len(reply.calls)) == ("Two\nlines.", 1)
    assert walk.after("<|channel|>final") is None


# Arguments of the formats with tags: name, schema, and whether a text
# of a value is allowed.
VALUES = {
    "a text": (
        {"type": "string"},
        {"1": True, "two\nlines ": True, '"<b>"': True, "": True},
    ),
    "a choice": ({"enum": ["x", "<y>"]}, {"x": True, "<y>": True, "z": False}),
    "a number": ({"type": "integer"}, {"12": True, "1.5": False, "x": False}),
    "a number or nothing": (
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"12": True, "null": True, "x": False},
    ),
    "a reference": (
        {"$ref": "#/$defs/Point"},
        {'{"x": 1}': True, '{"y": 1}': False, "x": False},
    ),
    "a list": ({"type": "array", "items": {"type": "boolean"}}, {"[true]": True}),
}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
POINT = {**POINT, "additionalProperties": False}


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("model", ["qwen3-coder", "glm 4.5"])
@pytest.mark.parametrize("kind", VALUES)
def test_values_between_tags_have_the_types_of_the_schema(model, kind, marks):
    schema, texts = VALUES[kind]
    tools = {
        "f": {
            "type": "object",
            "properties": {"a": schema, "b": {"type": "string"}},
            "required": ["a"],
            "$defs": {"Point": POINT},
        }
    }
    tokenizer = tokenizer_of(model, marks)
    walk, form = Walk(tokenizer, tools), format_of(tokenizer.chat_template)
    for text, fits in texts.items():
        for more in ({}, {"b": "3"}):
            said = written(model, "f", json.dumps({"a": text, **more}))
            if not fits:
                assert walk.after(said) is None, text
                continue
            assert walk.after(said) == set(tokenizer.stop_ids), text
            [call] = parse(said, form, schemas=tools).calls
            read = json.loads(call.arguments)
            assert text_of(read.pop("a")) == text
            assert read == more


@pytest.mark.parametrize("model", ["qwen3-coder", "glm 4.5"])
def test_arguments_that_no_schema_names_are_texts(model):
    tokenizer = tokenizer_of(model, True)
    free, none = (
        Walk(tokenizer, {"f": {}}),
        Walk(tokenizer, {"f": {"properties": {}, "additionalProperties": False}}),
    )
    for arguments, allowed_by in (
        ("{}", (free, none)),
        ('{"a": "x", "b_1": "3"}', (free,)),
    ):
        said = written(model, "f", arguments)
        for walk in (free, none):
            assert (walk.after(said) is not None) == (walk in allowed_by)
        [call] = parse(said, format_of(tokenizer.chat_template)).calls
        assert json.loads(call.arguments) == json.loads(arguments)


@pytest.mark.parametrize("name", ["a b", "a<b", "a\nb", "a[b"])
@pytest.mark.parametrize(
    ("model", "refused"), [("deepseek v3", True), ("gpt-oss", True), ("qwen 3", False)]
)
def test_a_name_that_could_not_be_read_is_refused(model, refused, name):
    tokenizer = tokenizer_of(model, True)
    if refused:
        with pytest.raises(GrammarError, match="is a name with spaces or marks"):
            Walk(tokenizer, {name: {}})
    else:
        assert Walk(tokenizer, {name: {}})


def test_the_server_answers_with_the_required_call():
    served = make_served(tokenizer_of("gpt-oss", True))
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in TOOLS.items()
    ]
    body = {
        "messages": [{"role": "user", "content": "2+2="}],
        "tools": tools,
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "max_tokens": 60,
        "n": 4,
        "seed": 1,
    }
    with listening(served) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
    assert served.service.close(60)
    # A model of random numbers may think until its tokens are spent.
    choices = [c for c in answer.json()["choices"] if c["finish_reason"] != "length"]
    assert choices
    for each in choices:
        assert each["finish_reason"] == "tool_calls"
        [call] = each["message"]["tool_calls"]
        assert call["function"]["name"] == "look_up"
        assert json.loads(call["function"]["arguments"]) == {"a": "x"}
