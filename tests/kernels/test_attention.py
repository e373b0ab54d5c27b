"""Attention against a float64 loop over queries, heads and keys."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels.attention import api, attention

IMPLEMENTATIONS = ["reference", "xla"]
# Two rows of seven tokens: three packed sequences and padding; one sequence.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 0], [1] * 7], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0, 0], range(7)], np.int32)
ARANGE = np.array([range(7)] * 2, np.int32)


def arrays(queries, keys, heads, kv_heads, *, batch=2, dim=4, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [
        (batch, queries, heads, dim),
        (batch, kv_heads, keys, dim),
        (batch, kv_heads, keys, dim),
    ]
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def oracle(
    query, key, value, query_positions, kv_positions, segments=None, window=None,
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
            same = segments is None or segments[b][t] == segments[b][s]
            if same and back >= 0 and (window is None or back < window):
                seen.append(s)
        scores = key[b, h // group, seen] @ query[b, t, h] / np.sqrt(dim)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        nothing = 0.0 if sinks is None else np.exp(np.float64(sinks[h]))
        weights = np.exp(scores)
        out[b, t, h] = weights / (weights.sum() + nothing) @ value[b, h // group, seen]
    return out


def run(arrays, positions, kv_positions=None, segments=None, **options):
    kv_positions = positions if kv_positions is None else kv_positions
    ids = None if segments is None else jnp.asarray(segments)
    return attention(
        *arrays,
        query_positions=jnp.asarray(positions),
        kv_positions=jnp.asarray(kv_positions),
        query_segment_ids=ids,
        kv_segment_ids=ids,
        **options,
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "positions", "segments", "window"),
    [
        pytest.param(4, 4, ARANGE, None, None, id="multi-head"),
        pytest.param(4, 2, POSITIONS, SEGMENTS, None, id="grouped, packed"),
        pytest.param(4, 1, ARANGE, None, 3, id="multi-query, window"),
        pytest.param(6, 2, POSITIONS, SEGMENTS, 2, id="grouped, packed, window"),
        pytest.param(2, 2, ARANGE, None, 1, id="itself alone"),
    ],
)
def test_every_implementation_equals_the_oracle(
    monkeypatch, heads, kv_heads, positions, segments, window
):
    monkeypatch.setattr(api, "QUERY_TILE", 3)  # 7 queries: three tiles, 2 to fill up
    operands = arrays(7, 7, heads, kv_heads)
    expected = oracle(*operands, positions, positions, segments, window)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=expected.shape))
    grads = {}
    for name in IMPLEMENTATIONS:

        def scalar(*operands, name=name):
            out = run(
                operands,
                positions,
                segments=segments,
                window=window,
                implementation=name,
            )
            return (out * weights.astype(jnp.float32)).sum(), out

        (_, out), grads[name] = jax.jit(
            jax.value_and_grad(scalar, (0, 1, 2), has_aux=True)
        )(*operands)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(grads["xla"][2]).max()) > 0
    for tiled, whole in zip(grads["xla"], grads["reference"], strict=True):
        np.testing.assert_allclose(tiled, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_softcap_sinks_and_values_of_another_width(
    monkeypatch, implementation, softcap
):
    monkeypatch.setattr(api, "QUERY_TILE", 3)
    query, key, value = arrays(7, 7, 6, 2)
    value = value[..., :3]
    sinks = jnp.array([-1e30, -2.0, 0.0, 1.0, 5.0, 40.0])
    options = {"softcap": softcap, "sinks": sinks}
    expected = oracle(
        query, key, value, POSITIONS, POSITIONS, SEGMENTS, 2, **options
    )  # fmt: skip
    out = run(
        (query, key, value), POSITIONS, segments=SEGMENTS, window=2,
        implementation=implementation, **options,
    )  # fmt: skip
    assert out.shape == (2, 7, 6, 3)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
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
    options = {"segments": SEGMENTS, "window": window}
    before = run((query, key, value), POSITIONS, **options)
    # Token 4 of row 0 is the second of its segment: it alone sees itself.
    key, value = (array.at[0, :, 4].add(9.0) for array in (key, value))
    after = run((query, key, value), POSITIONS, **options)
    others = np.arange(7) != 4
    np.testing.assert_array_equal(before[0, others], after[0, others])
    np.testing.assert_array_equal(before[1], after[1])
    assert float(jnp.abs(after[0, 4] - before[0, 4]).min()) > 1


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


@pytest.mark.parametrize("given", ["query_segment_ids", "kv_segment_ids"])
def test_segment_ids_on_one_side_are_refused(given):
    call = functools.partial(
        attention,
        *arrays(7, 7, 2, 2),
        query_positions=jnp.asarray(ARANGE),
        kv_positions=jnp.asarray(ARANGE),
    )
    with pytest.raises(ValueError, match="segment ids of both queries and keys, or no"):
        call(**{given: jnp.asarray(SEGMENTS)})


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match=r"window must be at least 1, .*; got 0"):
        run(arrays(7, 7, 2, 2), ARANGE, window=0)


def test_an_unknown_implementation_is_refused():
    # Without the tests' own check of types, which comes first.
    call = inspect.unwrap(attention)
    positions = jnp.asarray(ARANGE)
    with pytest.raises(ValueError, match=r"one of \('reference', 'xla'\); got 'XLA'"):
        call(
            *arrays(7, 7, 2, 2),
            query_positions=positions,
            kv_positions=positions,
            implementation="XLA",
        )
