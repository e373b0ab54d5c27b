"""Distillation of the demo's task; the teacher is to be given."""

from dataclasses import replace

from jaxrl_post.train.config import AlgorithmConfig, RLConfig
from launch.recipes.demo import demo

__all__ = ["distillation"]


def distillation() -> RLConfig:
    """The default of `launch.distill`: the demo's samples, graded by a teacher."""
    return replace(
        demo(),
        run_dir="runs/distill",
        algorithm=AlgorithmConfig(name="distillation"),
    )
