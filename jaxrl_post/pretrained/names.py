"""Names as errors list them: the likeliest first."""

import difflib
from collections.abc import Iterable

__all__ = ["nearest_first"]

# Of names in one message; the nearest are always among them.
MOST = 24


def nearest_first(name: str, known: Iterable[str]) -> str:
    """Lists the known names, those that resemble an unknown one first.

    Neither what stands before the last slash of `name`, such as an organisation, nor
    the case of letters counts. The rest follow in their own order. The end of a long
    list is counted, not listed.

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
