"""Samples from the policy with the trainer's arrays: continuous batching over slots.

The sampler is the part that generates completions, on the trainer's devices.
"""

from jaxrl_post.sampler.engine import Engine
from jaxrl_post.sampler.guessing import Draft
from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sampler.requests import Completion, Request, SamplingParams
from jaxrl_post.sampler.sizes import EngineConfig

__all__ = [
    "Completion",
    "Draft",
    "Engine",
    "EngineConfig",
    "Request",
    "Sampler",
    "SamplingParams",
]
