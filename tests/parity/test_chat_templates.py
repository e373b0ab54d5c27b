"""Our rendering and token ids against transformers', template by template.

The fixture was written by make_chat_fixtures.py; `make parity` writes a fresh one.
"""

import datetime
import functools
import json
from pathlib import Path

import pytest
import tokenizers

from jaxrl_post.data.chat import Options, render, render_text
from jaxrl_post.data.learned import conversation
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError

HERE = Path(__file__).parent
SEVERAL = {"default": "command", "rag": "command_rag", "tool_use": "command_tool_use"}


@pytest.fixture(scope="module")
def chats(request):
    root = request.config.getoption("--parity-fixtures", default=None)
    file = (root or HERE / "fixtures") / "chat.json"
    return json.loads(file.read_text(encoding="utf-8"))


@functools.cache
def source(name):
    return (HERE / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


TEMPLATES = sorted(
    path.stem
    for path in (HERE / "chat_templates").glob("*.jinja")
    if path.stem not in ("command_rag", "command_tool_use")
)


def tokenizer_of(chats, template):
    backend = tokenizers.Tokenizer.from_str(json.dumps(chats["tokenizer"]))
    stops = ("</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
    named = {name: source(file) for name, file in SEVERAL.items()}
    return Tokenizer(
        backend,
        stop_ids=[backend.token_to_id(stop) for stop in stops],
        chat_template=named if template == "command" else source(template),
        special_tokens=chats["special_tokens"],
    )


def options_of(chats, case):
    return Options(
        tools=chats["tools"] if case.get("tools") else None,
        documents=chats["documents"] if case.get("documents") else None,
        variables=case.get("variables", {}),
        template=case.get("name"),
        now=datetime.datetime.fromisoformat(chats["now"]),
    )


def rendered(chats, tokenizer, case):
    messages = chats["conversations"][case["conversation"]]
    return render_text(
        tokenizer,
        messages,
        options_of(chats, case),
        prompt=case.get("add_generation_prompt", False),
        continue_final=case.get("continue_final_message", False),
    )


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_and_ids_are_those_of_transformers(chats, template):
    tokenizer = tokenizer_of(chats, template)
    cases = [case for case in chats["cases"] if case["template"] == template]
    accepted = [case for case in cases if "text" in case]
    assert len(accepted) >= 10
    for case in accepted:
        assert rendered(chats, tokenizer, case) == case["text"], case
        assert list(tokenizer.encode(case["text"])) == case["ids"], case
        if case.get("add_generation_prompt"):
            messages = chats["conversations"][case["conversation"]]
            ids = render(tokenizer, messages, options_of(chats, case))
            assert list(ids) == case["ids"], case


def test_what_transformers_refuses_is_refused(chats):
    refused = [case for case in chats["cases"] if "error" in case]
    assert len(refused) >= 20
    for case in refused:
        tokenizer = tokenizer_of(chats, case["template"])
        with pytest.raises(TokenizerError, match=r"^chat: ") as caught:
            rendered(chats, tokenizer, case)
        assert case["error"] in str(caught.value)


def test_what_the_assistant_produced_is_what_transformers_masks(chats):
    masked = [case for case in chats["cases"] if "mask" in case and "ids" in case]
    assert len(masked) >= 20
    produced = 0
    for case in masked:
        messages = chats["conversations"][case["conversation"]]
        if not any(message["role"] == "assistant" for message in messages):
            assert not any(case["mask"])
            continue
        tokenizer = tokenizer_of(chats, case["template"])
        found = conversation(tokenizer, messages, options_of(chats, case))
        if [tokens.tolist() for tokens, _ in found] != [case["ids"]]:
            # Turns that later messages rewrite are trained on as they are sampled,
            # before them.
            assert case["template"] == "generation_recap"
            continue
        [(_, mask)] = found
        assert mask.astype(int).tolist() == case["mask"], case
        produced += mask.sum()
    assert produced > 100


def test_directories_are_read_as_transformers_reads_them(chats, tmp_path):
    assert len(chats["directories"]) >= 12
    for number, row in enumerate(chats["directories"]):
        folder = tmp_path / str(number)
        content = chats["tokenizer"] | {
            "post_processor": row["post_processor"],
            # Leftovers of a training run must not cut a conversation.
            "truncation": {
                "direction": "Right",
                "max_length": 4,
                "strategy": "LongestFirst",
                "stride": 0,
            },
        }
        for name, written in {"tokenizer.json": content, **row["files"]}.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            text = written if isinstance(written, str) else json.dumps(written)
            file.write_text(text, encoding="utf-8")
        read = Tokenizer.from_directory(folder)
        assert list(read.encode(row["text"], special=True)) == row["ids"], row["files"]
        assert list(read.encode(row["text"])) == row["bare"], row["files"]
        assert read.special_tokens == row["special_tokens"], row["files"]
        templates = row["templates"] or {}
        if isinstance(templates, str):
            templates = {"default": templates}
        assert read.chat_templates == templates, row["files"]
