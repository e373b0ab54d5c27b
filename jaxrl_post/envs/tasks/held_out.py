"""Chooses the problems that are held out for evaluation, by a hash of their text."""

import hashlib
from collections.abc import Callable, Iterable

from jaxrl_post.envs.env import Split

__all__ = ["of_split", "split_of"]


def of_split[Row](
    rows: Iterable[Row], split: Split, text: Callable[[Row], str], path: str
) -> list[Row]:
    """The rows of a file that belong to a split.

    Args:
        rows: of the file.
        split: "train" or "eval".
        text: the text of a row's problem.
        path: of the file, for the error message.

    Raises:
        ValueError: none does.

    >>> of_split(["2+2=", "3+3="], "train", str, "sums.jsonl")
    ['2+2=', '3+3=']
    """
    found = [row for row in rows if split_of(text(row)) == split]
    if not found:
        raise ValueError(
            f"{path}: no prompt falls into {split!r} in so small a file; pass "
            "eval_path with rows of its own"
        )
    return found


def split_of(text: str, *, one_in: int = 10) -> Split:
    """The split of a problem; depends only on the text of the problem.

    So adding or reordering rows moves no problem to another split, and copies of a
    problem belong to the same split.

    Args:
        text: text of the problem.
        one_in: one problem in `one_in` is held out.

    >>> split_of("2+2="), split_of("2+2=", one_in=1)
    ('train', 'eval')
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest) % one_in == 0 else "train"
