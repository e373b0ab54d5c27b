"""Vision towers: pictures in, embeddings of the language model out.

`arrange` puts the patches of pictures into arrays of one static size, on the host;
`tower` maps them to one embedding for each token of a picture, and, for some models, to
further embeddings that the first layers of the decoder add. `mrope_positions` gives the
tokens of a row their positions in time, row and column.
"""

from jaxrl_post.models.rope import mrope_axes
from jaxrl_post.models.vision.pictures import Pictures, arrange, bucket
from jaxrl_post.models.vision.positions import PictureSpan, mrope_positions
from jaxrl_post.models.vision.rows import PictureTokens
from jaxrl_post.models.vision.tower import VisionOutput, tower
from jaxrl_post.models.vision_config import VisionConfig
from jaxrl_post.models.vision_params import VisionParams, vision_specs

__all__ = [
    "PictureSpan",
    "PictureTokens",
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
