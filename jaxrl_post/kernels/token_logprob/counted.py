"""The rows that a mask keeps, and what is saved of them for the backward pass."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_post.types import Array

__all__ = ["ByRow", "Residuals", "counted_tiles", "take"]


class ByRow(NamedTuple):
    """Arrays with one entry for each row of hidden states.

    Attributes:
        targets: int32 ids.
        mask: rows to compute.
        kept: int32 ids [rows, kept], as in `token_logprob`; None for none.
    """

    targets: Array
    mask: Array
    kept: Array | None


class Residuals(NamedTuple):
    """Forward results that the backward pass needs, float32.

    Attributes:
        normalizer: log sum exp of the logits, [rows].
        entropy: of the distribution, [rows].
        log_mass: log of the kept mass, [rows]; None without kept tokens.
        logits: logits of the first tile of rows, [tile, columns], if they are saved.
    """

    normalizer: Array
    entropy: Array
    log_mass: Array | None = None
    logits: Array | None = None


def counted_tiles(mask: Array, tile: int) -> tuple[Array, Array]:
    """Returns the counted rows, padded with an out-of-range index, and the tile count.

    There is at least one tile; if no row counts, it is computed from zeros.

    >>> order, num_tiles = counted_tiles(jnp.array([False, True, True]), 2)
    >>> order.tolist(), num_tiles.item()
    ([1, 2, 3, 3], 1)
    """
    rows = mask.shape[0]
    count = mask.sum(dtype=jnp.int32)
    order = jnp.nonzero(mask, size=rows, fill_value=rows)[0].astype(jnp.int32)
    order = jnp.pad(order, (0, -rows % tile), constant_values=rows)
    return order, jnp.maximum((count + tile - 1) // tile, 1)


def take(array: Array, chosen: Array) -> Array:
    """Returns rows of `array`; an out-of-range index gives zeros."""
    return array.at[chosen].get(mode="fill", fill_value=0)
