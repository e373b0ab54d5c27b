"""Preference losses with a reference policy: DPO and its variants.

Each function is one composition; `pairs` describes how a batch of pairs is packed.
"""

from functools import partial

from jaxrl_post.algorithms.pairs import (
    Answers,
    PerPair,
    PreferenceAlgorithm,
    Valid,
    compose_margins,
    compose_pairs,
)
from jaxrl_post.losses import preference

__all__ = [
    "alpha_divergence_dpo",
    "dpo",
    "hinge",
    "ipo",
    "jensen_shannon_dpo",
    "ln_dpo",
    "robust_dpo",
    "wpo",
]


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> PreferenceAlgorithm:
    """Direct Preference Optimization; with label smoothing, conservative DPO (cDPO).

    Args:
        beta: > 0; see `losses.preference.sigmoid_loss`.

    References:
        Rafailov et al., Direct Preference Optimization, arXiv:2305.18290.

    >>> dpo().needs_reference
    True
    """
    loss = partial(preference.sigmoid_loss, beta=beta, label_smoothing=label_smoothing)
    return compose_margins(loss, scale=beta)


def robust_dpo(
    *, beta: float = 0.1, label_smoothing: float = 0.1
) -> PreferenceAlgorithm:
    """DPO, made unbiased for labels that are flipped with a known probability.

    Args:
        beta: > 0; see `losses.preference.robust_loss`.
        label_smoothing: in [0, 0.5), the probability that a label is flipped.

    References:
        Chowdhury et al., Provably Robust DPO, arXiv:2403.00409.

    >>> robust_dpo().needs_reference
    True
    """
    loss = partial(preference.robust_loss, beta=beta, label_smoothing=label_smoothing)
    return compose_margins(loss, scale=beta)


def ln_dpo(*, beta: float = 2.0, label_smoothing: float = 0.0) -> PreferenceAlgorithm:
    """DPO on mean log-ratios per token, so that length is not rewarded.

    Args:
        beta: > 0, larger than DPO's by a factor of about an answer's length.

    References:
        Lambert et al., Tulu 3, arXiv:2411.15124 (length-normalised DPO).

    >>> ln_dpo().needs_reference
    True
    """
    loss = partial(preference.sigmoid_loss, beta=beta, label_smoothing=label_smoothing)
    return compose_margins(loss, scale=beta, of_means=True)


def hinge(*, beta: float = 0.1) -> PreferenceAlgorithm:
    """The hinge loss on DPO's margin.

    Args:
        beta: > 0; see `losses.preference.hinge_loss`.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Zhao et al., SLiC-HF, arXiv:2305.10425.

    >>> hinge().needs_reference
    True
    """
    loss = partial(preference.hinge_loss, beta=beta)
    return compose_margins(loss, scale=beta)


def ipo(*, beta: float = 0.1) -> PreferenceAlgorithm:
    """Identity Preference Optimization, on mean log-ratios per token as in TRL.

    Args:
        beta: > 0; see `losses.preference.ipo_loss`.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Azar et al., A General Theoretical Paradigm to Understand Learning from Human
        Preferences, arXiv:2310.12036.

    >>> ipo().needs_reference
    True
    """
    loss = partial(preference.ipo_loss, beta=beta)
    return compose_margins(loss, scale=beta, of_means=True)


def alpha_divergence_dpo(
    *, beta: float = 0.1, alpha: float = 0.5, label_smoothing: float = 0.0
) -> PreferenceAlgorithm:
    """f-DPO with an alpha-divergence to the reference instead of the reverse KL.

    The metrics show the rewards of DPO, beta times the log-ratio.

    Args:
        beta: > 0, the strength of the divergence.
        alpha: in (0, 1]; 1 is the forward KL; see
            `losses.preference.alpha_divergence_margin`.

    References:
        Wang et al., Beyond Reverse KL, arXiv:2309.16240.

    >>> alpha_divergence_dpo(alpha=1.0).needs_reference
    True
    """
    loss = partial(preference.sigmoid_loss, beta=beta, label_smoothing=label_smoothing)
    margin = partial(preference.alpha_divergence_margin, alpha=alpha)
    return compose_margins(loss, scale=beta, margin_of=margin)


def jensen_shannon_dpo(
    *, beta: float = 0.1, label_smoothing: float = 0.0
) -> PreferenceAlgorithm:
    """f-DPO with the Jensen-Shannon divergence between policy and reference.

    The metrics show the rewards of DPO, beta times the log-ratio.

    Args:
        beta: > 0, the strength of the divergence; see
            `losses.preference.jensen_shannon_margin`.

    References:
        Wang et al., Beyond Reverse KL, arXiv:2309.16240.

    >>> jensen_shannon_dpo().needs_reference
    True
    """
    loss = partial(preference.sigmoid_loss, beta=beta, label_smoothing=label_smoothing)
    margin = preference.jensen_shannon_margin
    return compose_margins(loss, scale=beta, margin_of=margin)


def wpo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> PreferenceAlgorithm:
    """DPO with each pair weighted by how likely the policy itself is to produce it.

    The weights are the paper's without alignment: its sampled and greedy alignment need
    every token's whole distribution.

    Args:
        beta: > 0; see `losses.preference.sigmoid_loss`.

    Returns:
        The algorithm. Its loss is a mean over pairs, not over their weights.

    References:
        Zhou et al., WPO, arXiv:2406.11827.

    >>> wpo().needs_reference
    True
    """

    def loss(chosen: Answers, rejected: Answers, valid: Valid) -> PerPair:
        weights = preference.wpo_weights(
            chosen.means().policy, rejected.means().policy, valid
        )
        log_probs = chosen.policy, rejected.policy, chosen.reference, rejected.reference
        margin = preference.log_ratio_margin(*log_probs, valid)
        return weights * preference.sigmoid_loss(
            margin, valid, beta=beta, label_smoothing=label_smoothing
        )

    return compose_pairs(loss, scale=beta)
