"""Preference losses of each response's own log-ratio, not of the pair's margin.

DPO depends only on the difference of the two log-ratios, so both likelihoods may fall
as long as the rejected one falls faster. These losses anchor each response's log-ratio

    c = log(pi(y_c) / ref(y_c)),  r = log(pi(y_r) / ref(y_r))

to a value of its own. Arrays hold one value per pair, from `preference.log_ratio`;
gradients flow through both log-ratios.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.answers.preference import counted_pairs, require_beta
from jaxrl_post.losses.arguments import checked
from jaxrl_post.types import Array, Bool, Float

__all__ = [
    "apo_down_loss",
    "apo_zero_loss",
    "bco_pair_loss",
    "nca_loss",
    "sppo_loss",
]


@checked
def apo_zero_loss(
    chosen_log_ratio: Float[Array, "*pairs"],
    rejected_log_ratio: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
) -> Float[Array, "*pairs"]:
    """APO-zero: the chosen response becomes likelier, the rejected one less likely.

    L = (1 - sigmoid(beta c)) + sigmoid(beta r)

    Use it if the chosen responses are better than the model's own.

    Returns:
        float32 in [0, 2]; 0 where `valid` is False.

    Raises:
        ValueError: `beta` is not positive.

    References:
        D'Oosterlinck et al., Anchored Preference Optimization and Contrastive
        Revisions, arXiv:2408.06266, eq. 7.

    >>> apo_zero_loss(jnp.array([0.0]), jnp.array([0.0]), beta=0.1).tolist()
    [1.0]
    """
    require_beta(beta)
    chosen = beta * counted_pairs(chosen_log_ratio, valid)
    rejected = beta * counted_pairs(rejected_log_ratio, valid)
    return counted_pairs(jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected), valid)


@checked
def apo_down_loss(
    chosen_log_ratio: Float[Array, "*pairs"],
    rejected_log_ratio: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
) -> Float[Array, "*pairs"]:
    """APO-down: both responses become less likely, the rejected one more so.

    L = sigmoid(beta c) + (1 - sigmoid(beta (c - r)))

    Use it if the chosen responses are worse than the model's own.

    Returns:
        float32 in [0, 2]; 0 where `valid` is False.

    Raises:
        ValueError: `beta` is not positive.

    References:
        D'Oosterlinck et al., Anchored Preference Optimization and Contrastive
        Revisions, arXiv:2408.06266, eq. 8.

    >>> apo_down_loss(jnp.array([0.0]), jnp.array([0.0]), beta=0.1).tolist()
    [1.0]
    """
    require_beta(beta)
    chosen = beta * counted_pairs(chosen_log_ratio, valid)
    rejected = beta * counted_pairs(rejected_log_ratio, valid)
    loss = jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected - chosen)
    return counted_pairs(loss, valid)


@checked
def bco_pair_loss(
    chosen_log_ratio: Float[Array, "*pairs"],
    rejected_log_ratio: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
) -> Float[Array, "*pairs"]:
    """BCO on pairs: a binary classifier whose logit is the implicit reward.

    L = -log sigmoid(beta c) - log sigmoid(-beta r)

    It bounds DPO's loss from above. As in TRL's current bco_pair, the rewards are not
    shifted by their running mean; KTO's reference point (`unpaired`) is such a shift.

    Returns:
        float32, >= 0; 0 where `valid` is False.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Jung et al., Binary Classifier Optimization for Large Language Model Alignment,
        arXiv:2404.04656.

    >>> loss = bco_pair_loss(jnp.array([0.0]), jnp.array([0.0]), beta=0.1)
    >>> round(loss.item(), 6)  # 2 log 2
    1.386294
    """
    require_beta(beta)
    chosen = beta * counted_pairs(chosen_log_ratio, valid)
    rejected = beta * counted_pairs(rejected_log_ratio, valid)
    return counted_pairs(_nll(chosen) + _nll(-rejected), valid)


@checked
def nca_loss(
    chosen_log_ratio: Float[Array, "*pairs"],
    rejected_log_ratio: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
) -> Float[Array, "*pairs"]:
    """NCA on pairs: a noise-contrastive loss that keeps up the chosen likelihood.

    L = -log sigmoid(beta c) - 1/2 log sigmoid(-beta c) - 1/2 log sigmoid(-beta r)

    Its minimum in c is finite: sigmoid(beta c) = 2/3.

    Args:
        beta: > 0 (per nat), the paper's alpha.

    Returns:
        float32, >= 0; 0 where `valid` is False.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Chen et al., Noise Contrastive Alignment of Language Models with Explicit
        Rewards, arXiv:2402.05369.

    >>> loss = nca_loss(jnp.array([0.0]), jnp.array([0.0]), beta=0.1)
    >>> round(loss.item(), 6)  # 2 log 2
    1.386294
    """
    require_beta(beta)
    chosen = beta * counted_pairs(chosen_log_ratio, valid)
    rejected = beta * counted_pairs(rejected_log_ratio, valid)
    loss = _nll(chosen) + 0.5 * _nll(-chosen) + 0.5 * _nll(-rejected)
    return counted_pairs(loss, valid)


@checked
def sppo_loss(
    chosen_log_ratio: Float[Array, "*pairs"],
    rejected_log_ratio: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
) -> Float[Array, "*pairs"]:
    """SPPO with hard labels: each log-ratio is regressed on its own target.

    L = (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2

    The paper's target is (P - 1/2) / beta with P the probability of winning against
    the policy; here, as in TRL's sppo_hard, P is 1 for the chosen and 0 for the
    rejected response.

    Args:
        beta: > 0 (per nat), 1 / eta of the paper.

    Returns:
        float32, >= 0; 0 where `valid` is False.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Wu et al., Self-Play Preference Optimization for Language Model Alignment,
        arXiv:2405.00675.

    >>> sppo_loss(jnp.array([5.0]), jnp.array([-4.0]), beta=0.1).tolist()
    [1.0]
    """
    require_beta(beta)
    target = 1 / (2 * beta)
    chosen = counted_pairs(chosen_log_ratio, valid) - target
    rejected = counted_pairs(rejected_log_ratio, valid) + target
    return counted_pairs(jnp.square(chosen) + jnp.square(rejected), valid)


def _nll(logit: Float[Array, "*pairs"]) -> Float[Array, "*pairs"]:
    return -jax.nn.log_sigmoid(logit)
