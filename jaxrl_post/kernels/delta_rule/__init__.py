"""The gated delta rule, over packed trees in chunks, and token by token."""

from jaxrl_post.kernels.delta_rule.api import (
    DeltaInputs,
    delta_continued,
    delta_rule,
    delta_step,
)
from jaxrl_post.kernels.delta_rule.plan import CHUNK, DeltaPlan, plan_rows, plan_trees
from jaxrl_post.kernels.delta_rule.rows import Places, delta_rows

__all__ = [
    "CHUNK",
    "DeltaInputs",
    "DeltaPlan",
    "Places",
    "delta_continued",
    "delta_rows",
    "delta_rule",
    "delta_step",
    "plan_rows",
    "plan_trees",
]
