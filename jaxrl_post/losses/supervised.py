"""Losses of supervised learning."""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float

__all__ = ["dynamic_fine_tuning_loss", "next_token_loss"]


@checked
def next_token_loss(
    policy_logprobs: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Negative log-likelihood of each token: L_t = -log p_t.

    Args:
        policy_logprobs: log-probs (nats) of the target tokens.
        mask: bool, True where a token is a target.

    >>> policy_logprobs = jnp.array([-0.5, -jnp.inf])
    >>> next_token_loss(policy_logprobs, jnp.array([True, False])).tolist()
    [0.5, 0.0]
    """
    return counted(-policy_logprobs, mask)


@checked
def dynamic_fine_tuning_loss(
    policy_logprobs: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Dynamic fine-tuning (DFT): L_t = -stop_gradient(p_t) log p_t.

    The gradient equals the gradient of -p_t, so unlikely tokens do not dominate it as
    they dominate the gradient of `next_token_loss`.

    Args:
        policy_logprobs: log-probs (nats) of the target tokens, finite where they count.
        mask: bool, True where a token is a target.

    Returns:
        float32 in [0, 1 / e]; 0 where the mask is False.

    References:
        Wu et al., On the Generalization of SFT, arXiv:2508.05629.

    >>> policy_logprobs = jnp.log(jnp.array([0.5, 0.0]))
    >>> loss = dynamic_fine_tuning_loss(policy_logprobs, jnp.array([True, False]))
    >>> [round(value, 6) for value in loss.tolist()]  # 0.5 log 2, and 0
    [0.346574, 0.0]
    """
    nll = next_token_loss(policy_logprobs, mask)
    return jax.lax.stop_gradient(jnp.exp(-nll)) * nll
