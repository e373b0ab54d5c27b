"""Pictures on the host: read, checked, resized and cut into patches.

A picture is read once (`read_picture`), and one processor turns it into patches for
the sampler and for the trainer (`PictureProcessor`). No module here imports jax, so
worker processes of environments can use it.
"""

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
