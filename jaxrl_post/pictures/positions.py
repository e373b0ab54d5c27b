"""Positions of tokens in time, row and column (multimodal rotary embedding)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_post.pictures.errors import PictureError
from jaxrl_post.pictures.numbered import spots

__all__ = ["PictureSpan", "mrope_positions", "rotary_positions"]


class PictureSpan(NamedTuple):
    """The tokens of one picture in a row.

    Attributes:
        start: place of its first token.
        grid: rows and columns of its patches.
    """

    start: int
    grid: tuple[int, int]


def mrope_positions(
    length: int, spans: Sequence[PictureSpan], merge: int
) -> np.ndarray:
    """Computes the positions of the tokens of one sequence.

    A token of text has one position on all three axes, one more than the token before.
    All tokens of a picture have the position of its start in time, and their row and
    column are counted from it. The token after a picture has the start plus the larger
    side of the picture, in tokens.

    Positions are the same for Qwen2.5-VL, Qwen3-VL and Qwen3.5; which axis rotates
    which dims differs (`models.rope.mrope_axes`). The position of the token that
    follows the sequence is the largest one plus 1.

    Args:
        length: tokens of the sequence.
        spans: of the pictures, in order.
        merge: side of the block of patches that is one token.

    Returns:
        int32 [3, length]: time, row, column.

    Raises:
        ValueError: a picture's span overlaps another one, or ends after the row.

    References:
        Wang et al., Qwen2-VL, arXiv:2409.12191 (M-RoPE).

    >>> mrope_positions(7, [PictureSpan(1, (4, 4))], 2).tolist()
    [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
    """
    found = np.empty((3, length), np.int32)
    place = position = 0

    def text(until: int) -> None:
        nonlocal place, position
        found[:, place:until] = np.arange(position, position + until - place)
        position += until - place
        place = until

    for start, grid in spans:
        rows, columns = (side // merge for side in grid)
        end = start + rows * columns
        if start < place or end > length:
            raise ValueError(
                f"spans: the {rows} x {columns} tokens of the picture at {start} must "
                f"lie between {place} and {length}; they end at {end}"
            )
        text(start)
        found[0, start:end] = position
        found[1, start:end] = position + np.repeat(np.arange(rows), columns)
        found[2, start:end] = position + np.tile(np.arange(columns), rows)
        place, position = end, position + max(rows, columns)
    text(length)
    return found


def rotary_positions(
    ids: Sequence[int] | np.ndarray, begin: int = 0
) -> tuple[np.ndarray, int]:
    """Computes the positions of a part of a sequence whose pictures have numbers.

    Args:
        ids: token ids. Only the last picture may lack tokens, which then follow.
        begin: the position of the first token.

    Returns:
        int32 [tokens, 3]: time, row, column; and the position after the last token, or
        after the whole picture to which it belongs.

    Raises:
        PictureError: a picture lacks tokens, or no picture in memory has a number.

    >>> rotary_positions([7, 8], begin=5)[0].tolist(), rotary_positions([7, 8], 5)[1]
    ([[5, 5, 5], [6, 6, 6]], 7)
    """
    found, missing = spots(ids), 0
    for index, spot in enumerate(found):
        missing = spot.picture.num_tokens - spot.block - spot.count
        if spot.block or (missing and index + 1 < len(found)):
            raise PictureError(
                f"tokens: {spot.count} of the {spot.picture.num_tokens} tokens of a "
                f"picture stand at {spot.start}; a picture must be whole, so cut rows "
                "before or after it"
            )
    if missing and found[-1].start + found[-1].count < len(ids):
        raise PictureError(
            f"tokens: the picture at {found[-1].start} lacks its last {missing} "
            "tokens, and text follows; cut rows before or after a picture"
        )
    spans = [PictureSpan(spot.start, spot.picture.grid) for spot in found]
    merge = found[0].picture.processor.merge_size if found else 1
    positions = mrope_positions(len(ids) + missing, spans, merge) + np.int32(begin)
    after = int(positions.max()) + 1 if positions.size else begin
    return np.ascontiguousarray(positions.T[: len(ids)]), after
