"""The passes of `parts.draw` as XLA programs: a loop over tiles of the vocabulary.

A tile of logits stays in a CPU's cache from its product to its sums.
"""

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.next_token.inverse import BLOCK
from jaxrl_post.kernels.next_token.parts import ENTRIES, Layout, Statistics, scaled
from jaxrl_post.kernels.token_logprob.reference import MASKED
from jaxrl_post.types import Array, Float, Int

__all__ = ["TILE", "logits", "statistics"]

# Columns of a tile.
TILE = 2048


def statistics(
    hidden: Float[Array, "rows hidden"],
    weight: Float[Array, "columns hidden"],
    inverse: Float[Array, " rows"],
    layout: Layout,
) -> Statistics:
    """Implements `Passes`."""
    rows, columns = hidden.shape[0], weight.shape[0]
    tile = min(TILE, columns)
    count = columns // tile

    def visit(before: Statistics, table: Array, number: Array | int) -> Statistics:
        """The sums of a tile, and what has been the largest logit so far."""
        z = jnp.einsum("vd,td->vt", table, hidden, preferred_element_type=jnp.float32)
        z = scaled(z, inverse, layout)
        missing = -z.shape[0] % BLOCK
        z = jnp.pad(z, ((0, missing), (0, 0)), constant_values=MASKED)
        z = z.reshape(-1, ENTRIES, rows)
        highest = z.max(axis=1)
        own = highest.max(axis=0)
        top = jnp.maximum(before.top, own)
        part = jnp.argmax(highest == own, axis=0).astype(jnp.int32)
        part = jnp.where(
            own > before.top, number * (tile // ENTRIES) + part, before.likeliest
        )
        return Statistics(jnp.exp(z - top).sum(axis=1), top, part)

    def step(
        before: Statistics, number: Array
    ) -> tuple[Statistics, tuple[Array, Array]]:
        table = jax.lax.dynamic_slice_in_dim(weight, number * tile, tile)
        found = visit(before, table, number)
        return found._replace(sums=before.sums), (found.sums, found.top)

    nothing = Statistics(
        jnp.zeros((0, rows)),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.int32),
    )
    number = jnp.arange(count, dtype=jnp.int32)
    last, (sums, tops) = jax.lax.scan(step, nothing, number)
    if columns % tile:
        last = visit(last, weight[count * tile :], count)
    sums = (sums * jnp.exp(tops - last.top)[:, None]).reshape(-1, rows)
    return last._replace(sums=jnp.concatenate([sums, last.sums]))


def logits(
    hidden: Float[Array, "rows hidden"],
    weight: Float[Array, "columns hidden"],
    parts: Int[Array, " rows"],
    layout: Layout,
) -> Float[Array, "entries rows"]:
    """Implements `Passes`."""
    columns = parts[:, None] * ENTRIES + jnp.arange(ENTRIES, dtype=jnp.int32)
    return jnp.einsum(
        "tvd,td->vt",
        weight.at[columns].get(mode="clip"),
        hidden,
        preferred_element_type=jnp.float32,
    )
