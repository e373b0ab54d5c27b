"""The decoder's laws: packing, padding, caching, sharding and remat change nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.models import (
    DecoderParams,
    KVCache,
    LayerSpec,
    ModelConfig,
    forward,
    logits,
    unembedding,
)
from jaxrl_post.models.decoder import Execution
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.packed_rows import ends_of

# Every optional part, and a window in the second layer.
RICH = dataclasses.replace(
    tiny.CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm="head",
    tie_embeddings=True, layers=(LayerSpec(), LayerSpec(window=3)),
)  # fmt: skip
ONE_LAYER = dataclasses.replace(tiny.CONFIG, num_layers=1)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

run = jax.jit(forward, static_argnames=("config", "rules", "execution"))


@pytest.fixture(scope="module")
def rich() -> DecoderParams[jax.Array]:
    return tiny.params(RICH)


def tokens(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, tiny.CONFIG.vocab_size, shape), jnp.int32)


def extend(params, config, cache, new, positions):
    return run(
        params,
        config,
        new,
        positions=jnp.asarray(positions, jnp.int32),
        kv_view=cache,
    )


# Training.


def test_packed_rows_equal_separate_rows(rich):
    """Sequences of 5, 3 and 4 tokens in one row of 14."""
    sizes, row = (5, 3, 4), tokens(1, 14)
    positions = np.concatenate([*map(np.arange, sizes), [0, 0]])
    segments = np.repeat([1, 2, 3, 0], [*sizes, 2])
    packed = run(
        rich, RICH, row,
        positions=jnp.asarray(positions, jnp.int32)[None],
        ends=jnp.asarray(ends_of([segments])),
    )  # fmt: skip
    for number, size in enumerate(sizes):
        start = sum(sizes[:number])
        alone = run(rich, RICH, row[:, start : start + size])
        np.testing.assert_allclose(packed[:, start : start + size], alone, **CLOSE)


def test_padding_changes_nothing(rich):
    row = tokens(1, 9)
    ends = jnp.asarray([[6] * 6 + [0] * 3], jnp.int32)
    short = run(rich, RICH, row[:, :6])
    for seed in (1, 2):
        other = row.at[:, 6:].set(tokens(1, 3, seed=seed))
        padded = run(rich, RICH, other, ends=ends)
        assert np.isfinite(padded).all()
        np.testing.assert_allclose(padded[:, :6], short, **CLOSE)


def test_no_token_sees_the_future(rich):
    row = tokens(1, 9)
    before = run(rich, RICH, row)
    after = run(rich, RICH, row.at[0, 5].add(1))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (jnp.abs(before - after)[0, 5:].max(axis=-1) > 1e-3).all()


def test_windows_bound_how_far_a_token_is_felt():
    """Two layers that look back 3 tokens, themselves included, reach back 4."""
    config = dataclasses.replace(tiny.CONFIG, layers=(LayerSpec(window=3),) * 2)
    row = tokens(1, 9)
    before = run(tiny.shared(), config, row)
    after = run(tiny.shared(), config, row.at[0, 1].add(1))
    moved = np.abs(before - after)[0].max(axis=-1)
    assert (moved[1:6] > 1e-4).all()
    np.testing.assert_array_equal(moved[[0, 6, 7, 8]], 0)


def test_positions_default_to_counting_and_matter():
    row = tokens(2, 6)
    count = jnp.asarray([range(6)] * 2, jnp.int32)
    default = run(tiny.shared(), tiny.CONFIG, row)
    np.testing.assert_allclose(
        default, run(tiny.shared(), tiny.CONFIG, row, positions=count), **CLOSE
    )
    # Rotary embeddings are relative: shifted positions give the same, stretched do not.
    np.testing.assert_allclose(
        default, run(tiny.shared(), tiny.CONFIG, row, positions=count + 7), **CLOSE
    )
    stretched = run(tiny.shared(), tiny.CONFIG, row, positions=2 * count)
    assert float(jnp.abs(default - stretched).max()) > 1e-2


def gradient(params, config, row, remat="none"):
    """Gradients of a loss over all logits; and the hidden states."""

    def loss(params):
        hidden = forward(params, config, row, execution=Execution(remat))
        return jnp.square(logits(params, config, hidden)).mean(), hidden

    return jax.grad(loss, has_aux=True)(params)


compiled_gradient = jax.jit(gradient, static_argnums=(1, 3))


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), actual, expected
    )


def test_remat_keeps_less_and_gives_the_same_gradient(rich):
    row, memory, grads = tokens(4, 48), {}, {}
    for remat in ("none", "dots", "full"):
        compiled = compiled_gradient.lower(rich, RICH, row, remat).compile()
        memory[remat] = compiled.memory_analysis().temp_size_in_bytes
        grads[remat], _ = compiled(rich, row)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads["none"]))
    assert_close(grads["dots"], grads["none"])
    assert_close(grads["full"], grads["none"])
    assert memory["full"] < memory["dots"] < memory["none"]


@pytest.fixture(scope="module")
def on_one_device():
    params = tiny.params(ONE_LAYER)
    return compiled_gradient(params, ONE_LAYER, tokens(4, 6))


@pytest.mark.meshes
@pytest.mark.parametrize("spec", ["dp2,tp4", "fsdp4,tp2", "dp2,fsdp2,tp2"])
def test_every_mesh_equals_one_device(spec, on_one_device):
    mesh = create_mesh(spec)
    row = jax.device_put(tokens(4, 6), NamedSharding(mesh, P(("dp", "fsdp"))))
    params = tiny.params(ONE_LAYER, mesh=mesh)
    with jax.set_mesh(mesh):
        compiled = compiled_gradient.lower(params, ONE_LAYER, row).compile()
    assert_close(compiled(params, row), on_one_device)
    # Only fsdp splits what each device needs whole; dp and tp alone never gather.
    assert ("all-gather" in str(compiled.as_text())) == (mesh.shape["fsdp"] > 1)


# The cache.


def test_prefill_and_decoding_equal_one_forward(rich):
    row = tokens(2, 10)
    expected = run(rich, RICH, row)
    cache = KVCache.zeros(RICH, 2, 12, tiny.F32)
    hidden, cache = extend(rich, RICH, cache, row[:, :6], [range(6)] * 2)
    np.testing.assert_allclose(hidden, expected[:, :6], **CLOSE)
    for at in range(6, 10):
        hidden, cache = extend(rich, RICH, cache, row[:, at : at + 1], [[at]] * 2)
        np.testing.assert_allclose(hidden[:, 0], expected[:, at], **CLOSE)


def test_prefill_in_chunks_equals_one_forward(rich):
    row = tokens(2, 9)
    expected = run(rich, RICH, row)
    cache = KVCache.zeros(RICH, 2, 9, tiny.F32)
    for start in range(0, 9, 3):
        positions = [range(start, start + 3)] * 2
        part = row[:, start : start + 3]
        hidden, cache = extend(rich, RICH, cache, part, positions)
        np.testing.assert_allclose(hidden, expected[:, start : start + 3], **CLOSE)


def test_slots_at_different_positions_with_garbage_beyond(rich):
    """Slot 0 has seen 2 tokens and slot 1 has seen 5."""
    row = tokens(2, 6)
    expected = run(rich, RICH, row)
    cache = KVCache.zeros(RICH, 2, 16, tiny.F32)
    _, cache = extend(rich, RICH, cache, row, [range(6)] * 2)
    seen = np.array([2, 5])
    beyond = np.arange(16)[None, None, :, None] >= seen[:, None, None, None]
    garbage = lambda array: jnp.where(beyond, 1e4, array)  # noqa: E731
    cache = dataclasses.replace(
        cache,
        keys=tuple(map(garbage, cache.keys)),
        values=tuple(map(garbage, cache.values)),
    )
    new = row[np.arange(2), seen][:, None]
    hidden, after = extend(rich, RICH, cache, new, seen[:, None])
    np.testing.assert_allclose(hidden[:, 0], expected[np.arange(2), seen], **CLOSE)
    # One entry a slot was written, all others are as they were.
    for old, now in zip(
        cache.keys + cache.values, after.keys + after.values, strict=True
    ):
        changed = (old != now).any(axis=(1, 3))
        assert changed.sum(axis=1).tolist() == [1, 1]
        assert changed.argmax(axis=1).tolist() == [2, 5]


def test_what_is_beyond_the_cache_is_dropped(rich):
    """An idle slot may stand beyond the prefix; what it holds there stays its own."""
    cache = KVCache.zeros(RICH, 2, 4, tiny.F32)
    row = tokens(2, 4)
    _, cache = extend(rich, RICH, cache, row, [range(4)] * 2)
    new = (row[:, 2:3] + 1) % RICH.vocab_size
    _, after = extend(rich, RICH, cache, new, np.array([[4], [2]]))
    for old, now in zip(
        cache.keys + cache.values, after.keys + after.values, strict=True
    ):
        changed = (old != now).any(axis=(1, 3))
        assert changed.tolist() == [[False] * 4, [False, False, True, False]]


def test_ends_and_a_view_together_are_refused():
    cache = KVCache.zeros(tiny.CONFIG, 1, 4, tiny.F32)
    with pytest.raises(ValueError, match="ends cannot be combined with kv_view"):
        forward(
            tiny.shared(), tiny.CONFIG, tokens(1, 2),
            ends=jnp.full((1, 2), 2, jnp.int32), kv_view=cache,
        )  # fmt: skip


# Types and compilation.


def test_bfloat16_stays_bfloat16_and_is_near_float32():
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.shared())
    cache = KVCache.zeros(tiny.CONFIG, 1, 8, tiny.BF16)
    row = tokens(1, 6)
    hidden, cache = extend(narrow, tiny.CONFIG, cache, row, [range(6)])
    assert hidden.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache)} == {"bfloat16"}
    exact = run(tiny.shared(), tiny.CONFIG, row)
    error = jnp.abs(hidden.astype(jnp.float32) - exact)
    assert float(error.max()) < 0.1  # of hidden states of size 1
    assert logits(narrow, tiny.CONFIG, hidden).dtype == jnp.float32


def test_tied_embeddings_are_the_unembedding(rich):
    assert unembedding(rich) is rich.embedding
    assert unembedding(tiny.shared()) is tiny.shared().unembedding
    hidden = tokens(2, 3, 16).astype(jnp.float32)
    np.testing.assert_allclose(
        logits(rich, RICH, hidden), hidden @ rich.embedding.T, **CLOSE
    )


def test_an_equal_config_is_not_traced_again():
    traces = []

    @functools.partial(jax.jit, static_argnames="config")
    def traced(params, config: ModelConfig, row):
        traces.append(config)
        return forward(params, config, row)

    for seed in range(3):
        traced(
            tiny.shared(),
            dataclasses.replace(RICH, layers=()),
            tokens(1, 4, seed=seed),
        )
    assert len(traces) == 1
