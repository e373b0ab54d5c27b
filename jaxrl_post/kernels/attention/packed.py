"""Attention of packed rows: one program around the tiles of every implementation.

An implementation computes tiles of queries x keys. Here are what all of them have in
common: sinks, the gradient's parts that belong to a query, and rows that are cut into
chunks, one on each device along a ring. Then keys and values go from device to device;
every device adds what its own queries see in the chunk that it holds, and merges the
parts by their log-sum-exp. In the backward pass the gradients of keys and values go
round with them.

References:
    Liu et al., Ring Attention, arXiv:2310.01889.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrl_post.kernels.attention.reference import MASKED
from jaxrl_post.types import Array, Int

__all__ = [
    "Facts",
    "Operands",
    "Plan",
    "Tiles",
    "Towards",
    "attend_packed",
    "padded_facts",
]


class Facts(NamedTuple):
    """Facts that decide whether a token sees another one.

    The token at index i sees the token at index j exactly if j <= i < ends[j], and with
    a window w only if their positions differ by less than w.

    Attributes:
        indices: int32, the token's place in its row.
        positions: int32, along the token's path.
        ends: int32, as in `attention`.
    """

    indices: Int[Array, "batch length"]
    positions: Int[Array, "batch length"]
    ends: Int[Array, "batch length"]


def padded_facts(facts: Facts, length: int) -> Facts:
    """Facts of `length` tokens; no token sees the added ones."""
    widths = (0, 0), (0, length - facts.ends.shape[1])
    # Added queries must not widen the range of a block's indices and positions.
    indices, positions = (jnp.pad(part, widths, mode="edge") for part in facts[:2])
    return Facts(indices, positions, jnp.pad(facts.ends, widths))


class Operands(NamedTuple):
    """Queries, and the keys and values to which they attend.

    Attributes:
        query: [batch, length, heads, head_dim].
        key: [batch, kv_heads, length, head_dim].
        value: [batch, kv_heads, length, value_dim].
        of_query: of the queries.
        of_key: of the keys.
    """

    query: Array
    key: Array
    value: Array
    of_query: Facts
    of_key: Facts


class Towards(NamedTuple):
    """Inputs of the backward pass.

    Attributes:
        cotangent: of the result, [batch, length, heads, value_dim].
        normalizer: log-sum-exp of all scores of a query, also of those with other keys;
            float32 [batch, length, heads].
        inner: result times cotangent, summed over value_dim; like `normalizer`.
    """

    cotangent: Array
    normalizer: Array
    inner: Array


@runtime_checkable
class Tiles(Protocol):
    """An implementation, with its static settings; hashable."""

    def forward(
        self, operands: Operands, dtype: DTypeLike, *, aligned: bool
    ) -> tuple[Array, Array]:
        """Attends from queries to keys.

        Args:
            operands: arrays and facts.
            dtype: of the first result.
            aligned: whether queries and keys are the same tokens, in order.

        Returns:
            [batch, length, heads, value_dim], 0 for a query that sees no key, and the
            log-sum-exp of the scores, float32 [batch, length, heads], far below any
            score if there is none.
        """
        ...

    def backward(
        self, operands: Operands, towards: Towards, dtype: DTypeLike, *, aligned: bool
    ) -> tuple[Array, Array, Array]:
        """Returns the gradients of query, key and value, in `dtype`."""
        ...


class Plan(NamedTuple):
    """Static facts of one call.

    Attributes:
        tiles: what computes.
        ring: axes of a `shard_map` along which a row's chunks lie; () if a row is
            whole.
        devices: number of devices along `ring`.
    """

    tiles: Tiles
    ring: tuple[str, ...] = ()
    devices: int = 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_packed(
    plan: Plan,
    query: Array,
    key: Array,
    value: Array,
    facts: Facts,
    sinks: Array | None,
) -> Array:
    """Attends from every token to the tokens that it sees.

    Args:
        plan: static.
        query: [batch, length, heads, head_dim], of this device's chunks.
        key: [batch, kv_heads, length, head_dim].
        value: [batch, kv_heads, length, value_dim].
        facts: of these tokens.
        sinks: [heads], or None.

    Returns:
        [batch, length, heads, value_dim] in `query`'s dtype; 0 for a query that sees no
        key.
    """
    return _forward(plan, query, key, value, facts, sinks)[0]


def _forward(
    plan: Plan,
    query: Array,
    key: Array,
    value: Array,
    facts: Facts,
    sinks: Array | None,
) -> tuple[Array, Any]:
    # Parts that are merged or scaled are rounded once, at the end.
    whole = plan.devices == 1 and sinks is None
    dtype = query.dtype if whole else jnp.float32
    run = functools.partial(plan.tiles.forward, dtype=dtype, aligned=plan.devices == 1)
    if plan.devices == 1:
        out, normalizer = run(Operands(query, key, value, facts, facts))
    else:

        def add(state: tuple[Array, Array], chunk: tuple) -> tuple[Array, Array]:
            key, value, of_key = chunk
            return _merged(state, run(Operands(query, key, value, facts, of_key)))

        empty = (
            jnp.zeros((*query.shape[:3], value.shape[-1]), jnp.float32),
            jnp.full(query.shape[:3], MASKED, jnp.float32),
        )
        out, normalizer = _around(plan, add, empty, (key, value, facts))
    if sinks is not None:
        # A sink is a score that every query sees, with a value of 0.
        before = normalizer
        normalizer = jnp.logaddexp(before, sinks.astype(jnp.float32))
        out = out * jnp.exp(before - normalizer)[..., None]
    out = out.astype(query.dtype)
    return out, (query, key, value, facts, sinks, out, normalizer)


def _backward(plan: Plan, saved: tuple, cotangent: Array) -> tuple:
    query, key, value, facts, sinks, out, normalizer = saved
    # The gradient of a softmax: p (dp - sum p dp), and the sum is out . d out.
    inner = (out.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(axis=-1)

    def run(key: Array, value: Array, of_key: Facts, dtype: DTypeLike) -> tuple:
        operands = Operands(query, key, value, facts, of_key)
        towards = Towards(cotangent, normalizer, inner)
        aligned = plan.devices == 1
        return plan.tiles.backward(operands, towards, dtype, aligned=aligned)

    if plan.devices == 1:
        gradients = run(key, value, facts, query.dtype)
    else:

        def add(state: tuple, chunk: tuple) -> tuple:
            (d_query, of_chunk), (key, value, of_key) = state, chunk
            new_query, *new = run(key, value, of_key, jnp.float32)
            # They come from the device that had this chunk before.
            before = _next(plan, of_chunk)
            return d_query + new_query, jax.tree.map(jnp.add, before, tuple(new))

        zeros = [jnp.zeros(each.shape, jnp.float32) for each in (query, key, value)]
        state = zeros[0], tuple(zeros[1:])
        d_query, of_chunk = _around(plan, add, state, (key, value, facts))
        gradients = d_query, *_next(plan, of_chunk)
    d_sinks = None
    if sinks is not None:
        share = jnp.exp(sinks.astype(jnp.float32) - normalizer)
        d_sinks = -(share * inner).sum(axis=(0, 1)).astype(sinks.dtype)
    arrays = zip(gradients, (query, key, value), strict=True)
    return *(found.astype(of.dtype) for found, of in arrays), None, d_sinks


attend_packed.defvjp(_forward, _backward)


def _around[S](plan: Plan, add: Callable[[S, tuple], S], state: S, chunk: tuple) -> S:
    """Adds all chunks of the ring to a state, this device's own first."""

    def one(_: Array, carry: tuple[S, tuple]) -> tuple[S, tuple]:
        state, chunk = carry
        # Neither needs the other, so that the chunk travels during the computation.
        return add(state, chunk), _next(plan, chunk)

    state, chunk = jax.lax.fori_loop(0, plan.devices - 1, one, (state, chunk))
    return add(state, chunk)


def _next(plan: Plan, tree: Any) -> Any:
    """Hands arrays to the next device of the ring."""
    pairs = [(i, (i + 1) % plan.devices) for i in range(plan.devices)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, plan.ring, pairs), tree)


def _merged(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple:
    """Attention to the keys of two parts."""
    normalizer = jnp.logaddexp(one[1], other[1])
    parts = (out * jnp.exp(of - normalizer)[..., None] for out, of in (one, other))
    return sum(parts), normalizer
