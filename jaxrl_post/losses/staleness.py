"""Learning from tokens that older versions of the policy sampled.

A version is the number of steps that the policy's parameters have taken. Every sampled
token records the version that sampled it. Its age is the trainer's version minus this
version; ages differ within a sequence if parameters were swapped during its generation.
The staleness of a sample is the version that trains on it minus the smallest version
among its tokens.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import counted
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "ages",
    "capacity",
    "interpolated_proximal",
    "staleness_weights",
    "within_staleness",
]

# Stands for -inf, so that 0 times an impossible token's log-prob is 0 and not NaN.
_IMPOSSIBLE = -1e30


@checked
def ages(
    versions: Int[Array, "*shape"],
    current_version: Int[Array, ""] | int,
    mask: Bool[Array, "*shape"],
) -> Int[Array, "*shape"]:
    """Age of each token in versions: current - version.

    Args:
        versions: version of the parameters that sampled the token.
        current_version: version of the parameters being trained.

    Returns:
        int32; 0 where the mask is False.

    >>> versions, mask = jnp.array([3, 5, -1]), jnp.array([True, True, False])
    >>> ages(versions, 5, mask).tolist()
    [2, 0, 0]
    """
    return jnp.where(mask, current_version - versions, 0).astype(jnp.int32)


@checked
def within_staleness(
    versions: Int[Array, "*shape"],
    current_version: Int[Array, ""] | int,
    mask: Bool[Array, "*shape"],
    *,
    max_age: int,
) -> Bool[Array, "*shape"]:
    """Keeps the counted tokens of age max_age or less.

    Args:
        versions: version of the parameters that sampled the token.
        current_version: version of the parameters being trained.
        max_age: >= 0, in versions; 0 keeps only tokens of the current version.

    Returns:
        bool; False where the mask is False.

    Raises:
        ValueError: `max_age` is negative.

    >>> versions, mask = jnp.array([3, 5, -1]), jnp.array([True, True, False])
    >>> within_staleness(versions, 5, mask, max_age=1).tolist()
    [False, True, False]
    """
    if max_age < 0:
        raise ValueError(f"max_age must be >= 0 (versions), got {max_age}")
    return mask & (ages(versions, current_version, mask) <= max_age)


@checked
def staleness_weights(
    versions: Int[Array, "*shape"],
    current_version: Int[Array, ""] | int,
    mask: Bool[Array, "*shape"],
    *,
    decay: float,
) -> Float[Array, "*shape"]:
    """Weight of each token by its age: decay^age.

    Args:
        versions: version of the parameters that sampled the token.
        current_version: version of the parameters being trained.
        decay: in (0, 1]; 1 weighs all ages the same.

    Returns:
        float32 in [0, 1]; 1 where the mask is False.

    Raises:
        ValueError: `decay` is out of its range.

    >>> versions, mask = jnp.array([3, 5, -1]), jnp.array([True, True, False])
    >>> staleness_weights(versions, 5, mask, decay=0.5).tolist()
    [0.25, 1.0, 1.0]
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay must be in (0, 1], got {decay}")
    # A token from a later version than the current one must not weigh more than 1.
    age = jnp.maximum(ages(versions, current_version, mask), 0)
    return jnp.power(decay, age.astype(jnp.float32))


@checked
def interpolated_proximal(
    behavior_logprobs: Float[Array, "*shape"],
    policy_logprobs: Float[Array, "*shape"],
    behavior_versions: Int[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    proximal_version: Int[Array, ""] | int,
    policy_version: Int[Array, ""] | int,
    space: Literal["log", "linear"] = "log",
) -> Float[Array, "*shape"]:
    """Estimates the proximal log-probs between the sampler's and the policy's.

    a = clip((v_proximal - v_behavior) / (v_policy - v_behavior), 0, 1)
    log:     (1 - a) log behavior_t + a log p_t
    linear:  log((1 - a) behavior_t + a p_t)

    It saves decoupled PPO the forward pass under the proximal parameters. A token that
    the policy's own version sampled (v_behavior = v_policy) has a = 0, the sampler's
    log-prob, as in AReaL, whose proximal version is always v_policy - 1.

    Args:
        policy_logprobs: log p (nats), of the policy being trained.
        behavior_versions: version of the parameters that sampled the token.
        proximal_version: version of the proximal parameters.
        policy_version: version of the parameters that gave `policy_logprobs`.
        space: the space of the linear interpolation, log-probs or probabilities.

    Returns:
        float32 (nats), without gradient; 0 where the mask is False. -1e30 stands for
        -inf.

    Raises:
        ValueError: `space` is neither of the two.

    References:
        Li, Wu and Shen, A-3PO, arXiv:2512.06547.

    >>> behavior, policy = jnp.array([-1.0, -1.0]), jnp.array([-1.5, -1.5])
    >>> versions, mask = jnp.array([0, 2]), jnp.array([True, True])
    >>> interpolated_proximal(
    ...     behavior, policy, versions, mask, proximal_version=1, policy_version=2
    ... ).tolist()
    [-1.25, -1.0]
    """
    behavior = jnp.maximum(counted(behavior_logprobs, mask), _IMPOSSIBLE)
    policy = jnp.maximum(counted(policy_logprobs, mask), _IMPOSSIBLE)
    ahead = ages(behavior_versions, proximal_version, mask).astype(jnp.float32)
    apart = ages(behavior_versions, policy_version, mask).astype(jnp.float32)
    fraction = jnp.clip(ahead / jnp.maximum(apart, 1.0), 0.0, 1.0)
    if space == "log":
        guess = (1.0 - fraction) * behavior + fraction * policy
    elif space == "linear":
        guess = jnp.logaddexp(
            jnp.log1p(-fraction) + behavior, jnp.log(fraction) + policy
        )
    else:
        raise ValueError(f"space must be 'log' or 'linear', got {space!r}")
    return jax.lax.stop_gradient(guess)


def capacity(
    *,
    concurrency: int,
    running: int,
    staleness: int,
    version: int,
    batch_size: int,
    accepted: int,
) -> int:
    """Number of rollouts that may start now; none if it is 0 or less.

    min(concurrency - running,
        (staleness + version + 1) batch_size - (accepted + running))

    The second bound: the n-th rollout ever begun, from 0, is in batch n // batch_size.
    If begun at version v, it is n // batch_size - v versions old when trained on.

    Args:
        concurrency: >= 1, rollouts that may run at once.
        running: >= 0, rollouts that run now.
        staleness: >= 0, largest age at which a rollout may be trained on (versions).
        version: >= 0, of the parameters, one more for each batch trained on.
        batch_size: >= 1, rollouts per batch.
        accepted: >= 0, rollouts finished and accepted since the start, used or not.

    Returns:
        A number that may be negative.

    Raises:
        ValueError: a number is out of its range.

    References:
        Fu et al., AReaL, arXiv:2505.24298.

    >>> capacity(
    ...     concurrency=64, running=8, staleness=1, version=0, batch_size=16, accepted=4
    ... )
    20
    """
    for name, value, least in (
        ("concurrency", concurrency, 1),
        ("running", running, 0),
        ("staleness", staleness, 0),
        ("version", version, 0),
        ("batch_size", batch_size, 1),
        ("accepted", accepted, 0),
    ):
        if value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}")
    begun = accepted + running
    return min(concurrency - running, (staleness + version + 1) * batch_size - begun)
