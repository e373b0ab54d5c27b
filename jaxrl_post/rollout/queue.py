"""A queue of groups that were sampled and judged but not yet trained on."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl_post.rollout.episode import Group

__all__ = ["GroupQueue"]


class GroupQueue:
    """A first-in, first-out queue of groups; part of every checkpoint.

    >>> queue = GroupQueue()
    >>> queue.put([Group(3, ()), Group(4, ())])
    >>> [group.prompt_id for group in queue.take(1)], len(queue)
    ([3], 1)
    """

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self._groups = collections.deque(groups)

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, groups: Iterable[Group]) -> None:
        """Appends groups."""
        self._groups.extend(groups)

    def take(self, count: int) -> list[Group]:
        """Removes and returns the oldest groups, at most `count`."""
        return [self._groups.popleft() for _ in range(min(count, len(self)))]

    def to_json(self) -> list[dict[str, Any]]:
        """A JSON value from which `from_json` restores the queue."""
        return [group.to_json() for group in self._groups]

    @classmethod
    def from_json(cls, value: Sequence[dict[str, Any]]) -> "GroupQueue":
        """Restores a queue from the value of `to_json`."""
        return cls(Group.from_json(group) for group in value)
