"""Numbers and dialects of preference losses, paired and unpaired."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.losses import preference, reference_free, sequences, unpaired

LN_2 = 0.693147


def test_row_18_dpo_at_initialisation():
    chosen, rejected = jnp.array([-12.0, -40.0]), jnp.array([-30.0, -7.0])
    margin = preference.log_ratio_margin(chosen, rejected, chosen, rejected)
    loss = preference.sigmoid_loss(margin, beta=0.1)
    np.testing.assert_allclose(loss, [LN_2, LN_2], atol=5e-7)


def test_row_38_ipo_of_per_token_means_at_its_target():
    # Four tokens chosen, two rejected; the mean log-ratios are 3 and -2.
    mask = jnp.array([[True] * 4, [True, True, False, False]])
    reference = jnp.full((2, 4), -9.0)
    policy = reference + jnp.array([[3.0], [-2.0]])
    lengths = mask.sum(axis=-1)

    def mean(logprobs):
        total = sequences.sequence_sum(logprobs, mask)[:, 0]
        return preference.length_normalized(total, lengths)

    (pc, pr), (rc, rr) = mean(policy)[:, None], mean(reference)[:, None]
    margin = preference.log_ratio_margin(pc, pr, rc, rr)
    assert margin.tolist() == [5.0]
    assert preference.ipo_loss(margin, beta=0.1).tolist() == [0.0]


@pytest.mark.parametrize(
    ("dialect", "margin"), [("paper: sums", 4 * 3.0 + 2 * 2.0), ("TRL: means", 5.0)]
)
def test_dialects_of_the_ipo_margin(dialect, margin):
    loss = preference.ipo_loss(jnp.array([margin]), beta=0.1)
    assert loss.item() == pytest.approx((margin - 5.0) ** 2), dialect


@pytest.mark.parametrize(
    ("dialect", "label_smoothing", "expected"),
    [
        ("DPO", 0.0, 0.554355),
        ("cDPO", 0.1, 0.584355),
    ],
)
def test_smoothing_of_dpo(dialect, label_smoothing, expected):
    # beta h = 0.3: softplus(-0.3) and, smoothed, 0.1 * 0.3 more.
    margin = jnp.array([3.0])
    loss = preference.sigmoid_loss(margin, beta=0.1, label_smoothing=label_smoothing)
    assert loss.item() == pytest.approx(expected, abs=5e-7), dialect


def test_robust_dpo_of_the_same_margin():
    # (0.9 * softplus(-0.3) - 0.1 * softplus(0.3)) / 0.8
    loss = preference.robust_loss(jnp.array([3.0]), beta=0.1, label_smoothing=0.1)
    assert loss.item() == pytest.approx(0.516855, abs=5e-7)


@pytest.mark.parametrize(
    ("divergence", "margin", "expected"),
    [
        ("reverse KL", preference.log_ratio_margin, np.log(4)),
        ("Jensen-Shannon", preference.jensen_shannon_margin, np.log(4 / 3 / (2 / 3))),
        (
            "forward KL",
            lambda *args: preference.alpha_divergence_margin(*args, alpha=1.0),
            -1 / 2 + 2,
        ),
        (
            "alpha 1/2",
            lambda *args: preference.alpha_divergence_margin(*args, alpha=0.5),
            2 * (2**0.5 - 0.5**0.5),
        ),
    ],
)
def test_divergences_for_ratios_of_two_and_a_half(divergence, margin, expected):
    ratios, zeros = jnp.log(jnp.array([2.0, 0.5])), jnp.zeros(1)
    h = margin(ratios[:1], ratios[1:], zeros, zeros)
    assert h.item() == pytest.approx(expected, rel=1e-6), divergence


@pytest.mark.parametrize(
    ("dialect", "gamma"), [("gamma", 1.4), ("gamma / beta = 0.7", 2.0 * 0.7)]
)
def test_dialects_of_the_simpo_margin(dialect, gamma):
    chosen, rejected = jnp.array([-0.5]), jnp.array([-1.2])
    loss = reference_free.simpo_loss(chosen, rejected, beta=2.0, target_margin=gamma)
    assert loss.item() == pytest.approx(LN_2, abs=1e-6), dialect


def test_orpo_of_even_and_of_three_to_one_odds():
    # Odds of 1 and of 1/3: softplus(-log 3) = log(4 / 3).
    chosen, rejected = jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25]))
    loss = reference_free.orpo_loss(chosen, rejected)
    assert loss.item() == pytest.approx(np.log(4 / 3), rel=1e-6)


def test_kto_at_initialisation():
    policy, desirable = jnp.array([-5.0, -6.0]), jnp.array([True, False])
    point = unpaired.kto_reference_point(policy, policy)
    loss = unpaired.kto_loss(policy, policy, desirable, point, beta=0.1)
    assert loss.tolist() == [0.5, 0.5]


def test_a_tie_is_half_right():
    # TRL has 0.5 here: a tie is wrong, and a policy at its start is never right.
    assert preference.accuracy(jnp.array([1.0, 0.0])).mean().item() == 0.75
