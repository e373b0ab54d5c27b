"""Losses of single responses that are labelled desirable or undesirable.

The arrays are [*responses]: log-probabilities (nats) of whole responses, summed over
their tokens. `valid` is False where a slot holds no response, as in `preference`.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.answers.preference import (
    counted_pairs,
    implicit_reward,
    log_ratio,
)
from jaxrl_post.losses.arguments import checked
from jaxrl_post.types import Array, Bool, Float

__all__ = ["kto_loss", "kto_reference_point"]


@checked
def kto_reference_point(
    policy_mismatched: Float[Array, "*responses"],
    reference_mismatched: Float[Array, "*responses"],
    valid: Bool[Array, "*responses"] | None = None,
) -> Float[Array, ""]:
    """KTO's reference point, an estimate of KL(policy || reference) from the batch.

    z = max(0, mean_i(log pi(y_j | x_i) - log ref(y_j | x_i))), j the next after i

    Each prompt is paired with the response to another prompt, which needs one more
    forward pass of both models but no sampling. The mean is over the given array; TRL
    takes it over all devices, the paper over a microbatch.

    Args:
        policy_mismatched: log pi(y_j | x_i) (nats).
        reference_mismatched: log ref(y_j | x_i) (nats).

    Returns:
        float32 scalar >= 0 (nats), without gradient; 0 where nothing is valid.

    References:
        Ethayarajh et al., KTO, arXiv:2402.01306.

    >>> policy, reference = jnp.array([-4.0, -5.0]), jnp.array([-6.0, -6.0])
    >>> kto_reference_point(policy, reference).item()
    1.5
    """
    mean = implicit_reward(
        policy_mismatched, reference_mismatched, valid, beta=1.0
    ).mean()
    return jax.lax.stop_gradient(jnp.maximum(mean, 0.0))


@checked
def kto_loss(
    policy_logprobs: Float[Array, "*responses"],
    reference_logprobs: Float[Array, "*responses"],
    desirable: Bool[Array, "*responses"],
    reference_point: Float[Array, ""],
    valid: Bool[Array, "*responses"] | None = None,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Array, "*responses"]:
    """KTO: a loss-averse human's value of a response's log-ratio r relative to z.

    L = w_D (1 - sigmoid(beta (r - z)))  where the response is desirable,
        w_U (1 - sigmoid(beta (z - r)))  where it is not;  r = log(pi(y) / ref(y))

    Args:
        policy_logprobs: log pi(y) (nats), differentiable.
        reference_logprobs: log ref(y) (nats).
        desirable: bool, the response's label.
        reference_point: z (nats), held constant; see `kto_reference_point`.
        desirable_weight: w_D >= 0.
        undesirable_weight: w_U >= 0. Give a rarer label a larger weight, so that both
            labels contribute about equally.

    Returns:
        float32 in [0, w]; 0 where `valid` is False.

    References:
        Ethayarajh et al., KTO, arXiv:2402.01306.

    >>> policy, desirable = jnp.array([-4.0, -4.0]), jnp.array([True, False])
    >>> kto_loss(policy, policy, desirable, jnp.array(0.0), beta=0.1).tolist()
    [0.5, 0.5]
    """
    if beta <= 0:
        raise ValueError(f"beta must be > 0, got {beta}")
    _require_weight("desirable_weight", desirable_weight)
    _require_weight("undesirable_weight", undesirable_weight)
    point = jax.lax.stop_gradient(reference_point).astype(jnp.float32)
    gain = beta * (log_ratio(policy_logprobs, reference_logprobs, valid) - point)
    # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits for large x.
    loss = jnp.where(
        desirable,
        desirable_weight * jax.nn.sigmoid(-gain),
        undesirable_weight * jax.nn.sigmoid(gain),
    )
    return counted_pairs(loss, valid)


def _require_weight(name: str, weight: float) -> None:
    if weight < 0:
        raise ValueError(f"{name} must be >= 0, got {weight}")
