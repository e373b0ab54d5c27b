"""Runs programs that a model wrote, in a fresh, limited place; imports no jax."""

from jaxrl_post.envs.sandbox.limits import Limits, Outcome, SandboxError
from jaxrl_post.envs.sandbox.places import Place
from jaxrl_post.envs.sandbox.sandbox import Sandbox, check_requirement, find

__all__ = [
    "Limits",
    "Outcome",
    "Place",
    "Sandbox",
    "SandboxError",
    "check_requirement",
    "find",
]
