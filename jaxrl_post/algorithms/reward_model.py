"""Reward models from preference pairs; `pairs` says how a batch of them is packed."""

from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_post.algorithms.objective import Objective, Predictions
from jaxrl_post.algorithms.pairs import pair_metrics, sides, valid_pairs
from jaxrl_post.losses import returns, reward_model
from jaxrl_post.losses.sequences import counted, in_sequence
from jaxrl_post.metrics import masked
from jaxrl_post.types import TokenBatch

__all__ = ["bradley_terry"]


def bradley_terry(
    *, centering: float = 0.01
) -> Callable[[Predictions, TokenBatch], Objective]:
    """Bradley-Terry: the value after an answer's last token is its reward.

    The advantage of a chosen answer's last token is the pair's margin, by how much its
    reward should exceed the rejected answer's; 0 for none. A rejected answer's is not
    looked at.

    Args:
        centering: >= 0, weight of the squared sum of a pair's rewards.

    Returns:
        The objective.

    Raises:
        ValueError: `centering` is negative.

    References:
        Touvron et al., Llama 2, arXiv:2307.09288, eq. 2 (margin).

    >>> callable(bradley_terry())
    True
    """
    if centering < 0:
        raise ValueError(f"centering must be >= 0, got {centering}")

    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        values = predictions.values
        if values is None:
            raise ValueError(
                "predictions.values must be given, got None; a reward model has a "
                "value head"
            )
        mask = in_sequence(batch.loss_mask, batch.segment_ids)
        ones = jnp.ones(values.shape, jnp.float32)
        last = returns.at_last_token(ones, mask, batch.segment_ids) > 0
        chosen, rejected = sides(counted(values, last), batch)
        margin, _ = sides(counted(batch.advantages, last), batch)
        valid = valid_pairs(batch)
        losses = reward_model.bradley_terry(
            chosen, rejected, valid, margin=margin, centering=centering
        )
        metrics = pair_metrics(chosen, rejected, valid)
        return Objective(masked(losses, valid), metrics)

    return objective
