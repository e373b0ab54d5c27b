"""Decodes pictures to RGB, and refuses those that a model could not have meant."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_post.extras import install
from jaxrl_post.pictures.errors import PictureError, check_sides
from jaxrl_post.pictures.source import bytes_of, name_of

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PictureLimits", "checked", "picture_size", "pillow", "read_picture"]

# Pillow has more decoders, some of which run other programs (PostScript).
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# Modes of Pillow with 16 bits a pixel, in both orders of bytes.
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
# Modes whose range of values a file does not tell.
UNSCALED = ("I", "F")
# The EXIF tag of the orientation, and its values for a picture on its side.
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)
WHITE = (255, 255, 255, 255)


@dataclass(frozen=True)
class PictureLimits:
    """The largest picture that is decoded; both are checked before decoding.

    Attributes:
        bytes: of the file.
        pixels: width times height. A pixel takes up to 20 bytes while it is converted.
    """

    bytes: int = 32 * 2**20
    pixels: int = 64 * 2**20


DEFAULT_LIMITS = PictureLimits()


def pillow(name: str) -> Any:
    """Returns the package Pillow.

    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra.
    """
    try:
        # Not at the top: most runs have no pictures.
        import PIL.Image
        import PIL.ImageOps
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name}: pictures are read with Pillow, and there is no module "
            f"{error.name!r}: {install('pictures')}",
            name=error.name,
        ) from error
    return PIL


def read_picture(
    source: bytes | str,
    root: Path | None = None,
    limits: PictureLimits = DEFAULT_LIMITS,
) -> np.ndarray:
    """Reads a picture as RGB, upright by its EXIF orientation.

    Transparent parts are blended with white, as transformers 5.24's Qwen2-VL processor
    does with a Pillow image. Of 16-bit greyscale the high byte is kept, as Pillow keeps
    it of 16-bit RGB; transformers shows all values above 255 as white.

    Args:
        source: the bytes of a file (BMP, GIF, JPEG, PNG, PPM, TIFF or WebP); a data:
            URL; or a path relative to `root`.
        root: folder of the files; None refuses paths.
        limits: the largest picture that is decoded.

    Returns:
        uint8 [height, width, 3].

    Raises:
        PictureError: there is no such picture; it is an address, which is never
            fetched; the path leads out of `root`; the file is damaged, animated, too
            large or too narrow.
        ModuleNotFoundError: Pillow is not installed.

    >>> red = b"P6 1 2 255 " + 2 * bytes([255, 0, 0])
    >>> read_picture(red).tolist()
    [[[255, 0, 0]], [[255, 0, 0]]]
    """
    with _opened(source, root, limits) as (library, image, _):
        image.load()
        return _rgb(library, _upright(library, image), name_of(source))


def checked(
    source: bytes | str,
    root: Path | None = None,
    limits: PictureLimits = DEFAULT_LIMITS,
) -> bytes:
    """Returns the bytes of a picture's file, after `read_picture` could read it.

    Args:
        source: as in `read_picture`.
        root: as there.
        limits: as there.

    Raises:
        PictureError: as `read_picture`.
        ModuleNotFoundError: Pillow is not installed.

    >>> red = b"P6 1 2 255 " + 2 * bytes([255, 0, 0])
    >>> checked(red) == red
    True
    """
    with _opened(source, root, limits) as (library, image, encoded):
        image.load()
        _rgb(library, _upright(library, image), name_of(source))
        return encoded


def picture_size(
    source: bytes | str,
    root: Path | None = None,
    limits: PictureLimits = DEFAULT_LIMITS,
) -> tuple[int, int]:
    """Returns (height, width) of an upright picture, from its header alone.

    With `PictureProcessor.grid` it tells the number of tokens before a picture is
    decoded. A TIFF is decoded.

    Args:
        source: as in `read_picture`.
        root: as there.
        limits: as there.

    Raises:
        PictureError: as `read_picture`, except that pixels are not looked at.
        ModuleNotFoundError: Pillow is not installed.

    >>> picture_size(b"P6 1 2 255 ")
    (2, 1)
    """
    with _opened(source, root, limits) as (library, image, _):
        if image.format == "TIFF":
            # Pillow itself turns it, in some versions before it is decoded.
            image.load()
            image = _upright(library, image)
        width, height = image.size
        try:
            turned = image.getexif().get(ORIENTATION, 1) in SIDEWAYS
        # As in `_upright`.
        except Exception:
            turned = False
        return (width, height) if turned else (height, width)


@contextmanager
def _opened(
    source: bytes | str, root: Path | None, limits: PictureLimits
) -> Iterator[tuple[Any, Any, bytes]]:
    """Opens a picture that may be decoded: Pillow, its image, and the file's bytes.

    Errors of decoders, here and where the image is used, become PictureErrors.
    """
    name = name_of(source)
    encoded = bytes_of(source, root, limits.bytes)
    library = pillow(name)
    try:
        with library.Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            # Opening reads the header alone.
            _check(image, limits, name)
            yield library, image, encoded
    except PictureError:
        raise
    # Decoders of damaged files raise errors of many types.
    except Exception as error:
        image = library.Image
        bombs = image.DecompressionBombError, image.DecompressionBombWarning
        if isinstance(error, bombs):
            # Pillow has a limit of its own; its message begins with the number.
            number = re.search(r"[0-9]+", str(error))
            got = f"{int(number[0]):,} pixels" if number else "many more"
            raise _too_large(got, limits, name) from None
        if isinstance(error, library.UnidentifiedImageError):
            raise PictureError(
                f"{name}: is no picture in a format of {', '.join(FORMATS)}; it begins "
                f"with {encoded[:8]!r}; convert it to PNG or JPEG"
            ) from None
        raise PictureError(
            f"{name}: is truncated or damaged ({type(error).__name__}: {error}); "
            "store the file again"
        ) from error


def _check(image: Any, limits: PictureLimits, name: str) -> None:
    width, height = image.size
    check_sides(height, width, name)
    if width * height > limits.pixels:
        raise _too_large(f"{width} x {height} pixels", limits, name)
    # A JPEG of several pictures (MPO) has the photo first, and views of it after.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise PictureError(
            f"{name}: must be one picture; got {image.format} with "
            f"{image.n_frames} frames; give one frame as a picture of its own"
        )


def _too_large(got: str, limits: PictureLimits, name: str) -> PictureError:
    return PictureError(
        f"{name}: must have at most {limits.pixels:,} pixels; got {got}; make it "
        "smaller, or raise PictureLimits.pixels"
    )


def _upright(library: Any, image: Any) -> Any:
    try:
        return library.ImageOps.exif_transpose(image)
    # Viewers show a picture whose EXIF data is damaged as it is stored.
    except Exception:
        return image


def _rgb(library: Any, image: Any, name: str) -> np.ndarray:
    # Not at the top: workers of environments start without it.
    import numpy as np

    if image.mode in SIXTEEN_BITS:
        grey = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in UNSCALED:
        raise PictureError(
            f"{name}: must have 8 or 16 bits a channel; got {image.mode!r}, numbers of "
            "32 bits without a range; scale it to 8 bits"
        )
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = library.Image.new("RGBA", image.size, WHITE)
        image = library.Image.alpha_composite(white, image)
    return np.array(image.convert("RGB"))
