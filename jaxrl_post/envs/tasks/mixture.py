"""Several environments as one, each with its share of the training tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from jaxrl_post.envs.env import (
    AgentEnvironment,
    Answer,
    Environment,
    Message,
    NeedsPreparation,
    NeedsTrial,
    NeedsTurns,
    Session,
    Split,
    StatefulEnvironment,
    StatelessEnvironment,
    Step,
    Task,
    TaskSequence,
)
from jaxrl_post.envs.tasks.ranges import require_integer

__all__ = ["AgentMixture", "Part", "StatefulMixture", "StatelessMixture", "mixture"]

# Most training tasks of a mixture: a run reads all of them before it starts.
MOST_TASKS = 100_000


@dataclass(frozen=True)
class Part:
    """An environment of a mixture.

    Args:
        environment: has the tasks and judges the answers.
        weight: of its tasks among the training tasks, relative to the others'.
        name: of its metrics; no other part may have it.

    Raises:
        ValueError: the weight is not positive and finite.
    """

    environment: Environment
    weight: float
    name: str

    def __post_init__(self) -> None:
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(
                f"weight of {self.name!r} must be a number, got {weight!r}"
            )
        if not 0 < weight < math.inf:
            raise ValueError(f"weight of {self.name!r} must be positive, got {weight}")


@dataclass(frozen=True)
class _Mixture:
    """Base of all kinds of mixture; `mixture` makes the kind that is needed."""

    parts: tuple[Part, ...]
    size: int | None = None

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names:
            raise ValueError("a mixture must have at least one environment, got none")
        if len(set(names)) < len(names):
            raise ValueError(
                f"the environments of a mixture must have names of their own, got "
                f"{', '.join(names)}; give them with 'name'"
            )
        size = self.size
        if size is not None:
            require_integer("size", size, len(names), MOST_TASKS)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return "+".join(part.name for part in self.parts)

    def trials(self, split: Split) -> list[tuple[StatelessEnvironment, Task]]:
        """The trials of all environments."""
        parts = [part.environment for part in self.parts]
        each = [part.trials(split) for part in parts if isinstance(part, NeedsTrial)]
        return [trial for trials in each for trial in trials]

    def prepare(self) -> None:
        """Prepares the environments that need it."""
        for part in self.parts:
            if isinstance(part.environment, NeedsPreparation):
                part.environment.prepare()

    def tasks(self, split: Split) -> TaskSequence:
        """The tasks of all environments.

        Args:
            split: "train" has of each environment a share by its weight, and so have
                its first N tasks; "eval" has all tasks of each, in turn.

        Raises:
            ValueError: an environment has no task of this split.
        """
        tasks = [part.environment.tasks(split) for part in self.parts]
        for part, each in zip(self.parts, tasks, strict=True):
            if not len(each):
                raise ValueError(f"{part.name!r} has no {split} tasks")
        if split == "eval":
            return self._in_turn(tasks)
        return self._by_weight(tasks)

    def demonstration(self, task: Task) -> str | Message | None:
        """The demonstration of the task's environment."""
        part, inner = self._inner(task)
        return part.environment.demonstration(inner)

    def _by_weight(self, tasks: Sequence[Sequence[Task]]) -> TaskSequence:
        whole = sum(part.weight for part in self.parts)
        shares = [part.weight / whole for part in self.parts]
        size = self.size
        if size is None:
            # Enough that every environment shows each of its tasks.
            needed = [
                math.ceil(len(each) / share)
                for each, share in zip(tasks, shares, strict=True)
            ]
            size = min(max(needed), MOST_TASKS)
        # Rounded sums, so that the parts are the whole; each has one task or more.
        ends = [round(share * size) for share in accumulate(shares, initial=0.0)]
        for number in range(len(shares)):
            ends[number + 1] = max(ends[number + 1], ends[number] + 1)
        counts = [end - first for first, end in pairwise(ends)]
        # Mixed evenly, so that the first N, from which a preset's tokenizer is made,
        # are of all environments.
        mixed = sorted(
            ((place + 0.5) / count, number, place)
            for number, count in enumerate(counts)
            for place in range(count)
        )

        def make(index: int) -> Task:
            _, number, place = mixed[index]
            count, each = counts[number], tasks[number]
            # If there are more tasks than room, take some at equal distances.
            few = count < len(each)
            inner = each[place * len(each) // count if few else place % len(each)]
            return self._outer(index, number, inner)

        return TaskSequence(ends[-1], make)

    def _in_turn(self, tasks: Sequence[Sequence[Task]]) -> TaskSequence:
        sizes = [len(each) for each in tasks]
        levels = sorted({0, *sizes})

        def make(index: int) -> Task:
            left = index
            for low, high in pairwise(levels):
                # Parts that have a task of this height, one task of each in turn.
                tall = [number for number, size in enumerate(sizes) if size >= high]
                if left < (high - low) * len(tall):
                    row, column = divmod(left, len(tall))
                    number = tall[column]
                    return self._outer(index, number, tasks[number][low + row])
                left -= (high - low) * len(tall)
            raise IndexError(index)

        return TaskSequence(sum(sizes), make)

    def _outer(self, index: int, number: int, inner: Task) -> Task:
        data = {"part": number, "task": inner}
        return replace(inner, id=index, data=data, part=self.parts[number].name)

    def _inner(self, task: Task) -> tuple[Part, Task]:
        return self.parts[task.data["part"]], task.data["task"]


@dataclass(frozen=True)
class StatelessMixture(_Mixture):
    """A mixture of environments that all judge by `step`; from `mixture`."""

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """The answer of the task's environment."""
        part, inner = self._inner(task)
        assert isinstance(part.environment, StatelessEnvironment)
        return part.environment.step(inner, conversation)


@dataclass(frozen=True)
class StatefulMixture(_Mixture):
    """A mixture with environments that have sessions; from `mixture`."""

    def open(self, task: Task) -> Session:
        """A session of the task's environment."""
        part, inner = self._inner(task)
        if isinstance(part.environment, StatefulEnvironment):
            return part.environment.open(inner)
        return _Turns(part.environment, inner)


@dataclass(frozen=True)
class AgentMixture(_Mixture):
    """A mixture of environments of agents; from `mixture`."""

    @property
    def most_calls(self) -> int:
        """The most calls that an episode of any of them may need."""
        environments = [part.environment for part in self.parts]
        needed = [
            each.most_calls for each in environments if isinstance(each, NeedsTurns)
        ]
        return max(needed, default=1)

    def run(self, task: Task, base_url: str) -> Step:
        """Has the agent of the task's environment carry out the episode."""
        part, inner = self._inner(task)
        assert isinstance(part.environment, AgentEnvironment)
        return part.environment.run(inner, base_url)


def mixture(
    parts: Sequence[Part], size: int | None = None
) -> StatelessMixture | StatefulMixture | AgentMixture:
    """Joins environments, each with a share of the training tasks.

    In every N training tasks each environment has N * weight / sum of weights. An epoch
    shows every task of every environment, at most 100,000 in all: a small environment's
    tasks come several times. `Task.part` names the environment of a task, whose
    rewards are measured apart.

    Args:
        parts: the environments.
        size: training tasks in all, at most 100,000; None for enough to show each.

    Raises:
        ValueError: no part, two parts of one name, a size too small, or agents mixed
            with environments that answer turns.

    >>> from jaxrl_post.envs.tasks.arithmetic import Arithmetic
    >>> sums, products = Arithmetic(), Arithmetic(operations="*")
    >>> joined = mixture([Part(sums, 3, "sums"), Part(products, 1, "products")], 8)
    >>> [task.data["part"] for task in joined.tasks("train")]
    [0, 0, 1, 0, 0, 0, 1, 0]
    >>> [task.data["part"] for task in joined.tasks("eval")[:4]]
    [0, 1, 0, 1]
    """
    parts = tuple(parts)
    agents = [p.name for p in parts if isinstance(p.environment, AgentEnvironment)]
    if agents:
        others = [part.name for part in parts if part.name not in agents]
        if others:
            raise ValueError(
                f"{', '.join(map(repr, agents))}: agents call a server of the run, and "
                f"{', '.join(map(repr, others))} answer turns without one, so a "
                "mixture cannot hold both; give each kind a mixture of its own"
            )
        return AgentMixture(parts, size)
    stateless = all(
        isinstance(part.environment, StatelessEnvironment) for part in parts
    )
    return (StatelessMixture if stateless else StatefulMixture)(parts, size)


class _Turns:
    """A session of an environment without any: it keeps the conversation."""

    def __init__(self, environment: Environment, task: Task) -> None:
        assert isinstance(environment, StatelessEnvironment)
        self._environment = environment
        self._task = task
        self._conversation = task.messages

    def step(self, turn: Answer) -> Step:
        self._conversation = (*self._conversation, turn)
        step = self._environment.step(self._task, self._conversation)
        self._conversation = (*self._conversation, *step.messages)
        return step

    def close(self) -> None:
        """Does nothing."""
