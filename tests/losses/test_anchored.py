"""Anchored losses and AOT's margins: float64 transcriptions, numbers by hand, laws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, log_expit

from jaxrl_post.losses import anchored, margins, preference

BETA, TAU, SMOOTH = 0.4, 0.3, 0.1


def discopop(h):
    x = BETA * h
    s = expit(x / TAU)
    return (1 - s) * -log_expit(x) + s * np.exp(-x)


def exo(h):
    q = expit(BETA * h)
    return q * np.log(q / (1 - SMOOTH)) + (1 - q) * np.log((1 - q) / SMOOTH)


# Each loss with its transcription, of the two log-ratios.
OF_LOG_RATIOS = {
    "apo_zero": (
        anchored.apo_zero_loss,
        lambda c, r: 1 - expit(BETA * c) + expit(BETA * r),
    ),
    "apo_down": (
        anchored.apo_down_loss,
        lambda c, r: expit(BETA * c) + 1 - expit(BETA * (c - r)),
    ),
    "bco_pair": (
        anchored.bco_pair_loss,
        lambda c, r: -log_expit(BETA * c) - log_expit(-BETA * r),
    ),
    "nca": (
        anchored.nca_loss,
        lambda c, r: (
            -log_expit(BETA * c) - log_expit(-BETA * c) / 2 - log_expit(-BETA * r) / 2
        ),
    ),
    "sppo": (
        anchored.sppo_loss,
        lambda c, r: (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2,
    ),
}
OF_MARGINS = {
    "discopop": (partial(margins.discopop_loss, tau=TAU), discopop),
    "exo": (partial(margins.exo_loss, label_smoothing=SMOOTH), exo),
}


def log_ratios(seed=5, pairs=7):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 3, (2, pairs)), rng.random(pairs) < 0.7


def check(loss, transcription, *arrays, valid):
    low = [jnp.array(x, jnp.float32) for x in arrays]
    found = loss(*low, jnp.array(valid), beta=BETA)
    expected = np.where(valid, transcription(*arrays), 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    gradients = jax.grad(
        lambda *x: loss(*x, jnp.array(valid), beta=BETA).sum(), range(len(low))
    )(*low)
    for index, gradient in enumerate(gradients):
        step = np.zeros((len(arrays), 1))
        step[index] = 1e-6
        above, below = (transcription(*(np.array(arrays) + s * step)) for s in (1, -1))
        numeric = np.where(valid, (above - below) / 2e-6, 0.0)
        np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OF_LOG_RATIOS)
def test_anchored_losses_equal_their_transcriptions(name):
    (chosen, rejected), valid = log_ratios()
    check(*OF_LOG_RATIOS[name], chosen, rejected, valid=valid)


@pytest.mark.parametrize("name", OF_MARGINS)
def test_losses_of_the_margin_equal_their_transcriptions(name):
    (margin, _), valid = log_ratios()
    check(*OF_MARGINS[name], margin, valid=valid)


def test_where_the_anchors_pull():
    zero = jnp.zeros(1)

    def pulls(loss):
        return [
            float(x[0])
            for x in jax.grad(lambda c, r: loss(c, r, beta=1.0).sum(), (0, 1))(
                zero, zero
            )
        ]

    # APO-zero raises the chosen and lowers the rejected response, from its first step.
    assert pulls(anchored.apo_zero_loss) == [-0.25, 0.25]
    # APO-down leaves the chosen one at first and lowers the rejected one.
    assert pulls(anchored.apo_down_loss) == [0.0, 0.25]
    # NCA stops raising the chosen one at sigmoid(beta c) = 2/3.
    at_rest = jnp.log(jnp.array([2.0]))
    slope = jax.grad(lambda c: anchored.nca_loss(c, zero, beta=1.0).sum())(at_rest)
    np.testing.assert_allclose(slope, 0.0, atol=1e-7)
    targets = jnp.array([5.0]), jnp.array([-5.0])
    assert anchored.sppo_loss(*targets, beta=0.1).tolist() == [0.0]


def test_exo_is_the_kl_to_the_labels_and_vanishes_at_them():
    sure = jnp.log(jnp.array([0.75 / 0.25]))
    loss = partial(margins.exo_loss, beta=1.0, label_smoothing=0.25)
    np.testing.assert_allclose(loss(sure), 0.0, atol=1e-7)
    assert (loss(jnp.array([-2.0, 0.0, 3.0])) > 0).all()


def test_discopop_far_from_the_label_stays_finite_and_logistic():
    far = jnp.array([-1e4, 1e4])
    loss = margins.discopop_loss(far, beta=0.3)
    np.testing.assert_allclose(loss, [3000.0, 0.0], rtol=1e-6)
    # With a wide blend the exponential part reaches negative margins, up to the clamp.
    wide = margins.discopop_loss(far, beta=0.3, tau=2.0)
    assert jnp.isfinite(wide).all()


def aot(pc, pr, rc, rr):
    return np.sort(pc - pr) - np.sort(rc - rr)


def aot_unpaired(pc, pr, rc, rr):
    return np.sort(pc - rc) - np.sort(pr - rr)


MARGINS = {
    "aot": (margins.aot_margin, aot),
    "aot_unpaired": (margins.aot_unpaired_margin, aot_unpaired),
}


@pytest.mark.parametrize("name", MARGINS)
def test_aot_compares_quantiles_of_the_valid_pairs(name):
    margin_of, transcription = MARGINS[name]
    rng = np.random.default_rng(11)
    arrays, valid = rng.normal(0, 2, (4, 2, 4)), rng.random((2, 4)) < 0.7
    low = [jnp.array(x, jnp.float32) for x in np.where(valid, arrays, np.nan)]
    found = margin_of(*low, jnp.array(valid))
    np.testing.assert_allclose(
        found[valid], transcription(*arrays[:, valid]), rtol=1e-5, atol=1e-6
    )
    assert (found[~valid] == 0).all()
    whole = margin_of(*(jnp.array(x, jnp.float32) for x in arrays))
    np.testing.assert_allclose(
        whole.reshape(-1), transcription(*arrays.reshape(4, -1)), rtol=1e-5, atol=1e-6
    )


def test_aot_is_dpo_on_one_pair_and_does_not_know_the_pairs_order():
    one = [jnp.array([x]) for x in (-1.0, -2.0, -1.5, -1.0)]
    for margin_of, _ in MARGINS.values():
        np.testing.assert_allclose(
            margin_of(*one), preference.log_ratio_margin(*one), rtol=1e-6
        )
    rng = np.random.default_rng(2)
    pc, pr, rc, rr = (jnp.array(x, jnp.float32) for x in rng.normal(size=(4, 5)))
    order = jnp.array([3, 0, 4, 1, 2])
    np.testing.assert_array_equal(
        margins.aot_unpaired_margin(pc, pr[order], rc, rr[order]),
        margins.aot_unpaired_margin(pc, pr, rc, rr),
    )


def test_a_dominating_policy_has_only_positive_margins():
    reference = jnp.array([-3.0, -1.0, -2.0]), jnp.array([-2.0, -2.0, -2.0])
    policy = reference[0] + jnp.array([0.5, 2.0, 1.0]), reference[1]
    assert (margins.aot_margin(*policy, *reference) > 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: anchored.apo_zero_loss(x, x, beta=0.0), "beta must be > 0, got 0"),
        (lambda x: anchored.apo_down_loss(x, x, beta=0.0), "beta must be > 0, got 0"),
        (lambda x: anchored.bco_pair_loss(x, x, beta=-1.0), "beta must be > 0, got -1"),
        (lambda x: anchored.nca_loss(x, x, beta=0.0), "beta must be > 0, got 0"),
        (lambda x: anchored.sppo_loss(x, x, beta=0.0), "beta must be > 0, got 0"),
        (lambda x: margins.discopop_loss(x, beta=0.0), "beta must be > 0, got 0"),
        (lambda x: margins.discopop_loss(x, beta=1.0, tau=0.0), "tau must be > 0, got"),
        (lambda x: margins.exo_loss(x, beta=0.0), "beta must be > 0, got 0"),
        (
            lambda x: margins.exo_loss(x, beta=1.0, label_smoothing=0.0),
            r"label_smoothing must be in \(0, 0\.5\), got 0\.0; without any the loss",
        ),
    ],
)
def test_hyperparameters_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.zeros(1))
