"""Trust regions that limit how far the policy moves from the sampler's policy.

DPPO stops a token's update if the two next-token distributions diverge too far. PPO's
clip looks only at the sampled token's ratio: a ratio of 2 is a tiny change at
probability 1e-4 and a huge one at 0.5. Off-policy sequence masking drops whole
sequences of negative advantage that the policy has moved away from.

Divergences carry no gradient: they are measured, not minimised. The masks select the
tokens to update; multiply the loss by a mask, and reduce over all counted tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.ratios import token_log_ratio, token_ratio
from jaxrl_post.losses.sequences import counted, in_sequence, sequence_mean
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "binary_kl",
    "binary_tv",
    "dppo",
    "dppo_mask",
    "opsm_keep",
    "opsm_mask",
    "topk_kl",
    "topk_tv",
]

# The spacing of float32 below 1. A smaller remaining mass is rounding error and would
# make the divergence infinite for a token of probability 1.
_LEAST_REST = 2.0**-24


@checked
def binary_tv(
    policy_logprobs: Float[Array, "*shape"],
    behavior_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Total variation of {the sampled token, all others}: |p_t - q_t|.

    A lower bound of the total variation between the whole distributions.

    Returns:
        float32 in [0, 1], without gradient; 0 where the mask is False.

    References:
        Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning,
        arXiv:2602.04879 (DPPO-Binary-TV).

    >>> p, q = jnp.log(jnp.array([0.75, 0.5])), jnp.log(jnp.array([0.25, 0.5]))
    >>> binary_tv(p, q, jnp.array([True, True])).tolist()
    [0.5, 0.0]
    """
    return topk_tv(policy_logprobs[..., None], behavior_logprobs[..., None], mask)


@checked
def binary_kl(
    policy_logprobs: Float[Array, "*shape"],
    behavior_logprobs: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """KL(behavior || policy) of {the sampled token, all others}.

    q_t log(q_t / p_t) + (1 - q_t) log((1 - q_t) / (1 - p_t)), a lower bound of the KL
    between the whole distributions. 1 - p and 1 - q are clamped to at least 2^-24, so
    that tokens of probability 1 in float32 give a finite divergence.

    Returns:
        float32 in nats, >= 0 up to rounding, without gradient; 0 where the mask is
        False.

    References:
        Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning,
        arXiv:2602.04879 (DPPO-Binary-KL).

    >>> p, q = jnp.log(jnp.array([0.25, 0.5])), jnp.log(jnp.array([0.5, 0.5]))
    >>> [round(x, 4) for x in binary_kl(p, q, jnp.array([True, True])).tolist()]
    [0.1438, 0.0]
    """
    return topk_kl(policy_logprobs[..., None], behavior_logprobs[..., None], mask)


@checked
def topk_tv(
    policy_logprobs: Float[Array, "*shape entries"],
    behavior_logprobs: Float[Array, "*shape entries"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Total variation over some tokens, with all other tokens merged into one.

    1/2 (sum_j |p_j - q_j| + |(1 - sum_j p_j) - (1 - sum_j q_j)|)

    Args:
        policy_logprobs: log p_j (nats) of distinct tokens: the sampled one and the
            behavior policy's k most likely, or the whole vocabulary.
        behavior_logprobs: log q_j (nats) of the same tokens, the sampler's.

    Returns:
        float32 in [0, 1], without gradient; 0 where the mask is False.

    References:
        Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning,
        arXiv:2602.04879 (the top-k approximation).

    >>> p, q = jnp.log(jnp.array([[0.5, 0.25]])), jnp.log(jnp.array([[0.25, 0.25]]))
    >>> topk_tv(p, q, jnp.array([True])).tolist()
    [0.25]
    """
    every = jnp.broadcast_to(mask[..., None], policy_logprobs.shape)
    q = jnp.exp(counted(behavior_logprobs, every))
    difference = jax.lax.stop_gradient(jnp.exp(counted(policy_logprobs, every)) - q)
    return 0.5 * (jnp.abs(difference).sum(-1) + jnp.abs(difference.sum(-1)))


@checked
def topk_kl(
    policy_logprobs: Float[Array, "*shape entries"],
    behavior_logprobs: Float[Array, "*shape entries"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """KL(behavior || policy) over some tokens, with all other tokens merged into one.

    sum_j q_j log(q_j / p_j) + q_rest log(q_rest / p_rest),  p_rest = 1 - sum_j p_j,
    with both rests at least 2^-24.

    Args:
        policy_logprobs: log p_j (nats) of distinct tokens: the sampled one and the
            behavior policy's k most likely, or the whole vocabulary.
        behavior_logprobs: log q_j (nats) of the same tokens, the sampler's.

    Returns:
        float32 in nats, >= 0 up to rounding, without gradient; 0 where the mask is
        False.

    References:
        Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning,
        arXiv:2602.04879 (the top-k approximation).

    >>> p = jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
    >>> topk_kl(p, p, jnp.array([True])).tolist()
    [0.0]
    """
    every = jnp.broadcast_to(mask[..., None], policy_logprobs.shape)
    policy = jax.lax.stop_gradient(counted(policy_logprobs, every))
    behavior = jax.lax.stop_gradient(counted(behavior_logprobs, every))
    log_ratio = token_log_ratio(policy, behavior, every, max_log_ratio=None)
    policy_rest, behavior_rest = _log_rest(policy), _log_rest(behavior)
    rest = jnp.exp(behavior_rest) * (behavior_rest - policy_rest)
    return rest - (jnp.exp(behavior) * log_ratio).sum(-1)


@checked
def dppo_mask(
    ratio: Float[Array, "*shape"],
    divergence: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    threshold: float,
) -> Bool[Array, "*shape"]:
    """Selects the tokens that DPPO updates: those that do not move further outside.

    False where divergence > threshold and A_t pushes the ratio away from 1, that is
    A_t > 0 and r_t > 1, or A_t < 0 and r_t < 1.

    Args:
        ratio: policy / behavior, per token.
        divergence: between the policies at each token, >= 0; any of this module's.
        threshold: >= 0, in the divergence's unit.

    Returns:
        bool; False where the mask is False. NaN counts as inside, so the loss shows it.

    Raises:
        ValueError: `threshold` is negative.

    References:
        Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning,
        arXiv:2602.04879.

    >>> ratio, divergence = jnp.array([2.0, 2.0, 2.0]), jnp.array([0.3, 0.1, 0.3])
    >>> advantages, mask = jnp.array([1.0, 1.0, -1.0]), jnp.array([True, True, True])
    >>> dppo_mask(ratio, divergence, advantages, mask, threshold=0.2).tolist()
    [False, True, True]
    """
    if threshold < 0:
        raise ValueError(
            f"threshold must be >= 0 (a divergence's largest), got {threshold}"
        )
    outward = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    return mask & ~(outward & (divergence.astype(jnp.float32) > threshold))


@checked
def dppo(
    policy_logprobs: Float[Array, "*shape"],
    behavior_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    divergence: Callable[[Array, Array, Array], Array],
    threshold: float,
    ratio_high: float | None = None,
) -> Float[Array, "*shape"]:
    """DPPO: the policy gradient inside a trust region of the policies' divergence.

    L_t = -M_t r_t A_t,  r_t = p_t / q_t,  M_t as in `dppo_mask`. The region is around
    the sampler's policy; PPO's is around the proximal policy.

    Args:
        divergence: takes the two log-probs and the mask: `binary_tv` or `binary_kl`;
            for `topk_tv` and `topk_kl` a closure over the arrays of the k tokens.
        threshold: >= 0, in the divergence's unit.
        ratio_high: > 0, upper bound of r_t as a weight; beyond it the gradient still
            flows (verl has 20). None for only the bound e^20 of `ratios`.

    Raises:
        ValueError: `threshold` is negative or `ratio_high` not positive.

    References:
        Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning,
        arXiv:2602.04879.

    >>> p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.25]))
    >>> advantages, mask = jnp.array([1.0, -1.0]), jnp.array([True, True])
    >>> dppo(
    ...     p, q, advantages, mask, divergence=binary_tv, threshold=0.15
    ... ).tolist()
    [0.0, 2.0]
    """
    if ratio_high is not None and ratio_high <= 0:
        raise ValueError(f"ratio_high must be > 0 or None, got {ratio_high}")
    ratio = token_ratio(policy_logprobs, behavior_logprobs, mask)
    advantages = counted(jax.lax.stop_gradient(advantages), mask)
    distance = divergence(policy_logprobs, behavior_logprobs, mask)
    keep = dppo_mask(ratio, distance, advantages, mask, threshold=threshold)
    if ratio_high is not None:
        on_policy = token_ratio(policy_logprobs, policy_logprobs, mask)
        weight = jnp.minimum(jax.lax.stop_gradient(ratio), ratio_high)
        ratio = weight * on_policy
    return jnp.where(keep, -ratio * advantages, 0.0)


@checked
def opsm_keep(
    advantages: Float[Array, "*shape"],
    mean_kl: Float[Array, "*shape"],
    *,
    threshold: float,
) -> Bool[Array, "*shape"]:
    """Off-policy sequence masking's rule: keep unless A < 0 and KL > threshold.

    Args:
        advantages: of sequences or of tokens.
        mean_kl: mean over each sequence's tokens of log behavior - log policy (nats).
        threshold: in nats per token.

    Returns:
        bool. NaN counts as inside, so the loss shows it.

    References:
        DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556.

    >>> advantages, mean_kl = jnp.array([1.0, -1.0, -1.0]), jnp.array([2.0, 0.5, 2.0])
    >>> opsm_keep(advantages, mean_kl, threshold=1.0).tolist()
    [True, True, False]
    """
    return ~((advantages < 0) & (mean_kl.astype(jnp.float32) > threshold))


@checked
def opsm_mask(
    policy_logprobs: Float[Array, "*batch length"],
    behavior_logprobs: Float[Array, "*batch length"],
    advantages: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    threshold: float,
) -> Bool[Array, "*batch length"]:
    """Off-policy sequence masking: drops bad sequences that are far off-policy.

    M_t = 0 if A_t < 0 and mean_s(log q_s - log p_s) > delta over the sequence, else 1.
    The policy learns from its own mistakes, not from those it would no longer make.

    Args:
        advantages: per token; the paper has one value per sequence.
        threshold: in nats per token.

    Returns:
        bool; False where the mask is False.

    References:
        DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556.

    >>> p, q = jnp.array([[-3.0], [-3.0]]), jnp.array([[-1.0], [-1.0]])
    >>> advantages, mask = jnp.array([[1.0], [-1.0]]), jnp.array([[True], [True]])
    >>> opsm_mask(p, q, advantages, mask, threshold=1.0).tolist()
    [[True], [False]]
    """
    log_ratio = token_log_ratio(
        policy_logprobs, behavior_logprobs, mask, max_log_ratio=None
    )
    mean_kl = -sequence_mean(log_ratio, mask, segment_ids)
    return in_sequence(mask, segment_ids) & opsm_keep(
        advantages, mean_kl, threshold=threshold
    )


def _log_rest(logprobs: Float[Array, "*shape entries"]) -> Float[Array, "*shape"]:
    """log(1 - sum_j p_j), with the rest at least _LEAST_REST."""
    log_mass = jax.nn.logsumexp(logprobs, axis=-1)
    return jax.nn.log1mexp(jnp.maximum(-log_mass, _LEAST_REST))
