"""Pictures as JSON values, for checkpoints of unfinished samples."""

import base64
import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_post.pictures.numbered import Picture, number
from jaxrl_post.pictures.processor import PictureProcessor
from jaxrl_post.pictures.reading import pillow, read_picture

__all__ = ["from_json", "to_json"]


def to_json(picture: Picture) -> dict[str, Any]:
    """A JSON value from which `from_json` restores the picture exactly.

    >>> processor = PictureProcessor(patch_size=2, min_pixels=16)
    >>> white = number(np.full((4, 8, 3), 255, np.uint8), processor)
    >>> first, again = from_json(to_json(white))
    >>> first == white.first, again is white
    (True, True)
    """
    encoded = io.BytesIO()
    pillow("picture").Image.fromarray(picture.pixels).save(encoded, "PNG")
    return {
        "first": picture.first,
        "png": base64.b64encode(encoded.getvalue()).decode("ascii"),
        "processor": dataclasses.asdict(picture.processor),
    }


def from_json(value: Mapping[str, Any]) -> tuple[int, Picture]:
    """Restores what `to_json` made.

    Returns:
        The number that its first token had, and the picture, with a number of this
        process.
    """
    fields: dict[str, Any] = {
        name: tuple(field) if isinstance(field, list) else field
        for name, field in value["processor"].items()
    }
    pixels = read_picture(base64.b64decode(value["png"]))
    return value["first"], number(np.asarray(pixels), PictureProcessor(**fields))
