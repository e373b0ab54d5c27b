"""Decode attention, shared keys and own keys in two parts, against one softmax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels.attention import Scoring
from jaxrl_post.kernels.decode_attention import (
    OwnKeys,
    SharedKeys,
    decode_attention,
)
from jaxrl_post.sharding import create_mesh
from tests.tiers import daily

NO_TOKEN = np.iinfo(np.int32).max
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Rounding of weights and results in bfloat16.
ROUNDED = {"rtol": 2**-7, "atol": 2**-7}


def case(seed=0, *, batch=5, queries=1, heads=8, kv_heads=4, width=5):
    """Groups of 2, 0, 1 and 1 sequences, and one that shares nothing."""
    rng = np.random.default_rng(seed)
    dim, members, groups, shared, own = 6, 2, 4, 12, 10

    def normal(*shape):
        """Numbers that bfloat16 has, so that no implementation rounds them."""
        return rng.normal(size=shape).astype(jnp.bfloat16).astype(np.float32)

    places = np.array([1, 0, 5, 100, 7], np.int32)[:batch]
    lengths = np.array([9, 0, 12, 4])
    positions = np.where(
        np.arange(shared) < lengths[:, None], np.arange(shared), NO_TOKEN
    ).astype(np.int32)
    starts = np.where(places < 8, lengths[np.minimum(places // members, 3)], 0)
    kv_positions = (starts[:, None] + np.arange(own)).astype(np.int32)
    # The first sequence has no key of its own yet: it feeds its last shared token.
    seen = np.array([-1, 3, 0, 5, own - queries])[:batch]
    query_positions = (starts + seen)[:, None] + np.arange(queries)
    return {
        "query": normal(batch, queries, heads, dim),
        "key": normal(batch, kv_heads, own, dim),
        "value": normal(batch, kv_heads, own, width),
        "query_positions": query_positions.astype(np.int32),
        "kv_positions": kv_positions,
        "shared": SharedKeys(
            normal(groups, kv_heads, shared, dim),
            normal(groups, kv_heads, shared, width),
            positions,
            places,
            members,
        ),
    }


def oracle(arrays, *, window=None, softcap=None, sinks=None):
    """A float64 loop; sequence 3 shares nothing."""
    shared = arrays["shared"]
    out = np.zeros((*arrays["query"].shape[:3], arrays["value"].shape[-1]))
    heads = arrays["query"].shape[2]
    repeat = heads // arrays["key"].shape[1]
    for b, t, h in np.ndindex(*out.shape[:3]):
        group, kv = shared.places[b] // shared.members, h // repeat
        key, value, at = (
            arrays["key"][b, kv],
            arrays["value"][b, kv],
            arrays["kv_positions"][b],
        )
        if group < len(shared.positions):
            key = np.concatenate([shared.key[group, kv], key])
            value = np.concatenate([shared.value[group, kv], value])
            at = np.concatenate([shared.positions[group], at])
        back = arrays["query_positions"][b, t].astype(np.int64) - at
        seen = (back >= 0) & (back < (window or np.inf))
        scores = key[seen].astype(np.float64) @ arrays["query"][b, t, h]
        scores *= key.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        top = scores.max(initial=-1e30)
        weights = np.exp(scores - top)
        total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[h] - top))
        if total:  # A query that sees no key may get anything.
            out[b, t, h] = weights / total @ value[seen]
    return out


def attend(
    query, key, value, query_positions, kv_positions, shared=None, *,
    window=None, scale=None, softcap=None, sinks=None, **options,
):  # fmt: skip
    return decode_attention(
        query, OwnKeys(key, value, kv_positions), query_positions, shared=shared,
        scoring=Scoring(window, scale, softcap, sinks), **options,
    )  # fmt: skip


def run(arrays, **options):
    shared = arrays["shared"]
    given = jax.tree.map(jnp.asarray, {**arrays, "shared": None})
    if shared is not None:
        common = jax.tree.map(jnp.asarray, tuple(shared[:4]))
        shared = SharedKeys(*common, shared.members)
    width = (arrays["key"] if arrays["value"] is None else arrays["value"]).shape[-1]
    if options.get("implementation") == "pallas_gpu":
        options["scale"] = arrays["key"].shape[-1] ** -0.5
        given, shared = jax.tree.map(on_gpu, (given, shared))
    options["interpret"] = options.get("implementation") in KERNELS
    found = attend(**{**given, "shared": shared}, **options)
    return found[..., :width]


def on_gpu(leaf):
    """Heads of 64 numbers, in bfloat16 if they are no codes; zeros change no score."""
    if not isinstance(leaf, jax.Array) or leaf.ndim < 4 or leaf.shape[-1] == 1:
        return leaf
    more = [(0, 0)] * (leaf.ndim - 1) + [(0, 64 - leaf.shape[-1])]
    wide = jnp.pad(leaf, more)
    return wide.astype(jnp.bfloat16) if wide.dtype == jnp.float32 else wide


def assert_close(found, expected, implementation):
    close = ROUNDED if implementation == "pallas_gpu" else CLOSE
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, **close)


KERNELS = ["pallas_tpu", "pallas_gpu"]
every_implementation = pytest.mark.parametrize(
    "implementation", ["xla", *KERNELS, "reference"]
)


SINKS = np.linspace(-2, 3, 8).astype(np.float32)
OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": SINKS},
    "all": {"window": 6, "softcap": 1.5, "sinks": SINKS},
}


@every_implementation
# Each option once, and all of them together, for one query or for several.
@pytest.mark.parametrize(
    ("queries", "name"),
    daily(
        itertools.product([1, 3], OPTIONS),
        [(1, "plain"), (3, "all")],
    ),
)
def test_both_parts_are_one_softmax(implementation, name, queries):
    arrays = case(queries=queries)
    options = dict(OPTIONS[name])
    if "sinks" in options:
        options["sinks"] = jnp.asarray(SINKS)
    found = run(arrays, **options, implementation=implementation)
    assert_close(found, oracle(arrays, **OPTIONS[name]), implementation)


@every_implementation
def test_without_shared_keys_it_is_attention_over_the_own_keys(implementation):
    arrays = case()
    alone = {**arrays, "shared": None}
    # Every sequence but the first, which has no key of its own.
    lonely = arrays["shared"]._replace(places=np.full(5, 100, np.int32))
    expected = oracle({**arrays, "shared": lonely})
    found = run(alone, implementation=implementation)
    assert_close(found[1:], expected[1:], implementation)
    assert jnp.isfinite(found).all()


@every_implementation
# One query is a case of several.
@pytest.mark.parametrize("queries", daily([1, 3], [3]))
def test_keys_that_are_the_values_too(implementation, queries):
    arrays = case(queries=queries)
    shared = arrays["shared"]
    alike = {
        **arrays,
        "value": arrays["key"],
        "shared": shared._replace(value=shared.key),
    }
    given = {**arrays, "value": None, "shared": shared._replace(value=None)}
    found = run(given, implementation=implementation, window=6)
    assert_close(found, oracle(alike, window=6), implementation)


@every_implementation
def test_far_scores_of_one_part_do_not_overflow_the_other(implementation):
    options = {"implementation": implementation}
    arrays = case()
    arrays["shared"] = arrays["shared"]._replace(key=256.0 * arrays["shared"].key)
    assert_close(run(arrays, **options), oracle(arrays), implementation)
    arrays = case()
    arrays["key"] = 256.0 * arrays["key"]
    assert_close(run(arrays, **options), oracle(arrays), implementation)


@every_implementation
def test_bfloat16_stays_bfloat16_and_near(implementation):
    arrays = case()
    narrow = {
        name: jnp.asarray(arrays[name], jnp.bfloat16)
        for name in ("query", "key", "value")
    }
    shared = arrays["shared"]
    shared = shared._replace(
        key=jnp.asarray(shared.key, jnp.bfloat16),
        value=jnp.asarray(shared.value, jnp.bfloat16),
    )
    narrow = {**arrays, **narrow, "shared": shared}
    found = run(narrow, implementation=implementation)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(found, np.float32), oracle(arrays), rtol=0.05, atol=0.05
    )


@pytest.mark.meshes
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
@pytest.mark.parametrize(
    # Heads that tp divides, and heads that it does not; other meshes divide alike.
    ("spec", "kv_heads"),
    daily(
        [("dp2,tp4", 4), ("dp2,tp4", 2), ("fsdp4,tp2", 8), ("dp8", 4)],
        [("dp2,tp4", 4), ("dp2,tp4", 2)],
    ),
)
def test_a_mesh_changes_nothing(implementation, spec, kv_heads):
    """Each part counts its own groups; heads that tp does not divide are whole."""
    mesh = create_mesh(spec)
    split = mesh.size // mesh.shape["tp"]
    cases = [case(seed, batch=4, kv_heads=kv_heads) for seed in range(split)]

    def joined(name):
        return np.concatenate([one[name] for one in cases])

    names = ("query", "key", "value", "query_positions", "kv_positions")
    fields = zip(*(one["shared"][:4] for one in cases), strict=True)
    shared = SharedKeys(*map(np.concatenate, fields), cases[0]["shared"].members)
    arrays = {name: joined(name) for name in names}
    with jax.set_mesh(mesh):
        found = jax.jit(
            lambda arrays, shared: attend(
                **arrays,
                shared=SharedKeys(*shared, 2),
                softcap=2.0,
                sinks=jnp.asarray(SINKS),
                implementation=implementation,
                interpret=implementation == "pallas_tpu",
            )
        )(arrays, tuple(shared[:4]))
    expected = [oracle(one, softcap=2.0, sinks=SINKS) for one in cases]
    np.testing.assert_allclose(found, np.concatenate(expected), **CLOSE)


def test_what_is_refused():
    arrays = case()
    three = {name: arrays[name][:, :3] for name in ("key", "value")}
    with pytest.raises(ValueError, match="multiple of kv_heads; got 8 and 3"):
        run({**arrays, **three, "shared": None})
    empty = arrays["shared"]._replace(members=0)
    with pytest.raises(ValueError, match="at least one member; got 0"):
        run({**arrays, "shared": empty})
    with pytest.raises(ValueError, match="in both parts; value is None"):
        run({**arrays, "value": None})
    with pytest.raises(ValueError, match="decode_attention: window must be at least 1"):
        run(arrays, window=0)
    with pytest.raises(ValueError, match="decode_attention: softcap must be > 0 or No"):
        run(arrays, softcap=0.0)
    names = "query", "key", "value", "query_positions", "kv_positions"
    alone = {name: jnp.asarray(arrays[name]) for name in names}
    message = "decode_attention: pallas_tpu runs on tpu, and this program is for cpu"
    with pytest.raises(ValueError, match=message):
        attend(**alone, implementation="pallas_tpu")
