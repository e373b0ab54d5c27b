"""Products of kept tokens: a few for each row, with gathered rows of the weight."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.types import Array

__all__ = [
    "GATHERED_BYTES",
    "KeptGradients",
    "gathered_logits",
    "log_mass_of",
    "own_columns",
]

# Bytes of rows of the weight that are gathered at a time. XLA writes them, and the L2
# cache of an H100, 50 MB, holds them until they are read.
GATHERED_BYTES = 2**24


def own_columns(ids: Array, first: Array, columns: int) -> Array:
    """Ids as this device's columns; `columns` where it does not have them, and for -1.

    >>> own_columns(jnp.array([[3, 7, -1]]), jnp.int32(2), 4).tolist()
    [[1, 4, 4]]
    """
    here = (ids >= 0) & (ids >= first) & (ids < first + columns)
    return jnp.where(here, ids - first, columns)


def log_mass_of(among: Array, has_kept: Array, axes: tuple[str, ...] = ()) -> Array:
    """Log of the mass of the kept tokens, however small the mass is.

    Args:
        among: log-probs of the kept tokens among all [rows, kept]; far below every
            other one where there is none, or where another device has it.
        has_kept: whether a row has kept tokens [rows].
        axes: mesh axes of a `shard_map` that split the vocabulary.

    Returns:
        float32 [rows]; 0 for rows without kept tokens.

    >>> among = jnp.array([[-200.0, -200.0, -1e30]])  # exp(-200) is 0 in float32
    >>> log_mass_of(among, jnp.array([True]))
    Array([-199.30685], dtype=float32)
    """
    top = among.max(axis=-1)
    if axes:
        top = jax.lax.pmax(top, axes)
    # Relative to the likeliest kept token, so the sum is at least 1.
    total = jnp.exp(among - top[:, None]).sum(axis=-1)
    if axes:
        total = jax.lax.psum(total, axes)
    return jnp.where(has_kept, top + jnp.log(total), 0.0)


def gathered_logits(
    hidden: Array, weight: Array, columns: Array, tiles: Array, tile: int
) -> Array:
    """Products of every row with some rows of the weight.

    Args:
        hidden: [rows, width], whole tiles.
        weight: [vocab, width], the same dtype.
        columns: int32 [rows, kept], of the weight, `vocab` for none.
        tiles: number of tiles of rows that are computed.
        tile: rows of a tile, a power of 2.

    Returns:
        float32 [rows, kept]; 0 for none, and in rows that are not computed.
    """

    of_row = columns.shape[1] * hidden.shape[1] * hidden.dtype.itemsize
    part = 2 ** int(math.log2(max(1, min(tile, GATHERED_BYTES // of_row))))

    def add(index: Array, found: Array) -> Array:
        rows = index * part
        here = jax.lax.dynamic_slice_in_dim(hidden, rows, part)
        chosen = jax.lax.dynamic_slice_in_dim(columns, rows, part)
        table = weight.at[chosen].get(mode="fill", fill_value=0)
        products = here[:, None].astype(jnp.float32) * table.astype(jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(
            found, products.sum(axis=-1), rows, 0
        )

    nothing = jnp.zeros(columns.shape, jnp.float32)
    return jax.lax.fori_loop(0, tiles * (tile // part), add, nothing)


class KeptGradients(NamedTuple):
    """The gradient of the products of kept tokens.

    Attributes:
        columns: int32 [rows, kept], of the weight; each once in a row, or out of range.
        values: float32 [rows, kept].
    """

    columns: Array
    values: Array

    def added(self, towards: Array, first: Array, begin: Array, start: Array) -> Array:
        """Adds them to the gradient of some products.

        Args:
            towards: [rows, columns].
            first: its first row.
            begin: its first column that counts.
            start: its first column.
        """
        rows, chunk = towards.shape
        columns, values = (
            jax.lax.dynamic_slice_in_dim(array, first, rows)
            for array in (self.columns, self.values)
        )
        here = (columns >= begin) & (columns < start + chunk)
        places = jnp.where(here, columns - start, chunk)
        return towards.at[jnp.arange(rows)[:, None], places].add(
            values.astype(towards.dtype), mode="drop", unique_indices=True
        )
