"""Log-probabilities whose bits depend on the row of logits alone.

Sampler and trainer both call `logprob_rows`, on logits that lie in memory, so that it
gives the same bits (see `kernels.row_tiles`).
"""

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.row_tiles import map_tiles
from jaxrl_post.types import Array, Float, Int

__all__ = ["logprob_rows"]


def logprob_rows(
    logits: Float[Array, "rows columns"],
    targets: Int[Array, " rows"],
    count: Int[Array, ""],
    axes: tuple[str, ...] = (),
) -> Float[Array, " rows"]:
    """log softmax(logits)[target], float32; 0 in tiles beyond `count`.

    Args:
        logits: float32, this device's columns; rows a multiple of TILE.
        targets: int32 in [0, vocab).
        count: number of rows to compute; they come first.
        axes: mesh axes of a `shard_map` that split the vocabulary.
    """
    columns = logits.shape[1]
    first = jax.lax.axis_index(axes) * columns if axes else jnp.int32(0)

    def parts(logits: Array, targets: Array) -> Array:
        top = logits.max(axis=1)
        total = jnp.exp(logits - top[:, None]).sum(axis=1)
        own = targets - first
        here = (own >= 0) & (own < columns)
        found = jnp.take_along_axis(logits, jnp.where(here, own, 0)[:, None], axis=1)
        return jnp.stack([top, total, jnp.where(here, found[:, 0], 0.0)], axis=1)

    of_parts = map_tiles(parts, [logits, targets], count)[None]
    if axes:
        of_parts = jax.lax.all_gather(of_parts[0], axes)

    def merged(*parts: Array) -> Array:
        top = parts[0][:, 0]
        for part in parts[1:]:
            top = jnp.maximum(top, part[:, 0])
        total, target = jnp.zeros_like(top), jnp.zeros_like(top)
        for part in parts:
            total = total + part[:, 1] * jnp.exp(part[:, 0] - top)
            target = target + part[:, 2]
        return target - (top + jnp.log(total))

    return map_tiles(merged, list(of_parts), count)
