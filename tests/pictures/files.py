"""Small files of pictures, good and bad, that tests of pictures read."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

__all__ = ["colours", "encoded", "frames", "png"]


def colours(height: int = 6, width: int = 9, seed: int = 0) -> np.ndarray:
    """Random pixels, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encoded(picture: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    """The bytes of a file."""
    image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def frames(kind: str, count: int = 3) -> bytes:
    """A file of several pictures."""
    first, *rest = (Image.fromarray(colours(seed=seed)) for seed in range(count))
    return encoded(first, kind, save_all=True, append_images=rest)


def png(width: int, height: int, depth: int, kind: int, rows: bytes) -> bytes:
    """A PNG by hand, of any size and depth; `rows` may be too short.

    Args:
        width: in pixels, as the header says.
        height: in pixels.
        depth: bits a channel.
        kind: 0 greyscale, 2 colours.
        rows: each with a leading zero, for no filter.
    """

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    parts: list[Any] = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
