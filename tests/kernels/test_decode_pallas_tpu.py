"""The decode kernel for TPUs, interpreted: races, blocks, precision, skipped reads.

That it equals the definition is shown in test_decode_attention.py and, over codes, in
test_quantized_entries.py, with the other implementations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl_post.kernels.attention import Scoring
from jaxrl_post.kernels.decode_attention import OwnKeys, quantize_entries, xla
from jaxrl_post.kernels.decode_attention.pallas_tpu import (
    BLOCK_BYTES,
    PAIRS,
    QUERIES,
    Sizes,
    part_of_keys,
)
from tests.tiers import daily

NO_TOKEN = np.iinfo(np.int32).max
# Fails where two accesses of a buffer are not ordered, and where a read leaves it.
RACES = pltpu.InterpretParams(detect_races=True)


def case(batch, queries, heads, kv_heads, keys, dim, value_dim, dtype=jnp.float32):
    """Sequences of many lengths; the first sees nothing."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, keys - queries + 1, batch)
    at = lengths[:, None] + np.arange(queries) - 1
    at[0] = -1
    index = np.arange(keys)
    # Entries behind a sequence's end have no token; half of the rows still hold some.
    behind = (index >= (lengths + queries)[:, None]) & (np.arange(batch) % 2 == 0)[
        :, None
    ]
    positions = np.where(behind, NO_TOKEN, index)
    shapes = [
        (batch, queries, heads, dim),
        (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, value_dim),
    ]
    arrays = [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]
    facts = [jnp.asarray(fact.astype(np.int32)) for fact in (at, positions)]
    return *arrays, *facts


def part(function, query, key, value, at, positions, window, scale, softcap, **options):
    """The result of `function` on the keys."""
    own, scoring = OwnKeys(key, value, positions), Scoring(window, scale, softcap)
    return function(query, own, at, scoring, **options)


def same_part(found, expected, seen):
    """Equal after the division; what sees no key has the smallest of maxima."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == jnp.float32
    assert bool(jnp.isfinite(found.mixed).all())
    np.testing.assert_allclose(
        (found.mixed / found.total[..., None])[seen],
        (expected.mixed / expected.total[..., None])[seen],
        rtol=1e-5,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        (found.top + jnp.log(found.total))[seen],
        (expected.top + jnp.log(expected.total))[seen],
        rtol=1e-5,
        atol=1e-5,
    )
    assert float(found.top[~seen].max()) < -1e29


def sees(query_positions):
    return np.asarray(query_positions) >= 0


# Blocks that have all, and several of each, also of the queries; dimensions that 128
# divides, or does not.
@pytest.mark.parametrize(
    ("shape", "window", "sizes"),
    daily(
        [
            ((4, 1, 4, 2, 384, 128, 128), None, None),
            ((4, 1, 14, 2, 384, 64, 64), 100, Sizes(2, 1, 16, 128)),
            ((4, 3, 4, 2, 256, 128, 80), 70, Sizes(4, 2, 16, 128)),
            ((2, 20, 4, 2, 256, 192, 128), None, Sizes(1, 2, 16, 256)),
            ((3, 1, 2, 2, 37, 24, 40), 5, None),
        ],
        [
            ((4, 3, 4, 2, 256, 128, 80), 70, Sizes(4, 2, 16, 128)),
            ((3, 1, 2, 2, 37, 24, 40), 5, None),
        ],
    ),
)
def test_without_races(shape, window, sizes):
    arrays = case(*shape)
    scoring = window, shape[5] ** -0.5, 3.0
    found = jax.jit(
        lambda *arrays: part(
            part_of_keys, *arrays, *scoring, interpret=RACES, sizes=sizes
        )
    )(*arrays)
    expected = part(xla.part_of_keys, *arrays, *scoring)
    same_part(found, expected, sees(arrays[3]))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("code", [None, "int8"])
def test_blocks_that_no_query_sees_are_not_read(window, code):
    """They hold NaN, which even a weight of 0 would pass on."""
    query, key, value, at, positions = case(4, 1, 4, 2, 512, 32, 128)
    if code is not None:
        key, value = quantize_entries(key, code), quantize_entries(value, code)
    scoring = window, 0.2, None
    sizes = Sizes(1, 2, 16, 128)

    def run(key, value):
        return part(
            part_of_keys, query, key, value, at, positions, *scoring,
            interpret=True, sizes=sizes,
        )  # fmt: skip

    expected = run(key, value)
    first, last = np.asarray(at)[:, 0] - (window or 10**6) + 1, np.asarray(at)[:, 0]
    block = np.arange(512) // 128
    read = (block >= np.maximum(first, 0)[:, None] // 128) & (
        block <= np.maximum(last, 0)[:, None] // 128
    )
    assert read.sum() < 4 * 512, "every block is read: the test shows nothing"

    def poisoned(leaf):
        if leaf.dtype == jnp.int8:
            return leaf
        return jnp.where(read[:, None, :, None], leaf, jnp.nan)

    key, value = jax.tree.map(poisoned, (key, value))
    found = run(key, value)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_place_that_nobody_has_makes_no_block_visible():
    """For a group that is not full: its window is not one from the first token on."""
    query, key, value, _, positions = case(1, 3, 4, 2, 512, 32, 128)
    at = jnp.array([[400, 410, -1]], jnp.int32)
    positions = jnp.arange(512, dtype=jnp.int32)[None]
    read = jnp.arange(512) >= 256  # The blocks of the tokens 351 to 410.
    key, value = (jnp.where(read[:, None], leaf, jnp.nan) for leaf in (key, value))
    found = part(
        part_of_keys,
        *(query, key, value, at, positions, 50, 0.2, None),
        interpret=True,
        sizes=Sizes(1, 2, 16, 128),
    )
    assert all(np.isfinite(np.asarray(leaf)[:, :2]).all() for leaf in found)


def test_bfloat16_is_as_exact_as_its_rounding():
    """The error against float64 is at most twice the XLA program's."""
    arrays = case(4, 1, 8, 2, 384, 64, 64, jnp.bfloat16)
    query, key, value, at, positions = (np.asarray(a, np.float64) for a in arrays)
    repeated = (np.repeat(each, 4, axis=1) for each in (key, value))
    key, value = repeated
    scores = np.einsum("bqhd,bhkd->bqhk", query, key) / 8
    hidden = positions[:, None, None] > at[:, :, None, None]
    weights = np.exp(np.where(hidden, -np.inf, scores)[1:])
    weights /= weights.sum(axis=-1, keepdims=True)
    exact = np.einsum("bqhk,bhkd->bqhd", weights, value[1:])

    def error(part):
        return np.abs(np.float64(part.mixed / part.total[..., None])[1:] - exact).max()

    scoring = None, 0.125, None
    found = part(
        part_of_keys, *arrays, *scoring, interpret=True, sizes=Sizes(1, 2, 16, 128)
    )
    assert error(found) <= 2 * error(part(xla.part_of_keys, *arrays, *scoring))


@pytest.mark.parametrize("heads", [1, 2, 8, 32])
@pytest.mark.parametrize("keys", [5, 64, 400, 1024, 8192])
@pytest.mark.parametrize("queries", [16, 2048])
def test_blocks_divide_the_arrays_and_fit(heads, keys, queries):
    for batch in (1, 7, 256):
        for key_bytes in (64, 256, 1024):
            sizes = Sizes.of(batch, heads, queries, keys, key_bytes)
            assert batch % sizes.batch == heads % sizes.heads == 0
            assert queries % sizes.queries == 0
            assert sizes.keys % 16 == 0
            # A block that has not all keys is cut where lanes are.
            assert sizes.keys >= keys or sizes.keys % 128 == 0
            assert sizes.batch * sizes.heads <= PAIRS
            assert sizes.batch * sizes.queries <= QUERIES
            held = sizes.batch * sizes.heads * sizes.keys * key_bytes
            assert held <= BLOCK_BYTES or sizes.keys == 128
