"""Finds the assistant's turns in the text of a rendered conversation."""

import re
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "Part",
    "Span",
    "answer_end",
    "closed",
    "difference",
    "ends_with_stop",
    "joined",
    "through_stops",
    "turn_end",
]

# (begin, end) of a part of a text.
type Span = tuple[int, int]


class Part(NamedTuple):
    """A rendered conversation, and the spans of it that the assistant produces."""

    text: str
    spans: list[Span]


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


def joined(
    whole: str, turns: Sequence[tuple[str, str]], stops: Sequence[str]
) -> list[Part]:
    """Joins the assistant's turns to texts, in which each turn is as it was sampled.

    A turn continues the text before it if its prompt begins with that text. Where a
    template writes earlier turns differently once later ones follow, such as without
    their reasoning, the prompt does not, and the turn begins a text of its own.

    A span begins where the generation prompt of its turn ends, and includes the stop
    token. If a template ends a turn only by the head of the next turn, the first token
    of that head is the stop token, because the model has to produce it.

    Args:
        whole: the conversation.
        turns: of the assistant, each as its prompt and the conversation through it.
        stops: the stop tokens.

    Returns:
        One text, `whole`, if all turns stand in it as they are sampled; else several.

    >>> one, other = ("a:", "a:1<end>"), ("a:1<end>b:", "a:1<end>b:2<end>")
    >>> joined("a:1<end>b:2<end>", [one, other], ["<end>"])
    [Part(text='a:1<end>b:2<end>', spans=[(2, 8), (10, 16)])]
    >>> [part.text for part in joined("a:b:2<end>", [one, ("a:b:", "a:b:2<end>")], [])]
    ['a:1<end>', 'a:b:2<end>']
    """
    found: list[Part] = []
    for prompt, text in turns:
        span = len(prompt), turn_end(text, stops, len(prompt))
        if found and closed(found[-1].text, prompt, stops) is not None:
            found[-1] = Part(text, [*found[-1].spans, span])
        else:
            found.append(Part(text, [span]))
    if len(found) == 1 and closed(found[0].text, whole, stops) is not None:
        found = [Part(whole, found[0].spans)]
    return [Part(each, through_stops(each, spans, stops)) for each, spans in found]


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


def difference(first: str, second: str) -> str:
    """Excerpts of both texts around their first difference."""
    at = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    shown = [text[max(0, at - SNIPPET) : at + SNIPPET] for text in (first, second)]
    return f"{shown[0]!r} became {shown[1]!r}"
