"""Constraints on answers: every kind, at every endpoint."""

import json
import re

import httpx
import pytest

from jaxrl_post.sampler.requests import ConstraintError
from jaxrl_post.serve.grammars.compiler import _Matcher

SUM = 'start: NUMBER "+" NUMBER\nNUMBER: /[0-9]{1,2}/'
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def is_colour(text):
    return json.loads(text) in ({"colour": "red"}, {"colour": "green"})


CONSTRAINTS = {
    "regex": ({"regex": "[ab]{2}-[0-9]{3}"}, re.compile("[ab]{2}-[0-9]{3}").fullmatch),
    "grammar": ({"grammar": SUM}, re.compile(r"\d{1,2}\+\d{1,2}").fullmatch),
    "json": ({"json": COLOUR}, is_colour),
    "choice": ({"choice": ["yes", "no"]}, ["yes", "no"].__contains__),
}


def chat(client, served, streamed, **options):
    del served
    body = {"messages": [{"role": "user", "content": "1+2="}], "n": 2}
    given = {"model": "tiny", "max_tokens": 60, "seed": 1}
    if not streamed:
        answer = client.chat.completions.create(**given, **body, **options)
        return [choice.message.content for choice in answer.choices]
    texts = {0: "", 1: ""}
    for event in client.chat.completions.create(
        **given, **body, **options, stream=True
    ):
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    return list(texts.values())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_chat(client, served, name, streamed):
    constraint, fits = CONSTRAINTS[name]
    options = {"extra_body": {"structured_outputs": constraint}}
    found = chat(client, served, streamed, **options)
    assert len(found) == 2
    assert all(map(fits, found)), found


def test_any_json_object(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "1+2="}],
        response_format={"type": "json_object"},
        n=16,
        max_tokens=60,
        seed=1,
    )
    whole = [c for c in answer.choices if c.finish_reason == "stop"]
    values = [json.loads(choice.message.content) for choice in whole]
    assert all(isinstance(value, dict) for value in values)
    # Enough of them end, and not all of these with nothing in them.
    assert sum(map(bool, values)) >= 2
    for choice in answer.choices:
        # An answer that is cut is the beginning of an object.
        assert choice.finish_reason in ("stop", "length")
        assert choice.message.content.lstrip().startswith("{")


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_completions(client, name):
    constraint, fits = CONSTRAINTS[name]
    answer = client.completions.create(
        model="tiny",
        prompt=["1+2=", "7"],
        max_tokens=60,
        seed=3,
        extra_body={"structured_outputs": constraint},
    )
    found = [choice.text for choice in answer.choices]
    assert len(found) == 2
    assert all(map(fits, found)), found


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_token_ids(url, served, name):
    constraint, fits = CONSTRAINTS[name]
    sampling = {"max_tokens": 60, "seed": 3, "n": 2, "structured_outputs": constraint}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=60)
    stops = served.tokenizer.stop_ids
    for choice in answer.raise_for_status().json()["choices"]:
        ids = [each for each in choice["token_ids"] if each not in stops]
        assert fits(served.tokenizer.decode(ids)), ids


def test_a_constraint_that_gives_up_under_way_is_the_requests_fault(url, monkeypatch):
    """The answer says so, and the next request is served."""
    given = {"model": "tiny", "max_tokens": 60, "seed": 1}
    body = given | {"messages": [{"role": "user", "content": "1+2="}]}
    constrained = {"structured_outputs": CONSTRAINTS["regex"][0]}

    def give_up(self, token):
        raise ConstraintError("it is too complex")

    def post(**options):
        address = f"{url}/v1/chat/completions"
        return httpx.post(address, json=body | options, timeout=60)

    with monkeypatch.context() as patch:
        patch.setattr(_Matcher, "advance", give_up)
        answer = post(**constrained)
        streamed = post(**constrained, stream=True)
    assert answer.status_code == 400, answer.text
    assert "the constraint failed after token" in answer.json()["error"]["message"]
    assert "it is too complex" in answer.json()["error"]["message"]
    assert "the constraint failed after token" in streamed.text
    assert post(**constrained).status_code == 200
