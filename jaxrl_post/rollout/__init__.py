"""Rollouts: samples episodes of tasks and has the environment reward their turns."""

from jaxrl_post.rollout.collector import Collector, Sampler
from jaxrl_post.rollout.episode import Episode, Group, Turn
from jaxrl_post.rollout.flight import Limits
from jaxrl_post.rollout.queue import GroupQueue

__all__ = ["Collector", "Episode", "Group", "GroupQueue", "Limits", "Sampler", "Turn"]
