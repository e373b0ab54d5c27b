"""Decoder-only language models as pure functions, and their checkpoints."""

from jaxrl_post.models.cache import KVCache
from jaxrl_post.models.config import (
    Head,
    LatentAttention,
    MixtureOfExperts,
    ModelConfig,
    QueryScaling,
    RopeScaling,
)
from jaxrl_post.models.decoder import (
    forward,
    forward_with_routing,
    logits,
    unembedding,
    values,
)
from jaxrl_post.models.errors import CheckpointError, CheckpointWarning
from jaxrl_post.models.experts import Routing
from jaxrl_post.models.hf import load_pretrained, save_pretrained
from jaxrl_post.models.lora import LoRAConfig, adapted, initialize_adapter, merged
from jaxrl_post.models.orbax_files import save_orbax
from jaxrl_post.models.params import DecoderParams, param_specs
from jaxrl_post.models.peft_files import load_adapter, save_adapter
from jaxrl_post.models.quantized import quantize
from jaxrl_post.models.spec import ParamSpec, abstract, initialize

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "DecoderParams",
    "Head",
    "KVCache",
    "LatentAttention",
    "LoRAConfig",
    "MixtureOfExperts",
    "ModelConfig",
    "ParamSpec",
    "QueryScaling",
    "RopeScaling",
    "Routing",
    "abstract",
    "adapted",
    "forward",
    "forward_with_routing",
    "initialize",
    "initialize_adapter",
    "load_adapter",
    "load_pretrained",
    "logits",
    "merged",
    "param_specs",
    "quantize",
    "save_adapter",
    "save_orbax",
    "save_pretrained",
    "unembedding",
    "values",
]
