"""Groups to training sequences."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_post.data import packing
from jaxrl_post.rollout.types import Group, Rollout

__all__ = ["advantages", "sequences", "worthless_if_truncated"]


def worthless_if_truncated(groups: Sequence[Group]) -> list[Group]:
    """The groups with the reward of every answer that was cut at 0, or less.

    An answer that did not end earns nothing, whatever stands in it; what it loses by a
    penalty it still loses.
    """

    def judged(rollout: Rollout) -> Rollout:
        if rollout.reward is None or not rollout.truncated:
            return rollout
        rewards = {name: min(0.0, part) for name, part in rollout.rewards.items()}
        reward = min(0.0, rollout.reward)
        return dataclasses.replace(rollout, reward=reward, rewards=rewards)

    return [
        dataclasses.replace(group, rollouts=tuple(map(judged, group.rollouts)))
        for group in groups
    ]


def advantages(
    groups: Sequence[Group],
    estimator: Callable[..., np.ndarray],
    shaping: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Applies a group advantage estimator to the rewards.

    Args:
        groups: of equal size.
        estimator: an algorithm's `advantages`, (rewards, valid) [groups, samples].
        shaping: what is added to a reward, by the number of tokens that were sampled.
            Here and nowhere before: which groups are worth training on is a matter of
            the rewards as they were judged (`Group.has_spread`).

    Returns:
        float32 [groups, samples]; what it says about failed rollouts is not used.
    """
    rewards = np.stack([group.rewards for group in groups])
    if shaping is not None:
        rewards = rewards + shaping(np.stack([group.lengths for group in groups]))
    valid = np.stack([group.valid for group in groups])
    return np.asarray(estimator(rewards, valid), np.float32)


def sequences(
    groups: Sequence[Group],
    values: np.ndarray,
    *,
    skip_truncated: bool = False,
    mark_truncated: bool = False,
) -> list[packing.Sequence]:
    """Makes one training sequence of every rollout that did not fail.

    Args:
        groups: as for `advantages`.
        values: float32 [groups, samples], the advantage of each rollout; all tokens
            that the policy produced get it.
        skip_truncated: leaves out the answers that were cut (DAPO's overlong filter).
        mark_truncated: has the sequences say which of them were cut.
    """
    made = []
    for group, row in zip(groups, values, strict=True):
        for rollout, advantage in zip(group.rollouts, row, strict=True):
            if rollout.reward is None or (skip_truncated and rollout.truncated):
                continue
            mask = np.asarray(rollout.loss_mask, np.bool_)
            made.append(
                packing.Sequence(
                    tokens=np.asarray(rollout.tokens, np.int32),
                    loss_mask=mask,
                    behavior_logprobs=np.asarray(rollout.logprobs, np.float32),
                    advantages=np.where(mask, advantage, 0).astype(np.float32),
                    versions=np.asarray(rollout.versions, np.int32),
                    truncated=rollout.truncated if mark_truncated else None,
                )
            )
    return made
