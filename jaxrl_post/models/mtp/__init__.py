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

import dataclasses

import jax.numpy as jnp
from flax import struct

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.layers import norm, project
from jaxrl_post.models.params import DecoderParams, LayerParams, text_specs
from jaxrl_post.models.spec import ParamSpec, matrix, zeros
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "MTPParams",
    "MTPTokens",
    "hidden_spec",
    "mtp_config",
    "mtp_specs",
    "with_mtp_layer",
]


@struct.dataclass
class MTPParams[Leaf]:
    """Parameters of a layer for multi-token prediction.

    Attributes:
        embedding_norm: [hidden], norm of the token's embedding.
        hidden_norm: [hidden], norm of the hidden state before the token.
        fusion: [2 hidden, hidden], of both, the embedding first.
        layers: the layer, a tuple of one.
        final_norm: [hidden].
    """

    embedding_norm: Leaf
    hidden_norm: Leaf
    fusion: Leaf
    layers: tuple[LayerParams[Leaf], ...]
    final_norm: Leaf


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Returns the config of the layer: like the model's last layer with full attention.

    Raises:
        ValueError: the model has no such layer.

    >>> config = ModelConfig("llama", 32, 16, 24, 3, num_heads=2, num_kv_heads=1)
    >>> mtp_config(config).num_layers
    1
    """
    specs = [config.layer(index) for index in range(config.num_layers)]
    whole = [s for s in specs if s.makes_keys and s.window is None]
    if not whole:
        raise ValueError(
            f"mtp_config: {config.model_type} has no layer with full attention and "
            "keys of its own, whose parts the layer would have"
        )
    return dataclasses.replace(
        config,
        num_layers=1,
        layers=(whole[-1],),
        recurrence=None,
        experts=config.experts if whole[-1].has("experts") else None,
        vision=None,
        head="lm",
    )


def mtp_specs(config: ModelConfig) -> MTPParams[ParamSpec]:
    """Returns the parameters' shapes, logical axes and initialisers.

    Args:
        config: of `mtp_config`.
    """
    specs, hidden = text_specs(config), config.hidden_size
    return MTPParams(
        embedding_norm=specs.final_norm,
        hidden_norm=specs.final_norm,
        fusion=matrix(
            (2 * hidden, hidden), ("embed", "rank"), scale=config.initializer_range
        ),
        layers=specs.layers,
        final_norm=specs.final_norm,
    )


def hidden_spec(config: ModelConfig) -> ParamSpec:
    """Spec of the hidden state before a sequence's next token."""
    return zeros((config.hidden_size,), ("hidden",))


def with_mtp_layer[Leaf](
    params: DecoderParams[Leaf], mtp: MTPParams[Leaf]
) -> DecoderParams[Leaf]:
    """Returns the layer as a decoder, with the embedding and the head of its model."""
    return DecoderParams(
        embedding=params.embedding,
        layers=mtp.layers,
        final_norm=mtp.final_norm,
        unembedding=params.unembedding,
    )


@struct.dataclass
class MTPTokens:
    """Tokens, and the hidden states before them: what the layer reads.

    Attributes:
        tokens: int32 ids.
        hidden: the model's final hidden states at the tokens before, or the layer's.
        params: of the layer.
        config: of `mtp_config`; static.
    """

    tokens: Int[Array, "batch length"]
    hidden: Float[Array, "batch length hidden"]
    params: MTPParams[Array]
    config: ModelConfig = struct.field(pytree_node=False)

    def embedded(
        self, embedded: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens hidden"]:
        """Joins the tokens' embeddings with the hidden states."""
        before = self.hidden.reshape(embedded.shape).astype(embedded.dtype)
        both = [
            norm(self.config, embedded, self.params.embedding_norm),
            norm(self.config, before, self.params.hidden_norm),
        ]
        return project(jnp.concatenate(both, axis=-1), self.params.fusion)
