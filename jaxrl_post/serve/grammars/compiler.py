"""Constraints from JSON schemas and grammars, by llguidance."""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from jaxrl_post.data.replies import Format
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.sampler.requests import ConstraintError
from jaxrl_post.serve.grammars import inside
from jaxrl_post.serve.grammars.trials import GrammarError, Trials

__all__ = ["COMPILE_S", "GrammarError", "Grammars"]


# Stack of the compiling thread: many times the stack of the process that tried it.
STACK_BYTES = 16 * inside.STACK_BYTES
# Why llguidance stops when all is well: the answer is complete, or the model ended it.
COMPLETE = ("NoExtension", "EndOfSentence")

# Most seconds of processor time to compile a grammar.
COMPILE_S = 10.0

type Constrain = Callable[[], "_Matcher"]


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
        seconds: most seconds of processor time for a grammar.

    Attributes:
        queue: where a server compiles, one grammar at a time: those who wait hold no
            thread that other requests need.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, seconds: float = COMPILE_S
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._words = -(-vocab_size // 32)
        self._trials = Trials(self._model, seconds)
        self.queue = ThreadPoolExecutor(1, "grammars")

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The tokenizer as llguidance has it; its tables take a second to make."""
        text = self._tokenizer.backend.to_str()
        return inside.opened_vocabulary(
            text, self._vocab_size, self._tokenizer.stop_ids
        )

    def _model(self) -> dict[str, Any]:
        """The model's facts for the process that tries grammars."""
        return {
            "tokenizer": self._tokenizer.backend.to_str(),
            "size": self._vocab_size,
            "stop_ids": self._tokenizer.stop_ids,
            "template": "".join(self._tokenizer.chat_templates.values()),
            "marks": self._marks,
        }

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
        return self._compiled("json", schema, "schema", thinking=thinking)

    def regex(self, pattern: str, *, thinking: bool = False) -> Constrain:
        """Answers that a regular expression matches as a whole.

        Raises:
            GrammarError: it cannot be compiled.
        """
        return self._compiled("regex", pattern, "regex", thinking=thinking)

    def choice(self, choices: Sequence[str], *, thinking: bool = False) -> Constrain:
        """Answers that are one of some texts.

        Raises:
            GrammarError: they cannot be compiled.
        """
        return self._compiled("choice", choices, "choice", thinking=thinking)

    def lark(self, grammar: str, *, thinking: bool = False) -> Constrain:
        """Answers of a context-free grammar in llguidance's form of Lark.

        Raises:
            GrammarError: it cannot be compiled.
        """
        return self._compiled("lark", grammar, "grammar", thinking=thinking)

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
        # GPT-OSS ends a call with a stop token of its own.
        end = self._tokenizer.backend.token_to_id("<|call|>")
        own = form.name == "harmony" and end in self._tokenizer.stop_ids
        value = {"form": dataclasses.asdict(form), "tools": tools}
        ends = (end,) if own and end is not None else ()
        return self._compiled("call", value, "tools", ends, thinking=thinking)

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
        kind: str,
        value: Any,
        what: str,
        ends: Sequence[int] = (),
        *,
        thinking: bool = False,
    ) -> Constrain:
        """A constraint, after which one of some stop tokens comes; () for any."""
        try:
            whole = self._trials.written(kind, value, thinking=thinking)
        except GrammarError as error:
            raise GrammarError(f"{what}: {error}") from error
        stops = _bits(ends or self._tokenizer.stop_ids, self._words)

        def first() -> _Matcher:
            matcher = LLMatcher(self.vocabulary, whole, log_level=0)
            return _Matcher(matcher, stops, self._spelled, self._mute)

        try:
            return _with_stack(first).copy
        except ConstraintError as error:
            raise GrammarError(f"{what}: nothing satisfies it: {error}") from error


_STARTING = threading.Lock()


def _with_stack[Result](work: Callable[[], Result]) -> Result:
    """Runs a function in a thread with so much stack that its recursion has room."""
    with _STARTING:
        before = threading.stack_size(STACK_BYTES)
        try:
            pool = ThreadPoolExecutor(1)
            future = pool.submit(work)
        finally:
            threading.stack_size(before)
    with pool:
        return future.result()


def _bits(tokens: Sequence[int], words: int) -> np.ndarray:
    bits = np.zeros(words, np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << (token % 32))
    return bits
