"""Experts' own matrices, adapted and quantised: by hand, on meshes, in trees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.models import MixtureOfExperts, ModelConfig, forward, param_specs
from jaxrl_post.models.adapters.lora import (
    Adapted,
    LoRAConfig,
    LoRAParams,
    adapted,
    adapter_specs,
    initialize_adapter,
    merged,
)
from jaxrl_post.models.adapters.quantized import NF4, EightBit, quantize
from jaxrl_post.models.experts import mixture
from jaxrl_post.models.matrix import grouped, is_matrix, matrices, part_axes
from jaxrl_post.models.spec import is_spec
from jaxrl_post.sharding import (
    DEFAULT_RULES,
    create_mesh,
    named_shardings,
    per_device_bytes,
)
from tests import tiny

EXPERTS = MixtureOfExperts(8, 2, 12, shared_size=16, biases=True)
CONFIG = ModelConfig(
    "qwen3_moe", 40, 32, 16, 1, num_heads=4, num_kv_heads=4, experts=EXPERTS
)
OWN = ("expert_gate", "expert_up", "expert_down")
LORA = LoRAConfig(rank=3, alpha=6.0, targets=OWN)
BLOCK = 16
each_kind = pytest.mark.parametrize("kind", ["int8", "nf4"])
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def random_adapter(config=CONFIG, lora=LORA, seed=1):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda spec: jnp.asarray(0.2 * rng.normal(size=spec.shape), jnp.float32),
        adapter_specs(config, lora),
        is_leaf=is_spec,
    )


def plain(tree):
    """Every Matrix as one array."""
    one = lambda leaf: leaf.dense(leaf.dtype) if is_matrix(leaf) else leaf  # noqa: E731
    return jax.tree.map(one, tree, is_leaf=is_matrix)


# Products.


def test_groups_of_rows_by_hand():
    """Two rows of the first expert, none of the second, one of the third."""
    x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weight = jnp.array([[[1.0], [10.0]], [[7.0], [7.0]], [[2.0], [0.5]]])
    sizes = jnp.array([2, 0, 1], jnp.int32)
    np.testing.assert_array_equal(grouped(x, weight, sizes), [[21.0], [43.0], [13.0]])
    # Each with a change of its own: 2 A B is 2, 0 and -4 for the first input.
    down = jnp.array([[[1.0], [0.0]], [[1.0], [0.0]], [[-1.0], [0.0]]])
    up = jnp.array([[[1.0]], [[0.0]], [[2.0]]])
    matrix = Adapted(weight, down, up, None, scale=2.0)
    assert (matrix.shape, matrix.ndim) == ((3, 2, 1), 3)
    np.testing.assert_array_equal(grouped(x, matrix, sizes), [[23.0], [49.0], [-7.0]])
    np.testing.assert_array_equal(
        matrix.dense(jnp.float32), [[[3.0], [10.0]], [[7.0], [7.0]], [[-2.0], [0.5]]]
    )


def test_codes_of_experts_by_hand():
    """EightBit has a scale for every output of every expert; NF4's blocks lie along the
    hidden dim, which is the second of gate and up and the last of down."""
    params = tiny.params(CONFIG)
    gate = np.zeros((8, 32, 12), np.float32)
    gate[0, 1, 0], gate[7, 31, 2], gate[7, 0, 2] = 2.54, -1.27, 0.5
    experts = params.layers[0].experts.replace(gate=jnp.asarray(gate))
    layer = params.layers[0].replace(experts=experts)
    params = params.replace(layers=(layer,))
    found = quantize(params, "int8").layers[0].experts
    assert isinstance(found.gate, EightBit)
    assert found.gate.scales.shape == (8, 1, 12)
    assert found.down.scales.shape == (8, 1, 32)
    np.testing.assert_allclose(found.gate.scales[0, 0, 0], 0.02, rtol=1e-6)
    np.testing.assert_allclose(found.gate.scales[7, 0, 2], 0.01, rtol=1e-6)
    assert found.gate.codes[7, 0, 2] == 50
    found = quantize(params, "nf4", block=BLOCK).layers[0].experts
    assert isinstance(found.gate, NF4)
    assert (found.gate.dim, found.up.dim, found.down.dim) == (1, 1, 2)
    assert found.gate.scales.shape == (8, 2, 12)
    assert found.down.scales.shape == (8, 12, 2)
    # 31 is in the second block, 0 in the first.
    scales = found.gate.scales.astype(jnp.float32)
    np.testing.assert_allclose(scales[7, :, 2], [0.5, 1.27], rtol=2**-8)
    assert found.router is params.layers[0].experts.router
    assert found.gate_bias is params.layers[0].experts.gate_bias


@each_kind
@pytest.mark.parametrize("dtype", [tiny.F32, tiny.BF16])
def test_quantised_experts_equal_their_dense_arrays_bit_for_bit(kind, dtype):
    codes = quantize(tiny.params(CONFIG, dtype=dtype), kind, block=BLOCK)
    x = jax.random.normal(jax.random.key(1), (37, 32)).astype(dtype)
    run = jax.jit(functools.partial(mixture, CONFIG, EXPERTS, rules=DEFAULT_RULES))
    found, _ = run(codes.layers[0].experts, x)
    dense = jax.tree.map(
        lambda leaf: leaf.dense(dtype) if is_matrix(leaf) and leaf.ndim == 3 else leaf,
        codes.layers[0].experts,
        is_leaf=is_matrix,
    )
    expected, _ = run(dense, x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)


@each_kind
def test_the_backward_pass_keeps_no_dense_experts(kind):
    weight = quantize(tiny.params(CONFIG), kind, block=BLOCK).layers[0].experts.gate
    x = jax.random.normal(jax.random.key(2), (9, 32))
    sizes = jnp.array([2, 0, 1, 0, 3, 0, 0, 3], jnp.int32)
    product, pull = jax.vjp(lambda x: grouped(x, weight, sizes), x)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))
    assert kept < 2 * weight.codes.size + 4 * weight.scales.size + 4 * x.size
    assert kept < 4 * 8 * 32 * 12
    dense = np.repeat(weight.dense(jnp.float32), sizes, axis=0)
    np.testing.assert_allclose(product, np.einsum("ri,rio->ro", x, dense), **CLOSE)
    [back] = pull(jnp.ones((9, 12)))
    np.testing.assert_allclose(back, dense.sum(axis=2), **CLOSE)


def test_axes_of_parts():
    """Shapes of the whole, except ranks and axes of one element."""
    codes = quantize(tiny.params(CONFIG), "int8")
    policy = adapted(codes, random_adapter(), CONFIG, LORA)
    axes = part_axes(policy.layers[0].experts.down, ("experts", "expert_ffn", None))
    assert axes.base.codes == ("experts", "expert_ffn", None)
    assert axes.base.scales == ("experts", None, None)
    assert axes.down == ("experts", "expert_ffn", None)
    assert axes.up == ("experts", None, None)
    # A matrix without experts whose product sums over two dims, with DoRA.
    matrix = Adapted(*map(jnp.zeros, ((8, 4, 16), (8, 4, 3), (3, 16), (16,))), 1.0)
    axes = part_axes(matrix, ("heads", "head_dim", "embed"))
    assert axes.base == ("heads", "head_dim", "embed")
    assert axes.down == ("heads", "head_dim", None)
    assert axes.up == (None, "embed")
    assert axes.magnitude == ("embed",)


# Trees.


def test_specs_and_beginning():
    """Variance 1 / (3 inputs of one expert); B is zero; by default there is none."""
    assert not set(OWN).intersection(LoRAConfig().targets)
    specs = adapter_specs(CONFIG, LORA)
    assert list(specs) == [
        f"layers.0.experts.{name}" for name in ("gate", "up", "down")
    ]
    gate, down = specs["layers.0.experts.gate"], specs["layers.0.experts.down"]
    assert (gate.down.shape, gate.up.shape) == ((8, 32, 3), (8, 3, 12))
    assert gate.down.axes == ("experts", "expert_embed", "rank")
    assert gate.up.axes == ("experts", "rank", "expert_ffn")
    assert (down.down.shape, down.up.shape) == ((8, 12, 3), (8, 3, 32))
    assert down.down.scale == pytest.approx((3 * 12) ** -0.5)
    params = tiny.params(CONFIG)
    adapter = initialize_adapter(jax.random.key(0), params, CONFIG, LORA)
    variance = float(jnp.var(adapter["layers.0.experts.gate"].down))
    assert abs(variance * 3 * 32 - 1) < 0.15
    assert not adapter["layers.0.experts.gate"].up.any()
    policy = adapted(params, adapter, CONFIG, LORA)
    assert policy.layers[0].experts.gate.base is params.layers[0].experts.gate
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    run = jax.jit(forward, static_argnames="config")
    np.testing.assert_array_equal(
        run(policy, CONFIG, tokens), run(params, CONFIG, tokens)
    )


@each_kind
def test_merged_experts_are_the_explicit_sums_where_the_base_lies(kind):
    mesh = create_mesh("fsdp2,ep2,tp2")
    base = quantize(tiny.params(CONFIG, mesh=mesh), kind, block=BLOCK)
    adapter = random_adapter()
    whole = merged(base, adapter, CONFIG, LORA)
    for path, own in adapter.items():
        weight = matrices(base)[path].dense(jnp.float32)
        expected = weight + 2.0 * np.einsum("eir,ero->eio", own.down, own.up)
        np.testing.assert_allclose(
            matrices(whole)[path], expected, rtol=1e-5, atol=1e-6
        )
    assert not any(map(is_matrix, jax.tree.leaves(whole, is_leaf=is_matrix)))


def test_four_bits_are_what_a_device_holds():
    """4.25 bits an element with blocks of 64, on the devices that have the experts."""
    experts = dataclasses.replace(EXPERTS, expert_size=64)
    config = dataclasses.replace(CONFIG, hidden_size=128, experts=experts)
    mesh = create_mesh("fsdp2,ep2,tp2")
    params = tiny.params(config, dtype=tiny.BF16, mesh=mesh)
    own = quantize(params).layers[0].experts
    wanted = named_shardings(param_specs(config), mesh).layers[0].experts
    for name in ("gate", "up", "down"):
        found = getattr(own, name)
        assert found.codes.sharding == getattr(wanted, name)
        assert per_device_bytes(found) * 8 == 4.25 * 8 * 128 * 64 / 8
    assert own.gate.scales.sharding.spec == P("ep", "fsdp", "tp")


# Meshes.


@functools.cache
def on_one_device(kind):
    """(params, output, gradient of the adapter)."""
    params = tiny.params(CONFIG)
    if kind is not None:
        params = quantize(params, kind, block=BLOCK)
    return params, *mixed(params, random_adapter(), tokens_of())


def tokens_of():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(32, 32)), jnp.float32)


@jax.jit
def mixed(params, adapter, x):
    def loss(adapter):
        own = adapted(params, adapter, CONFIG, LORA).layers[0].experts
        out, _ = mixture(CONFIG, EXPERTS, own, x, DEFAULT_RULES)
        return jnp.square(out).mean(), out

    gradient, out = jax.grad(loss, has_aux=True)(adapter)
    return out, gradient


@pytest.mark.meshes
@pytest.mark.parametrize("kind", [None, "nf4"], ids=["arrays", "nf4"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ep8", marks=pytest.mark.all),
        "fsdp2,ep2,tp2",
        pytest.param("tp4,dp2", marks=pytest.mark.all),
    ],
)
def test_a_mesh_changes_nothing(name, kind):
    _, expected, expected_gradient = on_one_device(kind)
    assert all(
        float(jnp.abs(g).max()) > 1e-3 for g in jax.tree.leaves(expected_gradient)
    )
    mesh = create_mesh(name)
    sharded = tiny.params(CONFIG, mesh=mesh)
    if kind is not None:
        sharded = quantize(sharded, kind, block=BLOCK)
    adapter = jax.device_put(
        random_adapter(), named_shardings(adapter_specs(CONFIG, LORA), mesh)
    )
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P(("dp", "fsdp", "ep")))
        found, gradient = mixed(sharded, adapter, jax.device_put(tokens_of(), rows))
    np.testing.assert_allclose(found, expected, **CLOSE)
    for path, own in expected_gradient.items():
        for part in ("down", "up"):
            ours, theirs = getattr(gradient[path], part), getattr(own, part)
            np.testing.assert_allclose(ours, theirs, **CLOSE, err_msg=f"{path}.{part}")


def test_gradient_equals_that_of_the_explicit_sum():
    """Gradients of the adapter over the quantised base, and over its dense arrays."""
    base, _, found = on_one_device("nf4")
    x = tokens_of()

    @jax.jit
    def by_hand(adapter):
        def loss(adapter):
            def summed(name):
                own = adapter[f"layers.0.experts.{name}"]
                weight = plain(getattr(base.layers[0].experts, name))
                return weight + 2.0 * jnp.einsum("eir,ero->eio", own.down, own.up)

            own = base.layers[0].experts.replace(
                **{name: summed(name) for name in ("gate", "up", "down")}
            )
            out, _ = mixture(CONFIG, EXPERTS, own, x, DEFAULT_RULES)
            return jnp.square(out).mean()

        return jax.grad(loss)(adapter)

    expected = by_hand(random_adapter())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), found, expected
    )


# Errors.


def test_dora():
    message = (
        "lora: dora must be off where experts' own matrices are adapted, as in PEFT; "
        "got the targets expert_up"
    )
    with pytest.raises(ValueError, match=message):
        LoRAConfig(targets=("query", "expert_up"), dora=True)


def test_targets_without_experts():
    dense = dataclasses.replace(CONFIG, experts=None)
    with pytest.raises(
        ValueError, match="no layer of this qwen3_moe has a matrix expe"
    ):
        adapter_specs(dense, LORA)


def test_blocks_that_do_not_divide_the_hidden_dim():
    """Eight experts of width 16 would do, but not a part of the hidden dim."""
    wide = dataclasses.replace(EXPERTS, expert_size=64, shared_size=0)
    config = dataclasses.replace(CONFIG, hidden_size=24, head_dim=64, experts=wide)
    message = (
        "the hidden one of experts' own; got 64, and layers.0.experts.gate has shape "
        r"\(8, 24, 64\)"
    )
    with pytest.raises(ValueError, match=message):
        quantize(tiny.params(config))


def test_an_adapter_of_another_rank():
    adapter = random_adapter(lora=dataclasses.replace(LORA, rank=2))
    with pytest.raises(ValueError, match=r"experts\.\w+\.down must have shape \(8, "):
        adapted(tiny.params(CONFIG), adapter, CONFIG, LORA)


def test_an_adapter_over_an_adapter():
    """Both changes, over codes."""
    base = quantize(tiny.params(CONFIG), "int8")
    first, second = random_adapter(seed=2), random_adapter(seed=3)
    both = adapted(adapted(base, first, CONFIG, LORA), second, CONFIG, LORA)
    gate = both.layers[0].experts.gate
    path = "layers.0.experts.gate"
    expected = base.layers[0].experts.gate.dense(jnp.float32) + 2.0 * sum(
        np.einsum("eir,ero->eio", own[path].down, own[path].up)
        for own in (first, second)
    )
    np.testing.assert_allclose(gate.dense(jnp.float32), expected, **CLOSE)
    assert isinstance(first[path], LoRAParams)
