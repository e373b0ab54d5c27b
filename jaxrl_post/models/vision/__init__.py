"""Vision towers: pictures in, embeddings of the language model out.

`arrange` puts the patches of pictures into arrays of one static size, on the host;
`tower` maps them to one embedding for each token of a picture, and, for some models, to
further embeddings that the first layers of the decoder add. `row_pictures` makes the
arrays of the pictures in rows of ids, and `with_pictures` the decoder's inputs.
"""

from jaxrl_post.models.rope import mrope_axes
from jaxrl_post.models.vision.pictures import Pictures, arrange, bucket
from jaxrl_post.models.vision.rows import (
    PictureTokens,
    RowPictures,
    for_devices,
    row_pictures,
    with_pictures,
)
from jaxrl_post.models.vision.tower import VisionOutput, tower
from jaxrl_post.models.vision_config import VisionConfig
from jaxrl_post.models.vision_params import VisionParams, vision_specs

__all__ = [
    "PictureTokens",
    "Pictures",
    "RowPictures",
    "VisionConfig",
    "VisionOutput",
    "VisionParams",
    "arrange",
    "bucket",
    "for_devices",
    "mrope_axes",
    "row_pictures",
    "tower",
    "vision_specs",
    "with_pictures",
]
