"""Where in a rendered conversation the assistant speaks."""

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
    r"""Index after the stop token of the turn that ends a text.

    White space and further stop tokens may follow it; where there is none, the turn
    ends with the text.

    Args:
        text: ends with a turn.
        stops: the stop tokens.
        begin: where the turn begins at the earliest.

    >>> text = "user: 1+1<|end|> assistant: 2<|end|>\n<eos>"
    >>> text[turn_end(text, ["<|end|>", "<eos>"]):]
    '\n<eos>'
    """
    return _ending(text, stops, begin)[1]


def answer_end(text: str, stops: Sequence[str], begin: int = 0) -> int:
    """Index before the stop token of the turn that ends a text.

    Args:
        text: as for `turn_end`.
        stops: the stop tokens.
        begin: where the turn begins at the earliest.

    >>> answer_end("user: 1+1<|end|> assistant: 2<|end|>\\n<eos>", ["<|end|>", "<eos>"])
    29
    """
    return _ending(text, stops, begin)[0]


def _ending(text: str, stops: Sequence[str], begin: int) -> Span:
    """The stop token of the turn that ends a text."""
    if not stops:
        return len(text), len(text)
    stop = "|".join(map(re.escape, stops))
    found = re.compile(rf"(?:{stop})(?=(?:\s|{stop})*+\Z)").search(text, begin)
    return found.span() if found else (len(text), len(text))


def closed(shorter: str, longer: str, stops: Sequence[str]) -> str | None:
    """The part of a conversation that a longer one begins with, None if there is none.

    That is all of it, without the end-of-sequence token that some templates put after
    the last turn, which ends with a stop token of its own.

    Args:
        shorter: a rendered conversation.
        longer: the same conversation, rendered with what follows.
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
    """Finds what the assistant produces by rendering beginnings of the conversation.

    A turn begins where the prompt for it ends and reaches to its stop token. Where a
    template marks the end of a turn by how the next one begins, that token is the stop
    token: it is what the model has to say.

    Args:
        render: of messages, with or without the prompt for an answer at the end.
        messages: the conversation.
        stops: the stop tokens.
        only_last: looks at the last turn of the assistant alone.

    Raises:
        TokenizerError: the template renders a turn differently once later ones follow,
            or not as it prompts for it.
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
    """Whether a span's last token, but for white space, is a stop token.

    Args:
        text: a rendered conversation.
        span: of it.
        stops: the stop tokens.
    """
    begin, end = span
    return text[begin:end].rstrip().endswith(tuple(stops))


def through_stops(text: str, spans: Sequence[Span], stops: Sequence[str]) -> list[Span]:
    """The spans, each with the stop token that follows it where it has none.

    Args:
        text: a rendered conversation.
        spans: of turns in it, or of parts of turns.
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
    """Those of the spans that lie in the assistant's last turn.

    Args:
        render: as for `assistant_spans`.
        messages: the conversation.
        spans: of all turns.

    Raises:
        TokenizerError: where that turn begins cannot be told.
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
    """Both texts around where they begin to differ."""
    at = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    shown = [text[max(0, at - SNIPPET) : at + SNIPPET] for text in (first, second)]
    return f"{shown[0]!r} became {shown[1]!r}"
