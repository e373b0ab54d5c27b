"""Bad input is answered with a 4xx that names it; nothing else is disturbed."""

import json
import socket
import threading
import time

import httpx
import openai
import pytest

from jaxrl_post.serve.app import Access
from tests.serve.conftest import (
    SIZES,
    listening,
    make_served,
    make_tokenizer,
    until,
)

ASK = [{"role": "user", "content": "What?"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def post(url, body, path="/v1/chat/completions", **options):
    if not isinstance(body, (bytes, str)):
        body = json.dumps(body)
    return httpx.post(url + path, content=body, timeout=60, **options)


def refused(answer, status=400):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"messages": [', "the body is no JSON"),
        (b"\xff\xfe", "the body is no JSON"),
        ("[" * 100_000, "the body is nested more than 128 levels deep"),
        ("[" * 300_000, "more than 262144 lists or objects"),
        ("[" * 100, "the body is no JSON"),
        ("[]", "must be a JSON object; got list"),
        ("", "the body is no JSON"),
        ({}, "messages: Field required"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "robot"}]}, "messages.0.role"),
        ({"messages": ASK, "max_token": 5}, "max_token: there is no such field"),
        ({"messages": ASK, "temperature": -1}, "temperature: Input should be"),
        ('{"messages": [{"role": "user"}], "temperature": NaN}', "temperature"),
        ('{"messages": [{"role": "user"}], "top_p": Infinity}', "top_p"),
        ({"messages": ASK, "n": 0}, "n: Input should be"),
        ({"messages": ASK, "n": 129}, "n: Input should be"),
        ({"messages": ASK, "max_tokens": 0}, "max_tokens"),
        ({"messages": ASK, "max_tokens": 384}, "maximum context length is 384"),
        ({"messages": ASK, "max_tokens": 10**20}, "max_tokens: Input should be"),
        ({"messages": ASK, "temperature": 1e39}, "temperature: Input should be"),
        ({"messages": ASK, "top_k": 99999999999}, "top_k: Input should be"),
        ({"messages": ASK, "stop_token_ids": [2**31]}, "stop_token_ids.0: Input"),
        ({"messages": ASK, "stop_token_ids": [320]}, "stop ids must lie in 0..319"),
        (
            {
                "messages": [
                    *ASK,
                    {
                        "role": "assistant",
                        "content": "3",
                        "prompt_token_ids": [5],
                        "generation_token_ids": [10**20],
                    },
                    *ASK,
                ]
            },
            "messages.1.generation_token_ids.0: Input should be",
        ),
        ({"messages": ASK, "stop": [""]}, "stop"),
        ({"messages": ASK, "stop": ["x"] * 17}, "stop"),
        (
            {"messages": ASK, "stop": ["x", "<|im_end|>\n"]},
            "stop: '<|im_end|>\\n' has the special token '<|im_end|>' in it",
        ),
        ({"messages": ASK, "presence_penalty": 2.5}, "presence_penalty: Input should"),
        ({"messages": ASK, "frequency_penalty": -3}, "frequency_penalty: Input should"),
        (
            {"messages": ASK, "repetition_penalty": 0},
            "repetition_penalty: Input should",
        ),
        ({"messages": ASK, "logit_bias": {"5": 101}}, "logit_bias.5: Input should be"),
        ({"messages": ASK, "logit_bias": {"five": 1}}, "logit_bias.five"),
        (
            {"messages": ASK, "logit_bias": {"320": 1}},
            "logit_bias ids must lie in 0..31",
        ),
        (
            {"messages": ASK, "logit_bias": {str(n): 1 for n in range(1025)}},
            "logit_bias: Dictionary should have at most 1024",
        ),
        ({"messages": ASK, "min_tokens": -1}, "min_tokens: Input should be"),
        (
            {"messages": ASK, "min_tokens": 5, "max_tokens": 4},
            "min_tokens must be at most max_tokens, 4; got 5",
        ),
        ({"messages": ASK, "bad_words": [""]}, "bad_words.0: String should have"),
        ({"messages": ASK, "bad_words": ["\ud83d"]}, "bad_words.0: Input should be"),
        (
            {
                "messages": ASK,
                "structured_outputs": {"choice": ["12"]},
                "bad_words": ["1", "12"],
            },
            "no token is left: min_tokens, bad_words and the form",
        ),
        ({"messages": ASK, "top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"messages": ASK, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": ASK, "tool_choice": "required"}, "tool_choice needs tools"),
        (
            {
                "messages": ASK,
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice: 'g' is none of the tools ['f']",
        ),
        ({"messages": ASK, "stream_options": {}}, "stream_options belong to stream"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content: this model reads text alone",
        ),
        (
            {
                "messages": ASK,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nope"}},
                },
            },
            "schema: it cannot be compiled: Invalid type: nope",
        ),
        ({"messages": ASK, "structured_outputs": {"regex": "("}}, "regex: it cannot"),
        ({"messages": ASK, "structured_outputs": {"grammar": "x"}}, "grammar: it"),
        ({"messages": ASK, "structured_outputs": {}}, "give one of json, regex"),
        (
            {"messages": ASK, "chat_template_kwargs": {"messages": 1}},
            "variables must not be named messages",
        ),
        (
            {"messages": [{"role": "user", "content": "long " * 200}]},
            "maximum context length is 384",
        ),
    ],
)
def test_a_chat_that_makes_no_sense(url, body, said):
    assert said in refused(post(url, body))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": []}, "give 1 to 128 prompts; got 0"),
        ({"prompt": [[]]}, "an empty prompt"),
        ({"prompt": ["x", ""], "add_special_tokens": False}, "an empty prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [320]}, "token ids must lie in 0..319"),
        ({"prompt": [320], "stream": True}, "token ids must lie in 0..319"),
        ({"prompt": "1", "top_k": 99999999999}, "top_k: Input should be"),
        ({"prompt": "1", "stop_token_ids": [2**31]}, "stop_token_ids.0: Input"),
        ({"prompt": "x", "suffix": "y"}, "suffix: this sampler"),
    ],
)
def test_a_completion_that_makes_no_sense(url, body, said):
    assert said in refused(post(url, body, "/v1/completions"))


HALF = [{"role": "user", "content": "caf\ud83d"}]


def deep(levels):
    arguments = '{"a": ' + "[" * levels + "]" * levels + "}"
    call = {"function": {"name": "f", "arguments": arguments}}
    return [*ASK, {"role": "assistant", "tool_calls": [call]}, *ASK]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {"messages": HALF}, "half of a surrogate pair"),
        ("/v1/completions", {"prompt": "caf\ud83d"}, "half of a surrogate pair"),
        ("/tokenize", {"prompt": "caf\ud83d"}, "half of a surrogate pair"),
        ("/tokenize", {"messages": HALF}, "half of a surrogate pair"),
        ("/v1/chat/completions", {"messages": deep(3000)}, "nested too deep"),
        (
            "/v1/chat/completions",
            {"messages": ASK, "structured_outputs": {"regex": "\ud83d"}},
            "regex",
        ),
        (
            "/v1/chat/completions",
            {"messages": ASK, "structured_outputs": {"choice": ["\ud83d"]}},
            "choice",
        ),
    ],
)
def test_what_is_no_text_is_refused(url, path, body, said):
    assert said in refused(post(url, body, path))


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"top_k": 2**31}, "sampling_params.top_k: Input should be"),
        ({"stop_token_ids": [2**31]}, "sampling_params.stop_token_ids.0: Input"),
        ({"stop": ["x"] * 17}, "sampling_params.stop"),
    ],
)
def test_sampling_parameters_that_make_no_sense(url, sampling, said):
    body = {"token_ids": [5], "sampling_params": sampling}
    assert said in refused(post(url, body, "/inference/v1/generate"))


def test_a_temperature_that_is_almost_zero_is_greedy(url):
    # Divided by it, logits of float32 overflow.
    def said(temperature):
        sampling = {"temperature": temperature, "max_tokens": 6, "logprobs": 1}
        body = {"token_ids": [5, 6], "sampling_params": sampling}
        answer = post(url, body, "/inference/v1/generate")
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        return choice["token_ids"], choice["logprobs"]["content"][0]["logprob"]

    ids, first = said(0)
    for almost in (1e-5 / 2, 1e-10, 1e-40, 5e-324):
        assert said(almost) == (ids, pytest.approx(first, abs=1e-5))
    # At a temperature that counts the first log-prob is another.
    assert said(0.01)[1] > first + 0.1


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_has_foreseen_is_told_as_json(
    url, served, stream, caplog, monkeypatch
):
    def fail(*given, **options):
        raise RuntimeError("nobody knows why")

    body = {"messages": ASK, "max_tokens": 2, "stream": stream}
    with monkeypatch.context() as patch:
        patch.setattr("jaxrl_post.serve.chat.parse", fail)
        answer = post(url, body)
    told = answer.text
    if stream:
        events = [line[6:] for line in told.splitlines() if line]
        assert events[-1] == "[DONE]"
        told = events[-2]
    else:
        assert answer.status_code == 500
    error = json.loads(told)["error"]
    assert error["type"] == "server_error"
    assert error["message"] == (
        "the server failed with this request: RuntimeError: nobody knows why"
    )
    assert "Traceback" in caplog.text
    until(lambda: served.service.samples == 0, "the sample ends")
    assert post(url, body).status_code == 200


def test_another_model_is_not_here(url):
    message = refused(post(url, {"model": "gpt", "messages": ASK}), 404)
    assert message == "model: there is no 'gpt' here; this server has 'tiny'"


def test_an_unknown_path_and_method(url):
    assert "GET /v1/models tells" in refused(httpx.get(f"{url}/v2/chat"), 404)
    refused(httpx.get(f"{url}/v1/chat/completions"), 405)


def test_an_oversize_body_is_not_read(url):
    too_much = b"x" * (4 * 2**20 + 1)
    assert "more than 4194304 bytes" in refused(post(url, too_much), 413)

    def pieces():
        for _ in range(5):
            yield b"x" * 2**20

    # Without a content-length it shows while it is read.
    answer = httpx.post(f"{url}/v1/chat/completions", content=pieces(), timeout=60)
    refused(answer, 413)


def test_a_template_that_cannot_express_tools():
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = make_served(make_tokenizer(plain))
    with listening(model) as url:
        message = refused(post(url, {"messages": ASK, "tools": [TOOL]}))
        assert "does not write tools" in message
    assert model.service.close(60)


def test_a_key_is_asked_for(served):
    with listening(served, Access(api_key="secret")) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        for path in ("/v1/models", "/metrics"):
            assert "API key" in refused(httpx.get(url + path), 401)
        wrong = {"Authorization": "Bearer secre"}
        refused(post(url, {"messages": ASK}, headers=wrong), 401)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
            assert client.models.list().data[0].id == "tiny"


def test_more_samples_than_may_wait_are_answered_429(tokenizer):
    model = make_served(tokenizer, max_samples=4)
    with listening(model) as url:
        body = {"messages": ASK, "n": 5, "max_tokens": 2}
        for streamed in (False, True):
            answer = post(url, body | {"stream": streamed})
            assert "at most 4 may" in refused(answer, 429)
            assert answer.headers["retry-after"] == "1"
        assert post(url, body | {"n": 4}).status_code == 200
    assert model.service.close(60)


def test_an_answer_that_takes_too_long_is_stopped(tokenizer):
    model = make_served(tokenizer, timeout_s=0.001)
    with listening(model) as url:
        answer = post(url, {"messages": ASK, "max_tokens": 100})
        assert answer.status_code == 504
        assert "no answer within 0.001 s" in answer.json()["error"]["message"]
        until(lambda: model.service.samples == 0, "the sample is stopped")
    assert model.service.close(60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_samples(served, url, stream, cancelled):
    body = json.dumps(
        {"messages": ASK, "n": 8, "max_tokens": 128, "ignore_eos": True, "seed": 1}
        | {"stream": stream}
    )
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        until(lambda: served.service.samples > 0, "the samples have begun")
        if stream:
            assert connection.recv(100)
    until(lambda: served.service.samples == 0, "the samples are stopped")
    assert len(cancelled) == 1


def test_what_others_ask_is_not_disturbed(client, url):
    def ask():
        return client.chat.completions.create(
            model="tiny",
            messages=ASK,
            max_tokens=60,
            seed=3,
            extra_body={"return_token_ids": True},
        )

    alone = ask().choices[0].token_ids
    found = []
    thread = threading.Thread(target=lambda: found.append(ask()), daemon=True)
    thread.start()
    while thread.is_alive():
        refused(post(url, {"messages": ASK, "max_tokens": 0}))
        time.sleep(0.01)
    thread.join(60)
    assert found[0].choices[0].token_ids == alone


def test_a_sampler_that_fails_answers_everybody(tokenizer):
    model = make_served(tokenizer)
    failure = RuntimeError("the device is gone")

    def fail():
        raise failure

    model.service._sampler.dispatch = fail
    with listening(model) as url:
        answer = post(url, {"messages": ASK})
        assert answer.status_code == 500
        assert "the device is gone" in answer.json()["error"]["message"]
        assert post(url, {"messages": ASK}).status_code == 503
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert health.json() == {"status": "ended: the device is gone"}
    assert model.service.error is failure


def test_logits_that_are_not_finite_fail_their_request_alone(tokenizer):
    import jax

    model = make_served(tokenizer)
    sampler = model.service._sampler
    good = sampler.params
    sampler.params = jax.tree.map(lambda a: a * float("nan"), good)
    with listening(model) as url:
        answer = post(url, {"messages": ASK})
        assert answer.status_code == 500
        assert "the logits of token 0 were not finite" in answer.text
        sampler.params = good
        assert post(url, {"messages": ASK, "max_tokens": 3}).status_code == 200
    assert model.service.close(60)
    assert SIZES.num_slots == 8
