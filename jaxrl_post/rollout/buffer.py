"""Groups between sampling and training: how many are sampled, which wait, which train.

sampler  --put-->  Buffer  --take-->  updater
"""

import collections
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.rollout.episode import Group

__all__ = ["Admission", "Buffer"]


@dataclass(frozen=True)
class Admission:
    """Numbers of groups to begin for a step.

    Attributes:
        groups: that a step trains on; > 0.
        spare: groups that are begun in excess and continue in the next step;
            0 to wait for all that were begun.
        draws: most times that a step may begin `groups` groups; more than 1 replaces
            groups that are not worth training on.
    """

    groups: int
    spare: int = 0
    draws: int = 1


@dataclass
class Buffer:
    """Groups that were sampled and judged, first in, first out; in every checkpoint.

    Groups are put and taken in any order of their prompt ids: `prompt_id` is the index
    of a group in the run, and each token has the version that sampled it.

    Attributes:
        admission: how many groups are begun for a step.
        worth_training: whether a group is kept; the others are only counted.

    >>> buffer = Buffer(Admission(groups=2))
    >>> buffer.open()
    >>> buffer.admits(in_flight=0)
    2
    >>> buffer.put([Group(3, ()), Group(4, ())])
    >>> buffer.full, [group.prompt_id for group in buffer.take()], len(buffer)
    (True, [3, 4], 0)
    """

    admission: Admission
    worth_training: Callable[[Group], bool] = lambda group: True
    _groups: collections.deque[Group] = field(
        default_factory=collections.deque, init=False
    )
    # Groups that may still be begun for the present step, and waves of them.
    _budget: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def full(self) -> bool:
        """Whether a step's groups are there."""
        return len(self) >= self.admission.groups

    def open(self) -> None:
        """Begins a step: its groups may be begun."""
        wanted = self.admission
        self._budget = wanted.draws * wanted.groups + wanted.spare

    def admits(self, in_flight: int) -> int:
        """Returns how many groups to begin now, and counts them as begun.

        Without spare groups they are begun in waves, each after the last one has ended.
        A wave that replaces groups has as many as a step, since idle slots cost as much
        as busy ones; what is left over waits for the next step.

        Args:
            in_flight: groups that were begun and have not ended.
        """
        wanted = self.admission
        if wanted.spare:
            count = wanted.groups + wanted.spare - len(self) - in_flight
        elif self.full or in_flight:
            count = 0
        else:
            count = wanted.groups if wanted.draws > 1 else wanted.groups - len(self)
        count = max(0, min(count, self._budget))
        self._budget -= count
        return count

    def put(self, groups: Iterable[Group]) -> None:
        """Appends the groups that are worth training on."""
        self._groups.extend(filter(self.worth_training, groups))

    def take(self) -> list[Group]:
        """Removes and returns the oldest groups, at most `groups` of the admission."""
        count = min(self.admission.groups, len(self))
        return [self._groups.popleft() for _ in range(count)]

    def to_json(self) -> list[dict[str, Any]]:
        """Returns a JSON value for `load`."""
        return [group.to_json() for group in self._groups]

    def load(self, value: Sequence[dict[str, Any]]) -> None:
        """Replaces the groups with the value of `to_json`."""
        self._groups = collections.deque(map(Group.from_json, value))
