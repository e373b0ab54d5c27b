"""Attention of published models, as one device of a mesh computes it."""

from typing import NamedTuple

__all__ = ["SHAPES", "Shape"]


class Shape(NamedTuple):
    """Attention among the tokens of packed rows on one device.

    Attributes:
        batch: rows.
        length: tokens of a row.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: of queries and keys.
        value_dim: of values.
        window: tokens that a query looks back; None for all.
        softcap: of the scores; None for no cap.
        sinks: whether heads have sinks.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


SHAPES = {
    "qwen2.5-0.5b": Shape(4, 4096, 14, 2, 64, 64),
    "qwen2.5-1.5b": Shape(4, 4096, 12, 2, 128, 128),
    "llama-3.1-8b": Shape(2, 8192, 32, 8, 128, 128),
    "llama-3.3-70b, tp8": Shape(1, 8192, 8, 1, 128, 128),
    "llama-3.3-70b, tp8, 128k tokens": Shape(1, 2**17, 8, 1, 128, 128),
    "deepseek-v3, tp8": Shape(1, 4096, 16, 16, 192, 128),
    "phi-3-mini": Shape(2, 4096, 32, 32, 96, 96, 2047),
    "gemma-2-9b": Shape(1, 8192, 16, 8, 256, 256, 4096, 50.0),
    "gpt-oss-20b": Shape(1, 8192, 64, 8, 64, 64, 128, None, True),
    # Heads of phi-2 and of stablelm-3b.
    "heads of 80": Shape(2, 4096, 32, 32, 80, 80),
}
