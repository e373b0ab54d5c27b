"""From per-token values to a loss, as (sum, count).

The loss of a batch is the pooled `mean()`; the metrics of microbatches add up to the
metric of the batch, so the loss does not depend on how rows were split. (A mean taken
in each microbatch would.) A sequence counts when at least one of its tokens does, so
rows and segments that only fill space change nothing.
"""

import jax.numpy as jnp

from jaxrl_post.losses.sequences import (
    counted,
    in_sequence,
    sequence_count,
    sequence_sum,
)
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "constant_denominator",
    "sequence_mean_of_token_mean",
    "sequence_mean_of_token_sum",
    "token_mean",
]


def token_mean(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Metric:
    """Mean over all counted tokens: every token weighs the same.

    Args:
        values: per token, any float dtype.
        mask: bool, True where a token counts.
        segment_ids: int in [0, length], or None; padding tokens are not counted.

    Returns:
        (sum over tokens, number of tokens).

    References:
        Yu et al., DAPO, arXiv:2503.14476.

    >>> values, mask = jnp.array([[1.0, 1.0, 4.0]]), jnp.array([[True, True, True]])
    >>> token_mean(values, mask, jnp.array([[1, 1, 2]])).mean().item()
    2.0
    """
    return masked(values, in_sequence(mask, segment_ids))


def sequence_mean_of_token_mean(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Metric:
    """Mean over sequences of each one's token mean: every sequence weighs the same.

    Args:
        values: per token, any float dtype.
        mask: bool, True where a token counts.
        segment_ids: int in [0, length], or None for one sequence a row.

    Returns:
        (sum over sequences of the token mean, number of sequences).

    References:
        Shao et al., DeepSeekMath, arXiv:2402.03300 (GRPO).

    >>> values, mask = jnp.array([[1.0, 1.0, 4.0]]), jnp.array([[True, True, True]])
    >>> sequence_mean_of_token_mean(values, mask, jnp.array([[1, 1, 2]])).mean().item()
    2.5
    """
    mask = in_sequence(mask, segment_ids)
    length = sequence_sum(mask.astype(jnp.float32), mask, segment_ids)
    shares = counted(values, mask) / jnp.maximum(length, 1.0)
    return Metric.of(shares.sum(), sequence_count(mask, segment_ids))


def sequence_mean_of_token_sum(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Metric:
    """Mean over sequences of each one's token sum, the log-likelihood's own weighting.

    Args:
        values: per token, any float dtype.
        mask: bool, True where a token counts.
        segment_ids: int in [0, length], or None for one sequence a row.

    Returns:
        (sum over tokens, number of sequences).

    >>> values, mask = jnp.array([[1.0, 1.0, 4.0]]), jnp.array([[True, True, True]])
    >>> sequence_mean_of_token_sum(values, mask, jnp.array([[1, 1, 2]])).mean().item()
    3.0
    """
    mask = in_sequence(mask, segment_ids)
    return Metric.of(counted(values, mask).sum(), sequence_count(mask, segment_ids))


def constant_denominator(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    denominator: float,
) -> Metric:
    """Mean over sequences of each one's token sum over a constant.

    A sequence's weight does not depend on its length, which removes the preference of
    the token mean for long wrong answers. TRL's constant is the maximum completion
    length; verl's is the padded width unless it is fixed by hand, which makes the
    loss depend on the batch.

    Args:
        values: per token, any float dtype.
        mask: bool, True where a token counts.
        segment_ids: int in [0, length], or None for one sequence a row.
        denominator: > 0, in tokens; the generation budget, for example.

    Returns:
        (sum over tokens / denominator, number of sequences).

    Raises:
        ValueError: `denominator` is not positive.

    References:
        Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783 (Dr. GRPO).

    >>> values, mask = jnp.array([[1.0, 1.0, 4.0]]), jnp.array([[True, True, True]])
    >>> constant_denominator(values, mask, denominator=4.0).mean().item()
    1.5
    """
    if denominator <= 0:
        raise ValueError(f"denominator must be > 0 (tokens), got {denominator}")
    total = sequence_mean_of_token_sum(values, mask, segment_ids)
    return Metric(total.sum / denominator, total.count)
