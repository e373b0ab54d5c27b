"""Quantised bases: codes by hand, the errors they may make, adapters over them."""

import dataclasses
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.models import (
    KVCache,
    LatentAttention,
    ModelConfig,
    forward,
    param_specs,
)
from jaxrl_post.models.adapters.lora import (
    LoRAConfig,
    adapted,
    initialize_adapter,
    merged,
)
from jaxrl_post.models.adapters.quantized import NF4, NF4_VALUES, EightBit, quantize
from jaxrl_post.models.matrix import is_matrix, matrices, multiply
from jaxrl_post.sharding import create_mesh, named_shardings, per_device_bytes
from tests import tiny

CONFIG = ModelConfig("llama", 40, 64, 128, 1, num_heads=4, num_kv_heads=2)
LATENT = ModelConfig(
    "deepseek_v3", 40, 64, 128, 1, num_heads=4, num_kv_heads=4,
    latent=LatentAttention(kv_rank=64, nope_dim=12, rope_dim=4, value_dim=16),
)  # fmt: skip
each_kind = pytest.mark.parametrize("kind", ["int8", "nf4"])

run = jax.jit(forward, static_argnames=("config", "execution"))


def params_of(config=CONFIG, dtype=jnp.float32, mesh=None):
    """Weights of a fifth of tiny's deviation, for wider layers."""
    params = tiny.params(config, dtype=jnp.dtype(dtype), mesh=mesh)
    return jax.tree.map(lambda leaf: 0.2 * leaf if leaf.ndim > 1 else leaf, params)


def tokens(*shape):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, 40, shape), jnp.int32)


def one_matrix(values, kind, **options):
    """A model's gate matrix, quantised."""
    values = jnp.asarray(values)
    config = ModelConfig("llama", 8, values.shape[0], values.shape[1], 1, 1, 1)
    params = params_of(config, values.dtype)
    mlp = params.layers[0].mlp.replace(gate=values)
    layer = params.layers[0].replace(mlp=mlp)
    whole = quantize(params.replace(layers=(layer,)), kind, **options)
    return whole.layers[0].mlp.gate


# Codes.


def test_int8_by_hand():
    """Each output has a scale of its own; a half is rounded to even."""
    weight = np.array([[1.27, -2.0, 0.0], [-0.5, 0.1, 0.0]] * 2, np.float32)
    gate = one_matrix(weight, "int8")
    assert isinstance(gate, EightBit)
    np.testing.assert_array_equal(gate.codes, [[127, -127, 0], [-50, 6, 0]] * 2)
    np.testing.assert_allclose(gate.scales, [[0.01, 2 / 127, 1 / 127]], rtol=1e-6)
    dense = [[1.27, -2.0, 0.0], [-0.5, 12 / 127, 0.0]] * 2
    np.testing.assert_allclose(gate.dense(jnp.float32), dense, rtol=1e-6)


def test_nf4_by_hand():
    """Blocks of four along the longest dim; the nearest of sixteen values; packing."""
    column = [2.0, -2.0, 0.5, 0.0, 0.0, 0.25, -0.25, 0.1]
    gate = one_matrix(np.array([column, [0.0] * 8], np.float32).T, "nf4", block=4)
    assert isinstance(gate, NF4)
    assert (gate.shape, gate.ndim, gate.dim, gate.dtype) == ((8, 2), 2, 0, np.float32)
    # Over the largest: 1, -1, 0.25, 0; and 0, 1, -1, 0.4.
    codes = [15, 0, 10, 7, 7, 15, 0, 12]
    packed = [
        low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)
    ]
    np.testing.assert_array_equal(gate.codes[:, 0], packed)
    np.testing.assert_array_equal(gate.codes[:, 1], [0x77] * 4)
    np.testing.assert_array_equal(gate.scales.astype(jnp.float32)[:, 0], [2.0, 0.25])
    largest = np.repeat([2.0, 0.25], 4)
    dense = gate.dense(jnp.float32)
    np.testing.assert_allclose(dense[:, 0], NF4_VALUES[codes] * largest, rtol=1e-7)
    np.testing.assert_array_equal(dense[:, 1], 0)


def test_nf4_values_are_quantiles_of_the_normal_distribution():
    """QLoRA's construction: eight steps up and seven down from one end's quantile."""
    end = 0.9677083
    quantile = statistics.NormalDist().inv_cdf
    up = [quantile(p) for p in np.linspace(end, 0.5, 9)[:-1]]
    down = [-quantile(p) for p in np.linspace(end, 0.5, 8)[:-1]]
    expected = np.sort([*down, 0.0, *up])
    np.testing.assert_allclose(NF4_VALUES, expected / expected.max(), atol=1e-6)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.5 / 127), ("nf4", 0.16)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_errors_are_within_half_a_step(kind, bound, dtype):
    """Error relative to the output's or block's largest, plus rounding to bfloat16."""
    weight = jax.random.normal(jax.random.key(1), (128, 6)).astype(dtype)
    wide = np.asarray(weight, np.float32)
    dense = np.asarray(one_matrix(weight, kind).dense(jnp.float32))
    blocks = 1 if kind == "int8" else 2
    largest = np.abs(wide).reshape(blocks, -1, 6).max(axis=1).repeat(128 // blocks, 0)
    relative = np.abs(dense - wide) / largest
    assert bound / 2 < relative.max() < bound
    again = one_matrix(dense, kind).dense(jnp.float32)
    np.testing.assert_allclose(again, dense, rtol=1e-6)


# Trees.


@each_kind
def test_memory(kind):
    """Bytes of what was quantised; all else is as it was."""
    params = params_of(dtype=jnp.bfloat16)
    codes = quantize(params, kind)
    for path, leaf in matrices(codes).items():
        base = matrices(params)[path]
        outputs = base.size // 64 if "output" not in path and "down" not in path else 64
        expected = base.size + 4 * outputs
        if kind == "nf4":
            expected = base.size // 2 + 2 * (base.size // 64)
        assert sum(part.nbytes for part in jax.tree.leaves(leaf)) == expected
        assert (leaf.shape, leaf.dtype) == (base.shape, base.dtype)
    bits = (
        8
        * per_device_bytes(matrices(codes))
        / sum(leaf.size for leaf in matrices(params).values())
    )
    assert bits == 4.25 if kind == "nf4" else 8 < bits < 8.5
    assert codes.embedding is params.embedding
    plain = lambda tree: [  # noqa: E731
        leaf for leaf in jax.tree.leaves(tree, is_leaf=is_matrix) if not is_matrix(leaf)
    ]
    kept = {id(leaf) for leaf in jax.tree.leaves(params)}
    assert {id(leaf) for leaf in plain(codes)} < kept


@each_kind
@pytest.mark.parametrize("config", [CONFIG, LATENT], ids=["grouped", "latent"])
def test_forward_equals_that_of_the_dense_tree(config, kind):
    codes = quantize(params_of(config), kind)
    dense = jax.tree.map(
        lambda leaf: leaf.dense(jnp.float32) if is_matrix(leaf) else leaf,
        codes,
        is_leaf=is_matrix,
    )
    row = tokens(2, 6)
    expected = run(dense, config, row)
    np.testing.assert_allclose(run(codes, config, row), expected, rtol=1e-5, atol=1e-5)
    off = float(jnp.abs(run(params_of(config), config, row) - expected).max())
    assert 1e-3 < off < (0.1 if kind == "int8" else 2.0)
    cache = KVCache.zeros(config, 2, 8, jnp.dtype("float32"))
    parts = []
    for start, stop in [(0, 5), (5, 6)]:
        steps = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        part, cache = run(
            codes, config, row[:, start:stop], positions=steps, kv_view=cache
        )
        parts.append(part)
    np.testing.assert_allclose(
        jnp.concatenate(parts, axis=1), expected, rtol=1e-5, atol=1e-5
    )


@each_kind
def test_the_backward_pass_keeps_no_dense_matrix(kind):
    weight = matrices(quantize(params_of(), kind))["layers.0.mlp.gate"]
    x = jax.random.normal(jax.random.key(2), (3, 64))
    product, pull = jax.vjp(lambda x: multiply(x, weight), x)
    np.testing.assert_allclose(product, x @ weight.dense(jnp.float32), rtol=1e-5,
                               atol=1e-5)  # fmt: skip
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull)]
    assert sum(sizes) < 2 * 64 * 128
    [back] = pull(jnp.ones((3, 128)))
    expected = jnp.ones((3, 128)) @ weight.dense(jnp.float32).T
    np.testing.assert_allclose(back, expected, rtol=1e-5, atol=1e-5)


@each_kind
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_base_of_adapters(kind, dora):
    """QLoRA: nothing changes at first, gradients reach A, B and m, it merges."""
    codes = quantize(params_of(), kind)
    lora = LoRAConfig(rank=2, alpha=4.0, dora=dora)
    adapter = initialize_adapter(jax.random.key(3), codes, CONFIG, lora)
    row = tokens(2, 6)
    policy = adapted(codes, adapter, CONFIG, lora)
    base = run(codes, CONFIG, row)
    np.testing.assert_allclose(run(policy, CONFIG, row), base, rtol=1e-5, atol=1e-5)

    @jax.jit
    def gradient(adapter, codes):
        def loss(adapter):
            hidden = forward(adapted(codes, adapter, CONFIG, lora), CONFIG, row)
            return jnp.square(hidden[..., :8]).mean()

        return jax.grad(loss)(adapter)

    found = gradient(adapter, codes)
    for own in found.values():
        assert not own.down.any()  # B is zero.
        assert float(jnp.abs(own.up).max()) > 1e-6
        assert not dora or float(jnp.abs(own.magnitude).max()) > 1e-7
    moved = jax.tree.map(lambda value, slope: value - 0.5 * slope, adapter, found)
    policy = run(adapted(codes, moved, CONFIG, lora), CONFIG, row)
    plain = merged(codes, moved, CONFIG, lora)
    assert not any(map(is_matrix, jax.tree.leaves(plain, is_leaf=is_matrix)))
    np.testing.assert_allclose(run(plain, CONFIG, row), policy, rtol=1e-4, atol=1e-5)
    assert float(jnp.abs(policy - base).max()) > 1e-3


@pytest.mark.meshes
@each_kind
def test_a_mesh_changes_nothing(kind):
    mesh = create_mesh("dp2,fsdp2,tp2")
    sharded = params_of(mesh=mesh)
    codes, whole = quantize(sharded, kind), quantize(params_of(), kind)
    jax.tree.map(np.testing.assert_array_equal, codes, whole)
    wanted = matrices(named_shardings(param_specs(CONFIG), mesh))
    for path, leaf in matrices(codes).items():
        assert leaf.codes.sharding == wanted[path], path
    row = tokens(4, 6)
    with jax.set_mesh(mesh):
        found = run(codes, CONFIG, row)
    np.testing.assert_allclose(found, run(whole, CONFIG, row), rtol=1e-5, atol=1e-5)


def test_scales_too_few_to_split_are_whole():
    """The 64 rows of `gate` make one block, which two devices cannot share."""
    config = dataclasses.replace(CONFIG, intermediate_size=48)
    codes = quantize(params_of(config, mesh=create_mesh("fsdp2,tp4")))
    gate = codes.layers[0].mlp.gate
    assert gate.codes.sharding.spec == P("fsdp", "tp")
    assert gate.scales.sharding.spec == P(None, "tp")
    assert gate.scales.shape == (1, 48)


# Errors.


def test_codes_that_a_mesh_cannot_split_as_the_matrix():
    """A byte holds two of the 64 outputs; 64 devices would share 32 bytes."""
    matrix = jax.ShapeDtypeStruct(
        (32, 64), np.float32,
        sharding=NamedSharding(AbstractMesh((64,), ("fsdp",)), P(None, "fsdp")),
    )  # fmt: skip
    params = jax.tree.map(lambda leaf: leaf, params_of())
    layer = params.layers[0].replace(mlp=params.layers[0].mlp.replace(gate=matrix))
    with pytest.raises(ValueError, match=r"mlp\.gate \(32, 64\) is split as .*int8"):
        quantize(params.replace(layers=(layer,)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 3}, "block: must be even and at least 2; got 3"),
        ({"block": 48}, r"got 48, and layers\.0\.attention\.query has shape \(64, 4"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        quantize(params_of(), **options)


def test_what_is_quantised_or_adapted_already():
    codes = quantize(params_of(), "int8")
    with pytest.raises(ValueError, match=r"\.0\.attention\.query is EightBit already"):
        quantize(codes)
    lora = LoRAConfig(rank=2, targets=("down",))
    adapter = initialize_adapter(jax.random.key(0), params_of(), CONFIG, lora)
    policy = adapted(params_of(), adapter, CONFIG, lora)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down is Adapted already"):
        quantize(policy)
