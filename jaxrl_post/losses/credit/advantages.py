"""Advantages of samples relative to their group (the samples of one prompt).

A group is the samples of one prompt, whose rewards are compared with each other.

Rewards are [*groups, samples]. `valid` is False for samples that have no reward (a
rollout that failed): they enter no statistic and their advantage is 0. A group with one
valid sample has no comparison, so its advantage is 0 (as in NeMo RL and prime-rl); verl
keeps the raw reward, as `single="raw"` does. A group of equal rewards gives exactly 0.
`baselines` has the estimators that need more than rewards, or that optimise another
goal than the mean reward.

The last axis is the group: rewards in a flat array [n] belong to one group of n. A
trainer with a flat list, such as TRL's, in which the samples of a prompt stand side by
side, reshapes it, or all prompts are compared with each other without an error:

>>> import jax.numpy as jnp
>>> from jaxrl_post.losses import advantages
>>> flat = jnp.array([1.0, 3.0, 10.0, 30.0])  # two samples of each of two prompts
>>> advantages.group_centered(flat.reshape(2, 2)).reshape(-1).tolist()
[-1.0, 1.0, -10.0, 10.0]
>>> advantages.group_centered(flat).tolist()  # one group: wrong here
[-10.0, -8.0, -1.0, 19.0]
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float

__all__ = [
    "group_centered",
    "group_mean",
    "group_normalized",
    "leave_one_out",
    "leave_one_out_baseline",
    "leave_one_out_normalized",
    "leave_one_out_std",
]


@checked
def group_mean(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
) -> Float[Array, "*groups"]:
    """Mean reward of each group; exact if all rewards of a group are equal.

    Args:
        rewards: any float dtype; a flat array [n] is one group (see above).

    Returns:
        float32; 0 for a group without a valid sample.

    >>> group_mean(jnp.array([[1.0, 3.0], [5.0, 5.0]])).tolist()
    [2.0, 5.0]
    """
    return _mean(*_float_and_valid(rewards, valid))[..., 0]


@checked
def group_centered(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
    *,
    single: Literal["zero", "raw"] = "zero",
) -> Float[Array, "*groups samples"]:
    """Reward minus the group's mean: A_i = r_i - mean(r).

    Args:
        rewards: any float dtype; a flat array [n] is one group (see above).
        single: what a group's only valid sample gets: "zero", or its "raw" reward.

    Raises:
        ValueError: `single` is neither.

    References:
        Liu et al., Understanding R1-Zero-Like Training, arXiv:2503.20783 (Dr. GRPO).

    >>> group_centered(jnp.array([[1.0, 3.0], [5.0, 5.0]])).tolist()
    [[-1.0, 1.0], [0.0, 0.0]]
    """
    rewards, valid = _float_and_valid(rewards, valid)
    centred = counted(rewards - _mean(rewards, valid), valid)
    return _with_single(centred, rewards, valid, single)


@checked
def group_normalized(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
    *,
    ddof: int = 1,
    epsilon: float = 1e-6,
    single: Literal["zero", "raw"] = "zero",
) -> Float[Array, "*groups samples"]:
    """Reward centred and divided by the group's standard deviation.

    A_i = (r_i - mean(r)) / (std(r) + epsilon)

    Epsilon is 1e-6 in verl and NeMo RL, 1e-4 in TRL, 1e-5 in AReaL, 1e-9 in OpenRLHF.
    All of these divide the variance by n - 1; some papers mean n.

    Args:
        rewards: any float dtype; a flat array [n] is one group (see above).
        ddof: the variance is the sum of squares over n - ddof; 1 (sample) or 0.
        epsilon: >= 0, in the unit of the rewards.
        single: what a group's only valid sample gets: "zero", or its "raw" reward.

    Raises:
        ValueError: `ddof` is neither 0 nor 1, `epsilon` is negative, or `single` is
            neither of its two.

    References:
        Shao et al., DeepSeekMath, arXiv:2402.03300 (GRPO).

    >>> group_normalized(jnp.array([[1.0, 3.0]]), ddof=0, epsilon=0.0).tolist()
    [[-1.0, 1.0]]
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 1 (sample) or 0 (population), got {ddof}")
    _require_epsilon(epsilon)
    rewards, valid = _float_and_valid(rewards, valid)
    centred = counted(rewards - _mean(rewards, valid), valid)
    normalized = _scaled(centred, _std(rewards, valid, ddof), epsilon)
    return _with_single(normalized, rewards, valid, single)


@checked
def leave_one_out_baseline(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
) -> Float[Array, "*groups samples"]:
    """Mean reward of the group's other samples: b_i = mean_{j != i}(r_j).

    Args:
        rewards: any float dtype; a flat array [n] is one group (see above).

    Returns:
        float32; 0 where a sample has no valid other.

    References:
        Ahmadian et al., Back to Basics, arXiv:2402.14740 (RLOO).

    >>> leave_one_out_baseline(jnp.array([1.0, 2.0, 3.0])).tolist()
    [2.5, 2.0, 1.5]
    """
    everyone, others = _others(*_float_and_valid(rewards, valid))
    return _mean(everyone, others)[..., 0]


@checked
def leave_one_out_std(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
) -> Float[Array, "*groups samples"]:
    """Sample standard deviation (n - 1) of the group's other samples.

    Args:
        rewards: any float dtype; a flat array [n] is one group (see above).

    Returns:
        float32; 0 where fewer than two others are valid.

    >>> leave_one_out_std(jnp.array([0.0, 0.0, 3.0, 0.0])).tolist()[2]
    0.0
    """
    everyone, others = _others(*_float_and_valid(rewards, valid))
    return _std(everyone, others, ddof=1)[..., 0]


@checked
def leave_one_out(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
) -> Float[Array, "*groups samples"]:
    """Reward minus the mean reward of the group's other samples.

    A_i = r_i - mean_{j != i}(r_j) = n / (n - 1) (r_i - mean(r))

    The baseline does not depend on the sample, so the policy gradient is unbiased.

    Args:
        rewards: any float dtype; a flat array [n] is one group (see above).

    Returns:
        float32; 0 where `valid` is False and in a group of one.

    References:
        Ahmadian et al., Back to Basics, arXiv:2402.14740 (RLOO).

    >>> leave_one_out(jnp.array([[1.0, 2.0, 3.0]])).tolist()
    [[-1.5, 0.0, 1.5]]
    """
    rewards, valid = _float_and_valid(rewards, valid)
    comparable = valid & (valid.sum(axis=-1, keepdims=True) > 1)
    return counted(rewards - leave_one_out_baseline(rewards, valid), comparable)


@checked
def leave_one_out_normalized(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None = None,
    *,
    epsilon: float = 1e-6,
) -> Float[Array, "*groups samples"]:
    """Leave-one-out advantage divided by the others' standard deviation.

    A_i = (r_i - mean_{j != i}(r_j)) / (std_{j != i}(r_j) + epsilon)

    Where the others do not vary (always so in a group of two) the advantage is left
    unscaled, as in NeMo RL; dividing by epsilon alone would blow it up.

    Args:
        rewards: any float dtype; a flat array [n] is one group (see above).
        epsilon: >= 0, in the unit of the rewards.

    Returns:
        float32; 0 where `valid` is False and in a group of one.

    Raises:
        ValueError: `epsilon` is negative.

    >>> leave_one_out_normalized(jnp.array([[1.0, 3.0]])).tolist()
    [[-2.0, 2.0]]
    """
    _require_epsilon(epsilon)
    centred = leave_one_out(rewards, valid)
    return _scaled(centred, leave_one_out_std(rewards, valid), epsilon)


def _require_epsilon(epsilon: float) -> None:
    if epsilon < 0:
        raise ValueError(f"epsilon must be >= 0, got {epsilon}")


def _with_single(
    values: Float[Array, "*groups samples"],
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"],
    single: str,
) -> Float[Array, "*groups samples"]:
    """Applies `single` to the groups with only one valid sample."""
    if single not in ("zero", "raw"):
        raise ValueError(f"single must be 'zero' or 'raw', got {single!r}")
    if single == "zero":
        return values
    return jnp.where(valid.sum(axis=-1, keepdims=True) == 1, rewards, values)


def _float_and_valid(
    rewards: Float[Array, "*groups samples"],
    valid: Bool[Array, "*groups samples"] | None,
) -> tuple[Float[Array, "*groups samples"], Bool[Array, "*groups samples"]]:
    """Returns rewards in float32, 0 where they are missing, and the valid mask."""
    if valid is None:
        valid = jnp.ones(rewards.shape, bool)
    return counted(rewards, valid), valid


def _others(
    rewards: Float[Array, "*groups samples"], valid: Bool[Array, "*groups samples"]
) -> tuple[
    Float[Array, "*groups samples samples"], Bool[Array, "*groups samples samples"]
]:
    """Returns the group's rewards for each sample, and a mask of the valid others."""
    samples = rewards.shape[-1]
    seen_from_each = (*rewards.shape, samples)
    everyone = jnp.broadcast_to(rewards[..., None, :], seen_from_each)
    return everyone, valid[..., None, :] & ~jnp.eye(samples, dtype=bool)


def _mean(
    values: Float[Array, "*batch n"], mask: Bool[Array, "*batch n"]
) -> Float[Array, "*batch 1"]:
    """Mean over the last dim, exact for equal values; 0 without counted values.

    The sum runs over the distances to the smallest value, because float32 sums of n
    equal numbers do not divide back to that number, and equal rewards must give 0.
    """
    smallest = jnp.where(mask, values, jnp.inf).min(
        axis=-1, keepdims=True, initial=jnp.inf
    )
    smallest = jax.lax.stop_gradient(jnp.where(jnp.isinf(smallest), 0.0, smallest))
    count = jnp.maximum(mask.sum(axis=-1, keepdims=True), 1).astype(jnp.float32)
    distance = counted(values - smallest, mask).sum(axis=-1, keepdims=True) / count
    return smallest + distance


def _std(
    values: Float[Array, "*batch n"], mask: Bool[Array, "*batch n"], ddof: int
) -> Float[Array, "*batch 1"]:
    """Standard deviation over the last dim; 0 with fewer than 1 + ddof counted."""
    deviation = counted(values - _mean(values, mask), mask)
    freedom = jnp.maximum(mask.sum(axis=-1, keepdims=True) - ddof, 1)
    squares = jnp.square(deviation).sum(axis=-1, keepdims=True)
    variance = squares / freedom.astype(jnp.float32)
    # sqrt's derivative at 0 is infinite, and times a zero cotangent it is NaN. The test
    # is not `variance > 0`, which would hide a NaN.
    equal = variance == 0
    return jnp.where(equal, 0.0, jnp.sqrt(jnp.where(equal, 1.0, variance)))


def _scaled(
    centred: Float[Array, "*batch n"], std: Float[Array, "*batch m"], epsilon: float
) -> Float[Array, "*batch n"]:
    """Divides by std + epsilon; leaves values unscaled where std is 0."""
    return centred / jnp.where(std == 0, 1.0, std + epsilon)
