"""Vision towers: pictures in, embeddings of the language model out.

`arrange` puts the patches of pictures into arrays of one static size, on the host;
`tower` maps them to one embedding for each token of a picture, and, for some models, to
further embeddings that the first layers of the decoder add. `mrope_positions` gives the
tokens of a row their positions in time, row and column.
"""

from jaxrl_post.models.vision.config import VisionConfig
from jaxrl_post.models.vision.params import VisionParams, vision_specs
from jaxrl_post.models.vision.pictures import Pictures, arrange, bucket
from jaxrl_post.models.vision.positions import PictureSpan, mrope_axes, mrope_positions
from jaxrl_post.models.vision.tower import VisionOutput, tower

__all__ = [
    "PictureSpan",
    "Pictures",
    "VisionConfig",
    "VisionOutput",
    "VisionParams",
    "arrange",
    "bucket",
    "mrope_axes",
    "mrope_positions",
    "tower",
    "vision_specs",
]
