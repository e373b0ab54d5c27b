"""Decoder-only language models as pure functions."""

from jaxrl_post.models.adapters.lora import (
    LoRAConfig,
    adapted,
    initialize_adapter,
    merged,
)
from jaxrl_post.models.adapters.quantized import quantize
from jaxrl_post.models.cache import KVCache
from jaxrl_post.models.config import (
    Head,
    HeadSpec,
    Indexer,
    LatentAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelConfig,
    PerLayerEmbedding,
    QueryScaling,
    RopeScaling,
)
from jaxrl_post.models.decoder import (
    forward,
    forward_with_experts,
    forward_with_routing,
)
from jaxrl_post.models.experts import RouterInputs, Routing
from jaxrl_post.models.layers import logits, unembedding, values
from jaxrl_post.models.params import DecoderParams, param_specs
from jaxrl_post.models.recurrences import GatedDelta, Mamba2, ShortConvolution
from jaxrl_post.models.spec import ParamSpec, abstract, initialize

__all__ = [
    "DecoderParams",
    "GatedDelta",
    "Head",
    "HeadSpec",
    "Indexer",
    "KVCache",
    "LatentAttention",
    "LayerSpec",
    "LoRAConfig",
    "Mamba2",
    "MixtureOfExperts",
    "ModelConfig",
    "ParamSpec",
    "PerLayerEmbedding",
    "QueryScaling",
    "RopeScaling",
    "RouterInputs",
    "Routing",
    "ShortConvolution",
    "abstract",
    "adapted",
    "forward",
    "forward_with_experts",
    "forward_with_routing",
    "initialize",
    "initialize_adapter",
    "logits",
    "merged",
    "param_specs",
    "quantize",
    "unembedding",
    "values",
]
