"""Decode attention of published models, as one device of a mesh computes it."""

from typing import NamedTuple

__all__ = ["SHAPES", "Shape"]


class Shape(NamedTuple):
    """New tokens of sequences over cached keys on one device.

    Attributes:
        batch: sequences.
        queries: new tokens of each.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: of queries and keys.
        value_dim: of values; 0 where the keys are the values too.
        own: keys of each sequence.
        members: sequences of a group; 0 for no shared keys.
        shared: keys that a group shares.
        codes: dtype of quantised entries; None for the queries' dtype.
        window: tokens that a query looks back; None for all.
        softcap: of the scores; None for no cap.
        sinks: whether heads have sinks.
    """

    batch: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    own: int
    members: int = 0
    shared: int = 0
    codes: str | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


SHAPES = {
    "qwen2.5-0.5b": Shape(256, 1, 14, 2, 64, 64, 1024, 8, 512),
    "qwen2.5-1.5b": Shape(256, 1, 12, 2, 128, 128, 1024, 8, 512),
    "llama-3.1-8b": Shape(64, 1, 32, 8, 128, 128, 2048, 8, 1024),
    "llama-3.1-8b, int8": Shape(64, 1, 32, 8, 128, 128, 2048, 8, 1024, "int8"),
    "llama-3.1-8b, float8": Shape(
        64, 1, 32, 8, 128, 128, 2048, 8, 1024, "float8_e4m3fn"
    ),
    "llama-3.1-8b, prefill": Shape(4, 512, 32, 8, 128, 128, 2048),
    "llama-3.1-8b, 4 guesses": Shape(16, 5, 32, 8, 128, 128, 2048, 8, 1024),
    "llama-3.3-70b, tp8": Shape(128, 1, 8, 1, 128, 128, 4096, 16, 2048),
    "deepseek-v3, tp8": Shape(64, 1, 16, 1, 576, 0, 2048, 8, 1024),
    "phi-3-mini": Shape(64, 1, 32, 32, 96, 96, 2048, 8, 1024, None, 2047),
    "gemma-2-9b": Shape(64, 1, 16, 8, 256, 256, 2048, 8, 1024, None, 4096, 50.0),
    "gpt-oss-20b": Shape(
        64, 1, 64, 8, 64, 64, 2048, 8, 1024, None, 128, None, sinks=True
    ),
    # The smallest views of the sampler, and lengths that are no multiples of tiles.
    "views of 16": Shape(8, 1, 14, 2, 64, 64, 16, 8, 48),
    "odd": Shape(7, 1, 8, 2, 80, 80, 1037, 2, 11),
}
