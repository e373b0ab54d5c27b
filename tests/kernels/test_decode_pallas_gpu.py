"""The decode kernel for Hopper GPUs, interpreted: races, sizes, precision, reads.

That it equals the definition is shown in test_decode_attention.py and, over codes, in
test_quantized_entries.py, with the other implementations. That it compiles for a Hopper
GPU is shown in test_compiled_for_gpu.py.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.kernels.decode_attention import (
    OwnKeys,
    decode_attention,
    quantize_entries,
    xla,
)
from jaxrl_post.kernels.decode_attention.gpu_sizes import WHOLE, Sizes, Widths
from jaxrl_post.kernels.decode_attention.pallas_gpu import part_of_keys
from jaxrl_post.kernels.decode_attention.shapes import SHAPES
from tests.kernels.test_decode_pallas_tpu import case, part, sees
from tests.tiers import daily

RACES = plgpu.InterpretGPUParams(detect_races=True)


def on_gpu(arrays, scoring, *, interpret=True, sizes=None):
    return jax.jit(
        lambda *arrays: part(
            part_of_keys, *arrays, *scoring, interpret=interpret, sizes=sizes
        )
    )(*arrays)


def attended(found):
    return np.asarray(found.mixed / found.total[..., None], np.float64)


def exact(arrays, scoring):
    """The same in float32, on the numbers that bfloat16 has."""
    wide = [
        leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf
        for leaf in arrays
    ]
    return part(xla.part_of_keys, *wide, *scoring)


# One part and several, of several steps each; blocks of queries; a last step that
# begins earlier; heads that no swizzle of 128 bytes divides, keys of other sizes than
# values; a window and a cap.
@pytest.mark.parametrize(
    ("shape", "window", "sizes"),
    daily(
        [
            ((3, 1, 4, 2, 256, 64, 64), None, None),
            ((2, 1, 4, 1, 328, 80, 96), 100, Sizes(16, 3, 2)),
            ((2, 5, 8, 2, 208, 128, 64), None, Sizes(16, 4, 3)),
            ((2, 1, 2, 1, 37, 256, 256), 5, None),
        ],
        [
            ((2, 1, 4, 1, 328, 80, 96), 100, Sizes(16, 3, 2)),
            ((2, 1, 2, 1, 37, 256, 256), 5, None),
        ],
    ),
)
def test_without_races(shape, window, sizes):
    arrays = case(*shape, jnp.bfloat16)
    scoring = window, shape[5] ** -0.5, 3.0
    found = on_gpu(arrays, scoring, interpret=RACES, sizes=sizes)
    expected = exact(arrays, scoring)
    seen = sees(arrays[3])
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == jnp.float32
    assert jnp.isfinite(found.mixed).all()
    error = (attended(found) - attended(expected))[seen]
    # Error from rounding of the weights.
    assert np.linalg.norm(error) <= 2**-8 * np.linalg.norm(attended(expected)[seen])
    sums = [part.top + jnp.log(part.total) for part in (found, expected)]
    np.testing.assert_allclose(sums[0][seen], sums[1][seen], rtol=1e-5, atol=1e-5)
    assert float(found.top[~seen].max()) < -1e29


def test_keys_of_two_steps_count_once():
    """The second step begins at the 17th key, so that it ends with the keys."""
    query, key, value, at, positions = case(1, 1, 2, 1, 80, 64, 64, jnp.bfloat16)
    facts = jnp.full_like(at, 79), jnp.arange(80, dtype=jnp.int32)[None]
    assert positions.shape == facts[1].shape
    scoring = None, 0.125, None
    arrays = query, key, value, *facts
    found, expected = on_gpu(arrays, scoring), exact(arrays, scoring)
    error = attended(found) - attended(expected)
    assert np.linalg.norm(error) <= 2**-8 * np.linalg.norm(attended(expected))
    np.testing.assert_allclose(found.total, expected.total, rtol=1e-5)


def test_keys_that_are_the_values_too():
    query, key, _, *facts = case(2, 1, 4, 1, 144, 576, 64, jnp.bfloat16)
    scoring = None, 0.05, None
    found = on_gpu((query, key, None, *facts), scoring)
    expected = exact((query, key, key, *facts), scoring)
    seen = sees(facts[0])
    error = (attended(found) - attended(expected))[seen]
    assert np.linalg.norm(error) <= 2**-8 * np.linalg.norm(attended(expected)[seen])


@pytest.mark.parametrize(
    ("code", "window"),
    daily(itertools.product([None, "int8"], [None, 50]), {(None, None), ("int8", 50)}),
)
def test_keys_that_no_query_sees_are_not_read(window, code):
    """They hold NaN, which even a weight of 0 would pass on."""
    query, key, value, at, positions = case(4, 1, 4, 2, 512, 64, 64, jnp.bfloat16)
    if code is not None:
        key, value = quantize_entries(key, code), quantize_entries(value, code)
    scoring = window, 0.2, None
    expected = on_gpu((query, key, value, at, positions), scoring)
    first, last = np.asarray(at)[:, 0] - (window or 10**6) + 1, np.asarray(at)[:, 0]
    step = np.arange(512) // 64
    read = (step >= np.maximum(first, 0)[:, None] // 64) & (step <= last[:, None] // 64)
    assert read.sum() < 4 * 512, "every key is read: the test shows nothing"

    def poisoned(leaf):
        if leaf.dtype == jnp.int8:
            return leaf
        return jnp.where(read[:, None, :, None], leaf, jnp.nan)

    key, value = jax.tree.map(poisoned, (key, value))
    found = on_gpu((query, key, value, at, positions), scoring)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_bfloat16_is_as_exact_as_its_rounding():
    """The error against float32 is at most twice the XLA program's."""
    arrays = case(4, 1, 8, 2, 384, 64, 64, jnp.bfloat16)
    scoring = None, 0.125, None
    expected = attended(exact(arrays, scoring))[1:]

    def error(found):
        return np.abs(attended(found)[1:] - expected).max()

    found = on_gpu(arrays, scoring)
    assert error(found) <= 2 * error(part(xla.part_of_keys, *arrays, *scoring))


@pytest.mark.parametrize("name", SHAPES)
def test_the_work_of_a_block_fits(name):
    shape = SHAPES[name]
    widths = Widths(shape.head_dim, shape.value_dim, 1 if shape.codes else 2)
    group = shape.heads // shape.kv_heads
    for queries in (shape.queries, shape.queries * max(1, shape.members)):
        heads = shape.batch * shape.kv_heads
        sizes = Sizes.of(heads, group * queries, shape.own, widths)
        held = widths.beside_bytes(sizes.queries) + sizes.slots * widths.slot_bytes
        assert held <= WHOLE
        # A copy runs while a step computes.
        assert sizes.slots >= min(2, sizes.steps)
        assert sizes.queries * widths.mixed_dim <= 72 * 128


def test_what_it_cannot_read_is_refused():
    def attend(dim, value_dim, dtype=jnp.bfloat16, code=None):
        query, key, value, at, positions = case(1, 1, 2, 1, 64, dim, value_dim, dtype)
        if code is not None:
            key, value = quantize_entries(key, code), quantize_entries(value, code)
        return decode_attention(
            query, OwnKeys(key, value, positions), at,
            implementation="pallas_gpu", interpret=True,
        )  # fmt: skip

    message = "decode_attention: pallas_gpu cannot compute this: heads of 64 to 256 num"
    with pytest.raises(ValueError, match=message):
        attend(320, 64)
    with pytest.raises(ValueError, match="a multiple of 16, are needed; got 64 and 72"):
        attend(72, 64)
    with pytest.raises(ValueError, match="codes, a multiple of 32, are needed; got 80"):
        attend(80, 80, code="int8")
    with pytest.raises(ValueError, match="pallas_gpu computes with bfloat16; got floa"):
        attend(64, 64, jnp.float32)
