"""Environments of other people, run through their protocols; imports no jax."""

from jaxrl_post.envs.protocols.nemo_gym import NemoGym
from jaxrl_post.envs.protocols.openenv import OpenEnv

__all__ = ["NemoGym", "OpenEnv"]
