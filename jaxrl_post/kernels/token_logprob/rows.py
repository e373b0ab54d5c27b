"""Logits and log-probabilities whose bits depend on their row alone.

Sampler and trainer both call these functions, `logprob_rows` on logits that lie in
memory, so that they give the same bits (see `kernels.row_tiles`).
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.row_tiles import map_tiles
from jaxrl_post.kernels.token_logprob.reference import MASKED
from jaxrl_post.types import Array, Float, Int

__all__ = ["ExactLogits", "RowLogits", "logit_rows", "logprob_rows"]


@runtime_checkable
class RowLogits(Protocol):
    """Computes float32 logits [rows, columns] before they are divided by a temperature.

    From a part of the unembedding [columns, hidden] and hidden states [rows, hidden].
    """

    def __call__(self, weight: Array, hidden: Array, /) -> Array: ...


class ExactLogits(NamedTuple):
    """Logits as exact mode computes them.

    Attributes:
        logits: before the temperature.
        temperature: > 0, divides them.
        tile: rows of a tile (`kernels.row_tiles`).
    """

    logits: RowLogits
    temperature: float
    tile: int


def logit_rows(
    logits: RowLogits,
    weight: Float[Array, "columns hidden"],
    hidden: Float[Array, "rows hidden"],
    scale: Float[Array, " rows"],
    count: Int[Array, ""],
    tile: int,
) -> Float[Array, "rows columns"]:
    """Float32 logits times `scale`; 0 in tiles beyond `count`.

    Args:
        logits: of a tile.
        weight: this device's part of the unembedding.
        hidden: rows a multiple of `tile`.
        scale: float32, 1 over the temperature.
        count: number of rows to compute; they come first.
        tile: rows of a tile.
    """

    def scaled(hidden: Array, scale: Array) -> Array:
        return logits(weight, hidden) * scale[:, None]

    return map_tiles(scaled, [hidden, scale], count, tile)


def logprob_rows(
    logits: Float[Array, "rows columns"],
    targets: Int[Array, " rows"],
    count: Int[Array, ""],
    tile: int,
    axes: tuple[str, ...] = (),
    kept: Int[Array, "rows kept"] | None = None,
) -> tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]:
    """log softmax(logits)[target], the normaliser, and the log of the kept mass.

    They are float32, and 0 in tiles beyond `count`.

    Args:
        logits: float32, this device's columns; rows a multiple of `tile`.
        targets: int32 in [0, vocab).
        count: number of rows to compute; they come first.
        tile: rows of a tile.
        axes: mesh axes of a `shard_map` that split the vocabulary.
        kept: as in `token_logprob`; the last result is 0 without ids.
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

    def from_all(found: Array) -> list[Array]:
        return list(jax.lax.all_gather(found, axes)) if axes else [found]

    def merged(*parts: Array) -> tuple[Array, Array]:
        top = parts[0][:, 0]
        for part in parts[1:]:
            top = jnp.maximum(top, part[:, 0])
        total, target = jnp.zeros_like(top), jnp.zeros_like(top)
        for part in parts:
            total = total + part[:, 1] * jnp.exp(part[:, 0] - top)
            target = target + part[:, 2]
        normalizer = top + jnp.log(total)
        return target - normalizer, normalizer

    of_parts = from_all(map_tiles(parts, [logits, targets], count, tile))
    logprobs, normalizers = map_tiles(merged, of_parts, count, tile)
    if kept is None:
        return logprobs, normalizers, jnp.zeros_like(logprobs)

    def mass(logits: Array, normalizers: Array, kept: Array) -> Array:
        own = kept - first
        here = (kept >= 0) & (own >= 0) & (own < columns)
        found = jnp.take_along_axis(logits, jnp.where(here, own, 0), axis=1)
        log_p = jnp.where(here, found - normalizers[:, None], MASKED)
        # Relative to their own maximum: all of them may be far below the others.
        top = log_p.max(axis=1)
        total = jnp.where(here, jnp.exp(log_p - top[:, None]), 0.0).sum(axis=1)
        return jnp.stack([top, total], axis=1)

    def log_mass(*masses: Array) -> Array:
        top = masses[0][:, 0]
        for part in masses[1:]:
            top = jnp.maximum(top, part[:, 0])
        total = jnp.zeros_like(top)
        for part in masses:
            total = total + part[:, 1] * jnp.exp(part[:, 0] - top)
        return jnp.where(total > 0, top + jnp.log(total), 0.0)

    masses = from_all(map_tiles(mass, [logits, normalizers, kept], count, tile))
    return logprobs, normalizers, map_tiles(log_mass, masses, count, tile)
