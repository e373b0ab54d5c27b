"""Mixtures of experts: the router worked by hand, dense loops, meshes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import (
    KVCache,
    LayerSpec,
    MixtureOfExperts,
    ModelConfig,
    RouterInputs,
    forward,
    forward_with_experts,
    forward_with_routing,
    initialize,
    param_specs,
)
from jaxrl_post.models.decoder import Execution
from jaxrl_post.models.experts import mixture, route
from jaxrl_post.models.params import ExpertsParams
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh, named_shardings

EXPERTS = MixtureOfExperts(num_experts=8, experts_per_token=2, expert_size=12)
SHARED = dataclasses.replace(
    EXPERTS,
    scoring="sigmoid",
    normalize_epsilon=1e-20,
    scale=2.5,
    num_groups=4,
    groups_per_token=2,
    group_score="top2",
    correction_bias=True,
    shared_size=20,
)
BIASED = dataclasses.replace(EXPERTS, router_bias=True, biases=True)
GATED = dataclasses.replace(
    EXPERTS, normalize=False, shared_size=20, shared_gate=True
)  # fmt: skip


def config_of(experts, **changes):
    base = ModelConfig(
        "qwen3_moe", 40, 16, 24, 2, num_heads=4, num_kv_heads=2, experts=experts
    )
    if experts is SHARED:
        layers = LayerSpec(), LayerSpec(mlp="experts")
        base = dataclasses.replace(base, layers=layers)
    return dataclasses.replace(base, **changes)


def params_of(config, seed=0):
    """Every value random, and large enough that routers decide."""
    specs = param_specs(config)
    flat = jax.tree.map(
        lambda spec: dataclasses.replace(spec, init="normal", scale=0.5),
        specs,
        is_leaf=lambda leaf: hasattr(leaf, "axes"),
    )
    return initialize(jax.random.key(seed), flat)


def router_of(logits):
    """A router whose logits are the tokens themselves."""
    empty = jnp.zeros((1,))
    return ExpertsParams(jnp.eye(logits.shape[1]), empty, empty, empty)


def test_softmax_scores_worked_by_hand():
    logits = jnp.log(jnp.array([[1.0, 2.0, 4.0, 3.0]]))
    plain = dataclasses.replace(EXPERTS, num_experts=4, normalize=False, scale=10.0)
    chosen = route(plain, router_of(logits), logits)
    np.testing.assert_array_equal(chosen.experts, [[2, 3]])
    np.testing.assert_allclose(chosen.weights, [[4.0, 3.0]], rtol=1e-6)
    summed = dataclasses.replace(plain, normalize=True, scale=1.0)
    chosen = route(summed, router_of(logits), logits)
    np.testing.assert_allclose(chosen.weights, [[4 / 7, 3 / 7]], rtol=1e-6)


def test_sigmoid_scores_groups_and_a_bias_that_selects_worked_by_hand():
    """Groups {0, 1}, {2, 3}, {4, 5}: the second is best by the sum of its two."""
    scores = np.array([[0.9, 0.1, 0.6, 0.5, 0.3, 0.4]])
    logits = jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)
    experts = MixtureOfExperts(
        6, 2, 4, scoring="sigmoid", num_groups=3, groups_per_token=1, group_score="top2"
    )
    params = router_of(logits)
    chosen = route(experts, params, logits)
    np.testing.assert_array_equal(chosen.experts, [[2, 3]])
    np.testing.assert_allclose(chosen.weights, [[6 / 11, 5 / 11]], rtol=1e-6)
    largest = dataclasses.replace(experts, group_score="max")
    np.testing.assert_array_equal(
        route(largest, params, logits).experts, [[0, 1]]
    )  # fmt: skip
    # The bias brings the third group before the others; weights do not know of it.
    bias = jnp.array([0.0, 0.0, 0.0, 0.0, 2.0, 2.0])
    biased = params.replace(correction_bias=bias)
    chosen = route(experts, biased, logits)
    np.testing.assert_array_equal(chosen.experts, [[5, 4]])
    np.testing.assert_allclose(chosen.weights, [[4 / 7, 3 / 7]], rtol=1e-6)


def test_the_router_is_float32_in_a_bfloat16_model():
    x = jax.random.normal(jax.random.key(0), (64, 16)).astype(jnp.bfloat16)
    params = params_of(config_of(EXPERTS)).layers[0].experts
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    chosen, exact = route(EXPERTS, narrow, x), route(EXPERTS, wide, x)
    assert chosen.weights.dtype == chosen.logits.dtype == jnp.float32
    np.testing.assert_array_equal(chosen.logits, exact.logits)


def dense_loop(config, experts, params, x):
    """Every token through each of its experts, one at a time, in float64."""
    chosen = route(experts, params, x)
    as_64 = lambda leaf: np.asarray(leaf, np.float64)  # noqa: E731
    out = np.zeros(x.shape)
    for token, (numbers, weights) in enumerate(
        zip(np.asarray(chosen.experts), as_64(chosen.weights), strict=True)
    ):
        for number, weight in zip(numbers, weights, strict=True):
            row = as_64(x)[token]
            gate, up = (row @ as_64(w)[number] for w in (params.gate, params.up))
            if params.gate_bias is not None:
                gate = gate + as_64(params.gate_bias)[number]
                up = up + as_64(params.up_bias)[number]
            if config.activation == "gpt_oss":
                gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
                inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            else:
                inner = gate / (1 + np.exp(-gate)) * up
            result = inner @ as_64(params.down)[number]
            if params.down_bias is not None:
                result = result + as_64(params.down_bias)[number]
            out[token] += weight * result
    return out


@pytest.mark.parametrize("experts", [EXPERTS, BIASED], ids=["plain", "biased"])
@pytest.mark.parametrize("activation", ["silu", "gpt_oss"])
def test_grouped_products_equal_a_loop_over_tokens(experts, activation):
    config = config_of(experts, activation=activation)
    params = params_of(config).layers[0].experts
    x = jax.random.normal(jax.random.key(1), (37, 16))
    found, _ = mixture(config, experts, params, x, DEFAULT_RULES)
    np.testing.assert_allclose(
        found, dense_loop(config, experts, params, x), rtol=1e-4, atol=1e-4
    )


def test_no_token_is_dropped_when_all_go_to_one_expert():
    experts = dataclasses.replace(EXPERTS, experts_per_token=1)
    config = config_of(experts)
    params = params_of(config).layers[0].experts
    params = params.replace(router=jnp.zeros((8, 16)).at[3, 0].set(100.0))
    x = jax.random.uniform(jax.random.key(1), (50, 16), minval=0.5)
    found, chosen = mixture(config, experts, params, x, DEFAULT_RULES)
    assert set(np.asarray(chosen.experts).ravel()) == {3}
    gate, up, down = params.gate[3], params.up[3], params.down[3]
    expected = (jax.nn.silu(x @ gate) * (x @ up)) @ down
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_token_does_not_depend_on_its_batch():
    config = config_of(EXPERTS)
    params = params_of(config).layers[0].experts
    x = jax.random.normal(jax.random.key(1), (16, 16))
    whole, _ = mixture(config, EXPERTS, params, x, DEFAULT_RULES)
    alone, _ = mixture(config, EXPERTS, params, x[5:6], DEFAULT_RULES)
    np.testing.assert_allclose(whole[5:6], alone, rtol=1e-5, atol=1e-6)


TOKENS = np.random.default_rng(0).integers(0, 40, (8, 6), dtype=np.int32)
WEIGHTS = np.random.default_rng(1).normal(size=(8, 6, 16)).astype(np.float32)


def outputs_and_gradients(config, params):
    def loss(params):
        hidden = forward(params, config, jnp.asarray(TOKENS))
        return (hidden * WEIGHTS).sum(), hidden

    (_, hidden), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return hidden, grads


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("mesh", "experts"),
    [
        pytest.param("ep8", SHARED, id="ep, shared"),
        pytest.param("fsdp2,ep2,tp2", BIASED, id="all, biased"),
        pytest.param("tp4,dp2", GATED, id="tp, gated"),
        pytest.param("fsdp2,ep2,cp2", EXPERTS, id="fsdp, ep, cp, plain"),
    ],
)
def test_a_mesh_changes_nothing(mesh, experts):
    config = config_of(experts, num_heads=4, num_kv_heads=4)
    params = params_of(config)
    expected, expected_grads = outputs_and_gradients(config, params)
    grid = create_mesh(mesh)
    shardings = named_shardings(param_specs(config), grid)
    sharded = jax.device_put(params, shardings)
    with jax.set_mesh(grid):
        found, grads = outputs_and_gradients(config, sharded)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(grads),
        jax.tree.leaves(expected_grads),
        strict=True,
    )
    for (path, ours), theirs in pairs:
        scale = max(1.0, float(jnp.abs(theirs).max()))
        np.testing.assert_allclose(
            ours, theirs, atol=1e-4 * scale, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.meshes
def test_experts_lie_on_their_own_devices():
    config = config_of(EXPERTS)
    grid = create_mesh("ep8")
    specs = param_specs(config)
    params = jax.device_put(params_of(config), named_shardings(specs, grid))
    shards = params.layers[0].experts.gate.addressable_shards
    assert {shard.data.shape for shard in shards} == {(1, 16, 12)}
    assert len({shard.index[0].start for shard in shards}) == 8
    # Leaves other than experts are split as by fsdp.
    assert params.layers[0].attention.query.addressable_shards[0].data.shape[0] == 2


def test_a_batch_that_the_mesh_does_not_divide():
    config = config_of(EXPERTS)
    params = params_of(config)
    tokens = jnp.asarray(TOKENS[:1, :5])
    expected = forward(params, config, tokens)
    grid = create_mesh("ep4,tp2")
    sharded = jax.device_put(params, named_shardings(param_specs(config), grid))
    with jax.set_mesh(grid):
        found = jax.jit(lambda p, t: forward(p, config, t))(sharded, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_equal_finite_differences():
    config = config_of(SHARED)
    params = params_of(config)
    loss = lambda p: (forward(p, config, jnp.asarray(TOKENS)) * WEIGHTS).sum()  # noqa: E731
    grads = jax.grad(loss)(params)
    # A bias that only selects has none.
    layer = grads.layers[1].experts
    assert float(jnp.abs(layer.correction_bias).max()) == 0.0
    for name in ("router", "gate", "down"):
        value = getattr(params.layers[1].experts, name)
        move = 1e-3 * jax.random.normal(jax.random.key(2), value.shape)

        def at(step, name=name, value=value, move=move):
            experts = params.layers[1].experts.replace(**{name: value + step * move})
            layers = (params.layers[0], params.layers[1].replace(experts=experts))
            return float(loss(params.replace(layers=layers)))

        slope = float((getattr(layer, name) * move).sum())
        assert abs((at(1) - at(-1)) / 2 - slope) < 2e-2 * abs(slope) + 2e-3, name


def test_routing_counts_the_tokens_that_the_mask_marks():
    config = config_of(SHARED)
    params = params_of(config)
    mask = jnp.asarray(np.random.default_rng(2).random(TOKENS.shape) < 0.6)
    hidden, found = forward_with_routing(
        params, config, jnp.asarray(TOKENS), told=RouterInputs(mask)
    )
    np.testing.assert_array_equal(hidden, forward(params, config, jnp.asarray(TOKENS)))
    # One layer of the two has experts.
    assert found.assigned.shape == found.probability.shape == (1, 8)
    count = int(mask.sum())
    assert float(found.tokens) == count
    np.testing.assert_allclose(found.assigned.sum(), 2 * count)
    np.testing.assert_allclose(found.probability.sum(), count, rtol=1e-5)
    nothing = forward_with_routing(
        params, config, jnp.asarray(TOKENS), told=RouterInputs(jnp.zeros_like(mask))
    )[1]
    assert all(float(jnp.abs(leaf).max()) == 0 for leaf in jax.tree.leaves(nothing))


def test_routing_of_a_dense_model_is_refused():
    config = config_of(None)
    with pytest.raises(ValueError, match="qwen3_moe has no experts; use forward"):
        forward_with_routing(
            params_of(config),
            config,
            jnp.asarray(TOKENS),
            told=RouterInputs(jnp.asarray(TOKENS > 0)),
        )


def chosen_of(config, params, tokens):
    """The experts of every token, as a cache's pass has them."""
    tokens = jnp.asarray(tokens)
    cache = KVCache.zeros(config, *tokens.shape, jnp.float32)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    *_, chosen = forward_with_experts(
        params,
        config,
        tokens,
        positions=jnp.broadcast_to(places, tokens.shape),
        kv_view=cache,
    )
    return chosen


@pytest.mark.parametrize("experts", [EXPERTS, SHARED, BIASED, GATED], ids=str)
def test_told_its_own_choice_a_model_computes_the_same(experts):
    config = config_of(experts)
    params, tokens = params_of(config), jnp.asarray(TOKENS)
    chosen = chosen_of(config, params, tokens)
    layers = 1 if experts is SHARED else 2
    assert chosen.dtype == jnp.int16
    assert chosen.shape == (*TOKENS.shape, layers, 2)
    told = RouterInputs(jnp.ones(TOKENS.shape, jnp.bool_), chosen)
    hidden, found = forward_with_routing(params, config, tokens, told=told)
    np.testing.assert_allclose(hidden, forward(params, config, tokens), atol=1e-5)
    assert float(jnp.abs(found.changed).max()) == 0


@pytest.mark.parametrize("execution", [Execution(), Execution(scan=True, remat="full")])
def test_told_other_experts_it_takes_them_with_the_routers_weights(execution):
    """A router that is made to choose other experts gives the same, with its scores."""
    config = config_of(dataclasses.replace(EXPERTS, correction_bias=True))
    params, tokens = params_of(config), jnp.asarray(TOKENS)
    rng = np.random.default_rng(3)

    def biased(layer):
        # The bias chooses and is no part of the weights.
        bias = jnp.asarray(rng.normal(0, 3, 8), jnp.float32)
        return layer.replace(experts=layer.experts.replace(correction_bias=bias))

    other = params.replace(layers=tuple(map(biased, params.layers)))
    chosen = chosen_of(config, other, tokens)
    assert (chosen != chosen_of(config, params, tokens)).mean() > 0.3
    mask = jnp.ones(TOKENS.shape, jnp.bool_)

    def scored(params, experts):
        hidden, found = forward_with_routing(
            params,
            config,
            tokens,
            told=RouterInputs(mask, experts),
            execution=execution,
        )
        return jnp.sin(hidden).sum(), (hidden, found)

    grad = jax.grad(scored, has_aux=True)
    expected, (hidden, _) = grad(other, None)
    told, (again, found) = grad(params, chosen)
    np.testing.assert_allclose(again, hidden, atol=1e-5)
    for one, two in zip(jax.tree.leaves(told), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)
    assert float(jnp.abs(told.layers[0].experts.router).max()) > 1e-3
    own = np.sort(chosen_of(config, params, tokens), axis=-1)
    given = np.sort(chosen, axis=-1)
    # The first layer reads the same; the second reads what told experts gave it.
    first = (each[:, :, 0].reshape(-1, 2) for each in (given, own))
    new = [{*one} - {*other} for one, other in zip(*first, strict=True)]
    assert float(found.changed[0]) == sum(map(len, new))


def test_what_is_not_told_the_router_chooses():
    config = config_of(EXPERTS)
    params, tokens = params_of(config), jnp.asarray(TOKENS)
    mask = jnp.ones(TOKENS.shape, jnp.bool_)
    unknown = jnp.full((*TOKENS.shape, 2, 2), -1, jnp.int16)
    hidden, found = forward_with_routing(
        params, config, tokens, told=RouterInputs(mask, unknown)
    )
    np.testing.assert_array_equal(hidden, forward(params, config, tokens))
    assert float(jnp.abs(found.changed).max()) == 0


def test_experts_of_another_shape_are_refused():
    config = config_of(SHARED)
    told = RouterInputs(
        jnp.asarray(TOKENS > 0), jnp.zeros((*TOKENS.shape, 2, 2), jnp.int16)
    )
    with pytest.raises(ValueError, match=r"\[1, 2\] for a token; .* got \[.*, 2, 2\]"):
        forward_with_routing(params_of(config), config, jnp.asarray(TOKENS), told=told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 9}, r"experts_per_token must lie in 1\.\.8, .*got 9"),
        ({"num_groups": 3}, "num_groups must divide num_experts=8; got 3"),
        (
            {"num_groups": 8, "groups_per_token": 1},
            r"groups_per_token must lie in 1\.\.8 and hold 2 experts; got 1",
        ),
    ],
)
def test_experts_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(EXPERTS, **changes)


def test_experts_that_no_layer_has_are_refused():
    with pytest.raises(ValueError, match=r"experts must be .* None if no layer has it"):
        dataclasses.replace(config_of(EXPERTS), layers=(LayerSpec(),) * 2)
