"""Constraints from JSON schemas and grammars, by llguidance."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from jaxrl_post.data.replies import Format
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.serve.required import call_grammar

__all__ = ["GrammarError", "Grammars"]


# Between the parts of JSON: a space, or a line with its indentation. Without a limit a
# model may write space until its tokens are spent.
WHITESPACE = r" ?|\n {0,40}"


class GrammarError(ValueError):
    """A schema or grammar that cannot be compiled, or that nothing satisfies."""


class _Matcher:
    """The state of a grammar in one sample; a `sampler.requests.Constraint`."""

    def __init__(self, matcher: LLMatcher, words: int, stops: np.ndarray) -> None:
        self._matcher, self._words, self._stops = matcher, words, stops

    def allowed(self) -> np.ndarray:
        """Bits of the tokens that may come next; the stop tokens at the end."""
        if self._matcher.is_stopped() or self._matcher.is_error():
            return self._stops
        # The mask has whole words, or ends within the last one.
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        bits = np.zeros(self._words, np.uint32)
        bits[: len(mask)] = mask[: self._words]
        return bits if bits.any() else self._stops

    def advance(self, token: int) -> None:
        """Takes note of a sampled token."""
        if not (self._matcher.is_stopped() or self._matcher.is_error()):
            self._matcher.consume_token(token)


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

    def json(self, schema: Mapping[str, Any]) -> Callable[[], _Matcher]:
        """Answers that are JSON of a schema; {} for any JSON value.

        Raises:
            GrammarError: the schema cannot be compiled.
        """
        return self._compiled(
            lambda: LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_pattern": WHITESPACE}
            ),
            "schema",
        )

    def regex(self, pattern: str) -> Callable[[], _Matcher]:
        """Answers that a regular expression matches as a whole.

        Raises:
            GrammarError: it cannot be compiled.
        """
        return self._compiled(lambda: LLMatcher.grammar_from_regex(pattern), "regex")

    def lark(self, grammar: str) -> Callable[[], _Matcher]:
        """Answers of a context-free grammar in llguidance's form of Lark.

        Raises:
            GrammarError: it cannot be compiled.
        """
        return self._compiled(lambda: LLMatcher.grammar_from_lark(grammar), "grammar")

    def call(
        self,
        form: Format,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        thinking: bool = False,
    ) -> Callable[[], _Matcher]:
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

    def _compiled(
        self, grammar: Callable[[], str], what: str, ends: Sequence[int] = ()
    ) -> Callable[[], _Matcher]:
        """A constraint, after which one of some stop tokens comes; () for any."""
        try:
            matcher = LLMatcher(self.vocabulary, grammar(), log_level=0)
        except (ValueError, TypeError) as error:
            raise GrammarError(f"{what}: {error}") from error
        if matcher.is_error():
            said = matcher.get_error().strip().splitlines()[0]
            raise GrammarError(f"{what}: it cannot be compiled: {said}")
        stops = np.zeros(self._words, np.uint32)
        for stop in ends or self._tokenizer.stop_ids:
            stops[stop // 32] |= np.uint32(1 << (stop % 32))
        return lambda: _Matcher(matcher.deep_copy(), self._words, stops)
