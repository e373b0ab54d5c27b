"""Next tokens in one pass over the vocabulary, without its logits in memory.

An implementation gives two functions. `statistics` passes over the vocabulary's matrix
once and leaves the sum of exponentials of every 16 logits. The cumulative distribution
of these sums tells which 16 logits a row's token is among, and `logits` computes them
again.

So the noise, its meaning and the order of the tokens are as in `reference.py`: a
token is another one only where its uniform number lies within rounding of a border
between two, or where the largest logits differ by no more than rounding.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.next_token.inverse import BLOCK, find, first
from jaxrl_post.kernels.token_logprob.reference import MASKED
from jaxrl_post.types import Array, Float, Int

__all__ = ["ENTRIES", "Layout", "Passes", "Statistics", "draw", "scaled"]

# Logits of a part. Fewer make more sums, more make more logits that are computed again.
# On a TPU a tile of bfloat16 has as many sublanes.
ENTRIES = 16


class Layout(NamedTuple):
    """Static facts of one call.

    Attributes:
        divisor: of the logits, before the softcap.
        softcap: c in c tanh(logits / c); None for no cap.
        axes: mesh axes over which the vocabulary is split, () if it is whole.
        tiles: rows and columns of a Pallas kernel's tiles; None: as it chooses.
        interpret: False to compile a Pallas kernel, or how to interpret it.
    """

    divisor: float = 1.0
    softcap: float | None = None
    axes: tuple[str, ...] = ()
    tiles: tuple[int, int] | None = None
    interpret: Any = False


class Statistics(NamedTuple):
    """Results of one pass over a device's columns.

    Attributes:
        sums: float32, of exp(z - top) of each part; parts are a multiple of 8.
        top: float32, the largest z.
        likeliest: int32, the first part that has it.
    """

    sums: Float[Array, "parts rows"]
    top: Float[Array, " rows"]
    likeliest: Int[Array, " rows"]


@runtime_checkable
class Passes(Protocol):
    """A module that computes logits; z = `scaled` of them."""

    def statistics(
        self, hidden: Array, weight: Array, inverse: Array, layout: Layout
    ) -> Statistics:
        """Passes over all rows of `weight`."""
        ...

    def logits(
        self, hidden: Array, weight: Array, parts: Array, layout: Layout
    ) -> Float[Array, "entries rows"]:
        """The logits of one part for each row, int32 [rows]; any behind the last."""
        ...


def draw(
    hidden: Float[Array, "rows hidden"],
    weight: Float[Array, "columns hidden"],
    uniforms: Float[Array, " rows"],
    temperature: Float[Array, " rows"],
    passes: Passes,
    layout: Layout,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Returns `next_token`; `weight` has this device's rows of the vocabulary."""
    columns, rows = weight.shape[0], hidden.shape[0]
    greedy = temperature == 0
    inverse = 1.0 / jnp.where(greedy, 1.0, temperature)
    sums, top, likeliest = passes.statistics(hidden, weight, inverse, layout)
    own_top, here = top, None
    if layout.axes:
        tops = jax.lax.all_gather(own_top, layout.axes)
        top = tops.max(axis=0)
        sums = sums * jnp.exp(own_top - top)
    blocks = sums.reshape(-1, BLOCK // ENTRIES, rows)
    of_blocks = blocks.sum(axis=1)
    total = jnp.cumsum(of_blocks, axis=0)[-1]
    target = uniforms * total
    if layout.axes:
        totals = jax.lax.all_gather(total, layout.axes)
        total = jnp.cumsum(totals, axis=0)[-1]
        device, target = find(totals, uniforms * total)
        device = jnp.where(greedy, first(tops == top, tops), device)
        here = device == jax.lax.axis_index(layout.axes)
    block, target = find(of_blocks, target)
    inside = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]
    part, target = find(inside, target)
    part = jnp.minimum(block * (BLOCK // ENTRIES) + part, (columns - 1) // ENTRIES)
    part = jnp.where(greedy, likeliest, part)
    if here is not None:
        # One part for all rows whose token another device has: it is copied once.
        part = jnp.where(here, part, 0)
    column = part * ENTRIES + jnp.arange(ENTRIES, dtype=jnp.int32)[:, None]
    again = scaled(passes.logits(hidden, weight, part, layout), inverse, layout)
    again = jnp.where(column < columns, again, MASKED)
    most_probable = (again == again.max(axis=0)).astype(jnp.float32)
    place, _ = find(
        jnp.where(greedy, most_probable, jnp.exp(again - top)),
        jnp.where(greedy, 0.0, target),
    )
    token = part * ENTRIES + place
    chosen = jnp.take_along_axis(again, place[None], axis=0)[0]
    if here is not None:
        token = token + jax.lax.axis_index(layout.axes) * columns
        token = jax.lax.psum(jnp.where(here, token, 0), layout.axes)
        chosen = jax.lax.psum(jnp.where(here, chosen, 0.0), layout.axes)
    # The logit that was computed again may be rounded to another side than the sum.
    return token, jnp.minimum(chosen - top - jnp.log(total), 0.0)


def scaled(
    logits: Float[Array, "columns rows"],
    inverse: Float[Array, "*#one rows"],
    layout: Layout,
) -> Float[Array, "columns rows"]:
    """Logits with divisor and cap, times one over the temperature."""
    if layout.divisor != 1.0:
        logits = logits * (1.0 / layout.divisor)
    if layout.softcap is not None:
        logits = layout.softcap * jnp.tanh(logits * (1.0 / layout.softcap))
    return logits * inverse
