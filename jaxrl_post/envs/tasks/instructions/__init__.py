"""Instructions whose fulfilment a program can verify."""

from jaxrl_post.envs.tasks.instructions.constraints import Constraint
from jaxrl_post.envs.tasks.instructions.environment import Instructions

__all__ = ["Constraint", "Instructions"]
