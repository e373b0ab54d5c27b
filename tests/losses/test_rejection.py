"""Kept and dropped tokens; decoupled weights; their chi-square."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import correction, diagnostics, kl, policy, reduce
from jaxrl_post.losses.rejection import reject_sequences, reject_tokens

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
VALUES = hnp.arrays(np.float32, (3, 6), elements=st.floats(-4, 4, width=32))
MASKS = hnp.arrays(bool, (3, 6))
IDS = np.array([1, 1, 2, 2, 3, 0], np.int32)
LOW, HIGH = -0.75, 1.0
STATISTICS = {"mean": np.mean, "sum": np.sum, "max": np.max}
every_statistic = pytest.mark.parametrize("statistic", STATISTICS)
KEEPERS = {"tokens": lambda d, mask, ids: reject_tokens(d, mask, low=LOW, high=HIGH)}
for _name in STATISTICS:
    KEEPERS[_name] = partial(reject_sequences, statistic=_name, low=LOW, high=HIGH)
every_keeper = pytest.mark.parametrize("name", KEEPERS)


def ids_of_rows():
    return jnp.broadcast_to(jnp.array(IDS), (3, 6))


@every_statistic
@LAWS
@given(values=VALUES, mask=MASKS)
def test_sequences_equal_their_transcription(statistic, values, mask):
    keep = reject_sequences(
        jnp.array(values),
        jnp.array(mask),
        ids_of_rows(),
        statistic=statistic,
        low=LOW,
        high=HIGH,
    )
    expected = np.zeros((3, 6), bool)
    for row in range(3):
        for segment in (1, 2, 3):
            inside = mask[row] & (segment == IDS)
            if inside.any():
                value = STATISTICS[statistic](values[row, inside].astype(np.float64))
                if min(abs(value - LOW), abs(value - HIGH)) < 1e-5:
                    return  # float32 rounds a bound's neighbour to either side.
                expected[row, inside] = LOW <= value <= HIGH
    np.testing.assert_array_equal(keep, expected)


@LAWS
@given(values=VALUES, mask=MASKS)
def test_tokens_equal_their_transcription(values, mask):
    keep = KEEPERS["tokens"](jnp.array(values), jnp.array(mask), None)
    np.testing.assert_array_equal(keep, mask & (values >= LOW) & (values <= HIGH))


def test_both_bounds_are_kept():
    values, mask = jnp.array([[0.5, 2.0]]), jnp.ones((1, 2), bool)
    assert reject_tokens(values, mask, low=0.5, high=2.0).all()
    for value, statistic in ((1.25, "mean"), (2.5, "sum"), (2.0, "max")):
        bounded = partial(reject_sequences, values, mask, statistic=statistic)
        assert bounded(low=value, high=value).all()
        assert not bounded(high=value - 0.01).any()
        assert not bounded(low=value + 0.01, high=9.0).any()


@every_keeper
def test_a_counted_nan_is_kept_and_spoils_its_own_sequence_alone(name):
    values = jnp.array([[9.0, jnp.nan, 9.0, 9.0, 0.5, 9.0]])
    keep = KEEPERS[name](values, jnp.ones((1, 6), bool), jnp.array(IDS)[None])
    first = [name != "tokens", True]
    assert keep.tolist() == [[*first, False, False, True, False]]


def test_a_kept_nan_makes_the_loss_nan():
    behavior = jnp.array([[-1.0, jnp.nan, -1.0]])
    proximal, mask = jnp.full((1, 3), -1.0), jnp.ones((1, 3), bool)
    divergence = kl.k3(behavior, proximal, mask)
    keep = reject_sequences(divergence, mask, statistic="mean", high=0.1)
    weights = correction.decoupled_weights(proximal, behavior, keep, cap=2.0)
    loss = weights * policy.reinforce(proximal, jnp.ones((1, 3)), keep)
    assert jnp.isnan(reduce.token_mean(loss, keep).mean())


def test_bfloat16_is_judged_in_float32():
    # 0.3 in bfloat16 is 0.30078125, and so is the bound if it is rounded as well.
    values, mask = jnp.full((1, 3), 0.3, jnp.bfloat16), jnp.ones((1, 3), bool)
    for high, kept in ((0.3005, False), (0.301, True)):
        assert reject_tokens(values, mask, high=high).all() == kept
        for statistic in ("mean", "max"):
            keep = reject_sequences(values, mask, statistic=statistic, high=high)
            assert keep.all() == keep.any() == kept


@pytest.mark.parametrize("estimator", [kl.k1, kl.k2, kl.k3])
def test_minus_infinity_from_the_sampler_is_rejected(estimator):
    behavior = jnp.array([[-1.0, -jnp.inf, -1.0]])
    mask = jnp.ones((1, 3), bool)
    divergence = estimator(behavior, jnp.full((1, 3), -1.0), mask)
    assert jnp.isfinite(divergence).all()
    keep = reject_tokens(divergence, mask, low=-1.0, high=1.0)
    assert keep.tolist() == [[True, False, True]]
    keep = reject_sequences(divergence, mask, statistic="mean", low=-1.0, high=1.0)
    assert not keep.any()


@pytest.mark.parametrize(("low", "high"), [(2.0, 0.5), (0.0, float("nan"))])
def test_bounds_are_checked(low, high):
    x, mask = jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
    message = f"bounds must satisfy low <= high, got {low} and {high}"
    with pytest.raises(ValueError, match=message):
        reject_tokens(x, mask, low=low, high=high)
    with pytest.raises(ValueError, match=message):
        reject_sequences(x, mask, statistic="mean", low=low, high=high)


def test_statistic_is_checked():
    # Without the run-time type checker, as in a user's program.
    function = inspect.unwrap(reject_sequences)
    x, mask = jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
    with pytest.raises(ValueError, match=r"statistic must be 'mean', .*'median'"):
        function(x, mask, statistic="median", high=1.0)


def test_decoupled_weights_are_the_truncated_token_weights_without_gradient():
    behavior = jnp.log(jnp.array([0.5, 0.1, 0.4]))
    proximal = jnp.log(jnp.array([0.25, 0.9, 0.4]))
    mask = jnp.array([True, True, False])

    def weights(p, q):
        return correction.decoupled_weights(p, q, mask, cap=5.0)

    np.testing.assert_allclose(weights(proximal, behavior), [0.5, 5.0, 1.0], rtol=1e-6)
    gradients = jax.grad(lambda p, q: weights(p, q).sum(), argnums=(0, 1))(
        proximal, behavior
    )
    assert all((gradient == 0).all() for gradient in gradients)
    with pytest.raises(ValueError, match=r"cap must be > 0, got 0\.0"):
        correction.decoupled_weights(proximal, behavior, mask, cap=0.0)


def test_the_decoupled_gradient_at_the_proximal_policy_is_the_importance_weighted_one():
    rng = np.random.default_rng(7)
    proximal, behavior = jnp.array(-rng.gamma(1.0, 1.0, (2, 2, 3)), jnp.float32)
    advantages, mask = jnp.array(rng.normal(size=(2, 3)), jnp.float32), jnp.ones((2, 3))
    mask = mask.astype(bool)
    weights = correction.decoupled_weights(proximal, behavior, mask, cap=2.0)

    def loss(p):
        surrogate = policy.clipped_surrogate(
            p, proximal, advantages, mask, clip_low=0.2, clip_high=0.2
        )
        return (weights * surrogate).sum()

    expected = -np.minimum(np.exp(proximal - behavior), 2.0) * advantages
    np.testing.assert_allclose(jax.grad(loss)(proximal), expected, rtol=1e-5)


def test_chi_square_is_the_divergence_in_expectation():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    # Tokens in exactly the behavior policy's proportions.
    tokens = np.repeat(np.arange(3), [2, 3, 5])
    metric = diagnostics.chi_square(jnp.array((p / q)[tokens]), jnp.ones(10, bool))
    assert metric.count == 10
    assert metric.mean().item() == pytest.approx(((p - q) ** 2 / q).sum(), rel=1e-5)


def test_chi_square_counts_what_is_counted():
    mask = jnp.array([True, True, False, False])
    for bad in (jnp.nan, jnp.inf):
        metric = diagnostics.chi_square(jnp.array([2.0, 1.0, bad, bad]), mask)
        assert (metric.sum.item(), metric.count.item()) == (3.0, 2.0)
    assert jnp.isnan(diagnostics.chi_square(jnp.array([jnp.nan]), mask[:1]).sum)
    nothing = diagnostics.chi_square(jnp.ones(4), jnp.zeros(4, bool))
    assert (nothing.sum.item(), nothing.mean().item()) == (0.0, 0.0)
    assert diagnostics.chi_square(jnp.ones(4, jnp.bfloat16), mask).sum.dtype == "f4"
