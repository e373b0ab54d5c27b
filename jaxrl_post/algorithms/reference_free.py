"""Preference losses without a reference policy.

Each function is one composition; `pairs` describes how a batch of pairs is packed.
"""

from jaxrl_post.algorithms.pairs import (
    Answers,
    PerPair,
    PreferenceAlgorithm,
    Valid,
    compose_pairs,
)
from jaxrl_post.losses import reference_free
from jaxrl_post.losses.sequences import counted

__all__ = ["cpo", "orpo", "reference_free_dpo", "simpo"]


def reference_free_dpo(
    *, beta: float = 0.1, label_smoothing: float = 0.0
) -> PreferenceAlgorithm:
    """DPO with a uniform reference: `cpo` without the likelihood term.

    Args:
        beta: > 0; see `losses.reference_free.cpo_loss`.

    References:
        Xu et al., Contrastive Preference Optimization, arXiv:2401.08417.

    >>> reference_free_dpo().needs_reference
    False
    """
    return cpo(beta=beta, nll_weight=0.0, label_smoothing=label_smoothing)


def simpo(
    *, beta: float = 2.0, target_margin: float = 1.0, label_smoothing: float = 0.0
) -> PreferenceAlgorithm:
    """Simple Preference Optimization, without a reference.

    Args:
        beta: > 0, scale of the mean log-prob per token.
        target_margin: >= 0, the paper's gamma.

    References:
        Meng et al., SimPO, arXiv:2405.14734.

    >>> simpo().needs_reference
    False
    """

    def loss(chosen: Answers, rejected: Answers, valid: Valid) -> PerPair:
        return reference_free.simpo_loss(
            chosen.means().policy,
            rejected.means().policy,
            valid,
            beta=beta,
            target_margin=target_margin,
            label_smoothing=label_smoothing,
        )

    return compose_pairs(loss, scale=beta, of_means=True, needs_reference=False)


def cpo(
    *, beta: float = 0.1, nll_weight: float = 1.0, label_smoothing: float = 0.0
) -> PreferenceAlgorithm:
    """Contrastive Preference Optimization: reference-free DPO plus a likelihood term.

    Args:
        beta: > 0; see `losses.reference_free.cpo_loss`.
        nll_weight: >= 0, weight of the chosen answer's mean token loss -log p.

    References:
        Xu et al., Contrastive Preference Optimization, arXiv:2401.08417.

    >>> cpo().needs_reference
    False
    """
    if nll_weight < 0:
        raise ValueError(f"nll_weight must be >= 0, got {nll_weight}")

    def loss(chosen: Answers, rejected: Answers, valid: Valid) -> PerPair:
        contrast = reference_free.cpo_loss(
            chosen.policy,
            rejected.policy,
            valid,
            beta=beta,
            label_smoothing=label_smoothing,
        )
        return contrast - nll_weight * counted(chosen.means().policy, valid)

    return compose_pairs(loss, scale=beta, needs_reference=False)


def orpo(*, beta: float = 0.1) -> PreferenceAlgorithm:
    """Odds-Ratio Preference Optimization: a likelihood term plus a term of odds ratios.

    Args:
        beta: > 0, weight of the odds ratio, the paper's lambda.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Hong et al., ORPO, arXiv:2403.07691.

    >>> orpo().needs_reference
    False
    """
    if not beta > 0:
        raise ValueError(f"beta must be > 0, got {beta}")

    def loss(chosen: Answers, rejected: Answers, valid: Valid) -> PerPair:
        likelihood = counted(chosen.means().policy, valid)
        odds = reference_free.orpo_loss(
            chosen.means().policy, rejected.means().policy, valid
        )
        return beta * odds - likelihood

    return compose_pairs(loss, scale=beta, of_means=True, needs_reference=False)
