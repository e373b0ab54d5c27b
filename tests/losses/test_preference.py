"""Preference losses: float64 transcriptions, finite differences, laws, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import preference, reference_free
from tests.losses import numeric

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGPROBS = hnp.arrays(np.float32, (5,), elements=st.floats(-6, -0.0625, width=32))
VALID = hnp.arrays(bool, (5,))
BETA, SMOOTH, GAMMA = 0.3, 0.1, 0.5


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def h(pc, pr, rc, rr):
    return (pc - rc) - (pr - rr)


def of_slope(slope):
    """The margin of f-DPO from f'(u)."""
    return lambda pc, pr, rc, rr: slope(np.exp(pc - rc)) - slope(np.exp(pr - rr))


def odds(mean):
    return np.exp(mean) / (1 - np.exp(mean))


def with_margin(loss, **hyperparameters):
    def composed(pc, pr, rc, rr, valid):
        margin = preference.log_ratio_margin(pc, pr, rc, rr, valid)
        return loss(margin, valid, **hyperparameters)

    return composed


def without_reference(loss, **hyperparameters):
    return lambda pc, pr, rc, rr, valid: loss(pc, pr, valid, **hyperparameters)


# Each function with its transcription in float64.
CASES = {
    "log_ratio_margin": (preference.log_ratio_margin, h),
    "alpha_divergence_margin": (
        lambda *args: preference.alpha_divergence_margin(*args, alpha=0.6),
        of_slope(lambda u: (1 - u**-0.6) / 0.6),
    ),
    "forward_kl": (
        lambda *args: preference.alpha_divergence_margin(*args, alpha=1.0),
        of_slope(lambda u: -1 / u),
    ),
    "jensen_shannon_margin": (
        preference.jensen_shannon_margin,
        of_slope(lambda u: np.log(2 * u / (1 + u))),
    ),
    "dpo": (
        with_margin(preference.sigmoid_loss, beta=BETA),
        lambda *args: -np.log(sigmoid(BETA * h(*args))),
    ),
    "cdpo": (
        with_margin(preference.sigmoid_loss, beta=BETA, label_smoothing=SMOOTH),
        lambda *args: (
            -(1 - SMOOTH) * np.log(sigmoid(BETA * h(*args)))
            - SMOOTH * np.log(sigmoid(-BETA * h(*args)))
        ),
    ),
    "robust": (
        with_margin(preference.robust_loss, beta=BETA, label_smoothing=SMOOTH),
        lambda *args: (
            (
                -(1 - SMOOTH) * np.log(sigmoid(BETA * h(*args)))
                + SMOOTH * np.log(sigmoid(-BETA * h(*args)))
            )
            / (1 - 2 * SMOOTH)
        ),
    ),
    "hinge": (
        with_margin(preference.hinge_loss, beta=BETA),
        lambda *args: np.maximum(0, 1 - BETA * h(*args)),
    ),
    "ipo": (
        with_margin(preference.ipo_loss, beta=BETA),
        lambda *args: (h(*args) - 1 / (2 * BETA)) ** 2,
    ),
    "simpo": (
        without_reference(reference_free.simpo_loss, beta=BETA, target_margin=GAMMA),
        lambda pc, pr, rc, rr: -np.log(sigmoid(BETA * (pc - pr) - GAMMA)),
    ),
    "cpo": (
        without_reference(reference_free.cpo_loss, beta=BETA),
        lambda pc, pr, rc, rr: -np.log(sigmoid(BETA * (pc - pr))),
    ),
    "orpo": (
        without_reference(reference_free.orpo_loss),
        lambda pc, pr, rc, rr: -np.log(sigmoid(np.log(odds(pc) / odds(pr)))),
    ),
}
over = pytest.mark.parametrize


@over("name", CASES)
@LAWS
@given(pc=LOGPROBS, pr=LOGPROBS, rc=LOGPROBS, rr=LOGPROBS, valid=VALID)
def test_equals_its_transcription(name, pc, pr, rc, rr, valid):
    function, transcription = CASES[name]
    values = jax.jit(function)(*map(jnp.array, (pc, pr, rc, rr, valid)))
    exact = transcription(*(x.astype(np.float64) for x in (pc, pr, rc, rr)))
    expected = np.where(valid, exact, 0.0)
    np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-5)


@over("name", CASES)
@over("side", [0, 1])
def test_gradient_equals_finite_differences(name, side):
    function, transcription = CASES[name]
    rng = np.random.default_rng(2)
    arrays = [rng.uniform(-3, -0.1, 6) for _ in range(4)]
    valid = jnp.array([True, True, True, False, True, True])

    def exact(x):
        changed = [*arrays[:side], x, *arrays[side + 1 :]]
        return np.where(valid, transcription(*changed), 0.0)

    def total(*arrays):
        return function(*arrays, valid).sum()

    low = [jnp.array(x, jnp.float32) for x in arrays]
    gradient = jax.grad(total, argnums=side)(*low)
    numerical = numeric.gradient(exact, arrays[side])
    np.testing.assert_allclose(gradient, numerical, rtol=2e-4, atol=1e-5)
    assert np.count_nonzero(numerical) == 5


@over("name", ["log_ratio_margin", "forward_kl", "jensen_shannon_margin"])
def test_swapping_chosen_and_rejected_flips_the_margin(name):
    pc, pr, rc, rr = -(jnp.arange(1.0, 13.0).reshape(4, 3) ** 0.5)
    margin = CASES[name][0](pc, pr, rc, rr, None)
    np.testing.assert_array_equal(CASES[name][0](pr, pc, rr, rc, None), -margin)
    assert (margin != 0).all()


def test_a_uniform_reference_leaves_the_policys_own_margin():
    policy, zeros = jnp.array([-1.0, -2.0]), jnp.zeros(2)
    margin = preference.log_ratio_margin(policy, policy - 1.5, zeros, zeros)
    assert margin.tolist() == [1.5, 1.5]
    np.testing.assert_array_equal(
        preference.sigmoid_loss(margin, beta=0.1),
        reference_free.cpo_loss(policy, policy - 1.5, beta=0.1),
    )


@over("beta", [0.05, 0.5])
def test_the_gradient_of_dpo_at_initialisation_is_half_beta(beta):
    gradient = jax.grad(lambda m: preference.sigmoid_loss(m, beta=beta).sum())
    np.testing.assert_allclose(gradient(jnp.zeros(3)), -beta / 2, rtol=1e-6)


def test_alpha_near_zero_is_the_reverse_kl():
    arrays = [jnp.array(x) for x in ([-1.0], [-2.5], [-1.5], [-1.0])]
    margin = preference.alpha_divergence_margin(*arrays, alpha=1e-4)
    np.testing.assert_allclose(margin, preference.log_ratio_margin(*arrays), rtol=1e-3)


def test_alpha_divergence_is_clamped_where_it_would_overflow():
    far, zero = jnp.array([-200.0]), jnp.zeros(1)

    def margin(chosen):
        return preference.alpha_divergence_margin(
            chosen, zero, zero, zero, alpha=1.0
        ).sum()

    value, gradient = jax.value_and_grad(margin)(far)
    assert value.item() == pytest.approx(1 - np.exp(20.0), rel=1e-6)
    assert gradient.tolist() == [0.0]


def test_the_minimum_of_ipo_is_the_target_margin():
    gradient = jax.grad(lambda m: preference.ipo_loss(m, beta=0.25).sum())
    assert gradient(jnp.array([1.0, 2.0, 3.0])).tolist() == [-2.0, 0.0, 2.0]


def test_the_minimum_of_cdpo_is_where_the_model_believes_the_noise():
    margin = jnp.log(jnp.array([0.9 / 0.1])) / 0.3

    def loss(m):
        return preference.sigmoid_loss(m, beta=0.3, label_smoothing=0.1).sum()

    np.testing.assert_allclose(jax.grad(loss)(margin), 0.0, atol=1e-7)


@LAWS
@given(margin=hnp.arrays(np.float32, (5,), elements=st.floats(-9, 9, width=32)))
def test_robust_loss_is_unbiased_under_flipped_labels(margin):
    margin, noise = jnp.array(margin), {"beta": 0.5, "label_smoothing": 0.2}
    kept = preference.robust_loss(margin, **noise)
    flipped = preference.robust_loss(-margin, **noise)
    clean = preference.sigmoid_loss(margin, beta=0.5)
    np.testing.assert_allclose(0.8 * kept + 0.2 * flipped, clean, rtol=1e-4, atol=1e-5)


def test_length_normalized():
    means = preference.length_normalized(
        jnp.array([-6.0, -6.0, 0.0], jnp.bfloat16), jnp.array([4, 3, 0])
    )
    assert means.dtype == jnp.float32
    assert means.tolist() == [-1.5, -2.0, 0.0]


def test_orpo_at_the_ends_of_the_probabilities():
    chosen = jnp.array([0.0, -1e-9, -1e4, -1.0])
    rejected = jnp.array([-1.0, 0.0, -1.0, -1e4])

    def total(chosen, rejected):
        loss = reference_free.orpo_loss(chosen, rejected)
        return loss.sum(), loss

    gradients, loss = jax.grad(total, argnums=(0, 1), has_aux=True)(chosen, rejected)
    odds_of_one = np.log(2.0**23)  # of the largest probability that is told apart
    others = np.log(odds(-1.0))
    expected = [
        np.logaddexp(0, others - odds_of_one),
        np.log(2),
        1e4 + others,
        0.0,
    ]
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-9)
    assert jnp.isfinite(jnp.stack(gradients)).all()
    assert gradients[0][2] == -1.0


def test_wpo_weights():
    chosen, rejected = jnp.log(jnp.array([0.5, 0.9, 2.0])), jnp.log(jnp.full(3, 0.8))
    valid = jnp.array([True, False, True])
    weights = preference.wpo_weights(chosen, rejected, valid)
    np.testing.assert_allclose(weights, [0.4, 0.0, 1.0], rtol=1e-6)


def test_the_metrics():
    margin = jnp.array([2.0, 0.0, -1.0, jnp.nan])
    valid = jnp.array([True, True, True, False])
    accuracy = preference.accuracy(margin, valid)
    assert (accuracy.sum, accuracy.count) == (1.5, 3)
    rewards = preference.reward_margin(margin, valid, beta=0.5)
    assert (rewards.sum, rewards.count) == (0.5, 3)
    reward = preference.implicit_reward(margin, margin - 2.0, valid, beta=0.5)
    assert (reward.sum, reward.count) == (3.0, 3)
    assert jnp.isnan(preference.accuracy(margin).mean())


NEEDS_BETA = {
    "sigmoid_loss": preference.sigmoid_loss,
    "hinge_loss": preference.hinge_loss,
    "ipo_loss": preference.ipo_loss,
    "reward_margin": preference.reward_margin,
    "robust_loss": lambda x, beta: preference.robust_loss(
        x, beta=beta, label_smoothing=0.1
    ),
    "implicit_reward": lambda x, beta: preference.implicit_reward(x, x, beta=beta),
    "cpo_loss": lambda x, beta: reference_free.cpo_loss(x, x, beta=beta),
    "simpo_loss": lambda x, beta: reference_free.simpo_loss(
        x, x, beta=beta, target_margin=0.5
    ),
}


@over("name", NEEDS_BETA)
def test_beta_must_be_positive(name):
    with pytest.raises(ValueError, match=r"beta must be > 0, got -0\.1"):
        NEEDS_BETA[name](jnp.zeros(1), beta=-0.1)


@over("smoothing", [-0.1, 0.5])
@over("loss", [preference.sigmoid_loss, preference.robust_loss])
def test_label_smoothing_is_checked(loss, smoothing):
    message = rf"label_smoothing must be in \[0, 0\.5\), got {smoothing}"
    with pytest.raises(ValueError, match=message):
        loss(jnp.zeros(1), beta=0.1, label_smoothing=smoothing)


@over("alpha", [0.0, 1.5])
def test_alpha_is_checked(alpha):
    x = jnp.zeros(1)
    with pytest.raises(ValueError, match=rf"alpha must be in \(0, 1\], got {alpha}"):
        preference.alpha_divergence_margin(x, x, x, x, alpha=alpha)


def test_the_target_margin_is_checked():
    x = jnp.zeros(1)
    with pytest.raises(ValueError, match=r"target_margin must be >= 0, got -0\.5"):
        reference_free.simpo_loss(x, x, beta=2.0, target_margin=-0.5)
