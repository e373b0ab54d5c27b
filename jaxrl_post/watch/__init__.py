"""Finds what a reward overlooks: adversarial answers, and what each of them earns."""

from jaxrl_post.watch.attacks import ATTACKS, Attack, Known
from jaxrl_post.watch.redteam import Earned, EpisodeReward, earned, known_tasks

__all__ = [
    "ATTACKS",
    "Attack",
    "Earned",
    "EpisodeReward",
    "Known",
    "earned",
    "known_tasks",
]
