"""From a configuration to an algorithm: what is made, and what is refused."""

import math
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms import Predictions, corrections
from jaxrl_post.config.algorithm import (
    ALGORITHMS,
    AlgorithmConfig,
    CorrectionConfig,
    CorrectionName,
    DistillConfig,
    DivergenceName,
)
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.reward_model import PrmConfig, RewardModelConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.learner.algorithm import make_algorithm, make_correction
from jaxrl_post.learner.algorithm_checks import check_run
from jaxrl_post.types import TokenBatch

REWARDS = jnp.array([[1.0, 0.0, 0.0, 0.0]])
VALID = jnp.ones((1, 4), bool)


def named(name: str) -> AlgorithmConfig:
    """Its configuration, with what it cannot do without."""
    teacher = "teacher" if name == "distillation" else None
    name = f"{name}?threshold=0.15" if name == "dppo" else name
    return AlgorithmConfig(name=name, reference=teacher)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_of_the_configuration_is_made(name):
    plain = make_algorithm(named(name), 4)
    assert plain.needs_reference == (name in ("distillation", "prime"))
    read = {
        "rewards": (REWARDS, VALID),
        "components": (jnp.stack([REWARDS, REWARDS], axis=-1), VALID),
        "lengths": (REWARDS, VALID, jnp.ones((1, 4), jnp.int32)),
        "greedy": (REWARDS, VALID, jnp.array([0.5])),
    }[plain.reads]
    values = np.asarray(plain.advantages(*read))
    assert values[0, 0] > values[0, 1]
    assert (plain.value_objective is not None) == (name == "ppo")
    assert (plain.prm_objective is not None) == (name == "prime")
    if name != "distillation":
        with_kl = make_algorithm(replace(named(name), kl_coefficient=0.1), 4)
        assert with_kl.needs_reference
    if name not in ("ppo", "reinforce_plus_plus", "distillation"):
        weighted = replace(
            named(name), kl_coefficient=0.1, kl_estimator="k1", kl_weights="proximal"
        )
        assert make_algorithm(weighted, 4).needs_reference


def test_the_scale_of_implicit_rewards_is_the_models_option():
    ones = np.ones((1, 2), np.float32)
    for prm, query, beta in (
        (PrmConfig(), "", 0.05),
        (PrmConfig(beta=0.5), "", 0.5),
        (PrmConfig(scores="after"), "?beta=0.25", 0.25),
    ):
        made = make_algorithm(AlgorithmConfig("prime" + query), 4, prm=prm)
        batch = TokenBatch(
            **{name: np.ones((1, 2), np.int32) for name in ("tokens", "versions")},
            positions=np.array([[0, 1]], np.int32),
            ends=np.full((1, 2), 2, np.int32),
            loss_mask=np.array([[False, True]]),
            **dict.fromkeys(("advantages", "behavior_logprobs"), 0 * ones),
            reference_logprobs=-ones,
            labels=ones,
        )
        batch = jax.tree.map(jnp.asarray, batch)
        assert made.prm_objective is not None
        found = made.prm_objective(Predictions(jnp.zeros((1, 2))), batch)
        assert float(found.metrics["prm/answer_reward"].mean()) == pytest.approx(beta)
    with pytest.raises(ConfigError, match=r"an option of the command gives beta, too"):
        make_algorithm(AlgorithmConfig("prime?beta=1"), 4, prm=PrmConfig(beta=0.5))


@pytest.mark.parametrize(
    "options", [{"beta": 0.5}, {"scores": "after"}, {"lora": AdapterConfig(rank=2)}]
)
def test_options_of_a_reward_model_are_prime_s(options):
    with pytest.raises(ConfigError, match=r"^--prm\.\*: grpo has no implicit reward m"):
        make_algorithm(AlgorithmConfig(), 4, prm=PrmConfig(**options))


def test_a_shared_critic_is_part_of_the_objective():
    made = make_algorithm(named("ppo"), 4, CriticConfig(backbone="shared"))
    assert made.value_objective is None


@pytest.mark.parametrize(
    ("config", "critic", "message"),
    [
        (AlgorithmConfig(name="rloo", clip_low=0.2), {}, r"clip-low: rloo does not r"),
        (
            AlgorithmConfig(name="sapo", clip_high=0.2),
            {},
            r"clip-high: sapo does n",
        ),
        (AlgorithmConfig(), {"gamma": 0.5}, r"--critic\.\*: grpo has no critic"),
        (AlgorithmConfig(name="distillation"), {}, r"reference: distillation needs"),
        (
            AlgorithmConfig(name="distillation", reference="x", kl_coefficient=0.1),
            {},
            r"kl-coefficient: distillation does not read it",
        ),
        (AlgorithmConfig(reference="x"), {}, r"nothing looks at a reference with"),
        (AlgorithmConfig(kl_estimator="k1"), {}, r"got kl.k1: as a loss its expected"),
        (
            AlgorithmConfig(name="ppo", kl_coefficient=0.1, kl_weights="policy"),
            {},
            r"kl-weights: ppo does not read it; drop the option",
        ),
        (
            AlgorithmConfig(name="reinforce_plus_plus", entropy_coefficient=0.1),
            {},
            r"entropy-coefficient: reinforce_plus_plus does not read it",
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
        (
            AlgorithmConfig(name="ppo"),
            {"backbone": "shared", "lora": AdapterConfig(rank=2)},
            r"--critic\.lora\.\*: a shared backbone has none of its own",
        ),
    ],
)
def test_options_that_would_change_nothing_are_refused(config, critic, message):
    with pytest.raises(ValueError, match=message):
        make_algorithm(config, 4, CriticConfig(**critic))


TEACHER_LOGITS = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
# KL(p || q) of p = (5, 3, 2) / 10 and q uniform, and of what else is asked for.
DIVERGENCES = {
    "sampled": None,
    "forward_kl": math.log(3) - 1.029653,
    "reverse_kl": -math.log(0.5 * 0.3 * 0.2) / 3 - math.log(3),
    "jsd": 0.017251,
    "top_k": 0.5 * math.log(1.5) + 0.5 * math.log(0.75),
}


@pytest.mark.parametrize("name", get_args(DivergenceName))
def test_every_divergence_of_the_configuration_is_made(name):
    distill = DistillConfig(name, top_k=1 if name == "top_k" else None)
    made = make_algorithm(named("distillation"), 4, distill=distill)
    assert made.needs_reference == (name == "sampled")
    assert (made.divergence is None) == (name == "sampled")
    if made.divergence is not None:
        uniform, on = jnp.zeros((1, 3)), jnp.array([True])
        value = made.divergence(TEACHER_LOGITS, uniform, on)
        assert value.tolist() == pytest.approx([DIVERGENCES[name]], abs=2e-6)


@pytest.mark.parametrize(
    ("distill", "algorithm", "message"),
    [
        (
            {"divergence": "jsd"},
            {"name": "grpo"},
            r"--distill\.\*: grpo has no teacher",
        ),
        ({"beta": 0.5}, {}, r"--distill\.beta: sampled has no such"),
        ({"divergence": "jsd", "top_k": 4}, {}, r"--distill\.top-k: jsd has no such"),
        ({"divergence": "jsd", "tail": "bucket"}, {}, r"--distill\.tail: jsd has no"),
        ({"temperature": 2.0}, {}, r"sampled compares at --rollout\.temperature"),
        ({"temperature": 0.0}, {}, r"temperature: must be greater than 0; got 0\.0"),
        (
            {"data": "demonstrations"},
            {},
            r"--distill\.data: the advantage of a sampled",
        ),
        (
            {"divergence": "jsd"},
            {"clip_low": 0.1},
            r"--algorithm\.clip-low: jsd compar",
        ),
        (
            {"divergence": "jsd"},
            {"correction": CorrectionConfig("none")},
            r"--algorithm\.correction: jsd compares whole distributions",
        ),
        (
            {"divergence": "jsd"},
            {"kl_estimator": "k3"},
            r"--algorithm\.kl-estimator: jsd compares whole distributions",
        ),
        (
            {"divergence": "jsd"},
            {"kl_weights": "proximal"},
            r"--algorithm\.kl-weights: jsd compares whole distributions",
        ),
        ({"divergence": "jsd"}, {"reference": None}, r"needs the directory of a teach"),
    ],
)
def test_options_that_a_distillation_has_no_use_for_are_refused(
    distill, algorithm, message
):
    config = replace(named("distillation"), **algorithm)
    if config.name != "distillation":
        config = replace(config, reference=None)
    with pytest.raises(ConfigError, match=message):
        make_algorithm(config, 4, distill=DistillConfig(**distill))


@pytest.mark.parametrize(
    ("distill", "message"),
    [
        ({"divergence": "jsd", "beta": 1.5}, r"beta must be in \[0, 1\], got 1\.5"),
        ({"divergence": "top_k", "top_k": 0}, "k must be >= 1, got 0"),
    ],
)
def test_a_bad_number_of_a_divergence_is_refused_at_once(distill, message):
    with pytest.raises(ValueError, match=message):
        make_algorithm(named("distillation"), 4, distill=DistillConfig(**distill))


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ("rollout", {"overlong_buffer": 2}, r"--rollout\.overlong-buffer: gdpo reads"),
        ("reward", {"weight": -1.0}, r"--reward\.weight: gdpo reads.*reward-weights"),
        ("reward", {"environment_weight": 0.0}, r"--reward\.environment-weight: gdpo"),
    ],
)
def test_what_no_part_of_the_reward_shows_is_refused_with_gdpo(
    tmp_path, section, options, message
):
    plain = RLConfig(
        algorithm=named("gdpo"), reward=RewardModelConfig(model=str(tmp_path))
    )
    config = replace(plain, **{section: replace(getattr(plain, section), **options)})
    gdpo, grpo = (make_algorithm(named(name), 4) for name in ("gdpo", "grpo"))
    with pytest.raises(ConfigError, match=message):
        check_run(config, gdpo)
    check_run(plain, gdpo)
    check_run(replace(config, algorithm=named("grpo")), grpo)


@pytest.mark.parametrize(
    ("data", "rollout", "message"),
    [
        (
            "samples",
            {"overlong_buffer": 2},
            r"overlong-buffer: with --distill\.data sam",
        ),
        (
            "demonstrations",
            {"temperature": 0.5},
            r"--rollout\.temperature: with --dist",
        ),
        (
            "demonstrations",
            {"dynamic_sampling": True},
            r"dynamic-sampling: .* nothing i",
        ),
        ("demonstrations", {"top_p": 0.5}, r"--rollout\.top-p: .* nothing is sampled"),
    ],
)
def test_options_of_rollouts_that_teach_nothing_are_refused(data, rollout, message):
    config = RLConfig(
        algorithm=named("distillation"),
        distill=DistillConfig("jsd", data),
        rollout=RolloutConfig(**rollout),
    )
    student = make_algorithm(config.algorithm, 4, distill=config.distill)
    with pytest.raises(ConfigError, match="--exact: distillation has no ratio"):
        check_run(replace(config, exact=True, rollout=RolloutConfig()), student)
    with pytest.raises(ConfigError, match=message):
        check_run(config, student)
    check_run(replace(config, rollout=RolloutConfig()), student)
    check_run(RLConfig(rollout=config.rollout), make_algorithm(named("grpo"), 4))


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
