"""Finding the assistant's tokens in a conversation, from what templates write."""

import json
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers, processors

from jaxrl_post.data.chat import Options, render, render_reply, render_text
from jaxrl_post.data.learned import answered, conversation
from jaxrl_post.data.learned.tokens import AsSampled
from jaxrl_post.data.spans import answer_end, closed, turn_end
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError

PARITY = Path(__file__).parents[1] / "parity"
CHATS = json.loads((PARITY / "fixtures" / "chat.json").read_text(encoding="utf-8"))

ASK = {"role": "user", "content": "What is 2+2?"}
FOUR = {"role": "assistant", "content": "4"}
AGAIN = {"role": "user", "content": "And 3+3?"}
SIX = {"role": "assistant", "content": "6"}
TWO_TURNS = [ASK, FOUR, AGAIN, SIX]
CALLS = [
    ASK,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Look.",
        "tool_calls": [
            {
                "id": "abcde1234",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 2}},
            }
        ],
    },
    {"role": "tool", "content": "4", "tool_call_id": "abcde1234"},
    {**FOUR, "reasoning_content": "Seen."},
]
CALL = '{"name": "add", "arguments": {"a": 2}}'


def tokenizer_of(template, stops, **changes):
    backend = tokenizers.Tokenizer.from_str(json.dumps(CHATS["tokenizer"] | changes))
    if (PARITY / "chat_templates" / f"{template}.jinja").is_file():
        file = PARITY / "chat_templates" / f"{template}.jinja"
        template = file.read_text(encoding="utf-8")
    return Tokenizer(
        backend,
        stop_ids=[backend.token_to_id(stop) for stop in stops],
        chat_template=template,
        special_tokens=CHATS["special_tokens"],
    )


def produced(tokenizer, messages, options=None, **more):
    """The runs of tokens that the masks mark, as text."""
    found = []
    for tokens, mask in conversation(tokenizer, messages, options or Options(), **more):
        assert tokens.dtype == np.int32
        assert mask.dtype == np.bool_
        assert tokens.shape == mask.shape
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        found += [
            tokenizer.backend.decode(tokens[begin:end], skip_special_tokens=False)
            for begin, end in edges.reshape(-1, 2)
        ]
    return found


@pytest.mark.parametrize(
    ("template", "stops", "expected"),
    [
        ("chatml", ["<|im_end|>"], ["4<|im_end|>", "6<|im_end|>"]),
        ("generation", ["<|im_end|>"], ["4<|im_end|>", "6<|im_end|>"]),
        ("qwen2_5", ["<|im_end|>"], ["4<|im_end|>", "6<|im_end|>"]),
        ("llama2", ["</s>"], [" 4 </s>", " 6 </s>"]),
        ("llama3_1", ["<|eot_id|>"], ["4<|eot_id|>", "6<|eot_id|>"]),
        ("mistral", ["</s>"], [" 4</s>", " 6</s>"]),
        ("gemma", ["</s>", "<end_of_turn>"], ["4<end_of_turn>", "6<end_of_turn>"]),
        # The end of the whole conversation is not a turn's.
        ("phi3", ["</s>", "<|end|>", "<|assistant|>"], ["4<|end|>", "6<|end|>"]),
        # The next turn's head is what ends this one, and is added to the last.
        (
            "glm",
            ["</s>", "<|user|>", "<|observation|>"],
            ["\n<think></think>\n4<|user|>", "\n<think></think>\n6<|user|>"],
        ),
        # Without a template.
        (None, ["</s>"], ["4</s>", "6</s>"]),
    ],
)
def test_turns_and_the_tokens_that_end_them(template, stops, expected):
    tokenizer = tokenizer_of(template, stops)
    assert produced(tokenizer, TWO_TURNS) == expected
    assert produced(tokenizer, TWO_TURNS, only_last=True) == expected[1:]
    assert produced(tokenizer, [*TWO_TURNS, ASK])[0] == expected[0]
    [(tokens, _)] = conversation(tokenizer, TWO_TURNS)
    if template is not None:
        text = render_text(tokenizer, TWO_TURNS, prompt=False)
        text += "<|user|>" if template == "glm" else ""
        assert tuple(tokens) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "qwen2_5",
            [f"<tool_call>\n{CALL}\n</tool_call><|im_end|>", "4<|im_end|>"],
        ),
        (
            "qwen3",
            [
                f"<think>\nLook.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call><|im_end|>",
                "<think>\nSeen.\n</think>\n\n4<|im_end|>",
            ],
        ),
        (
            "generation",
            [
                f"<think>\nLook.\n</think>\n\n\n<tool_call>\n{CALL}\n</tool_call>"
                "<|im_end|>",
                "<think>\nSeen.\n</think>\n\n4<|im_end|>",
            ],
        ),
    ],
)
def test_reasoning_and_tool_calls_are_produced(template, expected):
    tokenizer = tokenizer_of(template, ["<|im_end|>"])
    options = Options(tools=CHATS["tools"])
    assert produced(tokenizer, CALLS, options) == expected
    assert produced(tokenizer, CALLS, options, only_last=True) == expected[1:]


def test_a_result_that_follows_ends_a_turn_too():
    tokenizer = tokenizer_of("glm", ["<|user|>", "<|observation|>"])
    call = (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    )
    assert produced(tokenizer, CALLS)[0] == (
        f"\n<think>Look.</think>\n{call}<|observation|>"
    )


def test_the_last_turn_alone_can_be_learned_under_such_a_template():
    thoughtful = {**SIX, "reasoning_content": "3, 3"}
    qwen = tokenizer_of("qwen3", ["<|im_end|>"])
    assert produced(qwen, [ASK, FOUR, AGAIN, thoughtful], only_last=True) == [
        "<think>\n3, 3\n</think>\n\n6<|im_end|>"
    ]
    harmony = tokenizer_of("harmony", ["<|return|>", "<|call|>"])
    assert produced(harmony, [ASK, FOUR, AGAIN, thoughtful], only_last=True) == [
        "<|channel|>analysis<|message|>3, 3<|end|>"
        "<|start|>assistant<|channel|>final<|message|>6<|return|>"
    ]


def test_generation_blocks_of_the_last_turn():
    tokenizer = tokenizer_of("generation_recap", ["<|im_end|>"])
    thoughtful = [{**turn, "reasoning_content": "Hm."} for turn in (FOUR, SIX)]
    messages = [ASK, thoughtful[0], AGAIN, thoughtful[1]]
    # Two blocks a turn: reasoning, which earlier turns lose, and the answer.
    expected = ["<think>Hm.</think>", "4<|im_end|>"]
    last = ["<think>Hm.</think>", "6<|im_end|>"]
    assert produced(tokenizer, messages) == [*expected, *last]
    assert produced(tokenizer, messages, only_last=True) == last


def test_a_turn_whose_head_is_a_stop_token():
    tokenizer = tokenizer_of("phi3", ["</s>", "<|end|>", "<|assistant|>"])
    assert produced(tokenizer, [ASK, {**FOUR, "content": " "}]) == [" <|end|>"]


def test_a_generation_block_that_begins_with_the_turn():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_of(template, ["</s>"])
    assert produced(tokenizer, TWO_TURNS, only_last=True) == ["6</s>"]


def test_the_last_turn_under_a_template_whose_beginning_changes():
    changing = (
        "{{ messages | length }}{% for m in messages %}{{ m.content }}"
        "{% generation %}.{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(
        TokenizerError, match=r"precedes messages\[3\] differently once"
    ):
        produced(tokenizer_of(changing, ["</s>"]), TWO_TURNS, only_last=True)


def test_a_conversation_without_the_assistant_teaches_nothing():
    with pytest.raises(
        TokenizerError, match=r"needs a turn of the assistant; got .*'use"
    ):
        produced(tokenizer_of("chatml", ["<|im_end|>"]), [ASK])


# Sampling and learning agree.


@pytest.mark.parametrize(
    ("template", "stop"), [("chatml", "<|im_end|>"), ("llama3_1", "<|eot_id|>")]
)
def test_a_conversation_is_what_an_episode_would_have_sampled(template, stop):
    tokenizer = tokenizer_of(template, [stop])
    parts = [
        render(tokenizer, [ASK]),
        (*tokenizer.encode("4"), tokenizer.eos_id),
        render_reply(tokenizer, [ASK, FOUR], [AGAIN], stop_id=tokenizer.eos_id),
        (*tokenizer.encode("6"), tokenizer.eos_id),
    ]
    [(tokens, mask)] = conversation(tokenizer, TWO_TURNS)
    sampled = (
        [False] * len(parts[0]) + [True] * 2 + [False] * len(parts[2]) + [True] * 2
    )
    whole = [token for part in parts for token in part]
    assert tokens.tolist()[: len(whole)] == whole
    assert mask.tolist()[: len(whole)] == sampled
    assert not mask[len(whole) :].any()


def test_a_reply_follows_the_end_of_a_turn_not_of_the_conversation():
    tokenizer = tokenizer_of("phi3", ["</s>", "<|end|>"])
    end = tokenizer.backend.token_to_id("<|end|>")
    reply = render_reply(tokenizer, [ASK, FOUR], [AGAIN], stop_id=end)
    text = tokenizer.backend.decode(reply, skip_special_tokens=False)
    assert text == "\n<|user|>\nAnd 3+3?<|end|>\n<|assistant|>\n"


def test_a_reply_to_an_answer_of_white_space_whose_head_is_a_stop_token():
    tokenizer = tokenizer_of("phi3", ["</s>", "<|end|>", "<|assistant|>"])
    blank = {"role": "assistant", "content": " "}
    end = tokenizer.backend.token_to_id("<|end|>")
    reply = render_reply(tokenizer, [ASK, blank], [AGAIN], stop_id=end)
    text = tokenizer.backend.decode(reply, skip_special_tokens=False)
    assert text == "\n<|user|>\nAnd 3+3?<|end|>\n<|assistant|>\n"


GLM = ["<|user|>", "<|observation|>"]
GEMMA = ["<end_of_turn>", "</s>"]


@pytest.mark.parametrize(
    ("template", "stops", "sampled", "expected"),
    [
        # The head of the next turn ends this one.
        ("glm", GLM, "<|user|>", "\nAnd 3+3?<|assistant|>"),
        ("glm", GLM, None, "<|user|>\nAnd 3+3?<|assistant|>"),
        ("glm", GLM, "<|observation|>", "<|user|>\nAnd 3+3?<|assistant|>"),
        # A token of its own does.
        ("gemma", GEMMA, "<end_of_turn>", "\n<start_of_turn>user\nAnd"),
        ("gemma", GEMMA, "</s>", "<end_of_turn>\n<start_of_turn>user\nAnd"),
        ("gemma", GEMMA, None, "<end_of_turn>\n<start_of_turn>user\nAnd"),
        # With a space before it, which this answer does not have.
        ("llama2", ["</s>"], "</s>", "<s>[INST] And 3+3? [/INST]"),
        ("llama2", ["</s>"], None, " </s><s>[INST] And 3+3? [/INST]"),
        # The history has no trace of the thought that the prompt opens.
        ("deepseek", ["</s>"], "</s>", "<\uff5cUser\uff5c>And 3+3?"),
        ("deepseek", ["</s>"], None, "</s><\uff5cUser\uff5c>And 3+3?"),
        # Without a template.
        (None, ["</s>"], "</s>", "And 3+3?"),
        (None, ["</s>", "<|end|>"], "<|end|>", "</s>And 3+3?"),
    ],
)
def test_the_end_of_a_turn_is_neither_repeated_nor_left_out(
    template, stops, sampled, expected
):
    tokenizer = tokenizer_of(template, stops)
    stop_id = None if sampled is None else tokenizer.backend.token_to_id(sampled)
    reply = render_reply(tokenizer, [ASK, FOUR], [AGAIN], stop_id=stop_id)
    text = tokenizer.backend.decode(reply, skip_special_tokens=False)
    assert text.startswith(expected)


def test_white_space_that_was_sampled_is_not_repeated():
    tokenizer = tokenizer_of("llama2", ["</s>"])
    spaced = {**FOUR, "content": "4 "}
    reply = render_reply(tokenizer, [ASK, spaced], [AGAIN], stop_id=None)
    assert reply[0] == tokenizer.eos_id
    # Nothing of this answer is left in the history, and the head before it is.
    thought = {**FOUR, "content": "2, 2</think>"}
    tokenizer = tokenizer_of("deepseek", ["</s>"])
    reply = render_reply(tokenizer, [ASK, thought], [AGAIN], stop_id=None)
    assert reply[0] == tokenizer.eos_id


def test_a_stop_token_takes_the_white_space_that_it_takes_in_a_whole_text():
    """Phi-3's <|end|> does: the newline after it is no token."""
    added = [
        {**token, "rstrip": token["content"] == "<|im_end|>"}
        for token in CHATS["tokenizer"]["added_tokens"]
    ]
    tokenizer = tokenizer_of("chatml", ["<|im_end|>"], added_tokens=added)
    reply = render_reply(tokenizer, [ASK, FOUR], [AGAIN], stop_id=tokenizer.eos_id)
    assert reply[0] == tokenizer.backend.token_to_id("<|im_start|>")
    [(tokens, _)] = conversation(tokenizer, TWO_TURNS)
    first = (*render(tokenizer, [ASK]), *tokenizer.encode("4"), tokenizer.eos_id)
    assert tokens.tolist()[: len(first) + len(reply)] == [*first, *reply]


def test_renderings_that_are_compared_have_one_time():
    clock = "{{ strftime_now('%H:%M:%S.%f') }}{% for m in messages %}{{ m.content }}"
    tokenizer = tokenizer_of(f"{clock}</s>{{% endfor %}}", ["</s>"])
    assert produced(tokenizer, TWO_TURNS) == ["4</s>", "6</s>"]
    reply = render_reply(tokenizer, [ASK, FOUR], [AGAIN], stop_id=None)
    assert reply == tokenizer.encode("</s>And 3+3?</s>")


# From places in the text to tokens.


def test_no_token_begins_in_a_prompt_and_ends_in_its_turn():
    backend = Tokenizer.train(["user=:) 4 2+2"] * 9, vocab_size=300).backend
    template = "{% for m in messages %}{{ m.role }}={{ m.content }}<|eos|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant={% endif %}"
    tokenizer = Tokenizer(backend, stop_ids=(1,), chat_template=template)
    assert "=:)" in backend.get_vocab()
    smile = {"role": "assistant", "content": ":)4"}
    [(tokens, _)] = conversation(tokenizer, [ASK, smile, AGAIN, smile])
    first = (*render(tokenizer, [ASK]), *tokenizer.encode(":)4<|eos|>"))
    again = (*tokenizer.encode("user=And 3+3?<|eos|>assistant="),)
    assert tuple(tokens) == (*first, *again, *tokenizer.encode(":)4<|eos|>"))
    assert produced(tokenizer, [ASK, smile, AGAIN, smile]) == [":)4<|eos|>"] * 2
    prompt, target = answered(tokenizer, [ASK, smile, AGAIN], ":)4")
    # A prompt is tokenised as a whole, for every author.
    assert prompt == render(tokenizer, [ASK, smile, AGAIN])
    assert target == tokenizer.encode(":)4<|eos|>")


def test_a_thought_that_begins_with_the_line_break_that_ends_its_prompt():
    r"""`<think>\n` and `\n4` have the token `\n\n`, which no sampler meets there."""
    backend = Tokenizer.train(["\n\n", "\n\n"], vocab_size=300).backend
    assert len(backend.encode("\n\n").ids) == 1
    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant\n{% endif %}"
    tokenizer = Tokenizer(backend, stop_ids=(1,), chat_template=template)
    turn = {"role": "assistant", "content": "\n4"}
    prompt, target = answered(tokenizer, [ASK], "\n4")
    assert prompt == render(tokenizer, [ASK])
    assert target == tokenizer.encode("\n4<|eos|>")
    said = "{{ m.content }}<|eos|>"
    block = f"{{% generation %}}{said}{{% endgeneration %}}"
    own = f"{{% if m.role == 'user' %}}{said}{{% else %}}{block}{{% endif %}}"
    blocks = template.replace(said, own)
    tokenizer = Tokenizer(backend, stop_ids=(1,), chat_template=blocks)
    [(tokens, mask)] = conversation(tokenizer, [ASK, turn])
    assert tuple(tokens[~mask]) == prompt
    assert tuple(tokens[mask]) == target


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")},
        {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")},
        {
            "normalizer": normalizers.Sequence(
                [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            )
        },
        {
            "normalizer": normalizers.Replace(" ", "▁"),
            "pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Metaspace(prepend_scheme="first")]
            ),
        },
    ],
)
@pytest.mark.parametrize("templated", [True, False])
def test_a_turn_gets_no_space_from_a_tokenizer_that_puts_one_before_texts(
    changes, templated
):
    pieces = ["<unk>", "</s>", "▁", "▁happy", *"abcdefghijklmnopqrstuvwxyz:", "un"]
    model = tokenizers.models.Unigram(
        [(piece, -float(len(piece) < 5)) for piece in pieces], unk_id=0
    )
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["</s>"])
    for name, value in changes.items():
        setattr(backend, name, value)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = Tokenizer(
        backend, stop_ids=(1,), chat_template=template if templated else None
    )
    ask, turn = {"role": "user", "content": "un"}, {"role": "assistant"}
    for said in ("happy", "un happy"):
        [(tokens, mask)] = conversation(tokenizer, [ask, {**turn, "content": said}])
        shown = backend.id_to_token
        prompt = render(tokenizer, [ask])
        assert tuple(tokens[: len(prompt)]) == prompt
        assert "".join(map(shown, tokens[mask])) == said.replace(" ", "▁") + "</s>"
        assert not mask[: len(prompt)].any()
        assert answered(tokenizer, [ask], said) == (prompt, tuple(tokens[mask]))
        # Text after an added token is tokenised as in a whole text.
        [(longer, _)] = conversation(
            tokenizer, [ask, {**turn, "content": said}, ask, {**turn, "content": "a"}]
        )
        assert tuple(longer[: len(tokens)]) == tuple(tokens)


@pytest.mark.parametrize("strips", [False, True])
@hypothesis.given(
    st.lists(
        st.lists(
            st.sampled_from(
                ["<|im_start|>", "<|im_end|>", "<|im_", "\n", " ", "is", "4", "e\u0301"]
            ),
            max_size=12,
        ),
        max_size=6,
    )
)
def test_texts_that_begin_alike_have_the_tokens_that_they_have_alone(strips, texts):
    added = [
        {**token, "rstrip": strips, "lstrip": strips and token["id"] % 2 == 0}
        for token in CHATS["tokenizer"]["added_tokens"]
    ]
    tokenizer = tokenizer_of("chatml", ["<|im_end|>"], added_tokens=added)
    sampled, before = AsSampled(tokenizer), ""
    for parts in texts:
        # It continues the text before it, or a part of it.
        text = before[: len(before) // 2 if len(parts) % 3 else None] + "".join(parts)
        assert sampled.encode(text, []) == tokenizer.encode_with_begins(text)
        before = text


def test_white_space_belongs_to_its_token_whatever_the_post_processor_trims():
    """Byte-level post-processors may cut white space off the places of tokens."""
    post_processor = json.loads(processors.ByteLevel(trim_offsets=True).__getstate__())
    sequence = {"type": "Sequence", "processors": [post_processor]}
    messages = [ASK, {"role": "assistant", "content": "\n\n 4 \n  "}, AGAIN, SIX]
    expected = ["\n\n 4 \n  <|im_end|>", "6<|im_end|>"]
    for trimming in (None, post_processor, sequence):
        tokenizer = tokenizer_of("chatml", ["<|im_end|>"], post_processor=trimming)
        assert produced(tokenizer, messages) == expected
        # The space belongs to the prompt, and so do tokens that begin with it.
        spaced = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        spaced += "{% if add_generation_prompt %}assistant: {% endif %}"
        tokenizer = tokenizer_of(spaced, ["</s>"], post_processor=trimming)
        assert produced(tokenizer, [ASK, FOUR]) == ["4</s>"]
        assert produced(tokenizer, [ASK, {**FOUR, "content": "is"}]) == ["is</s>"]


def test_characters_of_several_tokens_and_normalized_text():
    answer = "🙂e\u0301數 4"
    messages = [{**ASK, "content": "🙂e\u0301"}, {**FOUR, "content": answer}]
    tokenizer = tokenizer_of("chatml", ["<|im_end|>"])
    assert produced(tokenizer, messages) == [f"{answer}<|im_end|>"]
    normalizer = json.loads(normalizers.NFC().__getstate__())
    tokenizer = tokenizer_of("chatml", ["<|im_end|>"], normalizer=normalizer)
    assert produced(tokenizer, messages) == ["🙂é數 4<|im_end|>"]


def test_bos_is_the_business_of_the_template():
    post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    state = json.loads(post_processor.__getstate__())
    tokenizer = tokenizer_of("llama2", ["</s>"], post_processor=state)
    [(tokens, _)] = conversation(tokenizer, TWO_TURNS)
    assert tokens.tolist().count(1) == 2
    assert render(tokenizer, [ASK]).count(1) == 1


def test_what_stands_around_a_plain_text_is_not_produced():
    post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    state = json.loads(post_processor.__getstate__())
    tokenizer = tokenizer_of(None, ["</s>"], post_processor=state)
    [(tokens, mask)] = conversation(tokenizer, [FOUR, AGAIN, SIX])
    assert tokens[0] == 1
    assert not mask[0]
    # Nor is the token that the tokenizer puts behind a text, after the turn's own.
    assert tokens[-2:].tolist() == [tokenizer.encode("6")[0], 2]
    assert mask[-2:].tolist() == [True, True]


# Parts.


def test_where_a_turn_ends():
    stops = ["<e>", "<s>"]
    assert turn_end("a<e>b<e>", stops) == 8
    assert turn_end("a<e>b<e>\n<s> ", stops) == 8
    assert turn_end("a<e>b", stops) == 5
    assert turn_end("a<e><e>", stops, begin=4) == 7
    assert turn_end("a<e>", []) == 4
    assert answer_end("a<e>b<e>\n<s> ", stops) == 5
    assert answer_end("a<e>b", stops) == 5
    assert answer_end("a<e>", []) == 4


def test_how_a_conversation_continues_another():
    assert closed("a<e>", "a<e>b", ["<e>"]) == "a<e>"
    assert closed("a<e>\n<s>", "a<e>\nb", ["<e>", "<s>"]) == "a<e>\n"
    assert closed("a<s>", "a<e>", ["<s>", "<e>"]) is None
    assert closed("a<e>", "b", ["<e>"]) is None
