"""Policy-gradient losses per token, to be minimised.

The policy is the model that is trained, with the parameters of the current update. The
proximal policy is the policy before the step's first update; ratios are clipped around
it. The behaviour policy is the sampler's distribution, from which a token was drawn.
The reference is a fixed model that a KL term keeps the policy near.

Gradients flow through `policy_logprobs` alone; the proximal log-probs and advantages
are constants. To force an on-policy ratio of exactly 1, pass the policy's own log-probs
as the proximal ones.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.ratios import (
    MAX_LOG_RATIO,
    gspo_token_ratio,
    sequence_product_ratio,
    sequence_ratio,
    token_log_ratio,
    token_ratio,
    within,
)
from jaxrl_post.losses.sequences import counted, sequence_mean
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "cispo",
    "clipped_sequence_surrogate",
    "clipped_surrogate",
    "gmpo",
    "gspo",
    "gspo_token",
    "reinforce",
    "sapo",
    "vespo",
]


@checked
def clipped_surrogate(
    policy_logprobs: Float[Array, "*shape"],
    proximal_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Array, "*shape"]:
    """PPO's clipped surrogate, with separate bounds and an optional dual clip.

    L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),  r_t = p_t / q_t
    and, where A_t < 0 and a dual clip c is given, min(L_t, -c A_t).

    Args:
        dual_clip: c > 1, the largest ratio in the loss where A_t < 0, or None.

    References:
        Schulman et al., Proximal Policy Optimization, arXiv:1707.06347, eq. 7.
        Ye et al., Mastering Complex Control in MOBA Games with Deep Reinforcement
        Learning, arXiv:1912.09729 (dual clip).
        Yu et al., DAPO, arXiv:2503.14476 (separate bounds).

    >>> p, q = jnp.log(jnp.array([0.75, 0.5])), jnp.log(jnp.array([0.5, 0.5]))
    >>> advantages, mask = jnp.array([2.0, 1.0]), jnp.array([True, True])
    >>> clipped_surrogate(
    ...     p, q, advantages, mask, clip_low=0.25, clip_high=0.25
    ... ).tolist()
    [-2.5, -1.0]
    """
    _require_clip(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be > 1 or None, got {dual_clip}")
    ratio = token_ratio(policy_logprobs, proximal_logprobs, mask)
    loss = _clipped(ratio, advantages, mask, clip_low, clip_high)
    if dual_clip is None:
        return loss
    advantages = _constant(advantages, mask)
    return jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)


@checked
def cispo(
    policy_logprobs: Float[Array, "*shape"],
    proximal_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    ratio_low: float,
    ratio_high: float,
) -> Float[Array, "*shape"]:
    """CISPO: REINFORCE weighted by the clipped ratio, which carries no gradient.

    L_t = -stop_gradient(clip(r_t, ratio_low, ratio_high)) A_t log p_t

    Unlike PPO's clip, this one removes no token's gradient. The bounds apply to the
    ratio itself: NeMo RL, verl and slime have [1 - eps_low, 1 + eps_high]; TRL has [0,
    eps_high].

    Args:
        ratio_low: in [0, 1]; 0 for no lower bound.
        ratio_high: >= 1.

    References:
        MiniMax, MiniMax-M1, arXiv:2506.13585, eq. 4.

    >>> p, q = jnp.array([-1.0]), jnp.array([-9.0])
    >>> cispo(
    ...     p, q, jnp.array([1.0]), jnp.array([True]), ratio_low=0.0, ratio_high=5.0
    ... ).tolist()
    [5.0]
    """
    if not 0 <= ratio_low <= 1:
        raise ValueError(f"ratio_low must be in [0, 1], got {ratio_low}")
    if ratio_high < 1:
        raise ValueError(
            f"ratio_high bounds the ratio itself and must be >= 1, got {ratio_high}; "
            "for an epsilon pass 1 + epsilon"
        )
    ratio = token_ratio(policy_logprobs, proximal_logprobs, mask)
    weight = jax.lax.stop_gradient(within(ratio, ratio_low, ratio_high))
    return weight * reinforce(policy_logprobs, advantages, mask)


@checked
def reinforce(
    policy_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """REINFORCE: L_t = -A_t log p_t.

    References:
        Williams, Simple statistical gradient-following algorithms, 1992.

    >>> p, advantages = jnp.array([-0.5, -3.0]), jnp.array([2.0, 1.0])
    >>> reinforce(p, advantages, jnp.array([True, False])).tolist()
    [1.0, 0.0]
    """
    return _constant(advantages, mask) * counted(-policy_logprobs, mask)


@checked
def sapo(
    policy_logprobs: Float[Array, "*shape"],
    proximal_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Float[Array, "*shape"]:
    """SAPO: a smooth gate of the ratio instead of a clip.

    L_t = -f(r_t) A_t,  f(r) = 4 / tau sigmoid(tau (r - 1)),
    with tau_positive where A_t > 0 and tau_negative elsewhere. Since f'(1) = 1 the
    gradient on policy is REINFORCE's, and it fades on both sides of r = 1; the larger
    tau, the faster. The value itself is not -r A: on policy it is -2 A / tau.

    Args:
        tau_positive: > 0; the paper's 1.0.
        tau_negative: > 0; the paper's 1.05, above tau_positive because lowering one
            token's probability raises the many unsampled tokens' probabilities.

    Raises:
        ValueError: a temperature is not positive.

    References:
        Gao et al., Soft Adaptive Policy Optimization, arXiv:2511.20347.

    >>> p, advantages = jnp.array([-1.0, -1.0]), jnp.array([1.0, -1.0])
    >>> mask = jnp.array([True, True])
    >>> sapo(p, p, advantages, mask, tau_negative=2.0).tolist()
    [-2.0, 1.0]
    """
    for name, tau in ("tau_positive", tau_positive), ("tau_negative", tau_negative):
        if tau <= 0:
            raise ValueError(f"{name} must be > 0, got {tau}")
    advantages = _constant(advantages, mask)
    ratio = token_ratio(policy_logprobs, proximal_logprobs, mask)
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    return -(4 / tau) * jax.nn.sigmoid(tau * (ratio - 1)) * advantages


@checked
def gspo(
    policy_logprobs: Float[Array, "*batch length"],
    proximal_logprobs: Float[Array, "*batch length"],
    advantages: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "*batch length"]:
    """GSPO: the clipped surrogate of the length-normalised sequence ratio.

    L_t = -min(s_i A_t, clip(s_i, 1 - clip_low, 1 + clip_high) A_t) for t in sequence i,
    with s_i as in `ratios.sequence_ratio`. The mean over a sequence's tokens is the
    paper's loss of the sequence.

    Args:
        advantages: per token; the paper has one value per sequence.

    References:
        Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, eq. 5.

    >>> p, q = jnp.array([-1.0, -3.0]), jnp.array([-2.0, -2.0])
    >>> advantages, mask = jnp.array([1.0, 1.0]), jnp.array([True, True])
    >>> gspo(p, q, advantages, mask, clip_low=3e-4, clip_high=4e-4).tolist()
    [-1.0, -1.0]
    """
    _require_clip(clip_low, clip_high)
    ratio = sequence_ratio(policy_logprobs, proximal_logprobs, mask, segment_ids)
    return _clipped(ratio, advantages, mask, clip_low, clip_high)


@checked
def gspo_token(
    policy_logprobs: Float[Array, "*batch length"],
    proximal_logprobs: Float[Array, "*batch length"],
    advantages: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "*batch length"]:
    """GSPO-token: GSPO whose gradient credits each token with its own advantage.

    As `gspo`, with the ratio of `ratios.gspo_token_ratio`.

    References:
        Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071, eq. 13.

    >>> p, q = jnp.array([-1.0, -3.0]), jnp.array([-2.0, -2.0])
    >>> advantages, mask = jnp.array([1.0, -1.0]), jnp.array([True, True])
    >>> gspo_token(p, q, advantages, mask, clip_low=3e-4, clip_high=4e-4).tolist()
    [-1.0, 1.0]
    """
    _require_clip(clip_low, clip_high)
    ratio = gspo_token_ratio(policy_logprobs, proximal_logprobs, mask, segment_ids)
    return _clipped(ratio, advantages, mask, clip_low, clip_high)


@checked
def gmpo(
    policy_logprobs: Float[Array, "*batch length"],
    proximal_logprobs: Float[Array, "*batch length"],
    advantages: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Float[Array, "*batch length"]:
    """GMPO: the geometric mean of a sequence's clipped token ratios.

    L_t = -exp(mean_s(d_s)) A_t for s, t in sequence i. d_s is log r_s, clipped where
    that raises the loss: d_s = min(log r_s, clip_high) where A_s > 0,
    d_s = max(log r_s, -clip_low) where A_s < 0. A clipped token loses only its own
    gradient, unlike in `gspo`, which clips the mean. The mean over a sequence's tokens
    is the paper's loss of the sequence; on policy a token's gradient is -A_i / |y_i|.

    Args:
        advantages: per token; the paper has one value per sequence.
        clip_low: >= 0, in nats; the paper's 0.4 keeps the ratio above e^-0.4.
        clip_high: >= 0, in nats; the paper's 0.4 keeps the ratio below e^0.4.

    Raises:
        ValueError: a bound is negative.

    References:
        Zhao et al., Geometric-Mean Policy Optimization, arXiv:2507.20673.

    >>> p, q = jnp.array([-1.0, -3.0]), jnp.array([-2.0, -2.0])
    >>> advantages, mask = jnp.array([1.0, 1.0]), jnp.array([True, True])
    >>> gmpo(p, q, advantages, mask, clip_high=1.0).tolist()
    [-1.0, -1.0]
    """
    for name, bound in ("clip_low", clip_low), ("clip_high", clip_high):
        if bound < 0:
            raise ValueError(
                f"{name} bounds the log-ratio and must be >= 0 (nats), got {bound}"
            )
    advantages = _constant(advantages, mask)
    log_ratio = token_log_ratio(
        policy_logprobs, proximal_logprobs, mask, max_log_ratio=None
    )
    upper = jnp.where(advantages > 0, clip_high, jnp.inf)
    lower = jnp.where(advantages < 0, -clip_low, -jnp.inf)
    clipped = within(log_ratio, lower, upper)
    log_mean = sequence_mean(clipped, mask, segment_ids)
    ratio = jnp.exp(within(log_mean, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return -ratio * advantages


@checked
def clipped_sequence_surrogate(
    policy_logprobs: Float[Array, "*batch length"],
    proximal_logprobs: Float[Array, "*batch length"],
    advantages: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, "*batch length"]:
    """PPO's clipped surrogate with a whole sequence as the action.

    L_t = -min(w_i A_t, clip(w_i, 1 - clip_low, 1 + clip_high) A_t) for t in sequence i,
    with w_i the product of its tokens' ratios. The mean over a sequence's tokens is the
    loss of the sequence; on policy its gradient is the gradient of REINFORCE on the
    token sum. `gspo` takes the geometric mean instead of the product.

    Args:
        advantages: per token; the same within a sequence.

    References:
        Schulman et al., Proximal Policy Optimization, arXiv:1707.06347, eq. 7.
        Ahmadian et al., Back to Basics, arXiv:2402.14740 (a sequence as the action).

    >>> p, q = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.5, 0.25]))
    >>> advantages, mask = jnp.array([-1.0, -1.0]), jnp.array([True, True])
    >>> clipped_sequence_surrogate(
    ...     p, q, advantages, mask, clip_low=0.2, clip_high=0.2
    ... ).tolist()
    [2.0, 2.0]
    """
    _require_clip(clip_low, clip_high)
    ratio = sequence_product_ratio(
        policy_logprobs, proximal_logprobs, mask, segment_ids
    )
    return _clipped(ratio, advantages, mask, clip_low, clip_high)


@checked
def vespo(
    policy_logprobs: Float[Array, "*batch length"],
    behavior_logprobs: Float[Array, "*batch length"],
    advantages: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Float[Array, "*batch length"]:
    """VESPO: REINFORCE weighted by a smooth kernel of the sequence's ratio.

    L_t = -stop_gradient(phi(w_i)) A_t log p_t,  phi(w) = w^k e^(lambda (1 - w))

    for t in sequence i, with w_i the product of its tokens' ratios to the sampler. phi
    is 1 on policy, largest at w = k / lambda, and fades on both sides without a clip.

    Args:
        advantages: per token; the same within a sequence.
        k_positive: k >= 0 where A_t >= 0. All four defaults are from the authors' code.
        lambda_positive: lambda >= 0 where A_t >= 0.
        k_negative: k >= 0 where A_t < 0.
        lambda_negative: lambda >= 0 where A_t < 0.

    Raises:
        ValueError: a parameter of the kernel is negative.

    References:
        Shen et al., VESPO: Variational Sequence-level Soft Policy Optimization,
        arXiv:2602.10693.

    >>> p, advantages = jnp.array([-1.0, -3.0]), jnp.array([1.0, 1.0])
    >>> vespo(p, p, advantages, jnp.array([True, True])).tolist()
    [1.0, 3.0]
    """
    for name, number in (
        ("k_positive", k_positive),
        ("lambda_positive", lambda_positive),
        ("k_negative", k_negative),
        ("lambda_negative", lambda_negative),
    ):
        if number < 0:
            raise ValueError(f"{name} must be >= 0, got {number}")
    ratio = jax.lax.stop_gradient(
        sequence_product_ratio(policy_logprobs, behavior_logprobs, mask, segment_ids)
    )
    positive = _constant(advantages, mask) >= 0
    k = jnp.where(positive, k_positive, k_negative)
    rate = jnp.where(positive, lambda_positive, lambda_negative)
    weight = jnp.exp(k * jnp.log(ratio) + rate * (1 - ratio))
    return weight * reinforce(policy_logprobs, advantages, mask)


def _clipped(
    ratio: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    clip_low: float,
    clip_high: float,
) -> Float[Array, "*shape"]:
    """Minus the smaller one of the plain and the clipped surrogate."""
    advantages = _constant(advantages, mask)
    clipped_ratio = within(ratio, 1 - clip_low, 1 + clip_high)
    return -jnp.minimum(ratio * advantages, clipped_ratio * advantages)


def _constant(
    values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    return counted(jax.lax.stop_gradient(values), mask)


def _require_clip(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(
            f"clip_low must be in [0, 1] (the ratio is kept above 1 - clip_low), "
            f"got {clip_low}"
        )
    if clip_high < 0:
        raise ValueError(
            f"clip_high must be >= 0 (the ratio is kept below 1 + clip_high), "
            f"got {clip_high}"
        )
