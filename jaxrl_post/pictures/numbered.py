"""Numbers for the tokens of pictures, so that rows of ids say which picture they show.

A picture becomes as many tokens as it has blocks of patches. In a row of ids these have
negative numbers, which no vocabulary has. Equal pictures have equal numbers, and two
pictures have no number in common. So code that compares, slices, stores or joins rows
of ids needs no knowledge of pictures: a prefix cache finds what it holds of a picture,
and does not take one picture for another.

The numbers are valid in this process alone: `Tokens.to_json` stores the pictures.
"""

import bisect
import hashlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_post.pictures.errors import PictureError
from jaxrl_post.pictures.processor import PictureProcessor

__all__ = [
    "Picture",
    "Spot",
    "expanded",
    "lasting",
    "number",
    "pictures_in",
    "spots",
    "without",
]

# Numbers of tokens; -1 stays free, since many arrays have it for "none".
FIRST, LAST = -(2**31), -2


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Picture:
    """A resized picture whose tokens have numbers; made by `number`.

    Attributes:
        pixels: uint8 [height, width, 3], whole blocks of patches.
        processor: cuts it into patches.
        first: number of its first token; the others follow.
    """

    pixels: np.ndarray
    processor: PictureProcessor
    first: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width, _ = self.pixels.shape
        return height // self.processor.patch_size, width // self.processor.patch_size

    @property
    def num_tokens(self) -> int:
        """Number of its tokens."""
        return self.processor.tokens(self.grid)

    @property
    def ids(self) -> range:
        """The numbers of its tokens, in the order of a row."""
        return range(self.first, self.first + self.num_tokens)

    def patches(self) -> np.ndarray:
        """The patches for the vision tower, as `PictureProcessor.raw`."""
        return self.processor.raw(self.pixels)


@dataclass(frozen=True)
class Spot:
    """Tokens of one picture that stand together in a row.

    Attributes:
        picture: the picture.
        start: place of the first of them in the row.
        block: the number of that token among the picture's tokens.
        count: number of the tokens.
    """

    picture: Picture
    start: int
    block: int
    count: int


class _Numbers:
    """All numbers that have been given; a ring, which begins again when it is full.

    A number is a function of the order in which pictures were first met, not of what
    is still in memory, so the processes of a run have the same numbers.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Digest by first number, first number by digest, and the sorted first numbers.
        self.digests: dict[int, bytes] = {}
        self.firsts: dict[bytes, int] = {}
        self.order: list[int] = []
        self.sizes: dict[int, int] = {}
        self.alive: weakref.WeakValueDictionary[int, Picture] = (
            weakref.WeakValueDictionary()
        )
        self.next = FIRST

    def take(self, digest: bytes, count: int) -> int:
        """Numbers for a new picture; when all are used, it gets the oldest ones."""
        if self.next + count - 1 > LAST:
            self.next = FIRST
        first, end = self.next, self.next + count
        at = bisect.bisect_right(self.order, first)
        if at and self.order[at - 1] + self.sizes[self.order[at - 1]] > first:
            at -= 1
        while at < len(self.order) and self.order[at] < end:
            old = self.order[at]
            if old in self.alive:
                raise PictureError(
                    f"pictures: all {LAST - FIRST + 1:,} numbers of their tokens are "
                    "in use; hold fewer samples with pictures at a time"
                )
            del self.order[at], self.sizes[old], self.firsts[self.digests.pop(old)]
        self.order.insert(at, first)
        self.sizes[first], self.digests[first] = count, digest
        self.firsts[digest] = first
        self.next = end
        return first


_NUMBERS = _Numbers()


def number(pixels: np.ndarray, processor: PictureProcessor) -> Picture:
    """Gives the tokens of a picture their numbers; equal pictures have equal ones.

    Args:
        pixels: uint8 [height, width, 3], from `PictureProcessor.resized`.
        processor: cuts it into patches.

    Raises:
        PictureError: the sides are no whole blocks, or no numbers are left.

    >>> processor = PictureProcessor(patch_size=2, min_pixels=16)
    >>> white = number(np.full((4, 8, 3), 255, np.uint8), processor)
    >>> black = number(np.zeros((4, 8, 3), np.uint8), processor)
    >>> len(white.ids), white is number(white.pixels.copy(), processor)
    (2, True)
    >>> set(white.ids) & set(black.ids)
    set()
    """
    sides = pixels.shape[:2]
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise PictureError(
            f"picture must be uint8 [height, width, 3]; got {pixels.dtype} "
            f"{list(pixels.shape)}; use PictureProcessor.resized"
        )
    if not all(sides) or any(side % processor.block for side in sides):
        raise PictureError(
            f"picture must have sides that are multiples of {processor.block} pixels; "
            f"got {sides[1]} x {sides[0]}; use PictureProcessor.resized"
        )
    pixels = np.ascontiguousarray(pixels)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((pixels.shape, processor)).encode())
    digest.update(pixels.data)
    with _NUMBERS.lock:
        key = digest.digest()
        first = _NUMBERS.firsts.get(key)
        found = None if first is None else _NUMBERS.alive.get(first)
        if found is not None:
            return found
        if first is None:
            count = sides[0] * sides[1] // processor.block**2
            first = _NUMBERS.take(key, count)
        pixels.flags.writeable = False
        picture = Picture(pixels, processor, first)
        _NUMBERS.alive[first] = picture
        return picture


def spots(ids: Sequence[int] | np.ndarray) -> list[Spot]:
    """Finds the pictures in a row of ids.

    Args:
        ids: int32 [tokens], or integers.

    Raises:
        PictureError: a number is negative, but no picture in memory has it.

    >>> processor = PictureProcessor(patch_size=2, min_pixels=16)
    >>> white = number(np.full((4, 8, 3), 255, np.uint8), processor)
    >>> [(spot.start, spot.block, spot.count) for spot in spots([7, *white.ids, 8])]
    [(1, 0, 2)]
    """
    array = np.asarray(ids, np.int64)
    places = np.flatnonzero(array < 0)
    if not len(places):
        return []
    found = []
    # A spot ends at a number that is not one more than the number before.
    values = array[places]
    breaks = (np.diff(places) != 1) | (np.diff(values) != 1)
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(places)]
    for begin, end in itertools.pairwise(starts):
        while begin < end:
            value, place = int(values[begin]), int(places[begin])
            picture = _picture(value, place)
            block = value - picture.first
            count = min(end - begin, picture.num_tokens - block)
            found.append(Spot(picture, place, block, count))
            begin += count
    return found


def _picture(value: int, place: int) -> Picture:
    with _NUMBERS.lock:
        at = bisect.bisect_right(_NUMBERS.order, value)
        first = _NUMBERS.order[at - 1] if at else value
        picture = _NUMBERS.alive.get(first)
    if picture is None or value not in picture.ids:
        raise PictureError(
            f"id {place} is {value}: negative ids are numbers of pictures, and no "
            "picture in memory has this one; keep the pictures (`Tokens.pictures`) "
            "with their ids, and take stored rows from `Tokens.from_json`"
        )
    return picture


def pictures_in(ids: Sequence[int] | np.ndarray) -> tuple[Picture, ...]:
    """The different pictures in a row of ids, in order.

    Raises:
        PictureError: as `spots`.
    """
    return tuple(dict.fromkeys(spot.picture for spot in spots(ids)))


def lasting(ids: Sequence[int]) -> str:
    """A text for a row that is the same in every process, with pictures too.

    Raises:
        PictureError: as `spots`.

    >>> lasting([7, 8])
    '7 8'
    """
    if not ids or min(ids) >= 0:
        return " ".join(map(str, ids))
    texts = [str(each) for each in ids]
    for spot in spots(ids):
        pixels = spot.picture.pixels
        digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
        digest.update(pixels.data)
        for place in range(spot.count):
            name = f"{digest.hexdigest()}.{spot.block + place}"
            texts[spot.start + place] = name
    return " ".join(texts)


def without(ids: np.ndarray, image_token: int) -> np.ndarray:
    """Ids of the vocabulary: every token of a picture has the id of image tokens.

    >>> without(np.array([7, -5, -4, 8]), 99).tolist()
    [7, 99, 99, 8]
    """
    return np.where(ids < 0, np.asarray(image_token, ids.dtype), ids)


def expanded(
    ids: Iterable[int], pictures: Sequence[Picture], image_token: int
) -> tuple[int, ...]:
    """Puts the tokens of pictures in the places that a chat template left for them.

    Args:
        ids: a rendered conversation, with one image token for each picture.
        pictures: of the conversation, in order.
        image_token: id of the image token.

    Raises:
        PictureError: there are more or fewer places than pictures.

    >>> processor = PictureProcessor(patch_size=2, min_pixels=16)
    >>> white = number(np.full((4, 8, 3), 255, np.uint8), processor)
    >>> expanded([7, 99, 8], [white], 99) == (7, *white.ids, 8)
    True
    """
    ids = tuple(ids)
    places = ids.count(image_token)
    if places != len(pictures):
        raise PictureError(
            f"the conversation has {len(pictures)} pictures, and its chat template "
            f"left {places} places for them (tokens with the id {image_token}); every "
            "picture must be in a message that the template writes, and no text may "
            "contain the image token"
        )
    following = iter(pictures)
    return tuple(
        each
        for token in ids
        for each in (next(following).ids if token == image_token else (token,))
    )
