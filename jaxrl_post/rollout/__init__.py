"""Rollouts: samples episodes of tasks and has the environment reward their turns."""

from jaxrl_post.rollout.buffer import Admission, Buffer
from jaxrl_post.rollout.collector import Collector, EpisodeSource
from jaxrl_post.rollout.dialogue import Dialogue
from jaxrl_post.rollout.episode import Episode, Group, Turn
from jaxrl_post.rollout.flight import EpisodeLimits

__all__ = [
    "Admission",
    "Buffer",
    "Collector",
    "Dialogue",
    "Episode",
    "EpisodeLimits",
    "EpisodeSource",
    "Group",
    "Turn",
]
