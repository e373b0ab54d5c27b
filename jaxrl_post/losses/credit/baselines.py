"""Advantages that need more than rewards, or that optimise more than the mean reward.

As in `advantages`: rewards are [*groups, samples], `valid` is False for samples that
have no reward (they enter no statistic and get 0), and a group of one valid sample or
of equal rewards gets exactly 0 unless a function says otherwise. No gradient flows. A
flat array [n] is one group of n: pass `rewards.reshape(groups, samples)`.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.credit import advantages
from jaxrl_post.losses.credit.whitening import AxisName, Moments, whitened
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "batch_scaled",
    "gdpo",
    "max_rl",
    "optimal_baseline",
    "pass_at_k",
    "pass_at_k_estimate",
    "remax",
]


@checked
def remax(
    rewards: Float[Array, "*groups samples"],
    greedy_rewards: Float[Array, "*groups"],
    valid: Bool[Array, "*groups samples"] | None = None,
) -> Float[Array, "*groups samples"]:
    """ReMax: reward minus the reward of the prompt's greedy completion.

    A_i = r_i - r(greedy)

    The baseline is not a sample of the group, so one sample per prompt is enough.

    Args:
        rewards: any float dtype; a flat array [n] is one group.
        greedy_rewards: reward of the completion decoded at temperature 0.

    References:
        Li et al., ReMax, arXiv:2310.10505.

    >>> remax(jnp.array([[1.0, 0.0]]), jnp.array([0.25])).tolist()
    [[0.75, -0.25]]
    """
    rewards, valid = _constant(rewards, valid)
    baseline = jax.lax.stop_gradient(greedy_rewards).astype(jnp.float32)
    return counted(rewards - baseline[..., None], valid)


@checked
def optimal_baseline(
    rewards: Float[Array, "*groups samples"],
    lengths: Int[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
) -> Float[Array, "*groups samples"]:
    """OPO: reward minus the group's mean reward weighted by length.

    A_i = r_i - sum_j(l_j r_j) / sum_j(l_j)

    This baseline has the least variance if a sequence's squared gradient norm is
    proportional to its length.

    Args:
        rewards: any float dtype; a flat array [n] is one group.
        lengths: of the completions, in tokens, >= 0.

    Returns:
        float32; 0 where `valid` is False and in a group without tokens.

    References:
        Hao et al., On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.

    >>> optimal_baseline(jnp.array([[1.0, 0.0]]), jnp.array([[1, 3]])).tolist()
    [[0.75, -0.25]]
    """
    rewards, valid = _constant(rewards, valid)
    weights = jnp.where(valid, lengths, 0).astype(jnp.float32)
    total = weights.sum(axis=-1, keepdims=True)
    # Centring first changes nothing but rounding: equal rewards become exactly 0.
    centred = advantages.group_centered(rewards, valid)
    baseline = (weights * centred).sum(axis=-1, keepdims=True) / jnp.maximum(total, 1.0)
    return counted(centred - baseline, valid & (total > 0))


@checked
def max_rl(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
) -> Float[Array, "*groups samples"]:
    """MaxRL: reward centred and divided by the group's mean.

    A_i = (r_i - mean(r)) / mean(r)

    It maximises log p(success) and not p(success), so prompts whose successes are rarer
    weigh more.

    Args:
        rewards: >= 0, usually 0 or 1; any float dtype.

    Returns:
        float32; 0 where `valid` is False and in a group whose mean is not positive: a
        group without success has no signal, and a negative mean would flip the signs.

    References:
        Tajwar et al., Maximum Likelihood Reinforcement Learning, arXiv:2602.02710.

    >>> max_rl(jnp.array([[1.0, 0.0, 0.0, 0.0]])).tolist()
    [[3.0, -1.0, -1.0, -1.0]]
    """
    rewards, valid = _constant(rewards, valid)
    mean = advantages.group_mean(rewards, valid)[..., None]
    # NaN <= 0 is False, so a NaN stays visible.
    failed = mean <= 0
    centred = counted(rewards - mean, valid & ~failed)
    return centred / jnp.where(failed, 1.0, mean)


@checked
def pass_at_k(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
    *,
    k: int,
) -> Float[Array, "*groups samples"]:
    """Pass@k Training: a sample's mean advantage over all sets of k that contain it.

    A set of k samples has reward 1 if one of them is correct. For n samples, c correct,
    with R = 1 - C(n - c, k) / C(n, k) the mean over all sets and s = sqrt(R (1 - R)):

        correct     A = (1 - R) / s
        incorrect   A = (1 - R - C(n - c - 1, k - 1) / C(n - 1, k - 1)) / s
                      = -c / (n - c) (1 - R) / s

    k = 1 is `group_normalized` with ddof = 0, and k = n gives 0.

    Args:
        rewards: a sample is correct where its reward is > 0.
        k: in [1, samples]; a group with fewer valid samples takes them all as one set.

    Returns:
        float32; 0 where `valid` is False and where R is 0 or 1.

    Raises:
        ValueError: `k` is out of its range.

    References:
        Chen et al., Pass@k Training for Adaptively Balancing Exploration and
        Exploitation of Large Reasoning Models, arXiv:2508.10751.

    >>> pass_at_k(jnp.array([[1.0, 0.0, 0.0, 0.0]]), k=2).tolist()
    [[1.0, -0.3333333432674408, -0.3333333432674408, -0.3333333432674408]]
    """
    correct, valid = _correct(rewards, valid)
    hit, miss = _draws(correct, valid, k)
    n, c = (x.sum(axis=-1, keepdims=True) for x in (valid.astype(jnp.float32), correct))
    # == and not >, so that NaN does not count as "no spread" and stays visible.
    no_spread = hit * miss == 0
    for_correct = jnp.sqrt(miss / jnp.where(no_spread, 1.0, hit))
    for_incorrect = -c / jnp.maximum(n - c, 1.0) * for_correct
    values = jnp.where(correct > 0, for_correct, for_incorrect)
    return counted(jnp.where(no_spread, 0.0, values), valid)


@checked
def pass_at_k_estimate(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
    *,
    k: int,
) -> Float[Array, "*groups"]:
    """Unbiased estimate of pass@k, the probability that one of k samples is correct.

    1 - C(n - c, k) / C(n, k) for n samples, c correct

    Args:
        rewards: a sample is correct where its reward is > 0.
        k: in [1, samples]. A group with n < k valid samples has no unbiased estimate
            and gets the estimate of pass@n, which is at most pass@k.

    Returns:
        float32 in [0, 1]; 0 for a group without a valid sample.

    Raises:
        ValueError: `k` is out of its range.

    References:
        Chen et al., Evaluating Large Language Models Trained on Code,
        arXiv:2107.03374, eq. 1.

    >>> pass_at_k_estimate(jnp.array([[1.0, 0.0, 0.0, 0.0]]), k=2).tolist()
    [0.5]
    """
    return _draws(*_correct(rewards, valid), k)[0][..., 0]


@checked
def batch_scaled(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
    *,
    ddof: int = 1,
    epsilon: float = 1e-6,
    axis_name: AxisName | None = None,
) -> Float[Array, "*groups samples"]:
    """Reward centred in its group and divided by the batch's standard deviation.

    A_i = (r_i - mean(r in the group)) / (std(r in the batch) + epsilon)

    A group's own deviation (GRPO) is noisy, and inflates groups that hardly vary.
    TRL has this as scale_rewards="batch", with epsilon 1e-4.

    Args:
        rewards: any float dtype; a flat array [n] is one group.
        ddof: the variance is the sum of squares over n - ddof; 1 (sample) or 0.
        epsilon: >= 0, in the unit of the rewards.
        axis_name: mesh axes over which the groups are split, inside `shard_map`.

    Raises:
        ValueError: `ddof` is neither 0 nor 1, or `epsilon` is negative.

    References:
        Liu et al., Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning,
        arXiv:2508.08221.

    >>> rewards = jnp.array([[0.0, 2.0], [0.0, 2.0]])
    >>> batch_scaled(rewards, ddof=0, epsilon=0.0).tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    """
    if epsilon < 0:
        raise ValueError(f"epsilon must be >= 0, got {epsilon}")
    rewards, valid = _constant(rewards, valid)
    centred = advantages.group_centered(rewards, valid)
    moments = Moments.of(rewards, valid, axis_name=axis_name)
    deviation = jnp.sqrt(moments.variance(ddof))
    return centred / jnp.where(deviation == 0, 1.0, deviation + epsilon)


@checked
def gdpo(
    rewards: Float[Array, "*groups samples components"],
    valid: Bool[Array, "*groups samples"] | None = None,
    *,
    weights: tuple[float, ...] | None = None,
    ddof: int = 1,
    epsilon: float = 1e-6,
    epsilon_inside: bool = True,
    axis_name: AxisName | None = None,
) -> Float[Array, "*groups samples"]:
    """GDPO: every reward component normalised in its group, then summed and scaled.

    S_i = sum_c w_c (r_ic - mean(r_c)) / (std(r_c) + epsilon)    within the group
    A_i = S_i / sqrt(var(S) + epsilon^2)                         over the batch
    or, with epsilon outside of the root, S_i / (std(S) + epsilon), as TRL has it

    Normalising the sum of the components instead (GRPO) gives different combinations
    the same advantage, and lets the component of the largest spread dominate.

    Args:
        rewards: any float dtype; a valid sample has all components.
        weights: one per component; None for 1 each.
        ddof: the variances are sums of squares over n - ddof; 1 (sample) or 0.
        epsilon: >= 0; TRL has 1e-4.
        epsilon_inside: True puts epsilon^2 under the batch's root, False adds epsilon
            to the root. This matters if the batch hardly varies.
        axis_name: mesh axes over which the groups are split, inside `shard_map`.

    Raises:
        ValueError: the number of weights is not the number of components, `ddof` is
            neither 0 nor 1, or `epsilon` is negative.

    References:
        Liu et al., GDPO: Group reward-Decoupled Normalization Policy Optimization for
        Multi-reward RL Optimization, arXiv:2601.05242.

    >>> rewards = jnp.array([[[1.0, 0.0], [0.0, 5.0]], [[1.0, 5.0], [0.0, 0.0]]])
    >>> gdpo(rewards, ddof=0, epsilon=0.0, weights=(1.0, 0.0)).tolist()
    [[1.0, -1.0], [1.0, -1.0]]
    """
    components = rewards.shape[-1]
    if weights is not None and len(weights) != components:
        raise ValueError(
            f"weights must have one number for each of the {components} components, "
            f"got {weights}"
        )
    if valid is None:
        valid = jnp.ones(rewards.shape[:-1], bool)
    by_component = jnp.moveaxis(rewards, -1, 0)
    normalized = advantages.group_normalized(
        by_component,
        jnp.broadcast_to(valid, by_component.shape),
        ddof=ddof,
        epsilon=epsilon,
    )
    scales = (1.0,) * components if weights is None else weights
    terms = [scale * part for scale, part in zip(scales, normalized, strict=True)]
    total = jnp.stack(terms).sum(axis=0)
    # S sums to 0 in each group, so its mean over the batch is 0. Subtracting the
    # computed mean would only add rounding error to groups that must get 0.
    if epsilon_inside:
        squared = epsilon**2
        return whitened(
            total, valid, center=False, ddof=ddof, epsilon=squared, axis_name=axis_name
        )
    total = jax.lax.stop_gradient(total)
    variance = Moments.of(total, valid, axis_name=axis_name).variance(ddof)
    return total / jnp.where(variance == 0, 1.0, jnp.sqrt(variance) + epsilon)


def _constant(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None,
) -> tuple[Float[Array, "*groups samples"], Bool[Array, "*groups samples"]]:
    """Returns float32 rewards without gradient, 0 where missing, and the valid mask."""
    if valid is None:
        valid = jnp.ones(rewards.shape, bool)
    return jax.lax.stop_gradient(counted(rewards, valid)), valid


def _correct(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None,
) -> tuple[Float[Array, "*groups samples"], Bool[Array, "*groups samples"]]:
    """1 where a valid sample is correct, else 0; a valid NaN stays NaN."""
    rewards, valid = _constant(rewards, valid)
    correct = (rewards > 0).astype(jnp.float32)
    return jnp.where(jnp.isnan(rewards), rewards, correct), valid


def _draws(
    correct: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"],
    k: int,
) -> tuple[Float[Array, "*groups 1"], Float[Array, "*groups 1"]]:
    """Probabilities that k draws without replacement hit a correct sample, or miss all.

    miss = prod_{i<k} (n - c - i) / (n - i) = C(n - c, k) / C(n, k), and hit is the sum
    over i of the probability that draw i is the first to hit. Products and sums of
    terms >= 0 keep the digits that 1 - miss and log-gamma would lose.
    """
    samples = valid.shape[-1]
    if not 1 <= k <= samples:
        raise ValueError(f"k must be in [1, samples = {samples}], got {k}")
    n, c = (x.sum(axis=-1, keepdims=True) for x in (valid.astype(jnp.float32), correct))
    drawn = jnp.arange(k, dtype=jnp.float32)
    left = n - drawn
    possible, size = left > 0, jnp.maximum(left, 1.0)
    misses = jnp.where(possible, jnp.maximum(left - c, 0.0) / size, 1.0)
    missed = jnp.cumprod(misses, axis=-1)
    before = jnp.concatenate([jnp.ones_like(missed[..., :1]), missed[..., :-1]], -1)
    hits = jnp.where(possible, c / size, 0.0) * before
    return hits.sum(axis=-1, keepdims=True), missed[..., -1:]
