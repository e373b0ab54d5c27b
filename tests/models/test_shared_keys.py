"""Layers that read the keys of others, with heads of their own and tables per layer.

A decoder that is written out here token by token has no keys that are handed on: a
layer makes the keys of its source again from the source's inputs and weights.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.models import (
    HeadSpec,
    KVCache,
    LayerSpec,
    LoRAConfig,
    MixtureOfExperts,
    ModelConfig,
    PerLayerEmbedding,
    forward,
)
from jaxrl_post.models.adapters.lora import adapted, initialize_adapter
from jaxrl_post.models.exact import exact_forward
from jaxrl_post.models.stack import Execution, repetitions
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.tiers import daily

WIDE = HeadSpec(head_dim=8, num_kv_heads=2, rotary_share=0.5, keys_as_values=True)
SLIDING, FULL = LayerSpec(mlp="both", window=4), LayerSpec(mlp="both", heads=WIDE)
SLIDING_READS = dataclasses.replace(SLIDING, keys_of=2, mlp_multiple=2)
FULL_READS = dataclasses.replace(FULL, keys_of=3, mlp_multiple=2)
CONFIG = dataclasses.replace(
    tiny.CONFIG,
    model_type="gemma4_text",
    num_layers=8,
    qk_norm="head",
    value_norm=True,
    layer_scale=True,
    attention_scale=1.0,
    norm_placement="both",
    activation="gelu_tanh",
    local_rope_theta=20.0,
    rope_theta=500.0,
    embedding_scale=4.0,
    tie_embeddings=True,
    # A norm blows up an output of nearly 0 and what rounding added to it.
    rms_norm_eps=0.01,
    experts=MixtureOfExperts(4, 2, 6, scaled_router=True),
    per_layer=PerLayerEmbedding(48, 6),
    layers=(
        *(SLIDING, SLIDING, SLIDING, FULL),
        *(SLIDING_READS, FULL_READS, SLIDING_READS, FULL_READS),
    ),
)
PARAMS = tiny.params(CONFIG)
TOKENS = np.random.default_rng(0).integers(0, 40, 14, dtype=np.int32)


@functools.partial(jax.jit, static_argnums=(4, 5))
def run(params, tokens, positions=None, ends=None, config=CONFIG, execution=None):
    return forward(
        params,
        config,
        tokens,
        positions=positions,
        ends=ends,
        execution=execution or Execution(),
    )


def rms(x, weight=1.0):
    return weight * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps)


def rotated(x, spec):
    """Rotates [length, heads, dim] pair by pair."""
    base = CONFIG.rope_theta if spec.window is None else CONFIG.local_rope_theta
    dim = x.shape[-1]
    share = 1.0 if spec.heads is None else spec.heads.rotary_share
    pieces = [x[..., i] for i in range(dim)]
    for i in range(int(share * dim) // 2):
        angle = jnp.arange(x.shape[0], dtype=jnp.float32) * base ** (-2 * i / dim)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        one, other = x[..., i], x[..., dim // 2 + i]
        pieces[i], pieces[dim // 2 + i] = (
            one * cos - other * sin,
            other * cos + one * sin,
        )
    return jnp.stack(pieces, axis=-1)


def keys_and_values(layer, x, spec):
    key = jnp.einsum("td,dhk->thk", x, layer.key)
    value = key
    if layer.value is not None:
        value = jnp.einsum("td,dhk->thk", x, layer.value)
    return rotated(rms(key, layer.key_norm), spec), rms(value)


def attended(layer, x, key, value, spec):
    query = rotated(
        rms(jnp.einsum("td,dhk->thk", x, layer.query), layer.query_norm), spec
    )
    repeats = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(each, repeats, axis=1) for each in (key, value))
    scores = jnp.einsum("qhk,thk->hqt", query, key)
    distance = jnp.arange(len(x))[:, None] - jnp.arange(len(x))
    seen = (distance >= 0) & (distance < (spec.window or len(x)))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("hqt,thk->qhk", weights, value)
    return jnp.einsum("thk,hkd->td", mixed, layer.output)


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def feed_forward(layer, hidden):
    x = rms(hidden, layer.mlp_norm)
    dense = (gelu(x @ layer.mlp.gate) * (x @ layer.mlp.up)) @ layer.mlp.down
    own, routed = layer.experts, rms(hidden)
    routed = routed * own.router_scale / math.sqrt(hidden.shape[-1])
    scores = jax.nn.softmax(routed @ own.router.T, axis=-1)
    best = jnp.sort(scores, axis=-1)[:, -2:-1]
    weights = jnp.where(scores >= best, scores, 0.0)
    weights = weights / weights.sum(-1, keepdims=True) * own.expert_scale
    x = rms(hidden, layer.experts_norm)
    inner = gelu(jnp.einsum("td,edf->tef", x, own.gate))
    inner = inner * jnp.einsum("td,edf->tef", x, own.up)
    mixed = jnp.einsum("te,tef,efd->td", weights, inner, own.down)
    total = rms(dense, layer.dense_post_norm) + rms(mixed, layer.experts_post_norm)
    return rms(total, layer.mlp_post_norm)


def written_out(params, tokens, *, constant=False):
    """The decoder over one sequence; `constant`: without gradients of readers' keys."""
    hidden = CONFIG.embedding_scale * params.embedding[tokens]
    shape, size = (len(tokens), CONFIG.num_layers, -1), CONFIG.per_layer.size
    tables = params.per_layer
    projected = (hidden @ tables.projection).reshape(shape) / math.sqrt(16)
    rows = tables.embedding[tokens].reshape(shape) * math.sqrt(size)
    inputs = (rms(projected, tables.norm) + rows) / math.sqrt(2)
    read = []
    for index, layer in enumerate(params.layers):
        spec = CONFIG.layer(index)
        x = rms(hidden, layer.attention_norm)
        read.append(x)
        source = index if spec.keys_of is None else spec.keys_of
        key, value = keys_and_values(
            params.layers[source].attention, read[source], CONFIG.layer(source)
        )
        if constant and source != index:
            key, value = jax.lax.stop_gradient((key, value))
        branch = attended(layer.attention, x, key, value, spec)
        hidden = hidden + rms(branch, layer.attention_post_norm)
        hidden = hidden + feed_forward(layer, hidden)
        own = layer.per_layer
        branch = (gelu(hidden @ own.gate) * inputs[:, index]) @ own.output
        hidden = hidden + rms(branch, own.norm)
        hidden = hidden * jax.lax.stop_gradient(layer.scale)
    return rms(hidden, params.final_norm)


def weighted(function):
    """Value and gradient of a weighted sum of hidden states."""
    weight = np.random.default_rng(1).normal(size=(len(TOKENS), CONFIG.hidden_size))
    weight = weight.astype(np.float32)
    return jax.jit(jax.value_and_grad(lambda params: (function(params) * weight).sum()))


def assert_close(found, expected):
    """Within 1e-4 of the largest entry of each parameter's gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        other = functools.reduce(lambda tree, key: key_of(tree, key), path, found)
        gap = float(jnp.abs(leaf - other).max())
        assert gap <= 1e-4 * max(1.0, float(jnp.abs(leaf).max())), path


def key_of(tree, key):
    return tree[key.idx] if hasattr(key, "idx") else getattr(tree, key.name)


@pytest.fixture(scope="module")
def naive():
    return weighted(lambda params: written_out(params, TOKENS))(PARAMS)


@pytest.mark.parametrize(
    "execution",
    daily(
        [
            Execution(),
            Execution(remat="full"),
            Execution("dots", scan=True),
            Execution(scan=True),
        ],
        {Execution(), Execution("dots", scan=True)},
    ),
    ids=str,
)
def test_values_and_gradients_are_those_of_a_decoder_without_shared_keys(
    naive, execution
):
    """Through all readers: keys have one gradient, the sum over layers that read."""
    tokens = jnp.asarray(TOKENS)[None]
    value, gradients = weighted(
        lambda params: run(params, tokens, execution=execution)[0]
    )(PARAMS)
    np.testing.assert_allclose(value, naive[0], rtol=1e-4)
    assert_close(gradients, naive[1])


def test_the_gradient_of_shared_keys_comes_from_every_reader(naive):
    """It differs by far if keys are constants for their readers."""
    _, without = weighted(lambda params: written_out(params, TOKENS, constant=True))(
        PARAMS
    )
    for layer in (2, 3):
        whole, part = (g.layers[layer].attention.key for g in (naive[1], without))
        assert float(jnp.abs(whole - part).max()) > 0.1 * float(jnp.abs(whole).max())


def test_every_parameter_but_the_scales_has_a_gradient(naive):
    for path, leaf in jax.tree_util.tree_leaves_with_path(naive[1]):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        assert bool(np.any(leaf)) == (not name.endswith(".scale")), name
    assert PARAMS.layers[5].attention.key is None


def test_layers_repeat_between_those_that_lend_their_keys():
    assert repetitions(CONFIG) == [(0, 1, 2), (2, 1, 1), (3, 1, 1), (4, 2, 2)]


def test_packed_rows_are_their_sequences_alone():
    lengths = 1, 4, 9
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    ends = np.repeat(np.cumsum(lengths), lengths)[None].astype(np.int32)
    found = run(PARAMS, TOKENS[None], positions.astype(np.int32), ends)[0]
    at = 0
    for length in lengths:
        alone = run(PARAMS, TOKENS[None, at : at + length])[0]
        np.testing.assert_allclose(found[at : at + length], alone, atol=1e-4)
        at += length


def test_exact_mode_is_the_same_decoder():
    tokens = jnp.asarray(TOKENS)[None]
    positions = jnp.arange(len(TOKENS), dtype=jnp.int32)[None]
    exact = jax.jit(functools.partial(exact_forward, config=CONFIG, tile=16))
    found, _ = exact(
        PARAMS, tokens=tokens, positions=positions, counted=jnp.ones(tokens.shape, bool)
    )
    np.testing.assert_allclose(found, run(PARAMS, tokens), atol=1e-4)


# A prompt of five, two answers that share two tokens, and an answer of its own.
#            0  1  2  3  4 |5  6 |7  8 |9 |10 11 12|13
PARENTS = [-1, 0, 1, 2, 3, 4, 5, 6, 7, 6, 4, 10, 11, -1]


def test_a_tree_is_its_paths():
    length = len(PARENTS)
    paths = []
    for index, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else []), index])
    positions = np.array([[len(path) - 1 for path in paths]], np.int32)
    ends = np.array(
        [[1 + max(j for j in range(length) if i in paths[j]) for i in range(length)]],
        np.int32,
    )
    found = run(PARAMS, TOKENS[None], positions, ends)[0]
    flat = np.zeros((length, max(map(len, paths))), np.int32)
    for row, path in zip(flat, paths, strict=True):
        row[: len(path)] = TOKENS[path]
    apart = np.asarray(run(PARAMS, flat))
    for row, path in enumerate(paths):
        np.testing.assert_allclose(
            found[path[-1]], apart[row, len(path) - 1], atol=1e-4
        )


@functools.partial(jax.jit)
def extend(params, tokens, positions, cache):
    return forward(params, CONFIG, tokens, positions=positions, kv_view=cache)


@pytest.mark.parametrize("cut", [1, 3, 13])
def test_a_cache_that_is_filled_in_parts_is_one_forward(cut):
    tokens = jnp.asarray(TOKENS)[None]
    expected = run(PARAMS, tokens)
    cache = KVCache.zeros(CONFIG, 1, 16, jnp.float32)
    sliding, full = (1, 4, 16, 4), (1, 2, 16, 8)
    assert shapes_of(cache) == [sliding, sliding, sliding, full, *[None] * 4]
    found = []
    for first, last in ((0, cut), (cut, len(TOKENS))):
        positions = jnp.arange(first, last)[None]
        part, cache = extend(PARAMS, tokens[:, first:last], positions, cache)
        found.append(part)
    np.testing.assert_allclose(np.concatenate(found, 1), expected, atol=1e-4)
    assert shapes_of(cache) == [sliding, sliding, sliding, full, *[None] * 4]


def shapes_of(cache):
    return [None if keys is None else keys.shape for keys in cache.keys]


@pytest.mark.meshes
@pytest.mark.parametrize(
    "spec", daily(["dp2,fsdp2,tp2", "dp2,ep2,tp2"], {"dp2,ep2,tp2"})
)
def test_a_mesh_equals_one_device(spec):
    mesh = create_mesh(spec)
    tokens = np.stack([TOKENS, TOKENS[::-1]] * 2)

    @jax.jit
    @jax.value_and_grad
    def compiled(params, tokens):
        return jnp.sin(forward(params, CONFIG, tokens)).sum()

    expected = compiled(PARAMS, tokens)
    params = tiny.params(CONFIG, mesh=mesh)
    rows = jax.device_put(tokens, NamedSharding(mesh, P(("dp", "fsdp", "ep"))))
    with jax.set_mesh(mesh):
        found = compiled(params, rows)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    assert_close(jax.device_get(found[1]), expected[1])


def test_an_adapter_reaches_the_matrices_of_per_layer_embeddings():
    lora = LoRAConfig(rank=2, targets=("query", "key", "value", "per_layer_gate"))
    adapter = initialize_adapter(jax.random.key(0), PARAMS, CONFIG, lora)
    # Layers without keys of their own have no adapters of them.
    names = [name for name in adapter if name.startswith("layers.5.")]
    assert names == ["layers.5.attention.query", "layers.5.per_layer.gate"]
    changed = jax.tree.map(lambda leaf: leaf + 0.1, adapter)
    policy = adapted(PARAMS, changed, CONFIG, lora)
    assert float(jnp.abs(run(policy, TOKENS[None]) - run(PARAMS, TOKENS[None])).max())


def config(**changes):
    return dataclasses.replace(CONFIG, **changes)


def with_layer(index, **changes):
    return config(
        layers=CONFIG.changed_layers(
            lambda i, spec: dataclasses.replace(spec, **changes) if i == index else spec
        )
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: with_layer(4, keys_of=4), "an earlier layer with keys"),
        (lambda: with_layer(6, keys_of=4), "an earlier layer with keys"),
        (
            lambda: with_layer(4, keys_of=3),
            "window of layer 4 must be None, as in layer 3",
        ),
        (lambda: with_layer(5, heads=None), "heads of layer 5 must be HeadSpec"),
        (lambda: config(attention_scale=None), "attention_scale must be given"),
        (lambda: config(num_heads=9, num_kv_heads=3), "num_kv_heads; got 9 and 2"),
        (lambda: config(rotary_dim=2), "rotary_dim below head_dim"),
        (lambda: config(per_layer=PerLayerEmbedding(8, 6)), "must have 40 rows"),
        (lambda: config(experts=None), "experts must be given"),
        (lambda: PerLayerEmbedding(8, 0), "at least 1"),
        (lambda: HeadSpec(7, 1), "head_dim must be even"),
        (lambda: HeadSpec(8, 0), "num_kv_heads must be at least 1"),
        (lambda: HeadSpec(8, 1, rotary_share=1.5), r"must be in \(0, 1\]"),
        (lambda: LayerSpec(None, keys_of=0), "must be None in a layer without"),
        (lambda: LayerSpec(mlp_multiple=0), "mlp_multiple must be at least 1"),
    ],
)
def test_a_config_is_checked(change, message):
    with pytest.raises(ValueError, match=message):
        change()


def test_parameters_of_another_config_are_refused():
    plain: ModelConfig = config(
        experts=None, layers=CONFIG.changed_layers(without_experts)
    )
    with pytest.raises(ValueError, match="layer 0: must have mlp=dense"):
        forward(PARAMS, plain, jnp.asarray(TOKENS)[None])


def without_experts(_, spec):
    return dataclasses.replace(spec, mlp="dense")
