"""Finds what a reward overlooks: adversarial answers, and what each of them earns."""

from jaxrl_post.watch.attacks import ATTACKS, Attack, Known
from jaxrl_post.watch.redteam import Earned, Judged, earned, known_tasks

__all__ = ["ATTACKS", "Attack", "Earned", "Judged", "Known", "earned", "known_tasks"]
