"""Decoding with the trainer's own arrays: continuous batching over fixed slots."""

from jaxrl_post.sampler.engine import Engine, EngineConfig
from jaxrl_post.sampler.requests import Completion, Request, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "Request", "SamplingParams"]
