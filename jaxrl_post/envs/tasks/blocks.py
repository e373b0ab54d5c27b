"""Finds the fenced block of a response that holds its program, query or JSON."""

import re

__all__ = ["last_block"]

_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.M | re.S)


def last_block(text: str) -> str:
    r"""The content of the last fenced block of a response, or all of it without one.

    >>> last_block("So:\n```python\nprint(1)\n```\nDone.")
    'print(1)\n'
    """
    found = _FENCED.findall(text)
    return found[-1] if found else text
