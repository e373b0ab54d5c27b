"""The mark of no key, codes as numbers, and the rows of each device of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.decode_attention import QuantizedEntries
from jaxrl_post.sharding import Rules, dividing_axes, on_parts
from jaxrl_post.types import Array

__all__ = ["NO_KEY", "by_batch", "plain"]

NO_KEY = jnp.iinfo(jnp.int32).max


def plain(entries: Any, dtype: Any) -> Array:
    """Entries of a cache, or of codes, in a dtype."""
    if isinstance(entries, QuantizedEntries):
        entries = entries.dequantize()
    return entries.astype(dtype)


def by_batch(
    function: Callable[..., Array],
    rules: Rules,
    query: Array,
    *others: Any,
    heads: int | None = None,
) -> Array:
    """Lets each device compute its own rows, by local numbers of groups.

    Args:
        function: of `query` [batch, queries, heads, dim] and the others, which have one
            key/value head.
        rules: logical axis to mesh axes.
        query: decides how the batch is split.
        *others: trees of arrays whose first dimension is split likewise.
        heads: number of heads, if they are split too; the result then has them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(query, *others)
    batch = dividing_axes("batch", query.shape[0], mesh, rules) or None
    of_query = of_result = P(batch)
    if heads is not None:
        split = dividing_axes("heads", heads, mesh, rules) or None
        of_query = of_result = P(batch, None, split)
    local = on_parts(
        function, in_specs=(of_query, *(P(batch) for _ in others)), out_specs=of_result
    )
    return local(query, *others)
