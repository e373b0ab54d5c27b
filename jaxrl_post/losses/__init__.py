"""Losses as pure functions of arrays; nothing here knows a model or a configuration.

Arrays come first, hyperparameters are keyword-only, and every per-token function takes
the mask of the tokens that count: values at other tokens, NaN and -inf included, reach
neither the value nor the gradient. Results are float32 for every float dtype of input.
NumPy arrays work like JAX arrays, and a Python number is broadcast to an array. Arrays
whose shapes do not match raise an error; they are not broadcast (`arguments`).
Reduction is separate (`reduce`) and returns a `Metric`, so that accumulation over
microbatches is exact.

What a docstring does not describe has one meaning in all of them, per token:

    mask                bool, True where a token counts; the result is 0 elsewhere
    segment_ids         int in [0, length]; None for one sequence per row
    policy_logprobs     log p (nats), the policy's; of a loss, differentiable
    proximal_logprobs   log q (nats), the trainer's before the batch's updates
    behavior_logprobs   the sampler's (nats); log q where a loss has no proximal ones
    advantages          any float dtype, held constant
    clip_low            in [0, 1]; the ratio is clipped at 1 - clip_low
    clip_high           >= 0; the ratio is clipped at 1 + clip_high

`answers` has the table of whole answers. `valid` is False where a sample has no reward;
None means that all have one. All raise ValueError where a hyperparameter is out of its
range.
"""

import sys

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
    implicit,
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
    "implicit",
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

# Its folders keep files apart. The names by which the documentation calls a module are
# names to import from, too: `from jaxrl_post.losses.advantages import group_mean`.
sys.modules.update({f"{__name__}.{name}": globals()[name] for name in __all__})
