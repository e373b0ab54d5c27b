"""Builds the tokenizer of a GGUF file from its metadata.

A file has the vocabulary, the merges and the kinds of the tokens of a byte-level BPE.
It only names the way in which a text is split into words (`tokenizer.ggml.pre`). The
expressions here come from the tokenizer.json of the models from which llama.cpp took
the names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.data.tokenizer_files import TokenizerError

__all__ = ["generation_settings", "gguf_tokenizer"]

type Metadata = Mapping[str, Any]

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
# Kinds of tokens in `tokenizer.ggml.token_type`.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

# Expressions that split texts into words, by the names in GGUF files. With `%s` for the
# digits that are one word; None for GPT-2's expression, which the library has.
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2, GPT2 = LLAMA % r"\p{N}{1,3}", LLAMA % r"\p{N}", None
WORDS = {
    "llama-bpe": LLAMA3,
    "llama-v3": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "gpt-2": GPT2,
    "smollm": GPT2,
    "starcoder": GPT2,
    "refact": GPT2,
}
# Names of GPT-2's kind that first make each digit a word.
SINGLE_DIGITS = ("smollm", "starcoder", "refact")

# Flags that must be false: they are of other kinds of tokenizers.
FLAGS = ("add_space_prefix", "add_sep_token", "remove_extra_whitespaces")
# Names of special tokens in Hugging Face files by those in GGUF files.
NAMED = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
# Settings of generation_config.json by their names in GGUF files.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def gguf_tokenizer(metadata: Metadata) -> Tokenizer:
    """Builds the tokenizer of a GGUF file.

    Args:
        metadata: the file's keys and values.

    Raises:
        TokenizerError: a key is missing or damaged, or the tokenizer is none that is
            supported: a byte-level BPE that splits texts in a known way. Names the key.
    """
    _check_kind(metadata)
    split = metadata[f"{PREFIX}pre"]
    tokens = _list(metadata, "tokens", str)
    backend = tokenizers.Tokenizer(_bpe(metadata, tokens, WORDS[split] == LLAMA3))
    steps: list[Any] = []
    if split in SINGLE_DIGITS:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if (words := WORDS[split]) is not None:
        steps.append(pre_tokenizers.Split(Regex(words), "isolated"))
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=words is None
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    backend.decoder = decoders.ByteLevel()
    if words == QWEN2:
        backend.normalizer = normalizers.NFC()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, each in zip(tokens, _kinds(metadata, tokens), strict=True)
            if each == kind
        ]
        backend.add_tokens(added)
    before = _around(metadata, tokens, "bos", default=words == LLAMA3)
    after = _around(metadata, tokens, "eos", default=False)
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=list((before | after).items()),
        )
    ends = [_id(metadata, tokens, name) for name in ("eos", "eot", "eom")]
    if ends[0] is None:
        raise TokenizerError(f"{PREFIX}eos_token_id is missing")
    return Tokenizer(
        backend,
        stop_ids=list(dict.fromkeys(end for end in ends if end is not None)),
        chat_template={
            key.removeprefix(TEMPLATE).removeprefix(".") or "default": template
            for key, template in metadata.items()
            if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
        },
        special_tokens={
            f"{ours}_token": tokens[number]
            for theirs, ours in NAMED.items()
            if (number := _id(metadata, tokens, theirs)) is not None
        },
    )


def generation_settings(metadata: Metadata) -> dict[str, Any]:
    """Converts a GGUF file's metadata to the content of generation_config.json.

    Args:
        metadata: the file's keys and values.

    >>> generation_settings({"tokenizer.ggml.eos_token_id": 2,
    ...                      "general.sampling.temp": 0.6})
    {'eos_token_id': 2, 'temperature': 0.6, 'do_sample': True}
    """
    found = {
        f"{ours}_token_id": metadata[f"{PREFIX}{theirs}_token_id"]
        for theirs, ours in NAMED.items()
        if f"{PREFIX}{theirs}_token_id" in metadata and ours != "unk"
    }
    sampling = {
        ours: metadata[f"general.sampling.{theirs}"]
        for theirs, ours in SAMPLING.items()
        if f"general.sampling.{theirs}" in metadata
    }
    if sampling:
        sampling["do_sample"] = sampling.get("temperature") != 0
    return found | sampling


def _check_kind(metadata: Metadata) -> None:
    for key, known in (("model", ("gpt2",)), ("pre", tuple(WORDS))):
        if metadata.get(PREFIX + key) not in known:
            raise TokenizerError(
                f"{PREFIX}{key} is {metadata.get(PREFIX + key)!r}, and only "
                f"{', '.join(known)} can be built; take the model's Hugging Face "
                "directory"
            )
    for flag in FLAGS:
        if metadata.get(PREFIX + flag, False) is not False:
            raise TokenizerError(f"{PREFIX}{flag} must be false; got true")


def _bpe(metadata: Metadata, tokens: Sequence[str], ignore_merges: bool) -> models.BPE:
    vocabulary = {
        token: number
        for number, (token, kind) in enumerate(
            zip(tokens, _kinds(metadata, tokens), strict=True)
        )
        if kind != UNUSED
    }
    unused = _kinds(metadata, tokens).count(UNUSED)
    if len(vocabulary) + unused != len(tokens):
        raise TokenizerError(f"{PREFIX}tokens has a token twice")
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, "merges", str)]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise TokenizerError(
                f"{PREFIX}merges: {' '.join(merge)!r} must be two tokens that make a "
                "third one"
            )
    return models.BPE(vocabulary, merges, ignore_merges=ignore_merges)


def _kinds(metadata: Metadata, tokens: Sequence[str]) -> list[int]:
    """The kind of every token; without the key all are normal."""
    if f"{PREFIX}token_type" not in metadata:
        return [NORMAL] * len(tokens)
    kinds = _list(metadata, "token_type", int)
    strange = {*kinds} - {NORMAL, CONTROL, USER_DEFINED, UNUSED}
    if len(kinds) != len(tokens) or strange:
        raise TokenizerError(
            f"{PREFIX}token_type must have one of {NORMAL}, {CONTROL}, {USER_DEFINED} "
            f"and {UNUSED} for each of {len(tokens)} tokens; got {len(kinds)} kinds"
            + "".join(f", among them {kind}" for kind in sorted(strange)[:3])
        )
    return kinds


def _list(metadata: Metadata, name: str, kind: type) -> list[Any]:
    found = metadata.get(PREFIX + name)
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise TokenizerError(
            f"{PREFIX}{name} must be a list of {kind.__name__}; got {found!r:.80}"
        )
    return found


def _id(metadata: Metadata, tokens: Sequence[str], name: str) -> int | None:
    key = f"{PREFIX}{name}_token_id"
    found = metadata.get(key)
    if found is not None and (type(found) is not int or not 0 <= found < len(tokens)):
        raise TokenizerError(
            f"{key} must be the number of one of {len(tokens)} tokens; got {found!r}"
        )
    return found


def _around(
    metadata: Metadata, tokens: Sequence[str], name: str, *, default: bool
) -> dict[str, int]:
    """The special token before or after a text, with its id, if there is one."""
    if not metadata.get(f"{PREFIX}add_{name}_token", default):
        return {}
    number = _id(metadata, tokens, name)
    if number is None:
        raise TokenizerError(f"{PREFIX}{name}_token_id is missing, and it is added")
    return {tokens[number]: number}
