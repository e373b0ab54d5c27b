"""Bounds on the number of tokens of a text, without tokenising it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from jaxrl_post.data import chat
from jaxrl_post.data.chat import MessageLike, Messages, Options
from jaxrl_post.data.learned import parts
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.messages import Message

__all__ = ["Lengths", "written"]

# Normalisers that only compose or decompose characters, or replace spaces. None turns
# one byte into more than three bytes, or more than four characters into one.
_KEEPING = {"NFC", "NFD", "Prepend", "Replace a space", "Sequence"}
_MOST_BYTES, _MOST_CHARACTERS = 3, 4

# Tokens around a text that do not come from it (BOS, EOS, a leading space).
_AROUND = 8


@dataclass(frozen=True)
class Lengths:
    """Bounds on the number of tokens of a text, computed from its characters.

    A tokenizer with a token for every byte makes at most one token per byte, and no
    token covers more characters than the longest one in the vocabulary. There are no
    bounds for a tokenizer without byte tokens, where one unknown token may cover a
    whole text.

    Attributes:
        longest: characters of the longest token in the vocabulary; None without bounds.
        normalized: whether the tokenizer rewrites characters first.

    >>> lengths = Lengths.of(Tokenizer.train(["12+30=42"]))
    >>> lengths.at_most("12+3") >= 4
    True
    >>> lengths.fits("12+3=", 64), lengths.fits("9" * 10_000, 64)
    (True, False)
    """

    longest: int | None
    normalized: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Lengths":
        """The bounds of a tokenizer."""
        backend = tokenizer.backend
        normalizers = set(_kinds(backend.normalizer))
        splits = set(_kinds(backend.pre_tokenizer))
        bytewise = "ByteLevel" in splits or (
            getattr(backend.model, "byte_fallback", False)
        )
        if (
            not isinstance(backend.model, tokenizers.models.BPE)
            or not bytewise
            or not normalizers <= _KEEPING
        ):
            return cls(None, True)
        longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
        return cls(longest, bool(normalizers))

    def at_most(self, text: str) -> int | None:
        """An upper bound on the number of tokens of a text; None without bounds."""
        if self.longest is None:
            return None
        size = len(text.encode("utf-8", errors="surrogatepass"))
        return size * (_MOST_BYTES if self.normalized else 1) + _AROUND

    def fits(self, text: str, limit: int) -> bool | None:
        """Whether a text has at most `limit` tokens; None if the bounds do not tell.

        Args:
            text: a text of any length.
            limit: number of tokens, at least 0.
        """
        if self.longest is None:
            return None
        # White space may be stripped, so only the other characters count.
        least = self.longest * (_MOST_CHARACTERS if self.normalized else 1) * limit
        if len(text) > least and sum(map(len, text.split())) > least:
            return False
        most = self.at_most(text)
        return True if most is not None and most <= limit else None


def written(
    tokenizer: Tokenizer,
    messages: Messages,
    answer: str | Message | None = None,
    *,
    options: Options | None = None,
) -> str:
    """The text of a prompt, or with its answer, whose length `Lengths` can bound.

    Args:
        tokenizer: with or without a chat template.
        messages: a prompt.
        answer: the assistant's answer, a message if it calls tools; None for the
            prompt alone.
        options: inputs of the template; None for the defaults.

    Raises:
        TokenizerError: as `chat.render_text` and `learned.parts`.

    >>> written(Tokenizer.train(["1"]), [{"role": "user", "content": "1+1="}], "2")
    '1+1=2<|eos|>'
    """
    turns, options = list(messages), options or Options()
    if isinstance(answer, str):
        answer = Message("assistant", answer)
    if answer is not None:
        turns.append(answer)
    if tokenizer.chat_templates and answer is not None:
        [(text, _)] = parts(tokenizer, turns, options, only_last=True)
        return text
    if tokenizer.chat_templates:
        return chat.render_text(tokenizer, turns, options)
    return "".join(_said(turn, tokenizer) for turn in turns)


def _said(turn: MessageLike | Mapping[str, Any], tokenizer: Tokenizer) -> str:
    content = turn.get("content") if isinstance(turn, Mapping) else turn.content
    ends = tokenizer.stop_tokens[:1] if _role(turn) == "assistant" else ()
    return "".join((content if isinstance(content, str) else "", *ends))


def _role(turn: MessageLike | Mapping[str, Any]) -> Any:
    return turn.get("role") if isinstance(turn, Mapping) else turn.role


def _kinds(part: Any) -> Iterator[str]:
    """The types of a part of a tokenizer and of its nested parts."""
    if part is not None:
        yield from _named(json.loads(part.__getstate__()))


def _named(state: dict[str, Any]) -> Iterator[str]:
    kind = state["type"]
    if kind == "Replace" and state["pattern"] == {"String": " "}:
        kind = "Replace a space"
    yield kind
    for name in ("normalizers", "pretokenizers"):
        for inner in state.get(name, ()):
            yield from _named(inner)
