"""The objective of supervised fine-tuning."""

from jaxrl_post.algorithms.objective import Objective, Predictions, require_logprobs
from jaxrl_post.losses import reduce, supervised
from jaxrl_post.losses.arguments import checked
from jaxrl_post.types import TokenBatch

__all__ = ["next_token"]


@checked
def next_token(predictions: Predictions, batch: TokenBatch) -> Objective:
    """Mean negative log-likelihood of the tokens that the mask marks, in nats.

    Args:
        predictions: outputs of a language model.
        batch: packed examples; the loss mask marks the targets.

    Returns:
        (sum over targets, number of targets).

    >>> import jax.numpy as jnp
    >>> ids, zeros = jnp.ones((1, 2), jnp.int32), jnp.zeros((1, 2))
    >>> batch = TokenBatch(ids, ids, ids, ids > 0, zeros, zeros, ids)
    >>> next_token(Predictions(jnp.array([[-1.0, -3.0]])), batch).loss.mean().item()
    2.0
    """
    losses = supervised.next_token_loss(require_logprobs(predictions), batch.loss_mask)
    return Objective(reduce.token_mean(losses, batch.loss_mask, batch.ends), {})
