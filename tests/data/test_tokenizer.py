"""Tokenizers: text round trips, stop ids from every file, refusals."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError

TOKENIZER = Tokenizer.train(["12+30=42, the quick brown fox"] * 3, vocab_size=300)
LAWS = settings(max_examples=50, deadline=None, derandomize=True)


@LAWS
@given(st.text())
def test_any_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("encode", ["encode", "encode_with_begins"])
def test_a_text_that_is_no_unicode_is_named(encode):
    tokenizer = Tokenizer.train(["1"])
    with pytest.raises(TokenizerError, match=r"character 3 of the text is '\\ud83d'"):
        getattr(tokenizer, encode)("caf\ud83d")


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
def test_where_the_default_chat_template_is(directory, setting, file, expected):
    settings = {"eos_token": "<|eos|>"}
    if setting is not None:
        settings["chat_template"] = setting
    write(directory, "tokenizer_config.json", settings)
    if file is not None:
        write(directory, "chat_template.jinja", file)
    assert Tokenizer.from_directory(directory).chat_template == expected


def test_several_chat_templates(directory, tmp_path_factory):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    write(
        directory,
        "tokenizer_config.json",
        {"eos_token": "<|eos|>", "chat_template": named},
    )
    read = Tokenizer.from_directory(directory)
    assert read.chat_templates == {"default": "plain", "tool_use": "tools"}
    copy = tmp_path_factory.mktemp("copy")
    read.save(copy)
    assert Tokenizer.from_directory(copy).chat_templates == read.chat_templates
    # Files of their own hide all that the settings name.
    (directory / "additional_chat_templates").mkdir()
    write(directory / "additional_chat_templates", "rag.jinja", "documents")
    read = Tokenizer.from_directory(directory)
    assert read.chat_templates == {"rag": "documents"}
    assert read.chat_template is None


def test_the_template_of_a_processor_serves_last(directory):
    write(directory, "chat_template.json", {"chat_template": "of a processor"})
    write(directory, "tokenizer_config.json", {"eos_token": "<|eos|>"})
    assert Tokenizer.from_directory(directory).chat_template == "of a processor"
    settings = {"eos_token": "<|eos|>", "chat_template": "inline"}
    write(directory, "tokenizer_config.json", settings)
    assert Tokenizer.from_directory(directory).chat_template == "inline"


def test_named_special_tokens_are_matched_whole(directory):
    """Also those that tokenizer.json has in its vocabulary alone."""
    content = json.loads(TOKENIZER.backend.to_str())
    content["model"]["vocab"]["<turn>"] = len(TOKENIZER.backend.get_vocab())
    write(directory, "tokenizer.json", content)
    settings = {"eos_token": "<|eos|>"}
    write(directory, "tokenizer_config.json", settings)
    assert len(Tokenizer.from_directory(directory).encode("<turn>")) > 1
    turn = content["model"]["vocab"]["<turn>"]
    for more in (
        {"turn_token": "<turn>"},
        {"turn_token": {"content": "<turn>", "lstrip": False}},
        {"additional_special_tokens": ["<turn>", "<unknown>"]},
        {"extra_special_tokens": {"turn": "<turn>"}},
        {"extra_special_tokens": {}, "additional_special_tokens": ["<turn>"]},
    ):
        write(directory, "tokenizer_config.json", settings | more)
        read = Tokenizer.from_directory(directory)
        assert read.encode("<turn>") == (turn,)
        assert read.decode((turn,)) == ""
        assert "<unknown>" not in read.backend.get_vocab()
        assert read.vocab_size == turn + 1


@pytest.mark.parametrize(
    "more",
    [
        {"turn_token": {"content": 7}},
        {"turn_token": {"content": None}},
        {"turn_token": {"content": "<turn>", "lstrip": "yes"}},
        {"extra_special_tokens": {"turn_token": 7}},
    ],
)
def test_a_token_that_is_no_text_is_named(directory, more):
    settings = {"eos_token": "<|eos|>"}
    write(directory, "tokenizer_config.json", settings | more)
    with pytest.raises(
        TokenizerError, match=r"turn_token in tokenizer_config\.json must"
    ):
        Tokenizer.from_directory(directory)


def test_a_file_that_nests_too_deeply_is_named(directory):
    (directory / "tokenizer_config.json").write_text("[" * 200_000)
    with pytest.raises(
        TokenizerError, match=r"tokenizer_config\.json: not JSON .* nested"
    ):
        Tokenizer.from_directory(directory)


def test_named_special_tokens_are_saved(directory, tmp_path_factory):
    settings = {
        "eos_token": "<|eos|>",
        "image_token": "<bos>",
        "extra_special_tokens": {"turn": "<eot>"},
        "add_bos_token": True,
    }
    write(directory, "tokenizer_config.json", settings)
    read = Tokenizer.from_directory(directory)
    expected = {"eos_token": "<|eos|>", "image_token": "<bos>", "turn": "<eot>"}
    assert read.special_tokens == expected
    copy = tmp_path_factory.mktemp("copy")
    read.save(copy)
    assert Tokenizer.from_directory(copy).special_tokens == expected


def test_truncation_and_padding_of_the_file_are_not_used(directory):
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(directory / "tokenizer.json"))
    write(directory, "tokenizer_config.json", {"eos_token": "<|eos|>"})
    assert len(Tokenizer.from_directory(directory).encode("12345")) == 5


# Next to a model.


def test_a_vocabulary_that_exceeds_the_embedding_is_refused():
    last = max(TOKENIZER.backend.get_vocab().values())
    assert TOKENIZER.for_model(last + 1).num_embeddings == last + 1
    message = rf"its ids reach to {last} \('.*'\), the model has only {last} embeddings"
    with pytest.raises(TokenizerError, match=f"^tokenizer: {message}"):
        TOKENIZER.for_model(last)
    stops = Tokenizer(TOKENIZER.backend, stop_ids=(1, last + 9))
    with pytest.raises(TokenizerError, match=rf"ids reach to {last + 9} \(None\)"):
        stops.for_model(last + 9)


def test_added_tokens_beyond_the_embedding_must_not_be_used():
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.backend.to_str())
    size = backend.get_vocab_size()
    backend.add_special_tokens(["<image>"])
    tokenizer = Tokenizer(backend, stop_ids=(1,), chat_template="x").for_model(size)
    assert tokenizer.chat_template == "x"
    assert tokenizer.encode("12") == TOKENIZER.encode("12")
    message = rf"the text has the token {size} \('<image>'\), the model only {size} emb"
    for encode in (tokenizer.encode, tokenizer.encode_with_begins):
        with pytest.raises(TokenizerError, match=f"^tokenizer: {message}"):
            encode("12<image>")
    assert size in tokenizer.for_model(size + 1).encode("12<image>")


def test_an_end_of_sequence_id_without_a_token():
    with pytest.raises(
        TokenizerError, match=r"id 999 is not in the vocabulary; correct"
    ):
        _ = Tokenizer(TOKENIZER.backend, stop_ids=(999,)).eos_token


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"cannot read .*tokenizer\.json"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not JSON"),
        ("generation_config.json", "[1]", r"generation_config\.json must hold an obj"),
        ("config.json", {}, r"no end-of-sequence token is known; name eos_token in"),
        ("tokenizer_config.json", {"eos_token": "<none>"}, r"no end-of-sequence token"),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "rag"}]},
            r"chat_template of .*tokenizer_config.json must be Jinja.*got \[{'name'",
        ),
        ("tokenizer_config.json", {"chat_template": 1}, r"must be Jinja, .*; got 1$"),
        (
            "chat_template.json",
            {"chat_template": ["x"]},
            r"of .*chat_template.json must",
        ),
        ("config.json", {"eos_token_id": False}, r"an id or a list .*; got \[False\]"),
        (
            "config.json",
            {"eos_token_id": "2"},
            r"must be an id or a list .*; got \['2'",
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


def test_a_document_has_one_beginning_and_one_end(directory):
    write(directory, "tokenizer_config.json", {"eos_token": "<|eos|>"})
    tokenizer = Tokenizer.from_directory(directory)
    expected = tokenizer.backend.encode("<bos>12<|eos|>", add_special_tokens=False).ids
    for text in ("12", "<bos>12", "12<|eos|>", "<bos>12<|eos|>"):
        assert list(tokenizer.encode_document(text)) == expected
    assert TOKENIZER.encode_document("12") == (*TOKENIZER.encode("12"), 1)


def test_a_tokenizer_that_puts_an_end_behind_a_text_puts_one(directory):
    content = json.loads((directory / "tokenizer.json").read_text())
    content["post_processor"] = json.loads(
        processors.TemplateProcessing(
            single="<bos> $A <|eos|>", special_tokens=[("<bos>", 300), ("<|eos|>", 1)]
        ).__getstate__()
    )
    write(directory, "tokenizer.json", content)
    write(directory, "tokenizer_config.json", {"eos_token": "<|eos|>"})
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode_document("12<|eos|>")
    assert ids == tokenizer.encode_document("12") == (300, *tokenizer.encode("12"), 1)
    # As templates of chats end, and so their texts in files.
    assert tokenizer.encode_document("12<|eos|>\n") == ids
    assert TOKENIZER.encode_document("12<|eos|>\n") == (*TOKENIZER.encode("12"), 1)
    assert TOKENIZER.encode_document("12\n") == (*TOKENIZER.encode("12\n"), 1)


def test_tokens_that_the_settings_alone_list_are_special(directory):
    content = json.loads(TOKENIZER.backend.to_str())
    size = len(content["model"]["vocab"])
    content["model"]["vocab"]["<turn>"] = size
    write(directory, "tokenizer.json", content)
    listed = {
        str(size): {"content": "<turn>", "special": True},
        # The next id, which the vocabulary does not have.
        str(size + 1): {"content": "<think>", "special": False},
        # Not the next one: tokenizer.json knows better.
        str(size + 9): {"content": "<far>", "special": True},
        "word": {"content": "<word>"},
    }
    settings = {"eos_token": "<|eos|>", "added_tokens_decoder": listed}
    write(directory, "tokenizer_config.json", settings)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.encode("1<turn>2") == (
        *tokenizer.encode("1"), size, *tokenizer.encode("2")
    )  # fmt: skip
    assert tokenizer.encode("<think>") == (size + 1,)
    assert tokenizer.decode(tokenizer.encode("1<turn><think>")) == "1<think>"
    assert len(tokenizer.encode("<far>")) > 1


def test_the_settings_of_the_base_are_kept(directory, tmp_path_factory):
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 32768,
        "padding_side": "left",
        "eos_token": {"content": "<|eos|>", "lstrip": False, "special": True},
        "bos_token": None,
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<eot>"],
        "clean_up_tokenization_spaces": False,
        "something": {"of": ["their", "own"]},
    }
    write(directory, "tokenizer_config.json", settings)
    (directory / "chat_template.jinja").write_text("{{ messages }}<eot>")
    (directory / "additional_chat_templates").mkdir()
    more = directory / "additional_chat_templates" / "rag.jinja"
    more.write_text("{{ documents }}")
    saved = tmp_path_factory.mktemp("saved")
    tokenizer = Tokenizer.from_directory(directory).for_model(400)
    tokenizer.save(saved)
    assert json.loads((saved / "tokenizer_config.json").read_text()) == settings
    read = Tokenizer.from_directory(saved)
    assert read.chat_templates == tokenizer.chat_templates
    assert (saved / "chat_template.jinja").is_file()
    assert (read.stop_ids, read.special_ids) == (
        tokenizer.stop_ids,
        tokenizer.special_ids,
    )


def test_code_of_the_base_is_not_named_where_it_is_not_saved(directory, tmp_path):
    settings = {
        "eos_token": "<|eos|>",
        "tokenizer_class": "TheirTokenizer",
        "auto_map": {"AutoTokenizer": ["theirs.TheirTokenizer", None]},
        "chat_template": "{{ messages }}<eot>",
    }
    write(directory, "tokenizer_config.json", settings)
    (tmp_path / "saved").mkdir()
    Tokenizer.from_directory(directory).save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert saved == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|eos|>",
        "chat_template": "{{ messages }}<eot>",
    }
