"""Builds the algorithm and the correction that a configuration names."""

from functools import partial
from typing import Any

from jaxrl_post import algorithms
from jaxrl_post.algorithms import Algorithm, corrections, kl_weights
from jaxrl_post.algorithms.corrections import Correction
from jaxrl_post.algorithms.objective import Divergence
from jaxrl_post.algorithms.whole_distributions import (
    distribution_distillation,
    top_k_forward_kl,
)
from jaxrl_post.config.algorithm import AlgorithmConfig, CorrectionConfig, DistillConfig
from jaxrl_post.config.checks import (
    check_algorithm,
    check_correction,
    reward_weights,
)
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.losses import distill as divergences
from jaxrl_post.losses import kl

__all__ = ["make_algorithm", "make_correction"]

ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "k3_plus": kl.k3_plus}
NO_CRITIC = CriticConfig()
NO_TEACHER = DistillConfig()


def make_algorithm(
    config: AlgorithmConfig,
    max_tokens: int,
    critic: CriticConfig = NO_CRITIC,
    distill: DistillConfig = NO_TEACHER,
) -> Algorithm:
    """Builds the algorithm that a configuration names.

    Args:
        config: name and hyperparameters.
        max_tokens: generation budget, the denominator of dr_grpo.
        critic: the critic's options, for ppo.
        distill: the options of distillation.

    Raises:
        ConfigError: an option is unused by the algorithm, or a required one is missing.
        ValueError: a hyperparameter is out of its range.
    """
    check_algorithm(config, critic, distill)
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
        if config.kl_weights is not None:
            options["kl_weights"] = kl_weights.ratio(anchor=config.kl_weights)
    if config.reward_weights:
        options["weights"] = tuple(weight for _, weight in reward_weights(config))
    if config.name == "vespo":
        # vespo's kernel uses the ratio to the sampler, so it includes the correction.
        del options["correction"]
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
        "gdpo": algorithms.gdpo,
        "opo": algorithms.opo,
        "remax": algorithms.remax,
        "clipped_rloo": algorithms.clipped_rloo,
        "luspo": algorithms.luspo,
        "lite_ppo": algorithms.lite_ppo,
        "vespo": algorithms.vespo,
        "ppo": partial(
            algorithms.ppo,
            gamma=critic.gamma,
            lambda_=critic.gae_lambda,
            value_lambda=critic.value_lambda,
            value_clip=critic.clip or None,
            bootstrap_truncated=critic.bootstrap_truncated,
        ),
        "reinforce_plus_plus": algorithms.reinforce_plus_plus,
        "reinforce_plus_plus_baseline": algorithms.reinforce_plus_plus_baseline,
        "distillation": algorithms.distillation,
    }[config.name]
    made = build(**options)
    if config.name == "ppo" and critic.backbone == "shared":
        return algorithms.shared_backbone(made, coefficient=critic.coefficient)
    return made


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
