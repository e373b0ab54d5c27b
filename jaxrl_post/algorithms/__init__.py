"""Named algorithms: compositions of `jaxrl_post.losses` behind one contract."""

from jaxrl_post.algorithms import terms
from jaxrl_post.algorithms.objective import Algorithm, Objective, PolicyTerm, compose
from jaxrl_post.algorithms.policy_gradient import (
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    rloo,
)

__all__ = [
    "Algorithm",
    "Objective",
    "PolicyTerm",
    "cispo",
    "compose",
    "dapo",
    "dr_grpo",
    "grpo",
    "gspo",
    "rloo",
    "terms",
]
