"""Finds the fenced block of a response that holds its program, query or JSON."""

import re

__all__ = ["last_block"]

# A line that begins with a fence, and what else is in it.
_FENCE = re.compile(r"^[ \t]*```([^\n]*)$", re.M)


def last_block(text: str) -> str:
    r"""The content of the last fenced block of a response, or all of it without one.

    A block ends at a fence that stands alone in its line. The time is proportional to
    the length of the text.

    >>> last_block("So:\n```python\nprint(1)\n```\nDone.")
    'print(1)\n'
    """
    found, begin = text, None
    for fence in _FENCE.finditer(text):
        if begin is None:
            begin = fence.end() + 1
        elif not fence[1].strip(" \t"):
            found, begin = text[begin : fence.start()], None
    return found
