"""Samples tokens from logits, with their log-probabilities.

Tokens are drawn by inverting the cumulative distribution with one uniform number per
row: the same distribution as Gumbel noise and argmax, without a random number for every
entry of the vocabulary. Logits are transposed to [vocab, rows], so that a CPU computes
the large matrix times the small one instead of the reverse, in two thirds of the time.

Over a vocabulary that a mesh splits, each device sums its own blocks of 128 entries.
The sums are gathered, so every device knows the chosen block, and the one that holds it
knows the token. Only top-k, top-p and min-p, which rank all tokens, gather the logits.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxrl_post.kernels.token_logprob import exponentials
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes
from jaxrl_post.types import Array, Float, HostOrDevice, Int, UInt

__all__ = ["Sampled", "SamplingArrays", "sample"]

BLOCK = 128


class SamplingArrays(NamedTuple):
    """Sampling parameters, one entry per row; see `SamplingParams`."""

    temperature: Float[HostOrDevice, " rows"]
    top_k: Int[HostOrDevice, " rows"]
    top_p: Float[HostOrDevice, " rows"]
    min_p: Float[HostOrDevice, " rows"]


class Sampled(NamedTuple):
    """Drawn tokens.

    Attributes:
        tokens: int32 ids.
        logprobs: float32, under the full softmax.
        log_masses: float32, log of the probability mass of the kept tokens.
        kept: int32, ids of the tokens that were kept, the likeliest first, padded with
            -1; none if nothing was cut, or more were kept. None if not asked for.
        alternatives: int32, ids of the likeliest tokens that are allowed, the likeliest
            first. None if not asked for.
        alternatives_logprobs: float32, theirs under the full softmax; -inf where fewer
            tokens are allowed.
    """

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    log_masses: Float[Array, " rows"]
    kept: Int[Array, "rows kept"] | None = None
    alternatives: Int[Array, "rows most"] | None = None
    alternatives_logprobs: Float[Array, "rows most"] | None = None


def sample(
    logits: Float[Array, "rows vocab"],
    uniforms: Float[Array, " rows"],
    sampling: SamplingArrays,
    *,
    truncate: bool,
    kept_ids: int = 0,
    allowed: UInt[Array, "rows words"] | None = None,
    alternatives: int = 0,
    rules: Rules = DEFAULT_RULES,
) -> Sampled:
    """Draws one token per row.

    Args:
        logits: float32.
        uniforms: in [0, 1), one per row; the only source of randomness.
        sampling: per-row parameters.
        truncate: static; False requires that no row uses top-k, top-p or min-p.
        kept_ids: static; ids of `Sampled.kept`, with `truncate`; 0 for none.
        allowed: the tokens that may be drawn, bits as in `Constraint.allowed`; None
            for all. Like truncation it changes `log_masses`, not `logprobs`.
        alternatives: static; ids of `Sampled.alternatives`.
        rules: how a mesh of `jax.set_mesh`, if any, splits rows and vocabulary.

    Returns:
        What was drawn.

    >>> import jax.numpy as jnp
    >>> full = SamplingArrays(
    ...     jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.ones(1), jnp.zeros(1)
    ... )
    >>> even = jnp.zeros((1, 4))  # four tokens, a quarter each
    >>> sample(even, jnp.array([0.6]), full, truncate=False).tokens
    Array([2], dtype=int32)
    """
    mesh = jax.sharding.get_abstract_mesh()
    vocab: tuple[str, ...] = ()
    whole = truncate or allowed is not None or alternatives > 0
    if not (mesh.empty or mesh.size == 1 or whole):
        vocab = dividing_axes("vocab", logits.shape[1], mesh, rules)
    if not vocab:
        return _sample(
            logits,
            uniforms,
            sampling,
            truncate=truncate,
            kept_ids=kept_ids,
            allowed=allowed,
            alternatives=alternatives,
        )
    batch = P(dividing_axes("batch", logits.shape[0], mesh, rules))
    return jax.shard_map(
        functools.partial(_sample, truncate=False, axes=vocab),
        in_specs=(P(*batch, vocab), batch, batch),
        out_specs=batch,
        check_vma=False,
    )(logits, uniforms, sampling)


def _sample(
    logits: Array,
    uniforms: Array,
    sampling: SamplingArrays,
    *,
    truncate: bool,
    kept_ids: int = 0,
    allowed: Array | None = None,
    alternatives: int = 0,
    axes: tuple[str, ...] = (),
) -> Sampled:
    """Draws from a device's rows; `axes` split the vocabulary."""
    greedy = sampling.temperature == 0
    scaled = logits.T / jnp.where(greedy, 1.0, sampling.temperature)
    top = scaled.max(axis=0)
    if axes:
        top = jax.lax.pmax(top, axes)
        weights = jnp.exp(scaled - top)
        normalizer = jnp.log(jax.lax.psum(weights.sum(axis=0), axes)) + top
    else:
        weights, normalizer = exponentials(scaled, axis=0)
    if allowed is not None:
        scaled = jnp.where(_unpacked(allowed, scaled.shape[0]), scaled, -jnp.inf)
        # Relative to the likeliest allowed token: the others may be far likelier.
        top = scaled.max(axis=0)
        weights = jnp.exp(scaled - top)
    left, ids = weights, None
    if truncate:
        is_kept = scaled >= _least_kept(scaled.T, sampling)
        if allowed is not None:
            is_kept &= scaled > -jnp.inf
        left = jnp.where(is_kept, weights, 0.0)
        if kept_ids:
            count = jnp.where(greedy, 0, is_kept.sum(axis=0, dtype=jnp.int32))
            ids = _likeliest(scaled.T, count, kept_ids)
    # Greedy rows keep only their maxima; a uniform of 0 then selects the first of them.
    most_probable = (scaled == top).astype(jnp.float32)
    tokens, own, here = _invert(
        jnp.where(greedy, most_probable, left), jnp.where(greedy, 0.0, uniforms), axes
    )
    chosen = jnp.take_along_axis(scaled, own[None], axis=0)[0]
    if axes:
        tokens = jax.lax.psum(jnp.where(here, tokens, 0), axes)
        chosen = jax.lax.psum(jnp.where(here, chosen, 0.0), axes)
    logprobs = chosen - normalizer
    log_masses = jnp.zeros_like(logprobs)
    if allowed is not None:
        # Of a greedy row only the constraint cuts the distribution.
        left = jnp.where(greedy, weights, left)
        log_masses = jnp.log(left.sum(axis=0)) + top - normalizer
    elif truncate:
        share = left.sum(axis=0) / weights.sum(axis=0)
        log_masses = jnp.where(greedy, 0.0, jnp.log(share))
    likeliest = likeliest_logprobs = None
    if alternatives:
        chosen, likeliest = jax.lax.top_k(scaled.T, min(alternatives, scaled.shape[0]))
        missing = ((0, 0), (0, alternatives - chosen.shape[1]))
        likeliest = jnp.pad(likeliest.astype(jnp.int32), missing)
        likeliest_logprobs = jnp.pad(
            chosen - normalizer[:, None], missing, constant_values=-jnp.inf
        )
    return Sampled(tokens, logprobs, log_masses, ids, likeliest, likeliest_logprobs)


def _unpacked(words: Array, vocab: int) -> Array:
    """The bits of uint32 words [rows, words], as bool [vocab, rows]."""
    bits = jnp.arange(32, dtype=jnp.uint32)[:, None]
    each = (words.T[:, None] >> bits) & jnp.uint32(1)
    return each.reshape(-1, words.shape[0])[:vocab] > 0


def _least_kept(scaled: Array, sampling: SamplingArrays) -> Array:
    """The least logit [rows] that top-k, top-p and min-p keep; ties are kept too."""
    vocab = scaled.shape[1]
    descending = -jnp.sort(-scaled, axis=-1)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    top_k = jnp.where(sampling.top_k == 0, vocab, sampling.top_k)
    by_rank = jnp.arange(vocab, dtype=jnp.int32) < top_k[:, None]
    # A token is kept if the mass of the more probable ones is below top_p. top_p = 1
    # keeps all tokens, even if the rounded sum reaches 1 early.
    by_mass = (before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1)
    by_share = probabilities >= sampling.min_p[:, None] * probabilities[:, :1]
    keep = by_rank & by_mass & by_share
    keep = keep.at[:, 0].set(True)
    return jnp.min(jnp.where(keep, descending, jnp.inf), axis=-1)


def _likeliest(scaled: Array, count: Array, width: int) -> Array:
    """Ids of the `count` [rows] likeliest tokens, [rows, width], padded with -1.

    None in a row where these are all tokens, or more than `width`.
    """
    vocab = scaled.shape[1]
    most = min(width, vocab)
    _, ids = jax.lax.top_k(scaled, most)
    count = jnp.where((count < vocab) & (count <= most), count, 0)
    inside = jnp.arange(most, dtype=jnp.int32) < count[:, None]
    ids = jnp.where(inside, ids.astype(jnp.int32), -1)
    return jnp.pad(ids, ((0, 0), (0, width - most)), constant_values=-1)


def _invert(
    weights: Array, uniforms: Array, axes: tuple[str, ...] = ()
) -> tuple[Array, Array, Array]:
    """First index at which the cumulative sum of weights exceeds uniform x total.

    Sums over blocks of 128 entries select the block, a cumulative sum within the block
    selects the token. If no entry exceeds the target because of rounding, the index of
    the largest weight is returned. A token of zero weight is never drawn.

    Args:
        weights: [vocab, rows], not negative.
        uniforms: [rows].
        axes: mesh axes of a `shard_map` that split the vocabulary.

    Returns:
        int32 [rows]: the token, its place among this device's weights, and whether it
        is one of them.
    """
    vocab, rows = weights.shape
    blocks = jnp.pad(weights, ((0, -vocab % BLOCK), (0, 0))).reshape(-1, BLOCK, rows)
    sums, first = blocks.sum(axis=1), jnp.int32(0)
    count = sums.shape[0]
    if axes:
        sums = jax.lax.all_gather(sums, axes, tiled=True)
        first = jax.lax.axis_index(axes)
    running = jnp.cumsum(sums, axis=0)
    target = uniforms * running[-1]
    # Rounded sums may not be monotone, so one may exceed the target at an empty block.
    block = _first((running > target) & (sums > 0), sums)
    before = jnp.take_along_axis(running - sums, block[None], axis=0)
    own = block - first * count
    here = (own >= 0) & (own < count)
    own = jnp.clip(own, 0, count - 1)
    inside = jnp.take_along_axis(blocks, own[None, None], axis=0)[0]
    reached = jnp.cumsum(inside, axis=0) > target - before
    place = own * BLOCK + _first(reached & (inside > 0), inside)
    place = jnp.minimum(place, vocab - 1).astype(jnp.int32)
    return place + first * vocab, place, here


def _first(reached: Array, weights: Array) -> Array:
    """Index of each column's first True; without a True, of its largest weight."""
    return jnp.where(
        reached.any(axis=0), jnp.argmax(reached, axis=0), jnp.argmax(weights, axis=0)
    )
