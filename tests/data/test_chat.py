"""Conversations to tokens: templates, and replies that continue what was sampled."""

import pytest
import tokenizers

from jaxrl_post.data import chat
from jaxrl_post.data.codec import Codec
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.envs import Message

PLAIN = Tokenizer.train(["user assistant 1+2=3 12+30=42"] * 3, vocab_size=280)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 3 does: BOS first, nothing after the end of a turn.
HEADERS = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start|>' + message.role + '<|end|>\n\n' + message.content | trim }}"
    "{{ '<|eot|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
# As Qwen3 and DeepSeek-R1 do: the reasoning of earlier turns disappears.
FORGETFUL = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and not loop.last %}"
    "{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>"
    "{% endfor %}"
)


def templated(template, stop="<|im_end|>", **special_tokens):
    backend = tokenizers.Tokenizer.from_str(PLAIN.backend.to_str())
    names = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<bos>"]
    backend.add_special_tokens(names)
    return Tokenizer(
        backend,
        stop_ids=(backend.token_to_id(stop),),
        chat_template=template,
        special_tokens=special_tokens,
    )


def text_of(tokenizer, ids):
    return tokenizer.backend.decode(list(ids), skip_special_tokens=False)


USER, AGAIN = Message("user", "1+2="), Message("user", "4+5=")
ANSWER = Message("assistant", "3")


def test_without_a_template_contents_follow_one_another():
    codec = Codec(PLAIN)
    rendered = codec.render([Message("system", "12+"), Message("user", "30=")])
    assert rendered == PLAIN.encode("12+30=")
    assert codec.decode(rendered) == "12+30="
    reply = codec.reply([USER, ANSWER], [AGAIN], stop_id=PLAIN.eos_id)
    assert reply == PLAIN.encode("4+5=")
    # As in a conversation that is learned: an answer ends with <|eos|>.
    cut = codec.reply([USER, ANSWER], [AGAIN], stop_id=None)
    assert cut == (PLAIN.eos_id, *reply)


def test_without_a_template_an_answer_ends_once():
    """Some data sets write the end of a sequence themselves."""
    ended = Message("assistant", "3<|eos|>")
    given = chat.render(PLAIN, [USER, ended, AGAIN])
    assert given == chat.render(PLAIN, [USER, ANSWER, AGAIN])
    assert given.count(PLAIN.eos_id) == 1


def test_without_a_template_the_tokenizer_adds_its_bos_once():
    backend = tokenizers.Tokenizer.from_str(PLAIN.backend.to_str())
    backend.add_special_tokens(["<bos>"])
    bos = backend.token_to_id("<bos>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    codec = Codec(Tokenizer(backend, stop_ids=(1,)))
    assert codec.render([USER]) == (bos, *PLAIN.encode("1+2="))
    reply = codec.reply([USER, ANSWER], [AGAIN], stop_id=PLAIN.eos_id)
    assert reply == PLAIN.encode("4+5=")


def test_a_template_decides_and_special_tokens_are_single_ids():
    tokenizer = templated(CHATML)
    rendered = Codec(tokenizer).render([Message("system", "12"), USER])
    assert text_of(tokenizer, rendered) == (
        "<|im_start|>system\n12<|im_end|>\n"
        "<|im_start|>user\n1+2=<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert rendered.count(tokenizer.eos_id) == 2
    assert Codec(tokenizer).decode(rendered) == ("system\n12\nuser\n1+2=\nassistant\n")


def test_a_template_writes_bos_itself():
    tokenizer = templated(HEADERS, "<|eot|>", bos_token="<bos>")
    rendered = Codec(tokenizer).render([USER])
    assert rendered.count(tokenizer.backend.token_to_id("<bos>")) == 1
    assert text_of(tokenizer, rendered).startswith("<bos><|start|>user<|end|>\n\n1+2=")


@pytest.mark.parametrize(
    ("template", "stop"), [(CHATML, "<|im_end|>"), (HEADERS, "<|eot|>")]
)
def test_what_was_sampled_and_a_reply_are_what_the_template_writes(template, stop):
    """Also a newline that the template puts after the stop token."""
    tokenizer = templated(template, stop, bos_token="<bos>")
    codec = Codec(tokenizer)
    first = codec.render([USER])
    sampled = (*tokenizer.encode("3"), tokenizer.eos_id)
    stop_id = tokenizer.eos_id
    second = codec.reply([USER, ANSWER], [AGAIN], stop_id=stop_id)
    third = codec.reply([USER, ANSWER, AGAIN, ANSWER], [USER, AGAIN], stop_id=stop_id)
    whole = codec.render([USER, ANSWER, AGAIN, ANSWER, USER, AGAIN])
    assert first + sampled + second + sampled + third == whole
    assert second.count(tokenizer.eos_id) == 1


def test_a_template_that_rewrites_history_is_refused_where_it_does():
    tokenizer = templated(FORGETFUL)
    codec = Codec(tokenizer)
    thoughtful = Message("assistant", "<think>1+1+1</think>3")
    with pytest.raises(TokenizerError, match=r"rewrites earlier turns"):
        codec.reply([USER, thoughtful], [AGAIN], stop_id=tokenizer.eos_id)
    reply = codec.reply([USER, ANSWER], [AGAIN], stop_id=tokenizer.eos_id)
    assert text_of(tokenizer, reply) == "4+5=<|im_end|>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "the chat template failed"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "the chat template failed in line 1: .*append"),
        ("{{ messages[0].__class__.__mro__ }}", "the chat template failed"),
    ],
)
def test_a_template_that_fails_says_so(template, message):
    with pytest.raises(TokenizerError, match=f"^chat: .*{message}"):
        Codec(templated(template)).render([USER])
