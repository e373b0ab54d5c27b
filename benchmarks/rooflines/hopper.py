"""Lower bounds on the times of the kernels for Hopper GPUs, from their own tiles.

A kernel is bound by its products, by what its tiles move from the L2 cache into shared
memory, or by the memory's bandwidth, all of them overlapped. Attention is also bound by
its exponentials, and by the multiprocessor that is the last to finish its blocks of
threads. Starting a kernel is not counted. `python -m benchmarks.rooflines` prints the
tables.
"""

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.rooflines.counted import (
    ITEM,
    listed_tiles,
    logits_in_memory_seconds,
    parts_of_keys,
)
from jaxrl_post.kernels.attention.gpu_kernels import OWN_ROWS, SWIZZLED, key_parts
from jaxrl_post.kernels.attention.gpu_kernels import Sizes as AttentionSizes
from jaxrl_post.kernels.attention.kernel_tiles import Tile
from jaxrl_post.kernels.attention.shapes import Shape as AttentionShape
from jaxrl_post.kernels.decode_attention import gpu_sizes
from jaxrl_post.kernels.decode_attention.shapes import Shape as DecodeShape
from jaxrl_post.kernels.next_token import pallas_gpu as draw
from jaxrl_post.kernels.next_token.parts import ENTRIES
from jaxrl_post.kernels.token_logprob import gpu_kernels as tiles_of_head
from jaxrl_post.kernels.token_logprob import pallas_gpu as head
from jaxrl_post.programs.planning.chips import CHIPS, Work

__all__ = [
    "AttentionKernel",
    "attention_kernels",
    "attention_row",
    "decode_row",
    "decode_seconds",
    "decode_shared_bytes",
    "head_row",
    "head_seconds",
    "idle_factor",
    "next_token_row",
    "next_token_seconds",
    "shared_bytes",
]

HOPPER = CHIPS["NVIDIA H100 80GB HBM3"]
# Bytes per second that an H100's L2 cache delivers, about; NVIDIA names no number.
L2_BANDWIDTH = 5.5e12
# Exponentials and divisions per second of an H100: Shah et al., FlashAttention-3,
# arXiv:2407.08608.
SPECIAL = 3.9e12
# Its multiprocessors. Each holds one block of threads of an attention kernel: the three
# warpgroups of one take 64,512 of its 65,536 registers.
PROCESSORS = 132


def head_seconds(rows: int, width: int, vocab: int) -> list[float]:
    """Seconds of forward pass, gradient of the logits, and the two products."""
    product = 2.0 * rows * width * vocab
    tiles = math.ceil(rows / tiles_of_head.ROWS) * math.ceil(
        vocab / tiles_of_head.COLUMNS
    )
    operands = tiles * (tiles_of_head.ROWS + tiles_of_head.COLUMNS) * width * ITEM
    computing, loading = product / HOPPER.flops, operands / L2_BANDWIDTH
    block = min(rows, head.CHUNK_ROWS)
    chunks = math.ceil(vocab * block * ITEM / head.CHUNK_BYTES)
    logits = rows * vocab * ITEM
    # Both sums are float32, read and written: a block of rows adds to the weight's, a
    # chunk of the vocabulary to the rows'.
    sums = 8 * width * (math.ceil(rows / block) * vocab + chunks * rows)
    return [
        max(computing, loading),
        max(loading, HOPPER.times(Work(product, logits)).seconds),
        HOPPER.times(Work(2 * product, 2 * logits + sums)).seconds,
    ]


class AttentionKernel(NamedTuple):
    """Work of one attention kernel on a Hopper GPU.

    Attributes:
        flops: of its matrix products, those with zeros that pad heads too.
        needed: of them, those that no recomputation and no padding could save.
        special: exponentials and divisions.
        loaded: bytes from the L2 cache into shared memory.
        moved: bytes between the memory and the chip, if each number is read and written
            once.
        idle: time until the last multiprocessor finishes, over the time with equal
            shares.
        added: bytes that the program moves which adds the parts of a group afterwards.
    """

    flops: float
    needed: float
    special: float
    loaded: float
    moved: float
    idle: float
    added: float

    def bounds(self) -> dict[str, float]:
        """Seconds that each part alone takes at least."""
        times = HOPPER.times(Work(self.idle * self.flops, self.moved))
        return {
            "products": times.compute,
            "exponentials": self.idle * self.special / SPECIAL,
            "L2": self.loaded / L2_BANDWIDTH,
            "HBM": times.memory,
        }

    @property
    def seconds(self) -> float:
        return max(self.bounds().values()) + self.added / HOPPER.memory_bandwidth


def attention_kernels(
    shape: AttentionShape, row_tokens: int
) -> Iterator[AttentionKernel]:
    """Forward, gradient of queries, gradient of keys and values."""
    dim, value_dim = _padded(shape.head_dim), _padded(shape.value_dim)
    group = shape.heads // shape.kv_heads
    real, both = shape.head_dim + shape.value_dim, dim + value_dim
    tokens = shape.batch * shape.length
    # Numbers in memory: of queries, of results or what comes towards them, and of both
    # keys and values.
    queries, outs = tokens * shape.heads * dim, tokens * shape.heads * value_dim
    keys, rows = tokens * shape.kv_heads * both, tokens * shape.heads
    for name, needed, moved in (
        ("attention_forward", real, ITEM * (queries + keys + outs) + 4 * rows),
        (
            "attention_query",
            shape.head_dim,
            ITEM * (2 * queries + keys + outs) + 8 * rows,
        ),
        (
            "attention_key",
            real + shape.value_dim,
            ITEM * (queries + 2 * keys + outs) + 8 * rows,
        ),
    ):
        sizes = AttentionSizes.of(name, dim, value_dim)
        by_key = name == "attention_key"
        tile = Tile(sizes.rows, sizes.passing)
        if by_key:
            tile = Tile(sizes.passing, sizes.rows)
        listed = listed_tiles(shape.length, row_tokens, shape.window, tile)
        # Blocks of threads as they start: a block of tokens, and its heads.
        steps = listed.sum(axis=0) if by_key else listed.sum(axis=1)[::-1]
        heads, each, added = shape.heads, 1, 0
        if by_key:
            parts = key_parts(shape.batch * len(steps) * shape.kv_heads, group)
            heads, each = parts * shape.kv_heads, group // parts
            # Parts are float32, and written in place of the gradients themselves.
            if parts > 1:
                moved += (4 * parts - ITEM) * keys
                added = (4 * parts + ITEM) * keys
        steps = np.tile(np.repeat(each * steps, heads), shape.batch)
        # Where each warpgroup has one of the two sums, both compute the scores.
        twice = sizes.halves == 1
        widths = both if name == "attention_forward" else both + dim
        if by_key:
            widths = 2 * both + twice * dim
        scores = float(steps.sum()) * math.prod(tile)
        special = 1 + 2 * (shape.softcap is not None)
        passing = sizes.passing * (both * ITEM + 4 * (3 + 2 * by_key))
        staying = sizes.rows * ITEM * (dim if name == "attention_forward" else both)
        yield AttentionKernel(
            2 * scores * widths,
            2 * scores * needed,
            scores * special * (1 + twice),
            float(steps.sum()) * passing + len(steps) * staying,
            moved,
            idle_factor(steps, PROCESSORS),
            added,
        )


def shared_bytes(name: str, head_dim: int, value_dim: int) -> int:
    """Shared memory that a block of threads of an attention kernel takes.

    What Mosaic adds, less than 4 KiB, is not counted. An H100 has 227 KiB.

    Args:
        name: of the kernel.
        head_dim: of queries and keys.
        value_dim: of values.

    >>> shared_bytes("attention_forward", 128, 128) // 1024
    146
    """
    dim, value_dim = _padded(head_dim), _padded(value_dim)
    sizes, both = AttentionSizes.of(name, dim, value_dim), dim + value_dim
    stays = dim if name == "attention_forward" else both
    staying = sizes.halves * OWN_ROWS * stays * ITEM
    # Keys or queries with what comes with them, and facts of each token.
    facts = 4 * (3 + 2 * (name == "attention_key"))
    passing = sizes.slots * sizes.passing * (both * ITEM + facts)
    weights = 2 * OWN_ROWS * sizes.passing * ITEM
    return staying + passing + weights


def _padded(width: int) -> int:
    """Numbers of a head in memory."""
    return SWIZZLED * math.ceil(width / SWIZZLED)


def idle_factor(steps: np.ndarray, processors: int) -> float:
    """Ratio of the time of blocks that start in order to equal shares.

    Args:
        steps: of each block. A processor that has finished a block takes the next one.
        processors: number of them, one block each at a time.

    >>> idle_factor(np.array([1, 1, 2]), 2)
    1.5
    """
    busy = [0] * processors
    for each in steps.tolist():
        heapq.heapreplace(busy, busy[0] + each)
    return max(busy) * processors / float(steps.sum())


def decode_seconds(shape: DecodeShape) -> Iterator[tuple[float, float]]:
    """Seconds for own keys, for shared keys, and for reading keys and values once.

    Every query sees every key. Blocks of queries that read the same keys find them in
    the L2 cache. Results of parts are written and read by the program that merges them.
    """
    item = ITEM if shape.codes is None else 1
    entries = gpu_sizes.Widths(shape.head_dim, shape.value_dim, item)
    for batch, queries, keys in parts_of_keys(shape):
        heads = batch * shape.kv_heads
        sizes = gpu_sizes.Sizes.of(heads, queries, keys, entries)
        blocks = math.ceil(queries / sizes.queries)
        parts = math.ceil(math.ceil(keys / gpu_sizes.KEYS) / sizes.steps)
        columns = heads * blocks * sizes.queries
        read = heads * keys * (entries.slot_bytes / gpu_sizes.KEYS - 4)
        beside = columns * (entries.dim * ITEM + 2 * 4 * parts * entries.mixed_dim)
        work = 2.0 * columns * keys * (entries.dim + entries.mixed_dim)
        direct = HOPPER.times(Work(work, read + beside)).seconds
        yield max(direct, blocks * read / L2_BANDWIDTH), read / HOPPER.memory_bandwidth


def next_token_seconds(rows: int, width: int, vocab: int) -> list[float]:
    """Seconds of statistics, with what XLA does to them, and of the second logits."""
    own = draw.rows_of(rows)
    row_tiles, tiles = math.ceil(rows / own), math.ceil(vocab / draw.COLUMNS)
    loaded = row_tiles * tiles * (own + draw.COLUMNS) * width * ITEM
    # The largest and the sum of each part, written, and read to be added up.
    facts = 2 * 2 * 4 * row_tiles * own * vocab / ENTRIES
    product = 2.0 * row_tiles * own * width * vocab
    direct = HOPPER.times(Work(product, vocab * width * ITEM + facts)).seconds
    # Gathered: read, written, and read by the product.
    gathered = 3 * rows * ENTRIES * width * ITEM
    return [max(direct, loaded / L2_BANDWIDTH), gathered / HOPPER.memory_bandwidth]


def next_token_row(name: str, rows: int, width: int, vocab: int) -> str:
    """A row of the table of sampling on a Hopper GPU: microseconds, also of XLA."""
    times = next_token_seconds(rows, width, vocab)
    in_memory = logits_in_memory_seconds(HOPPER, rows, width, vocab)
    spent = " + ".join(f"{1e6 * seconds:.0f}" for seconds in times)
    return f"| {name} | {spent} | {1e6 * in_memory:.0f} |"


def head_row(name: str, rows: int, width: int, vocab: int) -> str:
    """A row of the table for a Hopper GPU: milliseconds and shares."""
    times = head_seconds(rows, width, vocab)
    product = 2.0 * rows * width * vocab / HOPPER.flops / sum(times)
    spent = " + ".join(f"{1e3 * t:.2f}" for t in times)
    return f"| {name} | {spent} | {4 * product:.0%} | {3 * product:.0%} |"


def attention_row(name: str, shape: AttentionShape, row_tokens: int) -> str:
    """A row of the table of attention on a Hopper GPU."""
    kernels = list(attention_kernels(shape, row_tokens))
    total = sum(kernel.seconds for kernel in kernels)
    spent = " + ".join(f"{1e3 * kernel.seconds:.2f}" for kernel in kernels)
    work = sum(kernel.flops for kernel in kernels) / HOPPER.flops / total
    needed = sum(kernel.needed for kernel in kernels) / HOPPER.flops / total
    bounds = [kernel.bounds() for kernel in kernels]
    slowest = ", ".join(max(found, key=lambda part: found[part]) for found in bounds)
    idle = ", ".join(f"{1 - 1 / kernel.idle:.0%}" for kernel in kernels)
    widths = shape.head_dim, shape.value_dim
    names = ("attention_forward", "attention_query", "attention_key")
    held = ", ".join(f"{shared_bytes(of, *widths) / 1024:.0f}" for of in names)
    cells = [name, spent, f"{work:.0%}", f"{needed:.0%}", slowest, idle, held]
    return f"| {' | '.join(cells)} |"


def decode_row(name: str, shape: DecodeShape) -> str:
    """A row of the table of decoding on a Hopper GPU."""
    found = list(decode_seconds(shape))
    spent = " + ".join(f"{1e6 * seconds:.0f}" for seconds, _ in found)
    share = sum(read for _, read in found) / sum(seconds for seconds, _ in found)
    held = ", ".join(f"{size / 1024:.0f}" for size in decode_shared_bytes(shape))
    return f"| {name} | {spent} | {share:.0%} | {held} |"


def decode_shared_bytes(shape: DecodeShape) -> list[int]:
    """Shared memory of a block of threads, for own and for shared keys.

    Two blocks of at most 111 KiB have a multiprocessor together; otherwise one has it.
    """
    item = ITEM if shape.codes is None else 1
    entries = gpu_sizes.Widths(shape.head_dim, shape.value_dim, item)
    held = []
    for batch, queries, keys in parts_of_keys(shape):
        sizes = gpu_sizes.Sizes.of(batch * shape.kv_heads, queries, keys, entries)
        slots = sizes.slots * entries.slot_bytes
        held.append(entries.beside_bytes(sizes.queries) + slots)
    return held
