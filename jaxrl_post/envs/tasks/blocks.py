"""Finds the part of a response that answers, and the last fenced block in it."""

import re

__all__ = ["after_thoughts", "last_block"]

# A line that begins with a fence, and what else is in it.
_FENCE = re.compile(r"^[ \t]*```([^\n]*)$", re.M)


def last_block(text: str) -> str:
    r"""The content of the last fenced block of a response, or all of it without one.

    A block ends at a fence that stands alone in its line. What stands before the last
    "</think>" is no part of the response. The time is proportional to the length of the
    text.

    >>> last_block("So:\n```python\nprint(1)\n```\nDone.")
    'print(1)\n'
    """
    text = after_thoughts(text)
    found, begin = text, None
    for fence in _FENCE.finditer(text):
        if begin is None:
            begin = fence.end() + 1
        elif not fence[1].strip(" \t"):
            found, begin = text[begin : fence.start()], None
    return found


def after_thoughts(text: str) -> str:
    """The part of a response that answers: it follows the last "</think>", if any.

    >>> after_thoughts("<think>Is it 4?</think>5"), after_thoughts("5")
    ('5', '5')
    """
    return text.rpartition("</think>")[2]
