"""Fine-tuning on files of one's own: what is held out, and what is learned."""

import io
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.config.files.suite import check_evaluation
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.data.chats import Chat, Text
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.examples.chats import Chats, open_chats
from jaxrl_post.examples.packed import packed
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.records.path import run_path

PLAIN = Tokenizer.train(["user assistant 0123456789+= abc"] * 3)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def templated(template: str) -> Tokenizer:
    return Tokenizer(
        PLAIN.backend,
        stop_ids=PLAIN.stop_ids,
        chat_template=template,
        special_tokens=PLAIN.special_tokens,
    )


CHATTED = templated(TEMPLATE)


def user(content):
    return {"role": "user", "content": content}


def said(content):
    return {"role": "assistant", "content": content}


TWO_TURNS = Chat((user("1+1="), said("2"), user("+1="), said("3")), "1+1=")


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def file(tmp_path):
    def write(rows, name="chats.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def learned(tokenizer, example):
    """The trained part of an example, and all of it, as texts."""
    (sequence,) = Chats([example], []).encode(tokenizer, "train", 0)

    def text(tokens):
        return tokenizer.backend.decode(tokens.tolist(), skip_special_tokens=False)

    return text(sequence.ids[sequence.loss_mask]), text(sequence.ids)


def test_every_turn_of_the_assistant_is_learned():
    assert learned(CHATTED, TWO_TURNS) == (
        "2<|eos|>3<|eos|>",
        "[user]1+1=<|eos|>[assistant]2<|eos|>[user]+1=<|eos|>[assistant]3<|eos|>",
    )
    assert learned(PLAIN, TWO_TURNS) == ("2<|eos|>3<|eos|>", "1+1=2<|eos|>+1=3<|eos|>")


def test_what_follows_the_last_learned_token_is_left_out():
    chat = Chat((user("1+1="), said("2"), user("thanks")), "1+1=")
    assert learned(PLAIN, chat) == ("2<|eos|>", "1+1=2<|eos|>")


def test_of_a_prompt_and_completion_the_completion_is_learned():
    chat = Chat((user("1"), said("2"), user("3"), said("4")), "", only_last=True)
    assert learned(CHATTED, chat)[0] == "4<|eos|>"


def test_the_rows_of_one_conversation_are_packed_with_the_turns_that_they_share():
    """A row a turn, as a prompt and its completion, and another third turn."""
    turns = (user("1+1="), said("2"), user("+1="), said("3"))
    ends = [(user("+4="), said("7")), (user("+5="), said("8"))]
    rows = [turns[:2], turns, *((*turns, *end) for end in ends)]
    chats = Chats([Chat(row, "1+1=", only_last=True) for row in rows], [])

    def tokens(tokenizer, *, trees):
        batch = packed(
            chats, tokenizer, "train", range(4),
            microbatch_tokens=64, rows=1, trees=trees,
        )  # fmt: skip
        # An answer of a digit is learned with its stop token.
        assert batch.loss_mask.sum() == 4 * 2
        return np.count_nonzero(batch.ends)

    # The longest whole, each other one's last token, and what departs from it.
    sizes = [6, 11, 16, 16]
    assert tokens(PLAIN, trees=False) == sum(sizes)
    assert tokens(PLAIN, trees=True) == 16 + 2 + (16 - 10)
    sizes = [16, 31, 46, 46]
    assert tokens(CHATTED, trees=False) == sum(sizes)
    assert tokens(CHATTED, trees=True) == 46 + 2 + (46 - 30)


def test_of_a_text_all_is_learned_but_what_nothing_predicts():
    assert learned(PLAIN, Text("1+2=3")) == ("+2=3<|eos|>", "1+2=3<|eos|>")
    assert learned(PLAIN, Text("1+2=3<|eos|>"))[1] == "1+2=3<|eos|>"


def test_a_share_of_the_prompts_is_held_out_each_once(file, console):
    rows = [
        {"messages": [user(f"{i}+1="), said(answer)]}
        for i in range(80)
        for answer in ("a", "b")
    ]
    found = open_chats(DataConfig(file(rows)), console)
    held_out = [each.group for each in found.eval]
    assert 0 < len(held_out) == len(set(held_out)) < 20
    assert len(found.train) == 2 * (80 - len(held_out))
    assert not set(held_out) & {each.group for each in found.train}
    assert console.file.getvalue() == ""


def test_of_a_few_rows_none_need_be_held_out(file, console):
    found = open_chats(DataConfig(file([{"text": "a"}, {"text": "b"}])), console)
    assert (found.size("train"), found.size("eval")) == (2, 0)
    assert "none is held out; --data.eval-path names a file" in console.file.getvalue()


ROWS = [{"prompt": f"{i}", "completion": "a"} for i in range(4)]


def test_a_prompt_that_is_trained_on_and_held_out_is_refused(file, console):
    path, eval_path = file(ROWS), file(ROWS[:1], "eval.jsonl")

    def opened(on_overlap, eval_path=eval_path):
        data = DataConfig(path, eval_path, on_overlap=on_overlap)
        return open_chats(data, console)

    with pytest.raises(
        ConfigError,
        match=r"--data.on-overlap: 1 of 4 examples of .*chats.jsonl have a prompt of "
        r"--data.eval-path .*eval.jsonl; .*--data.on-overlap drop",
    ):
        opened("fail")
    dropped = opened("drop")
    assert (dropped.size("train"), dropped.size("eval")) == (3, 1)
    assert "1 of 4 examples of" in console.file.getvalue()
    assert opened("allow").size("train") == 4
    with pytest.raises(ConfigError, match="4 of 4 examples"):
        opened("drop", path)


def test_bad_rows_are_skipped_and_shown(file, console):
    path = file([*ROWS, {"prompt": "b"}])
    found = open_chats(DataConfig(path, on_bad_row="skip"), console)
    assert found.size("train") + found.size("eval") == 4
    assert "chats.jsonl:5: no field 'completion'" in console.file.getvalue()


def test_what_is_too_long_is_left_out_and_counted(caplog):
    long = Text("7" * 100)
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        kept = Chats([long, Text("1"), TWO_TURNS], [TWO_TURNS]).fitting(
            PLAIN, max_tokens=20
        )
    assert kept == Chats([Text("1"), TWO_TURNS], [TWO_TURNS])
    assert caplog.messages == [
        "1 of 3 train examples left out: prompt plus answer of more than "
        "--max-tokens 20"
    ]
    (sequence,) = kept.encode(PLAIN, "train", 1)
    assert len(sequence.tokens) <= 20
    assert np.count_nonzero(sequence.loss_mask) == 4


def test_a_conversation_that_the_template_refuses_is_named():
    strict = Tokenizer(
        PLAIN.backend,
        stop_ids=PLAIN.stop_ids,
        chat_template="{{ raise_exception('roles must alternate') }}",
    )
    with pytest.raises(
        ConfigError,
        match=r"--data.path: the conversation that begins with '1\+1=': .*alternate",
    ):
        Chats([TWO_TURNS], []).fitting(strict, max_tokens=20)


def test_the_format_of_a_file_is_said_unless_it_is_plain(file, console):
    turns = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
    rows = [{"id": i, "conversations": turns} for i in range(3)]
    path = file(rows)
    assert open_chats(DataConfig(path), console).train[0].messages[-1] == said("2")
    assert f"{path}: read as ShareGPT\n" in console.file.getvalue()
    with pytest.raises(ValueError, match=r"must have the fields \('messages'\)"):
        open_chats(DataConfig(path, format="plain"), console)


def test_columns_of_both_files_are_named(file, console):
    rows = [{"question": each["prompt"], "answer": "a"} for each in ROWS]
    columns = ("prompt=question", "completion=answer")
    paths = file(rows[1:]), file(rows[:1], "eval.jsonl")
    found = open_chats(DataConfig(*paths, columns=columns), console)
    assert [each.group for each in (*found.eval, *found.train)] == [*"0123"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"columns": ("prompt",)}, "--data.columns: must be NAME=FIELD.* got 'prompt'"),
        ({"columns": ("=a",)}, "--data.columns: must be NAME=FIELD"),
        ({"columns": ("prompt=a", "prompt=b")}, "got 'prompt=b'"),
        ({"columns": ("prompt=a", "completion=a")}, "got 'completion=a'"),
        (
            {"path": None, "format": "alpaca"},
            "--data.format: is for the chats of --data.",
        ),
    ],
)
def test_columns_and_formats_that_cannot_be_are_refused(changes, told):
    config = SFTConfig(data=replace(DataConfig(path="chats.jsonl"), **changes))
    with pytest.raises(ConfigError, match=told):
        check_options(config)


def test_a_format_with_an_environment_is_refused(file):
    data = DataConfig(file(ROWS), format="sharegpt")
    for config in (SFTConfig(env="jsonl", data=data), RLConfig(env="jsonl", data=data)):
        with pytest.raises(ConfigError, match=r"--data.format: .* without --env"):
            check_options(config)
    with pytest.raises(ConfigError, match=r"--data.format: .* without --env"):
        check_evaluation(EvaluateConfig("demo", env="jsonl", data=data))


def test_texts_for_a_tokenizer_are_what_is_said():
    assert Chats([TWO_TURNS, Text("a")], []).texts() == ["1+1=", "2", "+1=", "3", "a"]


def test_sft_reads_the_file_that_is_named_without_an_environment(file, console):
    path = file([*ROWS, {"prompt": "b"}])
    config = SFTConfig(data=DataConfig(path))
    assert run_path(config).name == "sft-chats-demo"
    assert run_path(SFTConfig()).name == "sft-arithmetic-demo"
    with pytest.raises(ValueError, match=r"chats.jsonl:5: no field 'completion'"):
        run_offline(config, console=console, command="")


def test_of_a_completion_with_a_call_the_completion_alone_is_learned():
    template = (
        "{% for t in tools %}{{ t.name }}{% endfor %}{% for m in messages %}"
        "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        "={{ c.function.name }}={% endfor %}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = templated(template)
    called = {**said("a"), "tool_calls": [{"function": {"name": "b", "arguments": {}}}]}
    before = (user("1+1="), said("2"), user("+1="))
    for reply, expected in ((called, "a=b=<|eos|>"), (said("a"), "a<|eos|>")):
        chat = Chat((*before, reply), "1+1=", True, ({"name": "c"},))
        answer, whole = learned(tokenizer, chat)
        assert answer == expected
        assert whole.startswith("c[user]1+1=")


def test_a_chat_that_is_cut_shares_what_its_turns_have_in_common():
    """A template that drops the reasoning of earlier turns, and the prompt twice."""
    template = (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% endfor %}"
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and "
        "loop.index0 > ns.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
        "<|eos|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = templated(template)
    turns = [
        {**turn, "reasoning_content": "7"} if turn["role"] == "assistant" else turn
        for turn in TWO_TURNS.messages
    ]
    chats = Chats([Chat(tuple(turns), "1+1=")], [])
    first, second = chats.encode(tokenizer, "train", 0)
    text = tokenizer.backend.decode(second.ids.tolist(), skip_special_tokens=False)
    assert text.startswith("[user]1+1=<|eos|>[assistant]2<|eos|>[user]+1=")
    assert [np.count_nonzero(each.loss_mask) for each in (first, second)] == [5, 5]
    context = len(first.tokens) - 5

    def count(trees):
        batch = packed(
            chats, tokenizer, "train", [0],
            microbatch_tokens=96, rows=1, trees=trees,
        )  # fmt: skip
        assert batch.loss_mask.sum() == 10
        return np.count_nonzero(batch.ends)

    whole = len(first.tokens) + len(second.tokens)
    assert count(trees=False) == whole
    assert count(trees=True) == whole - context
    kept = chats.fitting(tokenizer, len(second.tokens))
    assert kept.size("train") == 1
    with pytest.raises(ConfigError, match=r"--max-tokens"):
        chats.fitting(tokenizer, len(second.tokens) - 1)


def test_a_text_that_begins_and_ends_itself_does_so_once():
    assert learned(PLAIN, Text("1+2=3<|eos|>")) == learned(PLAIN, Text("1+2=3"))
    chat = Chat((user("1+2="), said("3<|eos|>")), "1+2=", only_last=True)
    assert learned(PLAIN, chat)[0] == "3<|eos|>"
    assert learned(PLAIN, replace(chat, only_last=False))[0] == "3<|eos|>"
