"""Builds a policy-gradient algorithm from its parts."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Literal, TypedDict, Unpack, get_args

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms.corrections import TRUNCATED
from jaxrl_post.algorithms.objective import (
    Algorithm,
    Corrected,
    Correction,
    KlEstimator,
    KlWeights,
    Objective,
    PolicyLoss,
    PolicyTerm,
    Predictions,
    Reduction,
    TokenChoice,
    require_logprobs,
)
from jaxrl_post.losses import diagnostics, entropy, kl
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import in_sequence
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.specs import check_takes
from jaxrl_post.types import Array, Bool, Float, TokenBatch

__all__ = [
    "RewardOptions",
    "SharedOptions",
    "compose",
    "only_shared",
    "raise_early",
    "shared_names",
]

# The arguments that each part receives.
_TAKES = {
    "policy_loss": (
        "policy_logprobs", "proximal_logprobs", "advantages", "mask", "segment_ids",
    ),
    "reduction": ("values", "mask", "segment_ids"),
    "kl_estimator": ("policy_logprobs", "reference_logprobs", "mask"),
    "kl_weights": (
        "kl_values", "policy_logprobs", "proximal_logprobs", "behavior_logprobs",
        "mask", "segment_ids",
    ),
    "correction": ("proximal_logprobs", "behavior_logprobs", "mask", "segment_ids"),
    "token_choice": ("entropy", "mask"),
}  # fmt: skip
# Where the values that the parts return come from, for error messages.
_MAKERS = {
    PolicyTerm: "jaxrl_post.algorithms.PolicyTerm",
    Corrected: "jaxrl_post.algorithms.Corrected",
    Metric: "jaxrl_post.metrics.masked, or a function of jaxrl_post.losses.reduce,",
}


class SharedOptions(TypedDict, total=False):
    """Keyword arguments that every policy-gradient algorithm passes on to `compose`.

    Attributes:
        kl_coefficient: >= 0, weight of the KL to the reference policy in the loss;
            default 0.
        kl_estimator: (policy_logprobs, reference_logprobs, mask) to values per token;
            `kl.k2`, `kl.k3` (default), `kl.k3_plus`, or a `functools.partial` of one
            with clamps; with `kl_weights` also `kl.k1`.
        kl_weights: (kl_values, policy_logprobs, proximal_logprobs, behavior_logprobs,
            mask, segment_ids) to the weighted values per token, differentiated: a
            `kl_weights.ratio`; None, the default, for the estimator's own values.
        correction: (proximal_logprobs, behavior_logprobs, mask, segment_ids) to a
            `Corrected`, for the mismatch between sampler and trainer: one of
            `algorithms.corrections`; None for none; default `truncated_tokens()`.
        entropy_coefficient: weight of the policy's entropy, which the loss rewards
            (> 0) or punishes (< 0); default 0.
        aggregation: a function of `losses.reduce` in place of the algorithm's own
            reduction; None, the default, for that.

    >>> from jaxrl_post.algorithms import dapo
    >>> shared = SharedOptions(kl_coefficient=0.01, correction=None)
    >>> dapo(clip_high=0.3, **shared).needs_reference
    True
    """

    kl_coefficient: float
    kl_estimator: KlEstimator
    kl_weights: KlWeights | None
    correction: Correction | None
    entropy_coefficient: float
    aggregation: Reduction | None


class RewardOptions(TypedDict, total=False):
    """Keyword arguments of an algorithm whose reward has the KL.

    Attributes:
        kl_coefficient: >= 0, weight of the KL to the reference policy in the reward;
            default 0.
        kl_estimator: estimator of that KL; in the reward `kl.k1`, the default, is
            unbiased.
        correction: as in `SharedOptions`.
        entropy_coefficient: as in `SharedOptions`.
        aggregation: as in `SharedOptions`.
    """

    kl_coefficient: float
    kl_estimator: KlEstimator
    correction: Correction | None
    entropy_coefficient: float
    aggregation: Reduction | None


def shared_names(rest: inspect.Parameter | None) -> tuple[str, ...]:
    """Returns the shared options that an algorithm takes.

    Args:
        rest: the algorithm's parameter `**shared`, annotated with the options, else
            with `SharedOptions`; None if it has none.
    """
    if rest is None:
        return ()
    options = get_args(rest.annotation) or (SharedOptions,)
    return tuple(options[0].__annotations__)


def only_shared[Options: (SharedOptions, RewardOptions)](
    algorithm: Callable[..., Algorithm], given: Options
) -> Options:
    """Returns the shared options of a call, and refuses other keyword arguments.

    Without this check `compose` would take its own, such as `anchor`, from a caller of
    a named algorithm, and make another algorithm under that name.

    Args:
        algorithm: the function that was called; its own arguments are named too.
        given: the keyword arguments that are not its own.

    Raises:
        TypeError: a keyword argument is no shared option.

    >>> from jaxrl_post.algorithms import grpo
    >>> grpo(kl_coef=0.1)
    Traceback (most recent call last):
    TypeError: 'kl_coef' is no option of grpo; it has clip_low, clip_high, dual_clip,
    ddof, epsilon, kl_coefficient, kl_estimator, kl_weights, correction,
    entropy_coefficient, aggregation
    """
    *own, rest = inspect.signature(algorithm).parameters.values()
    shared = shared_names(rest)
    for name in given:
        if name not in shared:
            known = [*(each.name for each in own), *shared]
            raise TypeError(
                f"{name!r} is no option of {algorithm.__name__}; it has "
                f"{', '.join(known)}"
            )
    return given


def compose(
    *,
    advantages: Callable[..., Float[Array, "groups samples"]],
    policy_loss: PolicyLoss,
    reduction: Reduction,
    anchor: Literal["proximal", "behavior"] = "proximal",
    token_choice: TokenChoice | None = None,
    reads: Literal["rewards", "components", "lengths", "greedy"] = "rewards",
    accept_k1_loss: bool = False,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Builds an algorithm from its parts.

    loss = reduction_t(correction_t policy_loss_t
                       + kl_coefficient kl_weights_t kl_estimator_t
                       - entropy_coefficient entropy_t)

    All terms pass through one reduction, so they share one denominator. A batch
    without proximal log-probs gets one update, whose ratio is exactly 1.

    Metrics: policy/ratio, policy/clip_fraction_low, policy/clip_fraction_high,
    policy/kl_to_proximal (KL(proximal || policy)), mismatch/token_mult_prob_error,
    mismatch/kl (KL(behavior || proximal)) and mismatch/unequal (share of tokens whose
    log-prob under the policy is not the sampler's, to the last bit), without stale
    tokens, 0 if all tokens are stale; with stale tokens mismatch/stale_kl, the KL of
    these; the correction's metrics; and with reference log-probs policy/kl_to_reference
    (KL(policy || reference)). All KLs are k3, in nats per token.

    Args:
        advantages: as `Algorithm.advantages`.
        policy_loss: (policy_logprobs, proximal_logprobs, advantages, mask, segment_ids)
            to a `PolicyTerm`; one of `algorithms.terms`.
        reduction: (values, mask, segment_ids) to a `Metric`; one of `losses.reduce`.
        anchor: whose log-probs `policy_loss` gets besides the policy's. "behavior" are
            the sampler's: the policy loss's ratio is then the correction as well.
        token_choice: (entropy, mask) to the mask of tokens that keep their policy loss,
            such as `entropy.entropy_quantile_mask`; the policy loss of other tokens is
            0, but they count in the mean. None keeps all.
        reads: as `Algorithm.reads`.
        accept_k1_loss: allows `kl.k1` as the loss's estimator although its expected
            gradient is zero, to reproduce a run that used it.

    Raises:
        ValueError: a hyperparameter is out of its range, `kl_estimator` is `kl.k1`,
            without `kl_weights` and with `accept_k1_loss` False, or a correction is
            given with anchor "behavior".
            The objective raises it if reference log-probs or the entropy are needed but
            missing.

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
    only_shared(compose, shared)
    kl_coefficient = shared.get("kl_coefficient", 0.0)
    kl_estimator = shared.get("kl_estimator", kl.k3)
    kl_weights = shared.get("kl_weights")
    correction = shared.get("correction", TRUNCATED)
    entropy_coefficient = shared.get("entropy_coefficient", 0.0)
    reduction = shared.get("aggregation") or reduction
    if kl_coefficient < 0:
        raise ValueError(f"kl_coefficient must be >= 0, got {kl_coefficient}")
    if kl_weights is None and not accept_k1_loss:
        _refuse_k1(kl_estimator)
    _check_anchor(anchor, correction)
    parts = (policy_loss, reduction, kl_estimator, kl_weights, correction, token_choice)
    for part, (name, arguments) in zip(parts, _TAKES.items(), strict=True):
        if part is not None:
            check_takes(part, arguments, name)

    @checked
    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        policy_logprobs = require_logprobs(predictions)
        mask = in_sequence(batch.loss_mask, batch.ends)
        current = jax.lax.stop_gradient(policy_logprobs)
        proximal = batch.proximal_logprobs
        proximal = current if proximal is None else proximal
        behavior, ids = batch.behavior_logprobs, batch.ends
        old = behavior if anchor == "behavior" else proximal
        term = policy_loss(policy_logprobs, old, batch.advantages, mask, ids)
        _require(term, PolicyTerm, "policy_loss")
        _require_per_token(term.loss, mask, "policy_loss: loss")
        _require_per_token(term.ratio, mask, "policy_loss: ratio")
        per_token, metrics = term.loss, _policy_metrics(term, current, proximal, mask)
        if token_choice is not None:
            spread = _require_entropy(predictions, "a token_choice")
            chosen = token_choice(jax.lax.stop_gradient(spread), mask)
            _require_per_token(chosen, mask, "token_choice")
            per_token = jnp.where(chosen, per_token, 0.0)
        fresh = mask if batch.stale is None else mask & ~batch.stale
        metrics |= _mismatch_metrics(current, proximal, behavior, fresh)
        if batch.stale is not None:
            metrics["mismatch/stale_kl"] = diagnostics.approximate_kl(
                behavior, proximal, mask & batch.stale
            )
        if correction is not None:
            corrected = correction(proximal, behavior, mask, ids)
            _require(corrected, Corrected, "correction")
            _require_per_token(corrected.weights, mask, "correction: weights")
            per_token = jax.lax.stop_gradient(corrected.weights) * per_token
            metrics |= corrected.metrics
        if batch.reference_logprobs is not None:
            metrics["policy/kl_to_reference"] = diagnostics.approximate_kl(
                current, batch.reference_logprobs, mask
            )
        if kl_coefficient > 0:
            reference = _require_reference(batch, kl_coefficient)
            penalty = kl_estimator(policy_logprobs, reference, mask)
            _require_per_token(penalty, mask, "kl_estimator")
            if kl_weights is not None:
                policies = (policy_logprobs, proximal, behavior)
                penalty = kl_weights(penalty, *policies, mask, ids)
                _require_per_token(penalty, mask, "kl_weights")
            per_token = per_token + kl_coefficient * penalty
        if entropy_coefficient:
            bonus = _entropy_bonus(predictions, mask, entropy_coefficient)
            per_token = per_token + bonus
        loss = reduction(per_token, mask, ids)
        _require(loss, Metric, "reduction")
        return Objective(loss, jax.tree.map(jax.lax.stop_gradient, metrics))

    algorithm = Algorithm(advantages, objective, kl_coefficient > 0, reads=reads)
    raise_early(algorithm)
    return algorithm


def _require(found: object, kind: type, name: str) -> None:
    """Refuses what a part of another kind would return."""
    if not isinstance(found, kind):
        raise TypeError(
            f"{name} must return a {kind.__name__}, got {_kind_of(found)}; "
            f"{_MAKERS[kind]} makes one"
        )


def _require_per_token(values: object, mask: Bool[Array, "..."], name: str) -> None:
    """Refuses what would be an error, or another loss, where the parts are added."""
    shape = getattr(values, "shape", None)
    if shape != mask.shape:
        raise ValueError(
            f"{name} must be one value per token, [rows, length], here "
            f"{list(mask.shape)}; got "
            f"{_kind_of(values) if shape is None else list(shape)}"
        )


def _kind_of(found: object) -> str:
    """The type of what a part returned; the types of JAX's tracers are many."""
    return "an array" if isinstance(found, jax.Array) else type(found).__name__


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
    current: Float[Array, "rows length"],
    proximal: Float[Array, "rows length"],
    behavior: Float[Array, "rows length"],
    mask: Bool[Array, "rows length"],
) -> dict[str, Metric]:
    unequal = current.astype(jnp.float32) != behavior.astype(jnp.float32)
    return {
        "mismatch/token_mult_prob_error": diagnostics.token_mult_prob_error(
            proximal, behavior, mask
        ),
        "mismatch/kl": diagnostics.approximate_kl(behavior, proximal, mask),
        "mismatch/unequal": masked(unequal.astype(jnp.float32), mask),
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
            "kl_estimator must be an estimator with the gradient of a KL (kl.k2, kl.k3 "
            "or kl.k3_plus), got kl.k1: as a loss its expected gradient is zero, so it "
            "would add noise and no pull towards the reference; use kl.k1 as a metric "
            "or as a penalty inside the reward, or give kl_weights. "
            "accept_k1_loss=True takes it all the same"
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

    Otherwise they would raise at the first train step, after a model was loaded and a
    batch sampled: each part checks its own when called. Tracing computes nothing.
    """

    def one_token() -> None:
        zeros, ids = jnp.zeros((1, 1)), jnp.ones((1, 1), jnp.int32)
        batch = TokenBatch(
            tokens=ids,
            positions=ids,
            ends=ids,
            loss_mask=ids > 0,
            advantages=algorithm.advantages(*_inputs(algorithm, zeros, ids > 0)),
            behavior_logprobs=zeros,
            versions=ids,
            reference_logprobs=zeros,
            values_before=zeros,
            truncated=ids > 0,
            bootstrap=zeros,
            labels=zeros,
            prm_logprobs=zeros,
            answers=ids,
            groups=ids,
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
        for objective in (algorithm.value_objective, algorithm.prm_objective):
            if objective is not None:
                objective(predictions, batch)

    jax.eval_shape(one_token)


def _inputs(algorithm: Algorithm, zeros: Array, valid: Array) -> tuple[Array, ...]:
    """The arguments of `advantages`, for one sample of one group."""
    match algorithm.reads:
        case "components":
            return zeros[..., None], valid
        case "lengths":
            return zeros, valid, valid.astype(jnp.int32)
        case "greedy":
            return zeros, valid, zeros[0]
        case "rewards":
            return zeros, valid
