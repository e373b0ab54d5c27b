"""Turns the pictures of messages into tokens."""

import hashlib
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.pictures.errors import PictureError
from jaxrl_post.pictures.numbered import Picture, number
from jaxrl_post.pictures.processor import PictureProcessor
from jaxrl_post.pictures.reading import (
    DEFAULT_LIMITS,
    PictureLimits,
    picture_size,
    read_picture,
)

__all__ = ["Eyes", "Shown"]


class Shown(tuple[int, ...]):
    """A row of ids that keeps the pictures in it in memory.

    Without its pictures, a row's negative numbers say nothing (`numbered`). A slice or
    a copy is a plain tuple: what needs its pictures asks for them while this row lives.

    Attributes:
        pictures: the pictures.
    """

    pictures: tuple[Picture, ...]

    @classmethod
    def of(cls, ids: Iterable[int], pictures: Sequence[Picture]) -> "Shown":
        """A row with its pictures."""
        made = cls(ids)
        made.pictures = tuple(pictures)
        return made

    @classmethod
    def joined(cls, *rows: Iterable[int]) -> tuple[int, ...]:
        """Rows one after another; keeps the pictures of those that keep theirs."""
        held = [each.pictures for each in rows if isinstance(each, Shown)]
        ids = itertools.chain(*rows)
        return cls.of(ids, tuple(itertools.chain(*held))) if held else tuple(ids)

    def __reduce__(self) -> Any:
        # The numbers are valid in this process alone.
        return tuple, (tuple(self),)


@dataclass(frozen=True)
class Eyes:
    """Shows pictures to a model that also sees.

    Attributes:
        processor: resizes pictures and cuts them into patches.
        image_token: id of the image token, which a chat template writes once for each
            picture.
        limits: the largest picture that is decoded.
    """

    processor: PictureProcessor
    image_token: int
    limits: PictureLimits = DEFAULT_LIMITS
    _decoded: weakref.WeakValueDictionary[bytes, Picture] = field(
        default_factory=weakref.WeakValueDictionary, init=False, repr=False
    )

    def picture(self, source: bytes) -> Picture:
        """Decodes and resizes a picture; one that is in memory is not decoded again.

        Args:
            source: bytes of a file, as `read_picture`.

        Raises:
            PictureError: as `read_picture`.
        """
        key = hashlib.blake2b(source, digest_size=16).digest()
        found = self._decoded.get(key)
        if found is None:
            pixels = read_picture(source, limits=self.limits)
            found = number(self.processor.resized(pixels), self.processor)
            self._decoded[key] = found
        return found

    def num_tokens(self, source: bytes) -> int:
        """Number of a picture's tokens, by its header, without decoding it.

        Raises:
            PictureError: as `picture_size`.
        """
        size = picture_size(source, limits=self.limits)
        return self.processor.tokens(self.processor.grid(*size))

    def restored(self, ids: Sequence[int], sources: Sequence[bytes]) -> tuple[int, ...]:
        """A row that has an image token for each token of its pictures.

        Args:
            ids: of the vocabulary, as `numbered.without` gives them to clients.
            sources: the pictures of the row, in order.

        Raises:
            PictureError: the pictures have another number of tokens; or as `picture`.
        """
        pictures = [self.picture(source) for source in sources]
        own = [token for picture in pictures for token in picture.ids]
        places = ids.count(self.image_token)
        if places != len(own):
            raise PictureError(
                f"{places} of the token ids are image tokens, and the pictures have "
                f"{len(own)} tokens; send the ids as the server gave them, with the "
                "pictures of the same messages"
            )
        following = iter(own)
        found = (next(following) if i == self.image_token else i for i in ids)
        return Shown.of(found, pictures) if pictures else tuple(ids)
