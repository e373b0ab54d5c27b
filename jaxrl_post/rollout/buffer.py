"""Groups between sampling and training: how many are sampled, which wait, which train.

sampler  --put-->  Buffer  --take-->  updater

With spare groups a step takes the first that end. Without a bound, a group that never
ends soon is trained on when its first tokens are many steps old. `most_steps` bounds
the steps from a group's beginning to its training: a step then waits for a group that
could not be trained on in time otherwise. No group is dropped. That all can be in time
needs `most_steps` >= spare / groups: at most `spare` groups are left when a step has
taken its own, and each later step takes `groups` of them, the oldest first.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
        most_steps: most steps from the one for which a group was begun to the one that
            trains on it; at least `spare` / `groups`. None for no bound.

    Raises:
        ValueError: `most_steps` is too small.
    """

    groups: int
    spare: int = 0
    draws: int = 1
    most_steps: int | None = None

    def __post_init__(self) -> None:
        if self.most_steps is not None and self.most_steps * self.groups < self.spare:
            raise ValueError(
                f"{self.spare} spare groups cannot be trained on within "
                f"{self.most_steps} steps of {self.groups}; raise the number of steps, "
                "or have fewer spare groups"
            )


@dataclass
class Buffer:
    """Groups that were sampled and judged, the oldest first; in every checkpoint.

    Groups are put in any order: `prompt_id` is the index of a group in the run, which
    grows with each group that is begun.

    Attributes:
        admission: how many groups are begun for a step.
        worth_training: whether a group is kept; the others are only counted.

    >>> buffer = Buffer(Admission(groups=2, spare=1, most_steps=1))
    >>> buffer.open(1)
    >>> buffer.admits(in_flight=0)
    3
    >>> buffer.begin([0, 1, 2])
    >>> buffer.put([Group(2, ()), Group(1, ())])
    >>> buffer.complete([0]), [group.prompt_id for group in buffer.take()]
    (True, [1, 2])
    >>> buffer.open(2)
    >>> buffer.begin(range(3, 3 + buffer.admits(in_flight=1)))
    >>> buffer.put([Group(3, ()), Group(4, ())])
    >>> buffer.full, buffer.complete([0])  # Step 3 would be too late for group 0.
    (True, False)
    """

    admission: Admission
    worth_training: Callable[[Group], bool] = lambda group: True
    _groups: list[Group] = field(default_factory=list, init=False)
    # The step for which each group was begun, by prompt id.
    _begun: dict[int, int] = field(default_factory=dict, init=False)
    # The present step, groups that may still be begun for it, and waves of them.
    _number: int = field(default=0, init=False)
    _budget: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def full(self) -> bool:
        """Whether a step's groups are there."""
        return len(self) >= self.admission.groups

    def complete(self, in_flight: Collection[int]) -> bool:
        """Returns whether a step's groups are there, and no other must be waited for.

        Args:
            in_flight: prompt ids of the groups that have not ended.
        """
        wanted = self.admission
        if not self.full or wanted.most_steps is None:
            return self.full
        waiting = [group.prompt_id for group in self._groups[wanted.groups :]]
        # Each later step takes the oldest of those that are left, if they have ended.
        return all(
            self._number + 1 + place // wanted.groups
            <= self._begun.get(prompt_id, 0) + wanted.most_steps
            for place, prompt_id in enumerate(sorted([*waiting, *in_flight]))
        )

    def open(self, number: int) -> None:
        """Begins the step of a number: its groups may be begun."""
        wanted, self._number = self.admission, number
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

    def begin(self, prompt_ids: Iterable[int]) -> None:
        """Tells which groups were begun for the present step."""
        self._begun |= dict.fromkeys(prompt_ids, self._number)

    def put(self, groups: Iterable[Group]) -> None:
        """Adds the groups that are worth training on."""
        for group in groups:
            if self.worth_training(group):
                self._groups.append(group)
            else:
                self._begun.pop(group.prompt_id, None)
        self._groups.sort(key=lambda group: group.prompt_id)

    def take(self) -> list[Group]:
        """Removes and returns the oldest groups, at most `groups` of the admission."""
        count = self.admission.groups
        taken, self._groups = self._groups[:count], self._groups[count:]
        for group in taken:
            self._begun.pop(group.prompt_id, None)
        return taken

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value for `load`."""
        return {
            "groups": [group.to_json() for group in self._groups],
            "begun": [*self._begun.items()],
        }

    def load(self, value: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Replaces the groups with the value of `to_json`."""
        if not isinstance(value, Mapping):
            # Checkpoints of earlier versions have the groups alone. When unfinished
            # groups were begun is not known, so they are waited for.
            value = {"groups": value, "begun": []}
        self._groups = [Group.from_json(each) for each in value["groups"]]
        self._begun = {prompt_id: step for prompt_id, step in value["begun"]}
