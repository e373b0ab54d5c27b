"""Plans of a step on a TPU slice, made without one: memory, work and seconds."""

from jaxrl_post.programs.planning.plan import plan

__all__ = ["plan"]
