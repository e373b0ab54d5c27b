"""The contract between an algorithm and a train step, and how one is composed.

An `Algorithm` is a few pure functions. `advantages` turns the rewards of groups into
one number a sample, before the batch is packed. `credit`, where there is one, turns
those numbers into one a token, once the batch is packed and scored. `objective` turns
the model's predictions and a `TokenBatch` into a loss and metrics; the train step
differentiates `loss.sum` on each microbatch, adds the gradients, and divides by the
pooled `loss.count`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.losses import diagnostics, entropy, kl
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import in_sequence
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array, Bool, Float, Int, TokenBatch

__all__ = [
    "Algorithm",
    "Corrected",
    "Correction",
    "Divergence",
    "KlEstimator",
    "Mask",
    "Objective",
    "PerToken",
    "PolicyLoss",
    "PolicyTerm",
    "Predictions",
    "Reduction",
    "SegmentIds",
    "TokenChoice",
    "compose",
    "raise_early",
    "require_logprobs",
]


type Divergence = Callable[
    [Float[Array, "*shape vocab"], Float[Array, "*shape vocab"], Bool[Array, "*shape"]],
    Float[Array, "*shape"],
]


class Predictions(NamedTuple):
    """What a model says about the tokens of a batch, differentiable; [rows, length].

    Attributes:
        logprobs: float32 log-probs (nats) of the tokens where the loss mask is True, 0
            elsewhere; None of a model without a vocabulary.
        entropy: float32, of the distributions from which they come (nats); None where
            nobody computed it.
        values_after: float32, what the value head says after each token; None without
            one. What a critic says before token t is `values_after` of token t - 1
            (`TokenBatch.values_before`).
        divergence: float32, of a teacher's distribution of each token from the model's
            (nats), without `logprobs`; None without a teacher.
        teacher_entropy: float32, of the teacher's distributions (nats).
        regularizer: float32 scalar, a loss of the model's own, such as that of its
            routers, which is added to the mean loss; None without one.
        metrics: of the model itself, by name; None without any.
    """

    logprobs: Float[Array, "rows length"] | None = None
    entropy: Float[Array, "rows length"] | None = None
    values_after: Float[Array, "rows length"] | None = None
    divergence: Float[Array, "rows length"] | None = None
    teacher_entropy: Float[Array, "rows length"] | None = None
    regularizer: Float[Array, ""] | None = None
    metrics: Mapping[str, Metric] | None = None


class Objective(NamedTuple):
    """What an algorithm computes from a batch.

    Attributes:
        loss: (sum, count), to be minimised; differentiate `sum`, divide by `count`.
        metrics: by name; their gradients are zero.
    """

    loss: Metric
    metrics: dict[str, Metric]


class Algorithm(NamedTuple):
    """A policy-optimisation algorithm as pure functions.

    Attributes:
        advantages: (rewards [groups, samples], valid [groups, samples]) to advantages
            [groups, samples], 0 where `valid` is False.
        objective: (predictions, batch) to the policy's `Objective`.
        needs_reference: whether `batch.reference_logprobs` is read.
        credit: a packed batch to the same batch with an advantage a token, and the
            critic's `returns` where there is a critic. It sees the batch of all of a
            step's updates at once, with each sequence's advantage on all of its
            tokens, and log-probs and `values_before` from before the first update. None
            leaves every token its sequence's advantage.
        value_objective: (predictions, batch) to the critic's `Objective`; None for an
            algorithm without a critic.
        divergence: (teacher_logits [*shape, vocab], student_logits [*shape, vocab],
            mask [*shape]) to `Predictions.divergence` [*shape]; None for an algorithm
            that compares no whole distributions.
        reads: what `advantages` takes. "rewards": as above. "components": rewards
            [groups, samples, components] and valid. "lengths": rewards, valid and the
            completions' lengths in tokens, int [groups, samples]. "greedy": rewards,
            valid and the rewards of the prompts' greedy completions, [groups].
    """

    advantages: Callable[..., Float[Array, "groups samples"]]
    objective: Callable[[Predictions, TokenBatch], Objective]
    needs_reference: bool
    credit: Callable[[TokenBatch], TokenBatch] | None = None
    value_objective: Callable[[Predictions, TokenBatch], Objective] | None = None
    divergence: Divergence | None = None
    reads: Literal["rewards", "components", "lengths", "greedy"] = "rewards"


class PolicyTerm(NamedTuple):
    """What a policy-gradient method makes of the tokens of a batch.

    Attributes:
        loss: float32 [rows, length], to be minimised.
        ratio: float32 [rows, length], policy / proximal as the method defines it.
        clip_fraction_low: fraction of tokens at the method's lower clip.
        clip_fraction_high: fraction of tokens at the method's upper clip.
        metrics: further ones, by name; None for none.
    """

    loss: Float[Array, "rows length"]
    ratio: Float[Array, "rows length"]
    clip_fraction_low: Metric
    clip_fraction_high: Metric
    metrics: dict[str, Metric] | None = None


class Corrected(NamedTuple):
    """How much the tokens that the sampler drew are worth to the policy.

    Attributes:
        weights: float32 [rows, length], >= 0, without gradient; 0 drops a token from
            the sum and not from the count.
        metrics: by name.
    """

    weights: Float[Array, "rows length"]
    metrics: dict[str, Metric]


type PerToken = Float[Array, "rows length"]
type Mask = Bool[Array, "rows length"]
type SegmentIds = Int[Array, "rows length"]

type PolicyLoss = Callable[[PerToken, PerToken, PerToken, Mask, SegmentIds], PolicyTerm]
type Correction = Callable[[PerToken, PerToken, Mask, SegmentIds], Corrected]
type Reduction = Callable[[PerToken, Mask, SegmentIds], Metric]
type TokenChoice = Callable[[PerToken, Mask], Mask]
type KlEstimator = Callable[[PerToken, PerToken, Mask], PerToken]


def compose(
    *,
    advantages: Callable[..., Float[Array, "groups samples"]],
    policy_loss: PolicyLoss,
    reduction: Reduction,
    kl_coefficient: float,
    kl_estimator: KlEstimator,
    correction: Correction | None,
    anchor: Literal["proximal", "behavior"] = "proximal",
    entropy_coefficient: float = 0.0,
    token_choice: TokenChoice | None = None,
    reads: Literal["rewards", "components", "lengths", "greedy"] = "rewards",
    accept_k1_loss: bool = False,
) -> Algorithm:
    """Builds an algorithm from its parts.

    loss = reduction_t(correction_t policy_loss_t
                       + kl_coefficient kl_estimator_t
                       - entropy_coefficient entropy_t)

    All terms pass through one reduction, so they share one denominator. A batch
    without proximal log-probs gets one update, whose ratio is exactly 1.

    Metrics: policy/ratio, policy/clip_fraction_low, policy/clip_fraction_high,
    policy/kl_to_proximal (KL(proximal || policy)), mismatch/token_mult_prob_error and
    mismatch/kl (KL(behavior || proximal)), both without stale tokens, 0 if all tokens
    are stale; those of the correction; and with reference log-probs
    policy/kl_to_reference (KL(policy || reference)). All KLs are k3, in nats a token.

    Args:
        advantages: as `Algorithm.advantages`.
        policy_loss: (policy_logprobs, proximal_logprobs, advantages, mask, segment_ids)
            to a `PolicyTerm`; one of `algorithms.terms`.
        reduction: (values, mask, segment_ids) to a `Metric`; one of `losses.reduce`.
        kl_coefficient: >= 0, weight of the KL to the reference in the loss.
        kl_estimator: (policy_logprobs, reference_logprobs, mask) to values per token;
            `kl.k2`, `kl.k3`, `kl.k3_plus`, or a `functools.partial` of one with clamps.
        correction: (proximal_logprobs, behavior_logprobs, mask, segment_ids) to a
            `Corrected`, for what sampler and trainer disagree on; one of
            `algorithms.corrections`, or None for none.
        anchor: whose log-probs `policy_loss` gets beside the policy's. "behavior" are
            the sampler's: the policy loss's ratio then is the correction as well.
        entropy_coefficient: weight of the policy's entropy, which the loss then rewards
            (> 0) or punishes (< 0).
        token_choice: (entropy, mask) to the tokens that keep their policy loss, such as
            `entropy.entropy_quantile_mask`; the others' is 0, and they still count in
            the mean. None for all.
        reads: as `Algorithm.reads`.
        accept_k1_loss: take `kl.k1` as the loss's estimator although its expected
            gradient is zero, to reproduce a run that did.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range, `kl_estimator` is `kl.k1` and
            `accept_k1_loss` False, or there is a correction beside the anchor
            "behavior".
            The objective raises it when it needs reference log-probs or an entropy and
            has none.

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
    ...     correction=None,
    ... )
    >>> algorithm.needs_reference
    True
    """
    if kl_coefficient < 0:
        raise ValueError(f"kl_coefficient must be >= 0, got {kl_coefficient}")
    if not accept_k1_loss:
        _refuse_k1(kl_estimator)
    _check_anchor(anchor, correction)

    @checked
    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        policy_logprobs = require_logprobs(predictions)
        mask = in_sequence(batch.loss_mask, batch.segment_ids)
        current = jax.lax.stop_gradient(policy_logprobs)
        proximal = batch.proximal_logprobs
        proximal = current if proximal is None else proximal
        behavior, ids = batch.behavior_logprobs, batch.segment_ids
        old = behavior if anchor == "behavior" else proximal
        term = policy_loss(policy_logprobs, old, batch.advantages, mask, ids)
        per_token, metrics = term.loss, _policy_metrics(term, current, proximal, mask)
        if token_choice is not None:
            spread = _require_entropy(predictions, "a token_choice")
            chosen = token_choice(jax.lax.stop_gradient(spread), mask)
            per_token = jnp.where(chosen, per_token, 0.0)
        fresh = mask if batch.stale is None else mask & ~batch.stale
        metrics |= _mismatch_metrics(proximal, behavior, fresh)
        if correction is not None:
            corrected = correction(proximal, behavior, mask, ids)
            per_token = jax.lax.stop_gradient(corrected.weights) * per_token
            metrics |= corrected.metrics
        if batch.reference_logprobs is not None:
            metrics["policy/kl_to_reference"] = diagnostics.approximate_kl(
                current, batch.reference_logprobs, mask
            )
        if kl_coefficient > 0:
            reference = _require_reference(batch, kl_coefficient)
            penalty = kl_estimator(policy_logprobs, reference, mask)
            per_token = per_token + kl_coefficient * penalty
        if entropy_coefficient:
            bonus = _entropy_bonus(predictions, mask, entropy_coefficient)
            per_token = per_token + bonus
        loss = reduction(per_token, mask, ids)
        return Objective(loss, jax.tree.map(jax.lax.stop_gradient, metrics))

    algorithm = Algorithm(advantages, objective, kl_coefficient > 0, reads=reads)
    raise_early(algorithm)
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
        **(term.metrics or {}),
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


def _check_anchor(anchor: str, correction: Correction | None) -> None:
    if anchor not in ("proximal", "behavior"):
        raise ValueError(f"anchor must be 'proximal' or 'behavior', got {anchor!r}")
    if anchor == "behavior" and correction is not None:
        raise ValueError(
            f"correction must be None where anchor is 'behavior', got {correction}; "
            "the policy's ratio to the sampler is the whole weight already"
        )


def _refuse_k1(estimator: KlEstimator) -> None:
    inner = estimator
    while isinstance(inner, partial):
        inner = inner.func
    if inner is kl.k1:
        raise ValueError(
            "kl_estimator must be one whose gradient is that of a KL (kl.k2, kl.k3 or "
            "kl.k3_plus), got kl.k1: as a loss its expected gradient is zero, so it "
            "would add noise and no pull towards the reference; use kl.k1 as a metric "
            "or as a penalty inside the reward. accept_k1_loss=True takes it all the "
            "same"
        )


def require_logprobs(predictions: Predictions) -> Float[Array, "rows length"]:
    """The model's log-probs of the batch's tokens.

    Raises:
        ValueError: the model has none.
    """
    if predictions.logprobs is None:
        raise ValueError(
            "predictions.logprobs must be given, got None; predict with a model that "
            "has a vocabulary"
        )
    return predictions.logprobs


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


def _entropy_bonus(
    predictions: Predictions, mask: Bool[Array, "rows length"], coefficient: float
) -> Float[Array, "rows length"]:
    found = _require_entropy(predictions, f"entropy_coefficient {coefficient}")
    return coefficient * entropy.entropy_bonus(found, mask)


def _require_entropy(
    predictions: Predictions, reader: str
) -> Float[Array, "rows length"]:
    if predictions.entropy is None:
        raise ValueError(
            f"predictions.entropy must be given, got None with {reader}, which reads it"
        )
    return predictions.entropy


def raise_early(algorithm: Algorithm) -> None:
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
            advantages=algorithm.advantages(*_inputs(algorithm, zeros, ids > 0)),
            behavior_logprobs=zeros,
            versions=ids,
            reference_logprobs=zeros,
            values_before=zeros,
            truncated=ids > 0,
        )
        predictions = Predictions(
            logprobs=zeros,
            entropy=zeros,
            values_after=zeros,
            divergence=zeros,
            teacher_entropy=zeros,
        )
        if algorithm.credit is not None:
            batch = algorithm.credit(batch)
        algorithm.objective(predictions, batch)
        if algorithm.value_objective is not None:
            algorithm.value_objective(predictions, batch)

    jax.eval_shape(one_token)


def _inputs(algorithm: Algorithm, zeros: Array, valid: Array) -> tuple[Array, ...]:
    """What `advantages` takes, for one sample of one group."""
    match algorithm.reads:
        case "components":
            return zeros[..., None], valid
        case "lengths":
            return zeros, valid, valid.astype(jnp.int32)
        case "greedy":
            return zeros, valid, zeros[0]
        case "rewards":
            return zeros, valid
