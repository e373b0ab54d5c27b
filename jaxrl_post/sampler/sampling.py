"""Samples tokens from logits, with their log-probabilities.

Where nothing cuts or ranks the tokens, `kernels.next_token` draws them, and may do so
without logits in memory. Top-k, top-p and min-p rank all tokens, and so gather logits
that a mesh splits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.kernels.next_token import next_token
from jaxrl_post.kernels.next_token.reference import draw, select, weigh
from jaxrl_post.models import DecoderParams, ModelConfig, unembedding
from jaxrl_post.models.decoder import logits_of
from jaxrl_post.sharding import DEFAULT_RULES, Rules
from jaxrl_post.types import Array, Float, HostOrDevice, Int, UInt

__all__ = ["Sampled", "SamplingArrays", "sample", "sample_next", "uniform_numbers"]


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
        kept: int32, ids of the tokens that were kept, or allowed, the likeliest first,
            padded with -1; none if nothing was cut, or more were kept. None if not
            asked for.
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


def sample_next(
    params: DecoderParams[Array],
    config: ModelConfig,
    hidden: Float[Array, "rows hidden"],
    uniforms: Float[Array, " rows"],
    sampling: SamplingArrays,
    *,
    truncate: bool,
    kept_ids: int = 0,
    allowed: UInt[Array, "rows words"] | None = None,
    alternatives: int = 0,
    rules: Rules = DEFAULT_RULES,
    kernels: Implementation = "auto",
) -> Sampled:
    """`sample` of the logits of hidden states, which need not be in memory.

    Args:
        params: parameters of a model with a head for the vocabulary.
        config: static.
        hidden: final hidden states.
        uniforms: as in `sample`.
        sampling: as in `sample`.
        truncate: as in `sample`.
        kept_ids: as in `sample`.
        allowed: as in `sample`.
        alternatives: as in `sample`.
        rules: as in `sample`.
        kernels: static, as in `next_token`.
    """
    if truncate or allowed is not None or alternatives:
        return sample(
            logits_of(config, unembedding(params), hidden),
            uniforms,
            sampling,
            truncate=truncate,
            kept_ids=kept_ids,
            allowed=allowed,
            alternatives=alternatives,
            rules=rules,
        )
    tokens, logprobs = next_token(
        hidden,
        unembedding(params),
        uniforms,
        sampling.temperature,
        divisor=config.logit_divisor,
        softcap=config.logit_softcap,
        rules=rules,
        implementation=kernels,
    )
    return Sampled(tokens, logprobs, jnp.zeros_like(logprobs))


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
        kept_ids: static; ids of `Sampled.kept`, with `truncate` or `allowed`; 0 for
            none.
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
    if not (truncate or allowed is not None or alternatives):
        tokens, logprobs = draw(logits, uniforms, sampling.temperature, rules)
        return Sampled(tokens, logprobs, jnp.zeros_like(logprobs))
    greedy = sampling.temperature == 0
    scaled, top, weights, normalizer = weigh(logits, sampling.temperature)
    if allowed is not None:
        scaled = jnp.where(_unpacked(allowed, scaled.shape[0]), scaled, -jnp.inf)
        # Relative to the likeliest allowed token: the others may be far likelier.
        top = scaled.max(axis=0)
        weights = jnp.exp(scaled - top)
    left, ids = weights, None
    if truncate or allowed is not None:
        is_kept = scaled > -jnp.inf
        if truncate:
            is_kept &= scaled >= _least_kept(scaled.T, sampling)
        left = jnp.where(is_kept, weights, 0.0)
        if kept_ids:
            kept = is_kept.sum(axis=0, dtype=jnp.int32)
            ids = _likeliest(scaled.T, jnp.where(greedy, 0, kept), kept_ids)
    tokens, chosen = select(scaled, top, left, uniforms, sampling.temperature)
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


def uniform_numbers(
    keys: Array, positions: Int[Array, "rows width"]
) -> Float[Array, "rows width"]:
    """The random number with which each token is drawn.

    Args:
        keys: a key for each sample, [rows].
        positions: of the tokens in their sequences.

    Returns:
        float32 in (0, 1), each in the middle of one of 2^23 equal steps. 0 would draw
        the first token that is possible at all, however unlikely it is.

    >>> number = uniform_numbers(jax.random.key(0)[None], jnp.array([[7]]))[0, 0]
    >>> (number * 2**23 % 1).item()
    0.5
    """

    def one(key: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, position), dtype=jnp.float32)

    # The sum is exact: 2^-24 is the spacing of the largest of these numbers.
    return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions) + 2.0**-24


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
