"""Output layers of published models, as one device samples with them."""

from typing import NamedTuple

__all__ = ["SHAPES", "Shape"]


class Shape(NamedTuple):
    """A step of decoding on one device.

    Attributes:
        rows: samples.
        width: of the hidden states.
        vocab: rows of the unembedding.
        softcap: of the logits; None for no cap.
    """

    rows: int
    width: int
    vocab: int
    softcap: float | None = None


SHAPES = {
    "qwen2.5-0.5b": Shape(256, 896, 151_936),
    "qwen2.5-1.5b": Shape(256, 1536, 151_936),
    "llama-3.1-8b": Shape(64, 4096, 128_256),
    "llama-3.1-8b, 256 samples": Shape(256, 4096, 128_256),
    "llama-3.3-70b, tp8": Shape(128, 8192, 128_256 // 8),
    "deepseek-v3, tp8": Shape(64, 7168, 129_280 // 8),
    "gemma-2-9b": Shape(64, 3584, 256_000, 30.0),
    "gemma-3-1b": Shape(256, 1152, 262_144),
    # More samples than a tile of rows has.
    "qwen2.5-0.5b, 2048 samples": Shape(2048, 896, 151_936),
    # Neither rows nor vocabulary are multiples of tiles: no kernel for GPUs.
    "odd": Shape(7, 896, 50_257),
}
