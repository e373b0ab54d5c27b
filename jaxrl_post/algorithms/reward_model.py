"""Objectives of reward models: of answers, from pairs or outcomes, and of steps.

`pairs` says how a batch of pairs is packed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms.objective import Objective, Predictions, require_logprobs
from jaxrl_post.algorithms.pairs import (
    pair_metrics,
    require_reference,
    sides,
    valid_pairs,
)
from jaxrl_post.losses import implicit, returns, reward_model
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import (
    counted,
    in_sequence,
    segment_totals,
    sequence_sum,
)
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array, Bool, Float, Int, TokenBatch

__all__ = ["bradley_terry", "implicit_reward", "process_reward"]

# Nats: an answer's log-ratio by two programs that compute one model in float32
# is less.
_ROUNDING = 1e-3


def bradley_terry(
    *, centering: float = 0.0
) -> Callable[[Predictions, TokenBatch], Objective]:
    """Bradley-Terry: the value after an answer's last token is its reward.

    The batch's `margins` at a chosen answer's last token are the pair's target margin,
    by which its reward should exceed the rejected answer's; without them it is 0.

    Args:
        centering: >= 0, weight of the squared sum of a pair's rewards; TRL recommends
            0.01.

    Raises:
        ValueError: `centering` is negative.

    References:
        Touvron et al., Llama 2, arXiv:2307.09288, eq. 2 (margin).

    >>> callable(bradley_terry())
    True
    """
    if centering < 0:
        raise ValueError(f"centering must be >= 0, got {centering}")

    @checked
    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        values = _require_values(predictions)
        mask = in_sequence(batch.loss_mask, batch.ends)
        last = _last(mask, batch)
        chosen, rejected = sides(counted(values, last), batch)
        margin = jnp.zeros_like(chosen)
        if batch.margins is not None:
            margin, _ = sides(counted(batch.margins, last), batch)
        valid = valid_pairs(batch)
        losses = reward_model.bradley_terry(
            chosen, rejected, valid, target_margin=margin, centering=centering
        )
        metrics = pair_metrics(chosen, rejected, valid)
        return Objective(masked(losses, valid), metrics)

    return objective


def process_reward() -> Callable[[Predictions, TokenBatch], Objective]:
    """Process reward model: the value at a step's last token is the logit of "right".

    The loss mask marks the last tokens of the steps that are judged, and `batch.labels`
    holds their labels, in [0, 1]. A sequence is a solution; its steps are in order.

    Metrics are fractions: process/step_accuracy, of steps whose verdict agrees with the
    label, both thresholded at probability 1/2; process/first_error_accuracy, of
    solutions whose first wrong step is found exactly, or none if all steps are right;
    and its two parts, process/erroneous_accuracy on solutions with a wrong step and
    process/correct_accuracy on those without.

    Returns:
        The objective; its count is the number of judged steps.

    References:
        Lightman et al., Let's Verify Step by Step, arXiv:2305.20050.
        Zheng et al., ProcessBench, arXiv:2412.06559 (the accuracies of solutions).

    >>> callable(process_reward())
    True
    """

    @checked
    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        logits, labels = _require_values(predictions), _require_labels(batch)
        mask = in_sequence(batch.loss_mask, batch.ends)
        losses = reward_model.process_reward_loss(logits, labels, mask)
        metrics = _verdicts(logits > 0, labels >= 0.5, mask, batch.ends)
        return Objective(masked(losses, mask), metrics)

    return objective


def implicit_reward(*, beta: float) -> Callable[[Predictions, TokenBatch], Objective]:
    """Implicit reward model: the log-ratio of an answer is the logit of "right".

    `batch.labels` holds an answer's outcome, in [0, 1], at each of its tokens. A
    sequence is an answer.

    Metrics are means over answers: prm/accuracy, of those whose log-ratio is above 0
    exactly if the label is at least 1/2; and prm/answer_reward, of the rewards. A
    log-ratio of up to 0.001 counts as 0, since rounding can make it.

    Args:
        beta: > 0, scale of the rewards.

    Returns:
        The objective; its count is the number of answers.

    Raises:
        ValueError: where it is called, if `beta` is not positive or something that the
            batch must have is missing.

    References:
        Cui et al., Process Reinforcement through Implicit Rewards, arXiv:2502.01456.

    >>> callable(implicit_reward(beta=0.05))
    True
    """

    @checked
    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        said, labels = require_logprobs(predictions), _require_labels(batch)
        reference = require_reference(batch)
        mask = in_sequence(batch.loss_mask, batch.ends)
        last = _last(mask, batch)
        losses = implicit.implicit_reward_loss(
            said, reference, labels, mask, batch.ends, beta=beta
        )
        rewards = implicit.implicit_rewards(said, reference, mask, beta=beta)
        rewards = jax.lax.stop_gradient(sequence_sum(rewards, mask, batch.ends))
        positive = rewards > beta * _ROUNDING
        agreed = (positive == (labels >= 0.5)).astype(jnp.float32)
        metrics = {
            "prm/accuracy": masked(agreed, last),
            "prm/answer_reward": masked(rewards, last),
        }
        return Objective(masked(losses, last), metrics)

    return objective


def _last(
    mask: Bool[Array, "rows length"], batch: TokenBatch
) -> Bool[Array, "rows length"]:
    """True at the last counted token of each sequence."""
    ones = jnp.ones(mask.shape, jnp.float32)
    return returns.at_last_token(ones, mask, batch.ends) > 0


def _require_values(predictions: Predictions) -> Float[Array, "rows length"]:
    if predictions.values_after is None:
        raise ValueError(
            "predictions.values_after must be given, got None; a reward model has a "
            "value head"
        )
    return predictions.values_after


def _require_labels(batch: TokenBatch) -> Float[Array, "rows length"]:
    if batch.labels is None:
        raise ValueError(
            "batch.labels must be given, got None; they hold 1 at the last token of a "
            "right step, or at the tokens of a right answer, and 0 at a wrong one's"
        )
    return batch.labels


def _verdicts(
    found: Bool[Array, "rows length"],
    right: Bool[Array, "rows length"],
    mask: Bool[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
) -> dict[str, Metric]:
    """Accuracies of the verdicts `found`, over steps and over solutions."""
    solutions = segment_totals(mask.astype(jnp.float32), segment_ids) > 0
    error = _first(mask & ~right, segment_ids)
    exact = (_first(mask & ~found, segment_ids) == error).astype(jnp.float32)
    agreed = (found == right).astype(jnp.float32)
    erroneous = error < mask.shape[-1]
    return {
        "process/step_accuracy": masked(agreed, mask),
        "process/first_error_accuracy": masked(exact, solutions),
        "process/erroneous_accuracy": masked(exact, erroneous),
        "process/correct_accuracy": masked(exact, solutions & ~erroneous),
    }


def _first(
    marked: Bool[Array, "rows length"], segment_ids: Int[Array, "rows length"]
) -> Int[Array, "rows segments"]:
    """Position in its row of each segment's first marked token; `length` for none."""
    length = marked.shape[-1]
    places = jnp.where(marked, jnp.arange(length, dtype=jnp.int32), length)

    def one_row(row: Array, ids: Array) -> Array:
        return jax.ops.segment_min(row, ids, num_segments=length + 1)

    return jax.vmap(one_row)(places, segment_ids)
