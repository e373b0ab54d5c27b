"""Reads the tokenizer files of a model directory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from jaxrl_post.jsonl import json_file

__all__ = [
    "TextError",
    "TokenizerError",
    "TokenizerFiles",
    "read_files",
    "read_settings",
    "write_settings",
    "write_stop_ids",
]


class TokenizerError(ValueError):
    """A tokenizer, its files or its chat template cannot be used."""


class TextError(TokenizerError):
    """A text cannot be tokenised for this model, while others can."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of the tokenizer files, from which a `Tokenizer` is made.

    Attributes:
        backend: a tokenizer of the tokenizers library.
        stop_ids: ids that end a completion; empty if no file names one.
        chat_templates: Jinja sources by name.
        special_tokens: special tokens by name.
        settings: all of tokenizer_config.json.
    """

    backend: tokenizers.Tokenizer
    stop_ids: tuple[int, ...]
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    settings: Mapping[str, Any]


def read_files(path: Path) -> TokenizerFiles:
    """Reads tokenizer.json and, if present, the other files of the tokenizer.

    Args:
        path: the directory.

    Raises:
        TokenizerError: a missing or unreadable file.
    """
    backend = _read_backend(path / "tokenizer.json")
    settings = read_settings(path / "tokenizer_config.json")
    _add_listed(backend, settings)
    named, unnamed = _special_tokens(path, settings)
    # Tokens outside the vocabulary are not added: the model has no embedding for them.
    known = [
        token
        for token in (*named.values(), *unnamed)
        if backend.token_to_id(token.content) is not None
    ]
    backend.add_special_tokens(known)
    special = {name: token.content for name, token in named.items()}
    return TokenizerFiles(
        backend,
        _stop_ids(path, backend, special.get("eos_token")),
        _chat_templates(path, settings),
        special,
        settings,
    )


def read_settings(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file does not exist.

    Args:
        file: a JSON file, such as generation_config.json.

    Raises:
        TokenizerError: the file does not hold a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        content = json_file(file)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"tokenizer: cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"tokenizer: {file} must hold an object")
    return content


def write_settings(
    directory: Path,
    base: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    chat_templates: Mapping[str, str],
) -> None:
    """Writes tokenizer_config.json and the chat templates.

    Args:
        directory: of the model.
        base: the settings of the tokenizer's model, which are kept; {} without any.
        special_tokens: special tokens by name.
        chat_templates: Jinja sources by name; written into the file in which the base
            has its own.
    """
    # Code of the base is not saved with the model.
    code = {"chat_template"}
    if "auto_map" in base:
        code |= {"auto_map", "tokenizer_class"}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: value for name, value in base.items() if name not in code},
    }
    extra: dict[str, Any] = {}
    for name, token in special_tokens.items():
        into = settings if name.endswith("_token") else extra
        if into.get(name) is None:
            into[name] = token
    if extra and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = extra
    if chat_templates and base and "chat_template" not in base:
        _write_templates(directory, chat_templates)
    elif list(chat_templates) == ["default"]:
        settings["chat_template"] = chat_templates["default"]
    elif chat_templates:
        settings["chat_template"] = [
            {"name": name, "template": template}
            for name, template in chat_templates.items()
        ]
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _write_templates(directory: Path, chat_templates: Mapping[str, str]) -> None:
    for name, template in chat_templates.items():
        file = directory / "additional_chat_templates" / f"{name}.jinja"
        if name == "default":
            file = directory / "chat_template.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(template, encoding="utf-8")


def write_stop_ids(directory: Path, stop_ids: Sequence[int]) -> None:
    """Writes the tokens that end an answer to generation_config.json.

    Args:
        directory: of the model; other entries of the file are kept.
        stop_ids: ids, the end of text first.
    """
    file = directory / "generation_config.json"
    generation = read_settings(file) | {"eos_token_id": list(stop_ids)}
    file.write_text(json.dumps(generation, indent=2), encoding="utf-8")


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise TokenizerError(
            f"tokenizer: {file} does not exist; a Hugging Face model directory "
            "with a fast tokenizer has one (save_pretrained of a fast tokenizer "
            "makes it)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"tokenizer: cannot read {file}: {error}") from error
    # Some files still have the truncation and padding of the run that wrote them.
    backend.no_truncation()
    backend.no_padding()
    return backend


type Token = tokenizers.AddedToken


def _special_tokens(
    path: Path, settings: dict[str, Any]
) -> tuple[dict[str, Token], list[Token]]:
    """Special tokens by name, and special tokens without a name."""
    if "added_tokens_decoder" not in settings:
        # Older versions of transformers wrote this file; newer ones still read it.
        settings = settings | read_settings(path / "special_tokens_map.json")
    named = {
        name: _token(name, value)
        for name, value in settings.items()
        if name.endswith("_token") and _is_token(value)
    }
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= {name: _token(name, value) for name, value in extra.items()}
        extra = None
    # transformers 4 calls the list so, and may write both.
    extra = extra or settings.get("additional_special_tokens")
    unnamed = (
        [_token("extra_special_tokens", value) for value in extra]
        if isinstance(extra, list)
        else []
    )
    return named, unnamed


def _add_listed(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Adds the tokens of added_tokens_decoder that tokenizer.json does not add.

    A token that is missing in the vocabulary is added if it gets the id that is listed.
    """
    listed = settings.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    ids = sorted(int(number) for number in listed if number.isdecimal())
    for number in ids:
        value = listed[str(number)]
        token = _token("added_tokens_decoder", value)
        there = backend.token_to_id(token.content)
        if there is None:
            there = backend.get_vocab_size(with_added_tokens=True)
        if token.content in known or there != number:
            continue
        if isinstance(value, dict) and value.get("special") is False:
            token.special = False
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _token(name: str, value: Any) -> Token:
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True, normalized=False)
    content = value.get("content") if isinstance(value, dict) else None
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    if not isinstance(content, str) or not all(
        isinstance(value.get(flag, False), bool) for flag in flags
    ):
        raise TokenizerError(
            f"tokenizer: {name} in tokenizer_config.json must be a text, or an object "
            f"of a text (content) and of true or false ({', '.join(flags)}); got "
            f"{value!r:.80}"
        )
    chosen = {flag: value.get(flag, False) for flag in flags}
    return tokenizers.AddedToken(content, special=True, **chosen)


def _chat_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, from the first place that has any.

    The places: files *.jinja, tokenizer_config.json, a processor's chat_template.json.
    """
    found = {}
    default = path / "chat_template.jinja"
    if default.is_file():
        found["default"] = default.read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found
    setting, file = settings.get("chat_template"), path / "tokenizer_config.json"
    if setting is None:
        file = path / "chat_template.json"
        setting = read_settings(file).get("chat_template")
    if setting is None:
        return {}
    if isinstance(setting, list):  # several by name, as for tool use
        entries = [entry if isinstance(entry, dict) else {} for entry in setting]
        pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    else:
        pairs = [("default", setting)]
    templates = {}
    for name, template in pairs:
        if not isinstance(name, str) or not isinstance(template, str):
            raise TokenizerError(
                f"tokenizer: chat_template of {file} must be Jinja, or a list of "
                f"objects with name and template; got {setting!r:.80}"
            )
        templates[name] = template
    return templates


def _stop_ids(
    path: Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    found: list[int] = []
    eos_id = None if eos_token is None else backend.token_to_id(eos_token)
    if eos_id is not None:
        found.append(eos_id)
    for name in ("generation_config.json", "config.json"):
        ids = read_settings(path / name).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        if any(isinstance(i, bool) or not isinstance(i, int | None) for i in ids):
            raise TokenizerError(
                f"tokenizer: eos_token_id of {path / name} must be an id or a list of "
                f"ids; got {ids}"
            )
        found += [entry for entry in ids if entry is not None]
    return tuple(dict.fromkeys(found))
