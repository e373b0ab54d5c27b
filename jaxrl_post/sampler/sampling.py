"""Samples tokens from logits, with their log-probabilities.

Where nothing cuts or ranks the tokens, `kernels.next_token` draws them, and may do so
without logits in memory. Otherwise they are in memory, and a mesh may split them: no
device gathers the logits of others.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.kernels.next_token import next_token
from jaxrl_post.kernels.next_token.reference import draw, select, weigh
from jaxrl_post.models import DecoderParams, ModelConfig, unembedding
from jaxrl_post.models.layers import logits_of
from jaxrl_post.sampler.limits import Changes
from jaxrl_post.sampler.truncation import (
    CANDIDATES,
    SamplingArrays,
    least_kept,
    likeliest,
)
from jaxrl_post.sharding import DEFAULT_RULES, Rules, dividing_axes, on_parts
from jaxrl_post.types import Array, Float, Int, UInt

__all__ = [
    "Drawing",
    "Sampled",
    "SamplingArrays",
    "entry_of",
    "over_vocab",
    "sample",
    "sample_next",
    "uniform_numbers",
]


@dataclass(frozen=True)
class Drawing:
    """Options of drawing a token; static.

    Attributes:
        truncate: False requires that no row uses top-k, top-p or min-p.
        kept_ids: ids of `Sampled.kept`, with `truncate` or `allowed`; 0 for none.
        alternatives: ids of `Sampled.alternatives`; 0 for none.
        kernels: as in `next_token`.
    """

    truncate: bool
    kept_ids: int = 0
    alternatives: int = 0
    kernels: Implementation = "auto"


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
    drawing: Drawing,
    *,
    allowed: UInt[Array, "rows words"] | None = None,
    changes: Changes | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Sampled:
    """`sample` of the logits of hidden states, which need not be in memory.

    Args:
        params: parameters of a model with a head for the vocabulary.
        config: static.
        hidden: final hidden states.
        uniforms: as in `sample`.
        sampling: as in `sample`.
        drawing: static.
        allowed: as in `sample`.
        changes: as in `sample`.
        rules: as in `sample`.
    """
    cuts = drawing.truncate or allowed is not None or changes is not None
    if cuts or drawing.alternatives:
        scores = logits_of(config, unembedding(params), hidden)
        options: Any = {"allowed": allowed, "changes": changes, "rules": rules}
        return sample(scores, uniforms, sampling, drawing, **options)
    tokens, logprobs = next_token(
        hidden,
        unembedding(params),
        uniforms,
        sampling.temperature,
        divisor=config.logit_divisor,
        softcap=config.logit_softcap,
        rules=rules,
        implementation=drawing.kernels,
    )
    return Sampled(tokens, logprobs, jnp.zeros_like(logprobs))


def sample(
    logits: Float[Array, "rows vocab"],
    uniforms: Float[Array, " rows"],
    sampling: SamplingArrays,
    drawing: Drawing,
    *,
    allowed: UInt[Array, "rows words"] | None = None,
    changes: Changes | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Sampled:
    """Draws one token per row.

    Args:
        logits: float32.
        uniforms: in [0, 1), one per row; the only source of randomness.
        sampling: per-row parameters.
        drawing: static.
        allowed: the tokens that may be drawn, bits as in `Constraint.allowed`; None
            for all. Like truncation it changes `log_masses`, not `logprobs`.
        changes: of logits, before all else; None for none. They change `log_masses`,
            too: `logprobs - log_masses` is the log-prob of the distribution that is
            drawn from.
        rules: how a mesh of `jax.set_mesh`, if any, splits rows and vocabulary.

    Returns:
        What was drawn.

    >>> import jax.numpy as jnp
    >>> full = SamplingArrays(
    ...     jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.ones(1), jnp.zeros(1)
    ... )
    >>> even = jnp.zeros((1, 4))  # four tokens, a quarter each
    >>> sample(even, jnp.array([0.6]), full, Drawing(False)).tokens
    Array([2], dtype=int32)
    """
    cuts = drawing.truncate or allowed is not None or changes is not None
    if not (cuts or drawing.alternatives):
        tokens, logprobs = draw(logits, uniforms, sampling.temperature, rules)
        return Sampled(tokens, logprobs, jnp.zeros_like(logprobs))
    part = functools.partial(_sample, drawing)
    return over_vocab(part, rules, logits, uniforms, sampling, allowed, changes)


def over_vocab(
    part: Callable[..., Any], rules: Rules, logits: Array, *by_row: Any
) -> Any:
    """Calls a function of logits on each device with its part of the vocabulary.

    Args:
        part: function of logits and arrays by row; its `axes` are those that split the
            vocabulary.
        rules: how a mesh of `jax.set_mesh`, if any, splits rows and vocabulary.
        logits: [rows, vocab].
        by_row: trees of arrays [rows, ...].
    """
    mesh = jax.sharding.get_abstract_mesh()
    vocab: tuple[str, ...] = ()
    if not (mesh.empty or mesh.size == 1):
        vocab = dividing_axes("vocab", logits.shape[1], mesh, rules)
    if not vocab:
        return part(logits, *by_row)
    batch = P(dividing_axes("batch", logits.shape[0], mesh, rules))
    return on_parts(
        functools.partial(part, axes=vocab),
        in_specs=(P(*batch, vocab), *[batch] * len(by_row)),
        out_specs=batch,
    )(logits, *by_row)


def _sample(
    drawing: Drawing,
    logits: Array,
    uniforms: Array,
    sampling: SamplingArrays,
    allowed: Array | None,
    changes: Changes | None,
    *,
    axes: tuple[str, ...] = (),
) -> Sampled:
    """`sample` of the logits that a device has, whose vocabulary `axes` split."""
    truncate, kept_ids = drawing.truncate, drawing.kept_ids
    alternatives = drawing.alternatives

    def sums(array: Array, dtype: DTypeLike = jnp.float32) -> Array:
        total = array.sum(axis=0, dtype=dtype)
        return jax.lax.psum(total, axes) if axes else total

    greedy = sampling.temperature == 0
    scaled, top, weights, normalizer = weigh(logits, sampling.temperature, axes)
    own = scaled.shape[0]
    vocab = own * jax.lax.axis_size(axes) if axes else own
    unchanged = scaled
    if changes is not None:
        scaled = _changed(logits, changes, axes).T
        scaled = scaled / jnp.where(greedy, 1.0, sampling.temperature)
    if allowed is not None:
        may = _unpacked(allowed, vocab)
        if axes:
            begin = jax.lax.axis_index(axes) * own
            may = jax.lax.dynamic_slice_in_dim(may, begin, own)
        scaled = jnp.where(may, scaled, -jnp.inf)
        unchanged = jnp.where(may, unchanged, -jnp.inf)
    other = allowed is not None or changes is not None
    if other:
        # Relative to the likeliest token that may come: others may be far likelier.
        top = scaled.max(axis=0)
        top = jax.lax.pmax(top, axes) if axes else top
        weights = jnp.exp(scaled - top)
    cuts = truncate or allowed is not None
    records = cuts and kept_ids > 0
    most = max(CANDIDATES * truncate, kept_ids * records, alternatives)
    found = likeliest(scaled, most, axes) if most else None
    left, ids = weights, None
    if cuts:
        is_kept = scaled > -jnp.inf
        if truncate:
            assert found is not None
            is_kept &= scaled >= least_kept(scaled, weights, sampling, found, axes)
            is_kept &= weights >= sampling.min_p
        left = jnp.where(is_kept, weights, 0.0)
        if records:
            assert found is not None
            # None of a row in which these are all tokens, or more than are recorded,
            # or whose distribution is another among them.
            none = greedy
            if changes is not None:
                none |= (changes.ids < vocab).any(axis=1)
            count = jnp.where(none, 0, sums(is_kept, jnp.int32))
            count = jnp.where((count < vocab) & (count <= kept_ids), count, 0)
            inside = jnp.arange(kept_ids, dtype=jnp.int32) < count[:, None]
            ids = jnp.where(inside, found.ids[:, :kept_ids], -1)
    tokens, chosen = select(scaled, top, left, uniforms, sampling.temperature, axes)
    logprobs = chosen - normalizer
    log_masses = jnp.zeros_like(logprobs)
    if other:
        # Nothing else cuts the distribution of a greedy row.
        left = jnp.where(greedy, weights, left)
        log_masses = jnp.log(sums(left)) + top - normalizer
    elif truncate:
        log_masses = jnp.where(greedy, 0.0, jnp.log(sums(left) / sums(weights)))
    if changes is not None:
        before = entry_of(unchanged, tokens, axes)
        log_masses += before - chosen
        logprobs = before - normalizer
        found = likeliest(unchanged, alternatives, axes) if alternatives else None
    if not alternatives:
        return Sampled(tokens, logprobs, log_masses, ids)
    assert found is not None
    others = found.logits[:, :alternatives] - normalizer[:, None]
    return Sampled(
        *(tokens, logprobs, log_masses, ids), found.ids[:, :alternatives], others
    )


def entry_of(scaled: Array, tokens: Array, axes: tuple[str, ...] = ()) -> Array:
    """The entry of each row's token, [rows], of this device's [vocab, rows]."""
    own = scaled.shape[0]
    place = tokens - jax.lax.axis_index(axes) * own if axes else tokens
    here = (place >= 0) & (place < own)
    found = jnp.take_along_axis(scaled, jnp.clip(place, 0, own - 1)[None], axis=0)[0]
    return jax.lax.psum(jnp.where(here, found, 0.0), axes) if axes else found


def _changed(logits: Array, changes: Changes, axes: tuple[str, ...]) -> Array:
    """This device's logits [rows, vocab], changed."""
    own = logits.shape[1]
    place = changes.ids - (jax.lax.axis_index(axes) * own if axes else 0)
    here = (place >= 0) & (place < own)
    found = jnp.take_along_axis(logits, jnp.clip(place, 0, own - 1), axis=1)
    found += changes.bias
    found = jnp.where(found > 0, found / changes.factor, found * changes.factor)
    found -= changes.minus
    # vmap over rows, so that rows split over a mesh need no communication.
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(
        logits, jnp.where(here, place, own), found
    )


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
