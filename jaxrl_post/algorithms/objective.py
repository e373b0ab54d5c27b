"""The contract between an algorithm and a train step, and how one is composed.

An `Algorithm` is two pure functions. `advantages` turns the rewards of groups into one
number a sample, before the batch is packed. `objective` turns the policy's log-probs
and a `TokenBatch` into a loss and metrics; the train step differentiates `loss.sum` on
each microbatch, adds the gradients, and divides by the pooled `loss.count`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.losses import correction, diagnostics, kl
from jaxrl_post.losses.sequences import in_sequence
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array, Bool, Float, Int, TokenBatch

__all__ = [
    "Algorithm",
    "KlEstimator",
    "Objective",
    "PolicyLoss",
    "PolicyTerm",
    "Reduction",
    "compose",
]


class Objective(NamedTuple):
    """What an algorithm computes from a batch.

    Attributes:
        loss: (sum, count), to be minimised; differentiate `sum`, divide by `count`.
        metrics: by name; their gradients are zero.
    """

    loss: Metric
    metrics: dict[str, Metric]


class Algorithm(NamedTuple):
    """A policy-optimisation algorithm as two pure functions.

    Attributes:
        advantages: (rewards [groups, samples], valid [groups, samples]) to advantages
            [groups, samples], 0 where `valid` is False.
        objective: (policy_logprobs [rows, length], batch) to an `Objective`. The
            log-probs are aligned as the batch's are and differentiable.
        needs_reference: whether `objective` reads `batch.reference_logprobs`.
    """

    advantages: Callable[
        [Float[Array, "groups samples"], Bool[Array, "groups samples"]],
        Float[Array, "groups samples"],
    ]
    objective: Callable[[Float[Array, "rows length"], TokenBatch], Objective]
    needs_reference: bool


class PolicyTerm(NamedTuple):
    """What a policy-gradient method makes of the tokens of a batch.

    Attributes:
        loss: float32 [rows, length], to be minimised.
        ratio: float32 [rows, length], policy / proximal as the method defines it.
        clip_fraction_low: fraction of tokens at the method's lower clip.
        clip_fraction_high: fraction of tokens at the method's upper clip.
    """

    loss: Float[Array, "rows length"]
    ratio: Float[Array, "rows length"]
    clip_fraction_low: Metric
    clip_fraction_high: Metric


type PerToken = Float[Array, "rows length"]
type Mask = Bool[Array, "rows length"]
type SegmentIds = Int[Array, "rows length"]

type PolicyLoss = Callable[[PerToken, PerToken, PerToken, Mask, SegmentIds], PolicyTerm]
type Reduction = Callable[[PerToken, Mask, SegmentIds], Metric]
type KlEstimator = Callable[[PerToken, PerToken, Mask], PerToken]


def compose(
    *,
    advantages: Callable[
        [Float[Array, "groups samples"], Bool[Array, "groups samples"]],
        Float[Array, "groups samples"],
    ],
    policy_loss: PolicyLoss,
    reduction: Reduction,
    kl_coefficient: float,
    kl_estimator: KlEstimator,
    importance_cap: float | None,
) -> Algorithm:
    """Builds an algorithm from its parts.

    loss = reduction_t(min(proximal_t / behavior_t, importance_cap) policy_loss_t
                       + kl_coefficient kl_estimator_t)

    Both terms pass through one reduction, so they share one denominator. A batch
    without proximal log-probs gets one update, whose ratio is exactly 1.

    Metrics: policy/ratio, policy/clip_fraction_low, policy/clip_fraction_high,
    policy/kl_to_proximal (KL(proximal || policy)), mismatch/token_mult_prob_error and
    mismatch/kl (KL(behavior || proximal)); with a cap correction/weight (truncated),
    correction/truncated_fraction and correction/ess; and with reference log-probs
    policy/kl_to_reference (KL(policy || reference)). All KLs are k3, in nats a token.

    Args:
        advantages: as `Algorithm.advantages`.
        policy_loss: (policy_logprobs, proximal_logprobs, advantages, mask, segment_ids)
            to a `PolicyTerm`; one of `algorithms.terms`.
        reduction: (values, mask, segment_ids) to a `Metric`; one of `losses.reduce`.
        kl_coefficient: >= 0, weight of the KL to the reference in the loss.
        kl_estimator: (policy_logprobs, reference_logprobs, mask) to values per token;
            `kl.k2`, `kl.k3`, `kl.k3_plus`, or a `functools.partial` of one with clamps.
        importance_cap: > 0, the cap of the token-level truncated importance weights
            that correct the sampler's mismatch; None for no correction.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range, or `kl_estimator` is `kl.k1`.
            The objective raises it when it needs reference log-probs and has none.

    verl's GRPO, for example, is the mean over tokens with clamps in the KL:

    >>> from jaxrl_post.algorithms import terms
    >>> from jaxrl_post.losses import advantages, reduce
    >>> algorithm = compose(
    ...     advantages=advantages.group_normalized,
    ...     policy_loss=terms.clipped_token_ratio(
    ...         clip_low=0.2, clip_high=0.2, dual_clip=3.0
    ...     ),
    ...     reduction=reduce.token_mean,
    ...     kl_coefficient=0.001,
    ...     kl_estimator=partial(kl.k3, max_value=10.0),
    ...     importance_cap=None,
    ... )
    >>> algorithm.needs_reference
    True
    """
    if kl_coefficient < 0:
        raise ValueError(f"kl_coefficient must be >= 0, got {kl_coefficient}")
    _refuse_k1(kl_estimator)

    def objective(
        policy_logprobs: Float[Array, "rows length"], batch: TokenBatch
    ) -> Objective:
        mask = in_sequence(batch.loss_mask, batch.segment_ids)
        current = jax.lax.stop_gradient(policy_logprobs)
        proximal = batch.proximal_logprobs
        proximal = current if proximal is None else proximal
        term = policy_loss(
            policy_logprobs, proximal, batch.advantages, mask, batch.segment_ids
        )
        per_token, metrics = term.loss, _policy_metrics(term, current, proximal, mask)
        metrics |= _mismatch_metrics(proximal, batch.behavior_logprobs, mask)
        if importance_cap is not None:
            weights = correction.token_weights(proximal, batch.behavior_logprobs, mask)
            capped = correction.truncated(weights, cap=importance_cap)
            per_token = capped * per_token
            metrics |= _correction_metrics(
                weights, capped, mask, batch.segment_ids, importance_cap
            )
        if batch.reference_logprobs is not None:
            metrics["policy/kl_to_reference"] = diagnostics.approximate_kl(
                current, batch.reference_logprobs, mask
            )
        if kl_coefficient > 0:
            reference = _require_reference(batch, kl_coefficient)
            penalty = kl_estimator(policy_logprobs, reference, mask)
            per_token = per_token + kl_coefficient * penalty
        loss = reduction(per_token, mask, batch.segment_ids)
        return Objective(loss, jax.tree.map(jax.lax.stop_gradient, metrics))

    algorithm = Algorithm(advantages, objective, kl_coefficient > 0)
    _raise_early(algorithm)
    return algorithm


def _policy_metrics(
    term: PolicyTerm,
    current: Float[Array, "rows length"],
    proximal: Float[Array, "rows length"],
    mask: Bool[Array, "rows length"],
) -> dict[str, Metric]:
    return {
        "policy/ratio": masked(term.ratio, mask),
        "policy/clip_fraction_low": term.clip_fraction_low,
        "policy/clip_fraction_high": term.clip_fraction_high,
        "policy/kl_to_proximal": diagnostics.approximate_kl(proximal, current, mask),
    }


def _mismatch_metrics(
    proximal: Float[Array, "rows length"],
    behavior: Float[Array, "rows length"],
    mask: Bool[Array, "rows length"],
) -> dict[str, Metric]:
    return {
        "mismatch/token_mult_prob_error": diagnostics.token_mult_prob_error(
            proximal, behavior, mask
        ),
        "mismatch/kl": diagnostics.approximate_kl(behavior, proximal, mask),
    }


def _correction_metrics(
    weights: Float[Array, "rows length"],
    capped: Float[Array, "rows length"],
    mask: Bool[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
    cap: float,
) -> dict[str, Metric]:
    return {
        "correction/weight": masked(capped, mask),
        "correction/truncated_fraction": diagnostics.outside_fraction(
            weights, mask, high=cap
        ),
        "correction/ess": diagnostics.effective_sample_size(capped, mask, segment_ids),
    }


def _refuse_k1(estimator: KlEstimator) -> None:
    inner = estimator
    while isinstance(inner, partial):
        inner = inner.func
    if inner is kl.k1:
        raise ValueError(
            "kl_estimator must be one whose gradient is that of a KL (kl.k2, kl.k3 or "
            "kl.k3_plus), got kl.k1: as a loss its expected gradient is zero, so it "
            "would add noise and no pull towards the reference; use kl.k1 as a metric "
            "or as a penalty inside the reward"
        )


def _require_reference(
    batch: TokenBatch, kl_coefficient: float
) -> Float[Array, "rows length"]:
    if batch.reference_logprobs is None:
        raise ValueError(
            "batch.reference_logprobs must be given when kl_coefficient > 0, got None "
            f"with kl_coefficient {kl_coefficient}; score the batch with the reference "
            "policy, or set kl_coefficient to 0"
        )
    return batch.reference_logprobs


def _raise_early(algorithm: Algorithm) -> None:
    """Traces the algorithm on one token, so that bad hyperparameters raise here.

    Each part checks its own when it is called, which would be at the first train step,
    after a model was loaded and a batch sampled. Tracing computes nothing.
    """

    def one_token() -> None:
        zeros, ids = jnp.zeros((1, 1)), jnp.ones((1, 1), jnp.int32)
        batch = TokenBatch(
            tokens=ids,
            positions=ids,
            segment_ids=ids,
            loss_mask=ids > 0,
            advantages=algorithm.advantages(zeros, ids > 0),
            behavior_logprobs=zeros,
            versions=ids,
            reference_logprobs=zeros,
        )
        algorithm.objective(zeros, batch)

    jax.eval_shape(one_token)
