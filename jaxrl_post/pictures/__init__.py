"""Pictures on the host: read, checked, resized and cut into patches.

A picture is read once (`read_picture`), and one processor turns it into patches for
the sampler and for the trainer (`PictureProcessor`). No module here imports jax, so
worker processes of environments can use it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_post.pictures.errors import PictureError
    from jaxrl_post.pictures.eyes import Eyes, Shown
    from jaxrl_post.pictures.numbered import Picture, expanded, number
    from jaxrl_post.pictures.processor import PictureProcessor
    from jaxrl_post.pictures.reading import PictureLimits, picture_size, read_picture

__all__ = [
    "Eyes",
    "Picture",
    "PictureError",
    "PictureLimits",
    "PictureProcessor",
    "Shown",
    "expanded",
    "number",
    "picture_size",
    "read_picture",
]

_MODULES = {
    "Eyes": "eyes",
    "Picture": "numbered",
    "PictureError": "errors",
    "PictureLimits": "reading",
    "PictureProcessor": "processor",
    "Shown": "eyes",
    "expanded": "numbered",
    "number": "numbered",
    "picture_size": "reading",
    "read_picture": "reading",
}


def __getattr__(name: str) -> Any:
    # Worker processes of environments start without numpy, in a fraction of a second.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
