"""Completions of texts and of token ids; and token ids in and out."""

import httpx
import numpy as np
import pytest

from tests.serve.conftest import CONFIG


def complete(client, **options):
    given = {"model": "tiny", "prompt": "1+2=", "max_tokens": 10, "seed": 1}
    return client.completions.create(**(given | options))


def ids_of(choice):
    return choice.token_ids


WITH_IDS = {"extra_body": {"return_token_ids": True}}


def test_a_text_and_its_token_ids_are_continued_alike(client, served):
    by_text = complete(client, **WITH_IDS)
    prompt = list(served.tokenizer.encode("1+2=", special=True))
    by_ids = complete(client, prompt=prompt, **WITH_IDS)
    assert by_text.choices[0].token_ids == by_ids.choices[0].token_ids
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage.prompt_tokens == len(prompt)


def test_several_prompts_with_several_samples_share_no_noise(client):
    answer = complete(client, prompt=["1+2=", "1+2="], n=2, **WITH_IDS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 4
    alone = complete(client, n=2, **WITH_IDS)
    # The first prompt's samples do not depend on the second prompt.
    assert [c.token_ids for c in alone.choices] == [
        c.token_ids for c in answer.choices[:2]
    ]


def test_a_stream_says_what_the_answer_says(client):
    whole = complete(client, prompt=["1+2=", "7"], logprobs=2, **WITH_IDS)
    texts, ids, tops = {0: "", 1: ""}, {0: [], 1: []}, {0: [], 1: []}
    usage = None
    for event in complete(
        client,
        prompt=["1+2=", "7"],
        logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        **WITH_IDS,
    ):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += choice.token_ids
            tops[choice.index] += choice.logprobs.token_logprobs
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert ids[choice.index] == choice.token_ids
        np.testing.assert_allclose(
            tops[choice.index], choice.logprobs.token_logprobs, atol=1e-5
        )
        assert len(choice.logprobs.top_logprobs) == len(choice.token_ids)
    assert usage == whole.usage


def test_the_default_is_sixteen_tokens(client):
    answer = complete(client, max_tokens=None, **WITH_IDS)
    assert len(answer.choices[0].token_ids) <= 16


def generate(url, prompt=(5, 6, 7), **sampling):
    body = {"token_ids": list(prompt), "sampling_params": sampling}
    return httpx.post(f"{url}/inference/v1/generate", json=body, timeout=60)


def test_token_ids_in_and_out(url, client):
    answer = generate(
        url, max_tokens=6, seed=4, logprobs=1, n=2, skip_special_tokens=False
    ).json()
    assert answer["request_id"]
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        ids = choice["token_ids"]
        assert 0 < len(ids) <= 6
        content = choice["logprobs"]["content"]
        assert [each["token_id"] for each in content] == ids
        assert [each["token"] for each in content] == [f"token_id:{i}" for i in ids]
        assert all(each["logprob"] <= 0 for each in content)
        # The version of the parameters, for every token.
        spans = [{"version": "7", "start": 0, "end": len(ids)}]
        assert choice["weight_versions"] == spans
        assert choice["finish_reason"] in ("stop", "length")
    same = complete(client, prompt=[5, 6, 7], max_tokens=6, seed=4, n=2, **WITH_IDS)
    assert [c.token_ids for c in same.choices] == [
        c["token_ids"] for c in answer["choices"]
    ]


def test_a_sample_goes_on_after_its_own_tokens(url):
    # A client that was cut off sends prompt and tokens again.
    whole = generate(url, max_tokens=12, temperature=0).json()["choices"][0]
    begun = whole["token_ids"][:5]
    rest = generate(url, (5, 6, 7, *begun), max_tokens=7, temperature=0).json()
    assert begun + rest["choices"][0]["token_ids"] == whole["token_ids"]


def test_named_stop_tokens_end_a_sample(url):
    whole = generate(url, max_tokens=12, seed=9).json()["choices"][0]["token_ids"]
    stop = whole[4]
    cut = generate(url, max_tokens=12, seed=9, stop_token_ids=[stop]).json()
    assert cut["choices"][0]["token_ids"] == whole[: whole.index(stop) + 1]
    assert cut["choices"][0]["finish_reason"] == "stop"


def test_ignore_eos_goes_on_to_the_limit(url):
    answers = generate(url, max_tokens=100, n=8, seed=1, ignore_eos=True).json()
    assert [c["finish_reason"] for c in answers["choices"]] == ["length"] * 8
    assert {len(c["token_ids"]) for c in answers["choices"]} == {100}


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("best_of", 2, 1),
        ("use_beam_search", True, False),
        ("allowed_token_ids", [5], None),
    ],
)
def test_what_would_change_the_samples_is_refused_by_name(url, name, value, neutral):
    answer = generate(url, max_tokens=1, **{name: value})
    assert answer.status_code == 400
    assert f"sampling_params.{name}: this sampler does not have it" in answer.text
    assert generate(url, max_tokens=1, **{name: neutral}).status_code == 200
    # Fields that change no sample may be sent; clients send all that any server has.
    assert generate(url, max_tokens=1, detokenize=False).status_code == 200


@pytest.mark.parametrize("body", [{"prompt": "1+2="}, {"prompt": ""}])
def test_tokenize_a_text(url, served, body):
    told = httpx.post(f"{url}/tokenize", json=body).json()
    ids = served.tokenizer.encode(body["prompt"], special=True)
    assert told["tokens"] == list(ids)
    assert told["count"] == len(ids)
    assert told["max_model_len"] == 384


def test_a_prompt_and_its_completion_share_one_budget(url):
    limit = httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
    assert limit == 384
    # As vLLM's clients do: what the prompt leaves.
    for length in (360, 383):
        prompt = [5] * length
        answer = generate(url, prompt, max_tokens=limit - length, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        assert len(choice["token_ids"]) == limit - length
        more = generate(url, prompt, max_tokens=limit - length + 1)
        assert more.status_code == 400
        assert more.json()["error"] == {
            "message": "This model's maximum context length is 384 tokens. However, "
            f"you requested 385 tokens ({length} in the prompt, {385 - length} in the "
            "completion). Please reduce the length of the prompt or completion.",
            "type": "invalid_request_error",
            "param": None,
            "code": "context_length_exceeded",
        }
    assert generate(url, [5] * 384).status_code == 400


def test_a_request_that_does_not_say_gets_what_is_left(url, served):
    # 128 tokens by default, here less.
    answer = generate(url, [5] * 360, ignore_eos=True).json()
    assert len(answer["choices"][0]["token_ids"]) == 24
    assert served.length_of([5] * 3, None) == 128
    body = {"prompt": [5] * 380, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    # A completion's default is 16.
    assert len(answer["choices"][0]["token_ids"]) == 4


def test_as_many_alternatives_as_were_asked_for(client):
    # Half of the tokens are a byte of a longer character, all with the same text.
    answer = complete(client, logprobs=20, max_tokens=4)
    tops = answer.choices[0].logprobs.top_logprobs
    assert [len(top) for top in tops] == [20] * len(tops)
    assert all(list(top.values()) == sorted(top.values())[::-1] for top in tops)
    names = [name for top in tops for name in top]
    assert "\ufffd" in names
    assert any(name.startswith("token_id:") for name in names)


def test_token_ids_back_to_text(url, served):
    text = "1+2= user <think>ü</think><|im_end|>"
    ids = list(served.tokenizer.encode(text))
    answer = httpx.post(f"{url}/detokenize", json={"tokens": ids, "model": "tiny"})
    assert answer.json() == {"prompt": text}
    assert httpx.post(f"{url}/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    for bad, said in (
        ({"tokens": [CONFIG.vocab_size]}, "token ids must lie in 0..319; got 320"),
        ({"tokens": [2**31]}, "tokens.0"),
        ({"tokens": [5], "model": "gpt"}, "there is no 'gpt' here"),
    ):
        answer = httpx.post(f"{url}/detokenize", json=bad)
        assert answer.status_code in (400, 404)
        assert said in answer.json()["error"]["message"]


def test_the_model_by_its_name(url, client):
    assert client.models.retrieve("tiny").model_dump() == (
        client.models.list().data[0].model_dump()
    )
    answer = httpx.get(f"{url}/v1/models/org/other")
    assert answer.status_code == 404
    assert "there is no 'org/other' here" in answer.json()["error"]["message"]


def test_tokenize_a_conversation_is_the_prompt_of_the_chat(url, client):
    messages = [{"role": "user", "content": "What?"}]
    told = httpx.post(f"{url}/tokenize", json={"messages": messages}).json()
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=1, extra_body=WITH_IDS["extra_body"]
    )
    assert told["tokens"] == answer.prompt_token_ids


def test_a_token_outside_of_the_vocabulary_is_refused(url):
    answer = generate(url, (CONFIG.vocab_size,), max_tokens=2)
    assert answer.status_code == 400
    assert "token ids must lie in 0..319" in answer.json()["error"]["message"]


def test_a_chat_whose_prompt_is_given_as_tokens(url, client):
    messages = [{"role": "user", "content": "What?"}]
    tokens = httpx.post(f"{url}/tokenize", json={"messages": messages}).json()["tokens"]
    options = {"messages": messages, "max_tokens": 6, "seed": 2}
    body = options | {"tokens": tokens, "return_token_ids": True}
    path = f"{url}/v1/chat/completions/tokens"
    told = httpx.post(path, json=body, timeout=60).json()
    same = client.chat.completions.create(
        model="tiny", **options, extra_body=WITH_IDS["extra_body"]
    )
    assert told["choices"][0]["token_ids"] == same.choices[0].token_ids
    assert told["prompt_token_ids"] == tokens
    # The tokens are taken as they are, even against the messages.
    cut = httpx.post(path, json=body | {"tokens": tokens[:-1]}, timeout=60).json()
    assert cut["prompt_token_ids"] == tokens[:-1]
    assert httpx.post(path, json=options).status_code == 400
