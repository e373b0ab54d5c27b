"""Draws small pictures: shapes and digits of few pixels, as PNG files."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from random import Random

__all__ = ["COLOURS", "SHAPES", "coloured", "digit", "png", "scattered", "single"]

type Colour = tuple[int, int, int]
# Rows of a shape; True where it is.
type Bitmap = tuple[tuple[bool, ...], ...]
# Rows of numbers: 1 for the first shape, 2 for the second, 0 for the background.
type Drawing = list[bytearray]

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


def _bitmap(*rows: str) -> Bitmap:
    return tuple(tuple(char == "#" for char in row) for row in rows)


SHAPES: Mapping[str, Bitmap] = {
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


def scattered(rng: Random, side: int, count: int) -> Drawing:
    """Draws shapes that do not touch one another.

    Args:
        rng: chooses shapes and places.
        side: of the picture, at least 16 pixels.
        count: number of shapes, at most 6.

    Returns:
        `side` rows of `side` numbers.
    """
    names, scale = list(SHAPES), side // 16
    while True:
        found = _empty(side)
        for number in range(1, count + 1):
            shape = _scaled(SHAPES[rng.choice(names)], scale)
            row, column = _corner(rng, side, shape)
            # With a frame of one pixel, in which nothing may be.
            rows = slice(max(row - 1, 0), row + len(shape) + 1)
            columns = slice(max(column - 1, 0), column + len(shape[0]) + 1)
            if any(any(each[columns]) for each in found[rows]):
                break
            _put(found, shape, (row, column), number)
        else:
            return found


def single(rng: Random, side: int) -> Drawing:
    """Draws one larger shape; returns the same as `scattered`."""
    shape = _scaled(SHAPES[rng.choice(list(SHAPES))], rng.randint(2, 4) * (side // 16))
    found = _empty(side)
    _put(found, shape, _corner(rng, side, shape), 1)
    return found


def digit(rng: Random, side: int, value: int) -> Drawing:
    """Draws a digit of five by seven dots; returns the same as `scattered`."""
    shape = _scaled(DIGITS[value], side // 8)
    found = _empty(side)
    _put(found, shape, _corner(rng, side, shape), 1)
    return found


def coloured(rng: Random, layout: Drawing, colours: list[str]) -> list[bytes]:
    """Colours a layout on a dark background.

    Args:
        rng: chooses the background.
        layout: as `scattered` returns.
        colours: names of `COLOURS`, one for each shape.

    Returns:
        Rows of a picture, three bytes a pixel.
    """
    background = [rng.randint(_DARKEST, _BRIGHTEST) for _ in range(3)]
    palette = [bytes(background), *(bytes(COLOURS[name]) for name in colours)]
    return [b"".join(palette[number] for number in row) for row in layout]


def png(rows: Sequence[bytes]) -> bytes:
    """Writes a PNG file.

    Args:
        rows: of the picture, each with three bytes a pixel: red, green, blue.

    References:
        Portable Network Graphics (PNG) Specification, third edition, W3C.

    >>> png([bytes(6), bytes(6)])[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width = len(rows), len(rows[0]) // 3
    # Eight bits a channel, colour type 2 (RGB), and no interlacing.
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    # Each row begins with the number of its filter: 0 for none.
    data = b"".join(b"\0" + row for row in rows)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(data, 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)


def _empty(side: int) -> Drawing:
    return [bytearray(side) for _ in range(side)]


def _scaled(bitmap: Bitmap, scale: int) -> Bitmap:
    return tuple(
        tuple(dot for dot in row for _ in range(scale))
        for row in bitmap
        for _ in range(scale)
    )


def _corner(rng: Random, side: int, shape: Bitmap) -> tuple[int, int]:
    return rng.randint(0, side - len(shape)), rng.randint(0, side - len(shape[0]))


def _put(layout: Drawing, shape: Bitmap, corner: tuple[int, int], number: int) -> None:
    row, column = corner
    for down, dots in enumerate(shape):
        for across, dot in enumerate(dots):
            if dot:
                layout[row + down][column + across] = number
