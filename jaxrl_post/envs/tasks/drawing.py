"""Draws small pictures: shapes and digits of few pixels, as PNG files."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from random import Random

import numpy as np

__all__ = ["COLOURS", "SHAPES", "coloured", "digit", "png", "scattered", "single"]

type Colour = tuple[int, int, int]

COLOURS: Mapping[str, Colour] = {
    "red": (230, 40, 40),
    "green": (40, 190, 60),
    "blue": (60, 90, 250),
    "yellow": (240, 220, 50),
    "pink": (240, 110, 210),
    "white": (240, 240, 240),
}
# Channels of the background, which is darker than every colour.
_DARKEST, _BRIGHTEST = 0, 31


def _bitmap(*rows: str) -> np.ndarray:
    return np.array([[char == "#" for char in row] for row in rows])


SHAPES: Mapping[str, np.ndarray] = {
    "square": _bitmap("###", "###", "###"),
    "plus": _bitmap(".#.", "###", ".#."),
    "ring": _bitmap("###", "#.#", "###"),
}
_DIGITS = (
    ".###. #...# #...# #...# #...# #...# .###.",
    "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    ".###. #...# ....# ...#. ..#.. .#... #####",
    ".###. #...# ....# ..##. ....# #...# .###.",
    "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
    "##### #.... ####. ....# ....# #...# .###.",
    ".###. #.... #.... ####. #...# #...# .###.",
    "##### ....# ....# ...#. ..#.. ..#.. ..#..",
    ".###. #...# #...# .###. #...# #...# .###.",
    ".###. #...# #...# .#### ....# ....# .###.",
)
DIGITS = tuple(_bitmap(*rows.split()) for rows in _DIGITS)


def scattered(rng: Random, side: int, count: int) -> np.ndarray:
    """Draws shapes that do not touch one another.

    Args:
        rng: chooses shapes and places.
        side: of the picture, at least 16 pixels.
        count: number of shapes, at most 6.

    Returns:
        int [side, side]: 1 for the first shape, 2 for the second, 0 for the background.
    """
    names, scale = list(SHAPES), side // 16
    while True:
        found = np.zeros((side, side), np.int64)
        for number in range(1, count + 1):
            shape = _scaled(SHAPES[rng.choice(names)], scale)
            row, column = _corner(rng, side, shape)
            height, width = shape.shape
            # With a frame of one pixel, in which nothing may be.
            rows = slice(max(row - 1, 0), row + height + 1)
            if found[rows, max(column - 1, 0) : column + width + 1].any():
                break
            _put(found, shape, (row, column), number)
        else:
            return found


def single(rng: Random, side: int) -> np.ndarray:
    """Draws one larger shape; returns the same as `scattered`."""
    shape = _scaled(SHAPES[rng.choice(list(SHAPES))], rng.randint(2, 4) * (side // 16))
    found = np.zeros((side, side), np.int64)
    _put(found, shape, _corner(rng, side, shape), 1)
    return found


def digit(rng: Random, side: int, value: int) -> np.ndarray:
    """Draws a digit of five by seven dots; returns the same as `scattered`."""
    shape = _scaled(DIGITS[value], side // 8)
    found = np.zeros((side, side), np.int64)
    _put(found, shape, _corner(rng, side, shape), 1)
    return found


def coloured(rng: Random, layout: np.ndarray, colours: list[str]) -> np.ndarray:
    """Colours a layout on a dark background.

    Args:
        rng: chooses the background.
        layout: int [side, side], as of `scattered`.
        colours: names of `COLOURS`, one for each shape.

    Returns:
        uint8 [side, side, 3].
    """
    background = tuple(rng.randint(_DARKEST, _BRIGHTEST) for _ in range(3))
    palette = [background, *(COLOURS[name] for name in colours)]
    return np.array(palette, np.uint8)[layout]


def png(pixels: np.ndarray) -> bytes:
    """Writes a PNG file.

    Args:
        pixels: uint8 [height, width, 3].

    References:
        Portable Network Graphics (PNG) Specification, third edition, W3C.

    >>> png(np.zeros((2, 2, 3), np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, _ = pixels.shape
    # Eight bits a channel, colour type 2 (RGB), and no interlacing.
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    # Each row begins with the number of its filter: 0 for none.
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def _scaled(bitmap: np.ndarray, scale: int) -> np.ndarray:
    return bitmap.repeat(scale, axis=0).repeat(scale, axis=1)


def _corner(rng: Random, side: int, shape: np.ndarray) -> tuple[int, int]:
    height, width = shape.shape
    return rng.randint(0, side - height), rng.randint(0, side - width)


def _put(
    layout: np.ndarray, shape: np.ndarray, corner: tuple[int, int], number: int
) -> None:
    row, column = corner
    height, width = shape.shape
    layout[row : row + height, column : column + width][shape] = number
