"""The process that writes and tries grammars; a grammar that ends it costs one request.

llguidance compiles by recursion, so a long chain of references ends its process, and a
grammar may ask for any amount of memory and time. This process has bounds of all three.
What passes here is compiled again where it is used: the same work, with more stack.
Later steps do not recurse; llguidance bounds their time and memory.

It imports no jax, and so it starts in a fraction of a second.
"""

import json
import math
import os
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLTokenizer

from jaxrl_post.data.replies import Format
from jaxrl_post.envs.workers.child import ignore_stop_signals, take_connection
from jaxrl_post.frames import receive_frame, send_frame
from jaxrl_post.serve.grammars.literals import lark_of_regex, lark_of_text
from jaxrl_post.serve.grammars.required import after_thoughts, call_grammar

__all__ = ["MEMORY_BYTES", "STACK_BYTES", "main", "opened_vocabulary"]

# Enough for chains of some hundred references.
STACK_BYTES = 4 * 2**20
# Memory of a grammar, without the vocabulary.
MEMORY_BYTES = 512 * 2**20
# Tokens after which masks are computed: much is compiled when it is first needed.
TRIED = 4
# Between the parts of JSON: a space, or a line with its indentation. Without a limit a
# model may write space until its tokens are spent.
WHITESPACE = r" ?|\n {0,40}"
# llguidance's reason where no text can follow; a model may never come there.
DEAD_END = "NoExtensionBias"


def opened_vocabulary(text: str, size: int, stop_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary as llguidance has it; its tables take a second to make.

    Args:
        text: the tokenizer, as the library tokenizers writes it.
        size: number of the model's logits.
        stop_ids: the tokens that end an answer.
    """
    return LLTokenizer(text, n_vocab=size, eos_token=list(stop_ids))


def main() -> None:
    """Reads the model, then requests, and answers each, until the parent is gone."""
    connection = take_connection()
    ignore_stop_signals()
    model = json.loads(receive_frame(connection, expires=None))
    text, template = model["tokenizer"], model["template"]
    vocabulary = opened_vocabulary(text, model["size"], model["stop_ids"])
    writer = _Writer(tokenizers.Tokenizer.from_str(text), template, model["marks"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, STACK_BYTES)
    # Linux alone tells how much is mapped.
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        taken = pages * os.sysconf("SC_PAGE_SIZE")
        _limit(resource.RLIMIT_AS, taken + MEMORY_BYTES)
    with suppress(EOFError, OSError):
        while True:
            asked = json.loads(receive_frame(connection, expires=None))
            until = math.ceil(time.process_time() + asked["seconds"])
            _limit(resource.RLIMIT_CPU, until)
            answer = json.dumps(_answer(writer, vocabulary, asked))
            send_frame(connection, answer.encode(), expires=None)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard))


def _answer(
    writer: "_Writer", vocabulary: LLTokenizer, asked: Mapping[str, Any]
) -> dict[str, str]:
    """The grammar of a request, which has been tried; or what is wrong with it."""
    try:
        whole = writer.written(asked)
    except RecursionError:
        return {"error": "it is nested too deep"}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB"}
    # A client's grammar may break any assumption about it.
    except Exception as error:
        return {"error": str(error) or type(error).__name__}
    matcher = LLMatcher(vocabulary, whole, log_level=0)
    for _ in range(TRIED):
        if matcher.is_stopped():
            break
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        token = (bits & -bits).bit_length() - 1
        # A token for a mark may be offered and then refused (`compiler._Matcher`).
        if not bits or not matcher.validate_tokens([token]):
            break
        matcher.consume_token(token)
    said = (matcher.get_error().strip() or matcher.stop_reason()).splitlines()[0]
    if matcher.is_error() and said != DEAD_END:
        return {"error": f"it cannot be compiled: {said}"}
    return {"grammar": whole}


class _Writer:
    """Writes grammars in the forms of llguidance.

    Args:
        backend: the model's tokenizer.
        template: the model's chat templates.
        marks: the added tokens that a literal text means, by their text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, template: str, marks: Mapping[str, int]
    ) -> None:
        self._backend, self._template, self._marks = backend, template, marks

    def written(self, asked: Mapping[str, Any]) -> str:
        """The grammar of a request, as `Grammars` sends it."""
        value, thinking = asked["value"], asked["thinking"]
        match asked["kind"]:
            case "json":
                whole = LLMatcher.grammar_from_json_schema(
                    json.dumps(value), overrides={"whitespace_pattern": WHITESPACE}
                )
            case "regex":
                whole = lark_of_regex(value, self._marks)
                whole = whole or LLMatcher.grammar_from_regex(value)
            case "choice":
                written = (lark_of_text(each, self._marks) for each in value)
                whole = f"start: {' | '.join(written)}"
            case "lark":
                whole = LLMatcher.grammar_from_lark(value)
            case _:
                return call_grammar(
                    Format(**value["form"]),
                    self._template,
                    value["tools"],
                    self._mark,
                    thinking=thinking,
                )
        return after_thoughts(whole, self._mark) if thinking else whole

    def _mark(self, text: str) -> str:
        """A mark in a grammar: a token of its own where the vocabulary has it."""
        token = self._backend.token_to_id(text)
        return json.dumps(text) if token is None else f"<[{token}]>"
