"""The token that ends the assistant's turn, where no file of a checkpoint names it."""

import json
from pathlib import Path

import pytest
import tokenizers

from jaxrl_post.data.chat import render_reply
from jaxrl_post.data.learned import answered, conversation
from jaxrl_post.data.preferences import JudgedAnswer, Preference
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.data.turn_end import find_turn_end
from jaxrl_post.envs import Message
from jaxrl_post.examples.packed import JudgedExamples, Pairs

PARITY = Path(__file__).parents[1] / "parity"
CHATS = json.loads((PARITY / "fixtures" / "chat.json").read_text(encoding="utf-8"))

ASK = Message("user", "What is 2+2?")
FOUR = Message("assistant", "4")
CHATML = "chatml"
# Each role begins with a token, and nothing closes a turn.
OPEN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def source(template):
    file = PARITY / "chat_templates" / f"{template}.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else template


def base_tokenizer(template, **changes):
    """As a base model's: it has the template's tokens, and ends texts with </s>."""
    backend = tokenizers.Tokenizer.from_str(json.dumps(CHATS["tokenizer"] | changes))
    return Tokenizer(
        backend,
        stop_ids=[backend.token_to_id("</s>")],
        chat_template=source(template),
        special_tokens=CHATS["special_tokens"],
    )


def text_of(tokenizer, ids):
    return tokenizer.backend.decode(list(ids), skip_special_tokens=False)


ENDS = {
    "chatml": "<|im_end|>",
    "generation": "<|im_end|>",
    "generation_recap": "<|im_end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_coder": "<|im_end|>",
    "llama2": "</s>",
    "llama3_1": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
    "deepseek": "</s>",
    "command": "<|eot_id|>",
    # <|end|> also stands between the thought and the answer.
    "harmony": "<|return|>",
    # The head of the next turn.
    "glm": "<|user|>",
}
# They do not write a turn as they prompt for it, so none of theirs can be learned.
PROMPTS_OTHERWISE = ("command", "deepseek")


@pytest.mark.parametrize(("template", "end"), ENDS.items())
def test_the_end_of_a_turn_is_a_stop_token_and_learned(template, end):
    tokenizer = base_tokenizer(template)
    assert tokenizer.turn_end == end
    assert tokenizer.stop_tokens == tuple(dict.fromkeys(("</s>", end)))
    assert tokenizer.eos_token == "</s>"
    if template in PROMPTS_OTHERWISE:
        return
    _, target = answered(tokenizer, [ASK], "4")
    assert tokenizer.backend.id_to_token(target[-1]) == end
    assert sum(token in tokenizer.stop_ids for token in target) == 1


def test_every_template_of_the_parity_suite_is_looked_at():
    found = {file.stem for file in (PARITY / "chat_templates").glob("*.jinja")}
    assert found == ENDS.keys() | {"command_rag", "command_tool_use"}


@pytest.mark.parametrize(
    "template",
    [
        # A system message, contents in parts, tools, or all of them, are insisted on.
        "{{ raise_exception('system first') if messages[0].role != 'system' }}",
        "{{ raise_exception('no tools') if not tools }}",
        "{% for m in messages %}{% set _ = m.content[0].text.x %}{% endfor %}"
        "{{ raise_exception('parts') if messages[0].content is string }}",
        # No second question is taken.
        "{{ raise_exception('one question') if messages | length > 2 }}",
    ],
)
def test_templates_that_insist_on_something(template):
    written = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if m.content is string else m.content[0].text }}"
        "<|im_end|>\n{% endfor %}"
    )
    tokens = ["<|im_start|>", "<|im_end|>", "</s>"]
    assert find_turn_end(template + written, {}, tokens) == "<|im_end|>"


def test_closing_markup_within_a_turn_is_not_its_end():
    template = "{% for m in messages %}<b>{{ m.content }}</b><end>{% endfor %}<eos>"
    assert find_turn_end(template, {}, ["<b>", "</b>", "<end>", "<eos>"]) == "<end>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # The vocabulary lacks the template's tokens, or the template has none.
        ("{% for m in messages %}{{ m.content }}<|fin|>\n{% endfor %}", "<|fin|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", r"'\n'"),
        ("{{ messages[0].content }}", "leaves the content out"),
        ("{{ raise_exception('not today') }}", "not today"),
    ],
)
def test_an_answer_without_an_end_is_not_learned(template, message):
    tokenizer = base_tokenizer(template)
    assert tokenizer.stop_tokens == ("</s>",)
    with pytest.raises(TokenizerError, match=r"^chat: ") as caught:
        _ = tokenizer.turn_end
    assert message in str(caught.value)
    with pytest.raises(TokenizerError, match=r"^chat: "):
        answered(tokenizer, [ASK], "4")


def test_a_refusal_says_what_to_do():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    message = (
        r"^chat: the chat template ends the assistant's turn with '\\n', in which "
        r"there is no special token .*; write {{ eos_token }} after the assistant's"
    )
    with pytest.raises(TokenizerError, match=message):
        answered(base_tokenizer(template), [ASK], "4")
    mended = template.replace("content }}", "content }}{{ eos_token }}")
    tokenizer = base_tokenizer(mended)
    assert text_of(tokenizer, answered(tokenizer, [ASK], "4")[1]) == "4</s>"


def test_a_turn_before_a_result_that_ends_with_no_stop_token_is_refused():
    """GLM ends a call with <|observation|>, which no question follows."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ]
    tokenizer = base_tokenizer("glm")
    with pytest.raises(
        TokenizerError,
        match=r"writes '<\|observation\|>.*, which begins with no stop token \(</s>, "
        r"<\|user\|>\).*eos_token_id of generation_config.json",
    ):
        conversation(tokenizer, messages)


BLOCKS = (
    "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}AFTER{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("after", "learned"),
    [
        ("<|im_end|>{% endgeneration %}", "4<|im_end|>"),
        ("<|im_end|>\n{% endgeneration %}", "4<|im_end|>\n"),
        ("{% endgeneration %}<|im_end|>", "4<|im_end|>"),
        ("{% endgeneration %} <|im_end|>", "4 <|im_end|>"),
    ],
)
def test_a_generation_block_reaches_through_the_end_of_its_turn(after, learned):
    tokenizer = base_tokenizer(BLOCKS.replace("AFTER", after))
    for more in ([], [ASK]):
        [(tokens, mask)] = conversation(tokenizer, [ASK, FOUR, *more])
        assert text_of(tokenizer, tokens[mask]) == learned


def test_a_generation_block_far_from_the_end_of_its_turn_is_refused():
    tokenizer = base_tokenizer(
        BLOCKS.replace("AFTER", "{% endgeneration %}!<|im_end|>")
    )
    with pytest.raises(TokenizerError, match=r"'!<\|im_end\|>.*move {% endgeneration"):
        answered(tokenizer, [ASK], "4")


def test_an_open_turn_that_ends_a_conversation_gets_its_end():
    tokenizer = base_tokenizer(OPEN)
    [(tokens, mask)] = conversation(tokenizer, [ASK, FOUR])
    assert text_of(tokenizer, tokens) == ("<|user|>What is 2+2?<|assistant|>4<|user|>")
    assert text_of(tokenizer, tokens[mask])[-len("4<|user|>") :] == "4<|user|>"


def test_a_reply_begins_behind_the_end_that_was_sampled():
    tokenizer = base_tokenizer(CHATML)
    end = tokenizer.backend.token_to_id("<|im_end|>")
    after = "\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    reply = render_reply(tokenizer, [ASK, FOUR], [ASK], stop_id=end)
    assert text_of(tokenizer, reply) == after
    # Neither was it sampled where the checkpoint's own end was.
    reply = render_reply(tokenizer, [ASK, FOUR], [ASK], stop_id=tokenizer.eos_id)
    assert text_of(tokenizer, reply) == f"<|im_end|>{after}"


def test_preferred_and_judged_answers_end_with_it():
    tokenizer = base_tokenizer(CHATML)
    end = tokenizer.backend.token_to_id("<|im_end|>")
    pair = Preference((ASK,), "4", "5", group="2+2")
    judged = JudgedAnswer((ASK,), "4", True, "2+2")
    for examples in (Pairs([pair], []), JudgedExamples([judged], [])):
        for sequence in examples.encode(tokenizer, "train", 0):
            learned = sequence.ids[sequence.loss_mask]
            assert learned[-1] == end
            assert (learned == end).sum() == 1


def test_it_is_saved_and_read_back(tmp_path):
    tokenizer = base_tokenizer(CHATML)
    tokenizer.save(tmp_path)
    ids = [tokenizer.backend.token_to_id(token) for token in ("</s>", "<|im_end|>")]
    file = tmp_path / "generation_config.json"
    assert json.loads(file.read_text())["eos_token_id"] == ids
    # A base model's file names only the end of a document.
    file.write_text(json.dumps({"eos_token_id": ids[0]}))
    assert Tokenizer.from_directory(tmp_path).stop_ids == tuple(ids)


def test_it_must_be_a_token_that_the_model_knows():
    tokenizer = base_tokenizer(CHATML)
    end = tokenizer.backend.token_to_id("<|im_end|>")
    added = [
        dict(token, id=9999 if token["id"] == end else token["id"])
        for token in CHATS["tokenizer"]["added_tokens"]
    ]
    assert tokenizer.for_model(tokenizer.vocab_size).stop_ids == tokenizer.stop_ids
    model = {**CHATS["tokenizer"]["model"]}
    model["vocab"] = {t: i for t, i in model["vocab"].items() if i != end}
    far = base_tokenizer(CHATML, added_tokens=added, model=model)
    assert far.stop_ids[-1] >= tokenizer.vocab_size - 1
    with pytest.raises(TokenizerError, match=r"its ids reach to \d+ \('<\|im_end\|>'"):
        far.for_model(far.stop_ids[-1])


def test_of_several_templates_the_default_says_it():
    tokenizer = base_tokenizer(CHATML)
    templates = {"tool_use": source("llama3_1"), "default": source(CHATML)}
    for named, end in (
        (templates, "<|im_end|>"),
        (dict([*templates.items()][:1]), "<|eot_id|>"),
    ):
        several = Tokenizer(
            tokenizer.backend,
            stop_ids=tokenizer.stop_ids[:1],
            chat_template=named,
            special_tokens=tokenizer.special_tokens,
        )
        assert several.turn_end == end
