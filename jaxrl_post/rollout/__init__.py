"""Episodes: prompts in, rewarded token sequences out."""

from jaxrl_post.rollout.types import Generator, Group, Rollout

__all__ = ["Generator", "Group", "Rollout"]
