"""Slow work for one client does not keep the others waiting."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.serve.grammars.compiler import Grammars
from jaxrl_post.serve.threads import listen
from tests.serve.conftest import CONFIG, listening, make_served, make_tokenizer

ASK = [{"role": "user", "content": "What?"}]
SCHEMA = {"type": "object"}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {"messages": ASK, "max_tokens": 1}


class Gate:
    """Holds up work until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.texts: list[str] = []

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(60)


class SlowTokenizer(Tokenizer):
    """Tokenises as long as the test wants it to."""

    gate: Gate | None = None

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        if self.gate is not None:
            self.gate.texts.append(text)
            self.gate()
        return super().encode(text, special=special)


class SlowGrammars(Grammars):
    """Compiles as long as the test wants it to."""

    gate: Gate | None = None

    def _compiled(self, *given, **options):
        if self.gate is not None:
            self.gate()
        return super()._compiled(*given, **options)


@pytest.fixture(scope="module")
def slow():
    tokenizer = make_tokenizer(kind=SlowTokenizer)
    model = make_served(tokenizer, grammars=SlowGrammars(tokenizer, CONFIG.vocab_size))
    with listening(model) as url:
        yield model, url
    assert model.service.close(60)


@pytest.mark.parametrize(
    ("what", "path", "body"),
    [
        ("tokenizer", "/v1/chat/completions", CHAT),
        ("tokenizer", "/episodes/one/v1/chat/completions", CHAT),
        ("tokenizer", "/v1/completions", {"prompt": "1+2=", "max_tokens": 1}),
        ("tokenizer", "/tokenize", {"prompt": "1+2="}),
        ("tokenizer", "/tokenize", {"messages": ASK}),
        (
            "grammars",
            "/v1/chat/completions",
            CHAT | {"structured_outputs": {"json": SCHEMA}},
        ),
        (
            "grammars",
            "/v1/chat/completions",
            CHAT | {"tools": [TOOL], "tool_choice": "required"},
        ),
        (
            "grammars",
            "/v1/completions",
            {"prompt": [5], "max_tokens": 1, "structured_outputs": {"regex": "a*"}},
        ),
        (
            "grammars",
            "/inference/v1/generate",
            {
                "token_ids": [5],
                "sampling_params": {
                    "max_tokens": 1,
                    "structured_outputs": {"choice": ["a"]},
                },
            },
        ),
    ],
)
def test_the_server_answers_others_meanwhile(slow, what, path, body):
    model, url = slow
    httpx.post(f"{url}/episodes", json={"id": "one"})
    part, gate = getattr(model, what), Gate()
    part.gate = gate
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, url + path, json=body, timeout=90)
            try:
                assert gate.reached.wait(60)
                assert httpx.get(f"{url}/health", timeout=30).status_code == 200
                assert not asked.done()
            finally:
                gate.opened.set()
            assert asked.result().status_code == 200, asked.result().text
    finally:
        part.gate = None


def test_an_episode_that_ends_while_its_prompt_is_made(slow):
    model, url = slow
    httpx.post(f"{url}/episodes", json={"id": "ends"})
    gate = model.tokenizer.gate = Gate()
    path = f"{url}/episodes/ends"
    try:
        with ThreadPoolExecutor(1) as pool:
            call = f"{path}/v1/chat/completions"
            asked = pool.submit(httpx.post, call, json=CHAT, timeout=90)
            try:
                assert gate.reached.wait(60)
                assert httpx.post(f"{path}/end", json={}).status_code == 200
            finally:
                gate.opened.set()
            assert asked.result().status_code == 409
    finally:
        model.tokenizer.gate = None
    assert httpx.get(path).json()["calls"] == {}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab" * 10**6}),
        ("/v1/completions", {"prompt": ["a", "ab" * 10**6]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "ab" * 10**6}]},
        ),
    ],
)
def test_a_text_that_is_too_long_for_sure_is_not_tokenised(slow, path, body):
    model, url = slow
    gate = model.tokenizer.gate = Gate()
    gate.opened.set()
    answer = httpx.post(url + path, json=body, timeout=90)
    model.tokenizer.gate = None
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert (
        "maximum context length is 384 tokens. However, your prompt"
        in (error["message"])
    )
    assert gate.texts == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_answer_waits_for_no_acknowledgement(host):
    with listen(host, 0) as listener:
        address = listener.getsockname()[:2]
        with socket.create_connection(address), listener.accept()[0] as connection:
            option = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert option
