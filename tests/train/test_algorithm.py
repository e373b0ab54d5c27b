"""From a configuration to an algorithm: what is made, and what is refused."""

from dataclasses import replace
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import corrections
from jaxrl_post.train.algorithm import make_algorithm, make_correction
from jaxrl_post.train.config import (
    AlgorithmConfig,
    AlgorithmName,
    ConfigError,
    CorrectionConfig,
    CorrectionName,
    CriticConfig,
    PreferenceLossConfig,
    PreferenceName,
)
from jaxrl_post.train.offline import make_preference

REWARDS = jnp.array([[1.0, 0.0, 0.0, 0.0]])
VALID = jnp.ones((1, 4), bool)


def named(name: str) -> AlgorithmConfig:
    """Its configuration, with what it cannot do without."""
    teacher = "teacher" if name == "distillation" else None
    return AlgorithmConfig(name=name, reference=teacher)


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_every_algorithm_of_the_configuration_is_made(name):
    plain = make_algorithm(named(name), 4)
    assert plain.needs_reference == (name == "distillation")
    values = np.asarray(plain.advantages(REWARDS, VALID))
    assert values[0, 0] > values[0, 1]
    assert (plain.value_objective is not None) == (name == "ppo")
    if name != "distillation":
        with_kl = make_algorithm(AlgorithmConfig(name=name, kl_coefficient=0.1), 4)
        assert with_kl.needs_reference


def test_a_shared_critic_is_part_of_the_objective():
    made = make_algorithm(named("ppo"), 4, CriticConfig(backbone="shared"))
    assert made.value_objective is None


@pytest.mark.parametrize(
    ("config", "critic", "message"),
    [
        (AlgorithmConfig(name="rloo", clip_low=0.2), {}, r"clip-\*: rloo does not cl"),
        (AlgorithmConfig(name="sapo", clip_high=0.2), {}, r"clip-\*: sapo does not cl"),
        (AlgorithmConfig(), {"gamma": 0.5}, r"--critic\.\*: grpo has no critic"),
        (AlgorithmConfig(name="distillation"), {}, r"reference: distillation needs"),
        (
            AlgorithmConfig(name="distillation", reference="x", kl_coefficient=0.1),
            {},
            r"kl-coefficient: distillation minimises the KL",
        ),
        (AlgorithmConfig(reference="x"), {}, r"nothing looks at it with a kl-coeffici"),
        (AlgorithmConfig(kl_estimator="k1"), {}, r"in grpo the KL is part of the loss"),
        (
            AlgorithmConfig(name="reinforce_plus_plus", entropy_coefficient=0.1),
            {},
            r"entropy-coefficient: reinforce_plus_plus has no such term",
        ),
        (
            AlgorithmConfig(name="ppo"),
            {"backbone": "shared", "model": "x"},
            r"--critic\.model: a shared backbone has none of its own",
        ),
        (
            AlgorithmConfig(name="ppo"),
            {"backbone": "shared", "warmup_steps": 1},
            r"--critic\.warmup-steps: a shared backbone has none",
        ),
    ],
)
def test_options_that_would_change_nothing_are_refused(config, critic, message):
    with pytest.raises(ConfigError, match=message):
        make_algorithm(config, 4, CriticConfig(**critic))


@pytest.mark.parametrize("kind", get_args(CorrectionName))
def test_every_correction_of_the_configuration_is_made(kind):
    bounds = {"low": 0.5, "high": 2.0} if kind == "masked_sequences" else {}
    correct = make_correction(CorrectionConfig(kind, **bounds))
    if kind == "none":
        assert correct is None
        return
    assert correct is not None
    trainer, sampler = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -1.5]])
    ids = jnp.ones((1, 2), jnp.int32)
    weights = correct(trainer, sampler, ids > 0, ids).weights
    assert 1.0 < float(weights.max()) < 1.7


def test_the_default_correction_is_the_algorithms_own():
    assert make_correction(CorrectionConfig()) is corrections.TRUNCATED


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CorrectionConfig("icepop", cap=2.0), r"correction\.cap: icepop has no such"),
        (CorrectionConfig(low=0.5), r"correction\.low: truncated_tokens has no such"),
        (CorrectionConfig("none", high=2.0), r"correction\.high: none has no such"),
        (CorrectionConfig("masked_sequences", low=0.5), r"masked_sequences needs both"),
    ],
)
def test_bounds_that_a_correction_lacks_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make_correction(config)


@pytest.mark.parametrize("name", get_args(PreferenceName))
def test_every_preference_loss_of_the_configuration_is_made(name):
    made = make_preference(PreferenceLossConfig(name=name))
    assert made.needs_reference == (name not in ("simpo", "cpo", "orpo"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PreferenceLossConfig(margin=1.0), r"--loss\.margin: dpo has no such"),
        (PreferenceLossConfig("ipo", label_smoothing=0.1), r"label-smoothing: ipo has"),
        (PreferenceLossConfig(nll_weight=1.0), r"--loss\.nll-weight: dpo has no such"),
        (
            PreferenceLossConfig("simpo", reference="x"),
            r"--loss\.reference: simpo looks at no reference",
        ),
    ],
)
def test_hyperparameters_that_a_loss_lacks_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make_preference(config)


def test_a_bad_hyperparameter_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="beta must be > 0, got -1"):
        make_preference(replace(PreferenceLossConfig(), beta=-1.0))
