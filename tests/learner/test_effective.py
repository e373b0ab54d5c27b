"""Values of options that are left at None."""

import pytest

from jaxrl_post.config.algorithm import (
    ALGORITHMS,
    AlgorithmConfig,
    CorrectionConfig,
)
from jaxrl_post.config.offline import PreferenceConfig, PreferenceLossConfig, SFTConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.learner.effective import effective


def of(**options) -> dict[str, object]:
    return effective(RLConfig(algorithm=AlgorithmConfig(**options)))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("grpo", 0.2, 0.2),
        ("dapo", 0.2, 0.28),
        ("gspo", 3e-4, 4e-4),
        ("gmpo", 0.4, 0.4),
        ("cispo", 0.0, 5.0),
        ("ppo", 0.2, 0.2),
    ],
)
def test_the_clip_of_a_paper_is_told(name, low, high):
    found = of(name=name)
    assert found["algorithm.clip_low"] == low
    assert found["algorithm.clip_high"] == high


def test_what_was_given_is_no_default():
    assert of(name="grpo", clip_low=0.1) == {"algorithm.clip_high": 0.2}


def test_what_the_algorithm_does_not_read_is_left_out():
    assert of(name="rloo") == {}


def test_a_correction_that_was_chosen_has_its_bounds():
    found = of(name="rloo", correction=CorrectionConfig(kind="icepop"))
    assert found == {
        "algorithm.correction.low": 0.5,
        "algorithm.correction.high": 5.0,
    }
    assert of(name="rloo", correction=CorrectionConfig(kind="none")) == {}


def test_an_estimator_has_its_name():
    assert of(name="reinforce_plus_plus_baseline")["algorithm.kl_estimator"] == "k2"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_plain_values(name):
    assert all(isinstance(value, float | str) for value in of(name=name).values())


def test_preference_losses():
    def loss(name: str) -> dict[str, object]:
        return effective(PreferenceConfig(loss=PreferenceLossConfig(name=name)))

    assert loss("simpo") == {
        "loss.beta": 2.0, "loss.label_smoothing": 0.0, "loss.margin": 1.0,
    }  # fmt: skip
    assert loss("robust_dpo")["loss.label_smoothing"] == 0.1
    assert effective(SFTConfig()) == {}
