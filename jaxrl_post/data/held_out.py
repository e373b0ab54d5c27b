"""Holds out examples for evaluation, by a hash of their prompts."""

import hashlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["Grouped", "is_held_out", "one_a_group", "split"]


@runtime_checkable
class Grouped(Protocol):
    """An example that belongs to the group of its prompt."""

    @property
    def group(self) -> str:
        """The prompt's text."""
        ...


def split[Item: Grouped](
    examples: Sequence[Item], *, eval_share: float = 0.1
) -> tuple[list[Item], list[Item]]:
    """Holds out a share of the groups, by a hash of their texts.

    The split of a group depends only on its text and `eval_share`: it stays the same
    if rows are added or reordered, and a larger share keeps held-out groups held out.

    Args:
        examples: in any order.
        eval_share: expected share of the groups that is held out, in (0, 1).

    Returns:
        (train, eval), each in the order of `examples`.

    Raises:
        ValueError: if `eval_share` is outside (0, 1), or a split would be empty.

    >>> from jaxrl_post.data.preferences import Preference
    >>> from jaxrl_post.messages import Message
    >>> def sums(a):
    ...     return Preference((Message("user", f"{a}+1="),), f"{a + 1}", "0", f"{a}+1=")
    >>> train, held_out = split([sums(a) for a in range(100)])
    >>> len(train), len(held_out)
    (94, 6)
    """
    if not 0 < eval_share < 1:
        raise ValueError(f"eval_share must be in (0, 1), got {eval_share}")
    train: list[Item] = []
    held_out: list[Item] = []
    for example in examples:
        side = held_out if is_held_out(example.group, eval_share) else train
        side.append(example)
    for side, found in (("train", train), ("eval", held_out)):
        if not found:
            groups = len({example.group for example in examples})
            raise ValueError(
                f"examples must fall into both splits, got {groups} prompts, none of "
                f"them in {side!r}; give more prompts, or another eval_share than "
                f"{eval_share}"
            )
    return train, held_out


def is_held_out(group: str, eval_share: float) -> bool:
    """Whether a group is held out, by a hash of its text."""
    digest = hashlib.blake2b(group.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < eval_share * 2**64


def one_a_group[Item: Grouped](examples: Sequence[Item]) -> list[Item]:
    """Picks one example of each group, by a hash of the group's text.

    Examples of the same prompt are not independent, so a confidence interval over all
    would be too narrow. The first of each would be biased, as data sets are sorted.

    Args:
        examples: in any order.

    Returns:
        One example per group, in the order in which the groups first appear.

    >>> from jaxrl_post.data.preferences import JudgedAnswer
    >>> from jaxrl_post.messages import Message
    >>> prompt = (Message("user", "2+2="),)
    >>> answers = [JudgedAnswer(prompt, n, n == "4", "2+2=") for n in "3456"]
    >>> len(one_a_group(answers))
    1
    """
    groups: dict[str, list[Item]] = {}
    for each in examples:
        groups.setdefault(each.group, []).append(each)
    return [group[_digest(text) % len(group)] for text, group in groups.items()]


def _digest(text: str) -> int:
    # The hash of the split would be biased: it is small for all held-out groups.
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest)
