"""Token log-probs on Hopper GPUs, interpreted: a float64 oracle, chunks, meshes, races.

The tensor cores multiply bfloat16 only, so that numbers are compared with the oracle at
what rounding of the operands leaves. That the kernels compile for a Hopper GPU is shown
in test_compiled_for_gpu.py.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxrl_post.kernels.token_logprob import (
    Scaling,
    gpu_kernels,
    pallas_gpu,
    token_logprob,
)
from jaxrl_post.kernels.token_logprob.counted import ByRow
from jaxrl_post.sharding import create_mesh
from tests.tiers import daily


def arrays(rows, width, vocab, vocab_size=None, *, scale=0.3, seed=0):
    """hidden, unembedding, targets, mask, and cotangents of log-prob and entropy."""
    random = np.random.default_rng(seed)
    return (
        jnp.asarray(random.normal(size=(1, rows, width)), jnp.bfloat16),
        jnp.asarray(scale * random.normal(size=(vocab, width)), jnp.bfloat16),
        jnp.asarray(random.integers(0, vocab_size or vocab, (1, rows)), jnp.int32),
        jnp.asarray(random.random((1, rows)) < 0.7),
        jnp.asarray(random.normal(size=(3, 1, rows)), jnp.float32),
    )


def both_passes(hidden, weight, targets, mask, cotangents, kept=None, **options):
    """The result, and (d hidden, d unembedding)."""
    by = options.pop("implementation")

    def run(hidden, weight):
        found = token_logprob(
            hidden, weight, targets, mask=mask, kept=kept, scaling=Scaling(**options),
            interpret=True, implementation=by,
        )  # fmt: skip
        return tuple(found)

    values, pull = jax.vjp(run, hidden, weight)
    return values, pull(tuple(cotangents))


def on_gpu(*inputs, **options):
    options["implementation"] = "pallas_gpu"
    return jax.jit(lambda *inputs: both_passes(*inputs, **options))(*inputs)


def kept_tokens(targets, vocab, most=7):
    """Ids of up to so many tokens, among them the target; every third row has none."""
    random = np.random.default_rng(1)
    ids = np.full((*targets.shape, most), -1, np.int32)
    for place in np.ndindex(targets.shape):
        if place[1] % 3:
            count = random.integers(1, most + 1)
            others = np.setdiff1d(random.permutation(vocab)[:most], targets[place])
            chosen = [np.asarray(targets[place]), *others[: count - 1]]
            ids[place][: len(chosen)] = random.permutation(chosen)
    return jnp.asarray(ids)


def oracle(
    hidden,
    weight,
    targets,
    mask,
    cotangents,
    *,
    temperature=1.0,
    softcap=None,
    vocab_size=None,
    kept=None,
):
    """The same in float64, from the definitions."""
    hidden, weight = (np.asarray(a, np.float64) for a in (hidden[0], weight))
    targets, mask = targets[0], np.asarray(mask[0])
    g, e, n = np.asarray(cotangents[:, 0], np.float64)
    vocab = weight.shape[0] if vocab_size is None else vocab_size
    products = hidden @ weight[:vocab].T
    logits, slope = products, 1.0
    if softcap is not None:
        logits = softcap * np.tanh(products / softcap)
        slope = 1 - (logits / softcap) ** 2
    scaled = logits / temperature
    top = scaled.max(axis=1, keepdims=True)
    normalizer = top + np.log(np.exp(scaled - top).sum(axis=1, keepdims=True))
    log_p = scaled - normalizer
    p = np.exp(log_p)
    hit = np.eye(vocab)[np.asarray(targets)]
    entropy = -(p * log_p).sum(axis=1)
    among, logprob = p, (log_p * hit).sum(axis=1)
    if kept is not None:
        inside = np.stack([np.isin(np.arange(vocab), row) for row in kept[0]])
        inside = inside | (np.asarray(kept[0, :, :1]) < 0)
        mass = (p * inside).sum(axis=1)
        among, logprob = p * inside / mass[:, None], logprob - np.log(mass)
    towards = g[:, None] * (hit - among) - e[:, None] * p * (log_p + entropy[:, None])
    towards = (towards + n[:, None] * p) * mask[:, None] * slope / temperature
    d_weight = np.zeros(weight.shape)
    d_weight[:vocab] = towards.T @ hidden
    values = logprob * mask, entropy * mask, normalizer[:, 0] * mask
    return values, (towards @ weight[:vocab], d_weight)


def check(found, expected):
    """Values within 1e-5, gradients within what bfloat16 leaves of them."""
    for value, exact in zip(found[0], expected[0], strict=True):
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value[0], exact, rtol=1e-5, atol=1e-5)
    for gradient, exact in zip(found[1], expected[1], strict=True):
        assert gradient.dtype == jnp.bfloat16
        error = np.asarray(gradient, np.float64).reshape(exact.shape) - exact
        # 2^-8 of the gradient of a logit, and of the result, rounded to nearest.
        assert np.linalg.norm(error) <= 2**-8 * np.linalg.norm(exact)
        assert np.abs(error).max() <= 2**-7 * np.abs(exact).max()


# Rows and columns that no tile divides, with padding; five ranges of the vocabulary;
# whole tiles.
@pytest.mark.parametrize(
    ("rows", "width", "vocab", "options"),
    [
        (300, 128, 333, {"vocab_size": 320, "temperature": 0.7}),
        (40, 64, 600, {"softcap": 3.0, "vocab_size": 597}),
        (512, 64, 256, {"temperature": 2.5, "softcap": 30.0}),
    ],
)
def test_values_and_gradients_equal_the_definition(rows, width, vocab, options):
    inputs = arrays(rows, width, vocab, options.get("vocab_size"))
    check(on_gpu(*inputs, **options), oracle(*inputs, **options))


def test_a_range_of_several_tiles(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "RANGES", 2)
    monkeypatch.setattr(pallas_gpu, "BLOCKS", 1)
    inputs = arrays(30, 128, 1100, 1090)
    check(on_gpu(*inputs, vocab_size=1090), oracle(*inputs, vocab_size=1090))


def test_chunks_of_rows_and_of_the_vocabulary_add_up(monkeypatch):
    # Three blocks of rows, the last without a row that counts, and three chunks of 256
    # columns; the last begins within the one before.
    monkeypatch.setattr(pallas_gpu, "CHUNK_ROWS", 256)
    monkeypatch.setattr(pallas_gpu, "CHUNK_BYTES", 2 * 256 * 256)
    inputs = arrays(600, 64, 650)
    check(on_gpu(*inputs), oracle(*inputs))


def test_kept_tokens_of_several_chunks(monkeypatch):
    # Three chunks of the vocabulary; the last begins within the one before.
    monkeypatch.setattr(pallas_gpu, "CHUNK_ROWS", 256)
    monkeypatch.setattr(pallas_gpu, "CHUNK_BYTES", 2 * 256 * 256)
    inputs = arrays(300, 64, 650, 640)
    options = {"softcap": 3.0, "temperature": 0.7, "vocab_size": 640}
    options["kept"] = kept_tokens(inputs[2], 640)
    check(on_gpu(*inputs, **options), oracle(*inputs, **options))


def test_extreme_logits():
    hidden, weight, *others = arrays(20, 64, 200)
    values, gradients = on_gpu(100 * hidden, 30 * weight, *others)
    exact, _ = oracle(100 * hidden, 30 * weight, *others)
    assert np.abs(exact[0]).max() > 10_000
    for value, expected in zip(values, exact, strict=True):
        np.testing.assert_allclose(value[0], expected, rtol=1e-5, atol=1e-3)
    assert all(np.isfinite(g.astype(jnp.float32)).all() for g in gradients)


def test_masked_rows_cost_and_change_nothing_even_where_they_are_nan():
    hidden, weight, targets, mask, cotangents = arrays(300, 64, 140)
    mask = mask.at[:, 100:].set(False)
    poisoned = jnp.where(mask[..., None], hidden, jnp.nan)
    inputs = weight, targets, mask, cotangents
    found, expected = on_gpu(poisoned, *inputs), on_gpu(hidden, *inputs)
    for array, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(array, other)
    nothing = on_gpu(poisoned, weight, targets, jnp.zeros_like(mask), cotangents)
    assert all(not array.any() for array in jax.tree.leaves(nothing))


def test_no_access_races_with_another():
    layout = gpu_kernels.Layout(
        333, 1.0, interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    hidden, weight, targets, mask, cotangents = arrays(300, 192, 333)
    operands = hidden[0], weight, ByRow(targets[0], mask[0], None)

    @jax.jit
    def run(cotangents):
        *values, residuals = pallas_gpu.forward(*operands, layout)
        return values, pallas_gpu.backward(
            *operands, residuals, tuple(cotangents), layout
        )

    values, (d_hidden, d_weight) = run(cotangents[:, 0])
    expected = oracle(hidden, weight, targets, mask, cotangents)
    np.testing.assert_allclose(values[0], expected[0][0], rtol=1e-5, atol=1e-5)
    for found, exact in zip((d_hidden, d_weight), expected[1], strict=True):
        assert np.linalg.norm(found - exact) <= 2**-8 * np.linalg.norm(exact)


def plain(settings, kernel, grid, result, results, *, name):
    """A kernel's computation as an ordinary program."""
    layout, (row_tiles, ranges) = settings.layout, grid
    tile, own = gpu_kernels.COLUMNS, gpu_kernels.OWN_ROWS

    def products(hidden, weight):
        logits = jnp.einsum(
            "td,vd->tv", hidden, weight, preferred_element_type=jnp.float32
        )
        return logits / layout.temperature, jnp.arange(weight.shape[0])

    def forward(bounds, hidden, weight, targets):
        logits, column = products(hidden, weight)
        inside = column < bounds[0]
        hit = inside & (column == targets[:, None])
        found = []
        for part in range(ranges):
            here = column // tile // settings.part == part
            z = jnp.where(inside & here, logits, gpu_kernels.MASKED)
            top = z.max(axis=1, keepdims=True)
            odds = jnp.where(here, jnp.exp(z - top), 0.0)
            chosen = jnp.where(hit & here, logits, 0.0)
            sums = odds, odds * (z - top), chosen
            found.append(jnp.stack([top[:, 0], *(each.sum(axis=1) for each in sums)]))
        split = jnp.stack(found).reshape(ranges, 4, row_tiles, 2, own)
        return split.transpose(0, 2, 3, 1, 4)

    def gradient(bounds, hidden, weight, targets, facts):
        logits, column = products(hidden, weight)
        normalizer, entropy, g, e, spread = facts[..., None]
        log_p = logits - normalizer
        found = jnp.where(column == targets[:, None], g, 0.0)
        found = found - jnp.exp(log_p) * (spread + e * (log_p + entropy))
        inside = (column >= bounds[1]) & (column < bounds[0])
        return jnp.where(inside, found / layout.temperature, 0.0).astype(result.dtype)

    return forward if name == "token_logprob_forward" else gradient


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("has_kept", "spec"),
    daily(
        itertools.product([False, True], ["dp2,tp4", "fsdp4,tp2"]),
        {(False, "fsdp4,tp2"), (True, "dp2,tp4")},
    ),
)
def test_a_split_vocabulary(monkeypatch, spec, has_kept):
    """The interpreter knows one device, so that here kernels are ordinary programs."""
    inputs = arrays(128, 64, 1280, 1200)
    hidden, targets, mask = (
        a.reshape(4, 32, *a.shape[2:]) for a in (inputs[0], inputs[2], inputs[3])
    )
    cotangents = inputs[4].reshape(3, 4, 32)
    options = {"vocab_size": 1200, "temperature": 0.7}
    if has_kept:
        options["kept"] = kept_tokens(inputs[2], 1200)
    expected = oracle(*inputs, **options)
    if has_kept:
        options["kept"] = options["kept"].reshape(4, 32, -1)
    monkeypatch.setattr(gpu_kernels.GpuSettings, "run", plain)
    # Two chunks of the vocabulary on a device.
    monkeypatch.setattr(pallas_gpu, "CHUNK_BYTES", 2 * 256 * 256)
    with jax.set_mesh(create_mesh(spec)):
        found = on_gpu(hidden, inputs[1], targets, mask, cotangents, **options)
    values = [value.reshape(1, -1) for value in found[0]]
    check((values, (found[1][0].reshape(inputs[0].shape), found[1][1])), expected)


def test_what_it_cannot_compute_is_refused():
    hidden, weight, targets, _, _ = arrays(4, 64, 8)
    run = {"implementation": "pallas_gpu", "interpret": True}
    with pytest.raises(ValueError, match="a multiple of 64 is needed; got 63"):
        token_logprob(hidden[..., 1:], weight[:, 1:], targets, **run)
    wide = hidden.astype(jnp.float32), weight.astype(jnp.float32)
    with pytest.raises(ValueError, match="pallas_gpu computes with bfloat16; got floa"):
        token_logprob(*wide, targets, **run)
    with pytest.raises(ValueError, match="pallas_gpu runs on hopper, and this program"):
        token_logprob(hidden, weight, targets, implementation="pallas_gpu")
