"""The next token: the definition in float64, frequencies, ties, NaN, split tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.stats import chisquare

from jaxrl_post.kernels.next_token import api, next_token, pallas_tpu, parts
from jaxrl_post.sharding import create_mesh
from tests.tiers import daily

IMPLEMENTATIONS = ["reference", "xla", "pallas_tpu"]
EVERY = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
LAST = np.nextafter(np.float32(1), np.float32(0))


@pytest.fixture(autouse=True)
def _tiles(monkeypatch):
    """Lets "xla" take tiles however few logits there are."""
    monkeypatch.setattr(api, "LOGIT_BYTES", 0)


@functools.partial(
    jax.jit, static_argnames=("divisor", "softcap", "implementation", "interpret")
)
def drawn(hidden, weight, uniforms, temperature, *, implementation, **options):
    return next_token(
        hidden, weight, uniforms, temperature,
        implementation=implementation, **{"interpret": True, **options},
    )  # fmt: skip


def arrays(rows, vocab, width, *, dtype=np.float32, seed=0):
    """hidden, weight, uniforms, and temperatures; every fourth is 0."""
    rng = np.random.default_rng(seed)
    temperature = np.where(np.arange(rows) % 4 == 3, 0, rng.uniform(0.5, 2, rows))
    return (
        jnp.asarray(rng.normal(size=(rows, width)), dtype),
        jnp.asarray(rng.normal(size=(vocab, width)), dtype),
        jnp.asarray(rng.random(rows), jnp.float32),
        jnp.asarray(temperature, jnp.float32),
    )


def distribution(hidden, weight, temperature, divisor=1.0, softcap=None):
    """Probabilities [rows, vocab] in float64; a greedy row's at temperature 1."""
    hidden, weight = (np.asarray(array, np.float64) for array in (hidden, weight))
    logits = hidden @ weight.T / divisor
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    temperature = np.float64(temperature)[:, None]
    logits = logits / np.where(temperature == 0, 1, temperature)
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def check(found, uniforms, temperature, p, tolerance=1e-6):
    """Tokens are those at which the cumulative distribution passes the uniforms."""
    tokens, logprobs = (np.asarray(array) for array in found)
    row = np.arange(len(tokens))
    assert tokens.dtype == np.int32
    assert logprobs.dtype == np.float32
    assert (logprobs <= 0).all()
    np.testing.assert_allclose(
        logprobs, np.log(p[row, tokens]), rtol=0, atol=10 * tolerance
    )
    cold = np.asarray(temperature) == 0
    np.testing.assert_array_equal(tokens[cold], p.argmax(axis=1)[cold])
    after = np.cumsum(p, axis=1)[row, tokens]
    before = after - p[row, tokens]
    uniforms = np.float64(uniforms)
    inside = (before <= uniforms + tolerance) & (uniforms < after + tolerance)
    assert inside[~cold].all()


@EVERY
@pytest.mark.parametrize(
    ("rows", "vocab", "options"),
    [
        (1, 1, {}),
        (3, 5, {}),
        (17, 16, {"softcap": 2.0}),
        (5, 127, {"divisor": 3.0}),
        (33, 129, {"divisor": 0.5, "softcap": 4.0}),
        # Several tiles of either, the last ones in part; and tiles that are full.
        (150, 9000, {"softcap": 4.0}),
        (8, 8192, {}),
    ],
)
def test_tokens_follow_the_definition(implementation, rows, vocab, options):
    hidden, weight, uniforms, temperature = arrays(rows, vocab, 5)
    found = drawn(
        hidden, weight, uniforms, temperature,
        implementation=implementation, **options,
    )  # fmt: skip
    p = distribution(hidden, weight, temperature, **options)
    check(found, uniforms, temperature, p)


@EVERY
def test_frequencies_are_those_of_the_distribution(implementation):
    rows, vocab = 6000, 40
    _, weight, uniforms, _ = arrays(rows, vocab, 3)
    hidden = jnp.tile(jnp.array([[0.5, -0.4, 0.3]]), (rows, 1))
    temperature = jnp.full(rows, 0.8)
    found = drawn(hidden, weight, uniforms, temperature, implementation=implementation)
    p = distribution(hidden[:1], weight, temperature[:1])[0]
    counts = np.bincount(found.tokens, minlength=vocab)
    assert (rows * p > 5).all()
    assert chisquare(counts, rows * p).pvalue > 0.01


@EVERY
def test_the_ends_of_the_interval_and_ties(implementation):
    """Tokens 200 and 700 share all probability, but for 1e-30 of the others."""
    weight = jnp.zeros((1000, 2)).at[jnp.array([200, 700])].set(35.0)
    hidden = jnp.ones((4, 2))
    uniforms = jnp.array([0.0, 0.5001, LAST, 0.9])
    temperature = jnp.array([1.0, 1.0, 1.0, 0.0])
    found = drawn(hidden, weight, uniforms, temperature, implementation=implementation)
    # The lowest number falls to the first token of all.
    assert found.tokens.tolist() == [0, 700, 700, 200]
    # Float32 numbers near the logit of 70 lie 8e-6 apart.
    np.testing.assert_allclose(found.logprobs[1:], np.log(0.5), rtol=0, atol=4e-6)


@EVERY
def test_extreme_logits_stay_finite(implementation):
    """Logits of 3e4 that come late, and a row whose tokens are equal."""
    weight = jnp.zeros((9000, 8)).at[8999].set(4e3).at[0].set(-4e3)
    hidden = jnp.ones((3, 8)).at[2].set(0.0)
    uniforms = jnp.array([0.0, LAST, 0.5])
    temperature = jnp.array([1.0, 0.0, 1.0])
    found = drawn(hidden, weight, uniforms, temperature, implementation=implementation)
    assert found.tokens.tolist() == [8999, 8999, 4500]
    np.testing.assert_allclose(found.logprobs, [0, 0, -np.log(9000)], rtol=1e-6)


@EVERY
def test_a_row_with_nan_has_no_logprob_and_the_others_have(implementation):
    hidden, weight, uniforms, temperature = arrays(9, 300, 5)
    expected = drawn(
        hidden, weight, uniforms, temperature, implementation=implementation
    )
    broken = hidden.at[jnp.array([2, 3])].set(jnp.nan)  # row 3 is greedy
    found = drawn(broken, weight, uniforms, temperature, implementation=implementation)
    good = np.setdiff1d(np.arange(9), [2, 3])
    assert np.isnan(found.logprobs[2:4]).all()
    assert ((found.tokens >= 0) & (found.tokens < 300)).all()
    np.testing.assert_array_equal(found.tokens[good], expected.tokens[good])
    np.testing.assert_array_equal(found.logprobs[good], expected.logprobs[good])
    # One token's NaN is in every row's sum.
    table = weight.at[290].set(jnp.nan)
    found = drawn(hidden, table, uniforms, temperature, implementation=implementation)
    assert np.isnan(found.logprobs).all()


@EVERY
def test_bfloat16_operands_are_multiplied_in_float32(implementation):
    hidden, weight, uniforms, temperature = arrays(40, 3000, 64, dtype=jnp.bfloat16)
    hidden = hidden / 4
    found = drawn(hidden, weight, uniforms, temperature, implementation=implementation)
    p = distribution(hidden, weight, temperature)
    check(found, uniforms, temperature, p)


# 2,400 tokens are split by four devices, 2,402 are not.
@pytest.mark.meshes
@EVERY
@pytest.mark.parametrize(
    # A vocabulary that tp divides, and one that it does not; fsdp divides as dp does.
    ("spec", "vocab"),
    daily(
        [("dp2,tp4", 2400), ("dp2,tp4", 2402), ("fsdp4,tp2", 2400)],
        [("dp2,tp4", 2400), ("dp2,tp4", 2402)],
    ),
)
def test_a_mesh_changes_nothing(implementation, spec, vocab):
    hidden, weight, uniforms, temperature = arrays(24, vocab, 8)
    # A tie of the likeliest of greedy rows, on the first and on the last device.
    weight = weight.at[jnp.array([7, vocab - 1])].set(3 * hidden[3])
    mesh = create_mesh(spec)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P(tuple(n for n in mesh.shape if n != "tp")))
        given = jax.device_put((hidden, uniforms, temperature), rows)
        split = NamedSharding(mesh, P("tp" if vocab == 2400 else None))
        table = jax.device_put(weight, split)
        found = drawn(given[0], table, *given[1:], implementation=implementation)
    expected = drawn(hidden, weight, uniforms, temperature, implementation="reference")
    assert expected.tokens[3] == 7
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-6)


def test_the_kernels_have_no_races():
    """Two tiles of rows, and a vocabulary that neither tiles nor parts divide."""
    arguments = arrays(130, 300, 40)
    layout = parts.Layout(
        softcap=5.0,
        tiles=(128, 128),
        interpret=pltpu.InterpretParams(detect_races=True),
    )
    draw = functools.partial(parts.draw, passes=pallas_tpu, layout=layout)
    found = jax.jit(draw)(*arguments)
    hidden, weight, uniforms, temperature = arguments
    p = distribution(hidden, weight, temperature, softcap=5.0)
    check(found, uniforms, temperature, p)


def test_only_small_logits_are_in_memory(monkeypatch):
    monkeypatch.undo()

    def temporary_bytes(implementation, rows):
        run = functools.partial(next_token, implementation=implementation)
        compiled = jax.jit(run).lower(*arrays(rows, 40_000, 4)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * 40_000
    assert temporary_bytes("reference", 64) >= 64 * logits
    assert temporary_bytes("auto", 64) < 64 * logits / 2
    assert temporary_bytes("auto", 32) == temporary_bytes("reference", 32)


def test_a_kernel_that_does_not_run_here_is_refused():
    with pytest.raises(ValueError, match="next_token: pallas_tpu runs on tpu"):
        drawn(*arrays(1, 3, 2), implementation="pallas_tpu", interpret=False)
