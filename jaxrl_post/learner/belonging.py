"""Refuses a model directory with another model's tokenizer, or without its template.

Only contradictions count: a vocabulary that is padded to a multiple, a stop token that
was added for a chat, or a tokenizer class of another family are normal.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.config.data import TemplateConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data.tokenizer import EOS, Tokenizer
from jaxrl_post.data.tokenizer_files import read_settings

__all__ = ["check_belonging"]

_log = logging.getLogger(__name__)

# More rows of embeddings without a token than padding explains: models have up to 2400
# of them, and at most one in forty.
PADDING, PADDED_SHARE = 4096, 0.1

# Tokens that end a turn, by which a chat model stops and a base model does not.
TURN_ENDS = {
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<end_of_turn>", "<turn|>",
    "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|role_end|>",
    "<|message_end|>", "<|endofassistant|>",
}  # fmt: skip

# In names such as Qwen2.5-0.5B-Instruct, Llama-2-7b-chat, gemma-2-2b-it.
_CHAT = re.compile(r"(?<=[A-Za-z0-9])[-_.](instruct|chat)(?=[-_.]|$)", re.IGNORECASE)
_GEMMA_CHAT = re.compile(r"gemma.*[-_.]it(?=[-_.]|$)", re.IGNORECASE)


def check_belonging(
    path: Path, tokenizer: Tokenizer, num_embeddings: int, template: TemplateConfig
) -> None:
    """Refuses, or warns about, another model's tokenizer and a missing template.

    Args:
        path: a model directory, of --model.
        tokenizer: of the directory.
        num_embeddings: rows of the model's embeddings.
        template: says whether such a directory is meant.

    Raises:
        ConfigError: the tokenizer contradicts the checkpoint, or a model for chats has
            no chat template, and this is not allowed.
    """
    told = []
    if reason := _contradiction(tokenizer, path, num_embeddings):
        told.append(
            f"{path} has the tokenizer or template of another model: {reason}; take "
            "the tokenizer.json and tokenizer_config.json that came with the checkpoint"
        )
    if reason := _is_for_chats(tokenizer, path):
        told.append(
            f"{path} is a model for chats ({reason}) without a chat template, so that "
            "prompts would be plain text; take the chat_template.jinja or "
            "tokenizer_config.json that came with the checkpoint"
        )
    for each in told:
        if template.on_mismatch == "fail":
            raise ConfigError(
                f"--model: {each}, or use it as it is by --template.on-mismatch allow"
            )
        _log.warning("%s (--template.on-mismatch allow)", each)


def _is_for_chats(tokenizer: Tokenizer, path: Path) -> str | None:
    """Returns the sign that a model without a chat template is for chats, or None."""
    if tokenizer.chat_templates:
        return None
    for token in tokenizer.stop_tokens:
        if token in TURN_ENDS:
            return f"its stop token is {token!r}, which ends a turn of a chat"
    # The hub's cache has a model in models--ORG--NAME/snapshots/COMMIT.
    names = [path.absolute().name, path.absolute().parent.parent.name]
    if path.absolute().parent.name != "snapshots":
        del names[1]
    named = read_settings(path / "config.json").get("_name_or_path")
    names += [Path(named).name] if isinstance(named, str) else []
    for name in names:
        if _CHAT.search(name) or _GEMMA_CHAT.search(name):
            return f"its name is {name}"
    return None


def _contradiction(tokenizer: Tokenizer, path: Path, num_embeddings: int) -> str | None:
    """Returns what contradicts that checkpoint and tokenizer belong together."""
    config = read_settings(path / "config.json")
    generation = read_settings(path / "generation_config.json")
    ends = {*_ids(config, "eos_token_id"), *_ids(generation, "eos_token_id")}
    backend, size = tokenizer.backend, tokenizer.vocab_size
    known = {end for end in ends if backend.id_to_token(end) is not None}
    if ends and not known:
        return (
            f"the checkpoint ends a text with token {min(ends)}, and the tokenizer has "
            f"{size} tokens without it"
        )
    special = set(backend.get_added_tokens_decoder())
    special |= {_id(tokenizer, name) for name in tokenizer.special_tokens}
    if ends and not known & special:
        end = min(known)
        return (
            f"the checkpoint ends a text with token {end}, which is an ordinary token "
            f"of the tokenizer, {backend.id_to_token(end)!r}"
        )
    begins, begin = _ids(config, "bos_token_id"), _id(tokenizer, "bos_token")
    end = _id(tokenizer, "eos_token")
    named = ends and begins and begin is not None and end is not None
    if named and begin not in begins and end not in ends:
        return (
            f"the checkpoint begins a text with token {begins[0]} and ends it with "
            f"{min(ends)}, the tokenizer with {begin} and {end}"
        )
    text = "".join(tokenizer.chat_templates.values())
    written = [token for token in sorted(TURN_ENDS) if token in text]
    if written and all(backend.token_to_id(token) is None for token in written):
        return f"the chat template writes {written[0]!r}, which is none of its tokens"
    unused = num_embeddings - size
    # A tokenizer of this package may be much smaller than its model.
    own = _id(tokenizer, "eos_token") == backend.token_to_id(EOS) is not None
    if unused > max(PADDING, PADDED_SHARE * num_embeddings) and not own:
        return (
            f"the checkpoint has embeddings of {num_embeddings} tokens, and the "
            f"tokenizer only {size}"
        )
    return None


def _ids(settings: Mapping[str, Any], name: str) -> list[int]:
    """The ids of a key, also of a text model inside of a larger one."""
    inner = settings.get("text_config")
    value = settings.get(name)
    if value is None and isinstance(inner, Mapping):
        value = inner.get(name)
    values = value if isinstance(value, list) else [value]
    return [each for each in values if type(each) is int and each >= 0]


def _id(tokenizer: Tokenizer, name: str) -> int | None:
    token = tokenizer.special_tokens.get(name)
    return None if token is None else tokenizer.backend.token_to_id(token)
