"""Writes what transformers makes of conversations: text, token ids, assistant masks.

Needs transformers and tokenizers, and nothing of this repository:

    python tests/parity/make_chat_fixtures.py DIRECTORY

writes DIRECTORY/chat.json. The templates are those in chat_templates/: each has what
the templates of a family have, in words of its own. A case that transformers cannot
render is part of the fixture too.
"""
# pyright: reportMissingImports=false
# ruff: noqa: RUF001

import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils, logging

TEMPLATES = Path(__file__).parent / "chat_templates"
NOW = datetime.datetime(2026, 3, 9, 14, 30)
BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
SPECIAL = [
    *(UNKNOWN, BOS, EOS),
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<start_of_turn>"),
    *("<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<|start|>", "<|message|>", "<|channel|>"),
    *("<|return|>", "<|call|>", "[gMASK]", "<sop>", "<|observation|>"),
]

Json = dict[str, Any]


def call(name: str, arguments: Any, identity: str = "abcde1234") -> Json:
    """Returns a tool call."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": identity, "function": function}


TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Weather of a <city> & its région",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": 'such as "Köln"'},
                    "unit": {"type": "string", "enum": ["°C", "°F"]},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            },
        },
    },
]

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is 2+2?"}
FOUR = {"role": "assistant", "content": "4"}
AGAIN = {"role": "user", "content": "And 3+3?"}
SIX = {"role": "assistant", "content": "6"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [call("wetter", {"city": "Köln", "days": [1, 2], "unit": "°C"})],
}
RESULT = {
    "role": "tool",
    "name": "wetter",
    "tool_call_id": "abcde1234",
    "content": '{"sky": "<grey> & \'dull\'"}',
}

CONVERSATIONS: dict[str, list[Json]] = {
    "question": [ASK],
    "answered": [SYSTEM, ASK, FOUR],
    "two turns": [ASK, FOUR, AGAIN, SIX],
    "three turns": [SYSTEM, ASK, FOUR, AGAIN, SIX, ASK],
    "odd characters": [
        {"role": "user", "content": "  <b>&amp;'\"{{ x }}\\n</b>\tü 数学 🙂🙂\n\n"},
        {"role": "assistant", "content": "\n  <i>naïve</i>\r\n 🙂 \n"},
    ],
    "reasoning": [
        ASK,
        {**FOUR, "reasoning_content": "\ntwo and\ntwo\n"},
        AGAIN,
        {**SIX, "reasoning_content": "three twice"},
    ],
    "reasoning by an old name": [ASK, {**FOUR, "thinking": "two and two"}],
    "reasoning in the text": [
        ASK,
        {"role": "assistant", "content": "<think>\n2, 2\n</think>\n\n4"},
        AGAIN,
    ],
    "tool": [ASK, CALL, RESULT, FOUR],
    "tool with text": [
        SYSTEM,
        AGAIN,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look?",
            "tool_calls": [call("add", '{"a": 3, "b": 3.0}')],
        },
        {**RESULT, "content": "6"},
    ],
    "two calls": [
        ASK,
        {
            "role": "assistant",
            "tool_calls": [call("add", {"b": None, "a": 1e-07}), call("wetter", {})],
        },
        {**RESULT, "content": "1"},
        {**RESULT, "content": "2"},
        {"role": "assistant", "content": "done"},
    ],
    "unwanted order": [FOUR, ASK, ASK],
    "result without a call": [ASK, RESULT],
    "stop": [SYSTEM, ASK, {"role": "assistant", "content": "STOP"}, AGAIN],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}, "!"]}],
    "null fields": [{**ASK, "tool_calls": None, "name": None}, FOUR],
}

# Conversations that come with tools.
WITH_TOOLS = ("question", "tool", "tool with text", "two calls", "three turns")
DOCUMENTS = [{"title": "Sums", "text": "2+2=4"}, {"title": "<Ü>", "text": "a\nb"}]

# Further inputs of a template: template -> options.
VARIATIONS: dict[str, list[Json]] = {
    "qwen3": [{"enable_thinking": False}],
    "glm": [{"enable_thinking": False}],
    "llama3_1": [{"tools_in_user_message": False}, {"date_string": "1 May 2020"}],
    "harmony": [{"reasoning_effort": "high"}],
}


def trained() -> tokenizers.Tokenizer:
    """Returns a byte-level BPE that has seen the conversations."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [json.dumps(list(CONVERSATIONS.values()), ensure_ascii=False)] * 2
    backend.train_from_iterator(texts, trainer)
    return backend


def expected(tokenizer: PreTrainedTokenizerFast, case: Json) -> Json:
    """Returns the case with what transformers makes of it."""
    arguments: Json = {"tools": TOOLS} if case.get("tools") else {}
    if case.get("documents"):
        arguments["documents"] = DOCUMENTS
    arguments |= case.get("variables", {})
    if "name" in case:
        arguments["chat_template"] = case["name"]
    for flag in ("add_generation_prompt", "continue_final_message"):
        if case.get(flag):
            arguments[flag] = True
    messages = CONVERSATIONS[case["conversation"]]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except TemplateError as error:
        return {**case, "error": str(error)}
    except (TypeError, ValueError, KeyError, AttributeError):
        return {**case, "error": ""}
    encoded = tokenizer.apply_chat_template(
        messages,
        return_dict=True,
        return_assistant_tokens_mask=bool(case.get("mask")),
        **arguments,
    )
    result = {**case, "text": text, "ids": encoded["input_ids"]}
    if case.get("mask"):
        result["mask"] = encoded["assistant_masks"]
    return result


def cases(template: str) -> list[Json]:
    """Returns what is asked about a template."""
    found: list[Json] = []
    for conversation in CONVERSATIONS:
        case: Json = {"template": template, "conversation": conversation}
        if conversation in WITH_TOOLS:
            found.append({**case, "tools": True, "add_generation_prompt": True})
        if conversation not in ("tool with text", "two calls"):
            found.append(case)
        if conversation in ("question", "three turns", "reasoning"):
            found.append({**case, "add_generation_prompt": True})
        if conversation in ("answered", "odd characters"):
            found.append({**case, "continue_final_message": True})
        if template.startswith("generation"):
            found.append({**case, "mask": True})
    for variables in VARIATIONS.get(template, []):
        for conversation in ("question", "tool"):
            found.append(
                {
                    "template": template,
                    "conversation": conversation,
                    "tools": True,
                    "add_generation_prompt": conversation == "question",
                    "variables": variables,
                }
            )
    return found


def named_cases() -> list[Json]:
    """Returns what is asked about a tokenizer with several templates."""
    return [
        {"template": "command", "conversation": conversation, **more}
        for conversation in ("three turns", "tool", "stop")
        for more in (
            {},
            {"tools": True},
            {"name": "rag", "documents": True},
            {"name": "default", "tools": True},
        )
    ]


def fast(backend: tokenizers.Tokenizer, template: Any) -> PreTrainedTokenizerFast:
    """Returns the tokenizer with a template, or with several by name."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=template,
    )


def directories(backend: tokenizers.Tokenizer) -> list[Json]:
    """Returns directories, and what transformers makes of a text in them."""
    adds_bos = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    rows: list[Json] = []
    for post_processor in (None, adds_bos, processors.ByteLevel(trim_offsets=True)):
        for flags in ({}, {"add_bos_token": True}, {"add_eos_token": True}):
            files: Json = {
                "tokenizer_config.json": {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "bos_token": BOS,
                    "eos_token": {"content": EOS, "__type": "AddedToken"},
                    **flags,
                }
            }
            rows.append({"post_processor": _state(post_processor), "files": files})
    settings = {"eos_token": EOS, "chat_template": "in the settings"}
    named = [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "b"},
    ]
    jinja = {"chat_template.jinja": "in a file"}
    rag = {"additional_chat_templates/rag.jinja": "for documents"}
    legacy = {"special_tokens_map.json": {"bos_token": {"content": UNKNOWN}}}
    own = {"image_token": "[gMASK]", "extra_special_tokens": {"boi": "<sop>"}}
    more = [
        {"tokenizer_config.json": settings},
        {"tokenizer_config.json": settings, **jinja},
        {"tokenizer_config.json": settings, **jinja, **rag},
        {"tokenizer_config.json": {**settings, "chat_template": named}},
        {"tokenizer_config.json": {**settings, "bos_token": BOS}, **legacy},
        {"tokenizer_config.json": {**settings, **own}},
    ]
    rows += [{"post_processor": None, "files": files} for files in more]
    return [_loaded(backend, row) for row in rows]


def _state(post_processor: Any) -> Json | None:
    return None if post_processor is None else json.loads(post_processor.__getstate__())


def _loaded(backend: tokenizers.Tokenizer, row: Json) -> Json:
    serialized = json.loads(backend.to_str()) | {
        "post_processor": row["post_processor"]
    }
    # Leftovers of a training run must not cut or fill a conversation.
    serialized["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        files = {"tokenizer.json": serialized, **row["files"]}
        for name, content in files.items():
            file = Path(folder, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(
                content if isinstance(content, str) else json.dumps(content),
                encoding="utf-8",
            )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "What is </s> 2+2, or 3+3?"
    return {
        **row,
        "text": text,
        "ids": tokenizer(text)["input_ids"],
        "bare": tokenizer(text, add_special_tokens=False)["input_ids"],
        "special_tokens": tokenizer.special_tokens_map,
        "templates": tokenizer.chat_template,
    }


class Clock(datetime.datetime):
    """Says what time it was when the fixtures were first made."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        """Returns the fixed time."""
        del tz
        return NOW


def main(directory: Path) -> None:
    """Writes chat.json."""
    logging.set_verbosity_error()
    chat_template_utils.datetime = Clock
    backend = trained()
    rows: list[Json] = []
    for file in sorted(TEMPLATES.glob("*.jinja")):
        if not file.stem.startswith("command"):
            tokenizer = fast(backend, file.read_text(encoding="utf-8"))
            rows += [expected(tokenizer, case) for case in cases(file.stem)]
    several = {
        name: (TEMPLATES / f"{file}.jinja").read_text(encoding="utf-8")
        for name, file in (
            ("default", "command"),
            ("rag", "command_rag"),
            ("tool_use", "command_tool_use"),
        )
    }
    tokenizer = fast(backend, several)
    rows += [expected(tokenizer, case) for case in named_cases()]
    content = {
        "now": NOW.isoformat(),
        "special_tokens": {"bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN},
        "tokenizer": json.loads(backend.to_str()),
        "tools": TOOLS,
        "documents": DOCUMENTS,
        "conversations": CONVERSATIONS,
        "cases": rows,
        "directories": directories(backend),
    }
    directory.mkdir(parents=True, exist_ok=True)
    lines = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (directory / "chat.json").write_text(lines + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
