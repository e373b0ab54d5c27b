"""Next tokens from logits that lie in memory: the definition, and the start of others.

Tokens are drawn by inverting the cumulative distribution with one uniform number per
row: the same distribution as Gumbel noise and argmax, without a random number for every
entry of the vocabulary. Logits are transposed to [vocab, rows], so that a CPU computes
the large matrix times the small one instead of the reverse, in two thirds of the time.

Over a vocabulary that a mesh splits, each device sums its own blocks of 128 entries.
The sums are gathered, so every device knows the chosen block, and the one that holds it
knows the token.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.next_token.inverse import BLOCK, find
from jaxrl_post.kernels.token_logprob import exponentials
from jaxrl_post.sharding import Rules, dividing_axes, on_parts
from jaxrl_post.types import Array, Float, Int

__all__ = ["Weighed", "draw", "invert", "select", "weigh"]


class Weighed(NamedTuple):
    """The distribution of each row, float32.

    Attributes:
        scaled: logits over their temperature, which is 1 for a greedy row.
        top: the largest of them.
        weights: exp(scaled - top).
        normalizer: log sum exp of `scaled`.
    """

    scaled: Float[Array, "vocab rows"]
    top: Float[Array, " rows"]
    weights: Float[Array, "vocab rows"]
    normalizer: Float[Array, " rows"]


def draw(
    logits: Float[Array, "rows vocab"],
    uniforms: Float[Array, " rows"],
    temperature: Float[Array, " rows"],
    rules: Rules,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Returns `next_token` of these logits."""
    mesh = jax.sharding.get_abstract_mesh()
    vocab: tuple[str, ...] = ()
    if not (mesh.empty or mesh.size == 1):
        vocab = dividing_axes("vocab", logits.shape[1], mesh, rules)
    if not vocab:
        return _draw(logits, uniforms, temperature)
    batch = P(dividing_axes("batch", logits.shape[0], mesh, rules))
    return on_parts(
        functools.partial(_draw, axes=vocab),
        in_specs=(P(*batch, vocab), batch, batch),
        out_specs=batch,
    )(logits, uniforms, temperature)


def _draw(
    logits: Array, uniforms: Array, temperature: Array, axes: tuple[str, ...] = ()
) -> tuple[Array, Array]:
    scaled, top, weights, normalizer = weigh(logits, temperature, axes)
    tokens, chosen = select(scaled, top, weights, uniforms, temperature, axes)
    return tokens, chosen - normalizer


def weigh(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    axes: tuple[str, ...] = (),
) -> Weighed:
    """The distributions of a device's logits.

    Args:
        logits: float32.
        temperature: 0 for a greedy row.
        axes: mesh axes of a `shard_map` that split the vocabulary.
    """
    scaled = logits.T / jnp.where(temperature == 0, 1.0, temperature)
    top = scaled.max(axis=0)
    if axes:
        top = jax.lax.pmax(top, axes)
        weights = jnp.exp(scaled - top)
        normalizer = jnp.log(jax.lax.psum(weights.sum(axis=0), axes)) + top
    else:
        weights, normalizer = exponentials(scaled, axis=0)
    return Weighed(scaled, top, weights, normalizer)


def select(
    scaled: Float[Array, "vocab rows"],
    top: Float[Array, " rows"],
    weights: Float[Array, "vocab rows"],
    uniforms: Float[Array, " rows"],
    temperature: Float[Array, " rows"],
    axes: tuple[str, ...] = (),
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """The token that each row's uniform number selects, and its entry of `scaled`.

    Args:
        scaled: as in `Weighed`.
        top: the largest entry of `scaled`.
        weights: of the tokens, 0 for those that may not be drawn.
        uniforms: in [0, 1).
        temperature: 0 for a greedy row, whose token is the first of its likeliest.
        axes: as in `weigh`.
    """
    greedy = temperature == 0
    # Greedy rows keep only their maxima; a uniform of 0 then selects the first of them.
    most_probable = (scaled == top).astype(jnp.float32)
    tokens, own, here = invert(
        jnp.where(greedy, most_probable, weights),
        jnp.where(greedy, 0.0, uniforms),
        axes,
    )
    chosen = jnp.take_along_axis(scaled, own[None], axis=0)[0]
    if axes:
        tokens = jax.lax.psum(jnp.where(here, tokens, 0), axes)
        chosen = jax.lax.psum(jnp.where(here, chosen, 0.0), axes)
    return tokens, chosen


def invert(
    weights: Float[Array, "vocab rows"],
    uniforms: Float[Array, " rows"],
    axes: tuple[str, ...] = (),
) -> tuple[Array, Array, Array]:
    """First index at which the cumulative sum of weights exceeds uniform x total.

    Sums over blocks of 128 entries select the block, a cumulative sum within the block
    selects the token; see `find`.

    Args:
        weights: not negative.
        uniforms: in [0, 1).
        axes: as in `weigh`.

    Returns:
        int32 [rows]: the token, its place among this device's weights, and whether it
        is one of them.
    """
    vocab, rows = weights.shape
    blocks = jnp.pad(weights, ((0, -vocab % BLOCK), (0, 0))).reshape(-1, BLOCK, rows)
    sums, number = blocks.sum(axis=1), jnp.int32(0)
    count = sums.shape[0]
    if axes:
        sums = jax.lax.all_gather(sums, axes, tiled=True)
        number = jax.lax.axis_index(axes)
    block, target = find(sums, uniforms * jnp.cumsum(sums, axis=0)[-1])
    own = block - number * count
    here = (own >= 0) & (own < count)
    own = jnp.clip(own, 0, count - 1)
    inside = jnp.take_along_axis(blocks, own[None, None], axis=0)[0]
    place = own * BLOCK + find(inside, target)[0]
    place = jnp.minimum(place, vocab - 1).astype(jnp.int32)
    return place + number * vocab, place, here
