"""Lower bounds on the times of the TPU kernels, from their tiles and a chip's rates.

Each kernel counts the products that it computes, the recomputed ones too, and the bytes
that its blocks really move between HBM and VMEM. It takes the longer of the two, with
both overlapped completely, and a fixed time for each step of the grid. The vector unit
(exponentials, masks, sums) is not counted, so the numbers are bounds that hardware may
refute downwards. `schedules` has what the compiler makes of attention and of the head.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.rooflines.counted import (
    ITEM,
    listed_tiles,
    logits_in_memory_seconds,
    parts_of_keys,
)
from jaxrl_post.kernels.attention.kernel_tiles import choose_tile
from jaxrl_post.kernels.attention.shapes import Shape as AttentionShape
from jaxrl_post.kernels.decode_attention.pallas_tpu import LANES, Sizes
from jaxrl_post.kernels.decode_attention.shapes import Shape as DecodeShape
from jaxrl_post.kernels.next_token import pallas_tpu as draw
from jaxrl_post.kernels.next_token.parts import ENTRIES
from jaxrl_post.kernels.token_logprob import pallas_tpu as head
from jaxrl_post.programs.planning.chips import CHIPS, Chip, Work

# Seconds of a step of the grid, about: JAX's documentation of Pallas on TPUs.
STEP_S = 0.35e-6
NAMES = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
# Rows and columns of a matrix unit, by the pages that `CHIPS` names. A product whose
# inner dimension, or width of its result, is smaller leaves a part of it idle.
UNIT = {"TPU v5 lite": 128, "TPU v5": 128, "TPU v6 lite": 256}


class Kernel(NamedTuple):
    """Work of one kernel.

    Attributes:
        flops: of its matrix products, with what pads them for the matrix unit.
        needed: of them, those that no padding and no recomputation could save.
        moved: bytes between HBM and VMEM.
        steps: of its grid.
    """

    flops: float
    needed: float
    moved: float
    steps: float

    def seconds(self, chip: Chip) -> float:
        """Time on a chip."""
        return chip.times(Work(self.flops, self.moved)).seconds + self.steps * STEP_S


def of_token_logprob(rows: int, width: int, vocab: int) -> Iterator[Kernel]:
    """Forward, gradient of hidden states, gradient of the weight."""
    product, hidden = 2.0 * rows * width * vocab, rows * width
    kernels: list[tuple[head.Kernel, int]]
    kernels = [("forward", 1), ("hidden", 2), ("weight", 2)]
    for name, products in kernels:
        tiles = head.choose_tiles(width, ITEM, name)
        by_row, by_column = (
            math.ceil(rows / tiles.rows),
            math.ceil(vocab / tiles.columns),
        )
        if name == "weight":
            moved = vocab * width * (ITEM + 4) + by_column * hidden * ITEM
        else:
            moved = hidden * ITEM + by_row * vocab * width * ITEM
            moved += hidden * 4 * (name == "hidden")
        yield Kernel(products * product, product, moved, by_row * by_column)


def of_attention(
    shape: AttentionShape, row_tokens: int, unit: int = 128
) -> Iterator[Kernel]:
    """Forward, gradient of queries, gradient of keys and values.

    Args:
        shape: of the model.
        row_tokens: tokens of each sequence of a row, without shared ones.
        unit: rows and columns of a matrix unit, which holds a head's numbers in the
            products that make scores, and gradients of keys and values.
    """
    dim, value_dim, kv_heads = shape.head_dim, shape.value_dim, shape.kv_heads
    group = shape.heads // kv_heads
    tile = choose_tile(shape.batch, shape.length, group, shape.window)
    listed = listed_tiles(shape.length, row_tokens, shape.window, tile)
    tasks = shape.batch * kv_heads * int(listed.sum())
    lanes = group * tile.queries
    blocks = shape.batch * kv_heads * shape.length / tile.queries
    key_blocks = shape.batch * kv_heads * shape.length / tile.keys
    product = 2.0 * lanes * tile.keys
    keys = tile.keys * (dim + value_dim) * ITEM
    queries = lanes * dim * ITEM
    outs = lanes * value_dim * ITEM
    # Index, position and end of a key, in eight rows of int32; index and position of a
    # query; a number of float32 for a query.
    of_keys, of_queries, numbers = 8 * 4 * tile.keys, 2 * 4 * lanes, 4 * lanes
    both = dim + value_dim
    wide_dim, wide_value = (unit * math.ceil(w / unit) for w in (dim, value_dim))
    yield Kernel(
        tasks * product * (wide_dim + value_dim), tasks * product * both,
        tasks * (keys + of_keys) + blocks * (queries + outs + of_queries + numbers),
        tasks,
    )  # fmt: skip
    beside = of_queries + 2 * numbers
    yield Kernel(
        tasks * product * (wide_dim + wide_value + dim), tasks * product * dim,
        tasks * (keys + of_keys) + blocks * (2 * queries + outs + beside), tasks,
    )  # fmt: skip
    yield Kernel(
        tasks * product * 2 * (wide_dim + wide_value),
        tasks * product * (both + value_dim),
        tasks * (queries + outs + beside) + key_blocks * (2 * keys + of_keys), tasks,
    )  # fmt: skip


def of_decode_attention(shape: DecodeShape) -> Iterator[tuple[Kernel, float]]:
    """Own keys, and shared keys if there are any; with the bytes of keys and values.

    Every query sees every key.
    """
    item = ITEM if shape.codes is None else 1
    widths = shape.head_dim + shape.value_dim
    # A scale for each key, and each value.
    entry = widths * item + 8 * (shape.codes is not None)
    value_dim = shape.value_dim or shape.head_dim
    for batch, queries, keys in parts_of_keys(shape):
        rows = 16 * math.ceil(queries / 16)
        rows = rows if rows <= 512 else 512 * math.ceil(rows / 512)
        key_bytes = max(shape.head_dim, shape.value_dim) * item
        sizes = Sizes.of(batch, shape.kv_heads, rows, keys, key_bytes)
        keys = math.ceil(keys / sizes.keys) * sizes.keys
        heads = batch * shape.kv_heads
        entries = heads * keys * entry
        beside = heads * rows * (shape.head_dim * ITEM + (value_dim + LANES) * 4)
        blocks = heads / sizes.batch / sizes.heads * keys / sizes.keys
        again = rows / sizes.queries
        work = 2.0 * heads * rows * keys * (shape.head_dim + value_dim)
        yield (
            Kernel(work, work, again * entries + beside, blocks * again),
            float(entries),
        )


def decode_row(name: str, kernels: list[tuple[Kernel, float]]) -> str:
    """A row of the table of decoding: microseconds, and the share of the bandwidth."""
    cells = [name]
    for kind in NAMES:
        chip = CHIPS[kind]
        times = [kernel.seconds(chip) for kernel, _ in kernels]
        read = sum(entries for _, entries in kernels) / chip.memory_bandwidth
        cells += [" + ".join(f"{1e6 * t:.0f}" for t in times)]
        cells += [f"{read / sum(times):.0%}"]
    return "| " + " | ".join(cells) + " |"


def of_next_token(rows: int, width: int, vocab: int) -> Iterator[Kernel]:
    """Statistics with what XLA does to them, and the logits that are computed again."""
    tiles = draw.tiles_for(rows, width, ITEM)
    by_row, by_column = math.ceil(rows / tiles.rows), math.ceil(vocab / tiles.columns)
    # Written, and read to be added up.
    sums = 2 * 4 * rows * vocab / ENTRIES
    product = 2.0 * rows * width * vocab
    moved = rows * width * ITEM + by_row * vocab * width * ITEM + sums
    yield Kernel(product, product, moved, by_row * by_column)
    groups, entries = math.ceil(rows / draw.GROUP), draw.GROUP * ENTRIES
    again = 2.0 * groups * draw.GROUP * width * entries
    moved = rows * (ENTRIES + 1) * width * ITEM + 2 * 4 * rows * entries
    yield Kernel(again, 0.0, moved, groups)


def next_token_row(name: str, rows: int, width: int, vocab: int) -> str:
    """A row of the table of sampling: microseconds, also with logits in memory."""
    cells = [name]
    for kind in NAMES:
        chip = CHIPS[kind]
        times = [k.seconds(chip) for k in of_next_token(rows, width, vocab)]
        in_memory = logits_in_memory_seconds(chip, rows, width, vocab)
        cells += [" + ".join(f"{1e6 * t:.0f}" for t in times), f"{1e6 * in_memory:.0f}"]
    return "| " + " | ".join(cells) + " |"


def row(name: str, kernels_of: Callable[[int], Iterator[Kernel]]) -> str:
    """A row of a table: milliseconds and shares on each chip.

    Args:
        name: of the shape.
        kernels_of: the kernels, for a matrix unit's rows.
    """
    cells = [name]
    for kind in NAMES:
        chip, kernels = CHIPS[kind], list(kernels_of(UNIT[kind]))
        times = [k.seconds(chip) for k in kernels]
        work = sum(k.flops for k in kernels) / chip.flops / sum(times)
        needed = sum(k.needed for k in kernels) / chip.flops / sum(times)
        spent = " + ".join(f"{1e3 * t:.2f}" for t in times)
        cells += [spent, f"{work:.0%}", f"{needed:.0%}"]
    return "| " + " | ".join(cells) + " |"


def table(
    title: str, rows: list[str], columns: tuple[str, ...] = ("ms", "busy", "needed")
) -> str:
    """A table with its heading."""
    heads = ["shape"]
    for name in NAMES.values():
        heads += [f"{name} {columns[0]}", *columns[1:]]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *rows]
    return f"## {title}\n\n" + "\n".join(lines) + "\n"
