"""From logits to a token and its log-probability.

Tokens are drawn by inverting the cumulative distribution with one uniform number a row:
the same distribution as Gumbel noise and argmax, without a random number for every
entry of the vocabulary. Logits lie [vocab, rows] here: so the CPU multiplies the large
matrix with the small one, not the other way round, in two thirds of the time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.token_logprob import exponentials
from jaxrl_post.types import Array, Float, HostOrDevice, Int

__all__ = ["Sampled", "SamplingArrays", "sample"]

BLOCK = 128


class SamplingArrays(NamedTuple):
    """Sampling parameters, one entry a row; see `SamplingParams`."""

    temperature: Float[HostOrDevice, " rows"]
    top_k: Int[HostOrDevice, " rows"]
    top_p: Float[HostOrDevice, " rows"]
    min_p: Float[HostOrDevice, " rows"]


class Sampled(NamedTuple):
    """Token ids, their log-probs under the full softmax, and the log-mass kept."""

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    log_masses: Float[Array, " rows"]


def sample(
    logits: Float[Array, "rows vocab"],
    uniforms: Float[Array, " rows"],
    sampling: SamplingArrays,
    *,
    truncate: bool,
) -> Sampled:
    """Draws one token a row.

    Args:
        logits: float32.
        uniforms: in [0, 1), one a row; all the randomness there is.
        sampling: per-row parameters.
        truncate: static; False promises that no row uses top-k, top-p or min-p.

    Returns:
        int32 tokens, float32 log-probs and log-masses.

    >>> import jax.numpy as jnp
    >>> full = SamplingArrays(
    ...     jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.ones(1), jnp.zeros(1)
    ... )
    >>> even = jnp.zeros((1, 4))  # four tokens, a quarter each
    >>> sample(even, jnp.array([0.6]), full, truncate=False).tokens
    Array([2], dtype=int32)
    """
    greedy = sampling.temperature == 0
    scaled = logits.T / jnp.where(greedy, 1.0, sampling.temperature)
    weights, normalizer = exponentials(scaled, axis=0)
    kept = weights
    if truncate:
        kept = jnp.where(_kept(scaled.T, sampling).T, weights, 0.0)
    # The most probable token alone, the first of several: what argmax gives.
    most_probable = (scaled == scaled.max(axis=0)).astype(jnp.float32)
    tokens = _invert(
        jnp.where(greedy, most_probable, kept), jnp.where(greedy, 0.0, uniforms)
    ).astype(jnp.int32)
    logprobs = jnp.take_along_axis(scaled, tokens[None], axis=0)[0] - normalizer
    log_masses = jnp.zeros_like(logprobs)
    if truncate:
        share = kept.sum(axis=0) / weights.sum(axis=0)
        log_masses = jnp.where(greedy, 0.0, jnp.log(share))
    return Sampled(tokens, logprobs, log_masses)


def _kept(scaled: Array, sampling: SamplingArrays) -> Array:
    """What top-k, top-p and min-p keep, [rows, vocab]; ties with the last stay."""
    vocab = scaled.shape[1]
    descending = -jnp.sort(-scaled, axis=-1)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    top_k = jnp.where(sampling.top_k == 0, vocab, sampling.top_k)
    by_rank = jnp.arange(vocab, dtype=jnp.int32) < top_k[:, None]
    # A token is needed as long as the more probable ones do not reach top_p. At 1 all
    # are, even where the rounded sum gets there early.
    by_mass = (before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1)
    by_share = probabilities >= sampling.min_p[:, None] * probabilities[:, :1]
    keep = by_rank & by_mass & by_share
    keep = keep.at[:, 0].set(True)
    threshold = jnp.min(jnp.where(keep, descending, jnp.inf), axis=-1, keepdims=True)
    return scaled >= threshold


def _invert(weights: Array, uniforms: Array) -> Array:
    """First index at which the running sum of weights exceeds uniform x total.

    Two levels: sums of 128-wide blocks choose the block, a running sum within it the
    token. Where rounding lets no entry exceed the target, the largest weight serves: a
    token of zero weight is never drawn.

    Args:
        weights: [vocab, rows], not negative.
        uniforms: [rows].
    """
    vocab, rows = weights.shape
    blocks = jnp.pad(weights, ((0, -vocab % BLOCK), (0, 0))).reshape(-1, BLOCK, rows)
    sums = blocks.sum(axis=1)
    running = jnp.cumsum(sums, axis=0)
    target = uniforms * running[-1]
    # Rounded sums need not grow steadily: one may pass the target at an empty block.
    block = _first((running > target) & (sums > 0), sums)
    before = jnp.take_along_axis(running - sums, block[None], axis=0)
    inside = jnp.take_along_axis(blocks, block[None, None], axis=0)[0]
    reached = jnp.cumsum(inside, axis=0) > target - before
    return block * BLOCK + _first(reached & (inside > 0), inside)


def _first(reached: Array, weights: Array) -> Array:
    """Index of each column's first True; of its largest weight where there is none."""
    return jnp.where(
        reached.any(axis=0), jnp.argmax(reached, axis=0), jnp.argmax(weights, axis=0)
    )
