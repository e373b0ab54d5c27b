"""Embedding lookup with a gradient that is summed in float32.

In bfloat16 a sum of equal terms stops growing at 256 terms, but frequent tokens occur
thousands of times in a batch.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.sharding import Rules, TableSplit, constrain, dividing_axes, on_parts
from jaxrl_post.types import Array, Float, Int

__all__ = ["lookup"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(
    table: Float[Array, "vocab hidden"], tokens: Int[Array, " tokens"], rules: Rules
) -> Float[Array, "tokens hidden"]:
    """Returns table[tokens].

    Args:
        table: any float dtype; the gradient has the same.
        tokens: int32 in [0, vocab).
        rules: mesh axes of table and tokens, on the mesh of `jax.set_mesh`.

    >>> from jaxrl_post.sharding import DEFAULT_RULES
    >>> often = jnp.zeros(4096, jnp.int32)
    >>> table = jnp.ones((1, 1), jnp.bfloat16)
    >>> jax.grad(lambda table: lookup(table, often, DEFAULT_RULES).sum())(table).item()
    4096.0
    """
    # Gather whole rows first, because every device looks up its own tokens.
    return constrain(table, ("vocab", "hidden"), rules)[tokens]


def _forward(table: Array, tokens: Array, rules: Rules) -> tuple[Array, Any]:
    return lookup(table, tokens, rules), (table, tokens)


def _backward(rules: Rules, saved: Any, cotangent: Array) -> tuple[Array, None]:
    table, tokens = saved

    def local(split: TableSplit, tokens: Array, cotangent: Array) -> Array:
        rows = table.shape[0] // math.prod(mesh.shape[axis] for axis in split.vocab)
        own = tokens - split.first_row(rows)
        # A negative index would count from the end; index `rows` is dropped.
        own = jnp.where(own >= 0, own, rows)
        total = jnp.zeros((rows, table.shape[1]), jnp.float32)
        total = total.at[own].add(cotangent.astype(jnp.float32), mode="drop")
        return split.total(total).astype(table.dtype)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local(TableSplit(), tokens, cotangent), None
    batch = dividing_axes("batch", tokens.shape[0], mesh, rules)
    split = TableSplit.of(table.shape, batch, mesh, rules)
    run = on_parts(
        functools.partial(local, split),
        in_specs=(P(batch), P(batch)),
        out_specs=split.gradient,
    )
    return run(tokens, cotangent), None


lookup.defvjp(_forward, _backward)
