"""Counts of rooflines on every chip: tiles that hold a score, and parts of keys."""

import math

import numpy as np

from jaxrl_post.kernels.attention.kernel_tiles import Tile
from jaxrl_post.kernels.decode_attention.shapes import Shape as DecodeShape
from jaxrl_post.programs.planning.chips import Chip, Work

__all__ = [
    "ITEM",
    "listed_tiles",
    "logits_in_memory_seconds",
    "parts_of_keys",
]

ITEM = 2  # bytes of a bfloat16 number
# Passes over the logits of a step, in XLA's program as compiled for a v5e: logits and
# weights are written, each is read, and the weights are copied into another layout.
LOGIT_PASSES = 6


def logits_in_memory_seconds(chip: Chip, rows: int, width: int, vocab: int) -> float:
    """Seconds of drawing tokens by XLA's program, whose logits lie in memory."""
    product = chip.times(Work(2.0 * rows * width * vocab, vocab * width * ITEM))
    return product.seconds + LOGIT_PASSES * 4 * rows * vocab / chip.memory_bandwidth


def listed_tiles(
    length: int, row_tokens: int, window: int | None, tile: Tile
) -> np.ndarray:
    """Marks tiles of a row with a visible score, as `kernel_tiles.TileList` finds them.

    Args:
        length: of the row, a multiple of both sizes of a tile.
        row_tokens: tokens of each sequence of the row, without shared ones.
        window: tokens that a query looks back; None for all.
        tile: queries and keys.

    Returns:
        bool [blocks of queries, blocks of keys].

    >>> listed_tiles(8, 4, None, Tile(2, 2)).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    index = np.arange(length)
    positions, ends = index % row_tokens, (index // row_tokens + 1) * row_tokens
    first, last = index[:: tile.queries, None], index[tile.queries - 1 :: tile.queries]
    seen = index[:: tile.keys] <= last[:, None]
    seen &= first < ends.reshape(-1, tile.keys).max(axis=1)
    if window is not None:
        low = positions.reshape(-1, tile.queries).min(axis=1)
        high = positions.reshape(-1, tile.keys).max(axis=1)
        seen &= low[:, None] - high < window
    return seen


def parts_of_keys(shape: DecodeShape) -> list[tuple[int, int, int]]:
    """Own and shared keys: sequences or groups, queries of a head, and keys."""
    queries = shape.queries * shape.heads // shape.kv_heads
    parts = [(shape.batch, queries, shape.own)]
    if shape.members:
        groups = math.ceil(shape.batch / shape.members)
        parts.append((groups, shape.members * queries, shape.shared))
    return parts
