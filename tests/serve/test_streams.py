"""Streams: their pieces make the whole, and an unread stream is ended."""

import asyncio
import json

import pytest

from jaxrl_post.sampler import SamplingParams
from jaxrl_post.serve import answers
from jaxrl_post.serve.calls import ApiError, Call, Wanted
from tests.serve.conftest import make_served

TOOL = {"type": "function", "function": {"name": "f"}}


def ask(client, grammar, **options):
    """A chat in which the model says what a grammar allows."""
    given = {"model": "tiny", "messages": [{"role": "user", "content": "What?"}]}
    extra = {"structured_outputs": grammar, "return_token_ids": True}
    extra |= options.pop("extra", {})
    given |= {"max_tokens": 100, "seed": 1, "extra_body": extra}
    return client.chat.completions.create(**(given | options))


def joined(events):
    """Content, reasoning, calls and reason of a stream."""
    content, reasoning, calls, reason = "", "", [], None
    for event in events:
        for choice in event.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            calls += [each.function for each in choice.delta.tool_calls or []]
            reason = choice.finish_reason or reason
    return content, reasoning, [json.loads(c.arguments) for c in calls], reason


@pytest.mark.parametrize(
    ("said", "content", "reasoning", "calls"),
    [
        ("\n<think>Why</think>\n\nHello", "Hello", "Why", []),
        ("\n\n<think>\nWhy \n</think>\n\n42", "42", "Why", []),
        (" 7", " 7", "", []),
        # Spelled with ordinary tokens, as a text about templates has it.
        (
            "Write <|im_start|>user, and more",
            "Write <|im_start|>user, and more",
            "",
            [],
        ),
        (
            'I look.\n\n<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}',
            "I look.",
            "",
            [{"a": "</tool_call>"}],
        ),
    ],
)
def test_the_pieces_of_a_chat_are_the_whole(client, said, content, reasoning, calls):
    options = {"grammar": {"choice": [said]}, "tools": [TOOL]}
    [choice] = ask(client, **options).choices
    message = choice.message
    assert (message.content or "") == content
    assert (getattr(message, "reasoning", None) or "") == reasoning
    found = [json.loads(c.function.arguments) for c in message.tool_calls or []]
    assert found == calls
    told = joined(ask(client, stream=True, **options))
    assert told == (content, reasoning, calls, choice.finish_reason)


def test_a_special_token_as_stop_string_stops_where_it_is_sampled(client, tokenizer):
    token = tokenizer.special_ids["<|im_start|>"]
    options = {"grammar": {"grammar": f'start: "a" <[{token}]> "b|c"'}}
    [choice] = ask(client, **options).choices
    assert (choice.message.content, choice.finish_reason) == ("ab|c", "stop")
    [choice] = ask(client, stop=["<|im_start|>", "never"], **options).choices
    assert (choice.message.content, choice.finish_reason) == ("a", "stop")
    assert choice.token_ids[-1] == token
    told = joined(ask(client, stop="<|im_start|>", stream=True, **options))
    assert told == ("a", "", [], "stop")
    # The same text, spelled, stops too.
    spelled = {"grammar": {"choice": ["ab<|im_start|>c"]}}
    [choice] = ask(client, stop="<|im_start|>", **spelled).choices
    assert (choice.message.content, choice.finish_reason) == ("ab", "stop")


def test_a_part_of_a_special_token_is_no_stop_string(client, tokenizer):
    token = tokenizer.special_ids["<|im_start|>"]
    shown = {
        "grammar": {"grammar": f'start: "a" <[{token}]> "b|c"'},
        "extra": {"skip_special_tokens": False},
        "stop": "|",
    }
    [choice] = ask(client, **shown).choices
    assert (choice.message.content, choice.finish_reason) == ("a<|im_start|>b", "stop")
    told = joined(ask(client, stream=True, **shown))
    assert told == ("a<|im_start|>b", "", [], "stop")


def test_the_offsets_of_a_stream_go_on(client):
    options = {"model": "tiny", "prompt": "The", "max_tokens": 30, "seed": 1}
    options |= {"logprobs": 0, "extra_body": {"ignore_eos": True}}
    [choice] = client.completions.create(**options).choices
    for _ in range(100):  # a busy machine may send all of it at once
        events = client.completions.create(stream=True, **options)
        pieces = [event.choices[0] for event in events]
        if len(pieces) > 1:
            break
    assert len(pieces) > 1
    told = [offset for piece in pieces for offset in piece.logprobs.text_offset]
    assert told == choice.logprobs.text_offset
    texts = choice.logprobs.tokens
    assert told == [sum(map(len, texts[:place])) for place in range(len(texts))]


def pumped(model):
    """Samples until nothing is running."""
    model.service.pump(model.service._sampler, wait_s=0)
    while model.service.samples:
        model.service.pump(model.service._sampler, wait_s=0)


def test_of_a_sample_only_the_newest_is_kept(tokenizer):
    model = make_served(tokenizer, start=False)
    wanted = Wanted((5, 6), SamplingParams(max_tokens=40), 3)

    async def read():
        call = Call(model, [wanted], partial=True)
        call.start()
        # Unread bursts of four tokens.
        pumped(model)
        return [update async for _, update in call.updates()]

    updates = asyncio.run(read())
    assert [update.sample_index for update in updates] == [0, 1, 2]
    assert [update.finish_reason for update in updates] == ["length"] * 3
    assert [len(update.tokens) for update in updates] == [40] * 3


async def nothing():
    yield {}


def test_a_stream_that_is_refused_is_over_before_it_begins(tokenizer):
    model = make_served(tokenizer, start=False, max_samples=1)
    ended = []

    async def stream():
        wanted = Wanted((5,), SamplingParams(max_tokens=4), 2)
        call = Call(model, [wanted], partial=True)
        with pytest.raises(ApiError, match="at most 1 may"):
            answers.event_stream(model, call, nothing(), lambda: ended.append(True))

    asyncio.run(stream())
    assert ended == [True]
    assert model.service.samples == 0


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_a_client_that_does_not_read_is_waited_for_until_its_time_is_over(
    tokenizer, version
):
    model = make_served(tokenizer, start=False, timeout_s=0.1)
    ended = []

    async def stream():
        wanted = Wanted((5,), SamplingParams(max_tokens=100))
        call = Call(model, [wanted], partial=True)
        answer = answers.event_stream(
            model, call, nothing(), lambda: ended.append(True)
        )

        async def never(message=None):
            if message is None or message["type"] == "http.response.body":
                await asyncio.Event().wait()

        scope = {"type": "http", "asgi": {"spec_version": version}}
        await asyncio.wait_for(answer(scope, never, never), 60)

    asyncio.run(stream())
    assert ended == [True]
    assert model.metrics.disconnected._value.get() == 1
    assert model.service.samples == 1
    model.service.pump(model.service._sampler, wait_s=0)
    assert model.service.samples == 0
