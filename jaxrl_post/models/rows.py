"""Hidden states of tokens, one row a token, and how functions of a row are computed.

Most of a layer does the same to every token: norms, projections, activations. It is
written as functions from arrays [rows, ...] to arrays [rows, ...], which `Rows.each`
applies. Attention, recurrences and caches see tokens as [batch, length].
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxrl_post.kernels.row_tiles import map_tiles, padded_rows
from jaxrl_post.types import Array, Bool, PyTree

__all__ = ["AllRows", "CountedRows", "Rows"]


class AllRows(NamedTuple):
    """A row for every token, which are computed all at once.

    Attributes:
        shape: batch and length.
        exact: whether a row's bits depend on the row alone.
    """

    shape: tuple[int, ...]
    exact: Literal[False] = False

    def each(self, function: Callable[..., PyTree], *arrays: PyTree) -> PyTree:
        """Calls the function."""
        return function(*arrays)

    def batch(self, array: Array) -> Array:
        """[rows, ...] as [batch, length, ...]."""
        return array.reshape(*self.shape, *array.shape[1:])

    def flat(self, array: Array) -> Array:
        """[batch, length, ...] as [rows, ...]."""
        return array.reshape(-1, *array.shape[2:])


class CountedRows(NamedTuple):
    """Rows for the counted tokens, which are computed in tiles of a fixed size.

    If all tokens fit a tile, each has its own row, and nothing is moved.

    Attributes:
        order: int32 [rows], the token that each row holds: the counted ones first and
            in their order; rows is a multiple of `tile`, and rows beyond `count` hold
            any.
        places: int32 [tokens], the row of each token; rows or more if not counted.
        count: int32.
        shape: the dims of the tokens, such as batch and length.
        tile: rows of a tile.
        exact: whether a row's bits depend on the row alone.
    """

    order: Array
    places: Array
    count: Array
    shape: tuple[int, ...]
    tile: int
    exact: Literal[True] = True

    @classmethod
    def of(cls, counted: Bool[Array, "*shape"], tile: int) -> "CountedRows":
        """The rows of the tokens for which `counted` is True."""
        shape, counted = counted.shape, counted.reshape(-1)
        tokens = counted.shape[0]
        rows = padded_rows(tokens, tile)
        if rows == tile:
            index = jnp.arange(rows, dtype=jnp.int32)
            places = jnp.where(counted, index[:tokens], rows)
            count = jnp.where(counted.any(), tokens, 0)
            return cls(index, places, count, shape, tile)
        order = jnp.argsort(~counted, stable=True).astype(jnp.int32)
        places = jnp.cumsum(counted, dtype=jnp.int32) - 1
        return cls(
            jnp.pad(order, (0, rows - tokens)),
            jnp.where(counted, places, rows),
            counted.sum(dtype=jnp.int32),
            shape,
            tile,
        )

    @property
    def _in_place(self) -> bool:
        return self.order.shape[0] == self.tile

    def each(self, function: Callable[..., PyTree], *arrays: PyTree) -> PyTree:
        """Applies the function to one tile after the other (`map_tiles`)."""
        return map_tiles(function, arrays, self.count, self.tile)

    def batch(self, array: Array) -> Array:
        """[rows, ...] as [batch, length, ...]; 0 where not counted."""
        return self.put(array).reshape(*self.shape, *array.shape[1:])

    def flat(self, array: Array) -> Array:
        """[batch, length, ...] as [rows, ...]."""
        return self.take(array.reshape(-1, *array.shape[len(self.shape) :]))

    def take(self, array: Array) -> Array:
        """Rows of an array of tokens."""
        if self._in_place:
            padding = [(0, self.tile - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
            return jnp.pad(array, padding)
        return array[self.order]

    def put(self, rows: Array) -> Array:
        """Tokens of an array of rows; 0 where not counted."""
        if self._in_place:
            rows = rows[: self.places.shape[0]]
            counted = (self.places < self.tile).reshape(-1, *[1] * (rows.ndim - 1))
            return jnp.where(counted, rows, 0)
        return rows.at[self.places].get(mode="fill", fill_value=0)


type Rows = AllRows | CountedRows
