"""A request that asks for too much costs itself alone, and is a 4xx at each try."""

import asyncio
import json
import os
import signal
import time

import httpx
import pytest

from jaxrl_post.serve import app, fields
from jaxrl_post.serve.calls import ApiError
from jaxrl_post.serve.grammars.compiler import GrammarError, Grammars
from tests.serve.conftest import CONFIG

pytestmark = pytest.mark.processes

ASK = [{"role": "user", "content": "What?"}]


def refs(n, link=lambda to: {"$ref": to}):
    chain = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{n}": {"type": "string"}}}


def nested(n, key):
    return json.loads(f'{{"{key}":' * n + "{}" + "}" * n)


def rules(n, rule):
    chain = "\n".join(f"r{i}: {rule.format(i + 1)}" for i in range(n))
    return f'start: r0\n{chain}\nr{n}: "a"'


HOSTILE = {
    "refs": ("json", refs(5000)),
    "refs in objects": (
        "json",
        refs(3000, lambda to: {"properties": {"a": {"$ref": to}}}),
    ),
    "refs in arrays": ("json", refs(3000, lambda to: {"items": {"$ref": to}})),
    "refs in anyOf": ("json", refs(3000, lambda to: {"anyOf": [{"$ref": to}]})),
    "refs in allOf": ("json", refs(3000, lambda to: {"allOf": [{"$ref": to}]})),
    "nested arrays": ("json", nested(300, "items")),
    "nested const": ("json", {"const": nested(300, "a")}),
    "rules": ("lark", rules(10_000, "r{}")),
    "rules before text": ("lark", rules(10_000, "r{} 'b'".replace("'", '"'))),
    "mutual rules": (
        "lark",
        "start: r0\n"
        + "\n".join(
            f'r{i}: r{(i + 1) % 3000} | "a" r{(i + 7) % 3000}' for i in range(3000)
        ),
    ),
    "terminals": (
        "lark",
        rules(10_000, '"a" r{}').replace("r", "R").replace("staRt", "start"),
    ),
    "parentheses": ("lark", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "negations": ("lark", "start: T\nT: " + "~(" * 5000 + '"a"' + ")" * 5000),
    "repetitions": ("lark", 'start: "a"{1000000}'),
    "a regex with parentheses": ("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "a repeated regex": ("regex", "a{1000000}"),
    "regex repetitions": ("regex", "(((a{1000}){1000}){1000})"),
    "a large regex": ("regex", r"\w" * 300_000),
    "a regex of marks": ("regex", "<think>" * 200_000),
    "a large enum": ("json", {"enum": [f"v{i}" for i in range(100_000)]}),
    "many properties": ("json", {"properties": {f"p{i}": {} for i in range(20_000)}}),
    "many patterns": (
        "json",
        {"patternProperties": {f"^a{i}.*$": {} for i in range(500)}},
    ),
    "all of any": (
        "json",
        {
            "allOf": [
                {"anyOf": [{"required": [f"{k}{i}"]} for k in "pq"]} for i in range(20)
            ]
        },
    ),
}
KINDS = {"json": "json", "lark": "grammar", "regex": "regex"}


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, CONFIG.vocab_size, seconds=2)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_grammar_that_is_too_much_is_refused(grammars, name):
    kind, value = HOSTILE[name]
    with pytest.raises(GrammarError):
        getattr(grammars, kind)(value)
    # The next one is compiled.
    assert grammars.choice(["yes"])()


@pytest.mark.parametrize("name", ["refs", "rules", "mutual rules", "a repeated regex"])
def test_the_server_answers_the_next_request(url, name):
    kind, value = HOSTILE[name]
    body = {"messages": ASK, "max_tokens": 3}
    wild = body | {"structured_outputs": {KINDS[kind]: value}}
    answer = httpx.post(f"{url}/v1/chat/completions", json=wild, timeout=300)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    fine = body | {"structured_outputs": {"choice": ["a"]}}
    answer = httpx.post(f"{url}/v1/chat/completions", json=fine, timeout=300)
    assert answer.status_code == 200, answer.text


def test_a_tool_whose_schema_is_too_much_is_refused(url):
    tool = {"type": "function", "function": {"name": "f", "parameters": refs(5000)}}
    body = {"messages": ASK, "tools": [tool], "tool_choice": "required"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 400, answer.text


def test_a_compiler_that_is_killed_while_idle_costs_nothing(grammars):
    assert grammars.choice(["yes"])()
    process = grammars._trials._child._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    assert grammars.choice(["yes"])()


def many(item, size=2**20):
    return f"[{','.join([item] * (size // (len(item) + 1)))}]"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (fields.ChatFields, f'{{"messages":{many("1")}}}'),
        (fields.ChatFields, f'{{"messages":{many("{}")}}}'),
        (fields.ChatFields, f'{{"messages":{many('{"role":"user"}')}}}'),
        (
            fields.ChatFields,
            f'{{"messages":[{{"role":"user","content":{many("1")}}}]}}',
        ),
        (
            fields.ChatFields,
            f'{{"messages":[{{"role":"assistant","tool_calls":{many("{}")}}}]}}',
        ),
        (fields.ChatFields, f'{{"messages":[{{"role":"user"}}],"tools":{many("{}")}}}'),
        (
            fields.ChatFields,
            f'{{"messages":[{{"role":"user"}}],"bad_words":{many("1")}}}',
        ),
        (
            fields.ChatFields,
            f'{{"messages":[{{"role":"user"}}],"documents":{many("1")}}}',
        ),
        (
            fields.ChatFields,
            f"{{{','.join(f'"x{i}":1' for i in range(100_000))}}}",
        ),
        (fields.CompletionFields, f'{{"prompt":{many("{}")}}}'),
        (fields.CompletionFields, f'{{"prompt":{many("[-1]")}}}'),
        (fields.GenerateFields, f'{{"token_ids":{many("-1")}}}'),
        (fields.DetokenizeFields, f'{{"tokens":{many("-1")}}}'),
    ],
)
def test_a_million_errors_are_told_by_the_first(kind, body):
    begin = time.process_time()
    with pytest.raises(ApiError) as told:
        app._read(kind, body.encode())
    assert told.value.status == 400
    assert len(told.value.message) < 1500
    # Half a second on a busy machine; telling all of them took twenty.
    assert time.process_time() - begin < 3


@pytest.mark.parametrize(
    "body",
    ["[" * 200 + "]" * 200, '{"a":' * 200 + "1" + "}" * 200, "[" * 10**6, "[{" * 10**5],
)
def test_what_is_nested_too_deep_is_refused(body):
    with pytest.raises(ApiError, match=r"nested more than 128|more than 262144 lists"):
        app._read(fields.ChatFields, f'{{"messages":{body}}}'.encode())


def test_brackets_in_texts_do_not_count():
    text = json.dumps('[{"\\' * 300_000)
    body = f'{{"messages":[{{"role":"user","content":{text}}}]}}'
    read = app._read(fields.ChatFields, body.encode())
    assert read.messages[0].content == json.loads(text)


def test_the_loop_goes_on_while_a_long_text_is_tokenised(tokenizer):
    text, turns = "12 user " * 50_000, 0

    async def run():
        nonlocal turns
        work = asyncio.ensure_future(asyncio.to_thread(tokenizer.encode, text))
        while not work.done():
            await asyncio.sleep(0.001)
            turns += 1
        return await work

    ids = asyncio.run(run())
    assert tokenizer.decode(ids) == text
    # Without a turn for others there is one, at the end.
    assert turns > 3
