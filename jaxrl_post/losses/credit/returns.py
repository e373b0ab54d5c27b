"""Returns and advantages along a sequence, by one reverse recurrence each.

A sequence's states are its counted tokens. The policy did not produce the tokens
between them (a tool's output, another speaker): "next" is the sequence's next counted
token, and rewards and values at uncounted tokens are ignored. Nothing crosses from one
sequence of a packed row to another, also where other sequences stand between the tokens
of one, as in a row of trees. Results carry no gradient.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.credit.advantages import group_normalized
from jaxrl_post.losses.credit.recurrence import Method, reverse_linear_recurrence
from jaxrl_post.losses.credit.whitening import AxisName, Moments, whitened
from jaxrl_post.losses.sequences import counted, in_sequence, sequence_sum
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "at_last_token",
    "discounted_returns",
    "gae",
    "lambda_returns",
    "length_adaptive_lambda",
    "process_normalized",
    "reinforce_plus_plus",
    "spread_turns",
    "turn_returns",
]


@checked
def at_last_token(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Float[Array, "*batch length"]:
    """Keeps only the value at each sequence's last counted token: a terminal reward.

    Args:
        values: a sequence's reward at each of its tokens, any float dtype.

    Returns:
        float32, without gradient; 0 everywhere else.

    >>> values, mask = jnp.full(4, 5.0), jnp.array([True, True, True, False])
    >>> at_last_token(values, mask).tolist()
    [0.0, 0.0, 5.0, 0.0]
    >>> at_last_token(values, mask, jnp.array([1, 1, 2, 2])).tolist()
    [0.0, 5.0, 5.0, 0.0]
    """

    def terminal(ids: Array | None, mask: Array, values: Array) -> Array:
        last = mask & ~_followed(mask, ids)
        return counted(values, last)

    mask = in_sequence(mask, segment_ids)
    return jax.lax.stop_gradient(_side_by_side(terminal, segment_ids, mask, values))


@checked
def gae(
    rewards: Float[Array, "*batch length"],
    values_before: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    gamma: float,
    lambda_: float | Float[Array, "*batch length"],
    bootstrap: Float[Array, "*batch length"] | None = None,
    gaps: Literal["carry", "zero"] = "carry",
    method: Method = "chunked",
) -> Float[Array, "*batch length"]:
    """Generalised advantage estimation over the counted tokens of each sequence.

    delta_t = r_t + gamma V_next - V_t
    A_t     = delta_t + gamma lambda_t A_next

    Between counted tokens, "carry" (verl, NeMo RL, AReaL) takes V and A of the next
    counted token as they are. "zero" (OpenRLHF) makes each uncounted token between two
    counted ones a state of value 0 and reward 0: V does not pass this state, and A is
    discounted at it.

    Args:
        rewards: per token; `at_last_token` places a sequence's reward.
        values_before: V_t, the critic's value before token t is sampled.
        gamma: in [0, 1].
        lambda_: in [0, 1], or one per token (`length_adaptive_lambda`), read at counted
            tokens; a state of value 0 takes the value of the next counted token.
        bootstrap: value of the state after a sequence's last counted token, read at
            that token, for sequences that were cut off; None for 0 (all ended).
        gaps: "carry" or "zero".
        method: of `reverse_linear_recurrence`.

    Returns:
        float32, without gradient; 0 where the mask is False.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Schulman et al., High-Dimensional Continuous Control Using Generalized
        Advantage Estimation, arXiv:1506.02438.

    >>> rewards, values = jnp.array([0.0, 0.0, 5.0]), jnp.array([1.0, 2.0, 3.0])
    >>> mask = jnp.array([True, True, True])
    >>> gae(rewards, values, mask, gamma=1.0, lambda_=0.0).tolist()
    [1.0, 1.0, 2.0]
    >>> gae(rewards, values, mask, gamma=1.0, lambda_=1.0).tolist()
    [4.0, 3.0, 2.0]
    """
    _require_fraction("gamma", gamma)
    if gaps not in ("carry", "zero"):
        raise ValueError(f"gaps must be 'carry' or 'zero', got {gaps!r}")
    if isinstance(lambda_, (int, float)):
        _require_fraction("lambda_", lambda_)
        lambda_ = jnp.full(mask.shape, lambda_, jnp.float32)

    def estimated(
        ids: Array | None,
        mask: Array,
        rewards: Array,
        values: Array,
        decay: Array,
        end: Array,
    ) -> Array:
        followed = _followed(mask, ids, method)
        if gaps == "carry":
            states, next_values = mask, _at_next_counted(values, mask, method)
        else:
            states, next_values = mask | followed, _at_next_position(values)
            decay = jnp.where(mask, decay, _at_next_counted(decay, mask, method))
        deltas = rewards + gamma * jnp.where(followed, next_values, end) - values
        return _over_states(gamma * decay, deltas, states, followed, method)

    mask = in_sequence(mask, segment_ids)
    end = jnp.zeros(mask.shape) if bootstrap is None else bootstrap
    read = (counted(each, mask) for each in (rewards, values_before, lambda_, end))
    advantages = _side_by_side(estimated, segment_ids, mask, *read)
    return jax.lax.stop_gradient(counted(advantages, mask))


@checked
def lambda_returns(
    advantages: Float[Array, "*batch length"],
    values_before: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
) -> Float[Array, "*batch length"]:
    """Targets of the critic from `gae`'s advantages: G_t = A_t + V_t.

    These are the TD(lambda) targets for the advantages' lambda. Decoupled GAE (VC-PPO)
    uses another lambda for the critic than for the policy, usually 1: call `gae` twice,
    and pass the advantages of the critic's lambda here.

    Args:
        advantages: per token, from `gae`.
        values_before: V_t, as passed to `gae`.

    Returns:
        float32, without gradient; 0 where the mask is False.

    References:
        Yuan et al., What's Behind PPO's Collapse in Long-CoT?, arXiv:2503.01491.

    >>> advantages, values = jnp.array([1.0, 2.0]), jnp.array([0.5, jnp.nan])
    >>> lambda_returns(advantages, values, jnp.array([True, False])).tolist()
    [1.5, 0.0]
    """
    total = counted(advantages, mask) + counted(values_before, mask)
    return jax.lax.stop_gradient(total)


@checked
def length_adaptive_lambda(
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    alpha: float,
) -> Float[Array, "*batch length"]:
    """A lambda for `gae` that approaches 1 for long sequences: 1 - 1 / (alpha l).

    The sum of the weights lambda^t is then about alpha l: it grows with the length.

    Args:
        mask: bool, True where a token counts; l is their number in the sequence.
        alpha: > 0; 0.05 in VAPO.

    Returns:
        float32 in [0, 1]; every token of a sequence gets the sequence's.

    Raises:
        ValueError: `alpha` is not positive.

    References:
        Yue et al., VAPO, arXiv:2504.05118.

    >>> length_adaptive_lambda(jnp.array([True, True, False]), alpha=2.0).tolist()
    [0.75, 0.75, 0.75]
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be > 0, got {alpha}")
    length = sequence_sum(mask.astype(jnp.float32), mask, segment_ids)
    return jnp.clip(1.0 - 1.0 / (alpha * jnp.maximum(length, 1.0)), 0.0, 1.0)


@checked
def discounted_returns(
    rewards: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    gamma: float,
    method: Method = "chunked",
) -> Float[Array, "*batch length"]:
    """Discounted sum of the rewards from each token on: G_t = r_t + gamma G_next.

    Uncounted tokens between counted ones do not discount.

    Args:
        rewards: per token; `at_last_token` places a sequence's reward.
        gamma: in [0, 1].
        method: of `reverse_linear_recurrence`.

    Returns:
        float32, without gradient; 0 where the mask is False.

    Raises:
        ValueError: `gamma` is out of its range.

    >>> rewards = jnp.array([0.0, 9.0, 0.0, 2.0])
    >>> mask = jnp.array([True, False, True, True])
    >>> discounted_returns(rewards, mask, gamma=0.5).tolist()
    [0.5, 0.0, 1.0, 2.0]
    """
    _require_fraction("gamma", gamma)

    def summed(ids: Array | None, mask: Array, rewards: Array) -> Array:
        followed = _followed(mask, ids, method)
        decay = jnp.full(mask.shape, gamma, jnp.float32)
        return _over_states(decay, rewards, mask, followed, method)

    mask = in_sequence(mask, segment_ids)
    returns = _side_by_side(summed, segment_ids, mask, counted(rewards, mask))
    return jax.lax.stop_gradient(counted(returns, mask))


@checked
def reinforce_plus_plus(
    rewards: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    epsilon: float = 1e-8,
    axis_name: AxisName | None = None,
    moments: Moments | None = None,
) -> Float[Array, "*batch length"]:
    """REINFORCE++: discounted returns, whitened over all counted tokens of the batch.

    A_t = (G_t - mean(G)) / sqrt(var(G) + epsilon)

    The variant with a baseline has no function here: apply `whitened` to
    `group_centered` rewards, repeated at every token of their sequences.

    Args:
        rewards: per token, with the KL penalty inside (`shaping.kl_shaped_rewards`).
        gamma: in [0, 1].
        ddof: see `whitening.whitened`.
        epsilon: >= 0, in squared units of the rewards.
        axis_name: mesh axes over which the rows are split, inside `shard_map`.
        moments: moments of the whole batch's returns, if this is a piece of the batch.

    Returns:
        float32, without gradient; 0 where the mask is False.

    Raises:
        ValueError: an argument is out of its range.

    References:
        Hu et al., REINFORCE++, arXiv:2501.03262.

    >>> rewards = jnp.array([[0.0, 3.0, jnp.nan], [0.0, 1.0, jnp.nan]])
    >>> mask = jnp.array([[True, True, False], [True, True, False]])
    >>> reinforce_plus_plus(rewards, mask, gamma=1.0, ddof=0).tolist()
    [[1.0, 1.0, 0.0], [-1.0, -1.0, 0.0]]
    """
    mask = in_sequence(mask, segment_ids)
    returns = discounted_returns(rewards, mask, segment_ids, gamma=gamma)
    return whitened(
        returns, mask, ddof=ddof, epsilon=epsilon, axis_name=axis_name, moments=moments
    )


@checked
def process_normalized(
    step_rewards: Float[Array, "*groups samples length"],
    step_ends: Bool[Array, "*groups samples length"],
    mask: Bool[Array, "*groups samples length"],
    *,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Float[Array, "*groups samples length"]:
    """GRPO with process supervision: normalised step rewards, summed from the token on.

    n_j = (r_j - mean(r)) / (std(r) + epsilon)    over all steps of the group
    A_t = sum of n_j of the sample's steps j that end at t or later

    Args:
        step_rewards: a step's reward where the step ends; ignored elsewhere.
        step_ends: bool, True at the last counted token of each step.
        mask: bool, True where a token counts. One sample per row.
        ddof: see `advantages.group_normalized`.
        epsilon: >= 0, in the unit of the rewards.

    Returns:
        float32, without gradient; 0 where the mask is False, and in a group with only
        one step.

    Raises:
        ValueError: `ddof` is neither 0 nor 1, or `epsilon` is negative.

    References:
        Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.3.

    >>> rewards = jnp.array([[[0.0, 1.0], [0.0, 3.0]]])
    >>> ends = jnp.array([[[False, True], [False, True]]])
    >>> mask = jnp.ones((1, 2, 2), bool)
    >>> process_normalized(rewards, ends, mask, ddof=0, epsilon=0.0).tolist()
    [[[-1.0, -1.0], [1.0, 1.0]]]
    """
    *groups, samples, length = step_rewards.shape
    steps = (*groups, samples * length)
    normalized = group_normalized(
        step_rewards.reshape(steps),
        (step_ends & mask).reshape(steps),
        ddof=ddof,
        epsilon=epsilon,
    )
    return discounted_returns(normalized.reshape(step_rewards.shape), mask, gamma=1.0)


@checked
def turn_returns(
    turn_rewards: Float[Array, "*batch turns"],
    turn_mask: Bool[Array, "*batch turns"],
    *,
    gamma: float,
) -> Float[Array, "*batch turns"]:
    """Returns discounted per turn and not per token: G_k = r_k + gamma G_{k+1}.

    Args:
        turn_rewards: one per turn, any float dtype.
        turn_mask: bool, True where there is a turn.
        gamma: in [0, 1].

    Returns:
        float32, without gradient; 0 where the mask is False.

    Raises:
        ValueError: `gamma` is out of its range.

    >>> rewards, mask = jnp.array([1.0, 0.0, 4.0]), jnp.array([True, True, True])
    >>> turn_returns(rewards, mask, gamma=0.5).tolist()
    [2.0, 2.0, 4.0]
    """
    return discounted_returns(turn_rewards, turn_mask, gamma=gamma)


@checked
def spread_turns(
    values: Float[Array, "*batch turns"],
    turn_ids: Int[Array, "*batch length"],
) -> Float[Array, "*batch length"]:
    """Gives every token the value of its turn.

    Args:
        values: one per turn, any float dtype.
        turn_ids: in [0, turns]; 0 for tokens of no turn, 1 for the first turn's.

    Returns:
        float32; 0 for tokens of no turn, NaN for a turn that does not exist.

    >>> spread_turns(jnp.array([3.0, 5.0]), jnp.array([0, 1, 1, 0, 2])).tolist()
    [0.0, 3.0, 3.0, 0.0, 5.0]
    """
    values = values.astype(jnp.float32)
    none = jnp.zeros((*values.shape[:-1], 1), jnp.float32)
    by_id = jnp.concatenate([none, values], axis=-1)
    return jnp.take_along_axis(by_id, turn_ids, axis=-1, mode="fill")


def _side_by_side(
    compute: Callable[..., Array], segment_ids: Array | None, *arrays: Any
) -> Array:
    """Applies a function of rows to rows in which no sequence interrupts another.

    In a row of trees the branches stand between a node and the sequence that trains on
    it. The order of tokens within a sequence stays.

    Args:
        compute: segment ids and arrays [*batch, length] to one such array.
        segment_ids: as for its callers.
        arrays: of the row as it is.
    """
    if segment_ids is None:
        return compute(None, *arrays)
    # Sorting carries arrays along without a gather, which is slow on a TPU. Padding
    # comes last, so that rows of whole sequences stay as they are.
    length = segment_ids.shape[-1]
    key = jnp.where(segment_ids > 0, segment_ids, length + 1)
    place = jax.lax.broadcasted_iota(jnp.int32, key.shape, key.ndim - 1)
    _, place, *moved = jax.lax.sort((key, place, segment_ids, *arrays), num_keys=1)
    return jax.lax.sort((place, compute(*moved)), num_keys=1)[1]


def _over_states(
    decay: Float[Array, "*batch length"],
    increments: Float[Array, "*batch length"],
    states: Bool[Array, "*batch length"],
    followed: Bool[Array, "*batch length"],
    method: Method,
) -> Float[Array, "*batch length"]:
    """x_t = b_t + decay_t x_next over a sequence's states; other tokens pass x through.

    A sequence's last state ignores x_next, so the x of the row's next sequence, which
    other tokens pass through, ends there.
    """
    through = jnp.where(states, jnp.where(followed, decay, 0.0), 1.0)
    return reverse_linear_recurrence(
        through, counted(increments, states), method=method
    )


def _followed(
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None,
    method: Method = "chunked",
) -> Bool[Array, "*batch length"]:
    """Whether a counted token comes later in the token's own sequence."""
    if segment_ids is None:
        segment_ids = jnp.ones(mask.shape, jnp.int32)
    # Exact: a row has fewer than 2^24 segments.
    own = segment_ids.astype(jnp.float32)
    return (own > 0) & (_at_next_counted(own, mask, method) == own)


def _at_next_counted(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    method: Method,
) -> Float[Array, "*batch length"]:
    """The next counted value in the row after each position; 0 if there is none."""
    # A recurrence and not a gather, which is slow on a TPU.
    through = jnp.where(mask, 0.0, 1.0)
    here_or_next = reverse_linear_recurrence(
        through, counted(values, mask), method=method
    )
    return _at_next_position(here_or_next)


def _at_next_position(
    values: Float[Array, "*batch length"],
) -> Float[Array, "*batch length"]:
    """Shifts a row to the left by one; 0 comes in."""
    return jnp.concatenate([values[..., 1:], jnp.zeros_like(values[..., :1])], axis=-1)


def _require_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")
