"""Keeps a policy's entropy up: an entropy bonus, and masks that select tokens.

A policy trained on rewards loses entropy and stops exploring. The bonus rewards
entropy. The masks select the tokens whose updates change the entropy most, by their own
entropy or by the covariance of log-prob and advantage, whose mean drives its decline.

The masks rank all counted tokens of their arrays. On a microbatch or inside a shard_map
these are the tokens of the microbatch or the shard, not of the whole batch.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.policy import clipped_surrogate
from jaxrl_post.losses.ratios import token_log_ratio, token_ratio
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float, Int, Key

__all__ = [
    "adaptive_coefficient",
    "clip_cov",
    "clip_cov_mask",
    "covariance",
    "entropy_bonus",
    "entropy_quantile_mask",
    "gated_coefficient",
    "kl_cov",
    "kl_cov_mask",
    "top_entropy_mask",
]

# Fractions become rationals with at most this denominator, so that 0.2 is 1/5 and not
# the float above it. The denominator's square still fits in int32.
_MAX_DENOMINATOR = 40_000


@checked
def entropy_bonus(
    entropy: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The entropy as a loss: L_t = -H_t, to be weighted by a coefficient.

    Args:
        entropy: of the next-token distribution (nats), differentiable.

    >>> entropy_bonus(jnp.array([0.5, 2.0]), jnp.array([True, False])).tolist()
    [-0.5, 0.0]
    """
    return counted(-entropy, mask)


@checked
def adaptive_coefficient(
    coefficient: Float[Array, ""] | float,
    entropy: Float[Array, ""] | float,
    *,
    target: float,
    step: float,
    low: float,
    high: float,
) -> Float[Array, ""]:
    """Next coefficient of the bonus, one step towards holding the entropy at a target.

    c' = clip(c + step if H <= target else c - step, low, high)

    Skywork-OR1 starts from c = 0 with step 0.005; with low = 0 entropy is never
    penalised. It trains with `gated_coefficient` of c, and so does TRL with high = 1.

    Args:
        coefficient: c, scalar.
        entropy: H, the batch's mean (nats per token), scalar.
        target: in nats per token.
        step: > 0.
        low: smallest coefficient.
        high: largest coefficient, >= low.

    Returns:
        float32 scalar; NaN if an input is.

    Raises:
        ValueError: `step` is not positive, or `low` exceeds `high`.

    References:
        He et al., Skywork Open Reasoner 1, arXiv:2505.22312.

    >>> limits = {"target": 0.25, "step": 0.5, "low": 0.0, "high": 1.0}
    >>> adaptive_coefficient(0.5, 0.1, **limits).item()
    1.0
    >>> adaptive_coefficient(0.25, 0.3, **limits).item()
    0.0
    """
    if step <= 0:
        raise ValueError(f"step must be > 0, got {step}")
    _require_range(low, high)
    coefficient = jnp.asarray(coefficient, jnp.float32)
    entropy = jnp.asarray(entropy, jnp.float32)
    # sign(target - entropy) is NaN if the entropy is, so a NaN stays visible.
    change = jnp.where(entropy == target, 1.0, jnp.sign(target - entropy))
    return jnp.clip(coefficient + step * change, low, high)


@checked
def gated_coefficient(
    coefficient: Float[Array, ""] | float,
    entropy: Float[Array, ""] | float,
    *,
    target: float,
) -> Float[Array, ""]:
    """The coefficient while the entropy is at or below its target, and 0 above.

    Args:
        coefficient: scalar, from `adaptive_coefficient`.
        entropy: the batch's mean (nats per token), scalar.
        target: in nats per token.

    Returns:
        float32 scalar.

    References:
        He et al., Skywork Open Reasoner 1, arXiv:2505.22312.

    >>> gated_coefficient(0.5, 0.1, target=0.2).item()
    0.5
    >>> gated_coefficient(0.5, 0.3, target=0.2).item()
    0.0
    """
    entropy = jnp.asarray(entropy, jnp.float32)
    coefficient = jnp.asarray(coefficient, jnp.float32)
    return jnp.where(entropy > target, 0.0, coefficient)


@checked
def top_entropy_mask(
    entropy: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    quantile: float = 0.8,
) -> Bool[Array, "*shape"]:
    """Selects the counted tokens of highest entropy, where a sequence can branch.

    Keeps exactly max(1, ceil((1 - quantile) n)) of n counted tokens, as the authors'
    code does. Ties go to the first in row-major order (in their code, to a top-k).
    Their code reduces with this mask, so it divides by the number of kept tokens. To
    divide by all n, as TRL does, multiply the loss by this mask and reduce with the
    whole mask. `entropy_quantile_mask` selects tokens as TRL does.

    Args:
        entropy: of the next-token distribution (nats).
        quantile: in [0, 1], the share of the tokens to leave out.

    Returns:
        bool; False where the mask is False. NaN ranks highest, so the loss shows it.

    Raises:
        ValueError: `quantile` is out of its range.

    References:
        Wang et al., Beyond the 80/20 Rule, arXiv:2506.01939.

    >>> entropy, mask = jnp.array([0.1, 3.0, 0.2, 9.0]), jnp.array([True] * 3 + [False])
    >>> top_entropy_mask(entropy, mask, quantile=0.8).tolist()
    [False, True, False, False]
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be in [0, 1], got {quantile}")
    count = mask.sum()
    number = _at_least_one(count - _floor_of_share(quantile, count))
    return _highest(entropy, mask, number)


@checked
def entropy_quantile_mask(
    entropy: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    quantile: float = 0.8,
) -> Bool[Array, "*shape"]:
    """Selects the counted tokens whose entropy reaches the quantile, as TRL does.

    The quantile of n sorted entropies is interpolated at index quantile (n - 1). Equal
    entropies are kept or left out together: with a tie at the quantile this keeps more
    tokens than `top_entropy_mask`, without a tie at most one fewer.

    Args:
        entropy: of the next-token distribution (nats).
        quantile: in [0, 1], the share of the tokens to leave out; 1 minus TRL's
            top_entropy_quantile.

    Returns:
        bool; False where the mask is False. If a counted entropy is NaN, all counted
        tokens are kept, so that the loss shows it.

    Raises:
        ValueError: `quantile` is out of its range.

    >>> mask = jnp.array([True, True, True, False])
    >>> entropy_quantile_mask(jnp.array([0.2, 0.2, 0.1, 9.0]), mask).tolist()
    [True, True, False, False]
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be in [0, 1], got {quantile}")
    ascending = jnp.sort(jnp.where(mask, entropy.astype(jnp.float32), jnp.inf).ravel())
    last = jnp.maximum(mask.sum() - 1, 0)
    place = quantile * last.astype(jnp.float32)
    below = jnp.floor(place).astype(last.dtype)
    low, high = ascending[below], ascending[jnp.minimum(below + 1, last)]
    share = place - below.astype(jnp.float32)
    threshold = jnp.where(share > 0, low + share * (high - low), low)
    # Not entropy >= threshold, which would drop NaN entropies.
    spoilt = jnp.isnan(jnp.where(mask, entropy, 0.0)).any()
    return mask & (~(entropy.astype(jnp.float32) < threshold) | spoilt)


@checked
def covariance(
    policy_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """Each token's part of the covariance of log-prob and advantage.

    cov_t = (log p_t - mean(log p)) (A_t - mean(A)), means over all counted tokens.

    Returns:
        float32 without gradient; 0 where the mask is False.

    References:
        Cui et al., The Entropy Mechanism of RL for Reasoning, arXiv:2505.22617.

    >>> p, advantages = jnp.array([-1.0, -3.0]), jnp.array([1.0, -1.0])
    >>> covariance(p, advantages, jnp.array([True, True])).tolist()
    [1.0, 1.0]
    """
    product = _centred(policy_logprobs, mask) * _centred(advantages, mask)
    return counted(jax.lax.stop_gradient(product), mask)


@checked
def clip_cov_mask(
    covariances: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    key: Key[Array, ""],
    *,
    fraction: float,
    low: float,
    high: float,
) -> Bool[Array, "*shape"]:
    """Selects the tokens that keep their gradient in Clip-Cov.

    Of the tokens with low <= cov_t <= high, max(1, floor(fraction n)) random ones lose
    their gradient, or all if there are fewer; n is the number of counted tokens.

    Args:
        covariances: per token, from `covariance`.
        key: random key; the draw also depends on the arrays' shape.
        fraction: in (0, 1].
        low: smallest covariance that may be dropped.
        high: largest covariance that may be dropped, >= low.

    Returns:
        bool; False where the mask is False.

    Raises:
        ValueError: `fraction` is out of its range, or `low` exceeds `high`.

    References:
        Cui et al., The Entropy Mechanism of RL for Reasoning, arXiv:2505.22617.

    >>> mask, key = jnp.array([True, True, True]), jax.random.key(0)
    >>> covariances = jnp.array([0.1, 2.0, 9.0])
    >>> clip_cov_mask(covariances, mask, key, fraction=0.1, low=1.0, high=5.0).tolist()
    [True, False, True]
    """
    _require_fraction(fraction)
    _require_range(low, high)
    covariances = covariances.astype(jnp.float32)
    candidates = mask & (covariances >= low) & (covariances <= high)
    number = _at_least_one(_floor_of_share(fraction, mask.sum()))
    lottery = jax.random.uniform(key, mask.shape, jnp.float32)
    return mask & ~_highest(lottery, candidates, number)


@checked
def kl_cov_mask(
    covariances: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    fraction: float,
) -> Bool[Array, "*shape"]:
    """Selects the max(1, floor(fraction n)) counted tokens of highest covariance.

    Args:
        covariances: per token, from `covariance`.
        fraction: in (0, 1].

    Returns:
        bool; False where the mask is False. Ties go to the first in row-major order;
        NaN ranks highest.

    Raises:
        ValueError: `fraction` is out of its range.

    References:
        Cui et al., The Entropy Mechanism of RL for Reasoning, arXiv:2505.22617.

    >>> covariances, mask = jnp.array([0.1, 2.0, 9.0]), jnp.array([True, True, False])
    >>> kl_cov_mask(covariances, mask, fraction=0.5).tolist()
    [False, True, False]
    """
    _require_fraction(fraction)
    number = _at_least_one(_floor_of_share(fraction, mask.sum()))
    return _highest(covariances, mask, number)


@checked
def clip_cov(
    policy_logprobs: Float[Array, "*shape"],
    proximal_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    key: Key[Array, ""],
    *,
    clip_low: float,
    clip_high: float,
    fraction: float,
    cov_range: tuple[float, float],
) -> Float[Array, "*shape"]:
    """Clip-Cov: the clipped surrogate, without a few tokens of high covariance.

    L_t = keep_t policy.clipped_surrogate_t, with keep as in `clip_cov_mask`. As in verl
    and the authors' code, tokens whose gradient the clip removes are not drawn, and a
    dropped token's loss is 0. verl has fraction 2e-4, covariances 1 to 5.

    Args:
        key: random key; the draw also depends on the arrays' shape.
        fraction: in (0, 1], the share of the tokens to drop.
        cov_range: smallest and largest covariance that may be dropped.

    References:
        Cui et al., The Entropy Mechanism of RL for Reasoning, arXiv:2505.22617.

    >>> p, advantages = jnp.array([-1.0, -1.0, -4.0]), jnp.array([1.0, 0.0, -1.0])
    >>> mask, key = jnp.array([True, True, True]), jax.random.key(0)
    >>> clip = {"clip_low": 0.2, "clip_high": 0.2}
    >>> chosen = {"fraction": 0.5, "cov_range": (1.5, 5.0)}
    >>> clip_cov(p, p, advantages, mask, key, **clip, **chosen).tolist()
    [-1.0, -0.0, 0.0]
    """
    logprobs = (policy_logprobs, proximal_logprobs)
    clip = {"clip_low": clip_low, "clip_high": clip_high}
    loss = clipped_surrogate(*logprobs, advantages, mask, **clip)
    ratio = token_ratio(*logprobs, mask)
    stopped_high = (advantages > 0) & (ratio > 1 + clip_high)
    stopped = stopped_high | ((advantages < 0) & (ratio < 1 - clip_low))
    covariances = covariance(policy_logprobs, advantages, mask)
    # NaN is in no range, so it is not drawn. Drawing a NaN loss would hide it.
    drawable = jnp.where(stopped | jnp.isnan(loss), jnp.nan, covariances)
    limits = {"fraction": fraction, "low": cov_range[0], "high": cov_range[1]}
    return jnp.where(clip_cov_mask(drawable, mask, key, **limits), loss, 0.0)


@checked
def kl_cov(
    policy_logprobs: Float[Array, "*shape"],
    proximal_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    kl_coefficient: float,
    fraction: float,
) -> Float[Array, "*shape"]:
    """KL-Cov: the policy gradient, with a KL penalty on tokens of high covariance.

    L_t = -r_t A_t + kl_coefficient |log r_t| [t in kl_cov_mask],  r_t = p_t / q_t

    |log r|, with gradient 0 at r = 1, stands for the KL, as in verl and the authors'
    code; verl has coefficient 1 and fraction 2e-4. The ratio is not clipped.

    Args:
        kl_coefficient: >= 0.
        fraction: in (0, 1], the share of the tokens that are penalised.

    References:
        Cui et al., The Entropy Mechanism of RL for Reasoning, arXiv:2505.22617.

    >>> p, q = jnp.array([-1.0, -3.0]), jnp.array([-1.0, -3.5])
    >>> advantages, mask = jnp.array([1.0, 0.0]), jnp.array([True, True])
    >>> kl_cov(p, q, advantages, mask, kl_coefficient=2.0, fraction=1.0).tolist()
    [-1.0, 1.0]
    """
    if kl_coefficient < 0:
        raise ValueError(f"kl_coefficient must be >= 0, got {kl_coefficient}")
    log_ratio = token_log_ratio(policy_logprobs, proximal_logprobs, mask)
    surrogate = -jnp.exp(log_ratio) * counted(jax.lax.stop_gradient(advantages), mask)
    covariances = covariance(policy_logprobs, advantages, mask)
    penalised = kl_cov_mask(covariances, mask, fraction=fraction)
    # Not jnp.abs, whose gradient at 0 is 1: it would push the ratio down on policy.
    distance = jax.lax.stop_gradient(jnp.sign(log_ratio)) * log_ratio
    return surrogate + jnp.where(penalised, kl_coefficient * distance, 0.0)


def _centred(
    values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    kept = counted(values, mask)
    return kept - kept.sum() / jnp.maximum(mask.sum().astype(jnp.float32), 1.0)


def _highest(
    values: Float[Array, "*shape"], mask: Bool[Array, "*shape"], number: Int[Array, ""]
) -> Bool[Array, "*shape"]:
    """Selects the `number` highest counted values; NaN ranks first, then position."""
    values, counts = values.reshape(-1), mask.reshape(-1)
    # lexsort's last key is the primary one, False sorts before True; it is stable.
    order = jnp.lexsort((-values, ~jnp.isnan(values), ~counts))
    chosen = jnp.zeros(order.shape, bool).at[order].set(jnp.arange(order.size) < number)
    return mask & chosen.reshape(mask.shape)


def _floor_of_share(share: float, count: Int[Array, ""]) -> Int[Array, ""]:
    """floor(share * count), in exact integers: as floats 0.29 * 100 < 29."""
    exact = Fraction(share).limit_denominator(_MAX_DENOMINATOR)
    whole, rest = count // exact.denominator, count % exact.denominator
    return whole * exact.numerator + rest * exact.numerator // exact.denominator


def _at_least_one(number: Int[Array, ""]) -> Int[Array, ""]:
    return jnp.maximum(number, 1)


def _require_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], got {fraction}")


def _require_range(low: float, high: float) -> None:
    if low > high:
        raise ValueError(f"low must be <= high, got {low} and {high}")
