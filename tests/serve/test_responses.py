"""OpenAI's Responses API through the openai client, and what is recorded of it."""

import asyncio
import json

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from jaxrl_post.serve.app import make_app
from jaxrl_post.serve.calls import ApiError
from jaxrl_post.serve.responses import Responses
from jaxrl_post.serve.responses.items import messages_of
from tests.serve.conftest import (
    listening,
    make_served,
    make_tokenizer,
    until,
)

ASK = {"role": "user", "content": "What is 1+2?"}
AGAIN = {"role": "user", "content": "And 2+3?"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
CALL = '<tool_call>{"name":  "add", "arguments": {"a":1}}</tool_call>'
SAID = [
    "Hello there",
    "<think>\nWhy </think>\n\nHello",
    "<think>Why</think>",
    f"I look.{CALL}",
    f"<think>Why</think>{CALL}\n{CALL}",
    f"I look.{CALL} So {CALL} there",
    "",
]


def ask(client, **options):
    given = {"model": "tiny", "input": "What is 1+2?", "max_output_tokens": 12}
    extra = {"seed": 1} | options.pop("extra_body", {})
    return client.responses.create(**(given | options), extra_body=extra)


def says(text, **options):
    """Options with which the model says a text."""
    form = {"regex": ""} if not text else {"choice": [text]}
    options = {"extra_body": {"structured_outputs": form}} | options
    return {"tools": [ADD], "max_output_tokens": 100} | options


def streamed(url, **body):
    """The events of a stream, each checked against the type that it has."""
    body = {"input": "What is 1+2?", "seed": 1, "stream": True} | body
    kinds = pydantic.TypeAdapter(ResponseStreamEvent)
    events = []
    with httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for block in answer.read().decode().strip().split("\n\n"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
            kinds.validate_python(events[-1])
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == [
        "response.created",
        "response.in_progress",
    ]
    return events


def parts_of(items):
    """The names and texts of items, without their ids."""
    found = []
    for item in items:
        if item["type"] == "function_call":
            found.append((item["name"], json.loads(item["arguments"])))
        else:
            [part] = item["content"]
            found.append((item["type"], part["text"]))
    return found


def test_an_answer_is_a_chats_answer(client):
    answer = ask(client, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, ASK]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, seed=1
    )
    [choice] = chat.choices
    assert answer.output_text == choice.message.content
    cut = choice.finish_reason == "length"
    assert answer.status == ("incomplete" if cut else "completed")
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    assert answer.usage.total_tokens == chat.usage.total_tokens
    assert (answer.instructions, answer.model) == ("Be brief.", "tiny")


def test_a_cut_answer_is_incomplete(client):
    answer = ask(client, max_output_tokens=3, extra_body={"ignore_eos": True})
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"
    assert (answer.usage.output_tokens, answer.max_output_tokens) == (3, 3)
    whole = ask(client, **says("Hello there"))
    assert (whole.status, whole.incomplete_details) == ("completed", None)
    assert (whole.output[-1].status, whole.output_text) == ("completed", "Hello there")


@pytest.mark.parametrize("said", SAID)
def test_a_stream_tells_what_the_answer_says(client, url, said):
    whole = ask(client, **says(said)).to_dict()
    Response.model_validate(whole)
    options = says(said)
    events = streamed(url, **options.pop("extra_body"), **options)
    told = events[-1]["response"]
    Response.model_validate(told)
    assert events[-1]["type"] == "response.completed"
    assert told["usage"] == whole["usage"]
    # As messages they are the same, be the items split or not.
    assert [m["content"] for m in messages_of(told["output"])] == [
        m["content"] for m in messages_of(whole["output"])
    ]
    calls = [p for p in parts_of(whole["output"]) if p[0] == "add"]
    assert [p for p in parts_of(told["output"]) if p[0] == "add"] == calls
    assert len(calls) == said.count("<tool_call>")
    # No answer is a thought alone, after which an agent would not know what to do.
    assert told["output"][-1]["type"] in ("message", "function_call")
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert items == told["output"]
    for index, item in enumerate(items):
        own = [e for e in events if e.get("output_index") == index]
        kinds = [e["type"].removeprefix("response.") for e in own]
        assert own[0]["item"]["status"] == "in_progress"
        deltas = "".join(e["delta"] for e in own if e["type"].endswith(".delta"))
        if item["type"] == "function_call":
            part = "function_call_arguments"
            assert kinds[1:3] == [f"{part}.delta", f"{part}.done"]
            assert deltas == own[2]["arguments"] == item["arguments"]
        else:
            part = {"message": "output_text", "reasoning": "reasoning_text"}
            part = part[item["type"]]
            assert kinds[1] == "content_part.added"
            assert kinds[-3:-1] == [f"{part}.done", "content_part.done"]
            assert deltas == own[-3]["text"] == item["content"][0]["text"]
        assert (kinds[0], kinds[-1]) == ("output_item.added", "output_item.done")


def test_reasoning_is_an_item_and_counted(client):
    answer = ask(client, **says("<think>\nWhy </think>\n\nHello"))
    thought, message = answer.output
    assert (thought.type, thought.summary) == ("reasoning", [])
    assert [part.text for part in thought.content] == ["Why"]
    assert message.content[0].text == answer.output_text == "Hello"
    counted = answer.usage.output_tokens_details.reasoning_tokens
    assert 0 < counted < answer.usage.output_tokens
    plain = ask(client, **says("Hello"))
    assert plain.usage.output_tokens_details.reasoning_tokens == 0


def test_the_clients_own_helpers_read_the_stream(client):
    class Paint(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        colour: str

    options = {"model": "tiny", "input": "What?", "max_output_tokens": 300}
    # A model of random numbers may write a long colour.
    schema = {"properties": {"colour": {"maxLength": 5}}}
    Paint.model_config["json_schema_extra"] = lambda s: s["properties"][
        "colour"
    ].update(schema["properties"]["colour"])
    Paint.model_rebuild(force=True)
    found = client.responses.parse(text_format=Paint, **options)
    assert isinstance(found.output_parsed, Paint)
    assert found.text.format.name == "Paint"
    with client.responses.stream(text_format=Paint, **options) as stream:
        stream.until_done()
        found = stream.get_final_response()
    assert isinstance(found.output_parsed, Paint)


def test_forms_are_obeyed(client):
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    answer = ask(client, text={"format": form}, max_output_tokens=100)
    assert json.loads(answer.output_text).keys() == {"a", "b"}
    assert answer.text.format.to_dict() == form | {"schema": SCHEMA}
    answer = ask(client, text={"format": {"type": "json_object"}})
    assert answer.output_text.startswith("{")
    assert answer.text.format.type == "json_object"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_required_call_is_a_call(client, choice):
    answer = ask(client, tools=[ADD], tool_choice=choice, max_output_tokens=100)
    [call] = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
    assert json.loads(call.arguments).keys() == {"a", "b"}
    told = answer.to_dict()
    assert told["tool_choice"] == choice
    assert told["tools"][0].items() >= ADD.items()


def test_without_parallel_calls_there_is_one(client):
    said = says(f"{CALL}\n{CALL}")
    assert len(ask(client, **said).output) == 2
    answer = ask(client, **said, parallel_tool_calls=False)
    assert (len(answer.output), answer.parallel_tool_calls) == (1, False)


def scored(client, **options):
    included = ["message.output_text.logprobs"]
    return ask(client, include=included, top_logprobs=2, **options)


def test_log_probs_are_those_of_the_text(client):
    answer = scored(client, extra_body={"seed": 3})
    chat = client.chat.completions.create(
        model="tiny", messages=[ASK], max_tokens=12, seed=3, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    [message] = answer.output
    theirs = [each.to_dict() for each in chat.choices[0].logprobs.content]
    found = [each.to_dict() for each in message.content[0].logprobs]
    assert found
    assert found == theirs[: len(found)]
    assert all(each["token"] == "<|im_end|>" for each in theirs[len(found) :])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [SAID[0], SAID[1], SAID[3], "caf\u00e9 \u4e2d!"])
def test_marks_thoughts_and_calls_have_no_log_probs(client, said, stream):
    answer = scored(client, **says(said), stream=stream)
    deltas = []
    if stream:
        for event in answer:
            if event.type == "response.output_text.delta":
                deltas += event.logprobs
        answer = event.response
    [message] = [item for item in answer.output if item.type == "message"]
    [part] = message.content
    spelled = b"".join(bytes(each.bytes) for each in part.logprobs)
    assert spelled.decode() == part.text
    if stream:
        assert [each.token for each in deltas] == [e.token for e in part.logprobs]


def test_without_asking_there_are_no_log_probs(client):
    assert ask(client).output[0].content[0].logprobs == []


CALLED = {
    "type": "function_call",
    "call_id": "c1",
    "name": "add",
    "arguments": '{"a":1}',
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (["user hi", "assistant yes"], ["user hi", "assistant yes"]),
        (["assistant a", "assistant b"], ["assistant a", "assistant b"]),
        (["reasoning r", "assistant a"], ["assistant a (r)"]),
        (
            ["reasoning r", "assistant a", CALLED, CALLED | {"call_id": "c2"}, OUTPUT],
            ["assistant a (r) [c1 c2]", "tool 3"],
        ),
        # Text between a call and its output belongs to the same answer.
        ([CALLED, "assistant b", OUTPUT], ["assistant b [c1]", "tool 3"]),
        (
            [CALLED, OUTPUT, "reasoning r", CALLED, OUTPUT],
            ["assistant  [c1]", "tool 3", "assistant  (r) [c1]", "tool 3"],
        ),
        (["assistant a", "reasoning r"], ["assistant a", "assistant  (r)"]),
        (["reasoning r", "reasoning s", "user u"], ["assistant  (rs)", "user u"]),
        (["system a", "developer b", "user u"], ["system a\n\nb", "user u"]),
        (["user u", "developer b", "system c"], ["user u", "system b", "system c"]),
    ],
)
def test_items_of_an_answer_are_one_message(items, messages):
    def item(given):
        if isinstance(given, dict):
            return given
        role, _, text = given.partition(" ")
        if role == "reasoning":
            return {"type": role, "content": text}
        return {"type": "message", "role": role, "content": text}

    def told(message):
        text = f"{message['role']} {message['content']}"
        if "reasoning" in message:
            assert message["reasoning_content"] == message["reasoning"]
            text += f" ({message['reasoning']})"
        if calls := message.get("tool_calls"):
            text += f" [{' '.join(call['id'] for call in calls)}]"
        return text

    assert [told(message) for message in messages_of(map(item, items))] == messages


def test_parts_developers_and_outputs_are_read_as_chats_read_them(client):
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "What?"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        CALLED | {"id": "fc_1", "status": "completed"},
        {**OUTPUT, "output": [{"type": "input_text", "text": "3"}]},
    ]
    call = {"name": "add", "arguments": '{"a":1}'}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "What?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    function = {k: v for k, v in ADD.items() if k != "type"}
    chat = client.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=[{"type": "function", "function": function}],
        max_tokens=12,
        seed=1,
    )
    answer = ask(client, input=items, tools=[ADD])
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.output_text == (chat.choices[0].message.content or "")


# Conversations that are continued.


class Agent:
    """An episode, and a client that knows nothing but its base URL."""

    def __init__(self, url, **options):
        made = httpx.post(f"{url}/episodes", json={"seed": 3} | options).json()
        self.url = f"{url}/episodes/{made['id']}"
        self.client = openai.OpenAI(
            base_url=made["base_url"], api_key="none", max_retries=0
        )

    def record(self):
        return httpx.get(self.url).json()

    def close(self):
        self.client.close()
        httpx.delete(self.url)


@pytest.fixture
def agent(url):
    made = Agent(url)
    yield made
    made.close()


def last_of(answer, stream):
    """A response, also of a stream."""
    if not stream:
        return answer
    *_, last = answer
    return last.response


def continued(agent, said, stream, by_id, instructions="Be brief."):
    """Two turns: an answer with this text, and one after more input."""
    options = says(said, stream=stream, instructions=instructions)
    items = [ASK]
    first = last_of(ask(agent.client, input=items, **options), stream)
    more = [AGAIN]
    for item in first.output:
        if item.type == "function_call":
            output = {"type": "function_call_output", "call_id": item.call_id}
            more.append(output | {"output": "3"})
    if any("output" in each for each in more):
        del more[0]
    if by_id:
        given = {"input": more, "previous_response_id": first.id}
    else:
        # As the Agents SDK and pydantic-ai send items back.
        back = [item.to_dict() for item in first.output]
        given = {"input": [*items, *back, *more]}
    options = says("Done.", stream=stream, instructions=instructions) | given
    options["max_output_tokens"] = 8
    return first, last_of(ask(agent.client, **options), stream)


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", SAID)
def test_an_episode_continues_the_sampled_tokens(agent, tokenizer, said, stream, by_id):
    first, second = continued(agent, said, stream, by_id)
    assert (first.turn, second.turn) == (0, 1)
    record = agent.record()
    assert record["calls"] == {"first": 1, "bridged": 1}
    [branch] = record["branches"]
    ids, turns = branch["token_ids"], branch["turns"]
    begin = first.usage.input_tokens
    sampled = ids[begin : begin + first.usage.output_tokens]
    assert turns[begin : begin + len(sampled)] == [0] * len(sampled)
    # The ids were sampled: the text of a call is not as the template would write it.
    assert tokenizer.backend.decode(sampled[:-1], skip_special_tokens=False) == said
    assert sampled[-1] in tokenizer.stop_ids
    assert second.usage.input_tokens == len(ids) - second.usage.output_tokens
    assert second.output_text == "Done."


@pytest.mark.parametrize("by_id", [False, True])
def test_a_template_that_drops_thoughts_continues_the_sampled_tokens(by_id):
    forgets = (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n"
        "{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    model = make_served(make_tokenizer(forgets))
    with listening(model) as url:
        agent = Agent(url)
        said = {"extra_body": {"ignore_eos": True}, "max_output_tokens": 20}
        first = ask(agent.client, input=[ASK], **said)
        # Cut while it thinks: there is a thought, and no message.
        assert [item.type for item in first.output] == ["reasoning"]
        assert first.status == "incomplete"
        back = [item.to_dict() for item in first.output]
        given = {"input": [ASK, *back, AGAIN]}
        if by_id:
            given = {"input": [AGAIN], "previous_response_id": first.id}
        second = ask(agent.client, **given)
        record = agent.record()
        assert record["calls"] == {"first": 1, "bridged": 1}
        [branch] = record["branches"]
        assert branch["turns"].count(0) == 20
        assert second.turn == 1
        agent.close()
    assert model.service.close(60)


def test_a_conversation_by_ids_has_the_tokens_of_one_by_items(client):
    first = ask(client, input=[ASK], instructions="Be brief.")
    by_id = ask(client, input=[AGAIN], previous_response_id=first.id)
    back = [item.to_dict() for item in first.output]
    by_items = ask(client, input=[ASK, *back, AGAIN])
    assert by_id.previous_response_id == first.id
    # Instructions are not carried over.
    assert by_id.usage.input_tokens == by_items.usage.input_tokens
    assert by_id.output_text == by_items.output_text
    third = ask(client, input="Why?", previous_response_id=by_id.id)
    assert third.usage.input_tokens > by_id.usage.total_tokens - 12


def test_other_instructions_begin_a_segment(agent):
    first = ask(agent.client, input=[ASK], instructions="Be brief.")
    ask(agent.client, input=[AGAIN], previous_response_id=first.id)
    assert agent.record()["calls"] == {"first": 1, "edited": 1}


def test_players_of_an_episode_have_responses(agent):
    body = {"input": "What?", "max_output_tokens": 4}
    for turn, name in enumerate(("one", "two")):
        path = f"{agent.url}/players/{name}/v1/responses"
        told = httpx.post(path, json=body).json()
        assert told["turn"] == turn
        assert httpx.get(f"{path}/{told['id']}").json() == told
    assert [t["player"] for t in agent.record()["turns"]] == ["one", "two"]


def test_a_framework_that_speaks_responses_is_recorded(url):
    from pydantic_ai import Agent as Framework
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def converse(agent, said):
        """Two turns; the framework keeps the history."""
        options = {"base_url": f"{agent.url}/v1", "api_key": "none"}
        async with openai.AsyncOpenAI(**options) as client:
            extra = {"structured_outputs": {"choice": [said]}}
            provider = OpenAIProvider(openai_client=client)
            made = Framework(
                OpenAIResponsesModel("tiny", provider=provider),
                instructions="Be brief.",
                model_settings={"extra_body": extra, "max_tokens": 64},
                retries=0,
            )
            first = await made.run("What?")
            second = await made.run("And?", message_history=first.all_messages())
        return first.output, second.output

    for said in (SAID[0], SAID[1]):
        agent = Agent(url)
        outputs = asyncio.run(converse(agent, said))
        assert outputs == (said.rpartition("\n")[2],) * 2
        assert agent.record()["calls"] == {"first": 1, "bridged": 1}
        agent.close()


# Stored responses.


def test_a_stored_response_is_there_until_it_is_deleted(client):
    answer = ask(client, metadata={"run": "7"})
    assert client.responses.retrieve(answer.id) == answer
    assert answer.metadata == {"run": "7"}
    streaming = last_of(ask(client, stream=True), stream=True)
    assert client.responses.retrieve(streaming.id) == streaming
    client.responses.delete(answer.id)
    for gone in (
        lambda: client.responses.retrieve(answer.id),
        lambda: client.responses.delete(answer.id),
        lambda: ask(client, previous_response_id=answer.id),
        lambda: ask(client, previous_response_id=answer.id, stream=True),
        lambda: client.responses.retrieve(ask(client, store=False).id),
        lambda: ask(client, previous_response_id=ask(client, store=False).id),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no response 'resp_"):
            gone()
    with pytest.raises(openai.BadRequestError, match="stream: what is kept is whole"):
        client.responses.retrieve(streaming.id, stream=True)


def kept(name, before=None, size=0):
    response = {"id": name, "previous_response_id": before, "output": ["o" * size]}
    return response, [f"input of {name}"]


def there(responses):
    """The ids of what is kept, the least recently used first."""
    return "".join(responses._kept)


def test_the_least_recently_used_responses_give_way():
    responses = Responses(most=3)
    for name in "abc":
        responses.add(*kept(name))
    responses.find("a")
    responses.add(*kept("d"))
    assert there(responses) == "cad"
    responses.remove("c")
    responses.add(*kept("e"))
    assert there(responses) == "ade"


def test_responses_have_a_limit_in_bytes():
    responses = Responses(most_bytes=5000)
    for name in "abcd":
        responses.add(*kept(name, size=1500))
    assert there(responses) == "bcd"
    # Larger than all that may be kept.
    responses.add(*kept("e", size=5000))
    assert there(responses) == ""
    responses.add(*kept("f", size=4000))
    assert there(responses) == "f"


def test_a_conversation_that_goes_on_is_kept_from_its_beginning():
    responses = Responses(most=4)
    responses.add(*kept("a"))
    responses.add(*kept("b", before="a"))
    for name in "xyz":
        said = [json.loads(each.items) for each in responses.conversation("b")]
        assert said == [["input of a"], ["input of b"]]
        responses.add(*kept(name))
    assert there(responses) == "ybaz"
    responses.remove("a")
    with pytest.raises(
        ApiError, match="previous_response_id: there is no response 'a'"
    ):
        responses.conversation("b")


def test_the_servers_limit_is_the_apps(served):
    app = make_app(served, responses=Responses(most=1))
    with listening(served, app=app) as url:

        def post(**body):
            body = {"input": "What?", "max_output_tokens": 1} | body
            return httpx.post(f"{url}/v1/responses", json=body)

        first, second = post().json(), post().json()
        gone = post(previous_response_id=first["id"])
        assert gone.status_code == 404
        error = gone.json()["error"]
        assert error["param"] == "previous_response_id"
        assert error["code"] == "previous_response_not_found"
        assert "--max-responses" in error["message"]
        assert post(previous_response_id=second["id"]).status_code == 200


# Refusals.


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        ({"input": []}, "input", "input"),
        ({"input": None}, "input: Field required", "input"),
        ({"temperature": -1}, "temperature: Input should be", "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        (
            {"max_output_tokens": 384},
            "maximum context length is 384 tokens",
            None,
        ),
        ({"max_tokens": 5}, "max_tokens: this sampler does not", "max_tokens"),
        ({"n": 2}, "n: this sampler does not have it", "n"),
        ({"max_output_token": 5}, "max_output_token: there is no such", None),
        ({"background": True}, "background: this sampler", "background"),
        ({"conversation": "conv_1"}, "conversation: this sampler", "conversation"),
        ({"prompt": {"id": "p"}}, "prompt: this sampler", "prompt"),
        ({"truncation": "auto"}, "truncation: this sampler", "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity: this sampler", "text"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "reasoning"),
        ({"include": ["file_search_call.results"]}, "include.0", "include"),
        ({"metadata": {"a": 1}}, "metadata.a", "metadata"),
        ({"metadata": {"a": "\ud83d"}}, "metadata.a", "metadata"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata", "metadata"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools.0: its type must be 'function'; got 'web_search', which this server",
            "tools",
        ),
        (
            {"tools": [{"type": "custom", "name": "f", "format": {"type": "text"}}]},
            "got 'custom'",
            "tools",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.function.name: Field", "tools"),
        ({"tools": [{**ADD, "defer_loading": True}]}, "defer_loading: there", "tools"),
        (
            {"tools": [{"type": "function", "function": ADD}]},
            "tools.0: function: there is no such field",
            "tools",
        ),
        ({"tool_choice": "required"}, "tool_choice needs tools", None),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice: 'g' is none of the tools ['add']",
            "tool_choice",
        ),
        (
            {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "tools": []}},
            "got 'allowed_tools'",
            "tool_choice",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": 3}}},
            "text.format.json_schema.schema: Input should be",
            "text",
        ),
        (
            {"text": {"format": {"type": "grammar"}}},
            "text.format: its type must be 'json_schema'; got 'grammar'",
            "text",
        ),
        (
            {
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "x",
                        "schema": {"type": "nope"},
                    }
                }
            },
            "it cannot be compiled: Invalid type: nope",
            "text.format",
        ),
        (
            {"input": [{"type": "web_search_call", "id": "ws_1"}]},
            "input.0: this server reads items of the types message, function_call",
            "input",
        ),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input.0: this", "input"),
        ({"input": [["user", "hi"]]}, "input", "input"),
        (
            {"input": [{"role": "robot", "content": ""}]},
            "input.0.message.role",
            "input",
        ),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "image_url": "x"}],
                    }
                ]
            },
            "content of message 1 of the conversation: this model reads text alone; "
            "got a part of type 'input_image'",
            "input",
        ),
        ({"input": [OUTPUT]}, "the call_id 'c1' answers no function_call", "input"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "abc"}]},
            "input.0.reasoning.encrypted_content: this sampler",
            "input",
        ),
        ({"input": "caf\ud83d"}, "input: ", "input"),
        (
            {"tools": [{**ADD, "description": "\ud83d"}], "tool_choice": "none"},
            "the request has text that is none",
            None,
        ),
        ({"input": "long " * 200}, "maximum context length is 384", None),
        (
            {
                "structured_outputs": {"regex": "a"},
                "text": {"format": {"type": "json_object"}},
            },
            "give text.format or structured_outputs, not both",
            None,
        ),
        ({"previous_response_id": 7}, "previous_response_id", "previous_response_id"),
    ],
)
def test_a_request_that_makes_no_sense(url, body, said, param):
    body = json.dumps({"input": "What?"} | body)
    for stream in ("false", "true"):
        content = f'{body[:-1]}, "stream": {stream}}}'
        answer = httpx.post(f"{url}/v1/responses", content=content, timeout=60)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert said in error["message"]
        assert param in (None, error["param"])


def test_another_model_is_not_here(client):
    with pytest.raises(openai.NotFoundError, match="model: there is no 'gpt' here"):
        ask(client, model="gpt")


def test_what_asks_for_nothing_is_accepted(url):
    # As Codex, the Agents SDK and pydantic-ai send them.
    tool = ADD | {"strict": True, "async": False, "defer_loading": False}
    body = {
        "model": "tiny",
        "instructions": "Be brief.",
        "input": [{"type": "message", **ASK, "id": "1", "status": "completed"}],
        "tools": [tool | {"allowed_callers": ["direct"], "output_schema": None}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto", "context": None},
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "truncation": "disabled",
        "background": False,
        "prompt_cache_key": "abc",
        "client_metadata": {"a": "b"},
        "max_tool_calls": 3,
        "service_tier": "auto",
        "top_logprobs": 0,
        "stream_options": {"include_obfuscation": False},
        "stream": True,
        "max_output_tokens": 2,
        "previous_response_id": None,
        "temperature": None,
        "metadata": None,
        "store": None,
    }
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    told = json.loads(answer.text.strip().rpartition("data: ")[2])["response"]
    assert told["reasoning"] == {"effort": "low", "summary": None}
    assert (told["store"], told["metadata"], told["temperature"]) == (True, {}, 1.0)


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(
    url, client, served, monkeypatch, caplog
):
    def fail(*given, **options):
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr("jaxrl_post.serve.chat.parse", fail)
        last = streamed(url, max_output_tokens=4)[-1]
        with pytest.raises(openai.InternalServerError, match="out of order"):
            ask(client)
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "RuntimeError: out of order" in last["response"]["error"]["message"]
    assert "Traceback" in caplog.text
    until(lambda: served.service.samples == 0, "the sample ends")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last["response"]["id"])


def test_an_answer_that_takes_too_long_is_stopped(tokenizer):
    model = make_served(tokenizer, timeout_s=0.001)
    with listening(model) as url:
        body = {"input": "What?", "max_output_tokens": 100}
        answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
        assert answer.status_code == 504
        until(lambda: model.service.samples == 0, "the sample is stopped")
    assert model.service.close(60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_sample(served, client, stream, cancelled):
    options = {"max_output_tokens": 128, "extra_body": {"ignore_eos": True}}
    if stream:
        with ask(client, stream=True, **options) as events:
            next(iter(events))
    else:
        with pytest.raises(openai.APITimeoutError):
            ask(client, timeout=0.5, **options)
    until(lambda: cancelled, "the client's leaving is noticed")
    until(lambda: served.service.samples == 0, "the sample is stopped")
    assert len(cancelled) == 1
