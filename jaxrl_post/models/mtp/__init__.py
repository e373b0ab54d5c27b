"""The layer of a model for multi-token prediction (MTP), which guesses a token ahead.

With h(t) the model's final hidden state at token t, the layer reads for each token

    x(t) = W [norm(embedding of t); norm(h(t - 1))],

runs one decoder layer over x, with keys and values of its own, and a norm; the model's
own head then gives the logits of token t + 1. So it needs the model's hidden state at a
token and the token that was sampled there. Before the first token h is 0. For further
guesses it reads its own output in place of h.

References:
    Gloeckle et al., Better & Faster Large Language Models via Multi-token Prediction,
    arXiv:2404.19737. DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, section 2.2.
"""

from jaxrl_post.models.mtp.layer import (
    MTPParams,
    MTPTokens,
    hidden_spec,
    mtp_config,
    mtp_specs,
    with_mtp_layer,
)

__all__ = [
    "MTPParams",
    "MTPTokens",
    "hidden_spec",
    "mtp_config",
    "mtp_specs",
    "with_mtp_layer",
]
