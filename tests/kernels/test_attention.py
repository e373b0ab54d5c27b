"""Attention against a float64 loop over queries, heads and keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels.attention import (
    Scoring,
    Sight,
    api,
    attention,
    kernel_tiles,
    tiles,
)
from jaxrl_post.kernels.attention.packed import Facts
from jaxrl_post.sharding import DEFAULT_RULES, Chunks, create_mesh
from tests.tiers import daily

IMPLEMENTATIONS = ["reference", "xla", "pallas_tpu", "pallas_gpu"]
# Two rows of seven tokens: a prompt of two with answers of one, two and one tokens,
# then another sequence; one sequence.
ENDS = np.array([[6, 6, 3, 5, 5, 6, 7], [7] * 7], np.int32)
POSITIONS = np.array([[0, 1, 2, 2, 3, 2, 0], range(7)], np.int32)
ARANGE = np.array([range(7)] * 2, np.int32)


def arrays(queries, keys, heads, kv_heads, *, batch=2, dim=4, dtype=jnp.float32):
    """Numbers that bfloat16 has, so that no implementation rounds them."""
    rng = np.random.default_rng(0)
    shapes = [
        (batch, queries, heads, dim),
        (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, dim),
    ]
    drawn = (rng.normal(size=shape).astype(jnp.bfloat16) for shape in shapes)
    return tuple(jnp.asarray(each, dtype) for each in drawn)


def oracle(
    query, key, value, query_positions, kv_positions, ends=None, window=None,
    softcap=None, sinks=None,
):  # fmt: skip
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    batch, queries, heads, dim = query.shape
    group = heads // key.shape[1]
    out = np.zeros((batch, queries, heads, value.shape[-1]))
    for b, t, h in np.ndindex(batch, queries, heads):
        seen = []
        for s in range(key.shape[2]):
            back = query_positions[b][t] - kv_positions[b][s]
            on_path = back >= 0 if ends is None else s <= t < ends[b][s]
            if on_path and (window is None or back < window):
                seen.append(s)
        scores = key[b, h // group, seen] @ query[b, t, h] / np.sqrt(dim)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        nothing = 0.0 if sinks is None else np.exp(np.float64(sinks[h]))
        weights = np.exp(scores)
        out[b, t, h] = weights / (weights.sum() + nothing) @ value[b, h // group, seen]
    return out


def run(
    arrays, positions, kv_positions=None, ends=None, indices=None, *,
    window=None, scale=None, softcap=None, sinks=None, **options,
):  # fmt: skip
    kv_positions = positions if kv_positions is None else kv_positions
    dtype = arrays[0].dtype
    if options.get("implementation") == "pallas_gpu":
        arrays = [array.astype(jnp.bfloat16) for array in arrays]
    out = attention(
        *arrays,
        Sight(
            jnp.asarray(positions),
            jnp.asarray(kv_positions),
            None if ends is None else jnp.asarray(ends),
            indices,
        ),
        scoring=Scoring(window, scale, softcap, sinks),
        interpret=options.get("implementation", "").startswith("pallas"),
        **options,
    )
    return out.astype(dtype)


def assert_close(found, expected, implementation):
    """Within 1e-5, or by what bfloat16 leaves of weights, results and gradients."""
    if implementation == "pallas_gpu":
        error = np.float64(found) - np.float64(expected)
        assert np.linalg.norm(error) <= 2**-7 * np.linalg.norm(np.float64(expected))
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "positions", "ends", "window"),
    [
        pytest.param(4, 4, ARANGE, None, None, id="multi-head"),
        # The case of a window has all of this too.
        pytest.param(
            *(4, 2, POSITIONS, ENDS, None), id="grouped, packed", marks=pytest.mark.all
        ),
        pytest.param(4, 1, ARANGE, None, 3, id="multi-query, window"),
        pytest.param(6, 2, POSITIONS, ENDS, 2, id="grouped, packed, window"),
        pytest.param(2, 2, ARANGE, None, 1, id="itself alone"),
    ],
)
def test_every_implementation_equals_the_oracle(
    monkeypatch, heads, kv_heads, positions, ends, window
):
    # 7 queries: three tiles, 2 to fill up.
    monkeypatch.setattr(api, "QUERY_TILE", 3)
    monkeypatch.setattr(api, "TILE", 3)
    operands = arrays(7, 7, heads, kv_heads)
    expected = oracle(*operands, positions, positions, ends, window)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=expected.shape))
    grads = {}
    # Without ends "pallas_gpu" is the program of "xla", in bfloat16.
    names = IMPLEMENTATIONS if ends is not None else IMPLEMENTATIONS[:3]
    for name in names:

        def scalar(*operands, name=name):
            out = run(
                operands,
                positions,
                ends=ends,
                window=window,
                implementation=name,
            )
            return (out * weights.astype(jnp.float32)).sum(), out

        (_, out), grads[name] = jax.jit(
            jax.value_and_grad(scalar, (0, 1, 2), has_aux=True)
        )(*operands)
        assert_close(out, expected, name)
    assert float(jnp.abs(grads["xla"][2]).max()) > 0
    for name in names[1:]:
        for tiled, whole in zip(grads[name], grads["reference"], strict=True):
            assert_close(tiled, whole, name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_softcap_sinks_and_values_of_another_width(
    monkeypatch, implementation, softcap
):
    monkeypatch.setattr(api, "TILE", 3)
    query, key, value = arrays(7, 7, 6, 2)
    value = value[..., :3]
    sinks = jnp.array([-1e30, -2.0, 0.0, 1.0, 5.0, 40.0])
    options = {"softcap": softcap, "sinks": sinks}
    expected = oracle(
        query, key, value, POSITIONS, POSITIONS, ENDS, 2, **options
    )  # fmt: skip
    out = run(
        (query, key, value), POSITIONS, ends=ENDS, window=2,
        implementation=implementation, **options,
    )  # fmt: skip
    assert out.shape == (2, 7, 6, 3)
    assert_close(out, expected, implementation)
    # The last head looks at its sink alone.
    assert float(jnp.abs(out[:, :, 5]).max()) < 1e-12


def test_gradients_of_softcap_and_sinks_equal_finite_differences():
    operands = [*arrays(4, 4, 2, 1, batch=1), jnp.array([0.3, -0.8])]
    positions = np.array([range(4)], np.int32)
    weights = np.random.default_rng(1).normal(size=operands[0].shape)

    def ours(*arrays):
        out = run(arrays[:3], positions, softcap=0.7, sinks=arrays[3])
        return (out * jnp.float32(weights)).sum()

    def loss(arrays):
        out = oracle(
            *arrays[:3], positions, positions, softcap=0.7, sinks=arrays[3]
        )  # fmt: skip
        return (out * weights).sum()

    grads = jax.grad(ours, (0, 1, 2, 3))(*operands)
    operands = [np.float64(operand) for operand in operands]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        moves = [1e-5 * rng.normal(size=array.shape) for array in operands]
        ahead = loss([a + d for a, d in zip(operands, moves, strict=True)])
        behind = loss([a - d for a, d in zip(operands, moves, strict=True)])
        slope = sum((g * d).sum() for g, d in zip(grads, moves, strict=True))
        np.testing.assert_allclose(slope, (ahead - behind) / 2, rtol=1e-4)


def test_a_softcap_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match=r"softcap must be > 0 or None; got 0\.0"):
        run(arrays(7, 7, 2, 2), ARANGE, softcap=0.0)


def test_gradient_equals_finite_differences_of_the_oracle():
    operands = arrays(4, 4, 2, 1, batch=1)
    positions = np.array([range(4)], np.int32)
    weights = np.random.default_rng(1).normal(size=operands[0].shape)
    grads = jax.grad(
        lambda *arrays: (run(arrays, positions) * jnp.float32(weights)).sum(), (0, 1, 2)
    )(*operands)
    operands = [np.float64(operand) for operand in operands]
    loss = lambda arrays: (oracle(*arrays, positions, positions) * weights).sum()  # noqa: E731
    for seed in range(4):
        rng = np.random.default_rng(seed)
        moves = [1e-5 * rng.normal(size=array.shape) for array in operands]
        ahead = loss([a + d for a, d in zip(operands, moves, strict=True)])
        behind = loss([a - d for a, d in zip(operands, moves, strict=True)])
        slope = sum((g * d).sum() for g, d in zip(grads, moves, strict=True))
        np.testing.assert_allclose(slope, (ahead - behind) / 2, rtol=1e-4)


def test_one_query_a_row_over_a_cache():
    """Row 0 is at position 2 of eight entries, row 1 at 6; the rest is garbage."""
    query, key, value = arrays(1, 8, 4, 2)
    positions = np.array([[2], [6]], np.int32)
    entries = np.array([range(8)] * 2, np.int32)
    expected = oracle(query, key, value, positions, entries)
    written = entries[:, None, :, None] <= positions[:, :, None, None]
    key, value = (jnp.where(written, array, 1e30) for array in (key, value))
    out = run((query, key, value), positions, entries)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 2])
def test_what_is_not_visible_changes_nothing(window):
    query, key, value = arrays(7, 7, 4, 2)
    options = {"ends": ENDS, "window": window}
    before = run((query, key, value), POSITIONS, **options)
    # Token 4 of row 0 is the last of its answer: it alone sees itself.
    key, value = (array.at[0, :, 4].add(9.0) for array in (key, value))
    after = run((query, key, value), POSITIONS, **options)
    others = np.arange(7) != 4
    np.testing.assert_array_equal(before[0, others], after[0, others])
    np.testing.assert_array_equal(before[1], after[1])
    assert float(jnp.abs(after[0, 4] - before[0, 4]).min()) > 0.1


def test_a_query_that_sees_nothing_gets_the_mean_of_all_values():
    query, key, value = arrays(1, 3, 2, 2, batch=1)
    out = run((query, key, value), np.array([[0]], np.int32), np.array([[1, 2, 3]]))
    np.testing.assert_allclose(out[0, 0], value.mean(axis=2)[0], rtol=1e-6)


def test_the_scale_of_the_scores():
    query, key, value = arrays(7, 7, 2, 2)
    double = run((query, key, value), ARANGE, scale=1.0)
    np.testing.assert_allclose(
        double, run((2 * query, key, value), ARANGE), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_stays_bfloat16_and_sums_in_float32(monkeypatch, implementation):
    monkeypatch.setattr(api, "QUERY_TILE", 64)
    # Up to 512 equal weights: a sum of ones in bfloat16 would stop at 256.
    key = jnp.zeros((1, 1, 512, 4), jnp.bfloat16)
    query = jnp.ones((1, 512, 1, 4), jnp.bfloat16)
    value = jnp.ones((1, 1, 512, 4), jnp.bfloat16)
    out = run(
        (query, key, value),
        np.arange(512, dtype=np.int32)[None],
        implementation=implementation,
    )
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(out), 1.0)


def test_memory_holds_the_scores_of_one_tile(monkeypatch):
    monkeypatch.setattr(api, "QUERY_TILE", 32)
    operands = arrays(512, 512, 2, 2, batch=1)
    positions = np.arange(512, dtype=np.int32)[None]

    def compiled_bytes(implementation):
        loss = lambda *a: run(a, positions, implementation=implementation).sum()  # noqa: E731
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*operands).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = 2 * 512 * 512 * 4
    assert compiled_bytes("reference") >= scores
    assert compiled_bytes("xla") < scores / 2


def test_heads_that_share_unevenly_are_refused():
    message = "heads must be a multiple of kv_heads; got 3 and 2"
    with pytest.raises(ValueError, match=message):
        run(arrays(7, 7, 3, 2), ARANGE)


def test_ends_of_other_tokens_than_the_queries_are_refused():
    message = r"queries and keys are the same tokens; got 1 queries a row and ends of"
    with pytest.raises(ValueError, match=message):
        run(arrays(1, 7, 2, 2), POSITIONS[:, :1], POSITIONS, ends=ENDS)


# Forests.


def forest(random, length, depth):
    """Positions and ends of a random forest in one row, with padding at its end."""
    positions, ends = np.zeros(length, np.int32), np.zeros(length, np.int32)

    def grow(start, room, position, level):
        """Writes siblings from `start` on; returns the index after them."""
        while room > 0 and random.random() < 0.85:
            own = int(random.integers(1, max(2, room // 2)))
            positions[start : start + own] = position + np.arange(own)
            end = start + own
            if level < depth:
                end = grow(end, room - own, position + own, level + 1)
            ends[start : start + own] = end
            room -= end - start
            start = end
        return start

    grow(0, length - int(random.integers(0, 4)), 0, 1)
    return positions, ends


# Options that "pallas_gpu" computes too: a window and a cap; a cap and sinks.
ON_GPU = (1, 4)


# Every size of tiles and of scores, a window, a cap, sinks, and a kernel of each kind;
# the other seeds mix the same otherwise.
@pytest.mark.parametrize("seed", daily(range(12), (2, 3)))
def test_random_forests_equal_the_reference(monkeypatch, seed):
    """Up to five levels, windows, softcaps and sinks, in float32."""
    monkeypatch.setattr(api, "TILE", 4)
    # Some of them whole in a tile of queries, others not.
    sizes = [(8, 8), (16, 4), (4, 8)][seed % 3]
    monkeypatch.setattr(
        kernel_tiles, "choose_tile", lambda *_: kernel_tiles.Tile(*sizes)
    )
    # One tile at a time, or 16.
    monkeypatch.setattr(tiles, "SCORE_BYTES", [1, 2**12][seed % 4 // 2])
    random = np.random.default_rng(seed)
    rows = [forest(random, 26, depth=5) for _ in range(3)]
    positions, ends = (np.stack(each) for each in zip(*rows, strict=True))
    query, key, value = arrays(26, 26, 4, 2, batch=3)
    options = {
        "ends": ends,
        "window": [None, 3][seed % 2],
        "softcap": [None, 0.8, None][seed % 3],
    }
    sinks = jnp.linspace(-1, 1, 4) if seed % 4 == 0 else None
    weights = np.random.default_rng(1).normal(size=(3, 26, 4, 4))
    # A query of padding sees nothing, and what it gets is not used.
    weights = jnp.float32(weights * (ends > 0)[:, :, None, None])

    def value_and_grads(implementation):
        def total(*operands):
            out = run(
                operands[:3], positions, sinks=operands[3],
                implementation=implementation, **options,
            )  # fmt: skip
            return (out * weights).sum(), out

        differentiated = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
        grad = jax.jit(jax.value_and_grad(total, differentiated, has_aux=True))
        (_, out), grads = grad(query, key, value, sinks)
        return [jnp.where(ends[:, :, None, None] > 0, out, 0.0), *grads]

    reference = value_and_grads("reference")
    assert all(float(jnp.abs(array).max()) > 0.01 for array in reference)
    for name in IMPLEMENTATIONS[1 : None if seed in ON_GPU else 3]:
        for array, expected in zip(value_and_grads(name), reference, strict=True):
            assert_close(array, expected, name)


def test_tiles_without_a_visible_score_are_skipped():
    """A prompt of one tile, three answers of one tile each: 4 + 3 of 10 tiles."""
    ends = np.repeat([16, 8, 12, 16], 4)[None].astype(np.int32)
    positions = np.concatenate([np.arange(4), *[np.arange(4, 8)] * 3])[None]
    settings = tiles.TileSettings(4, 1.0, None, None)

    def listed(settings, ends, positions, aligned=True):
        indices = np.broadcast_to(np.arange(ends.shape[1]), ends.shape)
        facts = Facts(*(jnp.int32(part) for part in (indices, positions, ends)))
        tasks = tiles._tasks(settings, aligned, 1, facts, facts)
        count = int(tasks.num_chunks)
        pairs = np.stack([tasks.queries[:count], tasks.keys[:count]], axis=1)
        return sorted(map(tuple, pairs.tolist()))

    own = [(i, i) for i in range(4)]
    assert listed(settings, ends, positions) == sorted([*own, (1, 0), (2, 0), (3, 0)])
    # Every token sees itself alone.
    window = settings._replace(window=1)
    assert listed(window, ends, positions) == own
    whole = np.full((2, 16), 16, np.int32)
    plain = np.broadcast_to(np.arange(16), (2, 16))
    assert len(listed(settings, whole, plain)) == 2 * 10
    # Padding is not computed.
    whole[1, 4:] = 0
    whole[1, :4] = 4
    assert len(listed(settings, whole, plain)) == 10 + 1
    # If queries and keys need not be the same tokens, no tile above the diagonal is
    # computed either.
    assert listed(settings, whole, plain, False) == listed(settings, whole, plain)


@pytest.mark.meshes
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
@pytest.mark.parametrize(
    ("spec", "kv_heads"),
    [
        # The last two cases divide the same, and devices share a key head there.
        pytest.param("dp2,tp4", 8, marks=pytest.mark.all),
        pytest.param("dp8", 2, marks=pytest.mark.all),
        pytest.param(
            "dp2,tp4", 2, id="two devices read one key head", marks=pytest.mark.all
        ),
        pytest.param("fsdp2,tp2,dp2", 1, id="all devices read one key head"),
    ],
)
def test_a_mesh_changes_nothing(monkeypatch, spec, kv_heads, implementation):
    monkeypatch.setattr(api, "TILE", 4)
    random = np.random.default_rng(0)
    rows = [forest(random, 18, depth=3) for _ in range(8)]
    positions, ends = (np.stack(each) for each in zip(*rows, strict=True))
    sinks = jnp.linspace(-1, 1, 8)
    operands = (*arrays(18, 18, 8, kv_heads, batch=8), sinks)
    used = jnp.float32(ends > 0)[:, :, None, None]

    def total(*operands):
        out = run(
            operands[:3], positions,
            ends=ends, sinks=operands[3], implementation=implementation,
        )  # fmt: skip
        out = out * used
        return jnp.square(out).sum(), out

    grad = jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)
    expected = jax.tree.leaves(jax.jit(grad)(*operands))
    with jax.set_mesh(create_mesh(spec)):
        found = jax.tree.leaves(jax.jit(grad)(*operands))
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.meshes
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
@pytest.mark.parametrize(
    ("spec", "rows", "length", "kv_heads"),
    [
        # The shortest pieces guard longer ones.
        pytest.param("cp8", 1, 100, 2, marks=pytest.mark.all),
        pytest.param("dp2,cp4", 4, 53, 4, marks=pytest.mark.all),
        pytest.param("cp4,tp2", 2, 9, 1, id="pieces of two tokens, one key head"),
    ],
)
def test_chunks_of_rows_attend_as_whole_rows(
    monkeypatch, spec, rows, length, kv_heads, implementation
):
    """Forests, with a window, a softcap and sinks; forward and backward."""
    monkeypatch.setattr(api, "TILE", 4)
    random = np.random.default_rng(0)
    found = [forest(random, length, depth=3) for _ in range(rows)]
    positions, ends = (np.stack(each) for each in zip(*found, strict=True))
    weights = random.normal(size=(rows, length, 4, 4))
    weights = jnp.float32(weights * (ends > 0)[:, :, None, None])
    operands = (
        *arrays(length, length, 4, kv_heads, batch=rows), jnp.linspace(-1, 1, 4)
    )  # fmt: skip

    def total(query, key, value, sinks, implementation):
        chunks = Chunks.of((rows, length), DEFAULT_RULES)
        at, after = (chunks.split(jnp.asarray(each)) for each in (positions, ends))
        query = chunks.split(query)
        key, value = (
            chunks.split(each.swapaxes(1, 2)).swapaxes(1, 2) for each in (key, value)
        )
        out = run(
            (query, key, value), at, ends=after,
            indices=chunks.indices, window=length // 2, softcap=2.0, sinks=sinks,
            rules=chunks.rules, implementation=implementation,
        )  # fmt: skip
        out = chunks.join(out) * weights
        return out.sum(), out

    def compiled(implementation):
        run = functools.partial(total, implementation=implementation)
        grad = jax.jit(jax.value_and_grad(run, (0, 1, 2, 3), has_aux=True))
        return jax.tree.leaves(jax.device_get(grad(*operands)))

    expected = compiled("reference")
    with jax.set_mesh(create_mesh(spec)):
        found = compiled(implementation)
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rules": DEFAULT_RULES}, r"4 chunks split over \('dp',\), and context"),
        ({"ends": None}, "got ends=None, 8 chunks"),
        ({"implementation": "reference"}, "'reference' holds all scores of a row, and"),
    ],
)
def test_indices_are_for_chunks(change, message):
    with jax.set_mesh(create_mesh("dp4,cp2")):
        chunks = Chunks.of((4, 16), DEFAULT_RULES)
        rows = 4 if "rules" in change else 8
        zeros = jnp.zeros((rows, 8), jnp.int32)
        options = {"ends": zeros, "rules": chunks.rules, **change}
        options["indices"] = chunks.indices[:rows]
        with pytest.raises(ValueError, match=message):
            run(arrays(8, 8, 2, 2, batch=rows), zeros, **options)


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match=r"window must be at least 1, .*; got 0"):
        run(arrays(7, 7, 2, 2), ARANGE, window=0)
