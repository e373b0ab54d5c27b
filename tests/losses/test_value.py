"""Value losses: float64 transcriptions, finite differences, laws, refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import value
from tests.losses import numeric

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
VALUES = hnp.arrays(np.float32, (3, 4), elements=st.floats(-3, 3, width=32))
MASKS = hnp.arrays(bool, (3, 4))
CLIP = 0.4
over = pytest.mark.parametrize


def clipped(v, old, returns):
    near = old + np.clip(v - old, -CLIP, CLIP)
    return 0.5 * np.maximum((v - returns) ** 2, (near - returns) ** 2)


def squared(v, old, returns):
    return 0.5 * (v - returns) ** 2


CASES = {CLIP: clipped, None: squared}


def example():
    rng = np.random.default_rng(6)
    v, old, returns = rng.normal(size=(3, 3, 4))
    return v, old, returns, rng.random((3, 4)) < 0.7


def low(*arrays):
    return [jnp.array(x, bool if x.dtype == bool else jnp.float32) for x in arrays]


@over("clip", CASES)
@LAWS
@given(v=VALUES, old=VALUES, returns=VALUES, mask=MASKS)
def test_equals_its_transcription(clip, v, old, returns, mask):
    loss = value.clipped_value_loss(*low(v, old, returns, mask), value_clip=clip)
    exact = CASES[clip](*(x.astype(np.float64) for x in (v, old, returns)))
    np.testing.assert_allclose(loss, np.where(mask, exact, 0.0), rtol=2e-5, atol=1e-5)


@over("clip", CASES)
def test_gradient_equals_finite_differences(clip):
    v, old, returns, mask = example()

    def total(*arrays):
        return value.clipped_value_loss(*arrays, jnp.array(mask), value_clip=clip).sum()

    gradient, *constant = jax.grad(total, argnums=(0, 1, 2))(*low(v, old, returns))
    exact = numeric.gradient(
        lambda x: np.where(mask, CASES[clip](x, old, returns), 0.0), v
    )
    np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-6)
    assert np.count_nonzero(exact) > 2
    assert all((x == 0).all() for x in constant)


def test_within_the_clip_the_loss_is_the_plain_one():
    v, old = jnp.array([0.3, -0.39, 0.0]), jnp.zeros(3)
    returns, mask = jnp.array([1.0, 2.0, -1.0]), jnp.ones(3, bool)
    losses = [
        jax.value_and_grad(
            lambda x, clip=clip: value.clipped_value_loss(
                x, old, returns, mask, value_clip=clip
            ).sum()
        )(v)
        for clip in (CLIP, None)
    ]
    np.testing.assert_array_equal(losses[0][1], losses[1][1])
    assert losses[0][0] == losses[1][0]


def test_a_value_beyond_the_clip_is_pulled_back_but_not_onwards():
    # Both have moved by 1 from the old value, towards the return and past it.
    v, old, mask = jnp.ones(2), jnp.zeros(2), jnp.ones(2, bool)
    returns = jnp.array([3.0, 0.5])

    def total(v):
        return value.clipped_value_loss(v, old, returns, mask, value_clip=0.5).sum()

    assert jax.grad(total)(v).tolist() == [0.0, 0.5]
    fraction = value.value_clip_fraction(v, old, returns, mask, value_clip=0.5)
    assert (fraction.sum, fraction.count) == (1, 2)


def test_without_a_clip_the_old_values_are_not_read():
    v, missing = jnp.array([1.0]), jnp.array([jnp.nan])
    mask = jnp.array([True])
    loss = value.clipped_value_loss(v, missing, jnp.zeros(1), mask, value_clip=None)
    assert loss.tolist() == [0.5]


def test_empty_masks_give_zeros():
    bad, nothing = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool)
    assert (value.clipped_value_loss(bad, bad, bad, nothing, value_clip=0.2) == 0).all()
    fraction = value.value_clip_fraction(bad, bad, bad, nothing, value_clip=0.2)
    assert (fraction.sum, fraction.count) == (0, 0)
    assert value.explained_variance(bad, bad, nothing) == 0


@LAWS
@given(v=VALUES, returns=VALUES, mask=MASKS)
def test_explained_variance_equals_its_transcription(v, returns, mask):
    kept, target = v[mask].astype(np.float64), returns[mask].astype(np.float64)
    assume(target.size > 0 and target.var() > 1e-3)
    explained = value.explained_variance(*low(v, returns, mask))
    exact = 1 - (target - kept).var() / target.var()
    np.testing.assert_allclose(explained, exact, rtol=1e-3, atol=1e-4)


def test_explained_variance_of_known_critics():
    returns, mask = jnp.array([1.0, 2.0, 4.0, 9.0]), jnp.ones(4, bool)
    explained = partial(value.explained_variance, returns=returns, mask=mask)
    assert explained(returns) == 1
    assert explained(returns + 5.0) == 1
    assert explained(jnp.full(4, 7.0)) == 0
    assert explained(-returns) == -3
    assert explained(1e6 + returns) == 1


@over("num", [3, 7, 11, 100])
def test_returns_that_do_not_vary_have_no_variance_to_explain(num):
    v, mask = jnp.arange(num, dtype=jnp.float32), jnp.ones(num, bool)
    for constant in (0.1, 0.7, 3.3):
        assert value.explained_variance(v, jnp.full(num, constant), mask) == 0


def test_returns_that_differ_by_rounding_have_no_variance_to_explain():
    """Advantage plus value, where all returns are 0.7 in theory."""
    v = jnp.asarray(np.random.default_rng(0).normal(size=64), jnp.float32)
    returns = (jnp.float32(0.7) - v) + v
    assert float(jnp.std(returns)) > 0
    mask = jnp.ones(64, bool)
    assert value.explained_variance(v, returns, mask) == 0
    # Differences above rounding count.
    returns = returns.at[0].add(1e-3)
    assert value.explained_variance(v, returns, mask) < -100


def test_one_return_has_no_variance_to_explain():
    v = jnp.array([1.0, 2.0, 3.0])
    assert value.explained_variance(v, v, jnp.array([False, True, False])) == 0


@over("clip", [0.0, -0.2])
@over("function", [value.clipped_value_loss, value.value_clip_fraction])
def test_the_clip_is_checked(function, clip):
    x = jnp.zeros(1)
    with pytest.raises(ValueError, match=rf"value_clip must be > 0.*, got {clip}"):
        function(x, x, x, jnp.ones(1, bool), value_clip=clip)
