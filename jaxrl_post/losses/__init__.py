"""Losses as pure functions of arrays; nothing here knows a model or a configuration.

Arrays come first, hyperparameters are keyword-only, and every per-token function takes
the mask of the tokens that count: values at other tokens, NaN and -inf included, reach
neither the value nor the gradient. Results are float32 for every float dtype of input.
NumPy arrays work like JAX arrays, and a Python number is broadcast to an array. Arrays
whose shapes do not match raise an error; they are not broadcast (`arguments`).
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
