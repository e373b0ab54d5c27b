"""A weighted sum of reward functions, each of them reported by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxrl_post.envs.env import (
    Message,
    NeedsPreparation,
    Split,
    StatelessEnvironment,
    Step,
    Task,
)

__all__ = ["Criterion", "Rubric", "Score"]


# A reward function: a finite number for a conversation. Pure, and it must pickle.
type Score = Callable[[Task, tuple[Message, ...]], float]


@dataclass(frozen=True)
class Criterion:
    """A reward function and what it counts for.

    Args:
        score: the reward function; a function at the top level of a module pickles.
        weight: what its value is multiplied by; negative for a penalty.

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
    """An environment whose reward is its own plus a weighted sum of criteria.

        reward = own_weight * own + sum_i weight_i * score_i(task, conversation)

    The criteria judge whole episodes: they are added to the step that ends one. Every
    term is reported unweighted in `Step.rewards`, under its name, the environment's own
    reward under "own"; of a turn that ends no episode that is all.

    Args:
        environment: where tasks, turns and the first reward come from.
        criteria: name -> criterion.
        own_weight: what the environment's own reward is multiplied by; 0 replaces it.

    Raises:
        ValueError: if the environment has sessions, there is no criterion, one is named
            "own", or a weight is not finite.

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
        """Prepares the environment underneath, where it needs that."""
        if isinstance(self.environment, NeedsPreparation):
            self.environment.prepare()

    def tasks(self, split: Split) -> Sequence[Task]:
        """The environment's own tasks.

        Args:
            split: "train" or "eval".
        """
        return self.environment.tasks(split)

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        """Takes the environment's step and, if it ends the episode, adds the criteria.

        Args:
            task: the task that the conversation began with.
            conversation: the messages so far; ends with the assistant's turn.
        """
        step = self.environment.step(task, conversation)
        reward = self.own_weight * step.reward
        rewards = {"own": step.reward}
        for name, criterion in self.criteria.items() if step.done else ():
            rewards[name] = criterion.score(task, conversation)
            reward += criterion.weight * rewards[name]
        return Step(reward, step.done, step.messages, step.metrics, rewards)

    def demonstration(self, task: Task) -> str | None:
        """The environment's own demonstration."""
        return self.environment.demonstration(task)


def _require_finite(argument: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{argument} must be finite, got {value}")
