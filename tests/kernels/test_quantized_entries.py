"""Keys and values as codes, and attention over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels.decode_attention import (
    CODE_DTYPES,
    QuantizedEntries,
    SharedKeys,
    quantize_entries,
)
from jaxrl_post.sharding import create_mesh
from tests.kernels.test_decode_attention import (
    CLOSE,
    assert_close,
    attend,
    case,
    every_implementation,
    oracle,
    run,
)
from tests.tiers import daily

every_dtype = pytest.mark.parametrize("dtype", CODE_DTYPES)


def quantized(arrays, dtype):
    """A case with codes, and the same case with what the codes stand for."""

    def codes(array):
        return quantize_entries(jnp.asarray(array), dtype)

    shared = arrays["shared"]
    made = {name: codes(arrays[name]) for name in ("key", "value")}
    common = shared._replace(key=codes(shared.key), value=codes(shared.value))
    meant = {name: np.asarray(made[name].dequantize()) for name in made}
    whole = shared._replace(
        key=np.asarray(common.key.dequantize()),
        value=np.asarray(common.value.dequantize()),
    )
    return (
        {**arrays, **made, "shared": common},
        {**arrays, **meant, "shared": whole},
    )


@every_dtype
@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16])
def test_entries_are_near_to_their_codes(dtype, given):
    """Half a step of 1/127 of the largest; three bits of mantissa, or a subnormal."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-30, 30, (2, 3, 50, 1))
    entries = jnp.asarray(rng.normal(size=(2, 3, 50, 16)) * sizes, given)
    made = quantize_entries(entries, dtype)
    assert made.codes.dtype == jnp.dtype(dtype)
    assert made.codes.shape == made.shape == entries.shape
    assert made.scales.shape == (2, 3, 50, 1)
    exact = np.asarray(entries, np.float64)
    error = np.abs(np.asarray(made.dequantize(), np.float64) - exact)
    top = np.abs(exact).max(axis=-1, keepdims=True)
    if dtype == "int8":
        bound = np.broadcast_to(top / 254, exact.shape)
    else:
        bound = np.maximum(np.abs(exact) / 16, top / 448 / 2**10)
    assert (error <= bound * (1 + 1e-4)).all()
    # The bound is no looser than it has to be.
    assert (error > bound / 2).any()
    largest = np.abs(np.asarray(made.codes, np.float32)).max(axis=-1)
    assert (largest == {"int8": 127, "float8_e4m3fn": 448}[dtype]).all()


@every_dtype
def test_zeros_stay_zeros_and_what_is_not_finite_is_not_lost(dtype):
    entries = np.zeros((1, 4, 2, 3), np.float32)
    entries[0, 1, 0, 2], entries[0, 2, 1, 0] = np.nan, -np.inf
    entries[0, 3] = 1e-45
    found = np.asarray(quantize_entries(jnp.asarray(entries), dtype).dequantize())
    finite = np.isfinite(entries).all(axis=-1)
    assert (np.isfinite(found).all(axis=-1) == finite).all()
    assert (found[finite] == 0).all()


@every_dtype
@every_implementation
# One query is a case of several.
@pytest.mark.parametrize("queries", daily([1, 3], [3]))
def test_attention_over_codes_is_that_over_what_they_mean(
    dtype, implementation, queries
):
    codes, meant = quantized(case(queries=queries), dtype)
    found = run(codes, window=6, implementation=implementation)
    assert_close(found, oracle(meant, window=6), implementation)
    # The entries themselves are others.
    others = oracle(case(queries=queries), window=6)
    assert np.abs(np.asarray(found, np.float32) - others).max() > 1e-3


@pytest.mark.meshes
@pytest.mark.parametrize(("spec", "kv_heads"), [("dp2,tp4", 4), ("dp2,tp4", 2)])
def test_on_a_mesh(spec, kv_heads):
    """Heads that tp divides, and heads that are whole on every device."""
    mesh = create_mesh(spec)
    both = [
        quantized(case(seed, batch=4, kv_heads=kv_heads), "int8") for seed in range(2)
    ]

    def joined(*leaves):
        return jnp.concatenate(leaves)

    arrays = [{**codes, "shared": tuple(codes["shared"][:4])} for codes, _ in both]
    together = jax.tree.map(joined, *arrays)

    def run_all(arrays):
        shared = SharedKeys(*arrays["shared"], 2)
        return attend(**{**arrays, "shared": shared})

    with jax.set_mesh(mesh):
        found = jax.jit(run_all)(together)
    expected = np.concatenate([oracle(meant) for _, meant in both])
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_codes_are_a_pytree_of_two_arrays():
    made = quantize_entries(jnp.ones((1, 1, 2, 4)), "int8")
    assert isinstance(made, QuantizedEntries)
    assert [leaf.dtype.name for leaf in jax.tree.leaves(made)] == ["int8", "float32"]
