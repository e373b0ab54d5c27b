"""What the TPU kernels take at best: from their own tiles and a chip's rates.

    python -m benchmarks.rooflines            the tables of docs/kernels.md

Each kernel counts the products that it computes, the recomputed ones too, and the bytes
that its blocks really move between HBM and VMEM. It takes the longer of the two, with
both overlapped completely, and a fixed time for each step of the grid. The vector unit
(exponentials, masks, sums) is not counted, so the numbers are bounds that hardware may
refute downwards. No TPU was measured.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxrl_post.kernels.attention.shapes import SHAPES as ATTENTION
from jaxrl_post.kernels.attention.tpu_tiles import choose_tile
from jaxrl_post.kernels.token_logprob import pallas_tpu as head
from jaxrl_post.kernels.token_logprob.shapes import SHAPES as TOKEN_LOGPROB
from jaxrl_post.programs.planning.chips import CHIPS

# Seconds of a step of the grid, about: JAX's documentation of Pallas on TPUs.
STEP_S = 0.35e-6
ITEM = 2  # bytes of a bfloat16 number
NAMES = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}


class Kernel(NamedTuple):
    """What one kernel does.

    Attributes:
        flops: of its matrix products.
        needed: of them, those that no recomputation could save.
        moved: bytes between HBM and VMEM.
        steps: of its grid.
    """

    flops: float
    needed: float
    moved: float
    steps: float

    def seconds(self, flops: float, bandwidth: float) -> float:
        """Time on a chip with these rates."""
        return max(self.flops / flops, self.moved / bandwidth) + self.steps * STEP_S


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


def of_attention(shape: tuple, row_tokens: int) -> Iterator[Kernel]:
    """Forward, gradient of queries, gradient of keys and values.

    Args:
        shape: as `attention.shapes.Shape`.
        row_tokens: tokens of each sequence of a row, without shared ones.
    """
    batch, length, heads, kv_heads, dim, value_dim, window, *_ = shape
    group = heads // kv_heads
    tile = choose_tile(batch, length, group)
    tasks = 0
    for q in range(0, length, tile.queries):
        last = q + tile.queries - 1
        first = max(q // row_tokens * row_tokens, q - (window or length) + 1, 0)
        tasks += last // tile.keys - first // tile.keys + 1
    tasks *= batch * kv_heads
    lanes, blocks = group * tile.queries, batch * kv_heads * length / tile.queries
    product = 2.0 * lanes * tile.keys
    keys = tile.keys * (dim + value_dim) * ITEM
    queries = lanes * dim * ITEM
    outs = lanes * value_dim * ITEM
    both = dim + value_dim
    yield Kernel(
        tasks * product * both, tasks * product * both,
        tasks * keys + blocks * (queries + outs), tasks,
    )  # fmt: skip
    yield Kernel(
        tasks * product * (both + dim), tasks * product * dim,
        tasks * keys + blocks * (2 * queries + outs), tasks,
    )  # fmt: skip
    key_blocks = batch * kv_heads * length / tile.keys
    yield Kernel(
        tasks * product * 2 * both, tasks * product * (both + value_dim),
        tasks * (queries + outs + 8 * lanes) + key_blocks * 2 * keys, tasks,
    )  # fmt: skip


def row(name: str, kernels: list[Kernel]) -> str:
    """A row of a table: milliseconds and shares on each chip."""
    cells = [name]
    for kind in NAMES:
        chip = CHIPS[kind]
        times = [k.seconds(chip.flops, chip.memory_bandwidth) for k in kernels]
        work = sum(k.flops for k in kernels) / chip.flops / sum(times)
        needed = sum(k.needed for k in kernels) / chip.flops / sum(times)
        spent = " + ".join(f"{1e3 * t:.2f}" for t in times)
        cells += [spent, f"{work:.0%}", f"{needed:.0%}"]
    return "| " + " | ".join(cells) + " |"


def table(title: str, rows: list[str]) -> str:
    """A table with its heading."""
    heads = ["shape"]
    for name in NAMES.values():
        heads += [f"{name} ms", "busy", "needed"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *rows]
    return f"## {title}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Prints the tables."""
    print(
        table(
            "token_logprob: forward + hidden + weight",
            [
                row(name, list(of_token_logprob(*shape[:3])))
                for name, shape in TOKEN_LOGPROB.items()
                if not shape.kept
            ],
        )
    )
    for title, tokens in (("one sequence a row", None), ("sequences of 1,024", 1024)):
        print(
            table(
                f"attention, {title}: forward + query + key",
                [
                    row(name, list(of_attention(shape, tokens or shape.length)))
                    for name, shape in ATTENTION.items()
                ],
            )
        )


if __name__ == "__main__":
    main()
