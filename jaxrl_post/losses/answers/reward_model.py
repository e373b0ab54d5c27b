"""Losses of reward models, and best-of-n choice by their rewards.

Pairs are [*pairs], the steps of a process reward model [*shape], the samples of one
prompt [*groups, samples]. Values where `valid` or the mask is False, NaN included,
reach neither value nor gradient.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.answers.preference import counted_pairs
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = ["best_of_n", "best_of_n_value", "bradley_terry", "process_reward_loss"]


@checked
def bradley_terry(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    target_margin: Float[Array, "*pairs"] | float = 0.0,
    centering: float = 0.0,
) -> Float[Array, "*pairs"]:
    """Negative log-likelihood that the chosen response of a pair is preferred.

    L = -log sigmoid(c - r - target_margin) + centering (c + r)^2

    The first term determines rewards up to a constant per prompt; the second term
    centres them at 0.

    Args:
        chosen: reward c of the chosen response, differentiable.
        rejected: reward r of the rejected response, differentiable.
        target_margin: the amount by which c should exceed r, larger for clearer
            preferences; an array or one number for all.
        centering: >= 0; TRL recommends 0.01.

    Raises:
        ValueError: `centering` is negative.

    References:
        Ouyang et al., InstructGPT, arXiv:2203.02155, eq. 1.
        Touvron et al., Llama 2, arXiv:2307.09288, eq. 2 (margin).
        Eisenstein et al., Helping or Herding?, arXiv:2312.09244 (centering).

    >>> round(bradley_terry(jnp.array([1.0]), jnp.array([1.0])).item(), 6)
    0.693147
    """
    if centering < 0:
        raise ValueError(f"centering must be >= 0, got {centering}")
    chosen, rejected = counted_pairs(chosen, valid), counted_pairs(rejected, valid)
    margins = jnp.broadcast_to(jnp.asarray(target_margin, jnp.float32), chosen.shape)
    margins = jax.lax.stop_gradient(counted_pairs(margins, valid))
    loss = -jax.nn.log_sigmoid(chosen - rejected - margins)
    return counted_pairs(loss + centering * jnp.square(chosen + rejected), valid)


@checked
def process_reward_loss(
    logits: Float[Array, "*shape"],
    labels: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Cross-entropy of a process reward model's verdict on each step.

    L = -y log sigmoid(x) - (1 - y) log sigmoid(-x)

    Args:
        logits: x, the logit that the step is right, differentiable.
        labels: y in [0, 1]: a verdict, or the fraction of continuations that succeed.
        mask: bool, True where a step is judged (at its last token, for example).

    References:
        Lightman et al., Let's Verify Step by Step, arXiv:2305.20050.
        Wang et al., Math-Shepherd, arXiv:2312.08935 (soft labels).

    >>> logits, labels = jnp.array([0.0, 9.0]), jnp.array([0.5, 1.0])
    >>> loss = process_reward_loss(logits, labels, jnp.array([True, False]))
    >>> [round(value, 6) for value in loss.tolist()]
    [0.693147, 0.0]
    """
    x, y = counted(logits, mask), counted(jax.lax.stop_gradient(labels), mask)
    loss = -y * jax.nn.log_sigmoid(x) - (1 - y) * jax.nn.log_sigmoid(-x)
    return counted(loss, mask)


@checked
def best_of_n(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
) -> Int[Array, "*groups"]:
    """Index of each group's best sample; ties go to the first.

    Args:
        rewards: any float dtype; a valid NaN is chosen, so that it stays visible.

    Returns:
        int32 in [0, samples); -1 where a group has no valid sample.

    >>> best_of_n(jnp.array([[1.0, 3.0, 3.0]])).tolist()
    [1]
    """
    if valid is None:
        valid = jnp.ones(rewards.shape, bool)
    kept = jnp.where(valid, rewards.astype(jnp.float32), -jnp.inf)
    best = kept.max(axis=-1, keepdims=True)
    # Invalid slots hold -inf too, so a valid reward of -inf needs the mask.
    index = jnp.argmax(valid & ((kept == best) | jnp.isnan(kept)), axis=-1)
    return jnp.where(valid.any(axis=-1), index, -1).astype(jnp.int32)


@checked
def best_of_n_value(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
    *,
    n: int,
) -> Float[Array, "*groups"]:
    """Unbiased estimate of the expected best reward of n samples, from all N valid.

    E[max] = sum_i C(i - 1, n - 1) / C(N, n) r_(i),  r_(1) <= ... <= r_(N)

    the mean of the maximum over all subsets of n. With rewards of 0 and 1 it is pass@n.

    Args:
        rewards: any float dtype.
        n: in [1, samples].

    Returns:
        float32; 0 where fewer than n samples are valid: no unbiased estimate exists.

    Raises:
        ValueError: `n` is out of its range.

    References:
        Chen et al., Evaluating Large Language Models Trained on Code, arXiv:2107.03374
        (pass@k).
        Hilton and Gao, Measuring Goodhart's law,
        https://openai.com/research/measuring-goodharts-law, 2022 (rewards).

    >>> best_of_n_value(jnp.array([[1.0, 2.0, 4.0, 8.0]]), n=4).tolist()
    [8.0]
    >>> best_of_n_value(jnp.array([[1.0, 2.0, 4.0, 8.0]]), n=1).tolist()
    [3.75]
    """
    samples = rewards.shape[-1]
    if not 1 <= n <= samples:
        raise ValueError(
            f"n must be in [1, {samples}], the number of samples a group, got {n}"
        )
    if valid is None:
        valid = jnp.ones(rewards.shape, bool)
    kept = jnp.where(valid, rewards.astype(jnp.float32), -jnp.inf)
    descending = jnp.flip(jnp.sort(kept, axis=-1), axis=-1)
    count = valid.sum(axis=-1, keepdims=True).astype(jnp.float32)
    # The share of subsets whose best sample is the one after `above` better ones:
    # C(N - 1 - above, n - 1) / C(N, n), as a running product that cannot overflow.
    above = jnp.arange(samples - 1, dtype=jnp.float32)
    left = jnp.maximum(count - 1 - above, 1.0)
    steps = jnp.maximum(count - n - above, 0.0) / left
    first = jnp.where(count >= n, n / jnp.maximum(count, 1.0), 0.0)
    shares = first * jnp.cumprod(
        jnp.concatenate([jnp.ones_like(first), steps], axis=-1), axis=-1
    )
    return (shares * jnp.where(shares > 0, descending, 0.0)).sum(axis=-1)
