"""Losses as pure functions of arrays; nothing here knows a model or a configuration.

Arrays come first, hyperparameters are keyword-only, and every per-token function takes
the mask of the tokens that count: what stands elsewhere, NaN and -inf included, reaches
neither the value nor the gradient. Values are float32 whatever the input's float dtype.
NumPy arrays do as well as JAX's, and a Python number stands for an array of it. Arrays
of shapes that do not fit each other raise, instead of being broadcast (`arguments`).
Reduction is separate (`reduce`) and returns a `Metric`, so that accumulation over
microbatches is exact.
"""

from jaxrl_post.losses import (
    arguments,
    correction,
    diagnostics,
    distill,
    distribution_kl,
    entropy,
    kl,
    logprobs,
    policy,
    ratios,
    reduce,
    rejection,
    sequences,
    staleness,
    supervised,
    trust_region,
    value,
)
from jaxrl_post.losses.answers import (
    anchored,
    margins,
    preference,
    reference_free,
    reward_model,
    unpaired,
)
from jaxrl_post.losses.credit import (
    advantages,
    baselines,
    recurrence,
    returns,
    shaping,
    whitening,
)

__all__ = [
    "advantages",
    "anchored",
    "arguments",
    "baselines",
    "correction",
    "diagnostics",
    "distill",
    "distribution_kl",
    "entropy",
    "kl",
    "logprobs",
    "margins",
    "policy",
    "preference",
    "ratios",
    "recurrence",
    "reduce",
    "reference_free",
    "rejection",
    "returns",
    "reward_model",
    "sequences",
    "shaping",
    "staleness",
    "supervised",
    "trust_region",
    "unpaired",
    "value",
    "whitening",
]
