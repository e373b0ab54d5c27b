"""A tiny model behind the server, on loopback, in threads of the test's process."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator

import openai
import pytest
import uvicorn
from starlette.applications import Starlette

from jaxrl_post.data.lengths import Lengths
from jaxrl_post.data.replies import format_of
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.data.tools import expresses_tools
from jaxrl_post.rollout.weights import Published
from jaxrl_post.sampler import Engine, EngineConfig, SamplingParams
from jaxrl_post.serve.app import Access, make_app
from jaxrl_post.serve.calls import Served
from jaxrl_post.serve.grammars.compiler import Grammars
from jaxrl_post.serve.service import Service
from tests import tiny

# ChatML with reasoning and tools, as Qwen 3 has them.
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    # The marks of the format; no conversation of the tests reaches this.
    "{%- if never %}<think></think>{% endif %}"
)
CONFIG = dataclasses.replace(tiny.CONFIG, vocab_size=320, max_length=512)
SIZES = EngineConfig(
    num_slots=8,
    max_prompt_tokens=383,
    max_tokens=383,
    context_tokens=384,
    steps_per_call=4,
    prefill_tokens=256,
    max_stop_ids=10,
)

ANYBODY = Access()


def make_tokenizer(
    template: str | None = TEMPLATE, kind: type[Tokenizer] = Tokenizer
) -> Tokenizer:
    texts = ['The answer is {"name": "add", "arguments": {"a": 1}} user system 12'] * 3
    trained = Tokenizer.train(texts, vocab_size=290)
    trained.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    trained.backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    end = trained.backend.token_to_id("<|im_end|>")
    return kind(
        trained.backend,
        stop_ids=(end, trained.eos_id),
        chat_template=template,
        special_tokens=trained.special_tokens,
        num_embeddings=CONFIG.vocab_size,
    )


def make_served(
    tokenizer: Tokenizer, sizes: EngineConfig = SIZES, *, start: bool = True, **options
) -> Served:
    """The model; its service runs in a thread unless the test is to pump it."""
    engine = Engine(CONFIG, sizes, detokenize=tokenizer.decode)
    sampler = Published(engine, tiny.params(CONFIG), version=7)
    service = Service(sampler, max_samples=options.pop("max_samples", 4096))
    if start:
        service.start()
    values = {
        "service": service,
        "tokenizer": tokenizer,
        "grammars": Grammars(tokenizer, CONFIG.vocab_size),
        "form": format_of(tokenizer.chat_template),
        "name": "tiny",
        "max_model_len": sizes.max_length,
        "max_tokens": 128,
        "defaults": SamplingParams(),
        "timeout_s": 300.0,
        "tools": expresses_tools(tokenizer),
        "lengths": Lengths.of(tokenizer),
    }
    return Served(**(values | options))


@contextlib.contextmanager
def listening(
    served: Served, access: Access = ANYBODY, app: Starlette | None = None
) -> Iterator[str]:
    """The address of a server, without /v1."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        app = make_app(served, access) if app is None else app
        config = uvicorn.Config(app, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


# No longer than a file: a server draws random numbers, which hypothesis notices.
@pytest.fixture(scope="module")
def served(tokenizer) -> Iterator[Served]:
    model = make_served(tokenizer)
    yield model
    assert model.service.close(60)
    assert model.service.error is None


@pytest.fixture(scope="module")
def url(served) -> Iterator[str]:
    with listening(served) as address:
        yield address


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def until(condition, what: str, seconds: float = 300.0) -> None:
    """Waits for a condition, a bounded time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(0.02)


@pytest.fixture
def cancelled(served, monkeypatch) -> list[int]:
    """Prompt ids of cancelled samples, which take seconds if they are not stopped."""
    sampler, found = served.service._sampler, list[int]()
    dispatch, cancel = sampler.dispatch, served.service.cancel

    def slowly() -> None:
        time.sleep(0.1)
        dispatch()

    def recorded(prompt_id: int) -> None:
        found.append(prompt_id)
        cancel(prompt_id)

    monkeypatch.setattr(sampler, "dispatch", slowly)
    monkeypatch.setattr(served.service, "cancel", recorded)
    return found
