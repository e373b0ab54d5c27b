"""Decoder-only language models as pure functions, and their checkpoints."""

from jaxrl_post.models.cache import KVCache
from jaxrl_post.models.config import Head, ModelConfig, RopeScaling
from jaxrl_post.models.decoder import (
    DecoderParams,
    forward,
    logits,
    param_specs,
    unembedding,
    values,
)
from jaxrl_post.models.errors import CheckpointError
from jaxrl_post.models.hf import load_pretrained, save_pretrained
from jaxrl_post.models.spec import ParamSpec, abstract, initialize

__all__ = [
    "CheckpointError",
    "DecoderParams",
    "Head",
    "KVCache",
    "ModelConfig",
    "ParamSpec",
    "RopeScaling",
    "abstract",
    "forward",
    "initialize",
    "load_pretrained",
    "logits",
    "param_specs",
    "save_pretrained",
    "unembedding",
    "values",
]
