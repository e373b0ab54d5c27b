"""Biases, penalties, least lengths and bad words, as clients of OpenAI and vLLM ask."""

import collections
import dataclasses

import httpx
import numpy as np
import pytest

from jaxrl_post.sampler import Request, SamplingParams

ROUTES = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")


def ask(url, route="/v1/completions", **options):
    given = {"max_tokens": 12, "temperature": 0.0} | options
    if route.endswith("generate"):
        body = {"token_ids": [5, 6, 7], "sampling_params": given}
    elif "chat" in route:
        body = {"messages": [{"role": "user", "content": "1+2="}], **given}
        body |= {"return_token_ids": True}
    else:
        body = {"prompt": [5, 6, 7], "return_token_ids": True, **given}
    answer = httpx.post(url + route, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_bias_forces_a_token_and_forbids_one(url, route):
    [choice] = ask(url, route, logit_bias={"65": 100}, max_tokens=3)
    assert choice["token_ids"] == [65] * 3
    [plain] = ask(url, route)
    [without] = ask(url, route, logit_bias={str(t): -100 for t in plain["token_ids"]})
    assert not {*plain["token_ids"]} & {*without["token_ids"]}


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_asked_for_reaches_the_sampler(url, served, route):
    """The server's tokens are those that an engine samples with these parameters."""
    asked = {
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"70": 1.5},
        "min_tokens": 4,
        "ignore_eos": True,
    }
    [choice] = ask(url, route, **asked)
    prompt = (5, 6, 7)
    if "chat" in route:
        body = {"messages": [{"role": "user", "content": "1+2="}]}
        prompt = tuple(httpx.post(f"{url}/tokenize", json=body).json()["tokens"])
    sampler = served.service._sampler
    engine = type(sampler.engine)(sampler.engine.config, sampler.engine.sizes)
    sampling = SamplingParams(
        0.0,
        max_tokens=12,
        min_tokens=4,
        logit_bias=((70, 1.5),),
        frequency_penalty=1.5,
        presence_penalty=0.5,
        repetition_penalty=1.2,
    )
    request = Request(1, prompt, sampling=sampling)
    [done] = engine.generate(sampler.params, [request])
    assert choice["token_ids"] == done.tokens.ids.tolist()
    plain = dataclasses.replace(request, sampling=SamplingParams(0.0, max_tokens=12))
    [other] = engine.generate(sampler.params, [plain])
    assert choice["token_ids"] != other.tokens.ids.tolist()


def test_penalties_make_a_sample_repeat_itself_less(url):
    def most(**options):
        [choice] = ask(url, ignore_eos=True, max_tokens=20, **options)
        return max(collections.Counter(choice["token_ids"]).values())

    assert most(logit_bias={"65": 3}, frequency_penalty=2) < most(logit_bias={"65": 3})


@pytest.mark.parametrize("stream", [False, True])
def test_no_end_before_the_least_tokens(url, served, stream):
    stop = served.tokenizer.stop_ids[0]
    biased = {"logit_bias": {str(stop): 50}, "temperature": 1.0, "seed": 1}
    [soon] = ask(url, **biased)
    assert soon["token_ids"] == [stop]
    [later] = ask(url, **biased, min_tokens=6)
    assert len(later["token_ids"]) == 7
    assert later["finish_reason"] == "stop"
    # A stop string among the first tokens is text.
    letter = {"logit_bias": {"65": 100}, "max_tokens": 9}
    text = served.tokenizer.decode([65])
    [cut] = ask(url, **letter, stop=[text], min_tokens=4)
    assert (cut["text"], len(cut["token_ids"])) == (text * 4, 5)
    if stream:
        body = {"prompt": [5, 6, 7], "temperature": 0, **letter, "stop": [text]}
        body |= {"min_tokens": 4, "stream": True}
        told = httpx.post(f"{url}/v1/completions", json=body, timeout=120).text
        pieces = [line.split('"text": "')[1:] for line in told.splitlines()]
        assert "".join(p[0].split('"')[0] for p in pieces if p) == text * 4


def test_bad_words_are_not_written(url, served):
    biased = {"logit_bias": {}, "ignore_eos": True, "max_tokens": 8}
    word = served.tokenizer.encode("answer")
    assert len(word) >= 1
    biased["logit_bias"] = {str(token): 40 for token in word}
    [plain] = ask(url, **biased)
    assert set(plain["token_ids"]) <= {*word}
    [without] = ask(url, **biased, bad_words=["answer"])
    assert "answer" not in without["text"]
    said = without["token_ids"]
    assert not any(
        said[n : n + len(word)] == list(word) for n in range(len(said) - len(word) + 1)
    )


def test_a_form_and_limits_hold_together(url):
    options = {"structured_outputs": {"regex": "[0-9]+"}, "logit_bias": {}}
    [choice] = ask(url, **options, min_tokens=5, bad_words=["1", "2"])
    assert len(choice["text"]) >= 5
    assert set(choice["text"]) <= set("03456789")


def test_log_probs_are_the_models(url):
    asked = {"logprobs": 3, "max_tokens": 4, "temperature": 1.0, "seed": 2}
    [plain] = ask(url, **asked)
    # A bias that changes no token: the log-probs stay, too.
    [biased] = ask(url, **asked, logit_bias={"319": 1e-4})
    assert biased["token_ids"] == plain["token_ids"]
    for name in ("token_logprobs", "tokens"):
        if name == "tokens":
            assert biased["logprobs"][name] == plain["logprobs"][name]
        else:
            np.testing.assert_allclose(
                biased["logprobs"][name], plain["logprobs"][name], atol=1e-4
            )
    [forced] = ask(url, **asked, logit_bias={"65": 100})
    assert set(forced["token_ids"]) == {65}
    assert all(value < -0.5 for value in forced["logprobs"]["token_logprobs"])


def test_neutral_values_change_nothing(url):
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "min_tokens": 0,
        "bad_words": [],
    }
    [plain] = ask(url, temperature=1.0, seed=5)
    [same] = ask(url, temperature=1.0, seed=5, **neutral)
    [left_out] = ask(url, temperature=1.0, seed=5, **dict.fromkeys(neutral))
    assert plain["token_ids"] == same["token_ids"] == left_out["token_ids"]
