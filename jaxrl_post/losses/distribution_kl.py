"""Exact divergences between whole next-token distributions, from logits.

They are for distillation, and for other uses with both models' logits; `kl` estimates
from the sampled token alone. In distillation, the forward KL is
kl_divergence(teacher, student), and the reverse KL is kl_divergence(student, teacher).

Logits need not be normalised, so log-probs work too; divide them by a temperature
beforehand. A logit of -inf is a token of probability 0, and 0 log 0 = 0. Gradients flow
through both arguments: pass a teacher's logits under stop-gradient. For each token and
argument, float32 values of the vocabulary's size are stored.
"""

import math

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float

__all__ = ["entropy", "jensen_shannon", "kl_divergence"]


@checked
def kl_divergence(
    logits_p: Float[Array, "*shape vocab"],
    logits_q: Float[Array, "*shape vocab"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """KL(p || q) = sum_v p(v) (log p(v) - log q(v)).

    Args:
        logits_p: of p, any float dtype, differentiable.
        logits_q: of q, any float dtype, differentiable.

    Returns:
        float32 (nats), >= 0 up to rounding; inf if a token has probability 0 in q and
        not in p; 0 where the mask is False.

    References:
        Kullback and Leibler, On Information and Sufficiency, 1951.

    >>> p, q = jnp.array([[0.0, -jnp.inf]]), jnp.array([[0.0, 0.0]])
    >>> kl_divergence(p, q, jnp.array([True])).item()  # log 2
    0.6931471824645996
    """
    log_p, log_q = _log_probs(logits_p, mask), _log_probs(logits_q, mask)
    return counted(_expectation(log_p, log_p - log_q), mask)


@checked
def jensen_shannon(
    logits_p: Float[Array, "*shape vocab"],
    logits_q: Float[Array, "*shape vocab"],
    mask: Bool[Array, "*shape"],
    *,
    beta: float,
) -> Float[Array, "*shape"]:
    """Generalised Jensen-Shannon divergence, finite for all distributions.

    JSD_beta(p || q) = beta KL(p || m) + (1 - beta) KL(q || m)
    m = beta p + (1 - beta) q

    GKD has the teacher as p and the student as q. JSD_beta / beta tends to KL(p || q)
    as beta tends to 0, and JSD_beta / (1 - beta) to KL(q || p) as it tends to 1; at
    either end JSD_beta itself is 0, where `distill.generalized_jsd`, like TRL, returns
    the KL.

    Args:
        logits_p: of p, any float dtype, differentiable.
        logits_q: of q, any float dtype, differentiable.
        beta: in (0, 1); 0.5 is the symmetric divergence.

    Returns:
        float32 (nats), in [0, log 2] up to rounding; 0 where the mask is False.

    Raises:
        ValueError: `beta` is out of its range.

    References:
        Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649,
        eq. 1.

    >>> p, q = jnp.array([[0.0, -jnp.inf]]), jnp.array([[-jnp.inf, 0.0]])
    >>> jensen_shannon(p, q, jnp.array([True]), beta=0.5).item()  # log 2
    0.6931471824645996
    """
    if not 0 < beta < 1:
        raise ValueError(
            f"beta must be in (0, 1), got {beta}; the divergence is 0 at both ends, "
            "where kl_divergence(p, q) and kl_divergence(q, p) are its limits"
        )
    log_p, log_q = _log_probs(logits_p, mask), _log_probs(logits_q, mask)
    # Where both are -inf, the gradient of logaddexp would be NaN.
    floor = jnp.finfo(jnp.float32).min / 2
    log_m = jnp.logaddexp(
        jnp.maximum(log_p, floor) + math.log(beta),
        jnp.maximum(log_q, floor) + math.log1p(-beta),
    )
    from_p = _expectation(log_p, log_p - log_m)
    from_q = _expectation(log_q, log_q - log_m)
    return counted(beta * from_p + (1 - beta) * from_q, mask)


@checked
def entropy(
    logits: Float[Array, "*shape vocab"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Entropy H(p) = -sum_v p(v) log p(v).

    Args:
        logits: any float dtype, differentiable.

    Returns:
        float32 (nats), in [0, log vocab]; 0 where the mask is False.

    >>> logits = jnp.array([[0.0, 0.0, -jnp.inf], [0.0, -jnp.inf, -jnp.inf]])
    >>> entropy(logits, jnp.array([True, True])).tolist()  # log 2, and 0
    [0.6931471824645996, 0.0]
    """
    log_p = _log_probs(logits, mask)
    return counted(_expectation(log_p, -log_p), mask)


def _log_probs(
    logits: Float[Array, "*shape vocab"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape vocab"]:
    whole = jnp.broadcast_to(mask[..., None], logits.shape)
    return jax.nn.log_softmax(counted(logits, whole), axis=-1)


def _expectation(
    log_p: Float[Array, "*shape vocab"], values: Float[Array, "*shape vocab"]
) -> Float[Array, "*shape"]:
    """E_p[values], ignoring values at tokens of probability 0; a NaN in p is kept."""
    p = jnp.exp(log_p)
    return (p * jnp.where(p == 0, 0.0, values)).sum(axis=-1)
