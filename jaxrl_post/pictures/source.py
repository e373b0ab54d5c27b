"""Finds a picture's bytes: given, in a data URL, or in a file below a folder.

A source comes from a row of a data set or from a request, so it is not trusted: no
address is fetched, and no file outside the folder is opened.
"""

import base64
import binascii
import os
import re
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from urllib.parse import unquote_to_bytes

from jaxrl_post.pictures.errors import PictureError

__all__ = ["bytes_of", "name_of"]

# Characters of a source that an error message shows.
SHOWN = 80
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
DATA = re.compile(r"data:([^,]*),", re.IGNORECASE)


def name_of(source: bytes | str) -> str:
    """Names a source in error messages.

    >>> name_of(b"GIF89a"), name_of("cats/1.png")
    ('picture of 6 bytes', "picture 'cats/1.png'")
    """
    if isinstance(source, bytes):
        return f"picture of {len(source):,} bytes"
    shown = source if len(source) <= SHOWN else f"{source[:SHOWN]}..."
    return f"picture {shown!r}"


def bytes_of(source: bytes | str, root: Path | None, most: int) -> bytes:
    """Returns the encoded bytes of a picture.

    Args:
        source: as in `reading.read_picture`.
        root: folder of the pictures' files; None refuses paths.
        most: the largest number of bytes.

    Raises:
        PictureError: there are no such bytes, or too many.

    >>> bytes_of("data:image/png;base64,R0lG", None, most=3)
    b'GIF'
    """
    name = name_of(source)
    if isinstance(source, bytes):
        _check_count(len(source), most, name)
        return source
    if source[:5].lower() == "data:":
        return _data(source, most, name)
    address = ADDRESS.match(source)
    if address is not None:
        raise PictureError(
            f"{name}: pictures are never fetched, and {address[1]} is an address; "
            "download it first and give its path, its bytes or a data: URL"
        )
    return _file(source, root, most, name)


def _check_count(count: int, most: int, name: str) -> None:
    if count > most:
        raise PictureError(
            f"{name}: must have at most {most:,} bytes; got {count:,}; store it "
            "smaller, or raise PictureLimits.bytes"
        )


def _data(source: str, most: int, name: str) -> bytes:
    """Decodes a data URL (RFC 2397)."""
    head = DATA.match(source)
    if head is None:
        raise PictureError(
            f"{name}: a data: URL must have a comma before its data; give "
            "data:image/png;base64,... "
        )
    text = source[head.end() :]
    if "base64" not in [part.strip().lower() for part in head[1].split(";")[1:]]:
        _check_count(len(text) // 3, most, name)
        found = unquote_to_bytes(text)
        _check_count(len(found), most, name)
        return found
    # Four characters are three bytes: too long a text is refused before it is decoded.
    _check_count(len(text) * 3 // 4 - 2, most, name)
    try:
        # Some writers wrap lines, percent-encode or leave out the padding.
        plain = unquote_to_bytes(text).translate(None, b" \t\r\n")
        padded = plain + b"=" * (-len(plain) % 4)
        found = base64.b64decode(padded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(
            f"{name}: its base64 is damaged ({error}); encode the file again, in the "
            "standard alphabet"
        ) from None
    _check_count(len(found), most, name)
    return found


def _file(source: str, root: Path | None, most: int, name: str) -> bytes:
    if root is None:
        raise PictureError(
            f"{name}: a path needs a folder of pictures, and none is given; give one, "
            "or the picture's bytes"
        )
    if not source or "\0" in source:
        raise PictureError(f"{name}: is no path; give one relative to {root}")
    if PurePosixPath(source).is_absolute() or PureWindowsPath(source).anchor:
        raise PictureError(
            f"{name}: must be a path relative to {root}; got an absolute one; remove "
            "its beginning"
        )
    try:
        folder = root.resolve(strict=True)
        path = (folder / source).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise PictureError(
            f"{name}: cannot be found below {root} ({_reason(error)}); check the path"
        ) from None
    if not path.is_relative_to(folder):
        raise PictureError(
            f"{name}: leads out of the folder {root}, to {path}; move the file into "
            "the folder"
        )
    try:
        return _read(path, most, name)
    except OSError as error:
        raise PictureError(
            f"{name}: cannot be read below {root} ({_reason(error)}); check the file "
            "and its permissions"
        ) from None


def _read(path: Path, most: int, name: str) -> bytes:
    # O_NONBLOCK: the open of a named pipe would wait for a writer. O_NOFOLLOW: the path
    # is resolved, so a link at its end has come in between.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PictureError(
                f"{name}: is no file; give the path of a file with one picture"
            )
        _check_count(status.st_size, most, name)
        with open(descriptor, "rb", closefd=False) as file:
            # The file may grow between the check and the read.
            found = file.read(most + 1)
    finally:
        os.close(descriptor)
    _check_count(len(found), most, name)
    return found


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
