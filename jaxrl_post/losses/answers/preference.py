"""Losses of preference pairs, each a chosen and a rejected response to one prompt.

The arrays are [*pairs]: the log-probability (nats) of a whole response, summed over its
tokens, or the mean over them where a name says so (`length_normalized`). A loss is one
float32 value per pair, to be reduced by `metrics.masked`. `valid` is False where a slot
holds no pair: the loss there is 0, and values there, NaN included, reach neither value
nor gradient. Gradients flow through the policy alone.

DPO and its variants take the margin between the responses' log-ratios to a reference:

    DPO    sigmoid_loss(log_ratio_margin(...), beta=0.1)
    IPO    ipo_loss(log_ratio_margin(...), beta=0.1)
    f-DPO  sigmoid_loss(alpha_divergence_margin(..., alpha=0.5), beta=0.1)

For a reference-free margin pass zeros as the reference.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.ratios import MAX_LOG_RATIO
from jaxrl_post.losses.sequences import counted
from jaxrl_post.metrics import Metric, masked
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "accuracy",
    "alpha_divergence_margin",
    "counted_pairs",
    "hinge_loss",
    "implicit_reward",
    "ipo_loss",
    "jensen_shannon_margin",
    "length_normalized",
    "log_ratio",
    "log_ratio_margin",
    "reward_margin",
    "robust_loss",
    "sigmoid_loss",
    "wpo_weights",
]


@checked
def counted_pairs(
    values: Float[Array, "*pairs"], valid: Bool[Array, "*pairs"] | None = None
) -> Float[Array, "*pairs"]:
    """Returns `values` in float32 where a slot holds a pair and 0 elsewhere.

    Args:
        values: any float dtype.

    Returns:
        float32 of the same shape.

    >>> counted_pairs(jnp.array([1.0, jnp.nan]), jnp.array([True, False])).tolist()
    [1.0, 0.0]
    """
    return values.astype(jnp.float32) if valid is None else counted(values, valid)


@checked
def log_ratio(
    policy_logprobs: Float[Array, "*pairs"],
    reference_logprobs: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
) -> Float[Array, "*pairs"]:
    """Log-ratio of a response between policy and reference: log pi(y) - log ref(y).

    Args:
        policy_logprobs: log pi(y) (nats), differentiable.
        reference_logprobs: log ref(y) (nats), held constant.

    >>> log_ratio(jnp.array([-4.0]), jnp.array([-6.0])).tolist()
    [2.0]
    """
    constant = jax.lax.stop_gradient(reference_logprobs)
    return counted_pairs(policy_logprobs, valid) - counted_pairs(constant, valid)


@checked
def log_ratio_margin(
    policy_chosen: Float[Array, "*pairs"],
    policy_rejected: Float[Array, "*pairs"],
    reference_chosen: Float[Array, "*pairs"],
    reference_rejected: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
) -> Float[Array, "*pairs"]:
    """Margin of DPO: h = log(pi(y_c) / ref(y_c)) - log(pi(y_r) / ref(y_r)).

    It is 0 at initialisation, where the policy is the reference.

    Args:
        reference_chosen: log ref(y_c) (nats); zeros for no reference.
        reference_rejected: log ref(y_r) (nats); zeros for no reference.

    References:
        Rafailov et al., Direct Preference Optimization, arXiv:2305.18290, eq. 7.

    >>> policy, reference = jnp.array([-4.0]), jnp.array([-6.0])
    >>> log_ratio_margin(policy, reference, reference, reference).tolist()
    [2.0]
    """
    chosen = log_ratio(policy_chosen, reference_chosen, valid)
    return chosen - log_ratio(policy_rejected, reference_rejected, valid)


@checked
def alpha_divergence_margin(
    policy_chosen: Float[Array, "*pairs"],
    policy_rejected: Float[Array, "*pairs"],
    reference_chosen: Float[Array, "*pairs"],
    reference_rejected: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    alpha: float,
) -> Float[Array, "*pairs"]:
    """Margin of f-DPO with an alpha-divergence between policy and reference.

    h = f'(u_c) - f'(u_r) with u = pi(y) / ref(y) and f'(u) = (1 - u^-alpha) / alpha

    alpha = 1 is the forward KL, f'(u) = 1 - 1 / u; alpha -> 0 the reverse KL of
    `log_ratio_margin`, f'(u) = log u + 1. The power is e^x with x clamped to
    +-`ratios.MAX_LOG_RATIO`; its gradient beyond that is 0. TRL clamps only where
    the power overflows.

    Args:
        alpha: in (0, 1].

    Raises:
        ValueError: `alpha` is out of its range.

    References:
        Wang et al., Beyond Reverse KL, arXiv:2309.16240.

    >>> policy, reference = jnp.array([-4.0]), jnp.array([-4.0])
    >>> alpha_divergence_margin(
    ...     policy, policy, reference, reference, alpha=0.5
    ... ).tolist()
    [0.0]
    """
    if not 0 < alpha <= 1:
        raise ValueError(
            f"alpha must be in (0, 1], got {alpha}; "
            "for the reverse KL (alpha = 0) use log_ratio_margin"
        )

    def slope(policy: Array, reference: Array) -> Array:
        exponent = -alpha * log_ratio(policy, reference, valid)
        return -jnp.expm1(jnp.clip(exponent, -MAX_LOG_RATIO, MAX_LOG_RATIO)) / alpha

    chosen = slope(policy_chosen, reference_chosen)
    return chosen - slope(policy_rejected, reference_rejected)


@checked
def jensen_shannon_margin(
    policy_chosen: Float[Array, "*pairs"],
    policy_rejected: Float[Array, "*pairs"],
    reference_chosen: Float[Array, "*pairs"],
    reference_rejected: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
) -> Float[Array, "*pairs"]:
    """Margin of f-DPO with the Jensen-Shannon divergence of policy and reference.

    h = f'(u_c) - f'(u_r) with u = pi(y) / ref(y) and f'(u) = log(2 u / (1 + u))

    References:
        Wang et al., Beyond Reverse KL, arXiv:2309.16240.

    >>> policy, reference = jnp.array([-4.0]), jnp.array([-4.0])
    >>> jensen_shannon_margin(policy, policy, reference, reference).tolist()
    [0.0]
    """
    # log(2 u / (1 + u)) = log 2 + log sigmoid(log u), and log 2 cancels.
    chosen = jax.nn.log_sigmoid(log_ratio(policy_chosen, reference_chosen, valid))
    rejected = log_ratio(policy_rejected, reference_rejected, valid)
    return chosen - jax.nn.log_sigmoid(rejected)


@checked
def sigmoid_loss(
    margin: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Float[Array, "*pairs"]:
    """DPO: L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h).

    With e > 0, the probability that a label is wrong, it is conservative DPO (cDPO),
    whose minimum lies at the finite margin where sigmoid(beta h) = 1 - e.

    Args:
        beta: > 0, the strength of the divergence term (per nat).
        label_smoothing: e in [0, 0.5).

    References:
        Rafailov et al., Direct Preference Optimization, arXiv:2305.18290, eq. 7.
        Mitchell, A note on DPO with noisy preferences and relationship to IPO, 2023.

    >>> round(sigmoid_loss(jnp.array([0.0]), beta=0.1).item(), 6)
    0.693147
    """
    require_beta(beta)
    _require_smoothing(label_smoothing)
    scaled = beta * counted_pairs(margin, valid)
    loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(scaled)
    if label_smoothing:
        loss = loss - label_smoothing * jax.nn.log_sigmoid(-scaled)
    return counted_pairs(loss, valid)


@checked
def robust_loss(
    margin: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
    label_smoothing: float,
) -> Float[Array, "*pairs"]:
    """Robust DPO, which is unbiased when labels are flipped with probability e.

    L = (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)

    Its mean over the flips of labels is DPO's loss with the true labels. For e > 0 it
    is not bounded from below as h grows.

    Args:
        beta: > 0, the strength of the divergence term (per nat).
        label_smoothing: e in [0, 0.5), the probability that a label is wrong.

    References:
        Chowdhury et al., Provably Robust DPO, arXiv:2403.00409.

    >>> loss = robust_loss(jnp.array([0.0]), beta=0.1, label_smoothing=0.1)
    >>> round(loss.item(), 6)
    0.693147
    """
    require_beta(beta)
    _require_smoothing(label_smoothing)
    scaled = beta * counted_pairs(margin, valid)
    agreeing = -(1 - label_smoothing) * jax.nn.log_sigmoid(scaled)
    opposing = label_smoothing * jax.nn.log_sigmoid(-scaled)
    return counted_pairs((agreeing + opposing) / (1 - 2 * label_smoothing), valid)


@checked
def hinge_loss(
    margin: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
) -> Float[Array, "*pairs"]:
    """Hinge on the margin: L = max(0, 1 - beta h).

    SLiC-HF uses it without a reference (pass zeros); RSO and TRL use it with one.

    Args:
        beta: > 0; the loss is 0 from h = 1 / beta on.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Zhao et al., SLiC-HF, arXiv:2305.10425.
        Liu et al., Statistical Rejection Sampling Improves Preference Optimization,
        arXiv:2309.06657 (RSO).

    >>> hinge_loss(jnp.array([0.0, 1.0, 4.0]), beta=0.5).tolist()
    [1.0, 0.5, 0.0]
    """
    require_beta(beta)
    return counted_pairs(jax.nn.relu(1 - beta * counted_pairs(margin, valid)), valid)


@checked
def ipo_loss(
    margin: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
) -> Float[Array, "*pairs"]:
    """IPO: L = (h - 1 / (2 beta))^2, whose minimum is a finite margin.

    The paper's margin is of summed log-probs; TRL's is of per-token means
    (`length_normalized`).

    Args:
        beta: > 0, the paper's tau; the target margin is 1 / (2 beta).

    Returns:
        float32, >= 0; 0 where `valid` is False.

    Raises:
        ValueError: `beta` is not positive.

    References:
        Azar et al., A General Theoretical Paradigm to Understand Learning from Human
        Preferences, arXiv:2310.12036.

    >>> ipo_loss(jnp.array([0.0, 5.0]), beta=0.1).tolist()
    [25.0, 0.0]
    """
    require_beta(beta)
    return counted_pairs(
        jnp.square(counted_pairs(margin, valid) - 1 / (2 * beta)), valid
    )


@checked
def length_normalized(
    logprobs: Float[Array, "*pairs"], lengths: Int[Array, "*pairs"]
) -> Float[Array, "*pairs"]:
    """Mean log-prob per token, log pi(y) / |y|; 0 for an empty response.

    Args:
        logprobs: log pi(y) (nats), summed over the response's tokens.
        lengths: int, the number of these tokens.

    Returns:
        float32 (nats per token).

    >>> length_normalized(jnp.array([-6.0]), jnp.array([4])).tolist()
    [-1.5]
    """
    return logprobs.astype(jnp.float32) / jnp.maximum(lengths, 1).astype(jnp.float32)


@checked
def wpo_weights(
    policy_chosen_mean: Float[Array, "*pairs"],
    policy_rejected_mean: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
) -> Float[Array, "*pairs"]:
    """WPO's weight of a pair: how likely the policy itself is to produce it.

    w = min(1, e^(m_c + m_r)), m the mean log-prob per token; multiply any loss by w.

    The paper's sampled alignment, which TRL has, also divides every token's probability
    by sum_v p(v)^2 of its distribution p; its greedy alignment divides by max_v p(v).
    For these, subtract the divisor's logarithm from each token's log-prob first.

    Args:
        policy_chosen_mean: m_c (nats per token).
        policy_rejected_mean: m_r (nats per token).

    Returns:
        float32 in [0, 1], without gradient; 0 where `valid` is False.

    References:
        Zhou et al., WPO, arXiv:2406.11827.

    >>> wpo_weights(jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.5]))).tolist()
    [0.25]
    """
    total = counted_pairs(policy_chosen_mean, valid) + counted_pairs(
        policy_rejected_mean, valid
    )
    weights = jnp.exp(jnp.minimum(total, 0.0))
    return jax.lax.stop_gradient(counted_pairs(weights, valid))


@checked
def accuracy(
    margin: Float[Array, "*pairs"], valid: Bool[Array, "*pairs"] | None = None
) -> Metric:
    """Fraction of pairs with a positive margin; a margin of 0 counts half.

    It is 0.5 if the policy equals the reference; TRL counts a tie as wrong.

    Args:
        margin: h of any loss here, or the difference of a reward model's rewards.

    Returns:
        (number of pairs with h > 0 plus half of the ties, number of pairs).

    >>> accuracy(jnp.array([2.0, -1.0, 0.0, 1.0])).mean().item()
    0.625
    """
    return _metric(0.5 + 0.5 * jnp.sign(counted_pairs(margin, valid)), valid)


@checked
def reward_margin(
    margin: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
) -> Metric:
    """Mean difference of the implicit rewards, beta h.

    Args:
        margin: h (nats).
        beta: > 0, the loss's own.

    Returns:
        (sum over pairs, number of pairs).

    Raises:
        ValueError: `beta` is not positive.

    >>> reward_margin(jnp.array([2.0, 4.0]), beta=0.5).mean().item()
    1.5
    """
    require_beta(beta)
    return _metric(beta * counted_pairs(margin, valid), valid)


@checked
def implicit_reward(
    policy_logprobs: Float[Array, "*pairs"],
    reference_logprobs: Float[Array, "*pairs"],
    valid: Bool[Array, "*pairs"] | None = None,
    *,
    beta: float,
) -> Metric:
    """Mean implicit reward of the policy: beta log(pi(y) / ref(y)).

    Args:
        policy_logprobs: log pi(y) (nats), of the chosen or of the rejected responses.
        reference_logprobs: log ref(y) (nats).
        beta: > 0, the loss's own.

    Returns:
        (sum over responses, number of responses).

    Raises:
        ValueError: `beta` is not positive.

    >>> implicit_reward(jnp.array([-4.0]), jnp.array([-6.0]), beta=0.5).mean().item()
    1.0
    """
    require_beta(beta)
    return _metric(beta * log_ratio(policy_logprobs, reference_logprobs, valid), valid)


def _metric(
    values: Float[Array, "*pairs"], valid: Bool[Array, "*pairs"] | None
) -> Metric:
    return masked(values, jnp.ones(values.shape, bool) if valid is None else valid)


def require_beta(beta: float) -> None:
    """Raises ValueError if the scale of implicit rewards is not positive."""
    if beta <= 0:
        raise ValueError(f"beta must be > 0, got {beta}")


def _require_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must be in [0, 0.5), got {label_smoothing}; "
            "it is the probability that a label is wrong"
        )
