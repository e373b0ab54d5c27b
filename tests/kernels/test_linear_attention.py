"""Linear attention in chunks against its definition, over random trees."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels.linear_attention import (
    CHUNK,
    LinearInputs,
    Places,
    linear_attention,
    linear_continued,
    linear_open,
    linear_rows,
    linear_step,
    plan_rows,
    plan_trees,
    reference,
)
from jaxrl_post.sharding import create_mesh
from tests.tiers import daily

RULES = pytest.mark.parametrize("rule", ["delta", "sum"])


def forest(seed: int, length: int, padding: int):
    """A row of random trees: the token before each, and its `ends`."""
    rng = np.random.default_rng(seed)
    previous, ends = np.full(length, -1, np.int32), np.zeros(length, np.int32)
    path: list[int] = []
    used = length - padding
    for token in range(used):
        draw = rng.random()
        if draw < 0.02:
            path = []
        elif draw < 0.1 and len(path) > 1:
            path = path[: rng.integers(1, len(path) + 1)]
        previous[token] = path[-1] if path else -1
        path.append(token)
        ends[token] = token + 1
    for token in reversed(range(used)):
        before = previous[token]
        if before >= 0:
            ends[before] = max(ends[before], ends[token])
    return previous, ends


def forests(length: int, rows: int = 2):
    made = [
        forest(row + 10 * length, length, min(row, length - 1)) for row in range(rows)
    ]
    previous, ends = map(np.stack, zip(*made, strict=True))
    return jnp.asarray(previous), jnp.asarray(ends)


def inputs(rows: int, length: int, rule: str = "delta", *, decay: float = -2.0):
    """Tokens for the delta rule, or whose values are added ("sum")."""
    rng, heads = np.random.default_rng(length), 4

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    query, key = draw(2, rows, length, 2, 8)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    made = LinearInputs(
        query,
        key,
        draw(rows, length, heads, 6),
        -np.exp(draw(rows, length, heads) + decay),
        1 / (1 + np.exp(-draw(rows, length, heads))) if rule == "delta" else None,
    )
    return jax.tree.map(jnp.asarray, made)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, tokens, weight):
    def total(tokens):
        out = function(tokens)
        return (out * weight).sum(), out

    (_, out), grads = jax.value_and_grad(total, has_aux=True)(tokens)
    return out, grads


# Strong decays, too: e^G is then 0 in float32.
@pytest.mark.parametrize("decay", [-2.0, 3.0])
@RULES
@pytest.mark.parametrize(
    "length", daily([1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 200, 300], {1, CHUNK + 1})
)
def test_chunks_of_trees_are_the_recurrence(length, rule, decay):
    previous, ends = forests(length)
    tokens = inputs(2, length, rule, decay=decay)
    rng = np.random.default_rng(1)
    weight = rng.normal(size=tokens.value.shape).astype(np.float32)
    weight *= (np.asarray(ends) > 0)[..., None, None]
    plan = plan_trees(previous, ends)
    found = with_gradients(lambda x: linear_attention(x, plan), tokens, weight)
    expected = with_gradients(
        lambda x: reference.linear_attention(x, previous)[0], tokens, weight
    )
    counted = weight != 0
    np.testing.assert_allclose(
        np.where(counted, found[0], 0),
        np.where(counted, expected[0], 0),
        atol=1e-5,
    )
    for one, other in zip(*map(jax.tree.leaves, (found[1], expected[1])), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
        assert np.isfinite(one).all()


@RULES
@pytest.mark.parametrize("length", [1, CHUNK, 300])
def test_exact_rows_are_the_recurrence(length, rule):
    previous, ends = forests(length, rows=3)
    tokens = inputs(3, length, rule)
    places = Places.of_trees(previous, ends)
    found, _ = jax.jit(lambda x: linear_rows(x, places, None))(tokens)
    expected, _ = reference.linear_attention(tokens, previous)
    counted = (ends > 0)[..., None, None]
    np.testing.assert_allclose(found, jnp.where(counted, expected, 0), atol=1e-6)


@RULES
@pytest.mark.parametrize("counts", [(0, 1, 5), (130, 64, 65), (63, 130, 0)])
def test_a_sequence_continues_from_its_state(counts, rule):
    """In chunks, in exact rows, and in steps of one token."""
    length = 130
    tokens, counted = inputs(3, length, rule), jnp.array(counts)
    begun = jnp.asarray(np.random.default_rng(3).normal(size=(3, 4, 8, 6)), jnp.float32)
    out, after = linear_continued(tokens, plan_rows(counted, length), begun)
    rows, last = linear_rows(tokens, Places.of_rows(counted, length), begun)
    step = jax.jit(linear_step)
    for row, count in enumerate(counts):
        state = begun[row : row + 1]
        for at in range(count):
            one = jax.tree.map(
                lambda x, row=row, at=at: x[row : row + 1, at : at + 1], tokens
            )
            expected, state = step(one, state)
            if at in (0, count // 2, count - 1):
                np.testing.assert_allclose(out[row, at], expected[0, 0], atol=1e-4)
                np.testing.assert_allclose(rows[row, at], expected[0, 0], atol=1e-4)
        np.testing.assert_allclose(after[row], state[0], atol=1e-4)
        np.testing.assert_allclose(last[row], state[0], atol=1e-4)


def drawn(rule: str, key_dim: int, value_dim: int, rows: int = 4):
    """One token of each row, for two key heads and four heads, and their states."""
    rng = np.random.default_rng(key_dim)

    def draw(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    tokens = LinearInputs(
        draw(rows, 1, 2, key_dim),
        draw(rows, 1, 2, key_dim) * key_dim**-0.5,
        draw(rows, 1, 4, value_dim),
        -jnp.abs(draw(rows, 1, 4)),
        jax.nn.sigmoid(draw(rows, 1, 4)) if rule == "delta" else None,
    )
    return tokens, draw(rows, 4, key_dim, value_dim)


# With keys alone that fill lanes, states are turned.
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 6), (128, 24), (16, 128)])
@RULES
def test_the_kernel_of_a_step(rule, key_dim, value_dim):
    tokens, state = drawn(rule, key_dim, value_dim)
    found = linear_step(tokens, state, implementation="pallas_tpu", interpret=True)
    expected = linear_step(tokens, state)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.meshes
def test_the_kernel_of_a_step_on_a_mesh():
    tokens, state = drawn("delta", 8, 6, rows=8)
    expected = linear_step(tokens, state)
    with jax.set_mesh(create_mesh("dp2,tp2", jax.devices()[:4])):
        step = functools.partial(
            linear_step, implementation="pallas_tpu", interpret=True
        )
        found = jax.jit(step)(tokens, state)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_kernel_that_cannot_take_a_step_is_refused():
    tokens, state = drawn("sum", 6, 6)
    with pytest.raises(ValueError, match="the width of keys must be multiples of 8"):
        linear_step(tokens, state, implementation="pallas_tpu", interpret=True)
    with pytest.raises(ValueError, match="linear_step: pallas_tpu runs on tpu"):
        linear_step(tokens, state, implementation="pallas_tpu")


@RULES
def test_a_row_without_a_token_keeps_its_state_to_the_bit(rule):
    tokens = jax.tree.map(lambda x: x[:, :1], inputs(2, 3, rule))
    still = tokens._replace(decay=0 * tokens.decay)
    if rule == "delta":
        still = still._replace(beta=0 * tokens.beta)
    else:
        still = still._replace(value=0 * tokens.value)
    state = jnp.full((2, 4, 8, 6), 1 / 3)
    _, after = linear_step(still, state)
    assert (after == state).all()


def test_too_many_states_are_no_numbers():
    """A comb: every other token begins a branch that lies behind all others."""
    length = 64 * CHUNK
    half = length // 2
    previous = jnp.arange(-1, length - 1)
    branches = jnp.arange(half, length)
    previous = previous.at[half:].set(length - 1 - branches)[None]
    # Token i < half has its own branch, the token at length - 1 - i.
    ends = jnp.where(
        jnp.arange(length) < half,
        length - jnp.arange(length),
        jnp.arange(length) + 1,
    )[None]
    plan = plan_trees(previous, ends)
    assert not plan.fits.any()
    tokens = inputs(1, length)
    assert jnp.isnan(linear_attention(tokens, plan)).all()
    places = Places.of_trees(previous, ends)
    assert not places.fits.any()


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("mesh", "rule"),
    daily(
        [("dp2", "delta"), ("tp2", "delta"), ("dp2,tp2", "delta"), ("dp2,tp4", "sum")],
        {("dp2,tp2", "delta"), ("dp2,tp4", "sum")},
    ),
)
def test_a_mesh_changes_nothing(mesh, rule):
    previous, ends = forests(150)
    tokens = inputs(2, 150, rule)
    weight = np.where((np.asarray(ends) > 0)[..., None, None], 0.5, 0)
    alone = with_gradients(
        lambda x: linear_attention(x, plan_trees(previous, ends)), tokens, weight
    )
    size = math.prod(int(axis[2:]) for axis in mesh.split(","))
    made = create_mesh(mesh, jax.devices()[:size])
    with jax.set_mesh(made):
        found = with_gradients(
            lambda x: linear_attention(x, plan_trees(previous, ends)), tokens, weight
        )
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5),
        found,
        alone,
    )


@RULES
@pytest.mark.parametrize("decay", [-2.0, 3.0])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_open_tokens_are_the_recurrence_up_to_any_of_them(length, rule, decay):
    """Outputs of all, and the state after each; states before may be of any size."""
    tokens = inputs(length + 1, length, rule, decay=decay)
    before = np.random.default_rng(2).normal(size=(length + 1, 4, 8, 6))
    state = before = jnp.asarray(before.astype(np.float32))
    outs, states = [], [before]
    for at in range(length):
        one = jax.tree.map(lambda each, at=at: each[:, at : at + 1], tokens)
        out, state = linear_step(one, state)
        outs.append(out)
        states.append(state)
    found, opened = linear_open(tokens, before)
    np.testing.assert_allclose(found, jnp.concatenate(outs, axis=1), atol=1e-5)
    # Row i counts i tokens.
    counts = jnp.arange(length + 1, dtype=jnp.int32)
    after = opened.after(counts)
    expected = jnp.stack(states)[counts, counts]
    np.testing.assert_allclose(after, expected, atol=1e-5)
    np.testing.assert_array_equal(after[0], before[0])


def test_what_does_not_count_of_open_tokens_changes_no_state():
    """Not even by what is not finite."""
    tokens = inputs(1, 4)
    spoiled = jax.tree.map(lambda each: each.at[:, 2:].set(jnp.nan), tokens)
    state = jnp.ones((1, 4, 8, 6), jnp.float32)
    counts = jnp.array([2], jnp.int32)
    found, expected = (
        linear_open(each, state)[1].after(counts) for each in (spoiled, tokens)
    )
    np.testing.assert_array_equal(found, expected)
