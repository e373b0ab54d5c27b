"""The next token on Hopper GPUs, interpreted: the definition in float64, NaN, races.

That the kernel compiles for a Hopper GPU is shown in test_compiled_for_gpu.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.stats import chisquare

from jaxrl_post.kernels.next_token import next_token, pallas_gpu, parts, xla
from jaxrl_post.sharding import create_mesh
from tests.kernels.test_next_token import arrays, check, distribution


def inputs(rows, vocab, width=64, seed=0):
    hidden, *rest = arrays(rows, vocab, width, dtype=jnp.bfloat16, seed=seed)
    return hidden / 4, *rest


@functools.partial(jax.jit, static_argnames=("divisor", "softcap"))
def drawn(hidden, weight, uniforms, temperature, **options):
    return next_token(
        hidden, weight, uniforms, temperature,
        implementation="pallas_gpu", interpret=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "vocab", "width", "options"),
    [
        # One tile; columns behind the last whole one, with parts that are not whole.
        (1, 256, 64, {}),
        (33, 520, 128, {"divisor": 0.5, "softcap": 4.0}),
        # Two tiles of rows, the last one in part.
        (150, 1024, 64, {"softcap": 2.0}),
        (64, 2000, 64, {"divisor": 3.0}),
    ],
)
def test_tokens_follow_the_definition(rows, vocab, width, options):
    given = inputs(rows, vocab, width)
    hidden, weight, uniforms, temperature = given
    p = distribution(hidden, weight, temperature, **options)
    check(drawn(*given, **options), uniforms, temperature, p)


def test_a_range_of_several_tiles(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "BLOCKS", 2)
    assert pallas_gpu.ranges_of(20, 1288) == (3, 2)
    given = inputs(20, 1288)
    hidden, weight, uniforms, temperature = given
    p = distribution(hidden, weight, temperature)
    check(drawn(*given), uniforms, temperature, p)


def test_frequencies_are_those_of_the_distribution():
    rows, vocab = 6000, 264
    _, weight, uniforms, _ = inputs(rows, vocab)
    hidden = jnp.tile(inputs(1, vocab)[0], (rows, 1))
    temperature = jnp.full(rows, 0.8)
    p = distribution(hidden[:1], weight, temperature[:1])[0]
    counts = np.bincount(drawn(hidden, weight, uniforms, temperature).tokens, None, 264)
    # Rare tokens are counted together.
    common = rows * p > 5
    counts = [*counts[common], counts[~common].sum()]
    assert chisquare(counts, rows * np.array([*p[common], p[~common].sum()])).pvalue > (
        0.01
    )


def test_the_likeliest_is_the_first_of_equals():
    """In the tiles, behind them, and in both."""
    hidden = jnp.ones((3, 64), jnp.bfloat16).at[1:, 32:].set(0).at[2, :32].set(0)
    hidden = hidden.at[2, 32:].set(1)
    weight = jnp.zeros((520, 64), jnp.bfloat16)
    weight = weight.at[jnp.array([300, 515]), :32].set(1)
    weight = weight.at[jnp.array([514, 516]), 32:].set(1)
    found = drawn(hidden, weight, jnp.full(3, 0.9), jnp.zeros(3))
    assert found.tokens.tolist() == [300, 300, 514]


def test_a_row_with_nan_has_no_logprob_and_the_others_have():
    given = inputs(9, 520)
    hidden, weight, uniforms, temperature = given
    expected = drawn(*given)
    broken = hidden.at[jnp.array([2, 3])].set(jnp.nan)  # row 3 is greedy
    found = drawn(broken, weight, uniforms, temperature)
    good = np.setdiff1d(np.arange(9), [2, 3])
    assert np.isnan(found.logprobs[2:4]).all()
    assert ((found.tokens >= 0) & (found.tokens < 520)).all()
    np.testing.assert_array_equal(found.tokens[good], expected.tokens[good])
    np.testing.assert_array_equal(found.logprobs[good], expected.logprobs[good])
    # One token's NaN is in every row's sum, in the tiles and behind them.
    for token in (290, 516):
        found = drawn(hidden, weight.at[token].set(jnp.nan), uniforms, temperature)
        assert np.isnan(found.logprobs).all()


@pytest.mark.meshes
def test_a_mesh_changes_nothing(monkeypatch):
    """The interpreter knows one device, so that here tiles are an ordinary program."""

    def plain(hidden, weight, inverse, layout):
        whole = weight.shape[0] // pallas_gpu.COLUMNS * pallas_gpu.COLUMNS
        return xla.statistics(hidden, weight[:whole], inverse, layout)

    monkeypatch.setattr(pallas_gpu, "_of_tiles", plain)
    hidden, weight, uniforms, temperature = inputs(8, 2 * 264)
    # A tie of the likeliest of greedy rows, on both devices.
    weight = weight.at[jnp.array([7, 527])].set(16 * hidden[3])
    mesh = create_mesh("dp4,tp2")
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("dp"))
        given = jax.device_put((hidden, uniforms, temperature), rows)
        table = jax.device_put(weight, NamedSharding(mesh, P("tp")))
        found = drawn(given[0], table, *given[1:])
    expected = next_token(
        hidden, weight, uniforms, temperature, implementation="reference"
    )
    assert expected.tokens[3] == 7
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-6)


def test_no_access_races_with_another():
    given = inputs(70, 776)
    hidden, weight, uniforms, temperature = given
    layout = parts.Layout(
        softcap=5.0, interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    draw = functools.partial(parts.draw, passes=pallas_gpu, layout=layout)
    found = jax.jit(draw)(*given)
    p = distribution(hidden, weight, temperature, softcap=5.0)
    check(found, uniforms, temperature, p)


def test_what_it_cannot_compute_is_refused():
    for vocab, width, message in (
        (512, 96, "a width that is a multiple of 64 is needed; got 96"),
        (248, 64, "at least 256 vocabulary entries a device, .* are needed; got 248"),
        (516, 64, "a multiple of 8, are needed; got 516"),
    ):
        with pytest.raises(ValueError, match=message):
            drawn(*inputs(2, vocab, width))
    hidden, *rest = inputs(2, 512)
    with pytest.raises(ValueError, match="pallas_gpu computes with bfloat16; got floa"):
        drawn(hidden.astype(jnp.float32), *rest)
