"""Tools as tokens: calls and results as transformers writes them, in every family."""

import functools
import json
import pathlib
import re

import pytest
import tokenizers

from jaxrl_post.data import chat, learned, tools
from jaxrl_post.data.codec import Codec
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.messages import Message, ToolCall

PARITY = pathlib.Path(__file__).parents[1] / "parity"
# Templates with tools whose calls can be read.
FAMILIES = (
    *("deepseek", "glm", "harmony", "llama3_1", "mistral"),
    *("qwen2_5", "qwen3", "qwen3_coder"),
)
STOPS = ("</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|call|>")
# GLM ends a turn with the head of the next one.
STOPS = (*STOPS, "<|user|>", "<|observation|>")


@functools.cache
def chats():
    return json.loads((PARITY / "fixtures/chat.json").read_text(encoding="utf-8"))


@functools.cache
def tokenizer_of(family: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(chats()["tokenizer"]))
    source = PARITY / "chat_templates" / f"{family}.jinja"
    ids = [backend.token_to_id(stop) for stop in STOPS]
    return Tokenizer(
        backend,
        stop_ids=[each for each in ids if each is not None],
        chat_template=source.read_text(encoding="utf-8"),
        special_tokens=chats()["special_tokens"],
    )


def message(row) -> Message:
    """A message of the fixture as environments and episodes have it."""
    calls = tuple(
        ToolCall(
            call["function"]["name"],
            json.dumps(arguments)
            if isinstance(arguments := call["function"]["arguments"], dict)
            else arguments,
            call.get("id", ""),
        )
        for call in row.get("tool_calls") or ()
    )
    return Message(
        row["role"],
        row.get("content") or "",
        reasoning=row.get("reasoning_content"),
        tool_calls=calls,
        tool_call_id=row.get("tool_call_id"),
        name=row.get("name"),
    )


def expected(family: str, conversation: str) -> str:
    """Renderings by transformers of a conversation with tools."""
    (case,) = (
        case
        for case in chats()["cases"]
        if case["template"] == family
        and case["conversation"] == conversation
        and case.get("tools")
        and case.get("add_generation_prompt")
        and not case.get("variables")
    )
    return undated(case["text"])


def undated(text: str) -> str:
    """Without the date that some templates write."""
    return re.sub(r"\d{4}-\d\d-\d\d|\d\d \w{3} \d{4}", "TODAY", text)


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_with_calls_are_written_as_transformers_does(family):
    rows = chats()["conversations"]["tool"]
    options = chat.with_tools(chats()["tools"])
    text = chat.render_text(tokenizer_of(family), [message(r) for r in rows], options)
    # Without a content, DeepSeek's template writes a call in another place.
    plain = [{**row, "content": row.get("content") or ""} for row in rows]
    assert text == chat.render_text(tokenizer_of(family), plain, options)
    if family != "deepseek":
        assert undated(text) == expected(family, "tool")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_read_and_its_result_follows_as_transformers_writes_it(family):
    tokenizer = tokenizer_of(family)
    codec = Codec(tokenizer)
    asked, called, result = map(message, chats()["conversations"]["tool"][:3])
    prompt = codec.render([asked], chats()["tools"])
    options = chat.with_tools(chats()["tools"])
    # Text that the model would sample: the template's own way to write the call.
    whole = chat.render_text(tokenizer, [asked, called], options, prompt=False)
    open_prompt = chat.render_text(tokenizer, [asked], options)
    # DeepSeek's prompt opens a thought, which the history leaves out.
    begin = len(open_prompt.removesuffix("<think>\n"))
    if family == "glm":
        whole = chat.render_text(tokenizer, [asked, called, result], options)
    end = min(at for s in STOPS if (at := whole.find(s, begin)) >= 0)
    written = whole[begin:end]
    said = tokenizer.encode("No.</think>" * (family == "deepseek") + written)
    stop = tokenizer.encode(whole[end:])[0]
    reply = codec.read(prompt, said, chats()["tools"])
    (call,) = reply.calls
    assert reply.broken == 0
    assert call.name == "wetter"
    assert json.loads(call.arguments) == json.loads(called.tool_calls[0].arguments)
    said_as_message = Message("assistant", reply.content, tool_calls=reply.calls)
    after = codec.reply(
        [asked, said_as_message], [result], chats()["tools"], stop_id=stop
    )
    text = tokenizer.backend.decode([stop, *after], skip_special_tokens=False)
    # The template leaves Qwen 3's empty thought out once a result follows.
    written = written.removeprefix("<think>\n\n</think>\n\n") + text
    assert chat.render_text(tokenizer, [asked, called, result], options).endswith(
        written
    )
    if family != "deepseek":
        assert written in expected(family, "tool")


def test_reasoning_stays_in_the_context_of_its_episode():
    # Qwen 3's template drops what was thought once a user speaks.
    tokenizer = tokenizer_of("qwen3")
    codec, given = Codec(tokenizer), chats()["tools"]
    asked = Message("user", "What is 2+2?")
    said = tokenizer.encode('<think>\nlook\n</think>\n\n<tool_call>\n{"name": "add"')
    reply = codec.read(codec.render([asked], given), said)
    assert (reply.reasoning, reply.broken, reply.calls) == ("look", 1, ())
    told = Message("user", "1 of the calls could not be read")
    answer = Message("assistant", reply.content, reasoning=reply.reasoning)
    stop = tokenizer.backend.token_to_id("<|im_end|>")
    after = codec.reply([asked, answer], [told], given, stop_id=stop)
    text = tokenizer.backend.decode(list(after), skip_special_tokens=False)
    assert text.startswith("\n<|im_start|>user\n1 of the calls")
    assert text.endswith("<|im_start|>assistant\n")
    # A turn that was cut gets its end as context.
    cut = codec.reply([asked, answer], [told], given, stop_id=None)
    assert cut == (stop, *after)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_unicode_does_not_end_a_run(family):
    tokenizer = tokenizer_of(family)
    stop = tokenizer.backend.token_to_id(tokenizer.turn_end)
    call = ToolCall("caf\ud800", '{"a": "\ud83d"}', "abcde1234")
    answer = Message("assistant", "", reasoning="\udc00", tool_calls=(call,))
    result = Message("tool", "\ud83d", tool_call_id="abcde1234", name="caf\ud800")
    before = [Message("user", "?"), answer]
    after = Codec(tokenizer).reply(before, [result], chats()["tools"], stop_id=stop)
    text = tokenizer.backend.decode(list(after), skip_special_tokens=False)
    assert "\ufffd" in text


def test_what_is_nested_too_deep_is_an_error_of_the_template():
    arguments = '{"a": ' + "[" * 3000 + "]" * 3000 + "}"
    call = ToolCall("add", arguments, "abcde1234")
    rows = [Message("user", "?"), Message("assistant", "", tool_calls=(call,))]
    tokenizer, options = tokenizer_of("qwen3"), chat.with_tools(chats()["tools"])
    with pytest.raises(TokenizerError, match="nested too deep"):
        chat.render_text(tokenizer, rows, options)
    # Where it was said, what follows needs no rendering of it.
    result = Message("tool", "5", tool_call_id="abcde1234")
    assert Codec(tokenizer).reply(rows, [result], chats()["tools"], stop_id=None)


def test_parallel_calls_of_a_template_that_takes_one_can_be_answered():
    # Llama 3.1's template raises at two calls; what a model says must not end a run.
    tokenizer = tokenizer_of("llama3_1")
    calls = (ToolCall("add", "{}", "1"), ToolCall("add", "{}", "2"))
    before = [Message("user", "?"), Message("assistant", "", tool_calls=calls)]
    with pytest.raises(TokenizerError, match="one tool call at a time"):
        chat.render_text(tokenizer, before, chat.with_tools(chats()["tools"]))
    results = [Message("tool", str(i), tool_call_id=str(i)) for i in (1, 2)]
    stop = tokenizer.backend.token_to_id("<|eot_id|>")
    after = Codec(tokenizer).reply(before, results, chats()["tools"], stop_id=stop)
    text = tokenizer.backend.decode(list(after), skip_special_tokens=False)
    assert text.count("<|start_header_id|>ipython") == 2


def test_long_results_lose_their_middle():
    tokenizer = Tokenizer.train(["7"])
    result = Message("tool", "0123456789" * 5, tool_call_id="1", name="f")
    user = Message("user", "0123456789" * 5)
    cut, kept = tools.shortened(tokenizer, [result, user], 6)
    assert cut == Message(
        "tool", "012[... 44 tokens left out ...]789", tool_call_id="1", name="f"
    )
    assert kept is user
    assert tools.shortened(tokenizer, [result], 50) == (result,)
    (one,) = tools.shortened(tokenizer, [result], 1)
    assert one.content == "0[... 49 tokens left out ...]"


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text whose every letter is a token, so that no mark is a token of its own."""
    return [token for letter in text for token in tokenizer.encode(letter)]


@pytest.mark.parametrize("family", ["qwen3", "llama3_1"])
def test_special_tokens_are_no_text_but_text_that_looks_like_one_is(family):
    tokenizer = tokenizer_of(family)
    stop = tokenizer.backend.token_to_id("<|im_end|>")
    said = "Write <|im_end|> last."
    ids = [stop, *spelled(tokenizer, said), stop]
    assert tokenizer.decode(ids) == said
    assert tools.read(tokenizer, (), ids).content == said


def test_special_tokens_that_are_marks_are_read():
    tokenizer = tokenizer_of("harmony")
    message = "<|channel|>final<|message|>"
    end = tokenizer.encode("<|user|>")
    ids = [*tokenizer.encode(message), *end, *spelled(tokenizer, "<|user|>")]
    assert set(end) <= set(tokenizer.special_ids.values())
    assert set(tokenizer.encode("<|message|>")) <= set(tokenizer.special_ids.values())
    assert tools.read(tokenizer, (), ids).content == "<|user|>"


def test_a_thought_is_begun_behind_the_head_of_the_last_turn():
    tokenizer = tokenizer_of("qwen3")
    head = "<|im_end|>\n<|im_start|>assistant\n"
    asked = tokenizer.encode("Write <think>" + head)
    # The mark lies within the tokens that are looked at.
    assert "<think>" in tokenizer.decode(asked[-8:])
    assert not tools.thinks(tokenizer, asked)
    assert tools.read(tokenizer, asked, tokenizer.encode("42")).content == "42"
    assert tools.thinks(tokenizer, tokenizer.encode("Why?" + head + "<think>\n"))
    assert tools.thinks(tokenizer, tokenizer.encode("Why?" + head + "<think>\nHm"))
    closed = head + "<think>\n\n</think>\n\n"
    assert not tools.thinks(tokenizer, tokenizer.encode(closed))


@pytest.mark.parametrize(
    ("said", "inside"),
    [
        ("<think>\nTwo and two", True),
        ("<think>\n" + "So " * 99, True),
        ("<think>\nHm\n</think>\n\nIt is", False),
        ("It is", False),
        ("Hm\n</think>\n\n<think", False),
    ],
)
def test_a_message_that_goes_on_may_end_inside_of_its_thought(said, inside):
    tokenizer = tokenizer_of("qwen3")
    prompt = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n" + said)
    assert tools.thinks(tokenizer, prompt, said) == inside


def test_what_a_tool_returned_is_cut_where_it_is_read():
    tokenizer = tokenizer_of("qwen2_5")
    before = [
        Message("user", "?"),
        Message("assistant", "", tool_calls=(ToolCall("add", "{}"),)),
    ]
    result = Message("tool", "9" * 1000)
    ids = Codec(tokenizer, 20).reply(before, [result], chats()["tools"], stop_id=None)
    assert len(ids) < 100
    assert "980 tokens left out" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{{ messages[0].content }}", "does not write the tools"),
        ("{{ tools }}{{ messages[0].content }}", "in a format that is not known"),
    ],
)
def test_a_model_without_tools_is_told_apart(template, reason):
    trained = Tokenizer.train(["1"])
    tokenizer = Tokenizer(trained.backend, stop_ids=(1,), chat_template=template)
    found = tools.no_tools(tokenizer)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_tools_is_told_apart(family):
    # DeepSeek's template reads calls, but leaves it to the prompt to name the tools.
    reason = tools.no_tools(tokenizer_of(family))
    assert (reason is None) == (family != "deepseek")


def test_a_call_is_not_lost_without_a_template():
    called = Message("assistant", "", tool_calls=(ToolCall("add", "{}"),))
    with pytest.raises(TokenizerError, match="no way to write a tool call"):
        learned.answered(Tokenizer.train(["1"]), [Message("user", "1")], called)
