"""Linear attention with decay, over packed trees in chunks, and token by token."""

from jaxrl_post.kernels.linear_attention.api import (
    linear_attention,
    linear_continued,
    linear_step,
)
from jaxrl_post.kernels.linear_attention.inputs import LinearInputs
from jaxrl_post.kernels.linear_attention.opened import OpenMemory, linear_open
from jaxrl_post.kernels.linear_attention.plan import (
    CHUNK,
    StatePlan,
    plan_rows,
    plan_trees,
)
from jaxrl_post.kernels.linear_attention.rows import Places, linear_rows

__all__ = [
    "CHUNK",
    "LinearInputs",
    "OpenMemory",
    "Places",
    "StatePlan",
    "linear_attention",
    "linear_continued",
    "linear_open",
    "linear_rows",
    "linear_step",
    "plan_rows",
    "plan_trees",
]
