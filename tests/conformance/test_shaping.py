"""Numbers and dialects of reward shaping."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import advantages, shaping


def test_row_24_overlong_shaping_uncapped():
    rewards = jnp.array([1.0, 0.8, 0.6, 0.4])
    penalty = shaping.overlong_penalty(
        jnp.array([10, 22, 25, 30]),
        max_length=25,
        buffer=5,
        penalty=0.5,
        bound="uncapped",
    )
    np.testing.assert_allclose(rewards + penalty, [1.0, 0.6, 0.1, -0.6], atol=1e-6)


def test_row_25_soft_overlong_punishment():
    penalty = shaping.overlong_penalty(
        jnp.array([50, 90, 110]), max_length=100, buffer=20, bound="capped"
    )
    assert penalty.tolist() == [0.0, -0.5, -1.0]


def test_row_26_repetition_penalty():
    tokens = jnp.array([[5, 5, 5, 5, 5, 0], [1, 2, 1, 2, 1, 2]])
    mask = jnp.arange(6) < jnp.array([[5], [6]])
    penalty = shaping.repetition_penalty(tokens, mask, ngram=2)
    np.testing.assert_allclose(penalty, [-0.75, -0.6], rtol=1e-6)


@pytest.mark.parametrize(
    ("dialect", "bound", "expected"),
    [("OpenRLHF, TRL", "capped", -0.5), ("NeMo RL, verl", "uncapped", -1.0)],
)
def test_dialects_of_overlong_shaping(dialect, bound, expected):
    penalty = shaping.overlong_penalty(
        jnp.array([30]), max_length=25, buffer=5, penalty=0.5, bound=bound
    )
    assert penalty.tolist() == [expected], dialect


def test_dynamic_sampling_must_look_at_the_unshaped_reward():
    rewards, lengths = jnp.array([[1.0, 1.0]]), jnp.array([[10, 22]])
    shaped = rewards + shaping.overlong_penalty(
        lengths, max_length=25, buffer=5, bound="capped"
    )
    assert (advantages.group_centered(rewards) == 0).all()
    assert (advantages.group_centered(shaped) != 0).all()
