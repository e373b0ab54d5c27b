"""What rollouts are made of."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxrl_post.sampler.requests import Completion, Request

__all__ = ["Generator", "Group", "Rollout"]


@runtime_checkable
class Generator(Protocol):
    """What the rollout needs of a sampler; its parameters are bound already."""

    @property
    def busy(self) -> bool:
        """Whether requests are waiting or running."""
        ...

    def submit(self, request: Request) -> None:
        """Queues a request."""
        ...

    def step(self) -> list[Completion]:
        """Works for a short, bounded time; returns what has finished."""
        ...


@dataclass(frozen=True)
class Rollout:
    """One episode. The five token sequences are aligned, one entry a token.

    Attributes:
        prompt_id: unique in a run; the samples of one group share it.
        sample_index: within the group.
        task_id: of the environment's task.
        tokens: prompt, the policy's turns and the environment's, as the sampler saw
            them; never re-tokenised.
        loss_mask: True where the policy produced the token.
        logprobs: the sampler's, 0 where the mask is False.
        log_masses: log-mass kept by truncated sampling, 0 where the mask is False.
        versions: of the parameters that sampled the token, -1 elsewhere.
        reward: sum over the turns; None for a rollout that failed.
        error: why it failed; "" otherwise.
        finish_reason: of the last turn.
        prompt_text: the first prompt.
        response_text: the policy's last turn.
        metrics: the environment's.
        rewards: parts of the reward by name, each the sum over the turns, before its
            weight; empty where there is only one.
    """

    prompt_id: int
    sample_index: int
    task_id: int
    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    log_masses: tuple[float, ...]
    versions: tuple[int, ...]
    reward: float | None
    error: str
    finish_reason: str
    prompt_text: str
    response_text: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy produced."""
        return sum(self.loss_mask)

    @property
    def truncated(self) -> bool:
        """Whether its last turn was cut at the most tokens."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, ordered by sample index.

    Attributes:
        prompt_id: of all of them.
        rollouts: the samples.
        greedy: the prompt's greedy completion, a baseline that is not trained on; None
            where nobody asks for it.
    """

    prompt_id: int
    rollouts: tuple[Rollout, ...]
    greedy: Rollout | None = None

    @property
    def rewards(self) -> np.ndarray:
        """float32 [samples]; 0 where a rollout failed."""
        return np.array([r.reward or 0.0 for r in self.rollouts], np.float32)

    @property
    def valid(self) -> np.ndarray:
        """bool [samples]; False where a rollout failed."""
        return np.array([r.reward is not None for r in self.rollouts], np.bool_)

    @property
    def lengths(self) -> np.ndarray:
        """int32 [samples]; tokens that the policy produced."""
        return np.array([r.num_sampled for r in self.rollouts], np.int32)

    @property
    def has_spread(self) -> bool:
        """Whether its rewards, unshaped, differ: without that it teaches nothing."""
        rewards = self.rewards[self.valid]
        return rewards.size > 1 and bool(np.ptp(rewards) > 0)

    def to_json(self) -> dict[str, Any]:
        """A JSON value from which `from_json` restores the group exactly."""
        return {
            "prompt_id": self.prompt_id,
            "rollouts": [dataclasses.asdict(rollout) for rollout in self.rollouts],
            "greedy": None if self.greedy is None else dataclasses.asdict(self.greedy),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Group":
        """Restores what `to_json` made."""

        def rollout(fields: Mapping[str, Any]) -> Rollout:
            values: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in fields.items()
            }
            return Rollout(**values)

        rollouts: Sequence[Rollout] = [rollout(fields) for fields in value["rollouts"]]
        greedy = None if value["greedy"] is None else rollout(value["greedy"])
        return cls(value["prompt_id"], tuple(rollouts), greedy)
