"""SAPO and GMPO: float64 transcriptions, finite differences, laws, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import policy, reduce
from tests.losses.test_contract import example

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGPROBS = hnp.arrays(np.float32, (3, 4), elements=st.floats(-6, 0, width=32))
ADVANTAGES = hnp.arrays(np.float32, (3, 4), elements=st.floats(-3, 3, width=32))
# One advantage a row, as in the paper of GMPO, which divides by its sign.
ROW_ADVANTAGES = hnp.arrays(
    np.float32, (3, 1), elements=st.sampled_from([-2.0, -0.5, 0.25, 3.0])
)
MASKS = hnp.arrays(bool, (3, 4))
LOW, HIGH = 0.3, 0.5


def sapo_transcription(p, q, a, mask):
    tau = np.where(a > 0, 1.0, 1.05)
    return -4 / tau / (1 + np.exp(-tau * (np.exp(p - q) - 1))) * a


def gmpo_transcription(p, q, a, mask):
    """The paper's objective of each row, negated, at each of its tokens."""
    loss = np.zeros_like(p)
    for row, kept in enumerate(mask):
        if kept.any():
            ratio, advantage = np.exp((p - q)[row, kept]), a[row, 0]
            clipped = np.clip(ratio, np.exp(-LOW), np.exp(HIGH))
            surrogate = np.minimum(ratio * advantage, clipped * advantage)
            product = np.prod(np.abs(surrogate)) ** (1 / kept.sum())
            loss[row] = -product * np.sign(advantage)
    return loss


def gmpo(p, q, a, mask, segment_ids=None):
    return policy.gmpo(p, q, a, mask, segment_ids, clip_low=LOW, clip_high=HIGH)


CASES = {
    "sapo": (policy.sapo, sapo_transcription),
    "gmpo": (gmpo, gmpo_transcription),
}
OVER = pytest.mark.parametrize("name", CASES)


def check_transcription(name, p, q, a, mask):
    loss, transcription = CASES[name]
    values = jax.jit(loss)(*map(jnp.array, (p, q, a, mask)))
    p, q, a = (x.astype(np.float64) for x in (p, q, a))
    expected = np.where(mask, transcription(p, q, a, mask), 0.0)
    np.testing.assert_allclose(values, expected, rtol=3e-5, atol=1e-5)


@LAWS
@given(p=LOGPROBS, q=LOGPROBS, a=ADVANTAGES, mask=MASKS)
def test_sapo_equals_its_transcription(p, q, a, mask):
    check_transcription("sapo", p, q, a, mask)


@LAWS
@given(p=LOGPROBS, q=LOGPROBS, a=ROW_ADVANTAGES, mask=MASKS)
def test_gmpo_equals_its_transcription(p, q, a, mask):
    check_transcription("gmpo", p, q, np.tile(a, 4), mask)


@OVER
def test_gradient_equals_finite_differences(name):
    loss, transcription = CASES[name]
    rng = np.random.default_rng(1)
    q = rng.uniform(-3, 0, (3, 4))
    # Log-ratios inside and outside of the clip range on both sides, none on a corner.
    p = q + rng.uniform(-0.8, 1.1, (3, 4))
    a = np.repeat([[1.0], [-2.0], [0.5]], 4, axis=1)
    mask = rng.random((3, 4)) < 0.8
    arrays = [jnp.array(x, jnp.float32) for x in (p, q, a)] + [jnp.array(mask)]
    weights = rng.normal(size=(3, 4))

    def total(x):
        return (weights * np.where(mask, transcription(x, q, a, mask), 0.0)).sum()

    step, numeric = 1e-6, np.zeros_like(p)
    for index in np.ndindex(p.shape):
        shift = np.zeros_like(p)
        shift[index] = step
        numeric[index] = (total(p + shift) - total(p - shift)) / (2 * step)
    scale = jnp.array(weights, jnp.float32)
    gradient = jax.grad(lambda x: (scale * loss(x, *arrays[1:])).sum())(arrays[0])
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5)
    assert np.count_nonzero(numeric) > 3
    assert name != "gmpo" or np.count_nonzero(numeric[mask]) < mask.sum()


def test_on_policy_gradient_of_sapo_equals_reinforce():
    gradient = jax.jit(jax.grad(lambda x, *rest: policy.sapo(x, *rest).sum()))
    reinforce = jax.jit(jax.grad(lambda *x: policy.reinforce(*x).sum()))

    @LAWS
    @given(p=LOGPROBS, a=ADVANTAGES, mask=MASKS)
    def check(p, a, mask):
        np.testing.assert_allclose(
            gradient(p, p, a, mask), reinforce(p, a, mask), rtol=1e-6, atol=1e-30
        )

    check()


def test_sapo_fades_on_both_sides_of_the_old_policy():
    q = jnp.zeros(5)
    p = jnp.log(jnp.array([0.01, 0.5, 1.0, 3.0, 30.0]))

    def gradient(tau):
        return jax.grad(
            lambda x: policy.sapo(
                x, q, jnp.ones(5), jnp.ones(5, bool), tau_positive=tau
            ).sum()
        )(p)

    soft = -gradient(2.0) / jnp.exp(p)
    assert soft[2] == pytest.approx(1.0)
    assert soft[0] < soft[1] < soft[2] > soft[3] > soft[4]
    assert (-gradient(4.0) / jnp.exp(p) <= soft).all()


def test_on_policy_gradient_of_gmpo_is_the_advantage_over_the_length():
    p = jnp.array([[-1.0, -2.0, -3.0, -4.0], [-1.0, -1.0, -1.0, -1.0]])
    a = jnp.array([[1.5] * 4, [-2.0] * 4])
    mask = jnp.array([[True, True, True, False], [True, True, True, True]])

    def loss(x):
        return reduce.sequence_mean_of_token_mean(policy.gmpo(x, p, a, mask), mask).sum

    expected = [[-0.5, -0.5, -0.5, 0.0], [0.5, 0.5, 0.5, 0.5]]
    np.testing.assert_allclose(jax.grad(loss)(p), expected, rtol=1e-6)


def test_gmpo_clips_each_token_on_the_side_that_its_advantage_favours():
    log_ratio = jnp.array([[2.0, -2.0], [2.0, -2.0]])
    a, mask = jnp.array([[1.0, 1.0], [-1.0, -1.0]]), jnp.ones((2, 2), bool)
    arguments = (jnp.zeros((2, 2)), a, mask)

    def loss(x):
        return policy.gmpo(x, *arguments, clip_low=0.5, clip_high=1.0)

    values = loss(log_ratio)[:, 0]
    np.testing.assert_allclose(values, [-np.exp(-0.5), np.exp(0.75)], rtol=1e-6)
    gradient = jax.grad(lambda x: loss(x).sum())(log_ratio)
    np.testing.assert_array_equal(gradient != 0, [[False, True], [True, False]])


def test_gmpo_is_gspo_where_nothing_is_clipped():
    p, q, _, mask, ids = example(seed=4)
    a = jnp.ones(p.shape)
    wide = policy.gspo(p, q, a, mask, ids, clip_low=1.0, clip_high=1e9)
    values = policy.gmpo(p, q, a, mask, ids, clip_low=99.0, clip_high=99.0)
    np.testing.assert_allclose(values, wide, rtol=1e-6)


@OVER
def test_extreme_log_probs_give_finite_losses_and_gradients(name):
    loss, _ = CASES[name]
    p = jnp.array([[-jnp.inf, 0.0, -1e4, 0.0]])
    q = jnp.array([[0.0, -jnp.inf, 0.0, -1e4]])
    for sign in (1.0, -1.0):
        value, gradient = jax.value_and_grad(
            lambda x, a: loss(x, q, a, jnp.ones((1, 4), bool)).sum()
        )(p, jnp.full((1, 4), sign))
        assert jnp.isfinite(value)
        assert jnp.isfinite(gradient).all()


@OVER
def test_counted_nan_stays_visible(name):
    loss, _ = CASES[name]
    x, mask = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    bad = x.at[0, 1].set(jnp.nan)
    for arrays in ((bad, x, x + 1), (x, bad, x + 1), (x, x, bad)):
        assert jnp.isnan(loss(*arrays, mask))[0, 1]


@pytest.mark.parametrize(
    ("loss", "arguments", "message"),
    [
        (policy.sapo, {"tau_positive": 0.0}, r"tau_positive must be > 0, got 0\.0"),
        (policy.sapo, {"tau_negative": -1.0}, r"tau_negative must be > 0, got -1\.0"),
        (policy.gmpo, {"clip_low": -0.1}, r"clip_low .* >= 0 \(nats\), got -0\.1"),
        (policy.gmpo, {"clip_high": -0.2}, r"clip_high .* >= 0 \(nats\), got -0\.2"),
    ],
)
def test_hyperparameters_are_checked(loss, arguments, message):
    x = jnp.zeros((1, 1))
    with pytest.raises(ValueError, match=message):
        loss(x, x, x, jnp.ones((1, 1), bool), **arguments)
