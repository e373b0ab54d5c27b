"""Named algorithms: compositions of `jaxrl_post.losses` behind one contract."""

from jaxrl_post.algorithms import (
    corrections,
    dialects,
    pairs,
    preference,
    reference_free,
    reward_model,
    supervised,
    terms,
    unpaired,
)
from jaxrl_post.algorithms.objective import (
    Algorithm,
    Corrected,
    Correction,
    Objective,
    PolicyTerm,
    Predictions,
    compose,
)
from jaxrl_post.algorithms.policy_gradient import (
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    rloo,
)
from jaxrl_post.algorithms.token_credit import (
    distillation,
    ppo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    shared_backbone,
)
from jaxrl_post.algorithms.variants import dppo, gmpo, max_rl, sapo
from jaxrl_post.algorithms.whole_distributions import distribution_distillation

__all__ = [
    "Algorithm",
    "Corrected",
    "Correction",
    "Objective",
    "PolicyTerm",
    "Predictions",
    "cispo",
    "compose",
    "corrections",
    "dapo",
    "dialects",
    "distillation",
    "distribution_distillation",
    "dppo",
    "dr_grpo",
    "gmpo",
    "grpo",
    "gspo",
    "max_rl",
    "pairs",
    "ppo",
    "preference",
    "reference_free",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reward_model",
    "rloo",
    "sapo",
    "shared_backbone",
    "supervised",
    "terms",
    "unpaired",
]
