"""From a configuration to an algorithm."""

from functools import partial
from typing import Any

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Algorithm, corrections
from jaxrl_post.algorithms.corrections import Correction
from jaxrl_post.algorithms.objective import Divergence
from jaxrl_post.algorithms.whole_distributions import (
    distribution_distillation,
    top_k_forward_kl,
)
from jaxrl_post.losses import distill as divergences
from jaxrl_post.losses import kl
from jaxrl_post.train.config import (
    AlgorithmConfig,
    ConfigError,
    CorrectionConfig,
    CriticConfig,
    RLConfig,
    RolloutConfig,
)
from jaxrl_post.train.distill_config import DistillConfig

__all__ = ["check_rollout", "make_algorithm", "make_correction"]

ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "k3_plus": kl.k3_plus}

# Algorithms whose penalty is part of the reward, where k1 is the estimator to take.
KL_IN_REWARD = ("ppo", "reinforce_plus_plus")
NO_CLIP = ("rloo", "sapo")
NO_ENTROPY = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "distillation")
NO_CRITIC = CriticConfig()
NO_TEACHER = DistillConfig()

# The divergence that an option of --distill is for, where it is for one alone.
SERVES = {"beta": "jsd", "top_k": "top_k", "tail": "top_k"}
# Of the rollouts of training alone: an evaluation is greedy.
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "dynamic_sampling", "overlong_buffer",
)  # fmt: skip


def make_algorithm(
    config: AlgorithmConfig,
    max_tokens: int,
    critic: CriticConfig = NO_CRITIC,
    distill: DistillConfig = NO_TEACHER,
) -> Algorithm:
    """Builds the algorithm that a configuration names.

    Args:
        config: name and hyperparameters.
        max_tokens: generation budget, the constant of dr_grpo.
        critic: of ppo.
        distill: of distillation.

    Raises:
        ConfigError: an option that the algorithm has no use for, or lacks.
        ValueError: a hyperparameter is out of its range.
    """
    _check(config, critic)
    _check_distillation(config, distill)
    if config.name == "distillation" and distill.divergence != "sampled":
        return distribution_distillation(divergence=_divergence(distill))
    options: dict[str, Any] = {"correction": make_correction(config.correction)}
    low, high = (
        ("ratio_low", "ratio_high")
        if config.name == "cispo"
        else ("clip_low", "clip_high")
    )
    clips = {low: config.clip_low, high: config.clip_high}
    options |= {name: value for name, value in clips.items() if value is not None}
    if config.name != "distillation":
        options["kl_coefficient"] = config.kl_coefficient
        if config.kl_estimator is not None:
            options["kl_estimator"] = ESTIMATORS[config.kl_estimator]
    if config.entropy_coefficient:
        options["entropy_coefficient"] = config.entropy_coefficient
    build = {
        "grpo": algorithms.grpo,
        "dr_grpo": partial(algorithms.dr_grpo, denominator=float(max_tokens)),
        "dapo": algorithms.dapo,
        "gspo": algorithms.gspo,
        "cispo": algorithms.cispo,
        "rloo": algorithms.rloo,
        "gmpo": algorithms.gmpo,
        "sapo": algorithms.sapo,
        "max_rl": algorithms.max_rl,
        "ppo": partial(
            algorithms.ppo,
            gamma=critic.gamma,
            lambda_=critic.gae_lambda,
            value_lambda=critic.value_lambda,
            value_clip=critic.clip or None,
        ),
        "reinforce_plus_plus": algorithms.reinforce_plus_plus,
        "reinforce_plus_plus_baseline": algorithms.reinforce_plus_plus_baseline,
        "distillation": algorithms.distillation,
    }[config.name]
    made = build(**options)
    if config.name == "ppo" and critic.backbone == "shared":
        return algorithms.shared_backbone(made, coefficient=critic.coefficient)
    return made


def check_rollout(config: RLConfig) -> None:
    """Refuses options of the rollouts that distillation has no use for.

    Raises:
        ConfigError: naming the option.
    """
    if config.algorithm.name != "distillation":
        return
    unused = ("overlong_buffer",)
    why = "rewards teach a student nothing"
    if config.distill.data == "demonstrations":
        unused, why = SAMPLING, "nothing is sampled but in evaluations, greedily"
    defaults = RolloutConfig()
    for name in unused:
        if getattr(config.rollout, name) != getattr(defaults, name):
            raise ConfigError(
                f"--rollout.{name.replace('_', '-')}: with --distill.data "
                f"{config.distill.data} {why}; drop the option"
            )


def make_correction(config: CorrectionConfig) -> Correction | None:
    """Builds the correction that a configuration names, None for none.

    Raises:
        ConfigError: an option that this kind does not have, or lacks.
        ValueError: a bound is out of its range.
    """
    if config == CorrectionConfig():
        return corrections.TRUNCATED
    options = {"cap": config.cap, "low": config.low, "high": config.high}
    given = {name: value for name, value in options.items() if value is not None}
    builds = {
        "truncated_tokens": (corrections.truncated_tokens, {"cap"}),
        "truncated_sequences": (corrections.truncated_sequences, {"cap"}),
        "icepop": (corrections.icepop, {"low", "high"}),
        "icepop_sequences": (corrections.icepop_sequences, {"low", "high"}),
        "masked_sequences": (corrections.masked_sequences, {"cap", "low", "high"}),
    }
    build, accepted = builds.get(config.kind, (None, set()))
    for name in sorted(given.keys() - accepted):
        raise ConfigError(
            f"--algorithm.correction.{name}: {config.kind} has no such bound; drop the "
            "option"
        )
    if config.kind == "masked_sequences" and None in (config.low, config.high):
        raise ConfigError(
            "--algorithm.correction.low, .high: masked_sequences needs both, bounds of "
            "the geometric mean of a sequence's weights; 0.5 and 2, for example"
        )
    return None if build is None else build(**given)


def _check(config: AlgorithmConfig, critic: CriticConfig) -> None:
    """Refuses options that would change nothing."""
    name = config.name
    if name in NO_CLIP and (config.clip_low, config.clip_high) != (None, None):
        raise ConfigError(f"--algorithm.clip-*: {name} does not clip; drop the option")
    if name != "ppo" and critic != NO_CRITIC:
        raise ConfigError(f"--critic.*: {name} has no critic; drop the options")
    if name == "distillation":
        if config.reference is None:
            raise ConfigError(
                "--algorithm.reference: distillation needs the directory of a teacher"
            )
        if config.kl_coefficient:
            raise ConfigError(
                "--algorithm.kl-coefficient: distillation minimises the KL to the "
                "teacher and has no other; drop the option"
            )
    elif config.reference is not None and not config.kl_coefficient:
        raise ConfigError(
            "--algorithm.reference: nothing looks at it with a kl-coefficient of 0; "
            "drop the option, or give --algorithm.kl-coefficient"
        )
    if config.entropy_coefficient and name in NO_ENTROPY:
        raise ConfigError(
            f"--algorithm.entropy-coefficient: {name} has no such term; drop the option"
        )
    if config.kl_estimator == "k1" and name not in KL_IN_REWARD:
        raise ConfigError(
            f"--algorithm.kl-estimator: in {name} the KL is part of the loss, where "
            "k1 has an expected gradient of zero; choose k2, k3 or k3_plus"
        )
    if critic.backbone == "shared":
        for option, given in (
            ("model", critic.model is not None),
            ("warmup-steps", critic.warmup_steps > 0),
            ("lora.*", critic.lora != NO_CRITIC.lora),
        ):
            if given:
                raise ConfigError(
                    f"--critic.{option}: a shared backbone has none of its own; drop "
                    "the option, or use --critic.backbone separate"
                )


def _check_distillation(config: AlgorithmConfig, distill: DistillConfig) -> None:
    """Refuses options that would change nothing, and those that contradict."""
    if config.name != "distillation":
        if distill != NO_TEACHER:
            raise ConfigError(
                f"--distill.*: {config.name} has no teacher; drop the options, or use "
                "--algorithm.name distillation"
            )
        return
    for name, divergence in SERVES.items():
        if getattr(distill, name) is not None and distill.divergence != divergence:
            raise ConfigError(
                f"--distill.{name.replace('_', '-')}: {distill.divergence} has no such "
                "hyperparameter; drop the option"
            )
    if not distill.temperature > 0:
        raise ConfigError(
            f"--distill.temperature: must be greater than 0; got {distill.temperature}"
        )
    if distill.divergence == "sampled":
        _check_sampled(distill)
        return
    plain = AlgorithmConfig(name=config.name, reference=config.reference)
    for name in ("clip_low", "clip_high", "correction", "kl_estimator"):
        if getattr(config, name) != getattr(plain, name):
            raise ConfigError(
                f"--algorithm.{name.replace('_', '-')}: {distill.divergence} compares "
                "whole distributions and has no such term; drop the option"
            )


def _check_sampled(distill: DistillConfig) -> None:
    if distill.data != "samples":
        raise ConfigError(
            "--distill.data: the advantage of a sampled token needs the student's own "
            "samples; choose another --distill.divergence"
        )
    if distill.temperature != 1.0:
        raise ConfigError(
            "--distill.temperature: sampled compares at --rollout.temperature; drop "
            "the option"
        )


def _divergence(distill: DistillConfig) -> Divergence:
    """The divergence that a configuration names.

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
