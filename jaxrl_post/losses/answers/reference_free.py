"""Preference losses without a reference policy.

As in `preference`, arrays and results hold one value per pair. SimPO and ORPO act on
the mean log-prob per token (`preference.length_normalized`), CPO on the sum.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.answers.preference import counted_pairs, sigmoid_loss
from jaxrl_post.losses.arguments import checked
from jaxrl_post.types import Array, Bool, Float

__all__ = ["cpo_loss", "orpo_loss", "simpo_loss"]

# Log of the probability 1 - 2^-23; closer to 1, float32 cannot distinguish odds.
_MAX_LOGPROB = -(2.0**-23)


@checked
def simpo_loss(
    policy_chosen_mean: Float[Array, "*pairs"],
    policy_rejected_mean: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
    target_margin: float,
    label_smoothing: float = 0.0,
) -> Float[Array, "*pairs"]:
    """SimPO: DPO on mean log-probs m, without a reference and with a target margin.

    L = -log sigmoid(beta (m_c - m_r) - gamma)

    Args:
        policy_chosen_mean: m_c (nats per token), differentiable.
        policy_rejected_mean: m_r (nats per token), differentiable.
        beta: > 0; 2 to 10 in the paper.
        target_margin: gamma >= 0, in the unit of beta m. TRL has gamma too; the
            authors' later code has gamma / beta.
        label_smoothing: in [0, 0.5), as in `preference.sigmoid_loss`.

    References:
        Meng et al., SimPO, arXiv:2405.14734.

    >>> chosen, rejected = jnp.array([-1.0]), jnp.array([-1.5])
    >>> round(simpo_loss(chosen, rejected, beta=2.0, target_margin=1.0).item(), 6)
    0.693147
    """
    if target_margin < 0:
        raise ValueError(f"target_margin must be >= 0, got {target_margin}")
    if beta <= 0:
        raise ValueError(f"beta must be > 0, got {beta}")
    margin = _difference(policy_chosen_mean, policy_rejected_mean, valid)
    return sigmoid_loss(
        margin - target_margin / beta, valid, beta=beta, label_smoothing=label_smoothing
    )


@checked
def cpo_loss(
    policy_chosen: Float[Array, "*pairs"],
    policy_rejected: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Array, "*pairs"]:
    """CPO's preference term: DPO with a uniform reference.

    L = -log sigmoid(beta (log pi(y_c) - log pi(y_r)))

    The whole loss adds the chosen response's negative log-likelihood
    (`supervised.next_token_loss`), times alpha, 1 in the paper.

    Args:
        label_smoothing: in [0, 0.5), as in `preference.sigmoid_loss`.

    References:
        Xu et al., Contrastive Preference Optimization, arXiv:2401.08417.

    >>> round(cpo_loss(jnp.array([-4.0]), jnp.array([-4.0]), beta=0.1).item(), 6)
    0.693147
    """
    margin = _difference(policy_chosen, policy_rejected, valid)
    return sigmoid_loss(margin, valid, beta=beta, label_smoothing=label_smoothing)


@checked
def orpo_loss(
    policy_chosen_mean: Float[Array, "*pairs"],
    policy_rejected_mean: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
) -> Float[Array, "*pairs"]:
    """ORPO's preference term, on the odds of the mean token probability.

    L = -log sigmoid(log odds_c - log odds_r),  odds = e^m / (1 - e^m)

    The whole loss is the chosen response's negative log-likelihood plus lambda times
    this term (TRL calls lambda beta). Probabilities are clamped to at most 1 - 2^-23,
    without gradient beyond, so that the odds stay finite.

    Args:
        policy_chosen_mean: m_c (nats per token), differentiable.
        policy_rejected_mean: m_r (nats per token), differentiable.

    References:
        Hong et al., ORPO, arXiv:2403.07691.

    >>> round(orpo_loss(jnp.array([-1.0]), jnp.array([-1.0])).item(), 6)
    0.693147
    """

    def log_odds(mean: Array) -> Array:
        mean = jnp.minimum(counted_pairs(mean, valid), _MAX_LOGPROB)
        return mean - jax.nn.log1mexp(-mean)

    margin = log_odds(policy_chosen_mean) - log_odds(policy_rejected_mean)
    return sigmoid_loss(margin, valid, beta=1.0)


def _difference(
    chosen: Array, rejected: Array, valid: Array | None
) -> Float[Array, "*pairs"]:
    return counted_pairs(chosen, valid) - counted_pairs(rejected, valid)
