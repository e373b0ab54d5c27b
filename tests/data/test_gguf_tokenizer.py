"""Tokenizers of GGUF files, compared id by id with those that the files are of."""

import pytest

from jaxrl_post.data.gguf_tokenizer import generation_settings, gguf_tokenizer
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from tests import gguf_model as files


@pytest.mark.parametrize("split", files.SPLITS)
def test_texts_become_the_ids_of_the_original(split):
    original = files.trained(split)
    tokenizer = gguf_tokenizer(files.tokenizer_keys(split))
    for text in files.TEXTS:
        # Qwen's tokenizer composes characters first, which llama.cpp leaves out.
        text = text.replace("e\u0301", "é") if split == "qwen2" else text
        ids = tuple(original.encode(text).ids)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


def test_the_ways_to_split_differ():
    texts = "".join(files.TEXTS)
    made = {gguf_tokenizer(files.tokenizer_keys(s)).encode(texts) for s in files.SPLITS}
    assert len(made) == len(files.SPLITS)


def test_qwen_composes_characters():
    tokenizer = gguf_tokenizer(files.tokenizer_keys("qwen2"))
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("café")


def test_it_is_saved_and_read_again(tmp_path):
    tokenizer = gguf_tokenizer(files.tokenizer_keys())
    tokenizer.save(tmp_path)
    read = Tokenizer.from_directory(tmp_path)
    for text in (*files.TEXTS, "<|start|>user hi<|end|>"):
        assert read.encode(text, special=True) == tokenizer.encode(text, special=True)
    assert read.stop_ids == tokenizer.stop_ids == (0,)
    assert read.chat_template == files.tokenizer_keys()["tokenizer.chat_template"]
    assert read.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert read.special_ids == {"<|end|>": 0, "<|start|>": 1}


def keys_with(kind, *texts):
    """Metadata with more tokens, of a kind."""
    keys = files.tokenizer_keys()
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], *texts]
    more = [kind] * len(texts)
    keys["tokenizer.ggml.token_type"] = [*keys["tokenizer.ggml.token_type"], *more]
    return keys, range(len(keys["tokenizer.ggml.tokens"]) - len(texts), 1_000_000)


def test_kinds_of_tokens():
    keys, ids = keys_with(4, "<tool>", "<x y>")
    tokenizer = gguf_tokenizer(keys)
    assert tokenizer.encode("a<x y>")[1:] == (ids[1],)
    assert tokenizer.decode([ids[0], ids[1]]) == "<tool><x y>"
    assert "<tool>" not in tokenizer.special_ids

    keys, ids = keys_with(5, "[PAD0]", "[PAD1]")
    tokenizer = gguf_tokenizer(keys)
    assert ids[0] not in tokenizer.encode("[PAD0]")
    assert tokenizer.vocab_size == ids[0]


def test_a_word_of_llama_3_needs_no_merges():
    """`ignore_merges` of its tokenizer.json: a whole word that is a token is taken."""
    keys, ids = keys_with(1, "Ġzzyzx")
    keys["tokenizer.ggml.pre"] = "llama-bpe"
    keys["tokenizer.ggml.add_bos_token"] = False
    assert gguf_tokenizer(keys).encode("a zzyzx")[1:] == (ids[0],)
    keys["tokenizer.ggml.pre"] = "gpt-2"
    assert ids[0] not in gguf_tokenizer(keys).encode("a zzyzx")


@pytest.mark.parametrize(
    ("split", "flags", "around"),
    [
        ("smollm", {}, ((), ())),
        ("smollm", {"bos": True}, ((1,), ())),
        ("smollm", {"eos": True, "bos": True}, ((1,), (0,))),
        ("llama-bpe", {}, ((1,), ())),
        ("llama-bpe", {"bos": False}, ((), ())),
    ],
)
def test_tokens_around_a_text(split, flags, around):
    keys = files.tokenizer_keys(split)
    del keys["tokenizer.ggml.add_bos_token"]
    keys |= {f"tokenizer.ggml.add_{n}_token": value for n, value in flags.items()}
    tokenizer = gguf_tokenizer(keys)
    before, after = around
    plain = tokenizer.encode("a b")
    assert tokenizer.encode("a b", special=True) == (*before, *plain, *after)


def test_several_templates_and_ends():
    keys, ids = keys_with(3, "<|turn|>")
    keys["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    keys["tokenizer.chat_templates"] = ["tool_use"]
    keys["tokenizer.ggml.eot_token_id"] = ids[0]
    keys["tokenizer.ggml.eom_token_id"] = 0
    tokenizer = gguf_tokenizer(keys)
    assert {*tokenizer.chat_templates} == {"default", "tool_use"}
    assert tokenizer.stop_ids == (0, ids[0])


P = "tokenizer.ggml."
COUNT = len(files.tokenizer_keys()[f"{P}tokens"])
REFUSED = {
    "sentencepiece": ({"model": "llama"}, "model is 'llama', and only gpt2"),
    "none": ({"model": None}, "model is None"),
    "default": ({"pre": "default"}, "pre is 'default'.*llama-bpe"),
    "unknown": ({"pre": "tekken"}, "pre is 'tekken'"),
    "no tokens": ({"tokens": None}, "tokens must be a list"),
    "twice": ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, "twice"),
    "kinds": ({"token_type": [1, 1]}, "got 2 kinds"),
    "bytes": ({"token_type": [6] * COUNT}, "among them 6"),
    "merges": ({"merges": ["a b c"]}, "'a b c' must be two tokens"),
    "no merge": ({"merges": ["a zz"]}, "'a zz' must be two tokens"),
    "end": ({"eos_token_id": None}, "eos_token_id is missing"),
    "far": (
        {"eos_token_id": 4000},
        f"eos_token_id must be .* {COUNT} tokens; got 4000",
    ),
    "begin": ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
    "space": ({"add_space_prefix": True}, "add_space_prefix must be false"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case):
    changes, message = REFUSED[case]
    keys = files.tokenizer_keys()
    keys |= {P + name: value for name, value in changes.items()}
    keys = {name: value for name, value in keys.items() if value is not None}
    with pytest.raises(TokenizerError, match=message):
        gguf_tokenizer(keys)


def test_settings_of_sampling():
    metadata = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.05,
    }
    assert generation_settings(metadata) == {
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 2,
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "do_sample": True,
    }
    assert generation_settings({"general.sampling.temp": 0.0})["do_sample"] is False
    assert generation_settings({}) == {}
