"""The device functions of the sampler, both pure: prefill and decode.

All that stays on the device between calls is the cache: keys and values in pages. What
a call needs to know of its samples are small arrays from the host. A call copies the
pages that it reads into a dense view, computes, and writes the new entries back.

Prefill needs no logits: the first decoding step of a sample feeds the last token of its
context again, of which the cache holds the key already, and samples the first token. So
all tokens are sampled by the same code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxrl_post.models import DecoderParams, KVCache, ModelConfig, forward, logits
from jaxrl_post.models.cache import SharedCache
from jaxrl_post.sampler.sampling import SamplingArrays, sample
from jaxrl_post.sampler.sizes import PAGE, pages_for
from jaxrl_post.sharding import Rules, dividing_axes
from jaxrl_post.types import Array, Float, HostOrDevice, Int, Key, UInt

__all__ = ["Emitted", "Pages", "PrefillRows", "Rows", "Shared", "decode", "prefill"]

NO_TOKEN = jnp.iinfo(jnp.int32).max


@struct.dataclass
class Pages:
    """Keys and values of all layers in pages of PAGE tokens, one array per layer."""

    keys: tuple[Float[Array, "pages kv_heads page head_dim"], ...]
    values: tuple[Float[Array, "pages kv_heads page value_dim"], ...]

    @classmethod
    def zeros(cls, config: ModelConfig, pages: int, dtype: DTypeLike) -> "Pages":
        """Makes an empty cache."""
        cache = KVCache.zeros(config, pages, PAGE, dtype)
        return cls(cache.keys, cache.values)


@struct.dataclass
class Shared:
    """What groups of rows read together; padded with groups without tokens.

    Attributes:
        pages: int32, pages in the order of the path; unused ones may be any.
        starts: int32, position of each page's first token.
        counts: int32, number of tokens of each page; 0 for unused ones.
        places: int32, as in `kernels.decode_attention.SharedKeys`.
        members: as there; static.
    """

    pages: Int[HostOrDevice, "groups shared_pages"]
    starts: Int[HostOrDevice, "groups shared_pages"]
    counts: Int[HostOrDevice, "groups shared_pages"]
    places: Int[HostOrDevice, " rows"]
    members: int = struct.field(pytree_node=False)


@struct.dataclass
class PrefillRows:
    """Chunks of segments; a fixed number, unused ones have no page.

    Attributes:
        tokens: int32, padded on the right with any id.
        starts: int32, position of each row's first token.
        pages: int32, pages to write to; the number of pages or more for none.
        shared: the tokens before the chunks; None if no chunk has any.
    """

    tokens: Int[HostOrDevice, "rows length"]
    starts: Int[HostOrDevice, " rows"]
    pages: Int[HostOrDevice, "rows chunk_pages"]
    shared: Shared | None


@struct.dataclass
class Rows:
    """Samples that decode together; a fixed number, unused ones have nothing remaining.

    Attributes:
        tokens: int32, the token to feed next.
        positions: int32, the position of that token.
        remaining: int32, maximum number of tokens still to sample.
        prompt_ids: uint32; determines the noise with `sample_indices` and the key.
        sample_indices: uint32.
        sampling: per-sample sampling parameters.
        stop_ids: int32 [rows, stops], padded with -1.
        starts: int32, position of each row's first own entry.
        counts: int32, number of own entries that have been computed.
        pages: int32, own pages; the number of pages or more for none.
        shared: the context of the samples.
    """

    tokens: Int[HostOrDevice, " rows"]
    positions: Int[HostOrDevice, " rows"]
    remaining: Int[HostOrDevice, " rows"]
    prompt_ids: UInt[HostOrDevice, " rows"]
    sample_indices: UInt[HostOrDevice, " rows"]
    sampling: SamplingArrays
    stop_ids: Int[HostOrDevice, "rows stops"]
    starts: Int[HostOrDevice, " rows"]
    counts: Int[HostOrDevice, " rows"]
    pages: Int[HostOrDevice, "rows own_pages"]
    shared: Shared


@struct.dataclass
class Emitted:
    """The tokens that `decode` sampled; token -1 where a row sampled none."""

    tokens: Int[HostOrDevice, "*steps rows"]
    logprobs: Float[HostOrDevice, "*steps rows"]
    log_masses: Float[HostOrDevice, "*steps rows"]


def prefill(
    params: DecoderParams[Array],
    config: ModelConfig,
    pages: Pages,
    rows: PrefillRows,
    rules: Rules,
) -> Pages:
    """Computes the keys and values of chunks and stores them in their pages.

    Args:
        params: the trainer's arrays.
        config: static.
        pages: donated by the engine.
        rows: the chunks.
        rules: sharding of activations.
    """
    count, length = rows.tokens.shape
    zeros = KVCache.zeros(config, count, length, pages.keys[0].dtype)
    shared = None if rows.shared is None else _shared(config, pages, rows.shared, rules)
    starts = jnp.asarray(rows.starts)
    view = dataclasses.replace(zeros, starts=starts, shared=shared)
    positions = starts[:, None] + jnp.arange(length, dtype=jnp.int32)
    _, view = forward(
        params,
        config,
        jnp.asarray(rows.tokens),
        positions=positions,
        kv_view=view,
        rules=rules,
    )
    first = jnp.zeros((count,), jnp.int32)
    return _written(config, pages, view, rows.pages, first, length // PAGE, rules)


def decode(
    params: DecoderParams[Array],
    config: ModelConfig,
    pages: Pages,
    rows: Rows,
    key: Key[Array, ""],
    floor: Int[HostOrDevice, ""],
    rules: Rules,
    *,
    num_steps: int,
    split: int,
    truncate: bool,
) -> tuple[Pages, Emitted]:
    """Samples up to `num_steps` tokens in every row.

    A row that stops goes idle. The burst ends early when no part of the mesh has more
    than `floor` active rows.

    Args:
        params: the trainer's arrays.
        config: static.
        pages: donated by the engine.
        rows: the samples.
        key: the engine's PRNG key.
        floor: int32.
        rules: sharding of activations.
        num_steps: static.
        split: static; parts into which the mesh splits the rows.
        truncate: static, as in `sampling.sample`.
    """
    rows = jax.tree.map(jnp.asarray, rows)
    count = rows.tokens.shape[0]
    view = KVCache(
        keys=_read(config, pages.keys, rows.pages, _filled(rows), rules),
        values=_read(config, pages.values, rows.pages, _filled(rows), rules),
        starts=rows.starts,
        shared=_shared(config, pages, rows.shared, rules),
    )
    sample_keys = jax.vmap(
        lambda prompt, index: jax.random.fold_in(jax.random.fold_in(key, prompt), index)
    )(rows.prompt_ids, rows.sample_indices)
    nothing = Emitted(
        jnp.full((num_steps, count), -1, jnp.int32),
        jnp.zeros((num_steps, count), jnp.float32),
        jnp.zeros((num_steps, count), jnp.float32),
    )
    # What the loop does not change stays outside of its state.
    fixed = view.starts, view.shared

    def going_on(state: Any) -> Array:
        step, _, _, _, active, _, _ = state
        by_part = active.reshape(split, -1).sum(axis=1)
        return (step < num_steps) & (by_part.max() > floor)

    def body(state: Any) -> Any:
        step, tokens, positions, remaining, active, (keys, values), emitted = state
        hidden, after = forward(
            params,
            config,
            tokens[:, None],
            positions=positions[:, None],
            kv_view=KVCache(keys, values, *fixed),
            rules=rules,
        )
        # The noise is keyed by the position of the drawn token, not of the fed one.
        drawn_at = positions + 1
        uniforms = jax.vmap(
            lambda key, at: jax.random.uniform(
                jax.random.fold_in(key, at), dtype=jnp.float32
            )
        )(sample_keys, drawn_at)
        drawn = sample(
            logits(params, config, hidden[:, 0]),
            uniforms,
            rows.sampling,
            truncate=truncate,
        )
        new = Emitted(
            jnp.where(active, drawn.tokens, -1), drawn.logprobs, drawn.log_masses
        )
        emitted = jax.tree.map(lambda all_, one: all_.at[step].set(one), emitted, new)
        remaining = remaining - 1
        stopped = (drawn.tokens[:, None] == rows.stop_ids).any(axis=1)
        left = active & ~stopped & (remaining > 0)
        return (
            step + 1,
            jnp.where(left, drawn.tokens, tokens),
            jnp.where(left, drawn_at, positions),
            jnp.where(left, remaining, 0),
            left,
            (after.keys, after.values),
            emitted,
        )

    state = (
        jnp.zeros((), jnp.int32),
        rows.tokens,
        rows.positions,
        rows.remaining,
        rows.remaining > 0,
        (view.keys, view.values),
        nothing,
    )
    *_, (keys, values), emitted = jax.lax.while_loop(going_on, body, state)
    after = dataclasses.replace(view, keys=keys, values=values)
    # A burst writes at most so many pages of a row, the first of them partly filled.
    touched = min(pages_for(num_steps - 1) + 1, rows.pages.shape[1])
    first = jnp.minimum(rows.counts // PAGE, rows.pages.shape[1] - touched)
    return _written(config, pages, after, rows.pages, first, touched, rules), emitted


def _filled(rows: Rows) -> Int[Array, "rows own_pages"]:
    """Number of computed entries of each own page."""
    before = PAGE * jnp.arange(rows.pages.shape[1], dtype=jnp.int32)
    return jnp.clip(rows.counts[:, None] - before, 0, PAGE)


def _shared(
    config: ModelConfig, pages: Pages, shared: Shared, rules: Rules
) -> SharedCache:
    """Reads what groups share."""
    shared = jax.tree.map(jnp.asarray, shared)
    inside = jnp.arange(PAGE, dtype=jnp.int32)
    positions = jnp.where(
        inside < shared.counts[..., None], shared.starts[..., None] + inside, NO_TOKEN
    )
    return SharedCache(
        keys=_read(config, pages.keys, shared.pages, shared.counts, rules),
        values=_read(config, pages.values, shared.pages, shared.counts, rules),
        positions=positions.reshape(shared.pages.shape[0], -1),
        places=shared.places,
        members=shared.members,
    )


def _read(
    config: ModelConfig,
    layers: tuple[Array, ...],
    ids: Int[Array, "rows count"],
    filled: Int[Array, "rows count"],
    rules: Rules,
) -> tuple[Array, ...]:
    """Copies pages into rows [rows, kv_heads, count * PAGE, dim].

    What a page holds beyond its tokens is replaced by zeros, because an infinite or NaN
    value of a sample that has ended would spoil the sums in which it has no weight.
    """

    def read(page: Array, ids: Array, filled: Array) -> Array:
        found = page.at[ids].get(mode="clip")
        seen = jnp.arange(PAGE, dtype=jnp.int32) < filled[..., None]
        found = jnp.where(seen[:, :, None, :, None], found, 0)
        rows, count, heads, _, dim = found.shape
        found = found.transpose(0, 2, 1, 3, 4)
        return found.reshape(rows, heads, count * PAGE, dim)

    local = _on_parts(config, layers[0], ids.shape[0], rules, (True, False, False))(
        read
    )
    return tuple(local(layer, ids, filled) for layer in layers)


def _written(
    config: ModelConfig,
    pages: Pages,
    view: KVCache,
    ids: HostOrDevice,
    first: Int[Array, " rows"],
    count: int,
    rules: Rules,
) -> Pages:
    """Writes `count` pages of each row of a view, from page `first` on."""

    def write(page: Array, view: Array, ids: Array, first: Array) -> Array:
        rows, heads, length, dim = view.shape
        split = view.reshape(rows, heads, length // PAGE, PAGE, dim)
        chosen = first[:, None] + jnp.arange(count, dtype=jnp.int32)
        new = jnp.take_along_axis(
            split.transpose(0, 2, 1, 3, 4), chosen[:, :, None, None, None], axis=1
        )
        at = jnp.take_along_axis(ids, chosen, axis=1)
        return page.at[at].set(new, mode="drop")

    ids = jnp.asarray(ids)
    specs = (True, True, False, False)
    local = _on_parts(config, pages.keys[0], ids.shape[0], rules, specs)(write)

    def all_layers(old: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(local(*both, ids, first) for both in zip(old, new, strict=True))

    return Pages(
        all_layers(pages.keys, view.keys), all_layers(pages.values, view.values)
    )


def _on_parts(
    config: ModelConfig,
    page: Array,
    rows: int,
    rules: Rules,
    has_heads: tuple[bool, ...],
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Lets each part of a mesh work on its own pages and rows, by local page numbers.

    Args:
        config: of the model.
        page: one layer's pages.
        rows: number of rows.
        rules: logical axis to mesh axes.
        has_heads: for each argument, whether its second dimension is kv_heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return lambda function: function
    batch = dividing_axes("batch", page.shape[0], mesh, rules) or None
    heads = dividing_axes("kv_heads", config.cache_shape[0], mesh, rules) or None
    assert batch == (dividing_axes("batch", rows, mesh, rules) or None)
    specs = tuple(P(batch, heads) if flag else P(batch) for flag in has_heads)
    return lambda function: jax.shard_map(
        function, in_specs=specs, out_specs=P(batch, heads), check_vma=False
    )
