"""Tokenizers: text round trips, stop ids from every file, refusals."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError

TOKENIZER = Tokenizer.train(["12+30=42, the quick brown fox"] * 3, vocab_size=300)
LAWS = settings(max_examples=50, deadline=None, derandomize=True)


@LAWS
@given(st.text())
def test_any_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_every_digit_is_a_token_of_its_own():
    pieces = [TOKENIZER.decode([index]) for index in TOKENIZER.encode("2024=12")]
    assert pieces == ["2", "0", "2", "4", "=", "1", "2"]


def test_the_trained_vocabulary():
    # 256 bytes, two special tokens, and merges of what was seen.
    assert 258 < TOKENIZER.vocab_size <= 300
    assert len(TOKENIZER.encode("the quick")) < len("the quick")
    assert Tokenizer.train(["a"], vocab_size=258).vocab_size == 258


def test_special_tokens_end_a_completion_and_are_not_text():
    assert TOKENIZER.stop_ids == (TOKENIZER.eos_id,)
    assert TOKENIZER.encode("<|eos|>") == (TOKENIZER.eos_id,)
    ids = (*TOKENIZER.encode("42"), TOKENIZER.eos_id)
    assert TOKENIZER.decode(ids) == "42"


def test_training_is_deterministic():
    again = Tokenizer.train(["12+30=42, the quick brown fox"] * 3, vocab_size=300)
    assert again.backend.to_str() == TOKENIZER.backend.to_str()


# Directories.


@pytest.fixture
def directory(tmp_path):
    """tokenizer.json alone, with a BOS that the post-processor adds."""
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.backend.to_str())
    backend.add_special_tokens(["<bos>", "<eot>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory, name, content):
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / name).write_text(text, encoding="utf-8")


def test_what_is_saved_is_read_back(tmp_path):
    source = Tokenizer(
        TOKENIZER.backend,
        stop_ids=(1, 7, 9),
        chat_template="{{ messages[0].content }} ü",
        special_tokens={"eos_token": "<|eos|>", "pad_token": "<|pad|>"},
    )
    source.save(tmp_path)
    read = Tokenizer.from_directory(tmp_path)
    assert read.stop_ids == source.stop_ids
    assert read.chat_template == source.chat_template
    assert read.special_tokens == source.special_tokens
    assert read.vocab_size == source.vocab_size
    assert read.encode("12+30") == source.encode("12+30")


def test_special_adds_what_the_tokenizer_puts_around_a_text(directory):
    write(directory, "generation_config.json", {"eos_token_id": 1})
    read = Tokenizer.from_directory(directory)
    plain = read.encode("12")
    assert read.encode("12", special=True) == (read.vocab_size - 2, *plain)
    assert read.decode(read.encode("12", special=True)) == "12"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|eos|>"}}, (1,)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|eos|>"}}}, (1,)),
        ({"generation_config.json": {"eos_token_id": 4}}, (4,)),
        ({"generation_config.json": {"eos_token_id": [4, 5]}}, (4, 5)),
        ({"config.json": {"eos_token_id": 6}}, (6,)),
        (
            {
                "tokenizer_config.json": {"eos_token": "<|eos|>", "bos_token": None},
                "generation_config.json": {"eos_token_id": [5, 1]},
                "config.json": {"eos_token_id": 6},
            },
            (1, 5, 6),
        ),
    ],
    ids=["name", "added token", "generation", "generation list", "config", "together"],
)
def test_stop_ids_come_from_each_file(directory, files, expected):
    for name, content in files.items():
        write(directory, name, content)
    assert Tokenizer.from_directory(directory).stop_ids == expected


@pytest.mark.parametrize(
    ("setting", "file", "expected"),
    [
        ("inline", None, "inline"),
        ("inline", "from the file", "from the file"),
        (None, "from the file", "from the file"),
        (None, None, None),
        (
            [
                {"name": "tool_use", "template": "tools"},
                {"name": "default", "template": "plain"},
            ],
            None,
            "plain",
        ),
    ],
    ids=["inline", "both", "file", "none", "named"],
)
def test_where_the_chat_template_is(directory, setting, file, expected):
    settings = {"eos_token": "<|eos|>"}
    if setting is not None:
        settings["chat_template"] = setting
    write(directory, "tokenizer_config.json", settings)
    if file is not None:
        write(directory, "chat_template.jinja", file)
    assert Tokenizer.from_directory(directory).chat_template == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"cannot read .*tokenizer\.json"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is not JSON"),
        ("generation_config.json", "[1]", r"generation_config\.json must hold an obj"),
        ("config.json", {}, r"no end-of-sequence token is known; name eos_token in"),
        ("tokenizer_config.json", {"eos_token": "<none>"}, r"no end-of-sequence token"),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "rag", "template": ""}]},
            r"must name one of its chat templates 'default'; got rag",
        ),
    ],
)
def test_directories_that_cannot_be_used(directory, name, content, message):
    write(directory, name, content)
    with pytest.raises(
        TokenizerError, match=f"^tokenizer: .*{message}|^tokenizer: {message}"
    ):
        Tokenizer.from_directory(directory)


def test_a_directory_without_a_fast_tokenizer(tmp_path):
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json does not exist; a Huggi"
    ):
        Tokenizer.from_directory(tmp_path)
