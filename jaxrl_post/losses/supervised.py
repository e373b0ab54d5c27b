"""Losses of supervised learning."""

from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float

__all__ = ["next_token_loss"]


def next_token_loss(
    logprobs: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Negative log-likelihood of each token: L_t = -log p_t.

    Args:
        logprobs: log-probs (nats) of the target tokens.
        mask: bool, True where a token is a target.

    Returns:
        float32; 0 where the mask is False.

    >>> import jax.numpy as jnp
    >>> logprobs = jnp.array([-0.5, -jnp.inf])
    >>> next_token_loss(logprobs, jnp.array([True, False])).tolist()
    [0.5, 0.0]
    """
    return counted(-logprobs, mask)
