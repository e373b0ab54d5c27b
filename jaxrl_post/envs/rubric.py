"""Adds a weighted sum of named reward functions to the reward of an environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxrl_post.envs.env import (
    AgentEnvironment,
    Message,
    NeedsPreparation,
    Split,
    StatelessEnvironment,
    Step,
    Task,
)
from jaxrl_post.envs.real_number import real_number

__all__ = ["Criterion", "Rubric", "Score"]


# A reward function: maps a conversation to a finite real number; pure, and must pickle.
type Score = Callable[[Task, tuple[Message, ...]], float]


@dataclass(frozen=True)
class Criterion:
    """A reward function and its weight.

    Args:
        score: the reward function; a function at the top level of a module pickles.
        weight: factor of the function's value; negative for a penalty.

    Raises:
        ValueError: if `weight` is not finite.

    >>> Criterion(lambda task, conversation: 1.0, weight=0.5).weight
    0.5
    """

    score: Score
    weight: float = 1.0

    def __post_init__(self) -> None:
        _require_finite("weight", self.weight)


@dataclass(frozen=True)
class Rubric:
    """Wraps an environment and adds a weighted sum of criteria to its reward.

        reward = own_weight * own + sum_i weight_i * score_i(task, conversation)

    The criteria score whole episodes: they are added only at the step that ends an
    episode. `Step.rewards` holds every term unweighted under its name, and the wrapped
    environment's reward under "own"; at all other steps it holds "own" alone.

    Args:
        environment: the wrapped environment, with the tasks and the reward "own".
        criteria: name -> criterion.
        own_weight: weight of the environment's own reward; 0 drops that reward.

    Raises:
        ValueError: if the environment has sessions or agents, `criteria` is empty or
            has the name "own", or a weight is not finite.

    >>> from jaxrl_post.envs.tasks.arithmetic import Arithmetic
    >>> def length(task, conversation):
    ...     return float(len(conversation[-1].content))
    >>> environment = Rubric(Arithmetic(), {"length": Criterion(length, weight=-0.01)})
    >>> task = environment.tasks("train")[0]
    >>> step = environment.step(task, (Message("assistant", task.reference),))
    >>> step.reward, dict(step.rewards)
    (0.98, {'own': 1.0, 'length': 2.0})
    """

    environment: StatelessEnvironment
    criteria: Mapping[str, Criterion]
    own_weight: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.environment, AgentEnvironment):
            raise ValueError(
                f"environment must not be one of agents, got {self.environment.name}: "
                "an agent judges its own episode, so have its `run` add what the "
                "criteria say to the Step that it returns"
            )
        if not isinstance(self.environment, StatelessEnvironment):
            raise ValueError(
                "environment must be a StatelessEnvironment (with `step`), got "
                f"{type(self.environment).__name__}: have its sessions add the criteria"
            )
        if not self.criteria:
            raise ValueError("criteria must hold at least one criterion, got none")
        if "own" in self.criteria:
            raise ValueError(
                "criteria must not be named 'own', which is the environment's own "
                "reward: rename it"
            )
        _require_finite("own_weight", self.own_weight)

    @property
    def name(self) -> str:
        """A short name for logs."""
        return f"{self.environment.name}+{'+'.join(self.criteria)}"

    def prepare(self) -> None:
        """Prepares the wrapped environment, if it needs preparation."""
        if isinstance(self.environment, NeedsPreparation):
            self.environment.prepare()

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of the wrapped environment.

        Args:
            split: "train" or "eval".
        """
        return self.environment.tasks(split)

    def trials(self, split: Split) -> list[tuple[StatelessEnvironment, Task]]:
        """The first task, for the criteria."""
        return [(self, self.tasks(split)[0])]

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Runs the wrapped environment's step; adds the criteria if the episode ends.

        Args:
            task: the task that the conversation began with.
            conversation: the messages so far; ends with the assistant's turn.

        Raises:
            NumberError: a criterion returned no finite real number.
        """
        step = self.environment.step(task, conversation)
        own = real_number("reward", step.reward)
        reward, rewards = self.own_weight * own, {"own": own}
        for name, criterion in self.criteria.items() if step.done else ():
            score = criterion.score(task, conversation)
            rewards[name] = real_number(f"what criterion {name!r} returns", score)
            reward += criterion.weight * rewards[name]
        return Step(reward, step.done, step.messages, step.metrics, rewards)

    def demonstration(self, task: Task) -> str | Message | None:
        """The demonstration of the wrapped environment."""
        return self.environment.demonstration(task)


def _require_finite(argument: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{argument} must be finite, got {value}")
