"""Chats through the openai client, as its users write them."""

import json

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from scipy.special import log_softmax

from jaxrl_post.data import chat
from jaxrl_post.models import forward, logits
from tests import tiny
from tests.serve.conftest import (
    CONFIG,
    TEMPLATE,
    listening,
    make_served,
    make_tokenizer,
)

ASK = [{"role": "user", "content": "What is 1+2?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


def ask(client, **options):
    given = {"model": "tiny", "messages": ASK, "max_tokens": 12, "seed": 1}
    return client.chat.completions.create(**(given | options))


def with_ids(client, **options):
    return ask(client, extra_body={"return_token_ids": True}, **options)


def text_of(served, ids) -> str:
    stops = served.tokenizer.stop_ids
    kept = ids[:-1] if ids and ids[-1] in stops else ids
    return served.tokenizer.decode(kept)


@jax.jit
def scores_after(row):
    params = tiny.params(CONFIG)
    return logits(params, CONFIG, forward(params, CONFIG, row)[0, -1])


def test_an_answer_has_the_text_of_its_tokens(client, served):
    answer = with_ids(client, n=3)
    assert answer.object == "chat.completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    prompt = chat.render(served.tokenizer, ASK)
    assert tuple(answer.prompt_token_ids) == prompt
    for choice in answer.choices:
        assert 0 < len(choice.token_ids) <= 12
        ended = choice.token_ids[-1] in served.tokenizer.stop_ids
        assert choice.finish_reason == ("stop" if ended else "length")
        assert choice.message.content == text_of(served, choice.token_ids)
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    sampled = sum(len(choice.token_ids) for choice in answer.choices)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sampled


def test_a_seed_gives_the_same_answer_and_another_one_another(client):
    first, again = with_ids(client, n=2), with_ids(client, n=2)
    other = with_ids(client, n=2, seed=2)
    ids = [[choice.token_ids for choice in a.choices] for a in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]


def test_without_a_seed_answers_differ(client):
    answers = [with_ids(client, seed=None).choices[0].token_ids for _ in range(2)]
    assert answers[0] != answers[1]


def test_a_stream_says_what_the_answer_says(client):
    whole = with_ids(client, n=2, logprobs=True, top_logprobs=3)
    told = {0: "", 1: ""}
    ids, values, reasons = {0: [], 1: []}, {0: [], 1: []}, {}
    events = with_ids(
        client,
        n=2,
        logprobs=True,
        top_logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            told[choice.index] += choice.delta.content or ""
            ids[choice.index] += choice.token_ids
            values[choice.index] += choice.logprobs.content
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert told[choice.index] == choice.message.content
        assert ids[choice.index] == choice.token_ids
        assert reasons[choice.index] == choice.finish_reason
        streamed = [each.logprob for each in values[choice.index]]
        expected = [each.logprob for each in choice.logprobs.content]
        np.testing.assert_allclose(streamed, expected, atol=1e-5)
    assert usage == whole.usage


def test_a_stream_comes_in_pieces(client):
    events = list(ask(client, stream=True, max_tokens=40, seed=5))
    assert events[0].choices[0].delta.role == "assistant"
    assert sum(bool(e.choices and e.choices[0].delta.content) for e in events) > 3


def test_logprobs_are_those_of_the_model(client, served):
    answer = with_ids(client, logprobs=True, top_logprobs=4, temperature=0.8)
    choice = answer.choices[0]
    row = list(answer.prompt_token_ids)
    for token, told in zip(choice.token_ids, choice.logprobs.content, strict=True):
        scores = np.asarray(scores_after(jnp.asarray([row])), np.float64) / 0.8
        every = log_softmax(scores)
        np.testing.assert_allclose(told.logprob, every[token], atol=1e-3)
        best = np.sort(every)[::-1][:4]
        found = [each.logprob for each in told.top_logprobs]
        np.testing.assert_allclose(found, best, atol=1e-3)
        assert bytes(told.bytes) == served.grammars.token_bytes(token)
        row.append(token)
        # One length alone, so that the function is compiled once more a token only.
        if len(row) - len(answer.prompt_token_ids) == 3:
            break


def test_a_schema_is_obeyed(client):
    answer = ask(
        client,
        n=4,
        max_tokens=100,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True},
        },
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert value["colour"] in ("red", "green")
        assert isinstance(value["sure"], bool)
        assert value.keys() == {"colour", "sure"}


def test_the_log_probs_of_a_schema_are_those_among_the_allowed(client):
    # Two letters are all that may come first: their probabilities add up to 1, and have
    # the same ratios as the model's.
    form = {"return_token_ids": True, "structured_outputs": {"choice": ["r", "g"]}}
    options = {"logprobs": True, "top_logprobs": 5, "n": 16, "max_tokens": 3}
    answer = ask(client, extra_body=form, **options)
    prompt = jnp.asarray([answer.prompt_token_ids])
    every = log_softmax(np.asarray(scores_after(prompt), np.float64))
    seen = {}
    for choice in answer.choices:
        first = choice.logprobs.content[0]
        assert first.token == choice.message.content
        assert len(first.top_logprobs) == 2
        told = {each.token: each.logprob for each in first.top_logprobs}
        assert told[first.token] == first.logprob
        seen[first.token] = choice.token_ids[0], first.logprob
    assert seen.keys() == {"r", "g"}
    mass = np.logaddexp(*(every[token] for token, _ in seen.values()))
    # Far from 1: the log-probs of the whole vocabulary would not do.
    assert mass < np.log(0.5)
    for token, logprob in seen.values():
        np.testing.assert_allclose(logprob, every[token] - mass, atol=1e-3)
    np.testing.assert_allclose(sum(np.exp(p) for _, p in seen.values()), 1, atol=1e-4)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_required_call_is_a_call(client, choice):
    named = {"type": "function", "function": {"name": "add"}}
    answer = ask(
        client,
        tools=[ADD],
        tool_choice="required" if choice == "required" else named,
        max_tokens=100,
        n=2,
    )
    for each in answer.choices:
        assert each.finish_reason == "tool_calls"
        [call] = each.message.tool_calls
        assert call.function.name == "add"
        arguments = json.loads(call.function.arguments)
        assert arguments["a"] in (1, 2)
        assert arguments["b"] in ("x", "y")


def test_a_streamed_call_is_whole(client):
    options = {"tools": [ADD], "tool_choice": "required", "max_tokens": 100}
    whole = ask(client, **options).choices[0].message.tool_calls[0].function
    calls, reason = [], None
    for event in ask(client, stream=True, **options):
        calls += event.choices[0].delta.tool_calls or []
        reason = event.choices[0].finish_reason or reason
        assert not event.choices[0].delta.content
    [call] = calls
    assert call.index == 0
    assert call.function.name == whole.name
    assert call.function.arguments == whole.arguments
    assert reason == "tool_calls"


def says(text, **options):
    """Options with which the model says a text."""
    return {
        "tools": [ADD],
        "max_tokens": 100,
        "extra_body": {"structured_outputs": {"choice": [text]}},
    } | options


@pytest.mark.parametrize("streamed", [False, True])
def test_half_of_a_surrogate_pair_in_a_call_is_replaced(client, streamed):
    said = r'<tool_call>{"name": "f\ud83d", "arguments": {"a": "\ud83d"}}</tool_call>'
    answer = ask(client, **says(said, stream=streamed))
    if streamed:
        found = [e.choices[0].delta.tool_calls for e in answer if e.choices]
        [call] = [call for calls in found for call in calls or ()]
    else:
        [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "f\ufffd"
    assert call.function.arguments == '{"a": "\ufffd"}'


def test_a_call_whose_arguments_are_no_json_stays_text(client):
    said = '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'
    [choice] = ask(client, **says(said)).choices
    assert choice.message.content == said
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


def test_a_schema_holds_for_what_comes_after_the_reasoning():
    begins = TEMPLATE.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    assert begins != TEMPLATE
    model = make_served(make_tokenizer(begins))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    with (
        listening(model) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        options = {"n": 16, "max_tokens": 128, "response_format": form}
        choices = ask(client, **options).choices
    assert model.service.close(60)
    # A model of random numbers may think until its tokens are spent.
    ended = [each for each in choices if each.finish_reason == "stop"]
    assert ended
    for each in choices:
        message = each.message
        assert message.reasoning
        if each in ended:
            assert set(json.loads(message.content)) == {"colour", "sure"}


def test_tools_are_in_the_prompt_and_none_leaves_them_out(client, served):
    with_tools = with_ids(client, tools=[ADD])
    assert tuple(with_tools.prompt_token_ids) == chat.render(
        served.tokenizer, ASK, chat.Options(tools=[ADD])
    )
    without = with_ids(client, tools=[ADD], tool_choice="none")
    assert tuple(without.prompt_token_ids) == chat.render(served.tokenizer, ASK)


def test_a_conversation_with_calls_is_rendered_as_the_template_has_it(client, served):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a":1}'},
    }
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    ]
    answer = with_ids(client, messages=messages)
    text = served.tokenizer.backend.decode(
        answer.prompt_token_ids, skip_special_tokens=False
    )
    assert '{"name": "add", "arguments": {"a": 1}}' in text
    assert "None" not in text


def test_parts_of_text_are_joined(client):
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 1+2?"}]
    one = with_ids(client, messages=[{"role": "user", "content": parts}])
    assert one.prompt_token_ids == with_ids(client).prompt_token_ids


def test_served_tokens_come_first_in_the_next_prompt(client, served):
    # Text that the client gives back is not tokenised again, even where it would
    # differ.
    first = with_ids(client, max_tokens=20, seed=3)
    message = first.choices[0].message.model_dump()
    messages = [*ASK, message, {"role": "user", "content": "And 2+3?"}]
    second = with_ids(client, messages=messages)
    told = [*first.prompt_token_ids, *first.choices[0].token_ids]
    assert second.prompt_token_ids[: len(told)] == told
    rest = served.tokenizer.backend.decode(
        second.prompt_token_ids[len(told) :], skip_special_tokens=False
    )
    end = served.tokenizer.backend.token_to_id("<|im_end|>")
    ended = told[-1] == end
    assert rest == ("" if ended else "<|im_end|>") + (
        "\n<|im_start|>user\nAnd 2+3?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_is_continued_after_served_tokens(client, served):
    first = with_ids(client, max_tokens=20, seed=3)
    message = first.choices[0].message.model_dump()
    told = [*first.prompt_token_ids, *first.choices[0].token_ids]
    end = served.tokenizer.backend.token_to_id("<|im_end|>")
    begun = {"role": "assistant", "content": "The answer is"}
    messages = [*ASK, message, {"role": "user", "content": "And 2+3?"}, begun]
    options = {"continue_final_message": True, "return_token_ids": True}

    def prompt(messages):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=1, extra_body=options
        )
        return answer.prompt_token_ids

    found = prompt(messages)
    assert found[: len(told)] == told
    rest = served.tokenizer.backend.decode(
        found[len(told) :], skip_special_tokens=False
    )
    assert rest == ("" if told[-1] == end else "<|im_end|>") + (
        "\n<|im_start|>user\nAnd 2+3?<|im_end|>\n<|im_start|>assistant\nThe answer is"
    )
    # A served answer that is continued itself stays open.
    stopped = told[-1] in served.tokenizer.stop_ids
    assert prompt([*ASK, message]) == (told[:-1] if stopped else told)


BEGUN = [*ASK, {"role": "assistant", "content": "The answer is"}]
HEAD, CLOSED = "<|im_start|>assistant\nThe answer is", "<|im_end|>\n"
ENDINGS = [
    # vLLM's pair for an answer that is begun.
    ({"add_generation_prompt": False, "continue_final_message": True}, HEAD),
    ({"continue_final_message": True}, HEAD),
    ({"add_generation_prompt": False}, HEAD + CLOSED),
    ({}, HEAD + CLOSED + "<|im_start|>assistant\n"),
]


@pytest.mark.parametrize(("options", "ending"), ENDINGS)
def test_a_prompt_ends_as_the_request_says(client, url, served, options, ending):
    answer = client.chat.completions.create(
        model="tiny",
        messages=BEGUN,
        max_tokens=1,
        extra_body={**options, "return_token_ids": True},
    )
    told = served.tokenizer.backend.decode(
        answer.prompt_token_ids, skip_special_tokens=False
    )
    assert told.endswith(ending)
    counted = httpx.post(f"{url}/tokenize", json={"messages": BEGUN, **options}).json()
    assert counted["tokens"] == answer.prompt_token_ids


def test_a_thought_that_a_message_leaves_open_goes_on(client):
    def message(begun):
        return client.chat.completions.create(
            model="tiny",
            messages=[*ASK, {"role": "assistant", "content": begun}],
            max_tokens=6,
            seed=1,
            extra_body={"continue_final_message": True},
        ).choices[0].message  # fmt: skip

    inside, after = (
        message("<think>\nThe sum is"),
        message("<think>\n</think>\n\nIt is"),
    )
    assert inside.reasoning
    assert not inside.content
    assert after.content
    assert not getattr(after, "reasoning", None)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
def test_an_open_message_and_a_further_one_contradict_each_other(url, route):
    both = {"add_generation_prompt": True, "continue_final_message": True}
    refused = httpx.post(f"{url}{route}", json={"messages": BEGUN, **both})
    assert refused.status_code == 400
    assert "continue_final_message leaves the last message open" in refused.text


def test_a_stop_string_ends_the_text_before_it(client):
    whole = ask(client, max_tokens=40, seed=5).choices[0].message.content
    stop = whole[6:9]
    cut = ask(client, max_tokens=40, seed=5, stop=[stop, "never"]).choices[0]
    assert cut.message.content == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    told = ""
    for event in ask(client, max_tokens=40, seed=5, stop=stop, stream=True):
        told += event.choices[0].delta.content or ""
    assert told == cut.message.content


def test_greedy_answers_are_the_likeliest_tokens(client):
    answer = with_ids(client, temperature=0, max_tokens=3)
    row = list(answer.prompt_token_ids)
    for token in answer.choices[0].token_ids:
        assert int(np.argmax(scores_after(jnp.asarray([row])))) == token
        row.append(token)


def test_the_async_client(url):
    import asyncio

    async def both():
        options = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as client:
            calls = [
                client.chat.completions.create(
                    model="tiny", messages=ASK, max_tokens=6, seed=seed
                )
                for seed in (1, 2, 1)
            ]
            return await asyncio.gather(*calls)

    first, second, third = (a.choices[0].message.content for a in asyncio.run(both()))
    assert first == third != second
