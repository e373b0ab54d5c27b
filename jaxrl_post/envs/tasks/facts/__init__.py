"""Questions about invented people, whose answers stand in a small corpus."""

from jaxrl_post.envs.tasks.facts.environment import facts

__all__ = ["facts"]
