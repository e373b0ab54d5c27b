"""Output layers of published models, as one device of a mesh computes them."""

from typing import NamedTuple

__all__ = ["SHAPES", "Shape"]


class Shape(NamedTuple):
    """Log-probs of a microbatch on one device.

    Attributes:
        rows: tokens.
        width: of the hidden states.
        vocab: rows of the unembedding.
        kept: ids of kept tokens, as truncated sampling records; 0 for none.
        softcap: of the logits; None for no cap.
    """

    rows: int
    width: int
    vocab: int
    kept: int = 0
    softcap: float | None = None


SHAPES = {
    "qwen2.5-0.5b": Shape(16384, 896, 151_936),
    "qwen2.5-1.5b": Shape(16384, 1536, 151_936),
    "qwen2.5-1.5b, top-k 20": Shape(16384, 1536, 151_936, kept=20),
    "llama-3.1-8b": Shape(8192, 4096, 128_256),
    "llama-3.3-70b": Shape(4096, 8192, 128_256),
    "llama-3.3-70b, tp8": Shape(4096, 8192, 128_256 // 8),
    "deepseek-v3, tp8": Shape(4096, 7168, 129_280 // 8),
    "gemma-2-9b": Shape(8192, 3584, 256_000, softcap=30.0),
    "gemma-3-1b": Shape(8192, 1152, 262_144),
    # Neither rows nor vocabulary are multiples of tiles.
    "odd": Shape(1003, 896, 50_257),
}
