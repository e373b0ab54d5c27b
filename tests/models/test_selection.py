"""Sparse attention: which keys an indexer chooses, and attention to these alone.

Layers that are written out here query by query, with a loop and Python's stable sort,
have no blocks, masks or caches. Queries see 8 keys, and rows have 40 tokens or more.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import (
    Indexer,
    KVCache,
    LatentAttention,
    LayerSpec,
    ModelConfig,
    forward,
    selection,
)
from jaxrl_post.models.cache import SharedCache
from jaxrl_post.models.exact import check_exact
from jaxrl_post.models.rope import rope_tables
from jaxrl_post.models.stack import Execution, repetitions
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from tests import tiny
from tests.tiers import daily

OWN, SHARED = LayerSpec(), LayerSpec(indexed=False)
TOP_K = 8
CONFIG = ModelConfig(
    "glm_moe_dsa", 40, 16, 24, 5, num_heads=8, num_kv_heads=8, max_length=64,
    rms_norm_eps=0.01, rope_theta=500.0, rope_interleaved=True,
    latent=LatentAttention(
        kv_rank=8, nope_dim=4, rope_dim=4, value_dim=6, query_rank=8, norm_eps=0.01,
        indexer=Indexer(TOP_K, num_heads=4, head_dim=6, context=64, interleaved=True),
    ),
    layers=(OWN, SHARED, OWN, SHARED, SHARED),
)  # fmt: skip
HALVES = dataclasses.replace(
    CONFIG,
    layers=(),
    latent=dataclasses.replace(
        CONFIG.latent,
        indexer=dataclasses.replace(CONFIG.indexer, interleaved=False),
    ),
)
PARAMS = tiny.params(CONFIG)
TOKENS = np.random.default_rng(0).integers(0, 40, 48, dtype=np.int32)
ROW = jnp.asarray(TOKENS)[None]
every_config = pytest.mark.parametrize("config", [CONFIG, HALVES], ids=["glm", "v32"])


def params_of(config):
    return PARAMS if config is CONFIG else tiny.params(config)


@functools.partial(jax.jit, static_argnums=1, static_argnames="execution")
def run(params, config, tokens, positions=None, ends=None, execution=None):
    return forward(
        params,
        config,
        tokens,
        positions=positions,
        ends=ends,
        execution=execution or Execution(),
    )


def rms(x, weight):
    return weight * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 0.01)


def rotated(x, interleaved):
    """Rotates the first four dims of [length, heads, dim] pair by pair."""
    pieces = [x[..., i] for i in range(x.shape[-1])]
    for i in range(2):
        angle = jnp.arange(x.shape[0], dtype=jnp.float32) * 500.0 ** (-i / 2)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
        one, other = x[..., first], x[..., second]
        pieces[first] = one * cos - other * sin
        pieces[second] = other * cos + one * sin
    return jnp.stack(pieces, axis=-1)


def mask_of(indexer, params, x, low):
    """The chosen keys of each query, [length, length], by plain loops."""
    query = rotated(jnp.einsum("tr,rhd->thd", low, params.queries), indexer.interleaved)
    key = x @ params.keys
    key = key - key.mean(-1, keepdims=True)
    key = key / jnp.sqrt((key * key).mean(-1, keepdims=True) + 1e-6)
    key = key * params.key_norm + params.key_norm_bias
    key = rotated(key[:, None], indexer.interleaved)[:, 0]
    products = jnp.einsum("qhd,kd->qkh", query, key) / np.sqrt(indexer.head_dim)
    weights = (x @ params.weights) / np.sqrt(indexer.num_heads)
    scores = np.asarray((jax.nn.relu(products) * weights[:, None]).sum(-1))
    mask = np.zeros(scores.shape, bool)
    for at, row in enumerate(scores):
        best = sorted(range(at + 1), key=lambda j, row=row: -row[j])
        mask[at, best[:TOP_K]] = True
    return mask


def written_out(config, params, tokens, masks=None):
    """The decoder over one sequence, and the mask of each layer.

    With `masks` these are used, which makes it a decoder without an indexer.
    """
    latent, found = config.latent, []
    hidden = params.embedding[tokens]
    for index, layer in enumerate(params.layers):
        own = layer.attention
        x = rms(hidden, layer.attention_norm)
        low = rms(x @ own.query_down, own.query_norm)
        if masks is not None:
            mask = masks[index]
        elif own.indexer is not None:
            mask = mask_of(latent.indexer, own.indexer, x, low)
        found.append(mask)
        query = jnp.einsum("tr,rhd->thd", low, own.query_up)
        nope, turning = jnp.split(query, [4], axis=-1)
        query = jnp.concatenate([nope, rotated(turning, True)], axis=-1)
        down = x @ own.kv_down
        both = jnp.einsum("tr,rhd->thd", rms(down[:, :8], own.kv_norm), own.kv_up)
        turned = rotated(down[:, None, 8:], True)
        turned = jnp.broadcast_to(turned, (*both.shape[:2], 4))
        key = jnp.concatenate([both[..., :4], turned], axis=-1)
        scores = jnp.einsum("qhd,khd->hqk", query, key) / np.sqrt(8)
        mixing = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("hqk,khd->qhd", mixing, both[..., 4:])
        hidden = hidden + jnp.einsum("qhd,hde->qe", mixed, own.output)
        x, wide = rms(hidden, layer.mlp_norm), layer.mlp
        hidden = hidden + (jax.nn.silu(x @ wide.gate) * (x @ wide.up)) @ wide.down
    return rms(hidden, params.final_norm), found


def weighted(function):
    """Value and gradient of a weighted sum of hidden states."""
    weight = np.random.default_rng(1).normal(size=(len(TOKENS), CONFIG.hidden_size))
    weight = weight.astype(np.float32)
    return jax.value_and_grad(lambda params: (function(params) * weight).sum())


def assert_close(found, expected):
    """Within 1e-4 of the largest entry of each parameter's gradient."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in pairs:
        gap = float(jnp.abs(one - other).max())
        assert gap <= 1e-4 * max(1.0, float(jnp.abs(other).max()))


@pytest.fixture(scope="module")
def naive():
    made = {}
    for config in (CONFIG, HALVES):
        params = params_of(config)
        hidden, masks = written_out(config, params, TOKENS)
        dense = weighted(lambda p, c=config, m=masks: written_out(c, p, TOKENS, m)[0])
        made[config] = hidden, dense(params)
    return made


def test_equal_scores_go_to_the_earliest_token():
    """Zeros here, of either sign."""
    attention = PARAMS.layers[0].attention
    nothing = attention.indexer.replace(weights=jnp.zeros((16, 4)))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(40, 16)), jnp.float32)
    at = jnp.arange(40, dtype=jnp.int32)[None]
    tables = rope_tables(CONFIG, at)
    parts = selection.index_parts(CONFIG.latent, nothing, x, x[:, :8], (1, 40), tables)
    for sign in (1.0, -1.0):
        signed = parts._replace(weights=sign * parts.weights)
        found = selection.choose_in_rows(signed, at, None, DEFAULT_RULES)
        for query in range(40):
            chosen = [j for j in np.sort(found[0, query]) if j != selection.NO_KEY]
            assert chosen == list(range(min(query + 1, TOP_K)))


def test_padding_and_other_sequences_are_not_chosen():
    ends = np.repeat([20, 45, 0], [20, 25, 3])[None].astype(np.int32)
    positions = np.concatenate([np.arange(20), np.arange(25), np.zeros(3)])[None]
    x = jnp.asarray(np.random.default_rng(3).normal(size=(48, 16)), jnp.float32)
    indexer = PARAMS.layers[0].attention.indexer
    parts = selection.index_parts(CONFIG.latent, indexer, x, x[:, :8], (1, 48), None)
    positions = jnp.asarray(positions, jnp.int32)
    found = selection.choose_in_rows(parts, positions, jnp.asarray(ends), DEFAULT_RULES)
    for query, row in enumerate(np.asarray(found)[0]):
        first = 0 if query < 20 else 20
        chosen = row[row != selection.NO_KEY]
        count = min(query - first + 1, TOP_K) if query < 45 else 0
        assert len(set(chosen.tolist())) == len(chosen) == count
        assert all(first <= place <= query for place in chosen)


def test_rows_in_chunks_are_refused_by_name():
    places = jnp.arange(48, dtype=jnp.int32)[None]
    with pytest.raises(
        ValueError, match=r"glm_moe_dsa choose .* max_length of at most"
    ):
        forward(PARAMS, CONFIG, ROW, ends=places + 1, indices=places)


def test_exact_mode_is_refused_by_name():
    with pytest.raises(ValueError, match=r"more than 8 tokens \(index_topk\)"):
        check_exact(CONFIG, 1)
    check_exact(CONFIG.within(TOP_K), 1)


def test_a_cache_has_the_keys_of_its_indexers():
    cache = KVCache.zeros(CONFIG, 1, 64, jnp.float32)
    assert [values.shape[-1] for values in cache.values] == [6, 0, 6, 0, 0]
    cache = KVCache.zeros(CONFIG.within(TOP_K), 1, 8, jnp.float32)
    assert [values.shape[-1] for values in cache.values] == [0] * 5


def test_layers_that_choose_and_that_share_run_as_loops():
    assert repetitions(CONFIG) == [(0, 2, 2), (4, 1, 1)]
    assert repetitions(HALVES) == [(0, 1, 5)]


@every_config
def test_short_rows_choose_nothing_and_have_the_same_bits(config):
    params, tokens = params_of(config), ROW[:, :TOP_K]
    within = config.within(TOP_K)
    assert (within.max_length, within.selects) == (TOP_K, False)
    assert "top_k" not in str(
        jax.make_jaxpr(run, static_argnums=1)(params, config, tokens)
    )
    long = jax.make_jaxpr(run, static_argnums=1)(
        params, config, jnp.asarray(TOKENS)[None]
    )
    assert "top_k" in str(long)
    found = [run(params, each, tokens) for each in (config, within)]
    np.testing.assert_array_equal(*found)


@every_config
@pytest.mark.parametrize(
    "execution",
    daily(
        [Execution(), Execution("full"), Execution("dots", scan=True)],
        {Execution("full"), Execution("dots", scan=True)},
    ),
    ids=str,
)
def test_values_and_gradients_are_those_of_a_masked_decoder(naive, config, execution):
    """The indexer has no gradient, and the others are those under its choice."""
    hidden, (value, expected) = naive[config]

    def function(params):
        return run(params, config, ROW, execution=execution)[0]

    np.testing.assert_allclose(function(params_of(config)), hidden, atol=1e-4)
    found, gradients = weighted(function)(params_of(config))
    np.testing.assert_allclose(found, value, rtol=1e-4)
    assert_close(gradients, expected)
    indexers = [layer.attention.indexer for layer in gradients.layers]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(indexers))


@every_config
def test_the_choice_shows(naive, config):
    full = run(params_of(config), config.within(TOP_K), ROW)[0]
    gap = np.abs(np.asarray(full - naive[config][0])).max(axis=-1)
    # All keys are chosen for the first queries.
    assert gap[:TOP_K].max() < 1e-4 < 0.1 < gap[TOP_K:].mean()


@pytest.mark.parametrize("size", [5, 16])
def test_blocks_change_nothing(naive, size, monkeypatch):
    for name in ("choose.BLOCK", "attend.BLOCK", "attend.GATHERED_BLOCK"):
        monkeypatch.setattr(f"jaxrl_post.models.selection.{name}", size)
    hidden, (value, expected) = naive[CONFIG]
    found, gradients = weighted(lambda params: forward(params, CONFIG, ROW)[0])(PARAMS)
    np.testing.assert_allclose(found, value, rtol=1e-4)
    assert_close(gradients, expected)
    anew = jax.jit(extend.__wrapped__, static_argnums=1)
    found = in_parts(CONFIG, PARAMS, (48,), anew)
    np.testing.assert_allclose(found, hidden, atol=1e-4)


@functools.partial(jax.jit, static_argnums=1)
def extend(params, config, tokens, positions, cache):
    return forward(params, config, tokens, positions=positions, kv_view=cache)


def in_parts(config, params, cuts, extend=extend):
    """Hidden states of the tokens by a cache that is filled in parts."""
    cache = KVCache.zeros(config, 1, 64, jnp.float32)
    found, first = [], 0
    for last in cuts:
        at = jnp.arange(first, last, dtype=jnp.int32)[None]
        part, cache = extend(params, config, ROW[:, first:last], at, cache)
        found.append(part[0])
        first = last
    return np.concatenate(found)


@every_config
@pytest.mark.parametrize("cuts", [(48,), (5, 6, 30, 48), (40, *range(41, 49))], ids=str)
def test_a_cache_that_is_filled_in_parts_is_one_forward(naive, config, cuts):
    found = in_parts(config, params_of(config), cuts)
    np.testing.assert_allclose(found, naive[config][0], atol=1e-4)


@pytest.mark.parametrize("count", daily([3, 20, 40], {20}))
def test_entries_that_a_group_shares_compete_with_its_own(naive, count):
    """Two sequences share a beginning, and a third shares nothing."""
    _, held = forward(
        PARAMS,
        CONFIG,
        ROW[:, :count],
        positions=jnp.arange(count, dtype=jnp.int32)[None],
        kv_view=KVCache.zeros(CONFIG, 1, 42, jnp.float32),
    )
    # Entries without a token hold numbers, but for the largest position.
    positions = np.full((1, 42), jnp.iinfo(jnp.int32).max, np.int32)
    positions[0, :count] = np.arange(count)
    places = jnp.array([1, 0, 2], jnp.int32)
    shared = SharedCache(held.keys, held.values, jnp.asarray(positions), places, 2)
    starts = np.array([count, count, 0], np.int32)
    cache = KVCache.zeros(CONFIG, 3, 48, jnp.float32).replace(
        starts=jnp.asarray(starts), shared=shared
    )
    rows = np.stack([TOKENS[count:], TOKENS[count:], TOKENS[: 48 - count]])
    at = starts[:, None] + np.arange(48 - count, dtype=np.int32)
    found, _ = forward(
        PARAMS, CONFIG, jnp.asarray(rows), positions=jnp.asarray(at), kv_view=cache
    )
    hidden = naive[CONFIG][0]
    for row, start in enumerate(starts):
        expected = hidden[start : start + 48 - count]
        np.testing.assert_allclose(found[row], expected, atol=1e-4)


def test_packed_rows_are_their_sequences_alone():
    lengths = 1, 9, 14, 24
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    ends = np.repeat(np.cumsum(lengths), lengths)[None].astype(np.int32)
    found = run(PARAMS, CONFIG, ROW, positions.astype(np.int32), ends)[0]
    at = 0
    for length in lengths:
        alone = run(PARAMS, CONFIG, TOKENS[None, at : at + length])[0]
        np.testing.assert_allclose(found[at : at + length], alone, atol=1e-4)
        at += length


def test_a_tree_is_its_paths_with_gradients():
    """A prompt of 12, two answers that share six tokens, and one of its own."""
    nodes = {"prompt": range(12), "turn": range(12, 18), "one": range(18, 30)}
    nodes |= {"two": range(30, 37), "three": range(37, 48)}
    paths = ["prompt", "turn", "one"], ["prompt", "turn", "two"], ["prompt", "three"]
    places = [[i for name in path for i in nodes[name]] for path in paths]
    positions = np.zeros((1, 48), np.int32)
    ends = np.zeros((1, 48), np.int32)
    flat = np.zeros((3, 30), np.int32)
    weights = np.zeros((3, 30), np.float32)
    seen = np.zeros(48, bool)
    for row, path in enumerate(places):
        flat[row, : len(path)] = TOKENS[path]
        positions[0, path] = np.arange(len(path))
        # Each token of the tree counts once.
        weights[row, : len(path)] = ~seen[path]
        seen[path] = True
    # A shared token is followed by the tokens of all paths through it.
    for path in places:
        ends[0, path] = np.maximum(ends[0, path], max(path) + 1)
    direction = np.random.default_rng(2).normal(size=16).astype(np.float32)

    def of_tree(params):
        return (run(params, CONFIG, ROW, positions, ends) @ direction).sum()

    def of_paths(params):
        return (weights * (run(params, CONFIG, flat) @ direction)).sum()

    found, gradients = jax.value_and_grad(of_tree)(PARAMS)
    value, expected = jax.value_and_grad(of_paths)(PARAMS)
    np.testing.assert_allclose(found, value, rtol=1e-4)
    assert_close(gradients, expected)


@pytest.mark.meshes
@pytest.mark.parametrize("scan", daily([False, True], {True}))
def test_a_mesh_equals_one_device(scan):
    mesh = create_mesh("dp2,fsdp2,tp2")
    tokens = np.stack([TOKENS, TOKENS[::-1]] * 2)

    @jax.jit
    @jax.value_and_grad
    def compiled(params, tokens):
        execution = Execution(scan=scan)
        return jnp.sin(forward(params, CONFIG, tokens, execution=execution)).sum()

    expected = compiled(PARAMS, tokens)
    with jax.set_mesh(mesh):
        found = compiled(tiny.params(CONFIG, mesh=mesh), tokens)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    assert_close(jax.device_get(found[1]), expected[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (SHARED, *CONFIG.layers[1:])}, "indexed of layer 0 must be True"),
        (
            {"layers": (OWN, LayerSpec(window=4), *CONFIG.layers[2:])},
            "window of layer 1 must be None with an indexer",
        ),
        ({"attention_softcap": 2.0}, "attention_softcap must be None with an indexer"),
    ],
)
def test_what_does_not_go_with_an_indexer_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_heads_of_an_indexer_hold_the_rotated_dims():
    with pytest.raises(
        ValueError, match="head_dim of the indexer must be at least the rotated dims, 4"
    ):
        dataclasses.replace(CONFIG.latent, indexer=Indexer(8, 2, 2))
