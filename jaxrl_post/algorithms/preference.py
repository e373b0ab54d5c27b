"""Objectives on preference pairs, packed side by side.

In a row of a `TokenBatch` the segments 2k - 1 and 2k are a pair: the chosen answer,
then the rejected one, each after its own copy of the prompt. The loss mask marks the
answers. The count of a loss is the number of pairs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms.objective import Objective, Predictions
from jaxrl_post.losses import preference, reference_free, returns, reward_model
from jaxrl_post.losses.sequences import counted, in_sequence, segment_totals
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array, Bool, Float, TokenBatch

__all__ = [
    "PreferenceAlgorithm",
    "cpo",
    "dpo",
    "hinge",
    "ipo",
    "ln_dpo",
    "orpo",
    "reward_model_objective",
    "robust_dpo",
    "simpo",
]


class PreferenceAlgorithm(NamedTuple):
    """A preference loss as a pure function.

    Attributes:
        objective: (predictions, batch of packed pairs) to an `Objective`.
        needs_reference: whether it reads `batch.reference_logprobs`.
    """

    objective: Callable[[Predictions, TokenBatch], Objective]
    needs_reference: bool


type PerPair = Float[Array, "rows pairs"]


class Answers(NamedTuple):
    """The answers of a batch's pairs, one side of them; float32 [rows, pairs].

    Attributes:
        policy: log-prob of the answer (nats), differentiable.
        reference: under the reference policy; zeros without one.
        length: tokens of the answer.
    """

    policy: PerPair
    reference: PerPair
    length: PerPair

    def means(self) -> "Answers":
        """The same a token."""
        size = jnp.maximum(self.length, 1.0)
        return Answers(self.policy / size, self.reference / size, self.length)


type PairLoss = Callable[[Answers, Answers, Bool[Array, "rows pairs"]], PerPair]


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> PreferenceAlgorithm:
    """Direct Preference Optimization; with label smoothing the conservative cDPO.

    Args:
        beta: > 0; see `losses.preference.sigmoid_loss`.
        label_smoothing: in [0, 0.5), share of labels taken to be wrong.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        Rafailov et al., Direct Preference Optimization, arXiv:2305.18290.

    >>> dpo().needs_reference
    True
    """

    def loss(chosen: Answers, rejected: Answers, valid: Array) -> PerPair:
        margin = _margin(chosen, rejected, valid)
        return preference.sigmoid_loss(
            margin, valid, beta=beta, label_smoothing=label_smoothing
        )

    return _compose(loss, scale=beta)


def robust_dpo(
    *, beta: float = 0.1, label_smoothing: float = 0.1
) -> PreferenceAlgorithm:
    """DPO, made unbiased for labels that are flipped with a known probability.

    Args:
        beta: > 0; see `losses.preference.robust_loss`.
        label_smoothing: in [0, 0.5), the probability.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        Chowdhury et al., Provably Robust DPO, arXiv:2403.00409.

    >>> robust_dpo().needs_reference
    True
    """

    def loss(chosen: Answers, rejected: Answers, valid: Array) -> PerPair:
        margin = _margin(chosen, rejected, valid)
        return preference.robust_loss(
            margin, valid, beta=beta, label_smoothing=label_smoothing
        )

    return _compose(loss, scale=beta)


def ln_dpo(*, beta: float = 2.0, label_smoothing: float = 0.0) -> PreferenceAlgorithm:
    """DPO on mean log-ratios a token, so that length earns nothing.

    Args:
        beta: > 0, larger than DPO's by about an answer's length.
        label_smoothing: in [0, 0.5), share of labels taken to be wrong.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        Lambert et al., Tulu 3, arXiv:2411.15124 (length-normalised DPO).

    >>> ln_dpo().needs_reference
    True
    """

    def loss(chosen: Answers, rejected: Answers, valid: Array) -> PerPair:
        margin = _margin(chosen.means(), rejected.means(), valid)
        return preference.sigmoid_loss(
            margin, valid, beta=beta, label_smoothing=label_smoothing
        )

    return _compose(loss, scale=beta, of_means=True)


def hinge(*, beta: float = 0.1) -> PreferenceAlgorithm:
    """The hinge on DPO's margin.

    Args:
        beta: > 0; see `losses.preference.hinge_loss`.

    Returns:
        The algorithm.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Zhao et al., SLiC-HF, arXiv:2305.10425.

    >>> hinge().needs_reference
    True
    """

    def loss(chosen: Answers, rejected: Answers, valid: Array) -> PerPair:
        margin = _margin(chosen, rejected, valid)
        return preference.hinge_loss(margin, valid, beta=beta)

    return _compose(loss, scale=beta)


def ipo(*, beta: float = 0.1) -> PreferenceAlgorithm:
    """Identity Preference Optimization, on mean log-ratios a token as in TRL.

    Args:
        beta: > 0; see `losses.preference.ipo_loss`.

    Returns:
        The algorithm.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Azar et al., A General Theoretical Paradigm to Understand Learning from Human
        Preferences, arXiv:2310.12036.

    >>> ipo().needs_reference
    True
    """

    def loss(chosen: Answers, rejected: Answers, valid: Array) -> PerPair:
        margin = _margin(chosen.means(), rejected.means(), valid)
        return preference.ipo_loss(margin, valid, beta=beta)

    return _compose(loss, scale=beta, of_means=True)


def simpo(
    *, beta: float = 2.0, margin: float = 1.0, label_smoothing: float = 0.0
) -> PreferenceAlgorithm:
    """Simple Preference Optimization, without a reference.

    Args:
        beta: > 0, scale of the mean log-prob a token.
        margin: >= 0, the paper's gamma.
        label_smoothing: in [0, 0.5), share of labels taken to be wrong.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        Meng et al., SimPO, arXiv:2405.14734.

    >>> simpo().needs_reference
    False
    """

    def loss(chosen: Answers, rejected: Answers, valid: Array) -> PerPair:
        return reference_free.simpo_loss(
            chosen.means().policy,
            rejected.means().policy,
            valid,
            beta=beta,
            target_margin=margin,
            label_smoothing=label_smoothing,
        )

    return _compose(loss, scale=beta, of_means=True, needs_reference=False)


def cpo(
    *, beta: float = 0.1, nll_weight: float = 1.0, label_smoothing: float = 0.0
) -> PreferenceAlgorithm:
    """Contrastive Preference Optimization: DPO on a uniform reference, and imitation.

    Args:
        beta: > 0; see `losses.reference_free.cpo_loss`.
        nll_weight: >= 0, of the chosen answer's mean negative log-likelihood a token.
        label_smoothing: in [0, 0.5), share of labels taken to be wrong.

    Returns:
        The algorithm.

    Raises:
        ValueError: a hyperparameter is out of its range.

    References:
        Xu et al., Contrastive Preference Optimization, arXiv:2401.08417.

    >>> cpo().needs_reference
    False
    """
    _require_weight(nll_weight)

    def loss(chosen: Answers, rejected: Answers, valid: Array) -> PerPair:
        contrast = reference_free.cpo_loss(
            chosen.policy,
            rejected.policy,
            valid,
            beta=beta,
            label_smoothing=label_smoothing,
        )
        return contrast - nll_weight * counted(chosen.means().policy, valid)

    return _compose(loss, scale=beta, needs_reference=False)


def orpo(*, beta: float = 0.1) -> PreferenceAlgorithm:
    """Odds-Ratio Preference Optimization: imitation, and a preference between odds.

    Args:
        beta: > 0, weight of the odds ratio, the paper's lambda.

    Returns:
        The algorithm.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Hong et al., ORPO, arXiv:2403.07691.

    >>> orpo().needs_reference
    False
    """
    if not beta > 0:
        raise ValueError(f"beta must be > 0, got {beta}")

    def loss(chosen: Answers, rejected: Answers, valid: Array) -> PerPair:
        likelihood = counted(chosen.means().policy, valid)
        odds = reference_free.orpo_loss(
            chosen.means().policy, rejected.means().policy, valid
        )
        return beta * odds - likelihood

    return _compose(loss, scale=beta, of_means=True, needs_reference=False)


def reward_model_objective(
    *, centering: float = 0.01
) -> Callable[[Predictions, TokenBatch], Objective]:
    """Bradley-Terry: the value after an answer's last token is its reward.

    Args:
        centering: >= 0, weight of the squared sum of a pair's rewards.

    Returns:
        The objective.

    Raises:
        ValueError: `centering` is negative.

    >>> callable(reward_model_objective())
    True
    """
    if centering < 0:
        raise ValueError(f"centering must be >= 0, got {centering}")

    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        values = predictions.values
        if values is None:
            raise ValueError(
                "predictions.values must be given, got None; a reward model has a "
                "value head"
            )
        mask = in_sequence(batch.loss_mask, batch.segment_ids)
        ones = jnp.ones(values.shape, jnp.float32)
        last = returns.at_last_token(ones, mask, batch.segment_ids) > 0
        chosen, rejected = _sides(counted(values, last), batch)
        valid = _valid(batch)
        losses = reward_model.bradley_terry(
            chosen, rejected, valid, centering=centering
        )
        metrics = _pair_metrics(chosen, rejected, valid)
        return Objective(masked(losses, valid), metrics)

    return objective


def _compose(
    loss: PairLoss,
    *,
    scale: float,
    of_means: bool = False,
    needs_reference: bool = True,
) -> PreferenceAlgorithm:
    """From a loss of pairs to an objective of packed tokens, with metrics.

    The implicit rewards that the metrics show are scale * (log policy - log reference),
    a token where `of_means`.
    """

    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        chosen, rejected = _answers(predictions, batch, needs_reference)
        valid = _valid(batch)
        value = masked(loss(chosen, rejected, valid), valid)
        shown = [side.means() if of_means else side for side in (chosen, rejected)]
        better, worse = (scale * (side.policy - side.reference) for side in shown)
        metrics = _pair_metrics(better, worse, valid) | {
            "preference/chosen_logprob": masked(chosen.policy, valid),
            "preference/rejected_logprob": masked(rejected.policy, valid),
        }
        return Objective(value, jax.tree.map(jax.lax.stop_gradient, metrics))

    algorithm = PreferenceAlgorithm(objective, needs_reference)
    _raise_early(algorithm)
    return algorithm


def _answers(
    predictions: Predictions, batch: TokenBatch, needs_reference: bool
) -> tuple[Answers, Answers]:
    mask = in_sequence(batch.loss_mask, batch.segment_ids)
    reference = batch.reference_logprobs
    if not needs_reference:
        reference = jnp.zeros(mask.shape, jnp.float32)
    if reference is None:
        raise ValueError(
            "batch.reference_logprobs must be given, got None; score the batch with "
            "the reference policy"
        )
    kept = (predictions.logprobs, reference, jnp.ones(mask.shape, jnp.float32))
    sides = [_sides(counted(values, mask), batch) for values in kept]
    chosen, rejected = zip(*sides, strict=True)
    return Answers(*chosen), Answers(*rejected)


def _sides(
    values: Float[Array, "rows length"], batch: TokenBatch
) -> tuple[PerPair, PerPair]:
    """Sums over the chosen and over the rejected answers of a row's pairs."""
    totals = segment_totals(values, batch.segment_ids)
    pairs = values.shape[-1] // 2
    return totals[:, 1 : 2 * pairs : 2], totals[:, 2 : 2 * pairs + 1 : 2]


def _valid(batch: TokenBatch) -> Bool[Array, "rows pairs"]:
    """Which slots hold a pair with something in both answers."""
    mask = in_sequence(batch.loss_mask, batch.segment_ids)
    chosen, rejected = _sides(mask.astype(jnp.float32), batch)
    return (chosen > 0) & (rejected > 0)


def _margin(chosen: Answers, rejected: Answers, valid: Array) -> PerPair:
    return preference.log_ratio_margin(
        chosen.policy, rejected.policy, chosen.reference, rejected.reference, valid
    )


def _pair_metrics(
    chosen: PerPair, rejected: PerPair, valid: Bool[Array, "rows pairs"]
) -> dict[str, Metric]:
    """Rewards of both sides, and how often the right one is larger."""
    metrics = {
        "preference/accuracy": preference.accuracy(chosen - rejected, valid),
        "preference/margin": masked(chosen - rejected, valid),
        "preference/chosen_reward": masked(chosen, valid),
        "preference/rejected_reward": masked(rejected, valid),
    }
    return jax.tree.map(jax.lax.stop_gradient, metrics)


def _require_weight(nll_weight: float) -> None:
    if nll_weight < 0:
        raise ValueError(f"nll_weight must be >= 0, got {nll_weight}")


def _raise_early(algorithm: PreferenceAlgorithm) -> None:
    """Traces one pair, so that a bad hyperparameter raises before a model is loaded."""

    def one_pair() -> None:
        zeros, ids = jnp.zeros((1, 2)), jnp.array([[1, 2]], jnp.int32)
        batch = TokenBatch(
            tokens=ids,
            positions=ids,
            segment_ids=ids,
            loss_mask=ids > 0,
            advantages=zeros,
            behavior_logprobs=zeros,
            versions=ids,
            reference_logprobs=zeros,
        )
        algorithm.objective(Predictions(zeros), batch)

    jax.eval_shape(one_pair)
