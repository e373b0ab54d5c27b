"""Policy losses: float64 transcriptions, finite differences, laws, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import policy, ratios, reduce

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
LOGPROBS = hnp.arrays(np.float32, (3, 4), elements=st.floats(-6, 0, width=32))
ADVANTAGES = hnp.arrays(np.float32, (3, 4), elements=st.floats(-3, 3, width=32))
MASKS = hnp.arrays(bool, (3, 4))
LOW, HIGH, DUAL = 0.2, 0.28, 3.0


def token_ratio(p, q, mask):
    return np.exp(p - q)


def sequence_ratio(p, q, mask):
    ratio = np.ones_like(p)
    for row, kept in enumerate(mask):
        if kept.any():
            ratio[row] = np.exp((p - q)[row, kept].mean())
    return ratio


def clipped(ratio, advantages):
    bounded = np.minimum(np.maximum(ratio, 1 - LOW), 1 + HIGH)
    return -np.minimum(ratio * advantages, bounded * advantages)


def dual_clipped(ratio, advantages):
    loss = clipped(ratio, advantages)
    return np.where(advantages < 0, np.minimum(loss, -DUAL * advantages), loss)


# Each loss with its transcription in float64, which sees float64 copies and the mask.
CASES = {
    "clipped": (
        lambda p, q, a, m: policy.clipped_surrogate(
            p, q, a, m, clip_low=LOW, clip_high=HIGH
        ),
        lambda p, q, a, m: clipped(token_ratio(p, q, m), a),
    ),
    "dual_clipped": (
        lambda p, q, a, m: policy.clipped_surrogate(
            p, q, a, m, clip_low=LOW, clip_high=HIGH, dual_clip=DUAL
        ),
        lambda p, q, a, m: dual_clipped(token_ratio(p, q, m), a),
    ),
    "gspo": (
        lambda p, q, a, m: policy.gspo(p, q, a, m, clip_low=LOW, clip_high=HIGH),
        lambda p, q, a, m: clipped(sequence_ratio(p, q, m), a),
    ),
    "reinforce": (
        lambda p, q, a, m: policy.reinforce(p, a, m),
        lambda p, q, a, m: -a * p,
    ),
}


@pytest.mark.parametrize("name", CASES)
@LAWS
@given(p=LOGPROBS, q=LOGPROBS, a=ADVANTAGES, mask=MASKS)
def test_equals_its_transcription(name, p, q, a, mask):
    loss, transcription = CASES[name]
    values = jax.jit(loss)(*map(jnp.array, (p, q, a, mask)))
    p, q, a = (x.astype(np.float64) for x in (p, q, a))
    expected = np.where(mask, transcription(p, q, a, mask), 0.0)
    np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_finite_differences(name):
    loss, transcription = CASES[name]
    rng = np.random.default_rng(1)
    q = rng.uniform(-3, 0, (3, 4))
    # Ratios from far below to far above the clip range, none of them on a corner.
    p = q + rng.uniform(-0.6, 1.4, (3, 4))
    a, mask = rng.normal(size=(3, 4)), rng.random((3, 4)) < 0.8
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


@pytest.mark.parametrize("name", ["clipped", "dual_clipped", "cispo"])
@LAWS
@given(p=LOGPROBS, a=ADVANTAGES, mask=MASKS)
def test_on_policy_gradient_equals_reinforce(name, p, a, mask):
    losses = {key: case[0] for key, case in CASES.items()}
    losses["cispo"] = lambda p, q, a, m: policy.cispo(
        p, q, a, m, ratio_low=0.0, ratio_high=5.0
    )
    p, a, mask = map(jnp.array, (p, a, mask))
    gradient = jax.grad(lambda x: losses[name](x, p, a, mask).sum())(p)
    reinforce = jax.grad(lambda x: policy.reinforce(x, a, mask).sum())(p)
    # At the border of the denormals an advantage times a ratio is flushed to zero.
    np.testing.assert_allclose(gradient, reinforce, rtol=1e-6, atol=1e-30)


def test_a_clipped_token_has_no_gradient():
    q = jnp.zeros(4)
    p = jnp.log(jnp.array([0.5, 0.5, 2.0, 2.0]))
    a = jnp.array([-1.0, 1.0, 1.0, -1.0])
    gradient = jax.grad(
        lambda x: policy.clipped_surrogate(
            x, q, a, jnp.ones(4, bool), clip_low=0.2, clip_high=0.2
        ).sum()
    )(p)
    np.testing.assert_allclose(gradient, [0.0, -0.5, 0.0, 2.0], rtol=1e-6)


def test_dual_clip_removes_the_gradient_of_a_very_unlikely_bad_token():
    p, q = jnp.log(jnp.array([2.0, 10.0])), jnp.zeros(2)
    a = jnp.array([-1.0, -1.0])
    gradient = jax.grad(
        lambda x: policy.clipped_surrogate(
            x, q, a, jnp.ones(2, bool), clip_low=0.2, clip_high=0.2, dual_clip=3.0
        ).sum()
    )(p)
    np.testing.assert_allclose(gradient, [2.0, 0.0], rtol=1e-6)


def test_cispo_keeps_the_gradient_of_every_token():
    p, q = jnp.log(jnp.array([0.1, 1.0, 9.0])), jnp.zeros(3)
    a = jnp.array([1.0, -1.0, 1.0])
    gradient = jax.grad(
        lambda x: policy.cispo(
            x, q, a, jnp.ones(3, bool), ratio_low=0.8, ratio_high=1.2
        ).sum()
    )(p)
    np.testing.assert_allclose(gradient, [-0.8, 1.0, -1.2], rtol=1e-6)


def gspo_example():
    rng = np.random.default_rng(3)
    q = jnp.array(rng.uniform(-3, 0, (2, 5)), jnp.float32)
    p = q + jnp.array(rng.uniform(-0.2, 0.25, (2, 5)), jnp.float32)
    return p, q, jnp.arange(5) < jnp.array([[3], [5]])


def test_gspo_token_equals_gspo_for_one_advantage_a_sequence():
    p, q, mask = gspo_example()
    a = jnp.broadcast_to(jnp.array([[1.5], [-0.5]]), (2, 5))

    def loss(function, x):
        values = function(x, q, a, mask, clip_low=LOW, clip_high=HIGH)
        return reduce.sequence_mean_of_token_mean(values, mask).sum

    value, gradient = jax.value_and_grad(lambda x: loss(policy.gspo, x))(p)
    token_value, token_gradient = jax.value_and_grad(
        lambda x: loss(policy.gspo_token, x)
    )(p)
    assert token_value == pytest.approx(value.item(), rel=1e-6)
    np.testing.assert_allclose(token_gradient, gradient, rtol=1e-5)
    assert (gradient != 0).sum() == 8


def test_gspo_token_credits_each_token_with_its_own_advantage():
    p, q, mask = gspo_example()
    a = jnp.array([[1.0, 2.0, -1.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    wide = {"clip_low": 0.9, "clip_high": 0.9}
    gradient = jax.grad(lambda x: policy.gspo_token(x, q, a, mask, **wide).sum())(p)
    expected = jnp.where(mask, -a * ratios.sequence_ratio(p, q, mask), 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_low": -0.1, "clip_high": 0.2}, r"clip_low must be in \[0, 1\].*-0.1"),
        ({"clip_low": 1.2, "clip_high": 0.2}, r"clip_low must be in \[0, 1\].*1.2"),
        ({"clip_low": 0.2, "clip_high": -0.1}, r"clip_high must be >= 0.*got -0.1"),
    ],
)
@pytest.mark.parametrize(
    "loss", [policy.clipped_surrogate, policy.gspo, policy.gspo_token]
)
def test_clip_range_is_checked(loss, arguments, message):
    x = jnp.zeros((1, 1))
    with pytest.raises(ValueError, match=message):
        loss(x, x, x, jnp.ones((1, 1), bool), **arguments)


def test_dual_clip_is_checked():
    x = jnp.zeros((1, 1))
    with pytest.raises(ValueError, match=r"dual_clip must be > 1 or None, got 1\.0"):
        policy.clipped_surrogate(
            x,
            x,
            x,
            jnp.ones((1, 1), bool),
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=1.0,
        )


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (-0.1, 5.0, r"ratio_low must be in \[0, 1\], got -0.1"),
        (1.1, 5.0, r"ratio_low must be in \[0, 1\], got 1.1"),
        (0.0, 0.28, r"ratio_high .* must be >= 1, got 0.28; .* pass 1 \+ epsilon"),
    ],
)
def test_cispo_bounds_are_checked(low, high, message):
    x = jnp.zeros((1, 1))
    with pytest.raises(ValueError, match=message):
        policy.cispo(x, x, x, jnp.ones((1, 1), bool), ratio_low=low, ratio_high=high)


ON_THE_BOUND = [
    # (loss, the weight of the token's gradient)
    (policy.clipped_surrogate, 1.0),
    (policy.gspo_token, 1.0),
    (policy.gmpo, 0.5),
    (policy.gspo, 0.5),
    (policy.clipped_sequence_surrogate, 1.0),
]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("loss", "weight"), ON_THE_BOUND)
@pytest.mark.parametrize("bounds", [(0.0, 0.2), (0.2, 0.0), (0.0, 0.0)])
def test_a_bound_of_0_keeps_all_of_the_gradient_on_policy(loss, weight, sign, bounds):
    """Two tokens with the ratio 1; of a mean over a sequence each has a half."""
    logprobs, mask = jnp.array([-1.0, -2.0]), jnp.array([True, True])
    advantages = jnp.full(2, sign)
    low, high = bounds

    def first(p):
        found = loss(p, logprobs, advantages, mask, clip_low=low, clip_high=high)
        return found[0]

    gradient = jax.grad(first)(logprobs)
    assert gradient[0].item() == pytest.approx(-sign * weight, rel=1e-6)


def test_the_clip_of_ratios_passes_the_gradient_up_to_the_bounds():
    ratio = jnp.array([0.5, 0.75, 1.0, 1.5, 2.0, jnp.nan])
    value, pull = jax.vjp(lambda x: ratios.within(x, 0.75, 1.5), ratio)
    np.testing.assert_array_equal(value, [0.75, 0.75, 1.0, 1.5, 1.5, np.nan])
    assert pull(jnp.ones(6))[0].tolist()[:5] == [0, 1, 1, 1, 0]
