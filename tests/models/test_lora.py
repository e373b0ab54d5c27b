"""Adapters: nothing at first, the explicit sum later, gradients of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import (
    KVCache,
    LatentAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelConfig,
    forward,
    logits,
)
from jaxrl_post.models.adapters.dora import column_norms
from jaxrl_post.models.adapters.lora import (
    Adapted,
    LoRAConfig,
    LoRAParams,
    adaptable,
    adapted,
    adapter_specs,
    initialize_adapter,
    merged,
)
from jaxrl_post.models.decoder import Execution
from jaxrl_post.models.matrix import matrices
from jaxrl_post.sharding import create_mesh, named_shardings
from tests import tiny

CLOSE = {"rtol": 1e-5, "atol": 1e-5}

# One layer each: a window, sinks, biases, norms of queries and keys;
GROUPED = dataclasses.replace(
    tiny.CONFIG, num_layers=1, qkv_bias=True, output_bias=True, mlp_bias=True,
    qk_norm="head", layers=(LayerSpec(window=3),), sinks=True,
)  # fmt: skip
# latent queries, experts and an MLP that they share;
LATENT = ModelConfig(
    "deepseek_v3", 40, 16, 24, 1, num_heads=4, num_kv_heads=4,
    latent=LatentAttention(
        kv_rank=8, nope_dim=6, rope_dim=4, value_dim=10, query_rank=12
    ),
    experts=MixtureOfExperts(4, 2, 12, shared_size=20),
)  # fmt: skip
# queries without a latent, a dense MLP.
PLAIN_QUERIES = dataclasses.replace(
    LATENT, latent=dataclasses.replace(LATENT.latent, query_rank=None), experts=None
)
CONFIGS = {"grouped": GROUPED, "latent": LATENT, "plain_queries": PLAIN_QUERIES}
each_attention = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
each_kind = pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])

run = jax.jit(forward, static_argnames=("config", "execution"))


def lora_of(config, **changes):
    """Everything that can be adapted is; the scale is 6 / 3."""
    targets = adaptable(config, dora=changes.get("dora", False))
    lora = LoRAConfig(rank=3, alpha=6.0, targets=targets)
    return dataclasses.replace(lora, **changes)


def made(config, *, seed=1, **changes):
    """(params, lora, adapter), every number random, as after some training.

    Drawn with NumPy: nothing is compiled.
    """
    params, lora = tiny.params(config), lora_of(config, **changes)
    rng, bases = np.random.default_rng(seed), matrices(params)

    def one(path, specs):
        def draw(spec):
            return jnp.asarray(0.3 * rng.standard_normal(spec.shape), jnp.float32)

        own = LoRAParams(draw(specs.down), draw(specs.up))
        if specs.magnitude is None:
            return own
        flat = np.asarray(bases[path]).reshape(-1, own.up[0].size)
        norms = np.linalg.norm(flat, axis=0)
        norms = jnp.asarray(norms.reshape(own.up.shape[1:]))
        return own.replace(magnitude=norms * (1 + draw(specs.magnitude)))

    specs = adapter_specs(config, lora)
    return params, lora, {path: one(path, own) for path, own in specs.items()}


def tokens(*shape):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, 40, shape), jnp.int32)


def assert_close(actual, expected, **tolerance):
    check = lambda a, b: np.testing.assert_allclose(  # noqa: E731
        a, b, **(tolerance or CLOSE)
    )
    jax.tree.map(check, actual, expected)


# Structure of an adapter.


def test_scale():
    assert LoRAConfig(rank=4, alpha=6.0).scale == 1.5
    assert LoRAConfig(rank=4, alpha=6.0, rank_stabilized=True).scale == 3.0


def test_specs_of_every_matrix_of_a_layer():
    """Shapes and axes of the base's, split between inputs and outputs."""
    layers = LayerSpec(), LayerSpec(mlp="experts")
    config = dataclasses.replace(LATENT, num_layers=2, layers=layers)
    specs = adapter_specs(config, lora_of(config, dora=True))
    assert sorted(path for path in specs if path.startswith("layers.1.")) == [
        f"layers.1.{name}"
        for name in (
            "attention.kv_down", "attention.kv_up", "attention.output",
            "attention.query_down", "attention.query_up",
            "experts.shared.down", "experts.shared.gate", "experts.shared.up",
        )
    ]  # fmt: skip
    assert "layers.0.mlp.down" in specs
    output = specs["layers.1.attention.output"]
    assert output.down.shape == (4, 10, 3)
    assert output.down.axes == ("heads", "head_dim", "rank")
    assert (output.up.shape, output.up.axes) == ((3, 16), ("rank", "embed"))
    assert output.magnitude.shape == (16,)
    kv_up = specs["layers.0.attention.kv_up"]
    assert kv_up.down.shape == (8, 3)
    assert kv_up.up.shape == (3, 4, 16)
    assert kv_up.magnitude.axes == ("heads", "head_dim")


def test_initial_values_have_the_variance_of_pefts():
    """Uniform within 1 / sqrt(inputs) there, so 1 / (3 inputs); B is zero."""
    config = ModelConfig("llama", 8, 256, 64, 1, num_heads=4, num_kv_heads=4)
    lora = LoRAConfig(rank=32, targets=("query", "output"))
    params = tiny.params(config)
    adapter = initialize_adapter(jax.random.key(0), params, config, lora)
    assert adapter_specs(config, lora).keys() == adapter.keys()
    for own in adapter.values():
        variance = float(jnp.var(own.down))
        assert abs(variance * 3 * 256 - 1) < 0.05
        assert not own.up.any()
        assert own.magnitude is None


def test_magnitudes_begin_as_the_norms_of_the_outputs():
    params, lora = tiny.params(LATENT), lora_of(LATENT, dora=True)
    adapter = initialize_adapter(
        jax.random.key(0), params, LATENT, lora, dtype=jnp.bfloat16
    )
    assert len(adapter) == 8
    for path, own in adapter.items():
        inputs = (0, 1) if path.endswith("output") else (0,)
        base = np.asarray(matrices(params)[path])
        expected = np.sqrt((base**2).sum(axis=inputs))
        assert own.magnitude.dtype == np.float32
        assert own.down.dtype == own.up.dtype == jnp.bfloat16
        np.testing.assert_allclose(own.magnitude, expected, rtol=1e-6)


@each_attention
def test_a_new_adapter_changes_nothing(config):
    params = tiny.params(config)
    base = run(params, config, tokens(2, 7))
    for dora in (False, True):
        lora = lora_of(config, dora=dora)
        adapter = initialize_adapter(jax.random.key(0), params, config, lora)
        policy = run(adapted(params, adapter, config, lora), config, tokens(2, 7))
        if dora:
            np.testing.assert_allclose(policy, base, **CLOSE)
        else:
            np.testing.assert_array_equal(policy, base)


@each_kind
def test_in_bfloat16_too(dora):
    params, lora = tiny.params(GROUPED, dtype=tiny.BF16), lora_of(GROUPED, dora=dora)
    adapter = initialize_adapter(jax.random.key(0), params, GROUPED, lora)
    policy = run(adapted(params, adapter, GROUPED, lora), GROUPED, tokens(2, 7))
    base = run(params, GROUPED, tokens(2, 7))
    assert policy.dtype == tiny.BF16
    np.testing.assert_array_equal(policy, base)


def test_the_base_is_not_copied():
    """The reference policy is the base itself: the very arrays, one set of buffers."""
    params, lora, adapter = made(GROUPED)
    policy = adapted(params, adapter, GROUPED, lora)
    for path, leaf in matrices(policy).items():
        assert isinstance(leaf, Adapted)
        assert leaf.base is matrices(params)[path]
        assert (leaf.shape, leaf.ndim) == (leaf.base.shape, leaf.base.ndim)
    assert policy.embedding is params.embedding
    buffers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(policy)}
    own = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(adapter)}
    base = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    assert buffers == own | base


# Results.


def explicit(base, own, scale):
    """W + s A B in float64, and with DoRA m (W + s A B) / ||W + s A B||."""
    if own.down.ndim + own.up.ndim - 2 > base.ndim:  # Experts' own.
        each = zip(base, own.down, own.up, strict=True)
        return np.stack([explicit(w, LoRAParams(a, b), scale) for w, a, b in each])
    inputs = own.down.ndim - 1
    rank, out = own.up.shape[0], own.up.shape[1:]
    low = np.asarray(own.down, np.float64).reshape(-1, rank)
    change = low @ np.asarray(own.up, np.float64).reshape(rank, -1)
    whole = np.asarray(base, np.float64).reshape(change.shape) + scale * change
    if own.magnitude is not None:
        size = np.linalg.norm(whole, axis=0)
        whole = np.asarray(own.magnitude, np.float64).reshape(-1) * whole / size
    return whole.reshape(*base.shape[:inputs], *out)


@each_kind
@each_attention
def test_logits_equal_those_of_the_explicit_sum(config, dora):
    params, lora, adapter = made(config, dora=dora)
    policy = adapted(params, adapter, config, lora)
    bases = matrices(params)
    sums = {path: explicit(bases[path], own, 2.0) for path, own in adapter.items()}
    plain = merged(params, adapter, config, lora)
    assert jax.tree.structure(plain) == jax.tree.structure(params)
    for path, matrix in matrices(plain).items():
        np.testing.assert_allclose(matrix, sums.get(path, bases[path]), **CLOSE)
    found = run(policy, config, tokens(2, 7))
    np.testing.assert_allclose(found, run(plain, config, tokens(2, 7)), **CLOSE)
    base = run(params, config, tokens(2, 7))
    assert float(jnp.abs(found - base).max()) > 0.1


def test_merged_parameters_have_the_dtype_and_layout_of_the_base():
    _, lora, adapter = made(GROUPED)
    mesh = create_mesh("dp2,fsdp2,tp2")
    sharded = tiny.params(GROUPED, dtype=tiny.BF16, mesh=mesh)
    plain = merged(sharded, adapter, GROUPED, lora)
    for path, matrix in matrices(plain).items():
        base = matrices(sharded)[path]
        assert matrix.dtype == tiny.BF16
        assert matrix.sharding.is_equivalent_to(base.sharding, base.ndim)
        wide = explicit(base.astype(jnp.float32), adapter[path], 2.0)
        np.testing.assert_allclose(matrix, wide, rtol=2**-8, atol=1e-6)
    assert plain.embedding is sharded.embedding


def test_norms_of_the_sum_without_the_sum():
    rng = np.random.default_rng(3)
    base, down, up = (rng.normal(size=s) for s in ((4, 5, 6), (4, 5, 2), (2, 6)))
    expected = np.sqrt(((base + 1.7 * down @ up) ** 2).sum(axis=(0, 1)))
    arrays = [jnp.asarray(a, jnp.float32) for a in (base, down, up)]
    found = column_norms(*arrays, 1.7, jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # A change that takes a column away leaves no NaN behind.
    gone = column_norms(*(jnp.ones((2, 1)), jnp.ones((2, 1)), -jnp.ones((1, 1))), 1.0,
                        jnp.float32)  # fmt: skip
    assert 0 < float(gone[0]) < 1e-6


def test_adapters_add_up():
    """An adapter over an adapter: the sum of both changes."""
    params, lora, first = made(tiny.CONFIG)
    _, _, second = made(tiny.CONFIG, seed=5)
    policy = adapted(params, first, tiny.CONFIG, lora)
    policy = adapted(policy, second, tiny.CONFIG, lora)
    plain = merged(params, first, tiny.CONFIG, lora)
    plain = merged(plain, second, tiny.CONFIG, lora)
    found = run(policy, tiny.CONFIG, tokens(2, 5))
    np.testing.assert_allclose(found, run(plain, tiny.CONFIG, tokens(2, 5)), **CLOSE)


@each_kind
@each_attention
def test_prefill_and_decode_equal_training(config, dora):
    params, lora, adapter = made(config, dora=dora)
    policy = adapted(params, adapter, config, lora)
    row = tokens(2, 6)
    expected = run(policy, config, row)
    cache = KVCache.zeros(config, 2, 8, jnp.dtype("float32"))
    parts = []
    for start, stop in [(0, 4), (4, 5), (5, 6)]:
        steps = jnp.broadcast_to(jnp.arange(start, stop), (2, stop - start))
        part, cache = run(
            policy, config, row[:, start:stop], positions=steps, kv_view=cache
        )
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, **CLOSE)


# Gradients.


def loss(adapter, params, config, lora, remat="none"):
    policy = adapted(params, adapter, config, lora)
    hidden = forward(policy, config, tokens(4, 6), execution=Execution(remat))
    return jnp.square(logits(policy, config, hidden)).mean()


gradient = jax.jit(jax.value_and_grad(loss), static_argnums=(2, 3, 4))


@each_attention
def test_gradient_equals_that_of_the_explicit_sum(config):
    params, lora, adapter = made(config)

    def by_hand(adapter):
        def one(path, base):
            own = adapter[path]
            if ".experts.shared" not in path and ".experts." in path:
                return base + 2.0 * jnp.einsum("eir,ero->eio", own.down, own.up)
            return base + 2.0 * jnp.tensordot(own.down, own.up, axes=1)

        sums = {path: one(path, base) for path, base in matrices(params).items()}
        whole = jax.tree_util.tree_map_with_path(
            lambda path, leaf: sums.get(
                jax.tree_util.keystr(path, simple=True, separator="."), leaf
            ),
            params,
        )
        hidden = forward(whole, config, tokens(4, 6))
        return jnp.square(logits(whole, config, hidden)).mean()

    _, found = gradient(adapter, params, config, lora, "none")
    expected = jax.jit(jax.grad(by_hand))(adapter)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for path, own in found.items():
        assert float(jnp.abs(own.down).max()) > 1e-5, path
        assert float(jnp.abs(own.up).max()) > 1e-5, path


@each_kind
def test_remat_changes_no_gradient(dora):
    params, lora, adapter = made(GROUPED, dora=dora)
    value, expected = gradient(adapter, params, GROUPED, lora, "none")
    for remat in ("dots", "full"):
        again, found = gradient(adapter, params, GROUPED, lora, remat)
        np.testing.assert_allclose(again, value, rtol=1e-6)
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_dora_has_no_gradient_through_the_norm():
    """Formulas and gradients by hand, in float64."""
    rng = np.random.default_rng(0)
    x, w, a, b, m = (rng.normal(size=s) for s in ((5, 4), (4, 3), (4, 2), (2, 3), (3,)))
    weights = rng.normal(size=(5, 3))
    size = np.linalg.norm(w + 1.5 * a @ b, axis=0)
    product = x @ w + 1.5 * (x @ a) @ b
    outer = weights * m / size  # with size a constant
    expected = {
        "down": 1.5 * x.T @ (outer @ b.T),
        "up": 1.5 * (x @ a).T @ outer,
        "magnitude": (weights * product / size).sum(axis=0),
    }

    def weighted(own):
        matrix = Adapted(wide[1], own.down, own.up, own.magnitude, scale=1.5)
        product = matrix.multiply(wide[0], 1)
        return jnp.sum(product * jnp.asarray(weights, jnp.float32)), product

    wide = [jnp.asarray(array, jnp.float32) for array in (x, w)]
    own = LoRAParams(*(jnp.asarray(array, jnp.float32) for array in (a, b, m)))
    found, product_found = jax.grad(weighted, has_aux=True)(own)
    np.testing.assert_allclose(product_found, m * product / size, rtol=1e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-4, err_msg=name)


@pytest.mark.meshes
@each_kind
@pytest.mark.parametrize("config", [GROUPED, LATENT], ids=["grouped", "latent"])
def test_a_mesh_changes_nothing(config, dora):
    params, lora, adapter = made(config, dora=dora)
    value, expected = gradient(adapter, params, config, lora, "none")
    mesh = create_mesh("dp2,fsdp2,tp2")
    split = named_shardings(adapter_specs(config, lora), mesh)
    spread = jax.device_put(adapter, split)
    with jax.set_mesh(mesh):
        base = tiny.params(config, mesh=mesh)
        again, found = gradient(spread, base, config, lora, "none")
    np.testing.assert_allclose(again, value, rtol=1e-5)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    output = spread["layers.0.attention.output"]
    heads = config.num_heads
    assert output.down.addressable_shards[0].data.shape[0] == heads // 2
    assert output.up.addressable_shards[0].data.shape == (3, config.hidden_size // 2)


@pytest.mark.meshes
def test_initialisation_does_not_depend_on_the_mesh():
    lora = lora_of(GROUPED, dora=True)
    key, mesh = jax.random.key(4), create_mesh("fsdp4,tp2")
    one = initialize_adapter(key, tiny.params(GROUPED), GROUPED, lora)
    base = tiny.params(GROUPED, mesh=mesh)
    many = initialize_adapter(key, base, GROUPED, lora, mesh=mesh)
    assert_close(many, one, rtol=1e-6, atol=0)
    wanted = named_shardings(adapter_specs(GROUPED, lora), mesh)
    found = jax.tree.map(lambda leaf: leaf.sharding, many)
    assert jax.tree.leaves(found) == jax.tree.leaves(wanted)


# Errors.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "lora: rank must be at least 1; got 0"),
        ({"alpha": 0.0}, "lora: alpha must be positive; got 0.0"),
        ({"alpha": float("inf")}, "lora: alpha must be positive; got inf"),
        ({"targets": ()}, "lora: targets must be some of query, .*; got none"),
        ({"targets": ("query", "q_proj")}, "some of query, key, .*; got q_proj"),
        ({"targets": ("up", "up")}, r"differ from one another; got \('up', 'up'\)"),
    ],
)
def test_bad_options(changes, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**changes)


def test_targets_that_no_layer_has():
    message = (
        "no layer of this deepseek_v3 has a matrix key, value; targets may be kv_down, "
        "kv_up, output, query_down, query_up, expert_gate, expert_up, expert_down, "
        "gate, up, down"
    )
    with pytest.raises(ValueError, match=message):
        adapter_specs(LATENT, LoRAConfig(targets=("output", "key", "value")))
    alone = dataclasses.replace(tiny.CONFIG, experts=MixtureOfExperts(4, 2, 12))
    attention = ("query", "key", "value", "output")
    assert adaptable(alone, dora=True) == attention
    assert adaptable(alone) == (*attention, "expert_gate", "expert_up", "expert_down")
    with pytest.raises(ValueError, match=r"no layer of this llama has a matrix gate; "):
        adapter_specs(alone, LoRAConfig(targets=("gate",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"targets": ("query",)},
            r"has, but lora does not target, layers\.0\.attention\.key",
        ),
        (
            {"rank": 4},
            r"layers\.0\.\S+\.down must have shape \(.*4\) with rank 4 and "
            r"dora=False; got \(.*3\)",
        ),
        ({"dora": True}, r"\.magnitude must have shape .* dora=True; got None"),
    ],
)
def test_an_adapter_of_other_options(changes, message):
    params, lora, adapter = made(tiny.CONFIG)
    with pytest.raises(ValueError, match=message):
        adapted(params, adapter, tiny.CONFIG, dataclasses.replace(lora, **changes))


def test_an_adapter_of_fewer_layers():
    params, lora, adapter = made(tiny.CONFIG)
    fewer = {p: own for p, own in adapter.items() if not p.endswith("1.mlp.up")}
    with pytest.raises(ValueError, match=r"adapter: lacks layers\.1\.mlp\.up; it was"):
        merged(params, fewer, tiny.CONFIG, lora)
