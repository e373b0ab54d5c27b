"""Literal text in a grammar: where it has a token of its own, that token is meant.

A model writes `<think>` as one token where its vocabulary has it, while a grammar of
characters would have it spelled. So marks in a choice, and at the top level of a
regular expression, become references to their tokens.
"""

import json
import re
from collections.abc import Mapping

__all__ = ["lark_of_regex", "lark_of_text"]

# Flags at the beginning of a regular expression hold for all of it.
FLAGS = re.compile(r"\(\?[a-zA-Z]+\)")
QUANTIFIERS = ("*", "+", "?", "{")


def lark_of_text(text: str, marks: Mapping[str, int]) -> str:
    """A text as an expression of Lark.

    Args:
        text: what must be written.
        marks: the token of each text that has one of its own.

    >>> lark_of_text("<a>b", {"<a>": 7})
    '<[7]> "b"'
    """
    parts = _split(text, marks)
    written = [
        f"<[{marks[part]}]>" if part in marks else json.dumps(part)
        for part in parts
        if part
    ]
    return " ".join(written) or '""'


def lark_of_regex(pattern: str, marks: Mapping[str, int]) -> str | None:
    r"""A regular expression as a grammar of Lark; None if it has no mark at its top.

    A mark in a group stays as it is, and is spelled.

    Args:
        pattern: the regular expression.
        marks: the token of each text that has one of its own.

    >>> print(lark_of_regex("<a>[0-9]+|x/(<a>)?", {"<a>": 7}))
    start: <[7]> /[0-9]+/ | /x\/(<a>)?/
    """
    flags = FLAGS.match(pattern)
    begin = flags.end() if flags else 0
    sequences = _top(pattern[begin:], marks)
    if not any(isinstance(part, int) for parts in sequences for part in parts):
        return None

    def written(part: str | int) -> str:
        if isinstance(part, int):
            return f"<[{part}]>"
        escaped = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", part, flags=re.DOTALL)
        return f"/{pattern[:begin]}{escaped.replace('\n', r'\n')}/"

    rows = [" ".join(map(written, parts)) or '""' for parts in sequences]
    return f"start: {' | '.join(rows)}"


def _split(text: str, marks: Mapping[str, int]) -> list[str]:
    """The text, cut before and after each mark."""
    if not marks:
        return [text]
    longest = sorted(map(re.escape, marks), key=len, reverse=True)
    return re.split(f"({'|'.join(longest)})", text)


def _top(pattern: str, marks: Mapping[str, int]) -> list[list[str | int]]:
    """The alternatives of a regular expression, each cut at the marks in it."""
    found: list[list[str | int]] = [[]]
    chunk, depth, place = "", 0, 0

    def close() -> None:
        nonlocal chunk
        if chunk:
            found[-1].append(chunk)
        chunk = ""

    while place < len(pattern):
        token, size = _mark_at(pattern, place, marks) if depth == 0 else (None, 0)
        if token is not None:
            close()
            found[-1].append(token)
        elif pattern[place] == "|" and depth == 0:
            close()
            found.append([])
            size = 1
        else:
            size = _atom(pattern, place)
            depth += {"(": 1, ")": -1}.get(pattern[place], 0)
            chunk += pattern[place : place + size]
        place += size
    close()
    return found


def _mark_at(
    pattern: str, place: int, marks: Mapping[str, int]
) -> tuple[int | None, int]:
    """The mark that begins here, plain or escaped, and its length; None for none."""
    for mark, token in marks.items():
        for text in (re.escape(mark), mark):
            after = place + len(text)
            # A quantifier would be of the mark's last character.
            if pattern.startswith(text, place) and not pattern.startswith(
                QUANTIFIERS, after
            ):
                return token, len(text)
    return None, 0


def _atom(pattern: str, place: int) -> int:
    """The length of what begins here: an escape, a class of characters, or one."""
    if pattern[place] == "\\":
        return 2
    if pattern[place] != "[":
        return 1
    # A bracket at the beginning of a class is in it.
    inside = re.match(r"\[\^?\]?(?:\\.|[^\]\\])*\]?", pattern[place:], re.DOTALL)
    return inside.end() if inside else 1
