"""Constraints from JSON schemas and grammars, by llguidance."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from jaxrl_post.data.replies import Format
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.sampler.requests import ConstraintError
from jaxrl_post.serve.grammars.literals import lark_of_regex, lark_of_text
from jaxrl_post.serve.grammars.required import after_thoughts, call_grammar

__all__ = ["GrammarError", "Grammars"]


# Between the parts of JSON: a space, or a line with its indentation. Without a limit a
# model may write space until its tokens are spent.
WHITESPACE = r" ?|\n {0,40}"
# Why llguidance stops when all is well: the answer is complete, or the model ended it.
COMPLETE = ("NoExtension", "EndOfSentence")

type Constrain = Callable[[], "_Matcher"]


class GrammarError(ValueError):
    """A schema or grammar that cannot be compiled, or that nothing satisfies."""


class _Matcher:
    """The state of a grammar in one sample; a `sampler.requests.Constraint`.

    Where a grammar leaves one text alone, llguidance offers the first token of how the
    tokenizer would write it. That may be a token for a mark, such as <think>, which it
    then refuses, since to a grammar of characters the mark is spelled. Such a token is
    taken for its spelling. If the sample would not have the text with it, because it
    ends the sample or is left out of texts, the spelling is offered instead.

    Args:
        matcher: at the beginning.
        stops: bits of the tokens that may come at the end.
        spelled: ordinary tokens that write the text of each token for a mark.
        mute: the tokens for marks with which a sample would not have their text.

    Raises:
        ConstraintError: nothing can begin an answer.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        stops: np.ndarray,
        spelled: Mapping[int, Sequence[int]],
        mute: frozenset[int],
    ) -> None:
        self._matcher, self._stops = matcher, stops
        self._spelled, self._mute = spelled, mute
        self._allowed = self._next()

    def copy(self) -> "_Matcher":
        """The same state, for another sample."""
        made = object.__new__(_Matcher)
        made.__dict__ |= self.__dict__ | {"_matcher": self._matcher.deep_copy()}
        return made

    def allowed(self) -> np.ndarray:
        """Bits of the tokens that may come next; the stop tokens at the end."""
        return self._allowed

    def advance(self, token: int) -> None:
        """Takes note of a sampled token.

        Raises:
            ConstraintError: llguidance gave up.
        """
        if self._matcher.is_stopped():
            return
        tokens = self._spelled[token] if self._is_spelled(token) else (token,)
        self._matcher.consume_tokens(list(tokens))
        self._allowed = self._next()

    def _is_spelled(self, token: int) -> bool:
        """Whether a token for a mark can only come as its spelling."""
        return token in self._spelled and not self._matcher.validate_tokens([token])

    def _next(self) -> np.ndarray:
        if not self._matcher.is_stopped():
            # The mask has whole words, or ends within the last one.
            mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            bits = np.zeros_like(self._stops)
            bits[: len(mask)] = mask[: len(bits)]
            if not self._matcher.is_error() and bits.any():
                return self._writable(bits)
        reason = self._matcher.stop_reason()
        if reason in COMPLETE and not self._matcher.is_error():
            return self._stops
        said = (self._matcher.get_error() or reason).strip().splitlines()[0]
        if "NoExtensionBias" in (said, reason):
            said = (
                "no token can come next, and the answer is not complete; is there a "
                "part of the grammar that no text satisfies?"
            )
        raise ConstraintError(said)

    def _writable(self, bits: np.ndarray) -> np.ndarray:
        """The bits, with the spelling of an only token that would have no text."""
        if np.bitwise_count(bits).sum() == 1:
            word = int(bits.argmax())
            token = word * 32 + int(bits[word]).bit_length() - 1
            if token in self._mute and self._is_spelled(token):
                return _bits([self._spelled[token][0]], len(bits))
        return bits


class Grammars:
    """Compiles grammars for a tokenizer.

    Args:
        tokenizer: the model's.
        vocab_size: number of the model's logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._words = -(-vocab_size // 32)

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The tokenizer as llguidance has it; its tables take a second to make."""
        return LLTokenizer(
            self._tokenizer.backend.to_str(),
            n_vocab=self._vocab_size,
            eos_token=list(self._tokenizer.stop_ids),
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token writes; none for an id that the tokenizer lacks."""
        if self._tokenizer.backend.id_to_token(token) is None:
            return b""
        return self.vocabulary.decode_bytes([token])

    def json(self, schema: Mapping[str, Any], *, thinking: bool = False) -> Constrain:
        """Answers that are JSON of a schema; {} for any JSON value.

        Args:
            schema: of the answer.
            thinking: whether the answer comes after reasoning that the prompt has
                begun; likewise of the other kinds.

        Raises:
            GrammarError: the schema cannot be compiled.
        """
        return self._compiled(
            lambda: LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}
            ),
            "schema",
            thinking=thinking,
        )

    def regex(self, pattern: str, *, thinking: bool = False) -> Constrain:
        """Answers that a regular expression matches as a whole.

        Raises:
            GrammarError: it cannot be compiled.
        """
        return self._compiled(
            lambda: (
                lark_of_regex(pattern, self._marks)
                or LLMatcher.grammar_from_regex(pattern)
            ),
            "regex",
            thinking=thinking,
        )

    def choice(self, choices: Sequence[str], *, thinking: bool = False) -> Constrain:
        """Answers that are one of some texts.

        Raises:
            GrammarError: they cannot be compiled.
        """
        written = " | ".join(lark_of_text(each, self._marks) for each in choices)
        return self._compiled(lambda: f"start: {written}", "choice", thinking=thinking)

    def lark(self, grammar: str, *, thinking: bool = False) -> Constrain:
        """Answers of a context-free grammar in llguidance's form of Lark.

        Raises:
            GrammarError: it cannot be compiled.
        """
        return self._compiled(
            lambda: LLMatcher.grammar_from_lark(grammar), "grammar", thinking=thinking
        )

    def call(
        self,
        form: Format,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        thinking: bool = False,
    ) -> Constrain:
        """Answers that are one call of one of some tools, perhaps after reasoning.

        Args:
            form: in which the model writes calls.
            tools: the schemas of the arguments, by name.
            thinking: whether the prompt ends inside the reasoning.

        Raises:
            GrammarError: no grammar is known for the format, or it cannot be compiled.
        """
        template = "".join(self._tokenizer.chat_templates.values())
        try:
            whole = call_grammar(form, template, tools, self._mark, thinking=thinking)
        except ValueError as error:
            raise GrammarError(str(error)) from error
        # GPT-OSS ends a call with a stop token of its own.
        end = self._tokenizer.backend.token_to_id("<|call|>")
        own = form.name == "harmony" and end in self._tokenizer.stop_ids
        return self._compiled(
            lambda: LLMatcher.grammar_from_lark(whole),
            "tools",
            (end,) if own and end is not None else (),
        )

    def _mark(self, text: str) -> str:
        """A mark in a grammar: a token of its own where the vocabulary has it."""
        token = self._tokenizer.backend.token_to_id(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    @cached_property
    def _spelled(self) -> dict[int, tuple[int, ...]]:
        """Ordinary tokens that write the text of each added token."""
        added = self._tokenizer.backend.get_added_tokens_decoder()
        return {
            token: tuple(self.vocabulary.greedy_tokenize(each.content))
            for token, each in added.items()
            if token < self._vocab_size and each.content
        }

    @cached_property
    def _mute(self) -> frozenset[int]:
        """The added tokens that end a sample, or are left out of its text."""
        added = self._tokenizer.backend.get_added_tokens_decoder()
        special = {token for token, each in added.items() if each.special}
        return frozenset(special) | frozenset(self._tokenizer.stop_ids)

    @cached_property
    def _marks(self) -> dict[str, int]:
        """The added tokens that a literal text means, by their text."""
        added = self._tokenizer.backend.get_added_tokens_decoder()
        return {
            added[token].content: token
            for token in self._spelled
            if token not in self._mute and added[token].content.strip()
        }

    def _compiled(
        self,
        grammar: Callable[[], str],
        what: str,
        ends: Sequence[int] = (),
        *,
        thinking: bool = False,
    ) -> Constrain:
        """A constraint, after which one of some stop tokens comes; () for any."""
        try:
            whole = grammar()
            if thinking:
                whole = after_thoughts(whole, self._mark)
            matcher = LLMatcher(self.vocabulary, whole, log_level=0)
        except (ValueError, TypeError) as error:
            raise GrammarError(f"{what}: {error}") from error
        if matcher.is_error():
            said = matcher.get_error().strip().splitlines()[0]
            raise GrammarError(f"{what}: it cannot be compiled: {said}")
        stops = _bits(ends or self._tokenizer.stop_ids, self._words)
        try:
            first = _Matcher(matcher, stops, self._spelled, self._mute)
        except ConstraintError as error:
            raise GrammarError(f"{what}: nothing satisfies it: {error}") from error
        return first.copy


def _bits(tokens: Sequence[int], words: int) -> np.ndarray:
    bits = np.zeros(words, np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << (token % 32))
    return bits
