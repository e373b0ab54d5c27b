"""Builds the algorithm and the correction that a configuration names."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jaxrl_post import algorithms
from jaxrl_post.algorithms import (
    Algorithm,
    SharedOptions,
    contract,
    corrections,
    kl_weights,
)
from jaxrl_post.algorithms.composition import shared_names
from jaxrl_post.algorithms.corrections import Correction
from jaxrl_post.algorithms.objective import Divergence, Reduction
from jaxrl_post.algorithms.whole_distributions import (
    distribution_distillation,
    top_k_forward_kl,
)
from jaxrl_post.config.algorithm import (
    ALGORITHMS,
    AlgorithmConfig,
    CorrectionConfig,
    DistillConfig,
)
from jaxrl_post.config.checks import (
    check_algorithm,
    check_correction,
    reward_weights,
)
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.losses import advantages, kl, reduce
from jaxrl_post.losses import distill as divergences
from jaxrl_post.records.own import loaded, made
from jaxrl_post.specs import named_parameters

__all__ = ["algorithm_function", "make_algorithm", "make_correction"]

ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "k3_plus": kl.k3_plus}
OPTION = "--algorithm.name"
NO_CRITIC = CriticConfig()
NO_TEACHER = DistillConfig()
NO_PRM = PrmConfig()


def make_algorithm(
    config: AlgorithmConfig,
    max_tokens: int,
    critic: CriticConfig = NO_CRITIC,
    distill: DistillConfig = NO_TEACHER,
    prm: PrmConfig = NO_PRM,
) -> Algorithm:
    """Builds the algorithm that a configuration names.

    The name is a function of `jaxrl_post.algorithms`, or `module:function` of
    one that returns an `Algorithm`. The function is called with those options that are
    given, by the names of its parameters, and with what stands behind a question mark:
    `my_module:my_algorithm?temperature=2`. A parameter `denominator` without a default
    is the generation budget.

    Args:
        config: name and hyperparameters.
        max_tokens: generation budget, in tokens.
        critic: the critic's options, for an algorithm with a critic.
        distill: the options of distillation.
        prm: the options of an implicit reward model, for an algorithm with one.

    Raises:
        ConfigError: there is no such function, it raises, or it returns something
            else; what it returns breaks the contract (`algorithms.contract`); an option
            is unused by the algorithm, out of its range, or missing.
    """
    check_algorithm(config, critic, distill, prm)
    built = _built(config, max_tokens, distill, _of_sections(critic, prm))
    found = _scaled(built, config)
    name = config.name.partition("?")[0]
    if found.has_teacher and config.reference is None:
        raise ConfigError(
            f"--algorithm.reference: {name} needs the directory of a teacher"
        )
    if distill != NO_TEACHER and not found.has_teacher:
        raise ConfigError(
            f"--distill.*: {name} has no teacher; drop the options, or use "
            "--algorithm.name distillation"
        )
    if critic != NO_CRITIC and found.value_objective is None:
        raise ConfigError(f"--critic.*: {name} has no critic; drop the options")
    if prm != NO_PRM and found.prm_objective is None:
        raise ConfigError(
            f"--prm.*: {name} has no implicit reward model; drop the options, or use "
            "--algorithm.name prime"
        )
    teaches = found.has_teacher or found.divergence is not None
    if config.reference_sync_steps and teaches:
        raise ConfigError(
            f"--algorithm.reference-sync-steps: the reference of {name} is a teacher, "
            "which does not follow its student; drop the option"
        )
    for option, given in (
        ("reference", config.reference is not None),
        ("reference-sync-steps", config.reference_sync_steps > 0),
    ):
        if given and not (found.needs_reference or teaches):
            raise ConfigError(
                f"--algorithm.{option}: nothing looks at a reference with a "
                "kl-coefficient of 0; drop the option, or give "
                "--algorithm.kl-coefficient"
            )
    if critic.backbone == "shared":
        return algorithms.shared_backbone(found, coefficient=critic.coefficient)
    return found


def algorithm_function(config: AlgorithmConfig) -> Callable[..., Algorithm]:
    """Returns the function of the algorithm that a configuration names.

    Raises:
        ConfigError: there is no such function.
    """
    name = config.name.partition("?")[0]
    if name in ALGORITHMS:
        return getattr(algorithms, name)
    return loaded(name, OPTION, "algorithm", ALGORITHMS)


# Arguments of an algorithm's function, each with the option that gives it.
type _Arguments = dict[str, tuple[str, Any]]


def _built(
    config: AlgorithmConfig,
    max_tokens: int,
    distill: DistillConfig,
    more: _Arguments,
) -> Algorithm:
    """Builds the algorithm alone, before options are checked against its attributes."""
    if config.name == "distillation" and distill.divergence != "sampled":
        return distribution_distillation(divergence=_divergence(distill))
    name, build = config.name.partition("?")[0], algorithm_function(config)
    options = dict(_options(build, name, config, more, max_tokens))
    return made(
        config.name,
        build,
        options,
        option=OPTION,
        kind="algorithm",
        broken=contract.broken,
        shared=SharedOptions,
    )


def _options(
    build: Callable[..., Algorithm],
    name: str,
    config: AlgorithmConfig,
    more: _Arguments,
    max_tokens: int,
) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Arguments of the algorithm's function, each with the option that gives it.

    Raises:
        ConfigError: it has no such parameter.
    """
    named, rest = named_parameters(build, f"algorithm {name!r}")
    taken = {*(each.name for each in named), *shared_names(rest)}
    weight = config.kl_weights
    given: dict[str, tuple[tuple[str, ...], Any]] = {
        "clip-low": (("clip_low", "ratio_low"), config.clip_low),
        "clip-high": (("clip_high", "ratio_high"), config.clip_high),
        "kl-coefficient": (("kl_coefficient",), config.kl_coefficient or None),
        "kl-estimator": (
            ("kl_estimator",),
            config.kl_estimator and ESTIMATORS[config.kl_estimator],
        ),
        "kl-weights": (("kl_weights",), weight and kl_weights.ratio(anchor=weight)),
        "entropy-coefficient": (
            ("entropy_coefficient",),
            config.entropy_coefficient or None,
        ),
        "aggregation": (("aggregation",), _aggregation(config, max_tokens)),
        "reward-weights": (
            ("weights",),
            tuple(each for _, each in reward_weights(config)) or None,
        ),
    }
    for option, (names, value) in given.items():
        if value is None:
            continue
        parameter = next((each for each in names if each in taken), None)
        if parameter is None:
            raise ConfigError(
                f"--algorithm.{option}: {name} does not read it; drop the option"
            )
        yield parameter, (f"--algorithm.{option}", value)
    if config.correction != CorrectionConfig():
        if "correction" not in taken:
            raise ConfigError(
                f"--algorithm.correction.*: {name} does not read it; drop the options"
            )
        correction = make_correction(config.correction)
        yield "correction", ("--algorithm.correction.*", correction)
    yield from ((each, found) for each, found in more.items() if each in taken)
    required = [each.name for each in named if each.default is each.empty]
    if "denominator" in required:
        yield "denominator", ("--rollout.max-tokens", float(max_tokens))


def _of_sections(critic: CriticConfig, prm: PrmConfig) -> _Arguments:
    """The arguments from the options of a critic and of an implicit reward model."""
    found: _Arguments = {}
    if critic != NO_CRITIC:
        found = {
            "gamma": ("--critic.gamma", critic.gamma),
            "lambda_": ("--critic.gae-lambda", critic.gae_lambda),
            "value_lambda": ("--critic.value-lambda", critic.value_lambda),
            "value_clip": ("--critic.clip", critic.clip or None),
            "bootstrap_truncated": (
                "--critic.bootstrap-truncated",
                critic.bootstrap_truncated,
            ),
        }
    if prm.beta != NO_PRM.beta:
        found["beta"] = "--prm.beta", prm.beta
    return found


def _aggregation(config: AlgorithmConfig, max_tokens: int) -> Reduction | None:
    """The reduction that the options name, None for the algorithm's own."""
    named: dict[str | None, Reduction] = {
        "token_mean": reduce.token_mean,
        "sequence_mean": reduce.sequence_mean_of_token_mean,
        "sequence_sum": reduce.sequence_mean_of_token_sum,
        "fixed": partial(reduce.constant_denominator, denominator=float(max_tokens)),
    }
    return named.get(config.aggregation)


def _scaled(found: Algorithm, config: AlgorithmConfig) -> Algorithm:
    """The algorithm, with or without the division by a group's deviation."""
    if config.scale_advantages is None:
        return found
    own = found.advantages
    base = own.func if isinstance(own, partial) else own
    groups = (advantages.group_normalized, advantages.group_centered)
    if base not in groups or found.credit is not None:
        raise ConfigError(
            f"--algorithm.scale-advantages: {config.name.partition('?')[0]} does not "
            "compare rewards with their group's mean alone; drop the option"
        )
    if config.scale_advantages == "none":
        return found._replace(advantages=advantages.group_centered)
    if base is advantages.group_normalized:
        return found
    return found._replace(advantages=advantages.group_normalized)


def make_correction(config: CorrectionConfig) -> Correction | None:
    """Builds the correction that a configuration names, None for none.

    Raises:
        ConfigError: an option is unused by this kind, or a required one is missing.
        ValueError: a bound is out of its range.
    """
    if config == CorrectionConfig():
        return corrections.TRUNCATED
    options = {"cap": config.cap, "low": config.low, "high": config.high}
    given = {name: value for name, value in options.items() if value is not None}
    check_correction(config)
    build = {
        "none": None,
        "truncated_tokens": corrections.truncated_tokens,
        "truncated_sequences": corrections.truncated_sequences,
        "icepop": corrections.icepop,
        "icepop_sequences": corrections.icepop_sequences,
        "masked_sequences": corrections.masked_sequences,
    }[config.kind]
    return None if build is None else build(**given)


def _divergence(distill: DistillConfig) -> Divergence:
    """Returns the divergence that a configuration names.

    Raises:
        ValueError: a hyperparameter is out of its range.
    """
    if distill.divergence == "jsd":
        beta = 0.5 if distill.beta is None else distill.beta
        return partial(divergences.generalized_jsd, beta=beta)
    if distill.divergence == "top_k":
        k = 64 if distill.top_k is None else distill.top_k
        return top_k_forward_kl(k, tail=distill.tail or "bucket")
    return {
        "forward_kl": divergences.forward_kl,
        "reverse_kl": divergences.reverse_kl,
    }[distill.divergence]
