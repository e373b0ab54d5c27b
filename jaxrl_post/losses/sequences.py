"""Sums and means over the sequences of a row, broadcast to every token.

A row holds one sequence (`segment_ids` is None) or several side by side: segment ids
1.. number the row's sequences and 0 is padding, which is never counted. Sequences may
also interleave, as in a row of trees. Every token gets its own sequence's result, so
shapes stay [*batch, length] and packed rows give the same results as unpacked rows.

A row of `length` tokens has at most `length` sequences. An id outside [0, length] makes
every result of its row NaN, and the count of sequences with it, so that the loss shows
it: under jit it cannot be refused.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.losses.arguments import checked
from jaxrl_post.types import Array, Bool, Float, Int

__all__ = [
    "counted",
    "in_sequence",
    "segment_totals",
    "sequence_count",
    "sequence_mean",
    "sequence_sum",
]


@checked
def counted(
    values: Float[Array, "*shape"], mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns `values` in float32 where the mask is True and 0 elsewhere.

    Apply it before any exp or product: then -inf and NaN of uncounted tokens reach
    neither value nor gradient. A mask applied after would give 0 * inf = NaN.

    Args:
        values: any shape, any float dtype.
        mask: bool of the same shape.

    Returns:
        float32 of the same shape.

    >>> counted(jnp.array([1.0, -jnp.inf]), jnp.array([True, False])).tolist()
    [1.0, 0.0]
    """
    return jnp.where(mask, values.astype(jnp.float32), 0.0)


@checked
def in_sequence(
    mask: Bool[Array, "*shape"], segment_ids: Int[Array, "*shape"] | None = None
) -> Bool[Array, "*shape"]:
    """Removes the padding segment from a mask.

    Args:
        segment_ids: int, 0 where there is padding, or None for no padding.

    Returns:
        bool of the same shape.

    >>> in_sequence(jnp.array([True, True]), jnp.array([1, 0])).tolist()
    [True, False]
    """
    return mask if segment_ids is None else mask & (segment_ids > 0)


@checked
def sequence_sum(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Float[Array, "*batch length"]:
    """Gives every token the sum of `values` over its sequence's counted tokens.

    Args:
        values: [*batch, length], any float dtype.
        mask: bool [*batch, length], True where a token counts.
        segment_ids: int [*batch, length] in [0, length], or None.

    Returns:
        float32 [*batch, length]; tokens of the padding segment get 0.

    >>> values = jnp.array([1.0, 2.0, 4.0, 8.0])
    >>> mask = jnp.array([True, True, False, True])
    >>> sequence_sum(values, mask).tolist()
    [11.0, 11.0, 11.0, 11.0]
    >>> sequence_sum(values, mask, jnp.array([1, 1, 2, 2])).tolist()
    [3.0, 3.0, 8.0, 8.0]
    """
    kept = counted(values, in_sequence(mask, segment_ids))
    if segment_ids is None:
        return jnp.broadcast_to(kept.sum(axis=-1, keepdims=True), values.shape)
    totals = segment_totals(kept, segment_ids)
    return jnp.take_along_axis(totals, segment_ids, axis=-1)


@checked
def sequence_mean(
    values: Float[Array, "*batch length"],
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Float[Array, "*batch length"]:
    """Gives every token the mean of `values` over its sequence's counted tokens.

    Args:
        values: [*batch, length], any float dtype.
        mask: bool [*batch, length], True where a token counts.
        segment_ids: int [*batch, length] in [0, length], or None.

    Returns:
        float32 [*batch, length]; 0 in a sequence without counted tokens.

    >>> values, mask = jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])
    >>> sequence_mean(values, mask).tolist()
    [2.0, 2.0, 2.0]
    """
    total = sequence_sum(values, mask, segment_ids)
    count = sequence_sum(mask.astype(jnp.float32), mask, segment_ids)
    return total / jnp.maximum(count, 1.0)


@checked
def sequence_count(
    mask: Bool[Array, "*batch length"],
    segment_ids: Int[Array, "*batch length"] | None = None,
) -> Float[Array, ""]:
    """Counts the sequences that have at least one counted token.

    Args:
        mask: bool [*batch, length], True where a token counts.
        segment_ids: int [*batch, length] in [0, length], or None.

    Returns:
        float32 scalar; NaN if an id is out of its range.

    >>> mask = jnp.array([[True, True, True], [False, False, False]])
    >>> sequence_count(mask).item()
    1.0
    >>> sequence_count(mask, jnp.array([[1, 1, 2], [1, 1, 1]])).item()
    2.0
    """
    if segment_ids is None:
        return mask.any(axis=-1).sum().astype(jnp.float32)
    tokens = in_sequence(mask, segment_ids).astype(jnp.float32)
    totals = segment_totals(tokens, segment_ids)
    # NaN is no count and compares as False, so it passes through.
    present = (totals > 0).astype(jnp.float32)
    return jnp.where(jnp.isnan(totals), totals, present).sum()


@checked
def segment_totals(
    values: Float[Array, "*batch length"], segment_ids: Int[Array, "*batch length"]
) -> Float[Array, "*batch segments"]:
    """Sums each row by segment: one number per segment instead of one per token.

    Args:
        values: [*batch, length], any float dtype, 0 at uncounted tokens (`counted`).
        segment_ids: int [*batch, length] in [0, length].

    Returns:
        float32 [*batch, length + 1]; entry s is the sum over the tokens of segment s.
        A row of `length` tokens has at most `length` segments, and padding. NaN in a
        row with an id out of its range.

    >>> segment_totals(jnp.array([1.0, 2.0, 4.0]), jnp.array([1, 1, 2])).tolist()
    [0.0, 3.0, 4.0, 0.0]
    """
    num_segments = values.shape[-1] + 1

    def one_row(row: Array, ids: Array) -> Array:
        return jax.ops.segment_sum(row, ids, num_segments=num_segments)

    by_row = jnp.vectorize(one_row, signature="(length),(length)->(segments)")
    totals = by_row(values.astype(jnp.float32), segment_ids)
    known = (segment_ids >= 0) & (segment_ids < num_segments)
    return jnp.where(known.all(axis=-1, keepdims=True), totals, jnp.nan)
