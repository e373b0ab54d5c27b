"""Facts about the rollouts that are trained on."""

from collections.abc import Sequence

import numpy as np

from jaxrl_post.rollout.types import Group

__all__ = ["rollout_metrics"]


def rollout_metrics(
    groups: Sequence[Group], values: np.ndarray, version: int
) -> dict[str, float]:
    """Rewards, lengths, ages and advantages of a step's rollouts, as means.

    Args:
        groups: as they were collected.
        values: float32 [groups, samples], their advantages.
        version: of the parameters that train on them.
    """
    rollouts = [r for group in groups for r in group.rollouts if r.reward is not None]
    rewards = [r.reward for r in rollouts if r.reward is not None]
    lengths = [r.num_sampled for r in rollouts]
    stopped = [r.finish_reason != "length" for r in rollouts]
    ages = [version - max(r.versions) for r in rollouts]
    masses = [
        m
        for r in rollouts
        for m, on in zip(r.log_masses, r.loss_mask, strict=True)
        if on
    ]
    return {
        "reward/trained_mean": float(np.mean(rewards)),
        "rollout/completion_length": float(np.mean(lengths)),
        "rollout/completion_length_max": float(np.max(lengths)),
        "rollout/stopped_fraction": float(np.mean(stopped)),
        "rollout/staleness": float(np.mean(ages)),
        "rollout/kept_mass": float(np.mean(np.exp(masses))),
        "advantage/mean": float(np.mean(values)),
        "advantage/std": float(np.std(values)),
    }
