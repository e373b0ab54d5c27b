"""Groups to training sequences."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_post.data import packing
from jaxrl_post.rollout.types import Group, Rollout

__all__ = ["GroupFacts", "advantages", "sequences", "worthless_if_truncated"]


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
        dataclasses.replace(
            group,
            rollouts=tuple(map(judged, group.rollouts)),
            greedy=None if group.greedy is None else judged(group.greedy),
        )
        for group in groups
    ]


@dataclass(frozen=True)
class GroupFacts:
    """What an advantage estimator may read of groups of equal size.

    Attributes:
        rewards: float32 [groups, samples], shaped; 0 where a rollout failed.
        valid: bool [groups, samples], False where it failed.
        lengths: int32 [groups, samples], tokens that the policy produced.
        components: float32 [groups, samples, parts] of the rewards, in the order of
            their names; None where they have no parts.
        greedy: float32 [groups], shaped rewards of the greedy completions; None where
            there are none. A group whose greedy completion failed is not valid.
    """

    rewards: np.ndarray
    valid: np.ndarray
    lengths: np.ndarray
    components: np.ndarray | None
    greedy: np.ndarray | None


def advantages(
    groups: Sequence[Group],
    estimator: Callable[[GroupFacts], np.ndarray],
    shaping: Callable[[np.ndarray], np.ndarray] | None = None,
    parts: Sequence[str] = (),
) -> np.ndarray:
    """Applies a group advantage estimator to the rewards.

    Args:
        groups: of equal size.
        estimator: `GroupFacts` to advantages [groups, samples].
        shaping: what is added to a reward, by the number of tokens that were sampled.
            Here and nowhere before: which groups are worth training on is a matter of
            the rewards as they were judged (`Group.has_spread`).
        parts: names of the components that the estimator reads, if any.

    Returns:
        float32 [groups, samples]; what it says about failed rollouts is not used.
    """
    rewards = np.stack([group.rewards for group in groups])
    lengths = np.stack([group.lengths for group in groups])
    valid = np.stack([group.valid for group in groups])
    greedy = None
    if any(group.greedy is not None for group in groups):
        greedy, judged = _greedy(groups, shaping)
        valid = valid & judged[:, None]
    facts = GroupFacts(
        rewards=rewards if shaping is None else rewards + shaping(lengths),
        valid=valid,
        lengths=lengths,
        components=_components(groups, parts) if parts else None,
        greedy=greedy,
    )
    return np.asarray(estimator(facts), np.float32)


def _greedy(
    groups: Sequence[Group], shaping: Callable[[np.ndarray], np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Shaped rewards of the greedy completions, and which of them could be judged."""
    found = [group.greedy for group in groups]
    rewards = np.array([(r and r.reward) or 0.0 for r in found], np.float32)
    if shaping is not None:
        lengths = np.array([r.num_sampled if r else 0 for r in found], np.int32)
        rewards = rewards + shaping(lengths[:, None])[:, 0]
    return rewards, np.array([r is not None and r.reward is not None for r in found])


def _components(groups: Sequence[Group], parts: Sequence[str]) -> np.ndarray:
    """float32 [groups, samples, parts], 0 where a rollout failed."""
    return np.array(
        [
            [[rollout.rewards.get(name, 0.0) for name in parts] for rollout in rollouts]
            for rollouts in (group.rollouts for group in groups)
        ],
        np.float32,
    )


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
