"""Masks that reject tokens or sequences too far from the sampler's policy.

The input is per token: a weight proximal / behavior (`correction.token_weights`) or a
divergence k(behavior, proximal) of `kl`. The names in verl's rollout_rs correspond to

    token_k1, token_k2, token_k3           reject_tokens of kl.k*(behavior, proximal)
    seq_mean_k*, seq_sum_k*, seq_max_k*    reject_sequences(..., statistic=)

The result is the mask of the kept tokens. Used as the loss's mask, it removes rejected
tokens from the denominator as well; jnp.where(keep, loss, 0) leaves them in the
denominator, as the weights of `correction` do.

Both bounds are inclusive. A NaN at a counted token keeps the token, or its whole
sequence, because dropping the token would hide the NaN from the loss. A log-prob of
-inf makes the divergences large and finite, so its token is rejected.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.losses.sequences import in_sequence, sequence_mean, sequence_sum
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = ["reject_sequences", "reject_tokens"]


@checked
def reject_tokens(
    divergence: Float[Array, "*shape"],
    mask: Bool[Array, "*shape"],
    *,
    low: float = -float("inf"),
    high: float,
) -> Bool[Array, "*shape"]:
    """Keeps the counted tokens whose divergence lies in [low, high].

    Args:
        divergence: per token, a weight or an estimate of a divergence (nats).
        low: lower bound, inclusive.
        high: upper bound, inclusive.

    Returns:
        bool; False where the mask is False.

    Raises:
        ValueError: the bounds are in the wrong order.

    References:
        Liu et al., When Speed Kills Stability: Demystifying RL Collapse from the
        Training-Inference Mismatch, 2025.

    >>> weights, mask = jnp.array([0.4, 1.0, 2.0, 2.5]), jnp.array([True] * 4)
    >>> reject_tokens(weights, mask, low=0.5, high=2.0).tolist()
    [False, True, True, False]
    """
    _require_bounds(low, high)
    return mask & _within(divergence.astype(jnp.float32), low, high)


@checked
def reject_sequences(
    divergence: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
    *,
    statistic: Literal["mean", "sum", "max"],
    low: float = -float("inf"),
    high: float,
) -> Bool[Array, "*batch length"]:
    """Keeps the counted tokens of the sequences whose statistic lies in [low, high].

    A sum grows with length and drops long sequences first; a mean hides a single bad
    token in a long sequence; a max depends on the worst token alone.

    Args:
        divergence: per token, a weight or an estimate of a divergence (nats).
        statistic: of the divergences of a sequence's counted tokens.
        low: lower bound, inclusive.
        high: upper bound, inclusive.

    Returns:
        bool; False where the mask is False and in the padding segment.

    Raises:
        ValueError: the bounds are in the wrong order, or there is no such statistic.

    References:
        Liu et al., When Speed Kills Stability: Demystifying RL Collapse from the
        Training-Inference Mismatch, 2025.

    >>> divergence, mask = jnp.array([[0.0, 0.0, 3.0, 1.0]]), jnp.array([[True] * 4])
    >>> ids = jnp.array([[1, 1, 1, 2]])
    >>> reject_sequences(divergence, mask, ids, statistic="mean", high=1.0).tolist()
    [[True, True, True, True]]
    >>> reject_sequences(divergence, mask, ids, statistic="max", high=1.0).tolist()
    [[False, False, False, True]]
    """
    _require_bounds(low, high)
    if statistic == "mean":
        of_sequence = sequence_mean(divergence, mask, segment_ids)
    elif statistic == "sum":
        of_sequence = sequence_sum(divergence, mask, segment_ids)
    elif statistic == "max":
        of_sequence = _sequence_max(divergence, mask, segment_ids)
    else:
        raise ValueError(f"statistic must be 'mean', 'sum' or 'max', got {statistic!r}")
    return in_sequence(mask, segment_ids) & _within(of_sequence, low, high)


def _within(
    values: Float[Array, "*shape"], low: float, high: float
) -> Bool[Array, "*shape"]:
    """Whether values lie in [low, high]; NaN, neither below nor above, counts as in."""
    return ~((values < low) | (values > high))


def _sequence_max(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None,
) -> Float[Array, "*batch length"]:
    """Gives every token its sequence's largest counted value; -inf if it has none."""
    mask = in_sequence(mask, segment_ids)
    kept = jnp.where(mask, values.astype(jnp.float32), -jnp.inf)
    if segment_ids is None:
        return jnp.broadcast_to(
            kept.max(axis=-1, keepdims=True, initial=-jnp.inf), values.shape
        )

    def one_row(row: Array, ids: Array) -> Array:
        # A row of `length` tokens has at most `length` segments, and padding.
        return jax.ops.segment_max(row, ids, num_segments=row.shape[-1] + 1)[ids]

    by_row = jnp.vectorize(one_row, signature="(length),(length)->(length)")
    return by_row(kept, segment_ids)


def _require_bounds(low: float, high: float) -> None:
    if not low <= high:
        raise ValueError(f"bounds must satisfy low <= high, got {low} and {high}")
