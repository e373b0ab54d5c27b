"""Metrics of the rollouts that a step trains on."""

from collections.abc import Sequence

import numpy as np

from jaxrl_post.rollout.episode import Group

__all__ = ["rollout_metrics"]


def rollout_metrics(
    groups: Sequence[Group], values: np.ndarray | None, version: int
) -> dict[str, float]:
    """Statistics of the rewards, lengths, staleness and advantages of one step.

    Args:
        groups: the step's groups.
        values: advantages, float32 [groups, samples] or [groups, samples, turns]; None
            if they are made later, of tokens. Values of failed episodes and of turns
            that do not exist are left out.
        version: version of the parameters that train on the groups.
    """
    episodes = [e for group in groups for e in group.episodes if e.reward is not None]
    rewards = [e.reward for e in episodes if e.reward is not None]
    lengths = [e.num_sampled for e in episodes]
    stopped = [e.stopped for e in episodes]
    sampled = [turn.sampled for e in episodes for turn in e.turns]
    ages = version - np.concatenate([tokens.versions for tokens in sampled])
    masses = np.concatenate([tokens.log_masses for tokens in sampled])
    recorded = np.concatenate([(tokens.kept >= 0).any(axis=1) for tokens in sampled])
    metrics = {
        "reward/trained_mean": float(np.mean(rewards)),
        "rollout/completion_length": float(np.mean(lengths)),
        "rollout/completion_length_max": float(np.max(lengths)),
        "rollout/stopped_fraction": float(np.mean(stopped)),
        "rollout/staleness": float(np.mean(ages)),
        "rollout/kept_mass": float(np.mean(np.exp(masses.astype(np.float64)))),
        # Tokens that are scored among all tokens, though they were not drawn from all;
        # where all were kept, the log of the mass is 0 up to rounding.
        "rollout/kept_unrecorded": float(np.mean((masses < -1e-6) & ~recorded)),
        # KL(q || p) of q, the policy p without the tokens that top-k, top-p and min-p
        # cut: E_q[log(p / mass) - log p].
        "mismatch/truncation_kl": abs(float(np.mean(masses.astype(np.float64)))),
    }
    if values is not None:
        own = values[_exist(groups, values.shape)]
        metrics["advantage/mean"] = float(np.mean(own))
        metrics["advantage/std"] = float(np.std(own))
    return metrics


def _exist(groups: Sequence[Group], shape: tuple[int, ...]) -> np.ndarray:
    """Which values [groups, samples] or [groups, samples, turns] are of a judgement."""
    valid = np.stack([group.valid for group in groups])
    if len(shape) == 2:
        return valid
    counts = np.array([[len(e.turns) for e in group.episodes] for group in groups])
    return valid[..., None] & (np.arange(shape[2]) < counts[..., None])
