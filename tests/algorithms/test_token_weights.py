"""The advantage of a token or a turn moves that token's log-prob, and no other's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.algorithms import corrections, terms
from jaxrl_post.algorithms.objective import Predictions
from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.learner.algorithm import make_algorithm
from jaxrl_post.learner.algorithm_checks import check_run
from jaxrl_post.types import TokenBatch

NAMES = ("grpo", "dr_grpo", "dapo", "cispo", "rloo", "sapo", "max_rl", "lite_ppo")
SEQUENCES = ("vespo", "gspo", "luspo")


def batch(advantages, mask, behavior) -> TokenBatch:
    length = len(mask)
    return TokenBatch(
        tokens=jnp.zeros((1, length), jnp.int32),
        positions=jnp.arange(length, dtype=jnp.int32)[None],
        ends=jnp.full((1, length), length, jnp.int32),
        loss_mask=jnp.array([mask], jnp.bool_),
        advantages=jnp.array([advantages], jnp.float32),
        behavior_logprobs=jnp.array([behavior], jnp.float32),
        versions=jnp.zeros((1, length), jnp.int32),
    )


def gradient(algorithm, given: TokenBatch) -> np.ndarray:
    length = given.tokens.shape[1]

    def loss(logprobs):
        found = Predictions(logprobs=logprobs, entropy=jnp.zeros((1, length)))
        return algorithm.objective(found, given).loss.mean()

    return np.asarray(jax.grad(loss)(jnp.full((1, length), -1.0)))[0]


def turns_of(name: str) -> RLConfig:
    return RLConfig(
        algorithm=AlgorithmConfig(name=name, turn_credit="turns"),
        rollout=RolloutConfig(max_turns=2, max_prompt_tokens=64),
    )


@pytest.mark.parametrize("name", [*NAMES, *SEQUENCES])
def test_each_turn_is_moved_by_its_own_advantage(name):
    config = turns_of(name)
    check_options(config)
    check_run(config, make_algorithm(config.algorithm, 16))
    given = batch([0, 1, 1, 0, -1, -1, 0], [0, 1, 1, 0, 1, 1, 0], [-1.0] * 7)
    found = gradient(make_algorithm(config.algorithm, 16), given)
    assert (np.sign(found) == [0, -1, -1, 0, 1, 1, 0]).all()


@pytest.mark.parametrize("name", ["clipped_rloo", "gmpo"])
def test_where_turns_average_out_their_credit_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} has one ratio for a sequence"):
        check_run(turns_of(name), make_algorithm(AlgorithmConfig(name), 16))
    # The reason: these advantages leave no gradient.
    given = batch([0, 1, 1, 0, -1, -1, 0], [0, 1, 1, 0, 1, 1, 0], [-1.0] * 7)
    algorithm = make_algorithm(AlgorithmConfig(name=name), 16)
    np.testing.assert_allclose(gradient(algorithm, given), 0, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "gspo", "luspo"])
def test_a_token_that_a_correction_leaves_out_has_no_gradient(name):
    """The last token's ratio is e^8, beyond icepop's bounds."""
    made = getattr(algorithms, name)(correction=corrections.icepop())
    given = batch([0, 1, 1, 1], [0, 1, 1, 1], [0.0, -1.0, -1.0, -9.0])
    found = gradient(made, given)
    assert (found[1:3] < -0.1).all()
    np.testing.assert_allclose(found[[0, 3]], 0, atol=1e-6)


def test_the_two_forms_agree_where_a_sequence_has_one_advantage():
    """GSPO by tokens and by sequences, eq. 13 and eq. 5 of arXiv:2507.18071."""
    rng = np.random.default_rng(0)
    policy = jnp.array(-rng.gamma(2.0, 0.5, (2, 6)), jnp.float32)
    proximal = policy + jnp.array(rng.normal(0, 0.3, (2, 6)), jnp.float32)
    mask, ids = jnp.ones((2, 6), jnp.bool_), jnp.ones((2, 6), jnp.int32)
    advantages = jnp.array([[0.7], [-1.3]], jnp.float32) * jnp.ones((2, 6))

    def found(by_token):
        term = terms.clipped_sequence_ratio(
            clip_low=0.2, clip_high=0.3, by_token=by_token
        )

        def loss(logprobs):
            return term(logprobs, proximal, advantages, mask, ids).loss.sum()

        return jax.value_and_grad(loss)(policy)

    (value, slope), (other_value, other_slope) = found(True), found(False)
    np.testing.assert_allclose(value, other_value, rtol=1e-6)
    np.testing.assert_allclose(slope, other_slope, rtol=1e-5, atol=1e-6)
