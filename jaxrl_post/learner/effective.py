"""Values that a run takes for options that are left at None."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxrl_post.algorithms import corrections
from jaxrl_post.config.algorithm import CorrectionConfig
from jaxrl_post.config.offline import PreferenceConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import RunConfig
from jaxrl_post.examples.preferences import preference_function
from jaxrl_post.learner.algorithm import algorithm_function

__all__ = ["effective"]

# Options, and the parameters that they may be of an algorithm's function.
OF_ALGORITHM = {
    "clip_low": ("clip_low", "ratio_low"),
    "clip_high": ("clip_high", "ratio_high"),
    "kl_estimator": ("kl_estimator",),
}
OF_LOSS = {
    "beta": ("beta",),
    "label_smoothing": ("label_smoothing",),
    "margin": ("target_margin",),
    "nll_weight": ("nll_weight",),
    "alpha": ("alpha",),
    "tau": ("tau",),
    "desirable_weight": ("desirable_weight",),
    "undesirable_weight": ("undesirable_weight",),
}
OF_CORRECTION = {name: (name,) for name in ("cap", "low", "high")}


def effective(config: RunConfig) -> dict[str, Any]:
    """Returns what options that are None become, by the whole name of the option.

    These are the defaults of the function that the algorithm, its correction or the
    preference loss names. An option that the function does not read is left out.

    >>> effective(RLConfig())["algorithm.clip_high"]
    0.2
    >>> effective(PreferenceConfig())
    {'loss.beta': 0.1, 'loss.label_smoothing': 0.0}
    """
    found = dict[str, Any]()
    if isinstance(config, RLConfig):
        chosen = config.algorithm
        found |= _defaults(
            algorithm_function(chosen), OF_ALGORITHM, "algorithm", chosen
        )
        kind = getattr(corrections, chosen.correction.kind, None)
        # Without options, an algorithm may have a correction of its own, or none.
        if kind is not None and chosen.correction != CorrectionConfig():
            found |= _defaults(
                kind, OF_CORRECTION, "algorithm.correction", chosen.correction
            )
    elif isinstance(config, PreferenceConfig):
        found |= _defaults(
            preference_function(config.loss), OF_LOSS, "loss", config.loss
        )
    return found


def _defaults(
    build: Callable[..., Any],
    options: Mapping[str, tuple[str, ...]],
    section: str,
    config: object,
) -> Iterator[tuple[str, Any]]:
    parameters = inspect.signature(build).parameters
    for option, names in options.items():
        if getattr(config, option) is not None:
            continue
        for name in names:
            if name in parameters:
                value = parameters[name].default
                value = getattr(value, "__name__", value)
                if value is not None and value is not inspect.Parameter.empty:
                    yield f"{section}.{option}", value
