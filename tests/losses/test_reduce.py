"""Reductions: transcriptions, exact accumulation, packing, padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl_post.losses import reduce

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
VALUES = hnp.arrays(np.float32, (4, 5), elements=st.floats(-8, 8, width=32))
MASKS = hnp.arrays(bool, (4, 5))
REDUCTIONS = {
    "token_mean": jax.jit(reduce.token_mean),
    "sequence_mean_of_token_mean": jax.jit(reduce.sequence_mean_of_token_mean),
    "sequence_mean_of_token_sum": jax.jit(reduce.sequence_mean_of_token_sum),
    "constant": jax.jit(partial(reduce.constant_denominator, denominator=7.0)),
}
every_reduction = pytest.mark.parametrize(
    "reduction", list(REDUCTIONS.values()), ids=list(REDUCTIONS)
)


def transcription(name, values, mask) -> float:
    """The loss in float64, sequence by sequence; one row is one sequence."""
    values = values.astype(np.float64)
    rows = [row[kept] for row, kept in zip(values, mask, strict=True) if kept.any()]
    if not rows:
        return 0.0
    if name == "token_mean":
        return np.concatenate(rows).mean()
    if name == "sequence_mean_of_token_mean":
        return np.mean([row.mean() for row in rows])
    sums = np.mean([row.sum() for row in rows])
    return sums / 7 if name == "constant" else sums


@pytest.mark.parametrize(
    ("name", "total", "count"),
    list(zip(REDUCTIONS, [8.0, 6.5, 8.0, 8 / 7], [3, 2, 2, 2], strict=True)),
)
def test_sum_and_count_by_hand(name, total, count):
    values = jnp.array([[1.0, 2.0, jnp.nan, 5.0], [9.0] * 4])
    mask = jnp.array([[True, True, False, True], [False] * 3 + [True]])
    segment_ids = jnp.array([[1, 1, 1, 2], [1, 2, 0, 0]])
    metric = REDUCTIONS[name](values, mask, segment_ids)
    assert metric.sum.item() == pytest.approx(total)
    assert metric.count.item() == count


@pytest.mark.parametrize("name", REDUCTIONS)
@LAWS
@given(values=VALUES, mask=MASKS)
def test_equals_its_transcription(name, values, mask):
    loss = REDUCTIONS[name](jnp.array(values), jnp.array(mask)).mean()
    np.testing.assert_allclose(
        loss, transcription(name, values, mask), rtol=1e-5, atol=1e-5
    )


@every_reduction
@LAWS
@given(values=VALUES, mask=MASKS, split=st.integers(1, 3))
def test_microbatches_add_up_to_the_batch(reduction, values, mask, split):
    whole = reduction(jnp.array(values), jnp.array(mask))
    first = reduction(jnp.array(values[:split]), jnp.array(mask[:split]))
    second = reduction(jnp.array(values[split:]), jnp.array(mask[split:]))
    parts = first + second
    np.testing.assert_allclose(parts.sum, whole.sum, rtol=1e-5, atol=1e-5)
    assert parts.count == whole.count


@every_reduction
@LAWS
@given(values=VALUES, mask=MASKS, order=st.permutations(range(4)))
def test_neither_order_nor_padding_nor_packing_changes_it(
    reduction, values, mask, order
):
    whole = reduction(jnp.array(values), jnp.array(mask))
    order = list(order)
    padded_values = np.full((6, 8), np.nan, np.float32)
    padded_values[:4, :5] = values[order]
    padded_mask = np.zeros((6, 8), bool)
    padded_mask[:4, :5] = mask[order]
    packed_ids = np.repeat(np.arange(1, 5, dtype=np.int32), 5)[None]
    others = [
        reduction(jnp.array(padded_values), jnp.array(padded_mask)),
        reduction(
            jnp.array(values.reshape(1, 20)),
            jnp.array(mask.reshape(1, 20)),
            jnp.array(packed_ids),
        ),
    ]
    for other in others:
        np.testing.assert_allclose(other.sum, whole.sum, rtol=1e-5, atol=1e-5)
        assert other.count == whole.count


def test_a_mean_inside_each_microbatch_would_depend_on_the_split():
    values = jnp.array([[1.0, 1.0], [4.0, 0.0]])
    mask = jnp.array([[True, True], [True, False]])
    naive = (reduce.token_mean(values[:1], mask[:1]).mean().item()) / 2 + (
        reduce.token_mean(values[1:], mask[1:]).mean().item()
    ) / 2
    pooled = reduce.token_mean(values[:1], mask[:1]) + reduce.token_mean(
        values[1:], mask[1:]
    )
    assert naive == 2.5
    assert pooled.mean().item() == 2.0


@every_reduction
def test_nothing_counted_gives_a_loss_of_zero(reduction):
    metric = reduction(jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool))
    assert (metric.sum.item(), metric.count.item(), metric.mean().item()) == (0, 0, 0)


@every_reduction
def test_sums_in_float32_whatever_the_input(reduction):
    # 300 ones summed in bfloat16 would stop at 256.
    values = jnp.ones((1, 300), jnp.bfloat16)
    metric = reduction(values, jnp.ones((1, 300), bool))
    exact = reduction(values.astype(jnp.float32), jnp.ones((1, 300), bool))
    assert metric.sum.dtype == metric.count.dtype == jnp.float32
    assert metric.sum == exact.sum


@pytest.mark.parametrize("denominator", [0.0, -1.0])
def test_denominator_must_be_positive(denominator):
    with pytest.raises(
        ValueError, match=rf"denominator must be > 0 \(tokens\), got {denominator}"
    ):
        reduce.constant_denominator(
            jnp.ones((1, 1)), jnp.ones((1, 1), bool), denominator=denominator
        )
