"""Metrics of a policy's training; each is a `Metric`, exact under accumulation.

Their gradients mean nothing: pass arrays under stop-gradient.
"""

import jax.numpy as jnp

from jaxrl_post.losses import kl
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.ratios import token_log_ratio, token_ratio
from jaxrl_post.losses.sequences import (
    counted,
    in_sequence,
    sequence_count,
    sequence_sum,
)
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "approximate_kl",
    "chi_square",
    "clip_fraction_high",
    "clip_fraction_low",
    "effective_sample_size",
    "outside_fraction",
    "sampled_entropy",
    "token_mult_prob_error",
]


@checked
def token_mult_prob_error(
    proximal_logprobs: Float[Array, "*shape"],
    behavior_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Metric:
    """Mean factor by which the trainer's and the sampler's probabilities differ.

    mean_t(exp(|log proximal_t - log behavior_t|)); exactly 1 where they agree. Errors
    in opposite directions do not cancel, as they do in a mean ratio.

    Returns:
        (sum over tokens, number of tokens); a token contributes at most e^20.

    References:
        NeMo RL, metric of the same name, https://docs.nvidia.com/nemo/rl.

    >>> same = jnp.array([-1.0, -2.0])
    >>> token_mult_prob_error(same, same, jnp.array([True, True])).mean().item()
    1.0
    """
    log_ratio = token_log_ratio(proximal_logprobs, behavior_logprobs, mask)
    return masked(jnp.exp(jnp.abs(log_ratio)), mask)


@checked
def approximate_kl(
    sampled_logprobs: Float[Array, "*shape"],
    other_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Metric:
    """Estimate of KL(sampled || other) per token, by `kl.k3`.

    Args:
        sampled_logprobs: log-probs (nats) under the policy that drew the tokens.
        other_logprobs: log-probs (nats) of the same tokens under another policy.

    Returns:
        (sum over tokens, number of tokens), in nats.

    >>> same = jnp.array([-1.0, -2.0])
    >>> approximate_kl(same, same, jnp.array([True, True])).mean().item()
    0.0
    """
    return masked(kl.k3(sampled_logprobs, other_logprobs, mask), mask)


@checked
def clip_fraction_low(
    ratio: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    clip_low: float,
) -> Metric:
    """Fraction of tokens whose gradient the lower clip removes.

    These are the tokens with A_t < 0 and r_t < 1 - clip_low.

    Args:
        ratio: policy / proximal, per token.

    Returns:
        (number of such tokens, number of tokens).

    >>> ratio, advantages = jnp.array([0.5, 0.5]), jnp.array([-1.0, 1.0])
    >>> mask = jnp.array([True, True])
    >>> clip_fraction_low(ratio, advantages, mask, clip_low=0.2).mean().item()
    0.5
    """
    ratio = ratio.astype(jnp.float32)
    return _fraction((advantages < 0) & (ratio < 1 - clip_low), mask)


@checked
def clip_fraction_high(
    ratio: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    clip_high: float,
) -> Metric:
    """Fraction of tokens whose gradient the upper clip removes.

    These are the tokens with A_t > 0 and r_t > 1 + clip_high.

    Args:
        ratio: policy / proximal, per token.

    Returns:
        (number of such tokens, number of tokens).

    >>> ratio, advantages = jnp.array([1.5, 1.5]), jnp.array([-1.0, 1.0])
    >>> mask = jnp.array([True, True])
    >>> clip_fraction_high(ratio, advantages, mask, clip_high=0.2).mean().item()
    0.5
    """
    ratio = ratio.astype(jnp.float32)
    return _fraction((advantages > 0) & (ratio > 1 + clip_high), mask)


@checked
def outside_fraction(
    values: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    low: float = 0.0,
    high: float = float("inf"),
) -> Metric:
    """Fraction of counted values that lie outside [low, high].

    Args:
        values: ratios or weights, for example.
        low: lower bound, inclusive.
        high: upper bound, inclusive.

    Returns:
        (number of values outside, number of values).

    >>> weights, mask = jnp.array([0.5, 3.0]), jnp.array([True, True])
    >>> outside_fraction(weights, mask, high=2.0).mean().item()
    0.5
    """
    values = values.astype(jnp.float32)
    return _fraction((values < low) | (values > high), mask)


@checked
def effective_sample_size(
    weights: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Metric:
    """Kish's effective sample size of a sequence's n weights, as a fraction of n.

    (sum_t w_t)^2 / (n sum_t w_t^2), averaged over the sequences: 1 for equal weights,
    1/n when one token has all the weight, 0 when all are 0. It is computed per sequence
    because a batch's value is not a sum over microbatches, and microbatches never split
    a sequence.

    Args:
        weights: per token, >= 0.

    Returns:
        (sum over sequences, number of sequences).

    References:
        Kish, Survey Sampling, 1965.

    >>> weights, mask = jnp.array([1.0, 0.0, 9.0]), jnp.array([True, True, False])
    >>> effective_sample_size(weights, mask).mean().item()
    0.5
    """
    mask = in_sequence(mask, segment_ids)
    ones = mask.astype(jnp.float32)
    total = sequence_sum(weights, mask, segment_ids)
    squares = sequence_sum(jnp.square(counted(weights, mask)), mask, segment_ids)
    length = jnp.maximum(sequence_sum(ones, mask, segment_ids), 1.0)
    fraction = jnp.square(total) / jnp.where(squares > 0, length * squares, 1.0)
    # Every token of a sequence holds the sequence's fraction: count it once.
    share = counted(fraction / length, mask)
    return Metric.of(share.sum(), sequence_count(mask, segment_ids))


@checked
def chi_square(weights: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Metric:
    """Estimate of chi^2(proximal || behavior), the variance of importance weights.

    chi^2(p || q) = E_q[(p / q)^2] - 1,  estimated by mean_t(w_t^2 - 1)

    Pass raw weights: truncation and rejection make the value too small. verl's
    chi2_token is this function of `correction.token_weights`; its chi2_seq, a mean over
    sequences, is `reduce.sequence_mean_of_token_mean` of w^2 - 1 for
    `correction.sequence_weights`.

    Args:
        weights: proximal / behavior, of tokens the behavior policy sampled.

    Returns:
        (sum over tokens, number of tokens); >= 0 in expectation only.

    >>> chi_square(jnp.array([2.0, 0.0, 9.0]), jnp.array([True, True, False])).mean()
    Array(1., dtype=float32)
    """
    return masked(jnp.square(counted(weights, mask)) - 1.0, mask)


@checked
def sampled_entropy(
    policy_logprobs: Float[Array, "*shape"],
    behavior_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Metric:
    """Estimate of the policy's entropy from the sampled tokens.

    H = E_policy[-log p] = E_behavior[-(p_t / behavior_t) log p_t]

    Returns:
        (sum over tokens, number of tokens), in nats.

    >>> p = jnp.array([-0.5, -1.5])
    >>> sampled_entropy(p, p, jnp.array([True, True])).mean().item()
    1.0
    """
    weights = token_ratio(policy_logprobs, behavior_logprobs, mask)
    return masked(-weights * counted(policy_logprobs, mask), mask)


def _fraction(event: Bool[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Metric:
    return masked(event.astype(jnp.float32), mask)
