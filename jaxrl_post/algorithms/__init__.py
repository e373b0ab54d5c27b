"""Named algorithms: compositions of `jaxrl_post.losses` behind one contract.

What a docstring does not describe has one meaning in all of them:

    clip_low         in [0, 1]; the ratio is clipped at 1 - clip_low
    clip_high        >= 0; the ratio is clipped at 1 + clip_high
    dual_clip        > 1, or None; see `policy.clipped_surrogate`
    ddof             1 or 0; see `advantages.group_normalized`
    epsilon          >= 0, added to the group's standard deviation
    label_smoothing  in [0, 0.5), share of labels taken to be wrong
    correction       of the sampler's mismatch, one of `corrections`; None for none
    **shared         `SharedOptions`; of PPO, `RewardOptions`

All raise ValueError where a hyperparameter is out of its range.
"""

from jaxrl_post.algorithms import (
    anchored,
    contract,
    corrections,
    dialects,
    kl_weights,
    pairs,
    preference,
    reference_free,
    reward_model,
    supervised,
    terms,
    unpaired,
)
from jaxrl_post.algorithms.composition import SharedOptions, compose
from jaxrl_post.algorithms.objective import (
    Algorithm,
    Corrected,
    Correction,
    Objective,
    PolicyTerm,
    Predictions,
)
from jaxrl_post.algorithms.policy_gradient import (
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    rloo,
)
from jaxrl_post.algorithms.sequence_weights import (
    clipped_rloo,
    gdpo,
    lite_ppo,
    luspo,
    opo,
    remax,
    vespo,
)
from jaxrl_post.algorithms.token_credit import (
    distillation,
    ppo,
    prime,
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
    "SharedOptions",
    "anchored",
    "cispo",
    "clipped_rloo",
    "compose",
    "contract",
    "corrections",
    "dapo",
    "dialects",
    "distillation",
    "distribution_distillation",
    "dppo",
    "dr_grpo",
    "gdpo",
    "gmpo",
    "grpo",
    "gspo",
    "kl_weights",
    "lite_ppo",
    "luspo",
    "max_rl",
    "opo",
    "pairs",
    "ppo",
    "preference",
    "prime",
    "reference_free",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "reward_model",
    "rloo",
    "sapo",
    "shared_backbone",
    "supervised",
    "terms",
    "unpaired",
    "vespo",
]
