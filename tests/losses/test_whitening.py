"""Whitening: a float64 transcription, exact in pieces and over devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.losses.credit.whitening import Moments, whitened

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
VALUES = hnp.arrays(np.float32, (8, 5), elements=st.floats(-4, 4, width=16))
MASKS = hnp.arrays(bool, (8, 5))


def transcription(values, mask, center, ddof, epsilon):
    kept = values[mask].astype(np.float64)
    out = np.zeros(values.shape)
    if len(kept):
        squares = ((kept - kept.mean()) ** 2).sum()
        variance = squares / max(len(kept) - ddof, 1)
        scale = np.sqrt(variance + epsilon) if variance > 0 else 1.0
        out[mask] = (kept - kept.mean() * center) / scale
    return out


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("center", [True, False])
@LAWS
@given(values=VALUES, mask=MASKS)
def test_equals_its_transcription(ddof, center, values, mask):
    options = {"center": center, "ddof": ddof, "epsilon": 1e-3}
    dirty = jnp.array(np.where(mask, values, np.nan))
    result = whitened(dirty, jnp.array(mask), **options)
    np.testing.assert_allclose(
        result, transcription(values, mask, **options), rtol=1e-4, atol=1e-5
    )


@LAWS
@given(value=st.floats(-1e6, 1e6, width=32), mask=MASKS)
def test_equal_values_give_exactly_zero(value, mask):
    values = jnp.full(mask.shape, value, jnp.float32)
    assert (whitened(values, jnp.array(mask)) == 0).all()


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("center", [True, False])
def test_no_value_or_one(count, center):
    values, mask = jnp.full(4, 3.0), jnp.arange(4) < count
    result = whitened(jnp.where(mask, values, jnp.inf), mask, center=center)
    assert result.tolist() == [0.0 if center or not count else 3.0, 0, 0, 0]


def test_large_values_keep_their_differences():
    values = 1e6 + jnp.arange(4.0)
    result = whitened(values, jnp.ones(4, bool), ddof=0, epsilon=0.0)
    np.testing.assert_allclose(result, np.array([-3, -1, 1, 3]) / 5**0.5, rtol=1e-6)


@LAWS
@given(values=VALUES, mask=MASKS, first=MASKS)
def test_in_pieces_as_the_whole(values, mask, first):
    values, left, right = jnp.array(values), mask & first, mask & ~first
    left, right = jnp.array(left), jnp.array(right)
    moments = Moments.of(values, left) + Moments.of(values, right)
    apart = [whitened(values, piece, moments=moments) for piece in (left, right)]
    np.testing.assert_allclose(
        apart[0] + apart[1], whitened(values, left | right), rtol=1e-4, atol=1e-5
    )
    assert moments.count.item() == mask.sum()


def test_moments_are_a_pytree_and_their_sum_has_a_neutral_element():
    values = jnp.array([1.0, 2.0, 6.0])
    some = jax.jit(Moments.of)(values, jnp.ones(3, bool))
    nothing = Moments.of(values, jnp.zeros(3, bool))
    for pooled in (some + nothing, nothing + some, nothing + some + nothing):
        assert jax.tree.leaves(pooled) == jax.tree.leaves(some) == [3, 3, 14]
    assert jax.tree.leaves(nothing + nothing) == [0, 0, 0]
    assert some.variance().item() == 7
    assert some.variance(ddof=0).item() == pytest.approx(14 / 3)


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("shape", "axes", "axis_name"),
    [((8,), ("data",), "data"), ((4, 2), ("data", "fsdp"), ("data", "fsdp"))],
)
def test_over_devices_as_the_whole(shape, axes, axis_name):
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(shape, axes, axis_types=auto)
    rng = np.random.default_rng(0)
    values = jnp.array(rng.normal(100.0, 2.0, (16, 5)), jnp.float32)
    # One device has nothing to count, and others count different numbers.
    mask = jnp.array(rng.random((16, 5)) < 0.6).at[:2].set(False)
    spec = P(axis_name)
    split = jax.jit(
        jax.shard_map(
            partial(whitened, axis_name=axis_name),
            mesh=mesh,
            in_specs=(spec, spec),
            out_specs=spec,
        )
    )
    whole = whitened(values, mask)
    np.testing.assert_allclose(split(values, mask), whole, rtol=1e-4, atol=1e-5)
    alone = whitened(values[2:4], mask[2:4])
    assert jnp.abs(alone - whole[2:4]).max() > 0.1


@pytest.mark.parametrize("center", [True, False])
def test_a_counted_nan_stays_visible(center):
    values = jnp.array([1.0, jnp.nan, 2.0])
    assert jnp.isnan(whitened(values, jnp.ones(3, bool), center=center)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": -1.0}, r"epsilon must be >= 0, got -1.0"),
        ({"ddof": 2}, r"ddof must be 1 \(sample\) or 0 \(population\), got 2"),
        (
            {"axis_name": "data", "moments": Moments(*(jnp.ones(()),) * 3)},
            r"axis_name must be None where moments are given, got 'data'; pool over",
        ),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        whitened(jnp.ones(2), jnp.ones(2, bool), **arguments)
