"""Log-probability and entropy of tokens: one definition for trainer and sampler."""

from jaxrl_post.kernels.token_logprob.api import (
    Scaling,
    TokenLogprob,
    tile_rows,
    token_logprob,
)
from jaxrl_post.kernels.token_logprob.reference import exponentials, from_logits
from jaxrl_post.kernels.token_logprob.rows import ExactLogits

__all__ = [
    "ExactLogits",
    "Scaling",
    "TokenLogprob",
    "exponentials",
    "from_logits",
    "tile_rows",
    "token_logprob",
]
