"""Token log-prob and entropy by tiles of rows, with one tile of logits in memory.

Masked rows cost nothing: the counted rows are gathered into tiles, and the number of
tiles is decided at run time. Over a sharded vocabulary each device works on its own
columns and the tiles' statistics are summed across `axes`. The forward pass saves the
logits of the first tile for the backward pass, which recomputes the other tiles'
logits. In exact mode the forward pass computes a tile of rows by the functions of
`rows`, and the backward pass is the same.

Backward, with p = softmax(z), z = h W^T / temperature, H the entropy, and g, e, n the
cotangents of log-prob, entropy and log-normaliser:
dz = g (onehot - q) - e p (log p + H) + n p. Here q is p; of a row with kept tokens it
is p over their mass, and 0 for the others.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.kernels.token_logprob.counted import (
    ByRow,
    Residuals,
    counted_tiles,
    take,
)
from jaxrl_post.kernels.token_logprob.kept import log_mass_of
from jaxrl_post.kernels.token_logprob.reference import MASKED
from jaxrl_post.kernels.token_logprob.rows import (
    ExactLogits,
    logit_rows,
    logprob_rows,
)
from jaxrl_post.types import Array

__all__ = ["Layout", "backward", "forward"]


class Layout(NamedTuple):
    """Static facts of one call.

    Attributes:
        tile: rows whose logits are in memory at a time.
        vocab_size: number of real columns; the columns after them are padding.
        temperature: divides the logits.
        softcap: c in c tanh(logits / c), before the temperature; None for no cap.
        axes: mesh axes over which the vocabulary is split, () if it is whole.
        exact: the logits of exact mode, whose tiles divide this one; None without it.
    """

    tile: int
    vocab_size: int
    temperature: float
    softcap: float | None = None
    axes: tuple[str, ...] = ()
    exact: ExactLogits | None = None


def forward(
    hidden: Array, weight: Array, by_row: ByRow, layout: Layout
) -> tuple[Array, Array, Residuals]:
    """Returns log-prob and entropy [rows] (0 where masked) and the residuals."""
    targets, mask, kept = by_row
    rows = hidden.shape[0]
    order, num_tiles = counted_tiles(mask, layout.tile)

    def tile(index: Array, found: tuple[Array, ...]) -> tuple[tuple, Array]:
        chosen = _tile(order, index, layout.tile)
        inputs, wanted = take(hidden, chosen), take(targets, chosen)
        ids = None if kept is None else take(kept, chosen)
        if layout.exact is None:
            logits, first = _logits(inputs, weight, layout)
            stats = _statistics(logits, wanted, first, ids, layout)
        else:
            count = (chosen < rows).sum(dtype=jnp.int32)
            logits, stats = _exactly(
                layout.exact, inputs, weight, (wanted, ids), count, layout
            )
        found = tuple(
            array.at[chosen].set(value, mode="drop")
            for array, value in zip(found, stats, strict=True)
        )
        return found, logits

    zeros = jnp.zeros((rows,), jnp.float32)
    found, logits = tile(jnp.int32(0), (zeros,) * (3 if kept is None else 4))
    if rows > layout.tile:
        further = lambda index, found: tile(index, found)[0]  # noqa: E731
        found = jax.lax.fori_loop(1, num_tiles, further, found)
    logprob, normalizer, entropy, *more = found
    log_mass = more[0] if more else None
    if log_mass is not None:
        logprob = logprob - log_mass
    return logprob, entropy, Residuals(normalizer, entropy, log_mass, logits)


def backward(
    hidden: Array,
    weight: Array,
    by_row: ByRow,
    residuals: Residuals,
    cotangents: tuple[Array, Array, Array],
    layout: Layout,
) -> tuple[Array, Array]:
    """Returns the gradients of hidden [rows, d] and weight [vocab, d], both float32.

    With a split vocabulary the gradient of hidden must be summed over the devices.
    """
    targets, mask, kept = by_row
    order, num_tiles = counted_tiles(mask, layout.tile)
    read = (targets, residuals.normalizer, residuals.entropy, *cotangents)
    row_of_tile = jnp.arange(layout.tile, dtype=jnp.int32)
    _, first = _columns(weight, layout)

    def tile(index: Array, logits: Array) -> tuple[Array, Array, Array]:
        """Returns a tile's row indices and its parts of the two gradients."""
        chosen = _tile(order, index, layout.tile)
        inputs = take(hidden, chosen)
        target, normalizer, entropy, g, e, n = (take(array, chosen) for array in read)
        # Rows that pad the last tile read zeros, cotangents too, so they add nothing.
        log_p = logits - normalizer[:, None]
        among_all, ids = g, None
        if kept is not None:
            ids = take(kept, chosen)
            among_all = jnp.where(ids[:, 0] < 0, g, 0.0)
        spread = (among_all - n)[:, None] + e[:, None] * (log_p + entropy[:, None])
        d_logits = jnp.exp(log_p) * (-spread / layout.temperature)
        if ids is not None:
            assert residuals.log_mass is not None
            among_kept = _at(log_p, _local(ids, first))
            share = jnp.exp(among_kept - take(residuals.log_mass, chosen)[:, None])
            d_logits = d_logits.at[
                row_of_tile[:, None], _here(_local(ids, first), logits.shape[1])
            ].add(-g[:, None] * share / layout.temperature, mode="drop")
        column = _here(target - first, logits.shape[1])
        d_logits = d_logits.at[row_of_tile, column].add(
            g / layout.temperature, mode="drop", unique_indices=True
        )
        if layout.softcap is not None:
            capped = logits * (layout.temperature / layout.softcap)
            # tanh' = 1 - tanh^2; the gradient of a padding column is 0 already.
            d_logits = d_logits * (1.0 - jnp.square(jnp.clip(capped, -1.0, 1.0)))
        d_logits = d_logits.astype(weight.dtype)
        d_rows = jnp.einsum(
            "tv,vd->td", d_logits, weight, preferred_element_type=jnp.float32
        )
        d_weight = jnp.einsum(
            "tv,td->vd", d_logits, inputs, preferred_element_type=jnp.float32
        )
        return chosen, d_rows, d_weight

    def add(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        inputs = take(hidden, _tile(order, index, layout.tile))
        chosen, d_rows, d_weight = tile(index, _logits(inputs, weight, layout)[0])
        return carry[0].at[chosen].set(d_rows, mode="drop"), carry[1] + d_weight

    assert residuals.logits is not None
    # Start the sum with the first tile: writing zeros of the weight's size to add it to
    # often takes longer than computing a tile.
    chosen, d_rows, d_weight = tile(jnp.int32(0), residuals.logits)
    d_hidden = jnp.zeros(hidden.shape, jnp.float32).at[chosen].set(d_rows, mode="drop")
    if hidden.shape[0] <= layout.tile:
        return d_hidden, d_weight
    return jax.lax.fori_loop(1, num_tiles, add, (d_hidden, d_weight))


def _tile(order: Array, index: Array, tile: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(order, index * tile, tile)


def _columns(weight: Array, layout: Layout) -> tuple[int, Array]:
    """Number of columns over all devices, with padding, and this device's first id."""
    columns, first = weight.shape[0], jnp.int32(0)
    if layout.axes:
        first = jax.lax.axis_index(layout.axes) * columns
        columns *= jax.lax.axis_size(layout.axes)
    return columns, first


def _here(local_targets: Array, columns: int) -> Array:
    """This device's column of each target; out of range if another device has it."""
    here = (local_targets >= 0) & (local_targets < columns)
    return jnp.where(here, local_targets, columns)


def _logits(hidden: Array, weight: Array, layout: Layout) -> tuple[Array, Array]:
    """Scaled float32 logits [tile, columns] and the id of the first local column."""
    product = jnp.einsum(
        "td,vd->tv", hidden, weight, preferred_element_type=jnp.float32
    )
    if layout.softcap is not None:
        product = layout.softcap * jnp.tanh(product / layout.softcap)
    logits = product * (1.0 / layout.temperature)
    total, first = _columns(weight, layout)
    if total != layout.vocab_size:
        exists = (
            first + jnp.arange(weight.shape[0], dtype=jnp.int32) < layout.vocab_size
        )
        logits = jnp.where(exists, logits, MASKED)
    return logits, first


def _local(ids: Array, first: Array) -> Array:
    """Ids [tile, kept] as columns; out of range where padded or another device's."""
    return jnp.where(ids < 0, -1, ids - first)


def _at(log_p: Array, columns: Array) -> Array:
    """Log-probs [tile, kept] at columns; MASKED where they are out of range."""
    columns = _here(columns, log_p.shape[1])
    return jnp.take_along_axis(log_p, columns, axis=-1, mode="fill", fill_value=MASKED)


def _statistics(
    logits: Array, targets: Array, first: Array, kept: Array | None, layout: Layout
) -> tuple[Array, ...]:
    """Log-prob, log-normaliser and entropy of each row of a tile.

    With kept tokens also the log of their mass, 0 for a row without any.
    """
    column = _here(targets - first, logits.shape[1])
    target = jnp.take_along_axis(
        logits, column[:, None], axis=-1, mode="fill", fill_value=0.0
    )[:, 0]
    top = logits.max(axis=-1)
    if layout.axes:
        top = jax.lax.pmax(top, layout.axes)
    total = jnp.exp(logits - top[:, None]).sum(axis=-1)
    if layout.axes:
        total, target = jax.lax.psum((total, target), layout.axes)
    normalizer = top + jnp.log(total)
    log_p, entropy = _entropy(logits, normalizer, layout)
    if kept is None:
        return target - normalizer, normalizer, entropy
    among = _at(log_p, _local(kept, first))
    log_mass = log_mass_of(among, kept[:, 0] >= 0, layout.axes)
    return target - normalizer, normalizer, entropy, log_mass


def _entropy(logits: Array, normalizer: Array, layout: Layout) -> tuple[Array, Array]:
    """All log-probs, and the entropies.

    A separate pass: for two sums over the same exponentials XLA would store them.
    """
    log_p = logits - normalizer[:, None]
    entropy = -(jnp.exp(log_p) * log_p).sum(axis=-1)
    if layout.axes:
        entropy = jax.lax.psum(entropy, layout.axes)
    return log_p, entropy


def _exactly(
    exact: ExactLogits,
    hidden: Array,
    weight: Array,
    by_row: tuple[Array, Array | None],
    count: Array,
    layout: Layout,
) -> tuple[Array, tuple[Array, ...]]:
    """Logits of a tile's first `count` rows, and what `_statistics` says of them."""
    targets, kept = by_row
    # Divided on the host, as a compiler may divide by a constant in another way.
    scale = np.float32(1) / np.float32(exact.temperature)
    scales = jnp.full(targets.shape, scale)
    logits = logit_rows(exact.logits, weight, hidden, scales, count, exact.tile)
    logprob, normalizer, log_mass = logprob_rows(
        logits, targets, count, exact.tile, layout.axes, kept
    )
    found = logprob, normalizer, _entropy(logits, normalizer, layout)[1]
    return logits, found if kept is None else (*found, log_mass)
