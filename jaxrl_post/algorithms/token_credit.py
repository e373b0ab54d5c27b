"""Algorithms that compute an advantage per token: PPO and related ones.

Their `advantages` returns the rewards unchanged; `credit` places a reward on its
sequence's last token, subtracts the KL penalty per token, and computes advantages.
"""

from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp

from jaxrl_post.algorithms import reward_model, terms
from jaxrl_post.algorithms.composition import (
    RewardOptions,
    SharedOptions,
    compose,
    only_shared,
    raise_early,
)
from jaxrl_post.algorithms.corrections import TRUNCATED
from jaxrl_post.algorithms.objective import (
    Algorithm,
    Correction,
    KlEstimator,
    KlWeights,
    Objective,
    Predictions,
)
from jaxrl_post.algorithms.pairs import require_reference
from jaxrl_post.losses import (
    advantages,
    implicit,
    kl,
    reduce,
    returns,
    shaping,
    value,
    whitening,
)
from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted, in_sequence
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array, Bool, Float, TokenBatch

__all__ = [
    "distillation",
    "ppo",
    "prime",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "shared_backbone",
]


def ppo(
    *,
    gamma: float = 1.0,
    lambda_: float = 0.95,
    value_lambda: float = 1.0,
    whiten: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    value_clip: float | None = 0.2,
    bootstrap_truncated: bool = False,
    **shared: Unpack[RewardOptions],
) -> Algorithm:
    """Proximal Policy Optimization with a critic and generalised advantages.

    Each token's reward is minus its KL penalty; the last token also gets the sequence's
    reward. Policy and critic both take the mean over all tokens.

    Args:
        gamma: in [0, 1], discount per token.
        lambda_: in [0, 1], of the policy's advantages.
        value_lambda: in [0, 1], of the critic's targets. With 1 the targets are the
            returns, which VC-PPO found to matter for long answers; with `lambda_` they
            are as in the PPO paper.
        whiten: whether advantages get mean 0 and variance 1 over the batch's tokens.
        value_clip: > 0, how far a value may move in the batch's updates; None for a
            plain squared error.
        bootstrap_truncated: whether the critic's value after the last token is added
            for answers that were cut off (`TokenBatch.truncated`), because the task
            did not end there. False treats the length limit as part of the task.

    References:
        Schulman et al., Proximal Policy Optimization, arXiv:1707.06347.
        Ouyang et al., Training language models to follow instructions with human
        feedback, arXiv:2203.02155 (the penalty).
        Pardo et al., Time Limits in Reinforcement Learning, arXiv:1712.00378.
        Yuan et al., What's Behind PPO's Collapse in Long-CoT?, arXiv:2503.01491.

    >>> ppo().value_objective is not None
    True
    """
    only_shared(ppo, shared)
    kl_coefficient = shared.get("kl_coefficient", 0.0)
    kl_estimator = shared.get("kl_estimator", kl.k1)

    @checked
    def credit(batch: TokenBatch) -> TokenBatch:
        mask = in_sequence(batch.loss_mask, batch.ends)
        rewards = _token_rewards(batch, mask, kl_coefficient, kl_estimator)
        values = _require_values(batch)
        after = _after_truncation(batch) if bootstrap_truncated else None
        estimate = partial(
            returns.gae,
            rewards,
            values,
            mask,
            batch.ends,
            gamma=gamma,
            bootstrap=after,
        )
        targets = returns.lambda_returns(estimate(lambda_=value_lambda), values, mask)
        raw = estimate(lambda_=lambda_)
        per_token = whitening.whitened(raw, mask) if whiten else raw
        return batch.replace(  # type: ignore[attr-defined]
            advantages=per_token, returns=targets, raw_advantages=raw
        )

    composed = compose(
        advantages=_rewards,
        policy_loss=terms.clipped_token_ratio(
            clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        ),
        reduction=reduce.token_mean,
        correction=shared.get("correction", TRUNCATED),
        entropy_coefficient=shared.get("entropy_coefficient", 0.0),
        aggregation=shared.get("aggregation"),
    )
    return _credited(
        composed._replace(
            value_objective=_value_objective(value_clip),
            compares_samples=False,
            turn_credit="rewards",
        ),
        credit,
        kl_coefficient,
    )


def reinforce_plus_plus(
    *,
    gamma: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    kl_estimator: KlEstimator = kl.k1,
    correction: Correction | None = TRUNCATED,
) -> Algorithm:
    """REINFORCE++: PPO without a critic, whitened over the whole batch.

    A token's advantage is its discounted return, KL penalty included, minus the mean of
    all tokens' returns and over their standard deviation. No group is needed.

    Args:
        gamma: in [0, 1], discount per token.
        kl_coefficient: >= 0, weight of the KL to the reference policy in the reward.
        kl_estimator: estimator of that KL; in the reward `kl.k1` is unbiased.

    References:
        Hu et al., REINFORCE++, arXiv:2501.03262.

    >>> reinforce_plus_plus(kl_coefficient=0.01).needs_reference
    True
    """

    @checked
    def credit(batch: TokenBatch) -> TokenBatch:
        mask = in_sequence(batch.loss_mask, batch.ends)
        rewards = _token_rewards(batch, mask, kl_coefficient, kl_estimator)
        per_token = returns.reinforce_plus_plus(rewards, mask, batch.ends, gamma=gamma)
        raw = returns.discounted_returns(rewards, mask, batch.ends, gamma=gamma)
        return batch.replace(advantages=per_token, raw_advantages=raw)  # type: ignore[attr-defined]

    composed = compose(
        advantages=_rewards,
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduce.token_mean,
        correction=correction,
    )
    composed = composed._replace(compares_samples=False, turn_credit="rewards")
    return _credited(composed, credit, kl_coefficient)


def reinforce_plus_plus_baseline(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    kl_estimator: KlEstimator = kl.k2,
    kl_weights: KlWeights | None = None,
    correction: Correction | None = TRUNCATED,
) -> Algorithm:
    """REINFORCE++ with the group's mean as baseline.

    Rewards are centred in their group, then whitened over the tokens of the batch: all
    share one standard deviation, instead of a noisy one per group.

    Args:
        kl_coefficient: >= 0, weight of the KL to the reference policy in the loss.
        kl_estimator: estimator of that KL; the paper takes `kl.k2`.
        kl_weights: as in `SharedOptions`.

    References:
        Hu et al., REINFORCE++, arXiv:2501.03262.

    >>> reinforce_plus_plus_baseline().needs_reference
    False
    """

    @checked
    def credit(batch: TokenBatch) -> TokenBatch:
        mask = in_sequence(batch.loss_mask, batch.ends)
        per_token = whitening.whitened(batch.advantages, mask)
        return batch.replace(  # type: ignore[attr-defined]
            advantages=per_token, raw_advantages=batch.advantages
        )

    composed = compose(
        advantages=advantages.group_centered,
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduce.token_mean,
        kl_coefficient=kl_coefficient,
        kl_estimator=kl_estimator,
        kl_weights=kl_weights,
        correction=correction,
    )
    return composed._replace(credit=credit, turn_credit="outcome")


def distillation(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    correction: Correction | None = TRUNCATED,
) -> Algorithm:
    """On-policy distillation: the student's own samples, graded token by token.

    The reference policy is the teacher. A token's advantage is log teacher - log
    student, so that the expected gradient is the gradient of the reverse KL from the
    student to the teacher at the prefixes that the student visits. Rewards are only
    metrics.

    References:
        Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649.
        Lu et al., On-Policy Distillation, Thinking Machines Lab, 2025.

    >>> distillation().needs_reference
    True
    """

    @checked
    def credit(batch: TokenBatch) -> TokenBatch:
        mask = in_sequence(batch.loss_mask, batch.ends)
        # `distill.on_policy_advantages`, clamped to +-20 nats: one token that the
        # teacher never writes must not dominate the batch.
        penalty = kl.k1(_start(batch), require_reference(batch), mask)
        return batch.replace(advantages=-penalty)  # type: ignore[attr-defined]

    composed = compose(
        advantages=_rewards,
        policy_loss=terms.clipped_token_ratio(clip_low=clip_low, clip_high=clip_high),
        reduction=reduce.token_mean,
        correction=correction,
    )
    composed = composed._replace(
        compares_samples=False, turn_credit="outcome", has_teacher=True
    )
    return _credited(composed, credit, kl_coefficient=1.0)


def prime(
    *,
    beta: float = 0.05,
    gamma: float = 1.0,
    process_weight: float = 1.0,
    bounded: bool = False,
    whiten: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    **shared: Unpack[SharedOptions],
) -> Algorithm:
    """Process Reinforcement through Implicit Rewards: RLOO with a reward a token.

    A_t = r_i - mean_{j != i}(r_j) + process_weight P_t

    P_t are the returns of the implicit process rewards, less the other answers' mean
    (`implicit.leave_one_out_returns`). The model that gives them learns from the
    outcomes of each batch, by cross-entropy. Tokens that the policy did not sample,
    such as a tool's, have no process reward.

    The code of the authors and verl differ from the paper's equations, which are the
    default here. Both have `bounded` and `whiten`. Both subtract K / (K - 1) times the
    mean of all K answers from K / (K - 1) times a token's reward: for rewards of tokens
    this adds (r_t - mean of the own answer) / (K - 1). verl scores after the update and
    gives an answer's last token no process reward.

    Args:
        beta: > 0, scale of the process rewards.
        gamma: in [0, 1], discount of the process rewards per token.
        process_weight: >= 0, of the process rewards next to the outcome's; the authors'
            code has 5.
        bounded: whether process rewards are divided by the batch's largest return
            (`implicit.bounded_by_return`).
        whiten: whether advantages get mean 0 and variance 1 over the batch's tokens.

    References:
        Cui et al., Process Reinforcement through Implicit Rewards, arXiv:2502.01456.
        Their code: https://github.com/PRIME-RL/PRIME; verl's recipe:
        https://github.com/verl-project/verl-recipe.

    >>> prime().needs_reference, prime().prm_objective is not None
    (True, True)
    """
    if process_weight < 0:
        raise ValueError(f"process_weight must be >= 0, got {process_weight}")

    @checked
    def credit(batch: TokenBatch) -> TokenBatch:
        mask = in_sequence(batch.loss_mask, batch.ends)
        said, answers, groups = _require_graded(batch)
        reference = require_reference(batch)
        rewards = implicit.implicit_rewards(said, reference, mask, beta=beta)
        if bounded:
            rewards = implicit.bounded_by_return(rewards, mask, batch.ends)
        process = implicit.leave_one_out_returns(
            rewards, mask, batch.ends, answers, groups, gamma=gamma
        )
        raw = counted(batch.advantages, mask) + process_weight * process
        per_token = whitening.whitened(raw, mask) if whiten else raw
        return batch.replace(  # type: ignore[attr-defined]
            advantages=per_token,
            token_rewards=rewards,
            raw_advantages=raw if whiten else None,
        )

    composed = compose(
        advantages=advantages.leave_one_out,
        policy_loss=terms.clipped_token_ratio(
            clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        ),
        reduction=reduce.token_mean,
        **only_shared(prime, shared),
    )
    made = composed._replace(
        needs_reference=True,
        credit=credit,
        prm_objective=reward_model.implicit_reward(beta=beta),
        turn_credit="outcome",
    )
    raise_early(made)
    return made


def shared_backbone(algorithm: Algorithm, *, coefficient: float) -> Algorithm:
    """Trains policy and critic as two heads of one model.

    loss = policy's + coefficient * critic's, over one denominator.

    Args:
        algorithm: an algorithm with a critic.
        coefficient: > 0, weight of the critic's loss.

    Returns:
        The algorithm, whose objective needs predictions of both heads and whose
        `value_objective` is None.

    Raises:
        ValueError: the algorithm has no critic, or `coefficient` is not positive.

    >>> shared_backbone(ppo(), coefficient=0.1).value_objective is None
    True
    """
    value_objective = algorithm.value_objective
    if value_objective is None:
        raise ValueError("algorithm must have a critic, got one without")
    if not coefficient > 0:
        raise ValueError(f"coefficient must be > 0, got {coefficient}")

    @checked
    def objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        policy = algorithm.objective(predictions, batch)
        critic = value_objective(predictions, batch)
        # Both are means over tokens: the counts are equal.
        total = policy.loss.sum + coefficient * critic.loss.sum
        return Objective(
            Metric(total, policy.loss.count),
            {**policy.metrics, **critic.metrics, "critic/loss": _still(critic.loss)},
        )

    return algorithm._replace(objective=objective, value_objective=None)


@checked
def _rewards(
    rewards: Float[Array, "groups samples"], valid: Bool[Array, "groups samples"]
) -> Float[Array, "groups samples"]:
    return counted(rewards, valid)


def _start(batch: TokenBatch) -> Float[Array, "rows length"]:
    """Log-probs before the first update; the sampler's if the batch has none.

    The sampler's are of the same parameters unless tokens are stale, and a batch with
    such tokens must have proximal log-probs (`Algorithm.credit_reads_logprobs`).
    """
    if batch.proximal_logprobs is None:
        return batch.behavior_logprobs
    return batch.proximal_logprobs


def _token_rewards(
    batch: TokenBatch,
    mask: Bool[Array, "rows length"],
    kl_coefficient: float,
    kl_estimator: KlEstimator,
) -> Float[Array, "rows length"]:
    """Rewards at the tokens that earned them, minus the penalty at every token."""
    if batch.token_rewards is None:
        rewards = returns.at_last_token(batch.advantages, mask, batch.ends)
    else:
        rewards = counted(batch.token_rewards, mask)
    if not kl_coefficient:
        return rewards
    penalty = kl_estimator(_start(batch), require_reference(batch), mask)
    return shaping.kl_shaped_rewards(
        rewards, penalty, mask, kl_coefficient=kl_coefficient
    )


def _after_truncation(batch: TokenBatch) -> Float[Array, "rows length"]:
    """The critic's value after the last token of truncated answers, else 0."""
    if batch.bootstrap is None:
        raise ValueError(
            "batch.bootstrap must be given, got None; score the batch with the critic, "
            "with the answers marked that were cut"
        )
    return batch.bootstrap


def _require_values(batch: TokenBatch) -> Float[Array, "rows length"]:
    if batch.values_before is None:
        raise ValueError(
            "batch.values_before must be given, got None; score the batch with the "
            "critic"
        )
    return batch.values_before


def _value_objective(clip: float | None):
    @checked
    def value_objective(predictions: Predictions, batch: TokenBatch) -> Objective:
        mask = in_sequence(batch.loss_mask, batch.ends)
        old, targets = _require_values(batch), batch.returns
        if predictions.values_after is None or targets is None:
            raise ValueError(
                "predictions.values_after and batch.returns must be given to a critic, "
                "got None; use a model with a value head, and the algorithm's `credit`"
            )
        # The value before a token is the value after the previous one. The mask is
        # False at a path's first token, which has none.
        values = jnp.take_along_axis(predictions.values_after, batch.previous, axis=-1)
        losses = value.clipped_value_loss(values, old, targets, mask, value_clip=clip)
        loss = reduce.token_mean(losses, mask, batch.ends)
        metrics = {
            "critic/value": masked(values, mask),
            "critic/return": masked(targets, mask),
        }
        if clip is not None:
            metrics["critic/clip_fraction"] = value.value_clip_fraction(
                values, old, targets, mask, value_clip=clip
            )
        return Objective(loss, _still(metrics))

    return value_objective


def _require_graded(batch: TokenBatch) -> tuple[Array, Array, Array]:
    """Log-probs of the implicit reward model, and the numbers of answers and groups."""
    if batch.prm_logprobs is None or batch.answers is None or batch.groups is None:
        raise ValueError(
            "batch.prm_logprobs, batch.answers and batch.groups must be given, got "
            "None; score the batch with the implicit reward model"
        )
    return batch.prm_logprobs, batch.answers, batch.groups


def _still(tree):
    return jax.tree.map(jax.lax.stop_gradient, tree)


def _credited(algorithm: Algorithm, credit, kl_coefficient: float) -> Algorithm:
    if kl_coefficient < 0:
        raise ValueError(f"kl_coefficient must be >= 0, got {kl_coefficient}")
    with_kl = kl_coefficient > 0
    made = algorithm._replace(
        credit=credit, needs_reference=with_kl, credit_reads_logprobs=with_kl
    )
    raise_early(made)
    return made
