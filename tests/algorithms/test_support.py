"""Kept tokens under truncated sampling, in a tree of two tokens that can be summed.

`docs/decisions/0014-kept-support.md` quotes the numbers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels.token_logprob import token_logprob

VOCAB, KEPT = 6, 3
# The first token is drawn in state 0, the second in state 1 + first token.
STATES = 1 + VOCAB
FIRST, SECOND = (each.ravel() for each in np.indices((VOCAB, VOCAB)))
TOKENS = jnp.asarray(np.stack([FIRST, SECOND], axis=1), jnp.int32)
WHERE = np.stack([np.zeros_like(FIRST), 1 + FIRST], axis=1)


def problem(seed):
    """Logits [states, vocab], rewards [vocab, vocab], kept ids and their mask."""
    rng = np.random.default_rng(seed)
    theta = jnp.asarray(rng.normal(size=(STATES, VOCAB)), jnp.float32)
    rewards = jnp.asarray(rng.normal(size=(VOCAB, VOCAB)), jnp.float32)
    ids = jax.lax.top_k(theta, KEPT)[1].astype(jnp.int32)
    return theta, rewards, ids, jax.nn.one_hot(ids, VOCAB).any(axis=1)


def among(theta, kept):
    """Log-probs [states, vocab] of the truncated policy, for a fixed kept set."""
    return jax.nn.log_softmax(jnp.where(kept, theta, -jnp.inf), axis=1)


def score(theta, ids):
    """Log-probs [trajectories, 2] as a trainer scores them."""
    hidden = jax.nn.one_hot(WHERE, STATES)
    kept = None if ids is None else ids[WHERE]
    return token_logprob(hidden, theta.T, TOKENS, kept=kept).logprob


def expected_reward(theta, rewards, kept):
    q = jnp.exp(among(theta, kept))
    return (q[0][:, None] * q[1:] * rewards).sum()


def weights_of(theta, kept):
    """Probability of every trajectory under the sampler."""
    q = np.exp(among(theta, kept))
    return jnp.asarray(q[0, FIRST] * q[1 + FIRST, SECOND])


def relative(found, expected):
    return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


def policy_gradient(theta, advantages, weights, ids):
    """Gradient of the mean over infinitely many samples."""
    return jax.grad(
        lambda theta: (weights[:, None] * advantages * score(theta, ids)).sum()
    )(theta)


def first_update(seed):
    """Relative errors of the gradient on-policy, by support and baseline."""
    theta, rewards, ids, kept = problem(seed)
    exact = jax.grad(expected_reward)(theta, rewards, kept)
    weights, q = weights_of(theta, kept), np.exp(among(theta, kept))
    after = (q[1:] * rewards).sum(axis=1)  # Value once the first token is known.
    value = (q[0] * after).sum()
    outcome = (rewards - value)[FIRST, SECOND][:, None]
    by_state = jnp.stack(
        [(after - value)[FIRST], (rewards - after[:, None])[FIRST, SECOND]], axis=1
    )
    return {
        (support, baseline): relative(
            policy_gradient(theta, advantages, weights, given), exact
        )
        for support, given in (("kept", ids), ("full", None))
        for baseline, advantages in (("outcome", outcome), ("state", by_state))
    }


def later_update(seed, step):
    """After a step along the gradient: KL, and |E ratio - 1| for both supports."""
    theta, rewards, ids, kept = problem(seed)
    gradient = jax.grad(expected_reward)(theta, rewards, kept)
    moved = theta + step * gradient / jnp.linalg.norm(gradient)
    weights = weights_of(theta, kept)
    old, new = (jnp.log(weights_of(each, kept)) for each in (theta, moved))
    kl = jnp.where(weights > 0, weights * (old - new), 0).sum()

    def error(given):
        ratios = jnp.exp((score(moved, given) - score(theta, given)).sum(axis=1))
        return abs(jnp.where(weights > 0, weights * ratios, 0).sum() - 1)

    return float(kl), float(error(ids)), float(error(None))


@pytest.mark.parametrize("seed", range(3))
def test_on_policy_the_kept_support_gives_the_gradient_of_what_is_sampled(seed):
    errors = first_update(seed)
    assert errors["kept", "outcome"] < 1e-5
    assert errors["kept", "state"] < 1e-5
    # One advantage for both tokens also pays for the mass that truncation keeps.
    assert errors["full", "outcome"] > 0.05
    assert errors["full", "state"] < 1e-5


def test_away_from_the_sampler_the_mean_ratio_stays_1():
    kl, kept, full = np.array([later_update(seed, 0.5) for seed in range(20)]).T
    assert 1e-3 < np.median(kl) < 0.1
    assert kept.max() < 1e-5
    assert np.median(full) > 3e-3
