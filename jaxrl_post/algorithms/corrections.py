"""Corrections for tokens whose probability differs between sampler and trainer.

Each function returns a `Correction` for `compose`, made from the weight w = proximal /
behavior of a token, or of a sequence (the product of its tokens' weights):

    truncated_tokens, truncated_sequences    min(w, cap)
    icepop, icepop_sequences                 w inside [low, high], else 0
    masked_sequences                         min(w_t, cap), and 0 for sequences whose
                                             geometric mean of w is outside [low, high]
    rejected_tokens, rejected_sequences      min(w_t, cap), and 0 where a divergence is
                                             outside [low, high]

A weight of 0 leaves the token in the loss's denominator. (verl's rejection takes it out
of the mask, and so of the denominator.)

All report the metrics correction/weight, the applied weight;
correction/truncated_fraction, the fraction of tokens whose weight was lowered or set to
0; correction/ess, the effective sample size per sequence; and correction/chi_square of
the raw weights, over tokens, or over sequences for sequence weights.
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_post.algorithms.objective import (
    Corrected,
    Correction,
    KlEstimator,
    Mask,
    PerToken,
    SegmentIds,
)
from jaxrl_post.losses import correction, diagnostics, reduce, rejection
from jaxrl_post.losses.sequences import counted
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array

__all__ = [
    "TRUNCATED",
    "icepop",
    "icepop_sequences",
    "masked_sequences",
    "rejected_sequences",
    "rejected_tokens",
    "truncated_sequences",
    "truncated_tokens",
]

type Weigh = Callable[[PerToken, PerToken, PerToken, Mask, SegmentIds], PerToken]

UNBOUNDED = -float("inf")


def truncated_tokens(*, cap: float = 2.0) -> Correction:
    """Truncated importance sampling, token by token: the default of every algorithm.

    Args:
        cap: > 0.

    References:
        Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL
        Training, https://fengyao.notion.site/off-policy-rl, 2025.

    >>> proximal, behavior = jnp.array([[0.0, -2.0]]), jnp.array([[-1.0, -2.0]])
    >>> ids = jnp.ones((1, 2), jnp.int32)
    >>> truncated_tokens()(proximal, behavior, ids > 0, ids).weights.tolist()
    [[2.0, 1.0]]
    """

    return _of_tokens(lambda raw, *_: correction.truncated(raw, cap=cap))


def truncated_sequences(*, cap: float = 2.0) -> Correction:
    """Truncated importance sampling of whole sequences.

    The weights are unbiased up to the cap, while a token's weight ignores that its
    prefix is the sampler's too. The product's variance grows with the length.

    Args:
        cap: > 0.

    References:
        Liu et al., When Speed Kills Stability: Demystifying RL Collapse from the
        Training-Inference Mismatch, 2025.

    >>> proximal, behavior = jnp.array([[-1.0, -2.0]]), jnp.array([[-2.0, -1.0]])
    >>> ids = jnp.ones((1, 2), jnp.int32)
    >>> truncated_sequences()(proximal, behavior, ids > 0, ids).weights.tolist()
    [[1.0, 1.0]]
    """

    return _of_sequences(lambda raw, *_: correction.truncated(raw, cap=cap))


def icepop(*, low: float = 0.5, high: float = 5.0) -> Correction:
    """IcePop: a token keeps its weight, or gets 0 where the weight is extreme.

    Args:
        low: 0 <= low <= high.
        high: upper bound, inclusive.

    References:
        Ling Team, Every Step Evolves (Ring-1T), arXiv:2510.18855.

    >>> proximal, behavior = jnp.array([[0.0, -2.0]]), jnp.array([[-3.0, -2.0]])
    >>> ids = jnp.ones((1, 2), jnp.int32)
    >>> icepop()(proximal, behavior, ids > 0, ids).weights.tolist()
    [[0.0, 1.0]]
    """

    return _of_tokens(lambda raw, *_: correction.icepop(raw, low=low, high=high))


def icepop_sequences(*, low: float = 0.0, high: float = 3.0) -> Correction:
    """IcePop of whole sequences. The defaults are TRL's ("sequence_mask").

    Args:
        low: 0 <= low <= high.
        high: upper bound, inclusive.

    References:
        TRL, GRPOConfig, https://huggingface.co/docs/trl.

    >>> proximal, behavior = jnp.array([[0.0, -2.0]]), jnp.array([[-3.0, -2.0]])
    >>> ids = jnp.ones((1, 2), jnp.int32)
    >>> icepop_sequences()(proximal, behavior, ids > 0, ids).weights.tolist()
    [[0.0, 0.0]]
    """

    return _of_sequences(lambda raw, *_: correction.icepop(raw, low=low, high=high))


def masked_sequences(*, low: float, high: float, cap: float = 2.0) -> Correction:
    """Truncated token weights, without the sequences whose mean weight is extreme.

    The geometric mean of a sequence's weights does not grow with its length. Usual
    bounds are close to 1, 0.999 and 1.002 for example.

    Args:
        low: 0 <= low <= high, of the geometric mean.
        high: upper bound, inclusive.
        cap: > 0, of the token weights.

    References:
        Liu et al., When Speed Kills Stability: Demystifying RL Collapse from the
        Training-Inference Mismatch, 2025.

    >>> proximal, behavior = jnp.array([[0.0, -2.0]]), jnp.array([[-3.0, -2.0]])
    >>> ids, correct = jnp.ones((1, 2), jnp.int32), masked_sequences(low=0.5, high=2.0)
    >>> correct(proximal, behavior, ids > 0, ids).weights.tolist()
    [[0.0, 0.0]]
    """

    def weigh(raw: PerToken, *arrays: Array) -> PerToken:
        capped = correction.truncated(raw, cap=cap)
        return correction.sequence_masked(capped, *arrays, low=low, high=high)

    return _of_tokens(weigh)


def rejected_tokens(
    *,
    divergence: KlEstimator,
    high: float,
    low: float = UNBOUNDED,
    cap: float = 2.0,
) -> Correction:
    """Truncated token weights, without the tokens whose divergence is extreme.

    Args:
        divergence: of (behavior_logprobs, proximal_logprobs, mask), for example `kl.k1`
            (verl's token_k1), `kl.k2` or `kl.k3`.
        high: upper bound (nats), inclusive.
        low: lower bound (nats), inclusive.
        cap: > 0, of the token weights.

    References:
        Liu et al., When Speed Kills Stability: Demystifying RL Collapse from the
        Training-Inference Mismatch, 2025.

    >>> from jaxrl_post.losses import kl
    >>> proximal, behavior = jnp.array([[-4.0, -2.0]]), jnp.array([[-1.0, -2.0]])
    >>> ids, correct = jnp.ones((1, 2), jnp.int32), rejected_tokens(
    ...     divergence=kl.k2, high=1.0
    ... )
    >>> correct(proximal, behavior, ids > 0, ids).weights.tolist()
    [[0.0, 1.0]]
    """

    def weigh(
        raw: PerToken,
        proximal_logprobs: PerToken,
        behavior_logprobs: PerToken,
        mask: Mask,
        segment_ids: SegmentIds,
    ) -> PerToken:
        del segment_ids
        distance = divergence(behavior_logprobs, proximal_logprobs, mask)
        keep = rejection.reject_tokens(distance, mask, low=low, high=high)
        return jnp.where(mask & ~keep, 0.0, correction.truncated(raw, cap=cap))

    return _of_tokens(weigh)


def rejected_sequences(
    *,
    divergence: KlEstimator,
    statistic: Literal["mean", "sum", "max"],
    high: float,
    low: float = UNBOUNDED,
    cap: float = 2.0,
) -> Correction:
    """Truncated token weights, without the sequences whose divergence is extreme.

    Args:
        divergence: of (behavior_logprobs, proximal_logprobs, mask), for example `kl.k1`
            (verl's seq_mean_k1 and so on), `kl.k2` or `kl.k3`.
        statistic: of a sequence's divergences; see `rejection.reject_sequences`.
        high: upper bound (nats), inclusive.
        low: lower bound (nats), inclusive.
        cap: > 0, of the token weights.

    References:
        Liu et al., When Speed Kills Stability: Demystifying RL Collapse from the
        Training-Inference Mismatch, 2025.

    >>> from jaxrl_post.losses import kl
    >>> proximal, behavior = jnp.array([[-4.0, -2.0]]), jnp.array([[-1.0, -2.0]])
    >>> ids, correct = jnp.ones((1, 2), jnp.int32), rejected_sequences(
    ...     divergence=kl.k2, statistic="max", high=1.0
    ... )
    >>> correct(proximal, behavior, ids > 0, ids).weights.tolist()
    [[0.0, 0.0]]
    """

    def weigh(
        raw: PerToken,
        proximal_logprobs: PerToken,
        behavior_logprobs: PerToken,
        mask: Mask,
        segment_ids: SegmentIds,
    ) -> PerToken:
        distance = divergence(behavior_logprobs, proximal_logprobs, mask)
        keep = rejection.reject_sequences(
            distance, mask, segment_ids, statistic=statistic, low=low, high=high
        )
        return jnp.where(mask & ~keep, 0.0, correction.truncated(raw, cap=cap))

    return _of_tokens(weigh)


def _of_tokens(weigh: Weigh) -> Correction:
    """Builds a correction that weighs tokens by a function of their raw weights."""

    def corrected(
        proximal_logprobs: PerToken,
        behavior_logprobs: PerToken,
        mask: Mask,
        segment_ids: SegmentIds,
    ) -> Corrected:
        logprobs = (proximal_logprobs, behavior_logprobs)
        raw = correction.token_weights(*logprobs, mask)
        weights = weigh(raw, *logprobs, mask, segment_ids)
        chi_square = diagnostics.chi_square(raw, mask)
        metrics = _metrics(raw, weights, mask, segment_ids)
        return Corrected(weights, metrics | {"correction/chi_square": chi_square})

    return corrected


def _of_sequences(weigh: Weigh) -> Correction:
    """Builds a correction that weighs sequences by a function of their raw weights."""

    def corrected(
        proximal_logprobs: PerToken,
        behavior_logprobs: PerToken,
        mask: Mask,
        segment_ids: SegmentIds,
    ) -> Corrected:
        arrays = (proximal_logprobs, behavior_logprobs, mask, segment_ids)
        raw = correction.sequence_weights(*arrays)
        weights = weigh(raw, *arrays)
        excess = jnp.square(counted(raw, mask)) - 1.0
        chi_square = reduce.sequence_mean_of_token_mean(excess, mask, segment_ids)
        metrics = _metrics(raw, weights, mask, segment_ids)
        return Corrected(weights, metrics | {"correction/chi_square": chi_square})

    return corrected


def _metrics(
    raw: PerToken, weights: PerToken, mask: Mask, segment_ids: SegmentIds
) -> dict[str, Metric]:
    # Raw weights are positive, so truncated and dropped weights are below them.
    lowered = (weights < raw).astype(jnp.float32)
    return {
        "correction/weight": masked(weights, mask),
        "correction/truncated_fraction": masked(lowered, mask),
        "correction/ess": diagnostics.effective_sample_size(weights, mask, segment_ids),
    }


TRUNCATED = truncated_tokens(cap=2.0)
