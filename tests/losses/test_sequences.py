"""Sums over sequences: known numbers, packing, masks and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import reduce
from jaxrl_post.losses.sequences import (
    counted,
    in_sequence,
    segment_totals,
    sequence_count,
    sequence_mean,
    sequence_sum,
)

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
VALUES = hnp.arrays(np.float32, (3, 5), elements=st.floats(-8, 8, width=32))
MASKS = hnp.arrays(bool, (3, 5))
LENGTHS = st.lists(st.integers(1, 5), min_size=3, max_size=3)


def pack(rows, lengths, width=16):
    """Lays the first `lengths[i]` entries of each row side by side, then zeros."""
    flat = np.concatenate([row[:n] for row, n in zip(rows, lengths, strict=True)])
    return jnp.array(np.pad(flat, (0, width - len(flat))))


def pack_ids(lengths, width=16):
    ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    return jnp.array(np.pad(ids, (0, width - len(ids))))


def test_sums_and_means_of_two_segments_and_padding():
    values = jnp.array([[1.0, 2.0, 4.0, 8.0, 16.0]])
    mask = jnp.array([[False, True, True, True, True]])
    segment_ids = jnp.array([[1, 1, 1, 2, 0]])
    assert sequence_sum(values, mask, segment_ids).tolist() == [[6, 6, 6, 8, 0]]
    assert sequence_mean(values, mask, segment_ids).tolist() == [[3, 3, 3, 8, 0]]
    assert sequence_sum(values, mask).tolist() == [[30] * 5]
    assert sequence_mean(values, mask).tolist() == [[7.5] * 5]


def test_a_sequence_that_counts_nothing_gives_zero():
    values = jnp.full((2, 3), jnp.nan)
    mask = jnp.zeros((2, 3), bool)
    for segment_ids in (None, jnp.array([[1, 1, 2], [0, 0, 0]])):
        assert sequence_sum(values, mask, segment_ids).tolist() == [[0] * 3] * 2
        assert sequence_mean(values, mask, segment_ids).tolist() == [[0] * 3] * 2
        assert sequence_count(mask, segment_ids).item() == 0.0


def test_padding_is_never_counted_even_under_a_true_mask():
    mask, segment_ids = jnp.ones((1, 3), bool), jnp.array([[1, 0, 0]])
    assert sequence_sum(jnp.ones((1, 3)), mask, segment_ids).tolist() == [[1, 0, 0]]
    assert in_sequence(mask, segment_ids).tolist() == [[True, False, False]]
    assert sequence_count(mask, segment_ids).item() == 1.0


def test_sequence_count_skips_sequences_without_a_counted_token():
    mask = jnp.array([[True, False, True, True], [False] * 4])
    segment_ids = jnp.array([[1, 2, 3, 3], [1, 1, 2, 0]])
    assert sequence_count(mask).item() == 1.0
    assert sequence_count(mask, segment_ids).item() == 2.0


@pytest.mark.parametrize("wrong", [4, -1])
def test_an_id_out_of_its_range_makes_its_row_and_the_count_nan(wrong):
    values, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
    segment_ids = jnp.array([[1, 2, wrong], [1, 3, 3]])
    sums = np.float32([[np.nan] * 3, [1, 2, 2]])
    np.testing.assert_array_equal(sequence_sum(values, mask, segment_ids), sums)
    np.testing.assert_array_equal(
        sequence_mean(values, mask, segment_ids), np.where(np.isnan(sums), sums, 1)
    )
    totals = segment_totals(values, segment_ids)
    np.testing.assert_array_equal(totals, [[np.nan] * 4, [0, 1, 0, 2]])
    assert np.isnan(sequence_count(mask, segment_ids))
    assert np.isnan(reduce.sequence_mean_of_token_sum(values, mask, segment_ids).mean())


def test_every_token_may_be_its_own_segment():
    values = jnp.array([1.0, 2.0, 4.0])
    segment_ids = jnp.array([3, 1, 2])
    assert sequence_sum(values, jnp.ones(3, bool), segment_ids).tolist() == [1, 2, 4]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 3, 4), (4,)])
def test_any_batch_shape(shape):
    mask = jnp.ones(shape, bool)
    segment_ids = jnp.ones(shape, jnp.int32)
    values = jnp.ones(shape)
    expected = np.full(shape, shape[-1])
    np.testing.assert_array_equal(sequence_sum(values, mask), expected)
    np.testing.assert_array_equal(sequence_sum(values, mask, segment_ids), expected)
    assert sequence_count(mask, segment_ids) == sequence_count(mask)


def test_gradient_of_a_sum_reaches_its_own_counted_tokens_alone():
    mask = jnp.array([True, True, False, True])
    segment_ids = jnp.array([1, 1, 1, 2])

    def first_token(values):
        return sequence_sum(values, mask, segment_ids)[0]

    values = jnp.array([1.0, 2.0, jnp.nan, 4.0])
    assert jax.grad(first_token)(values).tolist() == [1, 1, 0, 0]


def test_counted_is_float32_and_hides_what_is_masked():
    values = jnp.array([1.5, jnp.inf, jnp.nan], jnp.bfloat16)
    kept = counted(values, jnp.array([True, False, False]))
    assert kept.dtype == jnp.float32
    assert kept.tolist() == [1.5, 0.0, 0.0]


@LAWS
@given(values=VALUES, mask=MASKS, lengths=LENGTHS)
def test_packed_equals_unpacked(values, mask, lengths):
    inside = mask & (np.arange(5) < np.array(lengths)[:, None])
    packed = pack(values, lengths), pack(mask, lengths), pack_ids(lengths)
    for function in (sequence_sum, sequence_mean):
        apart = function(jnp.array(values), jnp.array(inside))
        np.testing.assert_allclose(
            jax.jit(function)(*packed), pack(apart, lengths), rtol=1e-5, atol=1e-5
        )
    assert sequence_count(*packed[1:]) == sequence_count(jnp.array(inside))
