"""Finds the assistant's turns in the text of a rendered conversation."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_post.data.tokenizer_files import TokenizerError

__all__ = [
    "Span",
    "answer_end",
    "assistant_spans",
    "closed",
    "ends_with_stop",
    "last_turn",
    "through_stops",
    "turn_end",
]

# (begin, end) of a part of a text.
type Span = tuple[int, int]

type Render = Callable[[Sequence[Mapping[str, Any]], bool], str]

SNIPPET = 30  # characters on either side of a difference


def turn_end(text: str, stops: Sequence[str], begin: int = 0) -> int:
    r"""Index after the stop token of the last turn of a text.

    White space and further stop tokens may follow it. Without a stop token, the turn
    ends with the text.

    Args:
        text: a text that ends with a turn.
        stops: the stop tokens.
        begin: a lower bound of the turn's begin.

    >>> text = "user: 1+1<|end|> assistant: 2<|end|>\n<eos>"
    >>> text[turn_end(text, ["<|end|>", "<eos>"]):]
    '\n<eos>'
    """
    return _ending(text, stops, begin)[1]


def answer_end(text: str, stops: Sequence[str], begin: int = 0) -> int:
    """Index before the stop token of the last turn of a text.

    Args:
        text: as for `turn_end`.
        stops: the stop tokens.
        begin: a lower bound of the turn's begin.

    >>> answer_end("user: 1+1<|end|> assistant: 2<|end|>\\n<eos>", ["<|end|>", "<eos>"])
    29
    """
    return _ending(text, stops, begin)[0]


def _ending(text: str, stops: Sequence[str], begin: int) -> Span:
    """The span of the stop token of the last turn of a text."""
    if not stops:
        return len(text), len(text)
    stop = "|".join(map(re.escape, stops))
    found = re.compile(rf"(?:{stop})(?=(?:\s|{stop})*+\Z)").search(text, begin)
    return found.span() if found else (len(text), len(text))


def closed(shorter: str, longer: str, stops: Sequence[str]) -> str | None:
    """`shorter` if it is a prefix of `longer`, else None.

    Some templates write an end-of-sequence token after the stop token of the last turn;
    it is removed from `shorter` if `longer` does not have it.

    Args:
        shorter: a rendered conversation.
        longer: the same conversation, rendered with later turns.
        stops: the stop tokens.
    """
    candidates = [shorter]
    for stop in stops:
        without = shorter.removesuffix(stop)
        if without != shorter and without.rstrip().endswith(tuple(stops)):
            candidates.append(without)
    return next((part for part in candidates if longer.startswith(part)), None)


def assistant_spans(
    render: Render,
    messages: Sequence[Mapping[str, Any]],
    stops: Sequence[str],
    *,
    only_last: bool = False,
) -> list[Span]:
    """Finds the spans that the assistant produces, by rendering prefixes of `messages`.

    A span begins where the generation prompt of its turn ends, and includes the stop
    token. If a template ends a turn only by the head of the next turn, the first token
    of that head is the stop token, because the model has to produce it.

    Args:
        render: renders messages, with or without the generation prompt.
        messages: the conversation.
        stops: the stop tokens.
        only_last: finds only the assistant's last turn.

    Raises:
        TokenizerError: the template renders a turn differently if later turns follow,
            or does not begin it with the generation prompt.
    """
    whole = render(messages, False)
    spans = []
    for index in _turns(messages, only_last):
        prompt = render(messages[:index], True)
        through = render(messages[: index + 1], False)
        if not through.startswith(prompt):
            raise TokenizerError(
                f"chat: the template writes messages[{index}], a turn of the "
                "assistant, differently from how it prompts for it: "
                f"{_difference(prompt, through)}; give the turn what the prompt "
                "promises, such as its reasoning, or change the template's variables"
            )
        kept = closed(through, whole, stops)
        if kept is None:
            raise TokenizerError(
                "chat: the template writes the conversation up to messages"
                f"[{index}] differently once later turns follow: "
                f"{_difference(through, whole)}; what is learned would not be what is "
                "sampled. Cut the conversation after each turn of the assistant and "
                "learn that turn alone (only_last=True)"
            )
        spans.append((len(prompt), turn_end(kept, stops, len(prompt))))
    return through_stops(whole, spans, stops)


def ends_with_stop(text: str, span: Span, stops: Sequence[str]) -> bool:
    """Whether a span ends with a stop token, ignoring white space after it.

    Args:
        text: a rendered conversation.
        span: a span of the text.
        stops: the stop tokens.
    """
    begin, end = span
    return text[begin:end].rstrip().endswith(tuple(stops))


def through_stops(text: str, spans: Sequence[Span], stops: Sequence[str]) -> list[Span]:
    """Extends each span without a stop token by the stop token that follows it.

    Args:
        text: a rendered conversation.
        spans: spans of turns, or of parts of turns.
        stops: the stop tokens.

    >>> through_stops("a: 4 <end>", [(3, 4)], ["<end>"])
    [(3, 10)]
    """
    if not stops:
        return list(spans)
    stop = re.compile(rf"\s*(?:{'|'.join(map(re.escape, stops))})")
    limits, found = [*(begin for begin, _ in spans[1:]), len(text)], []
    for (begin, end), limit in zip(spans, limits, strict=True):
        match = stop.match(text, end, limit)
        if match and not ends_with_stop(text, (begin, end), stops):
            end = match.end()
        found.append((begin, end))
    return found


def last_turn(
    render: Render, messages: Sequence[Mapping[str, Any]], spans: Sequence[Span]
) -> list[Span]:
    """The spans that lie in the assistant's last turn.

    Args:
        render: as for `assistant_spans`.
        messages: the conversation.
        spans: the spans of all turns.

    Raises:
        TokenizerError: the beginning of that turn cannot be found.
    """
    (index,) = _turns(messages, only_last=True)
    before, whole = render(messages[:index], False), render(messages, False)
    if not whole.startswith(before):
        raise TokenizerError(
            f"chat: the template writes what precedes messages[{index}] differently "
            f"once it follows: {_difference(before, whole)}; the tokens of that turn "
            "cannot be told from those before it"
        )
    return [span for span in spans if span[0] >= len(before)]


def _turns(messages: Sequence[Mapping[str, Any]], only_last: bool) -> list[int]:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return turns[-1:] if only_last else turns


def _difference(first: str, second: str) -> str:
    """Excerpts of both texts around their first difference."""
    at = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    shown = [text[max(0, at - SNIPPET) : at + SNIPPET] for text in (first, second)]
    return f"{shown[0]!r} became {shown[1]!r}"
