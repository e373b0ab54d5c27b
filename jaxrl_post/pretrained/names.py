"""Lists the known names in an error message, the most similar ones first."""

import difflib
from collections.abc import Iterable

__all__ = ["nearest_first"]

# The maximum number of names in one message; similar names are always among them.
MOST = 24


def nearest_first(name: str, known: Iterable[str]) -> str:
    """Lists the known names, starting with those similar to an unknown `name`.

    The comparison ignores case and everything before the last slash of `name`, such as
    an organisation. The other names follow in their own order. A long list is cut and
    ends with the number of names left out.

    >>> nearest_first("Qwen/Qwen3_Moe", ["llama", "qwen2", "qwen3", "qwen3_moe"])
    'qwen3_moe, qwen3, qwen2, llama'
    """
    names = list(known)
    wanted = name.rpartition("/")[2].lower()
    near = difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)
    listed = [*near, *(other for other in names if other not in near)]
    more = len(listed) - MOST
    end = f" and {more} more" if more > 0 else ""
    return ", ".join(listed[:MOST]) + end
