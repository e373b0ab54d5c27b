"""Lists the tiles of queries x keys that a kernel computes; cuts arrays for them."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.kernels.attention.packed import Facts
from jaxrl_post.kernels.mosaic import listed
from jaxrl_post.types import Array

__all__ = ["KernelSettings", "Shape", "Tile", "TileList", "choose_tile"]

# Bytes of a list of tiles in scalar memory, which has one MiB.
LIST_BYTES = 2**18


class Tile(NamedTuple):
    """Queries, and keys, of a tile; powers of 2, on TPUs from 128 on."""

    queries: int
    keys: int


class KernelSettings(NamedTuple):
    """Static facts of one call.

    Attributes:
        scale: of the scores.
        window: tokens that a query looks back, itself included; None for all.
        softcap: c in c tanh(scores / c), after the scale; None for no cap.
        tile: None: as `choose_tile` says.
        interpret: False to compile the kernels, or how to interpret them.
    """

    scale: float
    window: int | None
    softcap: float | None
    tile: Tile | None = None
    interpret: Any = False


def choose_tile(batch: int, length: int, group: int, window: int | None) -> Tile:
    """The tile for rows of `length` tokens and `group` query heads a key/value head.

    Small tiles skip more of what the mask rules out, and large ones keep the matrix
    unit busy for longer than a step of the grid takes, which docs/decisions/0017
    weighs. All heads of a group are in a tile: of its 4,096 queries at most, 512
    belong to one head. One head alone has 1,024, and as many keys. Tiles are not much
    larger than a window. Very long rows need larger ones, because the list of tiles
    must fit into scalar memory.

    >>> choose_tile(8, 4096, 4, None), choose_tile(8, 4096, 1, None)
    (Tile(queries=512, keys=512), Tile(queries=1024, keys=1024))
    >>> choose_tile(8, 4096, 4, 128), choose_tile(1, 131072, 8, None)
    (Tile(queries=256, keys=256), Tile(queries=512, keys=512))
    """
    whole = 2 ** max(7, math.ceil(math.log2(length)))
    most = whole if window is None else max(256, 2 ** int(math.log2(window)))
    one = 1024 if group == 1 else 512
    queries = min(one, max(128, 2 ** int(math.log2(4096 / group))))
    tile = Tile(min(queries, whole, most), min(one, whole, most))
    while 4 * batch * math.prod(length / size for size in tile) > LIST_BYTES:
        one_more = tile.keys > 2 * tile.queries
        tile = Tile(tile.queries * (1 + one_more), tile.keys * (2 - one_more))
    return tile


class Shape(NamedTuple):
    """Static sizes of one call; `length` is a multiple of both sizes of a tile."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    tile: Tile

    @classmethod
    def of(
        cls, settings: KernelSettings, query: Array, key: Array, value: Array
    ) -> "Shape":
        batch, length, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        tile = settings.tile or choose_tile(
            batch, length, heads // kv_heads, settings.window
        )
        # Both are powers of 2, so that the larger one is a multiple of the other.
        length = math.ceil(length / max(tile)) * max(tile)
        sizes = heads, kv_heads, head_dim, value.shape[-1]
        return cls(batch, length, *sizes, tile)

    @property
    def group(self) -> int:
        """Query heads that read one key/value head."""
        return self.heads // self.kv_heads

    @property
    def lanes(self) -> int:
        """Queries of a block, of all heads of a group."""
        return self.group * self.tile.queries

    @property
    def blocks(self) -> Tile:
        """Blocks of queries, and of keys, of a row."""
        return Tile(*(self.length // size for size in self.tile))

    def padded(self, array: Array, axis: int) -> Array:
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, self.length - array.shape[axis])
        return jnp.pad(array, widths)

    def queries(self, array: Array) -> Array:
        """[batch, length, heads, dim] to [batch, heads, padded length, dim]."""
        return self.padded(array, 1).swapaxes(1, 2)

    def by_lane(self, array: Array) -> Array:
        """[batch, length, heads] to [blocks, kv_heads, 1, lanes]."""
        split = self.padded(array, 1).reshape(
            -1, self.tile.queries, self.kv_heads, self.group
        )
        return split.transpose(0, 2, 3, 1).reshape(-1, self.kv_heads, 1, self.lanes)

    def by_query(self, array: Array) -> Array:
        """[blocks, kv_heads, 1, lanes] to [batch, padded length, heads]."""
        split = array.reshape(-1, self.heads, self.tile.queries)
        return split.swapaxes(1, 2).reshape(self.batch, self.length, self.heads)

    def of_queries(self, width: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.length, width), dtype)

    def of_keys(self, width: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (self.batch, self.kv_heads, self.length, width), dtype
        )

    def of_lanes(self) -> jax.ShapeDtypeStruct:
        blocks = self.batch * self.blocks.queries
        shape = blocks, self.kv_heads, 1, self.lanes
        return jax.ShapeDtypeStruct(shape, jnp.float32)


class TileList(NamedTuple):
    """Tiles with a visible score, in the order in which they are computed.

    Attributes:
        sums: int32 [tiles], the blocks whose sums are computed, counted over all rows;
            ascending. They are blocks of queries, or of keys for the keys' gradient.
        others: int32 [tiles], twice the block that it meets; 1 more if every score of
            the tile is visible.
        count: int32 [1], of tiles. The entries after the last one repeat it.
    """

    sums: Array
    others: Array
    count: Array

    @classmethod
    def of(
        cls,
        settings: KernelSettings,
        shape: Shape,
        by_key: bool,
        of_query: Facts,
        of_key: Facts,
        aligned: bool,
    ) -> "TileList":
        def edges(facts: Facts, blocks: int) -> tuple[Facts, Facts]:
            """The smallest and the largest value of every block."""
            split = [part.reshape(shape.batch, blocks, -1) for part in facts]
            first = Facts(*(part.min(axis=-1) for part in split))
            return first, Facts(*(part.max(axis=-1) for part in split))

        low, high = edges(of_query, shape.blocks.queries)
        low, high = (Facts(*(part[:, :, None] for part in f)) for f in (low, high))
        first, last = edges(of_key, shape.blocks.keys)
        first, last = (Facts(*(part[:, None] for part in f)) for f in (first, last))
        active = (first.indices <= high.indices) & (low.indices < last.ends)
        full = (last.indices <= low.indices) & (high.indices < first.ends)
        if settings.window is not None:
            active &= low.positions - last.positions < settings.window
            full &= high.positions - first.positions < settings.window
        if by_key:
            active, full = active.swapaxes(1, 2), full.swapaxes(1, 2)
        rows, columns = active.shape[1:]
        # A block that meets no other one has a tile all the same, so that all of the
        # results are written. The last queries are not earlier than any keys.
        meets = np.arange(columns) == (columns - 1 if by_key else 0)
        active |= ~active.any(axis=-1, keepdims=True) & meets
        most = rows * columns
        if aligned:
            # About half of all tiles lie above the diagonal.
            ends = np.arange(1, 1 + shape.blocks.queries)[:, None] * shape.tile.queries
            begins = np.arange(shape.blocks.keys) * shape.tile.keys
            most = int(np.sum(begins < ends))
        found, count = listed(active, shape.batch * most)
        sums, column = found // columns, found % columns
        others = sums // rows * columns + column
        full = full.reshape(-1)[found].astype(jnp.int32)
        return cls(sums, 2 * others + full, count[None])
