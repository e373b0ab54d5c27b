"""Training on a conversation covers what a model samples after its prompts."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxrl_post.data import learned
from jaxrl_post.data.chat import Options, render_text
from jaxrl_post.data.learned import answered, conversation, parts, unwritten
from jaxrl_post.data.steps import judged_tokens
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.messages import Message

PARITY = Path(__file__).parents[1] / "parity"
CHATS = json.loads((PARITY / "fixtures" / "chat.json").read_text(encoding="utf-8"))
BACKEND = tokenizers.Tokenizer.from_str(json.dumps(CHATS["tokenizer"]))
STOPS = [
    *("</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|return|>", "<|call|>"),
    *("<|user|>", "<|observation|>", "<|end|>"),
]

# The prompt of DeepSeek-R1's models begins a thought, which the history does not have.
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}"
    "A{{ (m.content or '').split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}={{ c.function.name }}{% endfor %}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}A<think>\n{% endif %}"
)


def ask(content):
    return {"role": "user", "content": content}


def said(content, reasoning=None, **more):
    thought = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": "assistant", "content": content, **thought, **more}


def tokenizer_of(template):
    file = PARITY / "chat_templates" / f"{template}.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else template
    return Tokenizer(
        BACKEND,
        stop_ids=[BACKEND.token_to_id(stop) for stop in STOPS],
        chat_template=source,
        special_tokens=CHATS["special_tokens"],
    )


def texts(tokenizer, messages, **more):
    """The context and the trained texts of each sequence, from its first turn on."""
    found = parts(tokenizer, messages, **more)
    return [(text[: s[0][0]], [text[b:e] for b, e in s]) for text, s in found]


FOUR = [
    said("<think>\nhm\n</think>\n\n4"),
    said("<think>hm</think>4"),
    said("hm\n</think>\n\n4"),
    said("4", "hm"),
    said("4"),
    said("<think>\n\n</think>\n\n4"),
]
SAMPLED = [
    "hm\n</think>\n\n4</s>",
    "hm</think>4</s>",
    "hm\n</think>\n\n4</s>",
    "hm\n</think>\n\n4</s>",
    "\n</think>\n\n4</s>",
    "\n</think>\n\n4</s>",
]


@pytest.mark.parametrize("turn", range(len(FOUR)))
def test_a_turn_follows_the_thought_that_its_prompt_begins(turn):
    tokenizer = tokenizer_of(R1)
    rows = [ask("2+2"), FOUR[turn]]
    assert texts(tokenizer, rows) == [("[2+2]A<think>\n", [SAMPLED[turn]])]
    if "reasoning_content" not in FOUR[turn]:
        prompt, answer = answered(
            tokenizer, [Message("user", "2+2")], rows[1]["content"]
        )
        assert BACKEND.decode(prompt, skip_special_tokens=False) == "[2+2]A<think>\n"
        assert BACKEND.decode(answer, skip_special_tokens=False) == SAMPLED[turn]


def test_the_end_of_a_thought_inside_a_turn_stays():
    call = {"function": {"name": "f</think> g", "arguments": {}}}
    rows = [ask("2"), said("", "hm", tool_calls=[call])]
    assert texts(tokenizer_of(R1), rows) == [
        ("[2]A<think>\n", ["hm\n</think>\n\n=f</think> g</s>"])
    ]


@pytest.mark.parametrize("head", ["", "\n\n"])
def test_the_indentation_of_an_answer_is_kept(head):
    code = f"{head}    return x"
    for turn, thought in ((said(code), ""), (said(code, "hm"), "hm")):
        answer = f"{thought}\n</think>\n\n    return x</s>"
        assert texts(tokenizer_of(R1), [ask("2"), turn])[0][1] == [answer]
    closed = R1.replace("A<think>\n", "A<think>\n\n</think>\n\n")
    assert texts(tokenizer_of(closed), [ask("2"), said(code)])[0][1] == [
        "    return x</s>"
    ]
    # A template that strips contents writes none.
    strips = R1.replace("A{{ (m.content or '')", "A{{ (m.content or '').strip()")
    answer = "hm\n</think>\n\nreturn x</s>"
    assert texts(tokenizer_of(strips), [ask("2"), said(code, "hm")])[0][1] == [answer]


@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_written_whatever_the_template_calls_it(read, given):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}"
        f"A{{% if m.{read} %}}<think>{{{{ m.{read} }}}}</think>{{% endif %}}"
        "{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    tokenizer, rows = tokenizer_of(template), [ask("2"), said("4", **{given: "hm"})]
    assert texts(tokenizer, rows) == [("[2]A", ["<think>hm</think>4</s>"])]
    assert unwritten(tokenizer, rows) == ()


def test_a_chat_of_such_a_template_is_cut_after_each_turn():
    rows = [ask("2"), said("4", "hm"), ask("3"), said("<think>\nso\n</think>\n\n6")]
    assert texts(tokenizer_of(R1), rows) == [
        ("[2]A<think>\n", ["hm\n</think>\n\n4</s>"]),
        ("[2]A4</s>[3]A<think>\n", ["so\n</think>\n\n6</s>"]),
    ]


def test_a_call_follows_its_thought():
    call = {"function": {"name": "f", "arguments": {}}}
    rows = [ask("2"), said("", "hm", tool_calls=[call])]
    assert texts(tokenizer_of(R1), rows) == [
        ("[2]A<think>\n", ["hm\n</think>\n\n=f</s>"])
    ]


def test_an_empty_thought_ends_as_the_template_ends_thoughts():
    written = (
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>\n"
        "{% endif %}{{ (m.content"
    )
    template = R1.replace("{{ (m.content", written)
    tokenizer = tokenizer_of(template)
    [(_, [answer])] = texts(tokenizer, [ask("2"), said("4")])
    assert answer == "</think>\n4</s>"
    [(_, [answer])] = texts(tokenizer, [ask("2"), said("4", "hm")])
    assert answer == "hm</think>\n4</s>"


def test_a_thought_that_the_template_cuts_away_is_learned_all_the_same():
    template = R1.replace("A<think>\n", "A")
    [(context, [answer])] = texts(tokenizer_of(template), [ask("2"), said("4", "hm")])
    assert (context, answer) == ("[2]A", "<think>\nhm\n</think>\n\n4</s>")


def test_a_prompt_that_ends_the_thought_leaves_no_room_for_one():
    template = R1.replace("A<think>\n", "A<think>\n\n</think>\n\n")
    tokenizer = tokenizer_of(template)
    assert texts(tokenizer, [ask("2"), said("4")])[0][1] == ["4</s>"]
    for turn in (said("4", "hm"), said("<think>\nhm\n</think>\n\n4")):
        rows = [ask("2"), turn]
        assert texts(tokenizer, rows)[0][1] == ["4</s>"]
        assert unwritten(tokenizer, rows) == ("reasoning",)


def test_turns_of_which_the_template_drops_the_reasoning_later():
    rows = [ask("2+2"), said("4", "hm"), ask("3+3"), said("6", "so")]
    (one, first), (two, second) = texts(tokenizer_of("qwen3"), rows)
    assert first == ["<think>\nhm\n</think>\n\n4<|im_end|>"]
    assert second == ["<think>\nso\n</think>\n\n6<|im_end|>"]
    assert two.startswith(one)
    assert "hm" not in two
    (_, first), (_, second) = texts(tokenizer_of("harmony"), rows)
    assert first[0].endswith("<|channel|>final<|message|>4<|return|>")
    assert second[0].endswith("<|channel|>final<|message|>6<|return|>")


def test_turns_that_go_on_in_their_sequence_stay_in_it():
    """A call, its result and the answer, before a question that drops the thoughts."""
    call = {"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = [
        *(ask("2+2"), said("", "hm", tool_calls=[call])),
        *({"role": "tool", "content": "4", "tool_call_id": "1"}, said("4", "so")),
        *(ask("3+3"), said("6", "well")),
    ]
    (_, before), (_, after) = texts(tokenizer_of("qwen3"), rows)
    assert [len(before), len(after)] == [2, 1]


def test_a_turn_before_which_the_template_rewrites_others():
    """As GPT-OSS's, which drops a call's reasoning once the answer is there."""
    template = (
        "{% set done = messages[-1].role == 'assistant' %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}A{% if m.thinking and (loop.last or not done) %}"
        "({{ m.thinking }}){% endif %}{{ m.content }}</s>{% else %}"
        "[{{ m.content | tojson }}]{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )
    call = {"function": {"name": "f", "arguments": {}}}
    rows = [
        ask("2"),
        said("f", "hm", tool_calls=[call]),
        {"role": "tool", "content": "4"},
    ]
    [(context, answers)] = texts(tokenizer_of(template), [*rows, said("4", "so")])
    assert (context, answers) == ('["2"]A', ["(hm)f</s>", "(so)4</s>"])


def test_a_system_prompt_that_moves_with_the_last_question():
    rows = [{"role": "system", "content": "Be brief."}, ask("2+2"), said("4")]
    [(context, [answer])] = texts(tokenizer_of("mistral"), rows)
    assert "Be brief." in context
    assert answer == " 4</s>"


def test_a_turn_that_begins_otherwise_than_its_prompt_is_refused():
    template = R1.replace("A<think>\n", "B")
    with pytest.raises(
        TokenizerError, match=r"messages\[1\], a turn .* how it prompts"
    ):
        parts(tokenizer_of(template), [ask("2"), said("4")])


def test_steps_follow_the_thought_that_the_prompt_begins():
    tokenizer, prompt = tokenizer_of(R1), [Message("user", "2")]

    def judged(*steps):
        found = judged_tokens(tokenizer, prompt, steps, [1.0] * len(steps), "\n")
        assert np.count_nonzero(found.loss_mask) == len(steps)
        return BACKEND.decode(found.ids.tolist(), skip_special_tokens=False)

    assert judged("a", "b") == "[2]A<think>\n\n</think>\n\na\nb\n"
    assert judged("<think>\na", "</think>b") == "[2]A<think>\na\n</think>b\n"
    plain = tokenizer_of("chatml")
    found = judged_tokens(plain, prompt, ["a"], [1.0], "\n")
    assert "think" not in BACKEND.decode(found.ids.tolist())


CALL = {
    "id": "abcde1234",
    "type": "function",
    "function": {"name": "wetter", "arguments": {"city": "Paris"}},
}
RESULT = {
    "role": "tool",
    "content": "It is warm.",
    "tool_call_id": "abcde1234",
    "name": "wetter",
}
MATRIX = {
    "single": [ask("What is 2+2?"), said("Four.")],
    "several": [ask("2+2?"), said("Four."), ask("And 3+3?"), said("Six.")],
    "reasoning": [
        *(ask("2+2?"), said("Four.", "Two twice.")),
        *(ask("And 3+3?"), said("Six.", "Thrice two.")),
    ],
    "in the text": [ask("2+2?"), said("<think>\nTwo twice.\n</think>\n\nFour.")],
    "system": [{"role": "system", "content": "Be brief."}, ask("2+2?"), said("Four.")],
    "tools": [ask("How?"), said("", tool_calls=[CALL]), RESULT, said("Warm.")],
    "all": [
        *(ask("How?"), said("", "I look.", tool_calls=[CALL]), RESULT),
        *(said("Warm.", "It says so."), ask("Thanks?"), said("Yes.", "Polite.")),
    ],
}
TEMPLATES = sorted(p.stem for p in (PARITY / "chat_templates").glob("*.jinja"))
# This many conversations of each are trained on, and the others are refused.
LEARNED = {
    "chatml": 4, "command": 0, "command_rag": 0, "command_tool_use": 1, "deepseek": 5,
    "gemma": 3, "generation": 5, "generation_recap": 5, "glm": 7, "harmony": 7,
    "llama2": 4, "llama3_1": 5, "mistral": 5, "phi3": 4, "qwen2_5": 5, "qwen3": 7,
    "qwen3_coder": 5,
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_is_refused_or_every_turn_stands_behind_its_prompt(template):
    tokenizer, count = tokenizer_of(template), 0
    for name, rows in MATRIX.items():
        tools = CHATS["tools"] if any("tool_calls" in row for row in rows) else None
        options = Options(tools=tools, adapt=True)
        try:
            found = parts(tokenizer, rows, options)
        except TokenizerError:
            continue
        if unwritten(tokenizer, rows, options, texts=[text for text, _ in found]):
            continue
        count += 1
        blocks = template.startswith("generation")
        turns = iter([i for i, row in enumerate(rows) if row["role"] == "assistant"])
        for text, produced in found:
            for begin, end in produced if not blocks else ():
                index = next(turns)
                row = rows[index]
                prompt = render_text(tokenizer, rows[:index], options)
                assert text[:begin] == prompt, (name, index)
                own = text[begin:end]
                answer = row["content"].rpartition("</think>")[2]
                wanted = [answer, learned.thought_of(row)]
                wanted += [c["function"]["name"] for c in row.get("tool_calls", ())]
                assert all(each.strip() in own for each in wanted), (name, own)
                assert own.rstrip().endswith(tokenizer.stop_tokens), (name, own)
        assert blocks or next(turns, None) is None
    assert count == LEARNED[template]


def test_one_sequence_is_the_whole_conversation_as_it_is_written():
    rows = [*MATRIX["several"], ask("Thanks!")]
    for template in ("chatml", "llama3_1", "gemma", "phi3", "qwen2_5"):
        tokenizer = tokenizer_of(template)
        [(tokens, _)] = conversation(tokenizer, rows)
        whole = render_text(tokenizer, rows, prompt=False)
        assert tuple(tokens.tolist()) == tokenizer.encode(whole)


def test_a_thought_is_found_in_its_field_or_in_the_content():
    assert learned.thought_of(said("4", "hm")) == "hm"
    assert learned.thought_of(said("4", " ")) == ""
    assert learned.thought_of(said("a</think>4")) == "a"
    assert learned.thought_of(said("4")) == ""
