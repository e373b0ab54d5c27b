"""Metrics of the rollouts that a step trains on."""

from collections.abc import Sequence

import numpy as np

from jaxrl_post.rollout.episode import Group

__all__ = ["rollout_metrics"]


def rollout_metrics(
    groups: Sequence[Group], values: np.ndarray, version: int
) -> dict[str, float]:
    """Statistics of the rewards, lengths, staleness and advantages of one step.

    Args:
        groups: the step's groups.
        values: advantages, float32 [groups, samples] or [groups, samples, turns].
        version: version of the parameters that train on the groups.
    """
    episodes = [e for group in groups for e in group.episodes if e.reward is not None]
    rewards = [e.reward for e in episodes if e.reward is not None]
    lengths = [e.num_sampled for e in episodes]
    stopped = [not e.truncated for e in episodes]
    newest = [max(int(t.sampled.versions.max()) for t in e.turns) for e in episodes]
    ages = [version - each for each in newest]
    sampled = [turn.sampled for e in episodes for turn in e.turns]
    masses = np.concatenate([tokens.log_masses for tokens in sampled])
    recorded = np.concatenate([(tokens.kept >= 0).any(axis=1) for tokens in sampled])
    return {
        "reward/trained_mean": float(np.mean(rewards)),
        "rollout/completion_length": float(np.mean(lengths)),
        "rollout/completion_length_max": float(np.max(lengths)),
        "rollout/stopped_fraction": float(np.mean(stopped)),
        "rollout/staleness": float(np.mean(ages)),
        "rollout/kept_mass": float(np.mean(np.exp(masses.astype(np.float64)))),
        # Tokens that are scored among all tokens, though they were not drawn from all.
        "rollout/kept_unrecorded": float(np.mean((masses < 0) & ~recorded)),
        # KL(q || p) of q, the policy p without the tokens that top-k, top-p and min-p
        # cut: E_q[log(p / mass) - log p].
        "mismatch/truncation_kl": abs(float(np.mean(masses.astype(np.float64)))),
        "advantage/mean": float(np.mean(values)),
        "advantage/std": float(np.std(values)),
    }
