"""Preference losses other than DPO's: anchored, distributional, or found by search.

Each function is one composition; `pairs` describes how a batch of pairs is packed.
"""

from collections.abc import Callable
from functools import partial

from jaxrl_post.algorithms.pairs import (
    Answers,
    PerPair,
    PreferenceAlgorithm,
    Valid,
    compose_margins,
    compose_pairs,
)
from jaxrl_post.losses import anchored, margins, preference

__all__ = [
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "bco_pair",
    "discopop",
    "exo",
    "nca",
    "sppo",
]


def apo_zero(*, beta: float = 0.1) -> PreferenceAlgorithm:
    """Anchored Preference Optimization, for chosen answers better than the model's.

    Args:
        beta: > 0; see `losses.anchored.apo_zero_loss`.

    Raises:
        ValueError: `beta` is not positive.

    References:
        D'Oosterlinck et al., Anchored Preference Optimization and Contrastive
        Revisions, arXiv:2408.06266.

    >>> apo_zero().needs_reference
    True
    """
    return _of_log_ratios(anchored.apo_zero_loss, beta)


def apo_down(*, beta: float = 0.1) -> PreferenceAlgorithm:
    """Anchored Preference Optimization, for chosen answers worse than the model's.

    Args:
        beta: > 0; see `losses.anchored.apo_down_loss`.

    Raises:
        ValueError: `beta` is not positive.

    References:
        D'Oosterlinck et al., Anchored Preference Optimization and Contrastive
        Revisions, arXiv:2408.06266.

    >>> apo_down().needs_reference
    True
    """
    return _of_log_ratios(anchored.apo_down_loss, beta)


def bco_pair(*, beta: float = 0.01) -> PreferenceAlgorithm:
    """Binary Classifier Optimization on pairs, without the shift of the rewards.

    Args:
        beta: > 0; see `losses.anchored.bco_pair_loss`. The paper has 0.01.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Jung et al., Binary Classifier Optimization for Large Language Model Alignment,
        arXiv:2404.04656.

    >>> bco_pair().needs_reference
    True
    """
    return _of_log_ratios(anchored.bco_pair_loss, beta)


def nca(*, beta: float = 0.01) -> PreferenceAlgorithm:
    """Noise Contrastive Alignment on pairs.

    Args:
        beta: > 0; see `losses.anchored.nca_loss`. The paper has 0.01.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Chen et al., Noise Contrastive Alignment of Language Models with Explicit
        Rewards, arXiv:2402.05369.

    >>> nca().needs_reference
    True
    """
    return _of_log_ratios(anchored.nca_loss, beta)


def sppo(*, beta: float = 0.001) -> PreferenceAlgorithm:
    """The step of Self-Play Preference Optimization on given pairs, with hard labels.

    Args:
        beta: > 0; see `losses.anchored.sppo_loss`. The authors' models have 1 / 1000.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Wu et al., Self-Play Preference Optimization for Language Model Alignment,
        arXiv:2405.00675.

    >>> sppo().needs_reference
    True
    """
    return _of_log_ratios(anchored.sppo_loss, beta)


def discopop(*, beta: float = 0.05, tau: float = 0.05) -> PreferenceAlgorithm:
    """DiscoPOP, the log-ratio modulated loss that a language model discovered.

    Args:
        beta: > 0; see `losses.margins.discopop_loss`.
        tau: > 0, temperature of the blend.

    Raises:
        ValueError: a hyperparameter is not positive.

    References:
        Lu et al., Discovering Preference Optimization Algorithms with and for Large
        Language Models, arXiv:2406.08414.

    >>> discopop().needs_reference
    True
    """
    loss = partial(margins.discopop_loss, beta=beta, tau=tau)
    return compose_margins(loss, scale=beta)


def exo(*, beta: float = 0.1, label_smoothing: float = 1e-3) -> PreferenceAlgorithm:
    """Efficient Exact Optimization on pairs: DPO with the reverse of its KL.

    Args:
        beta: > 0; see `losses.margins.exo_loss`.
        label_smoothing: in (0, 0.5), share of labels taken to be wrong.

    References:
        Ji et al., Towards Efficient and Exact Optimization of Language Model Alignment,
        arXiv:2402.00856.

    >>> exo().needs_reference
    True
    """
    loss = partial(margins.exo_loss, beta=beta, label_smoothing=label_smoothing)
    return compose_margins(loss, scale=beta)


def aot(*, beta: float = 0.1, label_smoothing: float = 0.0) -> PreferenceAlgorithm:
    """Alignment via Optimal Transport of pairs, which compares quantiles.

    The pairs of a microbatch are sorted together. Unlike with other losses, the result
    of a step therefore depends on its split into microbatches.

    Args:
        beta: > 0; see `losses.preference.sigmoid_loss`.

    References:
        Melnyk et al., Distributional Preference Alignment of LLMs via Optimal
        Transport, arXiv:2406.05882.

    >>> aot().needs_reference
    True
    """
    loss = partial(preference.sigmoid_loss, beta=beta, label_smoothing=label_smoothing)
    return compose_margins(loss, scale=beta, margin_of=margins.aot_margin)


def aot_unpaired(
    *, beta: float = 0.1, label_smoothing: float = 0.0
) -> PreferenceAlgorithm:
    """Alignment via Optimal Transport, of chosen against rejected answers.

    As `aot`, but the pairing of chosen and rejected answers does not matter.

    Args:
        beta: > 0; see `losses.preference.sigmoid_loss`.

    References:
        Melnyk et al., Distributional Preference Alignment of LLMs via Optimal
        Transport, arXiv:2406.05882.

    >>> aot_unpaired().needs_reference
    True
    """
    loss = partial(preference.sigmoid_loss, beta=beta, label_smoothing=label_smoothing)
    return compose_margins(loss, scale=beta, margin_of=margins.aot_unpaired_margin)


def _of_log_ratios(
    anchored_loss: Callable[..., PerPair], beta: float
) -> PreferenceAlgorithm:
    def loss(chosen: Answers, rejected: Answers, valid: Valid) -> PerPair:
        log_ratios = (
            preference.log_ratio(side.policy, side.reference, valid)
            for side in (chosen, rejected)
        )
        return anchored_loss(*log_ratios, valid, beta=beta)

    return compose_pairs(loss, scale=beta)
