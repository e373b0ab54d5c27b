"""Assigns advantages to single tokens, from all of a step's batch."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.losses import value
from jaxrl_post.rollout import batch as batching
from jaxrl_post.rollout.episode import Group
from jaxrl_post.types import TokenBatch, rows

__all__ = ["credited", "outcome_labels"]

# Fields that only `credit` and an implicit reward model read.
READ_BEFORE = ("prm_logprobs", "labels", "answers", "groups", "token_rewards")


def credited(
    credit: Callable[[TokenBatch], TokenBatch], pieces: Sequence[TokenBatch]
) -> tuple[list[TokenBatch], dict[str, float]]:
    """Computes each token's advantage from all pieces at once.

    Args:
        credit: an algorithm's `credit`, compiled with jit.
        pieces: scored NumPy batches with rows of equal length.

    Returns:
        The pieces after `credit`, and scalar metrics. Fields that only metrics need are
        removed.
    """
    ends = np.cumsum([piece.shape[0] for piece in pieces]).tolist()
    # Masked rows pad the batch to a power of two, so that jit compiles few shapes. They
    # do not change the result.
    empty = (1 << (ends[-1] - 1).bit_length()) - ends[-1]

    def joined(*parts: np.ndarray) -> np.ndarray:
        return np.pad(np.concatenate(parts), ((0, empty), (0, 0)))

    # Credit reads no kept ids, up to 128 a token, no experts and no pictures: they stay
    # on the host.
    unread = "kept", "experts", "pictures"
    plain = [piece.replace(**dict.fromkeys(unread)) for piece in pieces]
    whole = jax.tree.map(np.asarray, credit(jax.tree.map(joined, *plain)))
    mask, metrics = whole.loss_mask, {}
    if whole.values_before is not None:
        metrics["critic/explained_variance"] = float(
            value.explained_variance(
                jnp.asarray(whole.values_before),
                jnp.asarray(whole.returns),
                jnp.asarray(mask),
            )
        )
    metrics["advantage/token_std"] = float(np.std(whole.advantages[mask]))
    if whole.raw_advantages is not None:
        raw = whole.raw_advantages[mask]
        metrics["advantage/raw_mean"] = float(np.mean(raw))
        metrics["advantage/raw_std"] = float(np.std(raw))
        whole = whole.replace(raw_advantages=None)
    if whole.prm_logprobs is not None:
        if whole.token_rewards is not None:
            earned = whole.token_rewards[mask]
            metrics["prm/process_reward"] = float(np.mean(earned))
            metrics["prm/process_reward_std"] = float(np.std(earned))
        whole = whole.replace(**dict.fromkeys(READ_BEFORE))
    spans = zip([0, *ends[:-1]], ends, pieces, strict=True)
    found = [
        rows(whole, begin, end).replace(
            **{name: getattr(piece, name) for name in unread}
        )
        for begin, end, piece in spans
    ]
    return found, metrics


def outcome_labels(groups: Sequence[Group], solved_reward: float | None) -> np.ndarray:
    """Labels of answers for a reward model that learns from outcomes.

    Args:
        groups: of equal size, judged.
        solved_reward: the least reward of a right answer; None if the rewards
            themselves are the labels.

    Returns:
        float32 [groups, samples], in [0, 1]; with players [groups, samples, turns],
        since each player has rewards. 0 for failed episodes.

    Raises:
        ConfigError: a reward is no label.
    """
    rewards = batching.advantages(groups, lambda facts: facts.rewards)
    if solved_reward is not None:
        return (rewards >= solved_reward).astype(np.float32)
    beyond = rewards[(rewards < 0) | (rewards > 1)]
    if beyond.size:
        raise ConfigError(
            "--prm.solved-reward: the outcome of an answer is a label in [0, 1], and "
            f"an answer has the reward {beyond[0]:g}; give the least reward of a right "
            "answer, such as 1"
        )
    return rewards
