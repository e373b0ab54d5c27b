"""Every reduction over parts of a batch, and the ones that need the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl_post.losses import reduce
from jaxrl_post.metrics import Metric

LAWS = settings(max_examples=25, deadline=None, derandomize=True)
ROWS, LENGTH = 16, 5
VALUES = hnp.arrays(np.float32, (ROWS, LENGTH), elements=st.floats(-8, 8, width=32))
MASKS = hnp.arrays(bool, (ROWS, LENGTH))
PROMPTS = hnp.arrays(np.int32, (ROWS,), elements=st.integers(0, 3))
SCALE, WIDTH, SEQUENCES = 4.0, 7.0, 20.0

# Each mode of (values, mask, tokens of the token's prompt), as one of `parts` parts.
MODES = {
    "token_mean": lambda v, m, n, parts: reduce.token_mean(v, m),
    "sequence_mean_of_token_mean": lambda v, m, n, parts: (
        reduce.sequence_mean_of_token_mean(v, m)
    ),
    "sequence_mean_of_token_sum": lambda v, m, n, parts: (
        reduce.sequence_mean_of_token_sum(v, m)
    ),
    "constant_denominator": lambda v, m, n, parts: reduce.constant_denominator(
        v, m, denominator=WIDTH
    ),
    "prompt_mean": lambda v, m, n, parts: reduce.prompt_mean(v, n, m),
    "token_sum": lambda v, m, n, parts: reduce.token_sum(
        v, m, scale=SCALE, parts=parts
    ),
    "with_denominator": lambda v, m, n, parts: reduce.with_denominator(
        reduce.sequence_mean_of_token_mean(v, m), SEQUENCES, parts=parts
    ),
}
JITTED = {name: jax.jit(mode, static_argnums=3) for name, mode in MODES.items()}
every_mode = pytest.mark.parametrize("name", MODES)


def prompt_tokens(prompts, mask):
    ids = jnp.broadcast_to(jnp.array(prompts)[:, None], mask.shape)
    return reduce.prompt_token_counts(ids, jnp.array(mask), num_prompts=4)


def transcription(name, values, mask, prompts) -> float:
    values = values.astype(np.float64)
    rows = [row[kept] for row, kept in zip(values, mask, strict=True) if kept.any()]
    if not rows:
        return 0.0
    if name == "token_mean":
        return np.concatenate(rows).mean()
    if name == "token_sum":
        return SCALE * np.concatenate(rows).sum()
    if name == "with_denominator":
        return sum(row.mean() for row in rows) / SEQUENCES
    if name == "sequence_mean_of_token_mean":
        return np.mean([row.mean() for row in rows])
    if name == "prompt_mean":
        groups = [(prompts == prompt)[:, None] & mask for prompt in range(4)]
        return np.mean([values[group].mean() for group in groups if group.any()])
    sums = np.mean([row.sum() for row in rows])
    return sums / WIDTH if name == "constant_denominator" else sums


@every_mode
@LAWS
@given(values=VALUES, mask=MASKS, prompts=PROMPTS)
def test_the_whole_batch_equals_its_transcription(name, values, mask, prompts):
    counts = prompt_tokens(prompts, mask)
    loss = JITTED[name](jnp.array(values), jnp.array(mask), counts, 1).mean()
    expected = transcription(name, values, mask, prompts)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)


@every_mode
@LAWS
@given(values=VALUES, mask=MASKS, prompts=PROMPTS, split=st.sampled_from([3, 8]))
def test_microbatches_add_up_to_the_batch(name, values, mask, prompts, split):
    arrays = jnp.array(values), jnp.array(mask), prompt_tokens(prompts, mask)
    first, second = ([x[:split] for x in arrays], [x[split:] for x in arrays])
    pooled = JITTED[name](*first, 2) + JITTED[name](*second, 2)
    whole = JITTED[name](*arrays, 1)
    np.testing.assert_allclose(pooled.mean(), whole.mean(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pooled.count, whole.count, rtol=1e-6)


@pytest.mark.meshes
@every_mode
def test_eight_devices_add_up_to_the_batch(name):
    rng = np.random.default_rng(1)
    values = jnp.array(rng.normal(size=(ROWS, LENGTH)), jnp.float32)
    mask = rng.random((ROWS, LENGTH)) < 0.5
    mask[:2] = False  # One device counts nothing at all.
    counts = prompt_tokens(rng.integers(0, 4, ROWS), mask)
    mesh, by_row = Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data")

    def on_a_device(*shards):
        metric = MODES[name](*shards, 8)
        return jax.tree.map(lambda x: jax.lax.psum(x, "data"), metric)

    sharded = jax.jit(
        jax.shard_map(
            on_a_device, mesh=mesh, in_specs=by_row, out_specs=PartitionSpec()
        )
    )
    found = sharded(values, jnp.array(mask), counts)
    whole = MODES[name](values, jnp.array(mask), counts, 1)
    np.testing.assert_allclose(found.sum, whole.sum, rtol=1e-5)
    np.testing.assert_allclose(found.mean(), whole.mean(), rtol=1e-5)
    assert len(jax.devices()) == 8
    assert whole.sum != 0


@every_mode
def test_the_gradient_is_each_tokens_share_and_nothing_where_masked(name):
    rng = np.random.default_rng(2)
    values = rng.normal(size=(ROWS, LENGTH)).astype(np.float32)
    mask, prompts = rng.random((ROWS, LENGTH)) < 0.6, rng.integers(0, 4, ROWS)
    counts = prompt_tokens(prompts, mask)

    def loss(x):
        return MODES[name](x, jnp.array(mask), counts, 1).mean()

    value, gradient = jax.value_and_grad(loss)(jnp.array(values))
    dirty = jax.value_and_grad(loss)(jnp.where(jnp.array(mask), values, jnp.nan))
    assert dirty[0] == value
    np.testing.assert_array_equal(dirty[1], gradient)
    assert (np.array(gradient)[~mask] == 0).all()
    for row, column in [(0, 0), (5, 2), (15, 4)]:
        one = np.zeros((ROWS, LENGTH))
        one[row, column] = 1.0
        expected = transcription(name, one, mask, prompts)
        np.testing.assert_allclose(gradient[row, column], expected, rtol=1e-5)


@every_mode
def test_nothing_counted_and_a_counted_nan(name):
    values, nothing = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool)
    zeros = jnp.zeros((2, 3), jnp.int32)
    assert MODES[name](values, nothing, zeros, 1).mean() == 0
    one = nothing.at[0, 0].set(True)
    assert jnp.isnan(MODES[name](values, one, zeros + 1, 1).mean())


@every_mode
def test_sums_in_float32_whatever_the_input(name):
    # 300 ones summed in bfloat16 would stop at 256.
    values, mask = jnp.ones((1, 300), jnp.bfloat16), jnp.ones((1, 300), bool)
    counts = jnp.full((1, 300), 300)
    metric = MODES[name](values, mask, counts, 1)
    exact = MODES[name](values.astype(jnp.float32), mask, counts, 1)
    assert metric.sum.dtype == metric.count.dtype == jnp.float32
    assert metric.sum == exact.sum


def test_padding_segments_are_not_counted():
    values, mask = jnp.array([[1.0, 2.0, 40.0]]), jnp.ones((1, 3), bool)
    ids, prompts = jnp.array([[1, 2, 0]]), jnp.array([[0, 0, 1]])
    counts = reduce.prompt_token_counts(prompts, mask, ids, num_prompts=2)
    assert counts.tolist() == [[2, 2, 0]]
    assert reduce.prompt_mean(values, counts, mask, ids).mean() == 1.5
    assert reduce.token_sum(values, mask, ids).mean() == 3.0


def test_a_sequence_that_counts_nothing_is_in_a_given_denominator():
    values = jnp.array([[1.0, 3.0], [5.0, 5.0]])
    mask = jnp.array([[True, True], [False, False]])
    metric = reduce.sequence_mean_of_token_mean(values, mask)
    assert metric.mean() == 2.0
    assert reduce.with_denominator(metric, 2).mean() == 1.0


def test_a_denominator_may_be_traced():
    divided = jax.jit(reduce.with_denominator)(Metric.of(6.0, 1.0), jnp.int32(4))
    assert divided.mean() == 1.5


@pytest.mark.parametrize("denominator", [0.0, -1.0, float("nan")])
def test_denominator_is_checked(denominator):
    message = f"denominator must be > 0, got {denominator}"
    with pytest.raises(ValueError, match=message):
        reduce.with_denominator(Metric.of(1.0, 1.0), denominator)


def test_parts_are_checked():
    one = jnp.ones((1, 1))
    with pytest.raises(ValueError, match="parts must be >= 1, got 0"):
        reduce.token_sum(one, one > 0, parts=0)
    with pytest.raises(ValueError, match="parts must be >= 1, got -1"):
        reduce.with_denominator(Metric.of(1.0, 1.0), 2.0, parts=-1)


def test_number_of_prompts_is_checked():
    zero = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="num_prompts must be >= 1, got 0"):
        reduce.prompt_token_counts(zero, zero == 0, num_prompts=0)
