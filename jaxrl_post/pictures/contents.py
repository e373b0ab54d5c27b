"""Reads contents of messages that are lists of parts, from data sets and requests."""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_post.messages import PICTURE
from jaxrl_post.pictures.errors import PictureError

__all__ = ["PICTURES", "TEXTS", "content_of", "data_url", "source_of", "with_texts"]

# First bytes of files that all clients know, and their media types.
KINDS = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)

# Types of parts with text, and the key of the text; a refusal is what an earlier answer
# says, under another name.
TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
# Types of parts with a picture, and keys of the picture: of transformers and TRL, of
# OpenAI's chats, and of its responses.
PICTURES = {
    "image": ("image", "path", "url", "bytes", "base64", "image_url"),
    "image_url": ("image_url", "url"),
    "input_image": ("image_url",),
}
# Further keys of parts that would change what a model reads. Other keys, such as
# "cache_control", change nothing.
OTHERS = (
    *("image_path", "image_bytes", "images", "video", "video_url", "audio"),
    *("input_audio", "file", "file_id", "file_data", "resized_height", "resized_width"),
    *("min_pixels", "max_pixels"),
)

# Returns the bytes of a picture; None is the next picture of the column `images`.
type Read = Callable[[bytes | str | None], bytes]


def content_of(parts: Sequence[Any], read: Read) -> tuple[str, tuple[bytes, ...]]:
    r"""The text and the pictures of a content.

    Args:
        parts: such as {"type": "text", "text": ...}, {"type": "image", "image": ...}
            and {"type": "image_url", "image_url": {"url": ...}}.
        read: returns the bytes of a picture; of None where a part has no value.

    Returns:
        The joined texts, with U+FFFC for each picture, and the pictures.

    Raises:
        PictureError: a part is something else; its number is named. Or as `read`.

    >>> parts = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    >>> text, pictures = content_of(parts, lambda source: b"GIF")
    >>> text == PICTURE + "What is this?", pictures
    (True, (b'GIF',))
    """
    texts, pictures, text = [], [], ""
    for number, part in enumerate(parts, 1):
        try:
            found = _part(part, read)
        except PictureError as error:
            raise PictureError(f"part {number}: {error}") from error
        if isinstance(found, str):
            text += found
        else:
            texts.append(text)
            pictures.append(found)
            text = ""
    return with_texts([*texts, text], pictures)


def with_texts(
    texts: Sequence[str], pictures: Sequence[bytes]
) -> tuple[str, tuple[bytes, ...]]:
    """Joins texts by U+FFFC, one for each picture between them.

    Raises:
        PictureError: there are pictures, and a text has that character itself.
    """
    if pictures and any(PICTURE in text for text in texts):
        raise PictureError(
            "a text next to pictures must not contain U+FFFC, which stands for a "
            "picture; remove it from the text"
        )
    return PICTURE.join(texts), tuple(pictures)


def _part(part: Any, read: Read) -> str | bytes:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise PictureError(
            f"must be an object with a type, such as 'text'; got {type(part).__name__}"
        )
    if kind in TEXTS:
        text = part.get(TEXTS[kind])
        if not isinstance(text, str):
            raise PictureError(
                f"of type {kind!r} must have a {TEXTS[kind]!r} of text; got "
                f"{type(text).__name__}"
            )
        _check_keys(part, kind, TEXTS[kind])
        return text
    if kind not in PICTURES:
        raise PictureError(
            f"must be a text or a picture; got a part of type {kind!r:.80}"
        )
    given = [key for key in PICTURES[kind] if part.get(key) is not None]
    if len(given) > 1:
        raise PictureError(f"has {' and '.join(given)}; give one of them")
    _check_keys(part, kind, *PICTURES[kind])
    if not given:
        return read(None)
    value = part[given[0]]
    if given[0] == "base64" and isinstance(value, str):
        value = f"data:;base64,{value}"
    return read(source_of(value))


def _check_keys(part: Mapping[str, Any], kind: str, *known: str) -> None:
    """Refuses what a part has besides the keys of its type."""
    every = {*TEXTS.values(), *(k for keys in PICTURES.values() for k in keys), *OTHERS}
    for key in sorted(every.difference(known)):
        if part.get(key) not in (None, ""):
            raise PictureError(
                f"of type {kind!r} has the key {key!r}, which is not read there; write "
                "each text and each picture as a part of its own; the model's image "
                "processor decides the size of pictures"
            )


def data_url(picture: bytes) -> str:
    """The data: URL of a picture's file.

    >>> data_url(b"GIF89a")
    'data:image/gif;base64,R0lGODlh'
    """
    others = "application/octet-stream"
    kind = next((kind for mark, kind in KINDS if picture.startswith(mark)), others)
    return f"data:{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def source_of(value: Any) -> bytes | str:
    """The source of a picture, for `read_picture`, as data sets write it.

    Args:
        value: bytes; a path or a URL; {"bytes", "path"} as in Hugging Face's data sets,
            where the path only names the bytes; or {"url"} as in OpenAI's chats.

    Raises:
        PictureError: it is something else.

    >>> source_of({"bytes": None, "path": "a.png"}), source_of({"url": "data:,GIF"})
    ('a.png', 'data:,GIF')
    """
    if isinstance(value, Mapping):
        given = [value.get(key) for key in ("bytes", "path", "url")]
        value = next((each for each in given if each is not None), None)
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    if not isinstance(value, bytes | str):
        raise PictureError(
            "a picture must be a path, bytes, a data: URL, or an object with bytes or "
            f"path; got {type(value).__name__}"
        )
    return value
