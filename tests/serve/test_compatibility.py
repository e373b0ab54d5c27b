"""Fields that clients of OpenAI and vLLM send though they ask for nothing."""

import httpx
import pytest

from jaxrl_post.serve.fields import ChatFields, CompletionFields, GenerateSampling

ASK = [{"role": "user", "content": "What?"}]
# Fields that OpenAI's or vLLM's clients send, with the value that changes nothing.
SAMPLING = {
    "n": 1,
    "stream": False,
    "stop": [],
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "logit_bias": {},
    "min_tokens": 0,
    "bad_words": [],
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "spaces_between_special_tokens": True,
    "return_tokens_as_token_ids": False,
    "prompt_cache_retention": "24h",
}
CHAT = {
    "verbosity": "medium",
    "modalities": ["text"],
    "include_reasoning": True,
    "add_special_tokens": False,
    "echo": False,
    "function_call": "auto",
    "prediction": None,
    "chat_template": None,
}


def post(url, path, body):
    return httpx.post(url + path, json=body, timeout=60)


def test_what_asks_for_nothing_is_accepted(url):
    chat = {"messages": ASK, "max_tokens": 1} | SAMPLING | CHAT
    answer = post(url, "/v1/chat/completions", chat)
    assert answer.status_code == 200, answer.text
    completion = {"prompt": "1", "max_tokens": 1} | SAMPLING
    answer = post(url, "/v1/completions", completion)
    assert answer.status_code == 200, answer.text


def test_null_is_a_field_left_out(url):
    nulls = {name: None for name in ChatFields.model_fields if name != "messages"}
    answer = post(url, "/v1/chat/completions", {"messages": ASK, **nulls})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 1
    nulls = {name: None for name in CompletionFields.model_fields if name != "prompt"}
    answer = post(url, "/v1/completions", {"prompt": "1", **nulls})
    assert answer.status_code == 200, answer.text
    sampling = dict.fromkeys(GenerateSampling.model_fields)
    body = {"token_ids": [5], "sampling_params": sampling, "stream": None}
    answer = post(url, "/inference/v1/generate", body)
    assert answer.status_code == 200, answer.text
    schema = {"type": "json_schema", "json_schema": {"name": None, "schema": None}}
    options = {"stream_options": {"include_usage": None}, "stream": True}
    body = {"messages": ASK, "response_format": schema, "max_tokens": 1, **options}
    assert "error" not in post(url, "/v1/chat/completions", body).text


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"verbosity": "low"}, "verbosity: this sampler does not have it"),
        ({"modalities": ["text", "audio"]}, "modalities: this sampler"),
        ({"include_reasoning": False}, "include_reasoning: this sampler"),
        (
            {"allowed_token_ids": [1]},
            "allowed_token_ids: this sampler does not have it",
        ),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids: this"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens: t"),
        ({"functions": [{"name": "f"}]}, "functions: this sampler"),
        # An unknown name is refused for every value.
        ({"max_token": None}, "max_token: there is no such field"),
        ({"messages": None}, "messages: Field required"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation: this sampler",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(url, field, said):
    answer = post(url, "/v1/chat/completions", {"messages": ASK} | field)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_refusal_of_an_earlier_answer_is_its_text(url):
    def tokens(kind):
        said = {"role": "assistant", "content": [{"type": kind, kind: "I may not."}]}
        body = {"messages": [*ASK, said, *ASK]}
        return post(url, "/tokenize", body).json()["tokens"]

    assert tokens("refusal") == tokens("text")
