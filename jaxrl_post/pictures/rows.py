"""Pictures in the rows of data sets: in parts of messages, or in a column of their own.

TRL and verl write pictures as a column `images`, and places for them in messages: parts
{"type": "image"} without a value, or `<image>` in a text. Without any place, TRL shows
them before the first message of the user.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.messages import PICTURE
from jaxrl_post.pictures.contents import (
    PICTURES,
    content_of,
    source_of,
    with_texts,
)
from jaxrl_post.pictures.errors import PictureError
from jaxrl_post.pictures.reading import checked

__all__ = ["COLUMNS", "has_pictures", "read_row"]

# Columns of pictures, and the place of one in a text.
COLUMNS = ("images", "image")
PLACE = "<image>"
# A column `image` of other data may name a container, for example.
SUFFIXES = (
    ".avif", ".bmp", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpeg", ".jpg", ".png",
    ".ppm", ".svg", ".tif", ".tiff", ".webp",
)  # fmt: skip
# Keys of a message's speaker and of its content: our own, and ShareGPT's.
KEYS = (("role", "content"), ("from", "value"))
ASSISTANTS = ("assistant", "gpt", "function_call")
USERS = ("user", "human")


def has_pictures(row: Mapping[str, Any], fields: Sequence[str]) -> bool:
    """Whether `read_row` changes a row.

    Args:
        row: of a data set.
        fields: as for `read_row`.

    >>> has_pictures({"prompt": "Hi!"}, ["prompt"])
    False
    >>> parts = [{"type": "text", "text": "Hi!"}]
    >>> has_pictures({"prompt": [{"role": "user", "content": parts}]}, ["prompt"])
    True
    """
    if _column(row, fields) is not None:
        return True
    return any(
        isinstance(turn.get(key), list)
        for field in fields
        for turn in _turns(row.get(field))
        for _, key in KEYS
    )


def read_row(
    row: Mapping[str, Any], fields: Sequence[str], root: Path
) -> dict[str, Any]:
    """A row whose messages have texts and pictures in place of parts.

    Args:
        row: of a data set.
        fields: of messages; the first may also be a prompt's text.
        root: folder of the files that a row names.

    Returns:
        The row. A content is a text, with U+FFFC for each picture, and a message with
        pictures has them as `pictures`, a tuple of bytes, each decoded once to see
        whether it can be. A column of pictures is None.

    Raises:
        PictureError: names the field, the message and the part that is bad.
    """
    name = _column(row, fields)
    row, pictures = _without_column(row, name, root)
    places: dict[str, int] = {}
    for field in fields:
        left = iter(pictures)
        value = row.get(field)
        if isinstance(value, str) and name is not None and field == fields[0]:
            value = [{"role": "user", "content": value}]
        if not _turns(value):
            continue
        turns = [
            _turn(
                turn if name is None else _with_parts(turn),
                *(f"field {field!r}, message {number}", left, root),
            )
            for number, turn in enumerate(_listed(value), 1)
        ]
        row[field] = turns if isinstance(value, list) else turns[0]
        places[field] = len(pictures) - len(list(left))
        _check_places(field, turns, name is not None)
    if not pictures:
        return row
    for field, count in places.items():
        if count not in (0, len(pictures)):
            raise PictureError(
                f"field {field!r} has places for {count} pictures, and the row has "
                f"{len(pictures)}; write {PLACE} or a part of type 'image' once for "
                "each"
            )
    if not any(places.values()):
        _before_the_user(row, places, pictures)
    return row


def _without_column(
    row: Mapping[str, Any], name: str | None, root: Path
) -> tuple[dict[str, Any], list[bytes]]:
    """A row without its column of pictures, and the pictures."""
    if name is None:
        return dict(row), []
    found = []
    if all(_looks_so(row.get(each)) for each in COLUMNS):
        raise PictureError("fields 'images' and 'image' both have pictures; keep one")
    for number, value in enumerate(_values(row[name]), 1):
        where = f"field {name!r}, picture {number}"
        try:
            found.append(checked(source_of(value), root))
        except PictureError as error:
            raise PictureError(
                f"{where}: {error}; drop or rename the field if it has no pictures"
            ) from error
    return {**row, name: None}, found


def _column(row: Mapping[str, Any], fields: Sequence[str]) -> str | None:
    """The column of pictures, if the row has one.

    Its values look so, or a message has a place for them, or it is a list or a text by
    the name `images`.
    """
    for name in COLUMNS:
        value = row.get(name)
        named = name == "images" and value and isinstance(value, list | str | Mapping)
        if named or _looks_so(value):
            return name
    given = sorted(
        (name for name in COLUMNS if name in row),
        key=lambda name: not _values(row[name]),
    )
    return given[0] if given and _has_place(row, fields) else None


def _has_place(row: Mapping[str, Any], fields: Sequence[str]) -> bool:
    """Whether a message or the prompt has a place for a picture of the column."""
    contents = [row[fields[0]]] if isinstance(row.get(fields[0]), str) else []
    for field in fields:
        for turn in _turns(row.get(field)):
            for _, key in KEYS:
                contents += _listed(turn.get(key))
    return any(
        PLACE in each
        if isinstance(each, str)
        else isinstance(each, Mapping)
        and (
            PLACE in str(each.get("text"))
            or (
                each.get("type") == "image"
                and not any(each.get(key) for key in PICTURES["image"])
            )
        )
        for each in contents
    )


def _check_places(field: str, turns: Sequence[Any], column: bool) -> None:
    """Refuses places that no picture has taken, of a row that shows any.

    Without a column and without pictures in parts, a text may have this word.
    """
    seen = column or any(turn.get("pictures") for turn in _turns(turns))
    for number, turn in enumerate(turns, 1):
        for _, key in KEYS if isinstance(turn, Mapping) else ():
            text = turn.get(key)
            if seen and isinstance(text, str) and PLACE in text:
                raise PictureError(
                    f"field {field!r}, message {number}: has a place {PLACE} for which "
                    "there is no picture; give one, or remove the place"
                )


def _values(column: Any) -> list[Any]:
    """The values of a column: a list's, or the only one."""
    return [] if column is None else _listed(column)


def _looks_so(value: Any) -> bool:
    """Whether a column has pictures, by the look of its values."""
    if isinstance(value, list):
        return any(map(_looks_so, value))
    if isinstance(value, Mapping):
        return "bytes" in value or "path" in value
    if isinstance(value, str):
        lower = re.split("[?#]", value.strip().lower())[0]
        return lower.startswith("data:") or lower.endswith(SUFFIXES)
    return isinstance(value, bytes)


def _turn(
    turn: Any, where: str, left: Iterator[bytes], root: Path
) -> dict[str, Any] | Any:
    """A message whose content is a text; takes its pictures from those that are left.

    Values that are no messages stay as they are: their reader refuses them.
    """
    if not isinstance(turn, Mapping):
        return turn
    for speaker, key in KEYS:
        content = turn.get(key)
        if not isinstance(content, list | str):
            continue
        try:
            if isinstance(content, list):
                text, pictures = content_of(
                    content, lambda source: _given(source, left, root)
                )
            else:
                text, pictures = _placed(content, left)
        except PictureError as error:
            raise PictureError(f"{where}: {error}") from error
        if pictures and turn.get(speaker) in ASSISTANTS:
            raise PictureError(
                f"{where}: a turn of the assistant must be text, which is all that a "
                "model writes; got a picture; move it to a message of the user"
            )
        return {**turn, key: text} | ({"pictures": pictures} if pictures else {})
    return turn


def _with_parts(turn: Any) -> Any:
    """A message in whose texts of parts each place is a part of its own."""
    content = turn.get("content") if isinstance(turn, Mapping) else None
    if not isinstance(content, list):
        return turn
    parts: list[Any] = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or PLACE not in text:
            parts.append(part)
            continue
        first, *others = text.split(PLACE)
        parts.append({**part, "text": first})
        for each in others:
            parts += [{"type": "image"}, {**part, "text": each}]
    return {**turn, "content": parts}


def _given(source: bytes | str | None, left: Iterator[bytes], root: Path) -> bytes:
    found = next(left, None) if source is None else checked(source, root)
    if found is None:
        raise PictureError(
            "has no picture, and the column 'images' has none left for it; give one"
        )
    return found


def _placed(text: str, left: Iterator[bytes]) -> tuple[str, tuple[bytes, ...]]:
    """A text with the next pictures in its places, as long as there are any."""
    texts, pictures = [], []
    rest = text
    while PLACE in rest and (picture := next(left, None)) is not None:
        before, _, rest = rest.partition(PLACE)
        texts.append(before)
        pictures.append(picture)
    return with_texts([*texts, rest], pictures)


def _before_the_user(
    row: dict[str, Any], fields: Mapping[str, int], pictures: Sequence[bytes]
) -> None:
    """Shows pictures without places before the first text of the user."""
    shown = False
    for field in fields:
        if any(turn.get("pictures") for turn in _turns(row[field])):
            raise PictureError(
                f"field {field!r} has pictures in its parts, and no part for the "
                f"{len(pictures)} of the row's own field; give all of them in one form"
            )
    for field in fields:
        for turn in _turns(row[field]):
            speaker, key = next((k for k in KEYS if k[1] in turn), KEYS[0])
            if turn.get(speaker) not in USERS or not isinstance(turn.get(key), str):
                continue
            try:
                with_texts([turn[key]], pictures)
            except PictureError as error:
                raise PictureError(f"field {field!r}: {error}") from error
            turn |= {
                key: PICTURE * len(pictures) + turn[key],
                "pictures": tuple(pictures),
            }
            shown = True
            break
    if not shown:
        raise PictureError(
            f"the row has {len(pictures)} pictures, and no message of the user shows "
            "them; give a field of messages, or drop the column"
        )


def _turns(value: Any) -> list[Any]:
    """The messages of a value: of a list, or one that stands alone."""
    return [each for each in _listed(value) if isinstance(each, Mapping)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
