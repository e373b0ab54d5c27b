"""Linear attention of exact mode: a state's bits depend on its path alone.

Sampler and trainer take the same step for every token: a computation of one size, apart
from all others, in a loop over rows and tokens. A trainer's row is a forest in which a
branch follows its parent's other branches; the states to which a later token returns
lie on a stack.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.linear_attention.inputs import LinearInputs
from jaxrl_post.kernels.row_tiles import isolated
from jaxrl_post.types import Array, Float, Int

__all__ = ["Places", "linear_rows"]

# Branching tokens of a path; `data.packing.sharing` makes trees of at most 100 nodes.
MOST = 128


class Places(NamedTuple):
    """The states that the tokens of rows begin with, and those that are kept.

    Attributes:
        entries: int32; -1: the state after the token before it in the row, or the
            row's first; otherwise a place on the stack, `MOST` for zeros.
        kept: int32, place on the stack for the state after the token; `MOST` or more
            for none.
        counts: int32, tokens of a row; they come first.
        fits: whether the stack holds all states.
    """

    entries: Int[Array, "batch length"]
    kept: Int[Array, "batch length"]
    counts: Int[Array, " batch"]
    fits: Array

    @classmethod
    def of_rows(cls, counts: Int[Array, " batch"], length: int) -> "Places":
        """Places in rows that each continue one sequence."""
        shape = counts.shape[0], length
        entries = jnp.full(shape, -1, jnp.int32)
        kept = jnp.full(shape, MOST, jnp.int32)
        return cls(entries, kept, counts, jnp.ones(shape[:1], jnp.bool_))

    @classmethod
    def of_trees(
        cls, previous: Int[Array, "batch length"], ends: Int[Array, "batch length"]
    ) -> "Places":
        """Places in packed rows; the arguments are as in `plan_trees`."""
        rows, length = ends.shape
        at = jnp.arange(length, dtype=jnp.int32)
        counted = ends > 0
        returns = counted & (previous >= 0) & (previous != at - 1)
        numbers = jnp.arange(rows, dtype=jnp.int32)[:, None]
        wanted = jnp.where(returns, previous, length)
        branches = jnp.zeros((rows, length), jnp.bool_)
        branches = branches.at[numbers, wanted].set(True, mode="drop")
        # A branching token's place is the number of those on its path before it.
        changes = jnp.zeros((rows, length + 1), jnp.int32)
        changes = changes.at[numbers, at].add(branches.astype(jnp.int32))
        changes = changes.at[numbers, ends].add(-branches.astype(jnp.int32))
        depth = jnp.cumsum(changes[:, :length], axis=1) - 1
        kept = jnp.where(branches, depth, MOST)
        found = jnp.take_along_axis(depth, jnp.maximum(previous, 0), axis=1)
        entries = jnp.where(returns, found, jnp.where(previous < 0, MOST, -1))
        return cls(
            entries.astype(jnp.int32),
            kept.astype(jnp.int32),
            counted.sum(axis=1, dtype=jnp.int32),
            (jnp.where(branches, depth, 0) < MOST).all(axis=1),
        )


def linear_rows(
    inputs: LinearInputs,
    places: Places,
    state: Float[Array, "batch heads key_dim value_dim"] | None,
) -> tuple[
    Float[Array, "batch length heads value_dim"],
    Float[Array, "batch heads key_dim value_dim"],
]:
    """Returns o of the counted tokens, and the states after them.

    Args:
        inputs: any float dtype, on one device.
        places: of the tokens.
        state: float32, of each row before its first token; None for zeros.

    Returns:
        float32; 0 for other tokens, and NaN in rows that the stack does not hold.
    """
    tokens = jax.tree.map(lambda each: each.astype(jnp.float32), inputs.by_head())
    rows, length, heads, dim = tokens.value.shape
    shape = heads, tokens.key.shape[3], dim
    after = jnp.zeros((rows, *shape), jnp.float32) if state is None else state
    # The sampler's rows keep nothing on a stack.
    trees = state is None
    stack = jnp.zeros((min(MOST, length) if trees else 0, *shape), jnp.float32)

    def row(number: Array, carry: tuple[Array, Array, Array]) -> tuple:
        after, outs, stack = carry
        own = jax.tree.map(lambda each: each[number], tokens)
        entries, kept = places.entries[number], places.kept[number]
        count = places.counts[number]

        def step(at: Array, carry: tuple[Array, Array, Array]) -> tuple:
            now, outs, stack = carry
            if trees:
                entry = entries[at]
                now = jax.lax.cond(
                    entry < 0,
                    lambda: now,
                    lambda: stack.at[entry].get(mode="fill", fill_value=0),
                )
            token = jax.tree.map(lambda each: each[at], own)
            out, now = isolated(_step, at < count, now, token)
            outs = outs.at[number, at].set(out)
            if trees:
                stack = _kept(stack, kept[at], now)
            return now, outs, stack

        now, outs, stack = jax.lax.fori_loop(
            0, count, step, (after[number], outs, stack)
        )
        return after.at[number].set(now), outs, stack

    outs = jnp.zeros((rows, length, heads, dim), jnp.float32)
    after, outs, _ = jax.lax.fori_loop(0, rows, row, (after, outs, stack))
    return jnp.where(places.fits[:, None, None, None], outs, jnp.nan), after


def _kept(stack: Array, place: Array, state: Array) -> Array:
    put: Callable[[], Array] = lambda: stack.at[place].set(state, mode="drop")  # noqa: E731
    return jax.lax.cond(place < MOST, put, lambda: stack)


def _step(state: Array, token: LinearInputs) -> tuple[Array, Array]:
    """One token of one row; heads come first in every array."""
    query, key, written, decay, beta = token
    state = jnp.exp(decay)[:, None, None] * state
    if beta is not None:
        known = jnp.sum(state * key[..., None], axis=1)
        written = beta[:, None] * (written - known)
    state = state + key[..., None] * written[:, None]
    return jnp.sum(state * query[..., None], axis=1), state
