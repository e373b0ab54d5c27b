"""Which examples are never trained on, by the prompts that they have."""

import hashlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["Grouped", "is_held_out", "one_a_group", "split"]


@runtime_checkable
class Grouped(Protocol):
    """Something of a prompt."""

    @property
    def group(self) -> str:
        """The prompt's text."""
        ...


def split[Item: Grouped](
    examples: Sequence[Item], *, eval_share: float = 0.1
) -> tuple[list[Item], list[Item]]:
    """Holds out a share of the groups, by a hash of each.

    A group's side depends on nothing but its text and `eval_share`: it stays when rows
    are added or reordered, and a larger share holds out what a smaller one did.

    Args:
        examples: in any order.
        eval_share: expected share of the groups that is held out, in (0, 1).

    Returns:
        (train, eval), each in the order of `examples`.

    Raises:
        ValueError: if `eval_share` is outside (0, 1), or a side would be empty.

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
    """Whether a group is in the share that is held out, by a hash of its text."""
    digest = hashlib.blake2b(group.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < eval_share * 2**64


def one_a_group[Item: Grouped](examples: Sequence[Item]) -> list[Item]:
    """One example of each group, which of them by a hash of the group's text.

    Examples that share a prompt are not independent, and an interval of their accuracy
    would be too narrow. Not the first of each: data sets sort them.

    Args:
        examples: in any order.

    Returns:
        In the order in which the groups first appear.

    >>> from jaxrl_post.data.preferences import Judged
    >>> from jaxrl_post.messages import Message
    >>> prompt = (Message("user", "2+2="),)
    >>> answers = [Judged(prompt, answer, answer == "4", "2+2=") for answer in "3456"]
    >>> len(one_a_group(answers))
    1
    """
    groups: dict[str, list[Item]] = {}
    for each in examples:
        groups.setdefault(each.group, []).append(each)
    return [group[_digest(text) % len(group)] for text, group in groups.items()]


def _digest(text: str) -> int:
    # Not the split's hash, which is small for all that is held out.
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest)
