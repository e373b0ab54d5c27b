"""Kernels for TPUs, interpreted: races, awkward sizes, precision, skipped work.

That they equal the definitions is shown in test_attention.py and test_token_logprob.py,
with the other implementations.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl_post.kernels.attention import Scoring, Sight, attention
from jaxrl_post.kernels.attention.kernel_tiles import (
    LIST_BYTES,
    KernelSettings,
    Shape,
    Tile,
    TileList,
    choose_tile,
)
from jaxrl_post.kernels.attention.packed import Facts, Plan, attend_packed
from jaxrl_post.kernels.attention.pallas_tpu import TpuTiles
from jaxrl_post.kernels.token_logprob import Scaling, token_logprob
from jaxrl_post.kernels.token_logprob import pallas_tpu as head
from jaxrl_post.kernels.token_logprob.counted import ByRow
from tests.tiers import daily

# Fails where two accesses of a buffer are not ordered, and where a read leaves it.
RACES = pltpu.InterpretParams(detect_races=True)


def forest(groups, length):
    """Rows of prompts with three answers each: positions and ends, [rows, length]."""
    rows = []
    for seed in range(groups):
        random = np.random.default_rng(seed)
        positions, ends = np.zeros((2, length), np.int32)
        start = 0
        while True:
            prompt, *answers = random.integers(1, length // 4, 4)
            end = start + prompt + sum(answers)
            if end > length:
                break
            positions[start : start + prompt] = np.arange(prompt)
            ends[start : start + prompt] = end
            at = start + prompt
            for answer in answers:
                positions[at : at + answer] = prompt + np.arange(answer)
                ends[at : at + answer] = at + answer
                at += answer
            start = end
        rows.append((positions, ends))
    return tuple(jnp.asarray(np.stack(each)) for each in zip(*rows, strict=True))


def operands(batch, length, heads, kv_heads, dim, value_dim, dtype=jnp.float32):
    random = np.random.default_rng(0)
    shapes = [
        (batch, length, heads, dim),
        (batch, kv_heads, length, dim),
        (batch, kv_heads, length, value_dim),
        (batch, length, heads, value_dim),
    ]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]


def attend(settings, query, key, value, positions, ends):
    """The kernels, on whole rows."""
    return attend_packed(
        Plan(TpuTiles(settings)), query, key, value, facts(positions, ends), None
    )


def facts(positions, ends):
    indices = jnp.arange(ends.shape[1], dtype=jnp.int32)
    return Facts(jnp.broadcast_to(indices, ends.shape), positions, ends)


def both_passes(function, *arrays):
    *inputs, cotangent = arrays
    out, pull = jax.vjp(function, *inputs)
    return out, *pull(cotangent)


def whole(positions, ends, window, query, key, value):
    """The reference, with zeros for padding."""
    out = attention(
        query, key, value,
        Sight(positions, positions, ends),
        scoring=Scoring(window), implementation="reference",
    )  # fmt: skip
    return jnp.where((ends > 0)[:, :, None, None], out, jnp.zeros_like(out))


# Head sizes of real models, among them DeepSeek's latent attention; groups of 1 to 7.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "window", "tile"),
    daily(
        [
            (2, 2, 64, 64, None, Tile(128, 128)),
            (7, 1, 80, 80, 60, Tile(128, 256)),
            (4, 2, 192, 128, None, Tile(256, 128)),
            (2, 1, 256, 256, 100, None),
        ],
        [(7, 1, 80, 80, 60, Tile(128, 256))],
    ),
)
def test_attention_without_races(heads, kv_heads, dim, value_dim, window, tile):
    positions, ends = forest(2, 300)
    query, key, value, towards = operands(2, 300, heads, kv_heads, dim, value_dim)
    towards = jnp.where((ends > 0)[:, :, None, None], towards, 0.0)
    settings = KernelSettings(dim**-0.5, window, None, tile, RACES)

    def kernel(*arrays):
        return attend(settings, *arrays, positions, ends)

    reference = functools.partial(whole, positions, ends, window)
    arrays = query, key, value, towards
    found = jax.jit(both_passes, static_argnums=0)(kernel, *arrays)
    expected = jax.jit(both_passes, static_argnums=0)(reference, *arrays)
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-5)
    # Padding sees nothing and gets exactly nothing.
    assert float(jnp.abs(found[0][ends == 0]).max()) == 0


def test_attention_is_deterministic():
    positions, ends = forest(2, 300)
    arrays = operands(2, 300, 4, 2, 64, 64)
    settings = KernelSettings(0.125, None, None, Tile(128, 128), True)

    @jax.jit
    def run(*arrays):
        return both_passes(
            lambda *inputs: attend(settings, *inputs, positions, ends),
            *arrays,
        )

    for one, other in zip(run(*arrays), run(*arrays), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    daily(
        [(None, None, False), (50, None, True), (None, 2.0, False), (50, 2.0, True)],
        {(None, None, False), (50, 2.0, True)},
    ),
)
def test_bfloat16_attention_is_as_exact_as_its_rounding(window, softcap, sinks):
    """The error against float64 is at most twice the bfloat16 reference's."""
    positions, ends = forest(1, 280)
    arrays = operands(1, 280, 4, 2, 64, 64, jnp.bfloat16)
    arrays[3] = arrays[3] * (ends > 0)[:, :, None, None].astype(jnp.bfloat16)
    logits = np.array([0.5, -1.0, 2.0, 3.0], np.float32) if sinks else None

    def by(implementation):
        def run(*inputs):
            out = attention(
                *inputs,
                Sight(positions, positions, ends),
                scoring=Scoring(
                    window, None, softcap,
                    None if logits is None else jnp.asarray(logits),
                ),
                implementation=implementation, interpret=True,
            )  # fmt: skip
            return jnp.where((ends > 0)[:, :, None, None], out, jnp.zeros_like(out))

        return both_passes(run, *arrays)

    rows = np.asarray(positions), np.asarray(ends)
    exact = definition(
        *(np.float64(array) for array in arrays), *rows, window, softcap, logits
    )
    for array, other, expected in zip(
        by("pallas_tpu"), by("reference"), exact, strict=True
    ):
        error = np.abs(np.float64(array) - expected).max()
        assert error <= 2 * np.abs(np.float64(other) - expected).max()


def definition(query, key, value, towards, positions, ends, window, softcap, sinks):
    """Attention of one row and its gradients in float64, written out."""
    _, length, heads, dim = query.shape
    group = heads // key.shape[1]
    out, d_query = np.zeros_like(towards), np.zeros_like(query)
    d_key, d_value = np.zeros_like(key), np.zeros_like(value)
    index = np.arange(length)
    seen = (index[None] <= index[:, None]) & (index[:, None] < ends[0][None])
    if window is not None:
        seen &= positions[0][:, None] - positions[0][None] < window
    real = ends[0] > 0
    for h in range(heads):
        k, v, q = key[0, h // group], value[0, h // group], query[0, :, h]
        scores, slope = q @ k.T / np.sqrt(dim), 1.0
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
            slope = 1 - (scores / softcap) ** 2
        scores = np.where(seen, scores, -np.inf)
        scores[~real] = 0.0
        weights = np.exp(scores)
        sums = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            sums += np.exp(np.float64(sinks[h]))
        weights = weights / sums * real[:, None]
        d_out = towards[0, :, h]
        out[0, :, h] = weights @ v
        d_weights = d_out @ v.T
        d_scores = weights * (
            d_weights - (weights * d_weights).sum(axis=1, keepdims=True)
        )
        d_scores *= slope
        d_query[0, :, h] = d_scores @ k / np.sqrt(dim)
        d_key[0, h // group] += d_scores.T @ q / np.sqrt(dim)
        d_value[0, h // group] += weights.T @ d_out
    return out, d_query, d_key, d_value


def test_the_list_of_tiles_holds_what_is_visible():
    """A prompt of 128 tokens and three answers of 128: 4 + 3 of 10 tiles."""
    ends = jnp.asarray(np.repeat([512, 256, 384, 512], 128)[None].astype(np.int32))
    positions = np.concatenate([np.arange(128), *[np.arange(128, 256)] * 3])[None]
    positions = jnp.asarray(positions.astype(np.int32))
    query, key, value, _ = operands(1, 512, 2, 1, 8, 8)
    settings = KernelSettings(1.0, None, None, Tile(128, 128))
    shape = Shape.of(settings, query, key, value)

    def listed(by_key, settings=settings, ends=ends):
        known = facts(positions, ends)
        found = TileList.of(settings, shape, by_key, known, known, aligned=True)
        count = int(found.count[0])
        assert (found.sums[count:] == found.sums[count - 1]).all()
        sums, others = found.sums[:count].tolist(), found.others[:count].tolist()
        return [
            (one, other // 2, bool(other % 2))
            for one, other in zip(sums, others, strict=True)
        ]

    # The prompt's keys are visible to every answer, the own ones are not.
    assert listed(by_key=False) == [
        (0, 0, False), (1, 0, True), (1, 1, False), (2, 0, True), (2, 2, False),
        (3, 0, True), (3, 3, False),
    ]  # fmt: skip
    assert listed(by_key=True) == [
        (0, 0, False), (0, 1, True), (0, 2, True), (0, 3, True), (1, 1, False),
        (2, 2, False), (3, 3, False),
    ]  # fmt: skip
    # With a window of one token nothing but the diagonal is left.
    alone = settings._replace(window=1)
    assert listed(False, alone) == [(i, i, False) for i in range(4)]
    # With 129 the last answer's first token sees one of the prompt, and not all do.
    narrow = listed(False, settings._replace(window=129))
    assert (3, 0, False) in narrow


def test_very_long_rows_get_larger_tiles():
    for batch, length, group in [(1, 2**17, 8), (1, 2**18, 1), (16, 2**14, 4)]:
        tile = choose_tile(batch, length, group, None)
        pairs = batch * length**2 / tile.queries / tile.keys
        assert 4 * pairs <= LIST_BYTES


# One tile of rows and several, without kept tokens and with them; the others are in the
# longer tier.
@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        (1, True),
        (300, False),
        pytest.param(1, False, marks=pytest.mark.all),
        pytest.param(130, False, marks=pytest.mark.all),
        pytest.param(130, True, marks=pytest.mark.all),
        pytest.param(300, True, marks=pytest.mark.all),
    ],
)
def test_token_logprob_without_races(rows, kept):
    """Two tiles of rows with a part masked, and columns that no tile divides."""
    random = np.random.default_rng(0)
    vocab, width = 300, 40
    hidden = jnp.asarray(random.normal(size=(rows, width)), jnp.float32)
    weight = jnp.asarray(random.normal(size=(vocab, width)), jnp.float32)
    targets = jnp.asarray(random.integers(0, 290, rows), jnp.int32)
    mask = jnp.asarray(random.random(rows) < 0.8).at[0].set(True)
    ids = None
    if kept:
        ids = jnp.stack([targets, (targets + 7) % 290, -jnp.ones_like(targets)], axis=1)
        ids = jnp.where(jnp.arange(rows)[:, None] % 3 > 0, ids, -1)
    towards = jnp.asarray(random.normal(size=(3, rows)), jnp.float32)
    layout = head.Layout(290, 0.7, 5.0, (), head.Tiles(128, 128), RACES)

    @jax.jit
    def run(hidden, weight):
        operands = hidden, weight, ByRow(targets, mask, ids)
        logprob, entropy, saved = head.forward(*operands, layout)
        grads = head.backward(*operands, saved, tuple(towards), layout)
        return logprob, entropy, saved.normalizer, *grads

    def reference(hidden, weight):
        found = token_logprob(
            hidden[None], weight, targets[None],
            mask=mask[None], kept=None if ids is None else ids[None],
            scaling=Scaling(0.7, 5.0, 290), implementation="reference",
        )  # fmt: skip
        return tuple(value[0] for value in found)

    expected, pull = jax.vjp(reference, hidden, weight)
    expected = *expected, *pull(tuple(towards))
    for array, other in zip(run(hidden, weight), expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=2e-5)


def test_extreme_logits_stay_finite():
    """Logits of 3e4 that come in the last tile, and one token that has all mass."""
    hidden = jnp.ones((4, 8))
    weight = jnp.zeros((400, 8)).at[399].set(4e3).at[0].set(-4e3)
    targets = jnp.array([[0, 1, 399, 399]], jnp.int32)

    def run(hidden, weight):
        found = token_logprob(
            hidden[None], weight, targets, implementation="pallas_tpu", interpret=True
        )
        return found.logprob[0], found.entropy[0]

    (logprob, entropy), pull = jax.vjp(run, hidden, weight)
    np.testing.assert_allclose(logprob, [-64000, -32000, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(entropy, 0.0)
    for gradient in pull((jnp.ones(4), jnp.ones(4))):
        assert bool(jnp.isfinite(gradient).all())


def test_bfloat16_log_probs_are_float32_of_rounded_operands():
    """From bfloat16 inputs within 1e-3 of float64, over a vocabulary of 5,003."""
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(1, 60, 256)), jnp.bfloat16)
    weight = jnp.asarray(random.normal(size=(5003, 256)) / 16, jnp.bfloat16)
    targets = jnp.asarray(random.integers(0, 5003, (1, 60)), jnp.int32)
    found = token_logprob(
        hidden, weight, targets, implementation="pallas_tpu", interpret=True
    )
    exact, table = (np.asarray(a, np.float64) for a in (hidden[0], weight))
    logits = exact @ table.T
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    chosen = np.take_along_axis(log_p, np.asarray(targets[0])[:, None], axis=1)[:, 0]
    assert np.abs(np.float64(found.logprob[0]) - chosen).max() < 1e-5
    entropy = -(np.exp(log_p) * log_p).sum(axis=1)
    assert np.abs(np.float64(found.entropy[0]) - entropy).max() < 1e-5
