"""Products in float8: the numbers of the definition, forward and backward."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_post.models import forward, param_specs
from jaxrl_post.models.adapters import lora
from jaxrl_post.models.adapters.eight_bits import to_codes
from jaxrl_post.models.adapters.float8 import PRODUCT, Float8, in_float8
from jaxrl_post.models.adapters.quantized import EightBit, quantize
from jaxrl_post.models.config import MixtureOfExperts
from jaxrl_post.models.layer_spec import LayerSpec
from jaxrl_post.models.matrix import grouped, matrices, multiply
from jaxrl_post.models.stack import Execution
from jaxrl_post.sharding import create_mesh, named_shardings
from tests import tiny
from tests.models import test_recurrent

LARGEST = {"float8": 448.0, "float8_e5m2": 57344.0}
DTYPES = {"float8": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def coded(values, kind, over):
    """Codes and scales as the definition makes them, in float64."""
    wide = np.asarray(values, np.float64)
    highest = np.abs(wide).max(axis=over, keepdims=True)
    highest[highest == 0] = 1
    scales = 2.0 ** np.ceil(np.log2(highest / LARGEST[kind]))
    codes = (wide / scales).astype(np.float32).astype(DTYPES[kind])
    assert np.isfinite(codes.astype(np.float32)).all()
    return codes.astype(np.float64), scales


def rounded(values, kind, over):
    codes, scales = coded(values, kind, over)
    return codes * scales


def drawn(*shape, seed=0, dtype=jnp.float32):
    """Numbers whose rows and columns have sizes of their own."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape)
    for dim, size in enumerate(shape):
        sizes = 10.0 ** rng.uniform(-2, 2, size)
        values = values * sizes.reshape(
            [-1 if d == dim else 1 for d in range(len(shape))]
        )
    return jnp.asarray(values, dtype)


def assert_near(found, expected, dtype):
    """Equal up to the order of float32 sums, and one rounding to `dtype`."""
    bound = {jnp.float32: 1e-5, jnp.bfloat16: 2**-8}[dtype]
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    found = np.asarray(found, np.float64)
    near = np.abs(found - expected) <= bound * np.abs(expected) + 1e-5 * largest
    assert near.all()


@pytest.mark.parametrize("kind", ["float8", "float8_e5m2"])
def test_codes_are_ml_dtypes_own(kind):
    values = drawn(32, 48)
    for over in ((0,), (1,), (0, 1)):
        codes, scales = to_codes(values, kind, over)
        assert codes.dtype == DTYPES[kind]
        found = np.asarray(codes, np.float64) * np.asarray(scales, np.float64)
        np.testing.assert_array_equal(found, rounded(values, kind, over))


def test_zeros_and_numbers_too_small_to_divide_stay_finite():
    for size in (0.0, 1e-45, 1e-39, 3e38):
        codes, scales = to_codes(jnp.full((2, 4), size), "float8", (1,))
        assert np.isfinite(np.asarray(codes, np.float32)).all()
        assert np.isfinite(scales).all()
        found = np.asarray(codes, np.float64) * np.asarray(scales, np.float64)
        np.testing.assert_allclose(found, size, rtol=2**-4, atol=2**-126)


def test_infinity_is_not_hidden():
    values = jnp.array([[1.0, jnp.inf]])
    assert not np.isfinite(multiply(values, Float8(jnp.ones((2, 2))))).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_and_its_gradients_are_the_definition(dtype):
    x, weight = drawn(24, 16, dtype=dtype), drawn(16, 20, seed=1, dtype=dtype)
    change = drawn(24, 20, seed=2, dtype=dtype)
    y, pull = jax.vjp(lambda x, w: multiply(x, Float8(w)), x, weight)
    to_x, to_weight = pull(change)
    assert (y.dtype, to_x.dtype, to_weight.dtype) == (dtype, dtype, dtype)
    inputs, input_scales = coded(x, "float8", 1)
    codes, scales = coded(weight, "float8", 0)
    assert_near(y, (inputs * input_scales) @ (codes * scales), dtype)
    wide = np.asarray(change, np.float64)
    expected = rounded(wide * scales, "float8_e5m2", 1) @ codes.T
    assert_near(to_x, expected, dtype)
    expected = inputs.T @ rounded(wide * input_scales, "float8_e5m2", 0)
    assert_near(to_weight, expected, dtype)


def test_rounding_is_as_large_as_the_formats_say():
    rng = np.random.default_rng(0)
    shapes = ((64, 48), (48, 32), (64, 32))
    x, weight, change = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    y, pull = jax.vjp(lambda x, w: multiply(x, Float8(w)), x, weight)
    own, wide = jax.vjp(multiply, x, weight)
    # Uniform in half a step: e4m3 0.026 of a value, e5m2 0.053, and so both together.
    for found, exact, size in zip(
        (y, *pull(change)), (own, *wide(change)), (0.037, 0.059, 0.059), strict=True
    ):
        apart = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert 0.75 * size < apart < 1.1 * size


def test_dims_that_are_merged_share_scales():
    x, weight = drawn(6, 8), drawn(2, 4, 3, 5, seed=1)
    found = multiply(x, Float8(weight), inputs=2)
    expected = multiply(x, Float8(weight.reshape(8, 15)))
    np.testing.assert_array_equal(found, expected)


def test_products_of_experts_are_those_of_each_group():
    sizes, count = np.array([5, 0, 9, 4]), 18
    x, weight = drawn(24, 16), drawn(4, 16, 20, seed=1)
    change = drawn(24, 20, seed=2).at[count:].set(0)
    # Rows after the last group may hold anything.
    x = x.at[count:].set(jnp.nan)
    known = jnp.arange(24)[:, None] < count

    def run(x, weight):
        return jnp.where(known, grouped(x, Float8(weight), jnp.asarray(sizes)), 0)

    y, pull = jax.vjp(run, x, weight)
    to_x, to_weight = pull(change)
    inputs, input_scales = coded(x[:count], "float8", 1)
    wide = np.asarray(change[:count], np.float64)
    # All groups share the scales of dW.
    changes = rounded(wide * input_scales, "float8_e5m2", 0)
    for group, end in enumerate(np.cumsum(sizes)):
        rows = slice(end - sizes[group], end)
        codes, scales = coded(weight[group], "float8", 0)
        expected = (inputs * input_scales)[rows] @ (codes * scales)
        assert_near(y[rows], expected, jnp.float32)
        expected = rounded(wide[rows] * scales, "float8_e5m2", 1) @ codes.T
        assert_near(to_x[rows], expected, jnp.float32)
        expected = inputs[rows].T @ changes[rows]
        scale = np.abs(inputs.T) @ np.abs(changes)
        assert (np.abs(to_weight[group] - expected) <= 1e-5 * scale).all()
    np.testing.assert_array_equal(to_x[count:], 0)


def test_a_sampler_that_rounds_inputs_has_the_trainers_codes_and_products():
    params = tiny.params(seed=3)
    sampler = quantize(params, "float8", rounds_inputs=True)
    for name, matrix in matrices(in_float8(params)).items():
        codes = matrices(sampler)[name]
        assert isinstance(codes, EightBit)
        inputs = codes.scales.shape.count(1)
        shape = matrix.shape[:inputs]
        x = drawn(8, int(np.prod(shape)), seed=4)
        np.testing.assert_array_equal(
            multiply(x, codes, inputs), multiply(x, matrix, inputs), err_msg=name
        )
    ids = jnp.arange(12)[None] % 40
    np.testing.assert_allclose(
        forward(sampler, tiny.CONFIG, ids),
        forward(in_float8(params), tiny.CONFIG, ids),
        rtol=1e-5,
        atol=1e-5,
    )


SPARSE = dataclasses.replace(
    tiny.CONFIG,
    experts=MixtureOfExperts(4, 2, 16, shared_size=8),
    layers=(LayerSpec(), LayerSpec(mlp="experts")),
)
FAMILIES = {"dense": tiny.CONFIG, "experts": SPARSE, **test_recurrent.CONFIGS}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_of_every_kind_of_layer_and_nothing_else(name):
    params = in_float8(tiny.params(FAMILIES[name]))
    inside = set(matrices(params))
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda leaf: isinstance(leaf, Float8)
    )
    for path, leaf in leaves:
        place = jax.tree_util.keystr(path, simple=True, separator=".")
        assert isinstance(leaf, Float8) == (place in inside), place
        if any(word in place for word in ("embed", "router", "norm", "head")):
            assert not isinstance(leaf, Float8), place
    config, ids = FAMILIES[name], jnp.arange(12)[None] % 40
    near = np.asarray(forward(params, config, ids))
    own = np.asarray(forward(tiny.params(config), config, ids))
    assert 1e-3 < np.linalg.norm(near - own) / np.linalg.norm(own) < 0.5


def test_of_an_adapted_matrix_the_base_is_rounded():
    config = lora.LoRAConfig(rank=2, alpha=2.0)
    params = tiny.params()
    adapter = lora.initialize_adapter(jax.random.key(0), params, tiny.CONFIG, config)
    adapter = jax.tree.map(lambda a: a + 0.1, adapter)
    whole = lora.adapted(params, adapter, tiny.CONFIG, config)
    matrix = in_float8(whole).layers[0].mlp.up
    assert isinstance(matrix, lora.Adapted)
    assert isinstance(matrix.base, Float8)
    x = drawn(8, matrix.shape[0])
    low = (x @ matrix.down) @ matrix.up * matrix.scale
    expected = multiply(x, Float8(params.layers[0].mlp.up)) + low
    np.testing.assert_allclose(multiply(x, matrix), expected, rtol=1e-5, atol=1e-4)


def assert_close(found, expected):
    """Equal, but for values that other sums move over a border between two codes."""
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)


def loss(params, config, ids, execution):
    hidden = forward(in_float8(params), config, ids, execution=execution)
    return (hidden.astype(jnp.float32) ** 2).mean()


def test_rematerialisation_changes_nothing_and_keeps_narrow_products(capsys):
    config = dataclasses.replace(tiny.CONFIG, num_layers=3)
    params, ids = tiny.params(config), jnp.arange(12)[None] % 40
    grads = [
        jax.jit(jax.grad(loss), static_argnums=(1, 3))(
            params, config, ids, Execution(remat, scan)
        )
        for remat, scan in (("none", False), ("dots", False), ("full", True))
    ]
    for other in grads[1:]:
        assert_close(other, grads[0])
    params = tiny.params(config, dtype=jnp.bfloat16)
    jax.ad_checkpoint.print_saved_residuals(
        lambda params: loss(params, config, ids, Execution("dots")), params
    )
    kept = capsys.readouterr().out.splitlines()
    # Seven matrices in each of two layers that are not the last.
    kept = [line for line in kept if PRODUCT in line]
    assert len(kept) >= 14
    assert all(line.startswith("bf16") for line in kept)


@pytest.mark.meshes
@pytest.mark.parametrize("mesh", ["dp2,fsdp2,tp2", "pp2,fsdp2,ep2"])
def test_meshes_agree(mesh):
    config = dataclasses.replace(
        SPARSE, num_layers=2, layers=(LayerSpec(mlp="experts"),) * 2
    )
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 40, (8, 12)), jnp.int32)
    found = []
    for spec, count in (("dp1", 1), (mesh, 8)):
        grid = create_mesh(spec, jax.devices()[:count])
        with jax.set_mesh(grid):
            own = tiny.params(config, seed=5)
            params = jax.device_put(own, named_shardings(param_specs(config), grid))
            grad = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 3))
            value, grads = grad(params, config, ids, Execution())
            found.append((float(value), jax.tree.map(np.asarray, grads)))
    (one, first), (other, second) = found
    np.testing.assert_allclose(other, one, rtol=1e-3)
    assert_close(second, first)
