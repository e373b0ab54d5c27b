"""KTO: an objective on packed answers that are labelled desirable or undesirable.

The loss mask marks the answers of a `TokenBatch`, and the labels of an answer's tokens
are 1 if it is desirable and -1 if not. The count of a loss is the number of answers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms.objective import Objective, Predictions, require_logprobs
from jaxrl_post.algorithms.pairs import (
    PreferenceAlgorithm,
    raise_early,
    require_reference,
)
from jaxrl_post.losses import preference, unpaired
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted, in_sequence, segment_totals
from jaxrl_post.metrics import masked
from jaxrl_post.types import Array, Bool, Float, TokenBatch

__all__ = ["kto"]


def kto(
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PreferenceAlgorithm:
    """Kahneman-Tversky Optimization: compares every answer with a reference point.

    The reference point z is the mean log-ratio of answers to other prompts, or 0 if the
    mean is negative. `mismatched` returns the mean as its loss (no prompt may have its
    own answer in this batch), and `objective` reads it from `batch.reference_point`,
    where all tokens hold the same value. The paper and TRL compute z per microbatch;
    here it may be computed over a whole step, so that a step does not depend on its
    split into microbatches.

    Args:
        beta: > 0; see `losses.unpaired.kto_loss`.
        desirable_weight: >= 0, the paper's lambda_D.
        undesirable_weight: >= 0, the paper's lambda_U. The paper keeps the ratio of the
            weights times the ratio of the numbers of answers within 1 to 4/3.

    Returns:
        The algorithm. Its metric `preference/accuracy` is the share of answers whose
        log-ratio lies on the right side of z.

    Raises:
        ValueError: a hyperparameter is out of its range. The objective raises it for a
            batch without `labels` or `reference_point`.

    References:
        Ethayarajh et al., KTO, arXiv:2402.01306.

    >>> kto().needs_reference
    True
    """

    @checked
    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        answers, point = _answers(predictions, batch), _reference_point(batch)
        policy, reference, valid = answers
        desirable = _totals(_require_labels(batch), batch) > 0
        losses = unpaired.kto_loss(
            policy,
            reference,
            desirable,
            point,
            valid,
            beta=beta,
            desirable_weight=desirable_weight,
            undesirable_weight=undesirable_weight,
        )
        log_ratio = preference.log_ratio(policy, reference, valid)
        gain = jnp.where(desirable, log_ratio - point, point - log_ratio)
        kept, dropped = valid & desirable, valid & ~desirable
        metrics = {
            "preference/accuracy": preference.accuracy(gain, valid),
            "preference/desirable_reward": masked(beta * log_ratio, kept),
            "preference/undesirable_reward": masked(beta * log_ratio, dropped),
            "preference/desirable_logprob": masked(policy, kept),
            "preference/undesirable_logprob": masked(policy, dropped),
            "preference/reference_point": masked(
                jnp.broadcast_to(point, valid.shape), valid
            ),
        }
        return Objective(
            masked(losses, valid), jax.tree.map(jax.lax.stop_gradient, metrics)
        )

    algorithm = PreferenceAlgorithm(objective, True, _mean_log_ratio)
    raise_early(algorithm)
    return algorithm


type PerAnswer = Float[Array, "rows answers"]


class _Answers(NamedTuple):
    """The answers of a batch, [rows, answers]."""

    policy: PerAnswer
    reference: PerAnswer
    valid: Bool[Array, "rows answers"]


def _answers(predictions: Predictions, batch: TokenBatch) -> _Answers:
    ones = jnp.ones(batch.shape, jnp.float32)
    return _Answers(
        _totals(require_logprobs(predictions), batch),
        _totals(require_reference(batch), batch),
        _totals(ones, batch) > 0,
    )


def _totals(values: Float[Array, "rows length"], batch: TokenBatch) -> PerAnswer:
    """Sums over the counted tokens of each answer; 0 for segment 0, the padding."""
    mask = in_sequence(batch.loss_mask, batch.ends)
    return segment_totals(counted(values, mask), batch.ends)


def _require_labels(batch: TokenBatch) -> Float[Array, "rows length"]:
    if batch.labels is None:
        raise ValueError(
            "batch.labels must be given, got None; they hold 1 at the tokens of "
            "desirable answers and -1 at the tokens of undesirable ones"
        )
    return batch.labels


@checked
def _mean_log_ratio(predictions: Predictions, batch: TokenBatch) -> Objective:
    policy, reference, valid = _answers(predictions, batch)
    return Objective(preference.implicit_reward(policy, reference, valid, beta=1.0), {})


def _reference_point(batch: TokenBatch) -> Float[Array, ""]:
    if batch.reference_point is None:
        raise ValueError(
            "batch.reference_point must be given, got None; it holds the mean of the "
            "algorithm's `mismatched` at every token"
        )
    mask = in_sequence(batch.loss_mask, batch.ends)
    # All counted tokens hold the same value, so the maximum is that value or 0.
    return jnp.maximum(counted(batch.reference_point, mask).max(), 0.0)
