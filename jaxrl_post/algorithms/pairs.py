"""Turns a preference loss into an objective on packed pairs.

In a row of a `TokenBatch` the two answers of a pair stand side by side: the rejected
one, with its own copy of the prompt if it has one, begins where the chosen one ends.
The loss mask marks the answers, and the labels are 1 at the tokens of the chosen answer
and -1 at the tokens of the rejected one. The count of a loss is the number of pairs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms.objective import Objective, Predictions, require_logprobs
from jaxrl_post.losses import preference
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted, in_sequence, segment_totals
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array, Bool, Float, TokenBatch

__all__ = [
    "Answers",
    "MarginLoss",
    "PairLoss",
    "PerPair",
    "PreferenceAlgorithm",
    "Valid",
    "compose_margins",
    "compose_pairs",
    "pair_metrics",
    "raise_early",
    "require_reference",
    "sides",
    "valid_pairs",
]


class PreferenceAlgorithm(NamedTuple):
    """A preference loss as pure functions.

    Attributes:
        objective: (predictions, batch of packed answers) to an `Objective`.
        needs_reference: whether `objective` reads `batch.reference_logprobs`.
        mismatched: (predictions, batch of answers to other prompts) to an `Objective`
            that is measured, not minimised: `objective` expects its mean over the whole
            step in `batch.reference_point`. None for a loss of pairs.
    """

    objective: Callable[[Predictions, TokenBatch], Objective]
    needs_reference: bool
    mismatched: Callable[[Predictions, TokenBatch], Objective] | None = None


type PerPair = Float[Array, "rows pairs"]
type Valid = Bool[Array, "rows pairs"]


class Answers(NamedTuple):
    """The chosen or the rejected answers of a batch's pairs; float32 [rows, pairs].

    Attributes:
        policy: log-prob of the answer (nats), differentiable.
        reference: log-prob under the reference policy; zeros without one.
        length: number of tokens of the answer.
    """

    policy: PerPair
    reference: PerPair
    length: PerPair

    def means(self) -> "Answers":
        """The same answers with mean log-probs per token."""
        size = jnp.maximum(self.length, 1.0)
        return Answers(self.policy / size, self.reference / size, self.length)


type PairLoss = Callable[[Answers, Answers, Valid], PerPair]
type MarginLoss = Callable[[PerPair, Valid], PerPair]


def compose_pairs(
    loss: PairLoss,
    *,
    scale: float,
    of_means: bool = False,
    needs_reference: bool = True,
) -> PreferenceAlgorithm:
    """Builds an objective on packed tokens, with metrics, from a loss of pairs.

    The implicit rewards in the metrics are scale * (log policy - log reference), per
    token if `of_means`.

    Args:
        loss: (chosen, rejected, valid) to a loss per pair, 0 where `valid` is False.
        scale: scale of the implicit rewards, a loss's beta.
        of_means: whether the loss uses means over tokens instead of sums.
        needs_reference: False leaves the reference's log-probs at 0.

    Raises:
        ValueError: `loss` rejects a hyperparameter.

    >>> def likelihood_displacement(chosen, rejected, valid):
    ...     return counted(rejected.policy - chosen.policy, valid)
    >>> compose_pairs(likelihood_displacement, scale=1.0).needs_reference
    True
    """

    @checked
    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        chosen, rejected = _answers(predictions, batch, needs_reference)
        valid = valid_pairs(batch)
        each = loss(chosen, rejected, valid)
        if getattr(each, "shape", None) != valid.shape:
            raise ValueError(
                "loss must return one value per pair, [rows, pairs], here "
                f"{list(valid.shape)}; got "
                f"{list(getattr(each, 'shape', ())) or type(each).__name__}"
            )
        value = masked(each, valid)
        shown = [side.means() if of_means else side for side in (chosen, rejected)]
        better, worse = (scale * (side.policy - side.reference) for side in shown)
        metrics = pair_metrics(better, worse, valid) | {
            "preference/chosen_logprob": masked(chosen.policy, valid),
            "preference/rejected_logprob": masked(rejected.policy, valid),
        }
        return Objective(value, jax.tree.map(jax.lax.stop_gradient, metrics))

    algorithm = PreferenceAlgorithm(objective, needs_reference)
    raise_early(algorithm)
    return algorithm


def compose_margins(
    loss: MarginLoss,
    *,
    scale: float,
    margin_of: Callable[..., PerPair] = preference.log_ratio_margin,
    of_means: bool = False,
) -> PreferenceAlgorithm:
    """Builds an objective as `compose_pairs` does, from a loss of each pair's margin.

    Args:
        loss: (margin, valid) to a loss per pair, 0 where `valid` is False.
        scale: scale of the implicit rewards, a loss's beta.
        margin_of: a margin with the arguments of `losses.preference.log_ratio_margin`.
        of_means: whether the margin is of means over tokens instead of sums.

    Raises:
        ValueError: `loss` or `margin_of` rejects a hyperparameter.

    >>> from functools import partial
    >>> loss = partial(preference.hinge_loss, beta=0.1)
    >>> compose_margins(loss, scale=0.1).needs_reference
    True
    """

    def of_pair(chosen: Answers, rejected: Answers, valid: Valid) -> PerPair:
        if of_means:
            chosen, rejected = chosen.means(), rejected.means()
        log_probs = chosen.policy, rejected.policy, chosen.reference, rejected.reference
        return loss(margin_of(*log_probs, valid), valid)

    return compose_pairs(of_pair, scale=scale, of_means=of_means)


def require_reference(batch: TokenBatch) -> Float[Array, "rows length"]:
    """Returns the reference's log-probs.

    Raises:
        ValueError: the batch has none.
    """
    if batch.reference_logprobs is None:
        raise ValueError(
            "batch.reference_logprobs must be given, got None; score the batch with "
            "the reference policy"
        )
    return batch.reference_logprobs


def sides(
    values: Float[Array, "rows length"], batch: TokenBatch
) -> tuple[PerPair, PerPair]:
    """Sums over the chosen and over the rejected answers of a row's pairs.

    Returns:
        Two arrays [rows, length + 1] with a slot per segment id; 0 in the slots that
        are not a chosen answer's.

    Raises:
        ValueError: the batch has no labels.
    """
    if batch.labels is None:
        raise ValueError(
            "batch.labels must be given, got None; they hold 1 at the tokens of chosen "
            "answers and -1 at the tokens of rejected ones"
        )
    mask = in_sequence(batch.loss_mask, batch.ends)
    liked = counted((batch.labels > 0).astype(jnp.float32), mask)
    chosen = segment_totals(liked, batch.ends) > 0
    totals = segment_totals(values, batch.ends)
    # The rejected answer begins where the chosen one ends, and a segment's id is the
    # index after its end.
    follower = jnp.pad(batch.ends, ((0, 0), (0, 1)))
    rejected = jnp.take_along_axis(totals, follower, axis=-1)
    return jnp.where(chosen, totals, 0.0), jnp.where(chosen, rejected, 0.0)


def valid_pairs(batch: TokenBatch) -> Valid:
    """Mask of the slots that hold a pair with counted tokens in both answers."""
    mask = in_sequence(batch.loss_mask, batch.ends)
    chosen, rejected = sides(mask.astype(jnp.float32), batch)
    return (chosen > 0) & (rejected > 0)


def pair_metrics(chosen: PerPair, rejected: PerPair, valid: Valid) -> dict[str, Metric]:
    """Rewards of both sides, and how often the chosen answer's reward is larger."""
    metrics = {
        "preference/accuracy": preference.accuracy(chosen - rejected, valid),
        "preference/margin": masked(chosen - rejected, valid),
        "preference/chosen_reward": masked(chosen, valid),
        "preference/rejected_reward": masked(rejected, valid),
    }
    return jax.tree.map(jax.lax.stop_gradient, metrics)


def raise_early(algorithm: PreferenceAlgorithm) -> None:
    """Traces one pair, so that a bad hyperparameter raises before a model is loaded."""

    def one_pair() -> None:
        zeros, ids = jnp.zeros((1, 2)), jnp.array([[1, 2]], jnp.int32)
        batch = TokenBatch(
            tokens=ids,
            positions=ids,
            ends=ids,
            loss_mask=ids > 0,
            advantages=zeros,
            behavior_logprobs=zeros,
            versions=ids,
            reference_logprobs=zeros,
            reference_point=zeros,
            labels=zeros,
        )
        algorithm.objective(Predictions(zeros), batch)
        if algorithm.mismatched is not None:
            # Answers to other prompts have no labels.
            others = batch.replace(labels=None)  # type: ignore[attr-defined]
            algorithm.mismatched(Predictions(zeros), others)

    jax.eval_shape(one_pair)


def _answers(
    predictions: Predictions, batch: TokenBatch, needs_reference: bool
) -> tuple[Answers, Answers]:
    mask = in_sequence(batch.loss_mask, batch.ends)
    nothing = jnp.zeros(mask.shape, jnp.float32)
    reference = require_reference(batch) if needs_reference else nothing
    kept = (require_logprobs(predictions), reference, jnp.ones(mask.shape, jnp.float32))
    both = [sides(counted(values, mask), batch) for values in kept]
    chosen, rejected = zip(*both, strict=True)
    return Answers(*chosen), Answers(*rejected)
