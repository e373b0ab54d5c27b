"""Metrics of the rollouts that a step trains on."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_post.rollout.episode import Episode, Group

__all__ = ["failure_of", "rollout_metrics", "sampling_metrics"]

# How an episode fails: `envs.workers.interface.OutcomeKind` of its judgement, or where.
FAILURES = (
    "raised", "unreachable", "timeout", "invalid", "crashed", "ended", "sampler",
    "tools", "reply",
)  # fmt: skip


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
    ended = [e.num_sampled for e in episodes if e.stopped]
    sampled = [turn.sampled for e in episodes for turn in e.turns]
    ages = version - np.concatenate([tokens.versions for tokens in sampled])
    masses = np.concatenate([tokens.log_masses for tokens in sampled])
    recorded = np.concatenate([(tokens.kept >= 0).any(axis=1) for tokens in sampled])
    metrics = {
        "reward/trained_mean": float(np.mean(rewards)),
        "rollout/completion_length": float(np.mean(lengths)),
        "rollout/completion_length_min": float(np.min(lengths)),
        "rollout/completion_length_max": float(np.max(lengths)),
        "rollout/staleness": float(np.mean(ages)),
        "rollout/staleness_max": float(np.max(ages, initial=0)),
        "rollout/kept_mass": float(np.mean(np.exp(masses.astype(np.float64)))),
        # Tokens that are scored among all tokens, though they were not drawn from all;
        # where all were kept, the log of the mass is 0 up to rounding.
        "rollout/kept_unrecorded": float(np.mean((masses < -1e-6) & ~recorded)),
        # KL(q || p) of q, the policy p without the tokens that top-k, top-p and min-p
        # cut: E_q[log(p / mass) - log p].
        "mismatch/truncation_kl": abs(float(np.mean(masses.astype(np.float64)))),
    }
    if ended:
        metrics["rollout/completion_length_ended"] = float(np.mean(ended))
    if values is not None:
        own = values[_exist(groups, values.shape)]
        metrics["advantage/mean"] = float(np.mean(own))
        metrics["advantage/std"] = float(np.std(own))
    return metrics


def _exist(groups: Sequence[Group], shape: tuple[int, ...]) -> np.ndarray:
    """Mask of values [groups, samples] or [groups, samples, turns] that were judged."""
    valid = np.stack([group.valid for group in groups])
    if len(shape) == 2:
        return valid
    counts = np.array([[len(e.turns) for e in group.episodes] for group in groups])
    return valid[..., None] & (np.arange(shape[2]) < counts[..., None])


def sampling_metrics(
    sampled: Sequence[Group],
    has_spread: Callable[[Group], bool],
    parts: Mapping[int, str],
    *,
    turns: bool,
) -> dict[str, float]:
    """Statistics of all groups that were sampled, also of those not trained on.

    Args:
        sampled: groups with at least one episode that did not fail.
        has_spread: whether the algorithm can learn from a group.
        parts: the environment of a mixture that a group's task is of, by prompt id; ""
            without a mixture.
        turns: whether an episode may have several turns.
    """
    episodes = [e for group in sampled for e in group.episodes]
    rewards = [e.reward for e in episodes if e.reward is not None]
    cut = [not e.stopped for e in episodes if e.reward is not None]
    metrics = {
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "rollout/truncated_fraction": float(np.mean(cut)),
        "rollout/failed": float(len(episodes) - len(rewards)),
        "rollout/groups_with_spread": float(
            np.mean([has_spread(group) for group in sampled])
        ),
    }
    failures = Counter(failure_of(e.error) for e in episodes if e.reward is None)
    metrics |= {f"rollout/failed/{k}": float(n) for k, n in failures.items()}
    if turns:
        ends = [episode.finish_reason for episode in episodes]
        metrics["rollout/turns"] = float(np.mean([len(e.turns) for e in episodes]))
        for name in ("turn_limit", "token_limit"):
            metrics[f"rollout/{name}"] = ends.count(name) / len(ends)
    environment = [episode.metrics for episode in episodes]
    metrics |= _means("env", environment) | _counts(environment)
    metrics |= _means("env", _by_part(sampled, parts))
    metrics |= _means("reward", [episode.rewards for episode in episodes])
    metrics |= _means("reward/player", [_by_player(each) for each in episodes])
    greedy = [g.greedy.reward for g in sampled if g.greedy is not None]
    baselines = [reward for reward in greedy if reward is not None]
    if baselines:
        metrics["reward/greedy"] = float(np.mean(baselines))
    return metrics


def _by_part(
    sampled: Sequence[Group], parts: Mapping[int, str]
) -> list[dict[str, float]]:
    """The reward of each episode under the name of its part of a mixture."""
    return [
        {f"{part}/reward": episode.reward}
        for group in sampled
        if (part := parts[group.prompt_id])
        for episode in group.episodes
        if episode.reward is not None
    ]


def _by_player(episode: Episode) -> dict[str, float]:
    """The rewards of an episode's players; empty without players, or if it failed."""
    found = {name: episode.of_player(name).reward for name in episode.last_turns}
    return {name: each for name, each in found.items() if name and each is not None}


def failure_of(error: str) -> str:
    """The kind of failure that `Episode.error` begins with.

    >>> failure_of("timeout: it took 11 s"), failure_of("no turns")
    ('timeout', 'other')
    """
    kind = error.partition(": ")[0]
    return kind if kind in FAILURES else "other"


def _counts(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The number of episodes that have a metric, for those that some lack."""
    counts = Counter(name for each in found for name in each)
    return {
        f"env/{name}/episodes": float(count)
        for name, count in sorted(counts.items())
        if count < len(found)
    }


def _means(prefix: str, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each named value, over the episodes that have it."""
    return {
        f"{prefix}/{name}": float(
            np.mean([each[name] for each in found if name in each])
        )
        for name in sorted({name for each in found for name in each})
    }
