"""Reduces per-token values to a loss, as (sum, count).

The loss of a batch is the pooled `mean()`; the metrics of microbatches add up to the
metric of the batch, so the loss does not depend on how rows were split. (A mean per
microbatch would depend on the split, as TRL's bnpo does.) A sequence counts if at least
one of its tokens counts, so rows and segments of padding change nothing.

    token_mean                     verl token-mean, TRL dapo, NeMo RL's token level
    sequence_mean_of_token_mean    verl seq-mean-token-mean, TRL grpo, NeMo RL's
                                   sequence level
    sequence_mean_of_token_sum     verl seq-mean-token-sum, TRL luspo
    constant_denominator           verl seq-mean-token-sum-norm, TRL dr_grpo
    prompt_mean                    prime-rl prompt
    token_sum                      verl token-sum, Tinker

TRL's sequence means, and verl's when given `global_batch_size`, divide by all
sequences, even those without a counted token; use `with_denominator` for that.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
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
    "prompt_mean",
    "prompt_token_counts",
    "sequence_mean_of_token_mean",
    "sequence_mean_of_token_sum",
    "token_mean",
    "token_sum",
    "with_denominator",
]


@checked
def token_mean(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Metric:
    """Mean over all counted tokens: every token weighs the same.

    Args:
        values: per token, any float dtype.
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


@checked
def sequence_mean_of_token_mean(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Metric:
    """Mean over sequences of each one's token mean: every sequence weighs the same.

    Args:
        values: per token, any float dtype.

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


@checked
def sequence_mean_of_token_sum(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Metric:
    """Mean over sequences of each one's token sum, as in a log-likelihood.

    Args:
        values: per token, any float dtype.

    Returns:
        (sum over tokens, number of sequences).

    >>> values, mask = jnp.array([[1.0, 1.0, 4.0]]), jnp.array([[True, True, True]])
    >>> sequence_mean_of_token_sum(values, mask, jnp.array([[1, 1, 2]])).mean().item()
    3.0
    """
    mask = in_sequence(mask, segment_ids)
    return Metric.of(counted(values, mask).sum(), sequence_count(mask, segment_ids))


@checked
def constant_denominator(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    denominator: float,
) -> Metric:
    """Mean over sequences of each one's token sum over a constant.

    The denominator does not depend on the sequence's length, which removes the
    preference of a sequence's token mean for long wrong answers. TRL's constant is the
    maximum completion length; verl's default is the padded width, which makes the loss
    depend on the batch.

    Args:
        values: per token, any float dtype.
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


@checked
def prompt_mean(
    values: Float[Array, "*batch length"],
    prompt_tokens: Int[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Metric:
    """Mean over prompts of the token mean of each one's samples.

    Every prompt weighs the same, for any number and length of its samples; within
    a prompt every token weighs the same. DAPO and CISPO print this formula, with the
    group's summed length inside the expectation over prompts; code uses `token_mean`.

    Each token adds 1 / prompt_tokens to the count, so a prompt adds 1 in all, and may
    be split over microbatches and devices.

    Args:
        values: per token, any float dtype.
        prompt_tokens: number of counted tokens of the token's prompt in the whole
            batch, >= 1 where the mask is True; from `prompt_token_counts`.
        segment_ids: int in [0, length], or None; padding tokens are not counted.

    Returns:
        (sum over tokens of value / prompt_tokens, number of prompts).

    References:
        Yu et al., DAPO, arXiv:2503.14476.
        Khatri et al., The Art of Scaling Reinforcement Learning Compute for LLMs,
        arXiv:2510.13786 (prompt, sequence and token averages compared).

    >>> values, mask = jnp.array([[1.0, 1.0], [1.0, 5.0]]), jnp.ones((2, 2), bool)
    >>> prompts = jnp.array([[0, 0], [0, 1]])
    >>> counts = prompt_token_counts(prompts, mask, num_prompts=2)
    >>> prompt_mean(values, counts, mask).mean().item()
    3.0
    """
    mask = in_sequence(mask, segment_ids)
    share = counted(1.0 / prompt_tokens.astype(jnp.float32), mask)
    return Metric((counted(values, mask) * share).sum(), share.sum())


@checked
def prompt_token_counts(
    prompt_ids: Int[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    num_prompts: int,
) -> Int[Array, "*batch length"]:
    """Gives every token the number of counted tokens of its prompt, for `prompt_mean`.

    Args:
        prompt_ids: int in [0, num_prompts), of the whole batch, before it is split.
        segment_ids: int in [0, length], or None; padding tokens are not counted.
        num_prompts: >= 1.

    Returns:
        int32 of the same shape.

    Raises:
        ValueError: `num_prompts` is less than 1.

    >>> mask = jnp.array([[True, True], [True, False]])
    >>> prompt_token_counts(jnp.array([[0, 0], [0, 1]]), mask, num_prompts=2).tolist()
    [[3, 3], [3, 0]]
    """
    if num_prompts < 1:
        raise ValueError(f"num_prompts must be >= 1, got {num_prompts}")
    counts = jax.ops.segment_sum(
        in_sequence(mask, segment_ids).astype(jnp.int32).ravel(),
        prompt_ids.ravel(),
        num_segments=num_prompts,
    )
    return counts[prompt_ids]


@checked
def token_sum(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    scale: float = 1.0,
    parts: int = 1,
) -> Metric:
    """Sum over all counted tokens, without a denominator: larger batches weigh more.

    The pooled count is 1: each of a batch's `parts` counts 1 / parts. verl sets `scale`
    to the number of data-parallel ranks, because it averages gradients over ranks; here
    gradients are summed, so the scale is 1.

    Args:
        values: per token, any float dtype.
        segment_ids: int in [0, length], or None; padding tokens are not counted.
        scale: factor of the sum.
        parts: >= 1; number of parts of the batch (microbatches, shards) whose metrics
            are added up.

    Returns:
        (scale times the sum over tokens, 1 / parts).

    Raises:
        ValueError: `parts` is less than 1.

    >>> values, mask = jnp.array([[1.0, 1.0, 4.0]]), jnp.array([[True, True, True]])
    >>> token_sum(values, mask).mean().item()
    6.0
    >>> (token_sum(values, mask, parts=2) + token_sum(values, mask, parts=2)).mean()
    Array(12., dtype=float32)
    """
    total = token_mean(values, mask, segment_ids)
    return with_denominator(Metric(scale * total.sum, total.count), 1.0, parts=parts)


@checked
def with_denominator(
    metric: Metric,
    denominator: Float[Array, ""] | Int[Array, ""] | float,
    *,
    parts: int = 1,
) -> Metric:
    """Replaces a metric's count by a denominator that is known in advance.

    Use it if the denominator includes items that are not summed: sequences that
    overlong filtering emptied, for example, or tokens that a rejection removed.

    Args:
        metric: from one of the reductions.
        denominator: > 0, of the whole batch; an array is not checked.
        parts: >= 1; number of parts of the batch (microbatches, shards) whose metrics
            are added up.

    Returns:
        (the metric's sum, denominator / parts).

    Raises:
        ValueError: `denominator` is a number and not positive, or `parts` is less
            than 1.

    >>> with_denominator(Metric.of(6.0, 3.0), 4.0).mean().item()
    1.5
    """
    if isinstance(denominator, int | float) and not denominator > 0:
        raise ValueError(f"denominator must be > 0, got {denominator}")
    if parts < 1:
        raise ValueError(f"parts must be >= 1, got {parts}")
    return Metric(metric.sum, jnp.asarray(denominator, jnp.float32) / parts)
