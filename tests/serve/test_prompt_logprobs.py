"""Log-probs of prompts, as evaluation harnesses and clients of vLLM ask for them."""

import json

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxrl_post import scoring
from jaxrl_post.models import forward, logits
from tests import tiny
from tests.serve.conftest import CONFIG, make_served, until

PARAMS = tiny.params(CONFIG)
TEXT = "The answer is 12"


def post(url, path="/v1/completions", **body):
    return httpx.post(url + path, json=body, timeout=120)


def answered(url, path="/v1/completions", **body):
    answer = post(url, path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def every(ids):
    """All log-probs of the tokens from the second on, in float64."""
    row = jnp.asarray([[*ids, *[0] * (48 - len(ids))]], jnp.int32)
    hidden = forward(PARAMS, CONFIG, row)[0]
    scores = np.asarray(logits(PARAMS, CONFIG, hidden), np.float64)
    return log_softmax(scores, axis=-1)[: len(ids) - 1]


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.fixture(scope="module")
def ids(tokenizer):
    return list(tokenizer.encode(TEXT, special=True))


def harness(prompt):
    """A request of lm-evaluation-harness 0.4.13, model `local-completions`."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


def test_a_harness_scores_choices(url, tokenizer):
    context = tokenizer.encode("The answer is")
    choices = [tokenizer.encode(text) for text in (" 12", " system", " user")]
    found = answered(url, **harness([[*context, *each] for each in choices]))
    mine = scoring.logprobs((CONFIG, PARAMS), None, [context] * 3, choices)
    greedy = []
    for choice, answer, own in zip(found["choices"], choices, mine, strict=True):
        # As the harness reads it: the last token was sampled.
        told = choice["logprobs"]
        values = told["token_logprobs"][len(context) : -1]
        tops = told["top_logprobs"][len(context) : -1]
        close(values, own)
        likeliest = every([*context, *answer])[len(context) - 1 :].argmax(axis=1)
        is_greedy = all(
            value == max(top.values()) for value, top in zip(values, tops, strict=True)
        )
        assert is_greedy == (likeliest.tolist() == list(answer))
        greedy.append(is_greedy)
    assert not all(greedy)
    best = list(context)
    for _ in range(3):
        best.append(int(every([*best, 0])[-1].argmax()))
    told = answered(url, **harness([best]))["choices"][0]["logprobs"]
    values = told["token_logprobs"][len(context) : -1]
    tops = told["top_logprobs"][len(context) : -1]
    assert values == [max(top.values()) for top in tops]


def test_echo_is_openais_format(url, ids, tokenizer):
    found = answered(url, prompt=TEXT, echo=True, logprobs=2, max_tokens=3, seed=1)
    [choice] = found["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith(TEXT)
    assert len(told["tokens"]) == len(ids) + 3
    texts = [tokenizer.decoded([each], special=True) for each in ids]
    assert told["tokens"][: len(ids)] == texts
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    own = every(ids)[np.arange(len(ids) - 1), ids[1:]]
    close(told["token_logprobs"][1 : len(ids)], own)
    # Two tokens, and the token itself if it is none of them.
    assert {len(top) for top in told["top_logprobs"][1 : len(ids)]} <= {2, 3}
    parts = (
        told[n][1 : len(ids)] for n in ("tokens", "token_logprobs", "top_logprobs")
    )
    for token, value, top in zip(*parts, strict=True):
        assert value <= max(top.values())
        assert top[token] == value
    ends = np.cumsum([len(text) for text in told["tokens"]]).tolist()
    assert told["text_offset"] == [0, *ends[:-1]]
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 3)
    plain = answered(url, prompt=TEXT, logprobs=2, max_tokens=3, seed=1)["choices"][0]
    assert choice["text"] == TEXT + plain["text"]
    sampled = told["token_logprobs"][len(ids) :]
    close(sampled, plain["logprobs"]["token_logprobs"])


def test_the_prompt_alone(url, ids):
    found = answered(url, prompt=ids, echo=True, logprobs=0, max_tokens=0)
    [choice] = found["choices"]
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert choice["logprobs"]["top_logprobs"] is None
    assert found["usage"]["completion_tokens"] == 0
    # Without log-probs too, and in a stream.
    assert answered(url, prompt=TEXT, echo=True, max_tokens=0)["choices"][0] == {
        "index": 0,
        "text": TEXT,
        "finish_reason": "length",
        "logprobs": None,
    }


def test_echo_in_a_stream(url):
    whole = answered(url, prompt=[TEXT, "7"], echo=True, max_tokens=4, seed=1)
    told = {0: "", 1: ""}
    asked = {"prompt": [TEXT, "7"], "echo": True, "max_tokens": 4, "seed": 1}
    for line in post(url, **asked, stream=True).text.splitlines():
        if line and line != "data: [DONE]":
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                told[choice["index"]] += choice["text"]
    assert list(told.values()) == [choice["text"] for choice in whole["choices"]]


def check_by_id(told, ids, count):
    assert told[0] is None
    expected = every(ids)
    for place, (token, entry) in enumerate(zip(ids[1:], told[1:], strict=True)):
        best = np.argsort(-expected[place], kind="stable")[:count].tolist()
        assert set(entry) == {str(each) for each in (*best, token)}
        for each, values in entry.items():
            close(values["logprob"], expected[place, int(each)])
            above = (expected[place] > expected[place, int(each)]).sum()
            assert values["rank"] == 1 + above
            assert isinstance(values["decoded_token"], str)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_prompt_logprobs_are_vllms_format(url, ids, count):
    found = answered(url, prompt=[ids, ids[:3]], prompt_logprobs=count, max_tokens=2)
    for choice, prompt in zip(found["choices"], (ids, ids[:3]), strict=True):
        check_by_id(choice["prompt_logprobs"], prompt, count)
    sampling = {"prompt_logprobs": count, "max_tokens": 0}
    path = "/inference/v1/generate"
    found = answered(url, path, token_ids=ids, sampling_params=sampling)
    check_by_id(found["prompt_logprobs"], ids, count)
    assert found["choices"][0]["token_ids"] == []


def test_prompt_logprobs_of_a_chat(url):
    messages = [{"role": "user", "content": "What?"}]
    found = answered(
        url,
        "/v1/chat/completions",
        messages=messages,
        prompt_logprobs=2,
        max_tokens=2,
        return_token_ids=True,
    )
    check_by_id(found["prompt_logprobs"], found["prompt_token_ids"], 2)


def test_every_choice_has_its_prompts(url, ids):
    asked = {"prompt": [ids, ids[:4]], "n": 3, "max_tokens": 2, "temperature": 1.0}
    found = answered(url, **asked, echo=True, logprobs=1)
    assert len(found["choices"]) == 6
    for index, choice in enumerate(found["choices"]):
        prompt = (ids, ids[:4])[index // 3]
        own = every(prompt)[np.arange(len(prompt) - 1), prompt[1:]]
        close(choice["logprobs"]["token_logprobs"][1 : len(prompt)], own)


def test_a_cached_prompt_is_scored_too(url, ids):
    first = answered(url, prompt=ids, max_tokens=1, seed=1, return_token_ids=True)
    asked = {"prompt": [*ids, 5], "echo": True, "logprobs": 1, "max_tokens": 1}
    told = answered(url, **asked)["choices"][0]["logprobs"]["token_logprobs"]
    again = answered(url, **asked)["choices"][0]["logprobs"]["token_logprobs"]
    assert told[:-1] == again[:-1]
    close(told[1:-1], every([*ids, 5])[np.arange(len(ids)), [*ids, 5][1:]])
    # Neither disturbs what others sample.
    same = answered(url, prompt=ids, max_tokens=1, seed=1, return_token_ids=True)
    assert same["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]


def test_the_temperature_is_the_requests(url, ids):
    told = answered(url, prompt=ids, echo=True, logprobs=0, max_tokens=0, temperature=2)
    values = told["choices"][0]["logprobs"]["token_logprobs"]
    row = log_softmax(every(ids) / 2, axis=-1)
    close(values[1:], row[np.arange(len(ids) - 1), ids[1:]])


def test_a_prompt_of_one_token(url):
    told = answered(url, prompt=[5], echo=True, logprobs=1, max_tokens=1)
    found = told["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] is None
    assert len(found["tokens"]) == 2
    told = answered(url, prompt=[5], prompt_logprobs=1, max_tokens=1)
    assert told["choices"][0]["prompt_logprobs"] == [None]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 asks for the prompt alone"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens: 0 asks for the prompt alone"),
        ({"echo": True, "logprobs": 1, "stream": True}, "come with the whole answer"),
        ({"prompt_logprobs": 1, "stream": True}, "come with the whole answer"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: Input should be"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: Input should be"),
        ({"echo": "yes please"}, "echo: Input should be"),
        ({"prompt": [5] * 384, "echo": True, "max_tokens": 0}, "maximum context"),
        (
            {"prompt": [[5] * 300] * 128, "prompt_logprobs": 6},
            "would have 268800 log-probs of prompts, and may have 262144",
        ),
        (
            {"prompt": [5] * 300, "n": 128, "echo": True, "logprobs": 6},
            "would have 268800 log-probs of prompts, and may have 262144",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(url, body, said):
    answer = post(url, **({"prompt": TEXT} | body))
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_an_episode_answers_with_what_it_sampled(url):
    episode = httpx.post(f"{url}/episodes", json={}, timeout=60).json()["id"]
    base = f"{url}/episodes/{episode}"
    said = "a call of an episode answers with what it sampled"
    assert said in post(base, prompt=[5, 6], echo=True, max_tokens=1).text
    sampling = {"prompt_logprobs": 0, "max_tokens": 1}
    path = "/inference/v1/generate"
    assert said in post(base, path, token_ids=[5], sampling_params=sampling).text
    chat = {"messages": [{"role": "user", "content": "?"}], "prompt_logprobs": 0}
    assert said in post(base, "/v1/chat/completions", **chat).text
    assert post(base, prompt=[5, 6], max_tokens=1).status_code == 200


def test_the_limits_are_those_of_sampling(tokenizer):
    from tests.serve.conftest import listening

    asked = {"prompt": [5] * 40, "echo": True, "logprobs": 1, "max_tokens": 1}
    for options, status in (({"timeout_s": 0.001}, 504), ({"max_samples": 1}, 429)):
        model = make_served(tokenizer, **options)
        with listening(model) as url:
            answer = post(url, **(asked | {"prompt": [[5] * 40] * 2}))
            assert answer.status_code == status, answer.text
            until(lambda: model.service.samples == 0, "the samples are stopped")  # noqa: B023
        assert model.service.close(60)
