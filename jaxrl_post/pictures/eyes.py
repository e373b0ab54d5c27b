"""Turns the pictures of messages into tokens."""

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxrl_post.pictures.numbered import Picture, PictureIds, expanded, number
from jaxrl_post.pictures.processor import PictureProcessor
from jaxrl_post.pictures.reading import DEFAULT_LIMITS, PictureLimits, read_picture

__all__ = ["Eyes"]


@dataclass(frozen=True)
class Eyes:
    """What is needed to show pictures to a model that also sees.

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

    def expanded(self, ids: Iterable[int], sources: Sequence[bytes]) -> PictureIds:
        """Puts the tokens of pictures in the places that a template left for them.

        Args:
            ids: a rendered conversation, with one image token for each picture.
            sources: the pictures of the conversation, in order.

        Raises:
            PictureError: as `pictures.expanded` and `picture`.
        """
        pictures = [self.picture(source) for source in sources]
        return expanded(ids, pictures, self.image_token)
