"""Environments of other people, run through their protocols; imports no jax."""

from jaxrl_post.envs.protocols.nemo_gym import NemoGym
from jaxrl_post.envs.protocols.openenv import OpenEnv
from jaxrl_post.envs.protocols.verifiers import Verifiers

__all__ = ["NemoGym", "OpenEnv", "Verifiers"]
