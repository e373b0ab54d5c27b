"""Attention in exact mode: a device's tokens over their paths; see `models.exact`.

Latent attention is computed in its cached form on both sides, in the trainer too: the
entry of a token, its latent and the rotated key, is the one key/value head that all
query heads read. The form of training multiplies other matrices, so its bits differ.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl_post.kernels.attention.paths import (
    BLOCK,
    PathSettings,
    Tasks,
    attend_paths,
    queries_per_task,
)
from jaxrl_post.kernels.row_tiles import isolated
from jaxrl_post.models.attention import (
    Context,
    from_latents,
    keys_and_values,
    latent_parts,
    queries,
    to_latents,
    with_gate,
)
from jaxrl_post.models.cache import LayerCache
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.layers import project
from jaxrl_post.models.matrix import is_matrix
from jaxrl_post.models.params import LatentAttentionParams, LayerParams
from jaxrl_post.models.rope import rope_tables, rotation
from jaxrl_post.models.rows import CountedRows
from jaxrl_post.types import Array, previous_tokens

__all__ = ["Paths", "Read", "exact_attention"]

# The keys and values that a layer reads: its part of the cache, or those in the rows of
# the batch, [rows, kv_heads, dim] each (with latent attention, entries alone).
type Read = LayerCache | tuple[Array, ...]


class Paths(NamedTuple):
    """The paths of a device's tokens, numbered over all its rows of the batch.

    Tokens that follow each other on a path form a run; a token of a run has a place in
    it, and a run follows a token, which lies in another one.

    Attributes:
        starts: int32 [tokens], first token of each token's run.
        positions: int32 [tokens], along the path.
        parents: int32 [tokens], the token before each first token of a run.
        counted: bool [tokens].
        rows: the rows that hold the tokens' states.
    """

    starts: Array
    positions: Array
    parents: Array
    counted: Array
    rows: CountedRows

    @property
    def length(self) -> int:
        """Tokens of a row of the batch."""
        return self.rows.shape[1]

    @classmethod
    def of(
        cls, positions: Array, counted: Array, ends: Array | None, tile: int
    ) -> "Paths":
        """The paths of a batch; the arguments are as in `exact_forward`."""
        batch, length = positions.shape
        index = jnp.arange(length, dtype=jnp.int32)
        first = index[None] == 0
        parents = jnp.zeros((batch, length), jnp.int32)
        if ends is not None:
            before = jnp.roll(ends, 1, axis=1)
            first = first | (before <= index)
            parents = previous_tokens(ends)
        starts = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
        offset = length * jnp.arange(batch, dtype=jnp.int32)[:, None]
        return cls(
            (jnp.broadcast_to(starts, (batch, length)) + offset).reshape(-1),
            positions.reshape(-1),
            (parents + offset).reshape(-1),
            counted.reshape(-1),
            CountedRows.of(counted, tile),
        )

    def tasks(self, group: int, rows: int) -> tuple[Tasks, Array]:
        """Groups the queries of runs; also returns the last token of each task."""
        tokens, size = self.starts.shape[0], queries_per_task(group)
        index = jnp.arange(tokens, dtype=jnp.int32)
        begins = self.counted & ((index - self.starts) % size == 0)
        order = jnp.argsort(~begins, stable=True).astype(jnp.int32)
        members = order[:, None] + jnp.arange(size, dtype=jnp.int32)
        inside = members < tokens
        members = jnp.minimum(members, tokens - 1)
        inside &= self.starts[members] == self.starts[order][:, None]
        inside &= self.counted[members]
        last = jnp.where(inside, members, 0).max(axis=1)
        tasks = Tasks(
            jnp.where(inside, self.rows.places[members], rows),
            jnp.where(inside, self.positions[members], -1),
            begins.sum(dtype=jnp.int32),
        )
        return tasks, last

    def find(self, last: Array, block: Array) -> Array:
        """The rows of the tokens of a block of the paths that end with `last`.

        Args:
            last: int32 [n], tokens.
            block: int32, number of the block.

        Returns:
            int32 [n, BLOCK]; any row for positions beyond `last`.
        """
        wanted = block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        found = jnp.broadcast_to(last[:, None], (last.shape[0], BLOCK))

        def start_of(token: Array) -> Array:
            return self.positions[self.starts[token]]

        def climb(state: tuple[Array, Array]) -> tuple[Array, Array]:
            steps, token = state
            earlier = start_of(token) > wanted
            return steps + 1, jnp.where(
                earlier, self.parents[self.starts[token]], token
            )

        def higher(state: tuple[Array, Array]) -> Array:
            # A path has at most so many runs as tokens; the bound ends the loop for
            # rows that are no forest.
            return (state[0] < self.length) & (start_of(state[1]) > wanted).any()

        _, found = jax.lax.while_loop(higher, climb, (jnp.int32(0), found))
        tokens = self.starts[found] + wanted - start_of(found)
        tokens = jnp.clip(tokens, 0, self.starts.shape[0] - 1)
        return self.rows.places[tokens]


def exact_attention(
    config: ModelConfig,
    index: int,
    params: LayerParams[Array],
    paths: Paths,
    x: Array,
    entry: Read | None,
    *,
    heads: tuple[str, ...],
    kv_heads: tuple[str, ...],
    at: Callable[[str, Array], Array],
) -> tuple[Array, Read]:
    """Attention of all tokens, over their paths in the batch or over the cache.

    Args:
        config: the model's config.
        index: the layer.
        params: the layer's parameters, with this device's part of the heads.
        paths: the tokens.
        x: [rows, hidden], the layer's inputs.
        entry: the layer's part of the cache; None if the paths lie in the batch. For a
            layer that reads the keys of another: what was read there.
        heads: mesh axes of a `shard_map` that split the query heads.
        kv_heads: axes that split the key/value heads; () if all devices have them all.
        at: as `Mode.at`, which meets queries, keys and values.

    Returns:
        This device's part of the update [rows, hidden]; and what was read: the cache
        with these tokens, or the keys and values of the batch.
    """
    rows, up = paths.rows, None
    if isinstance(params.attention, LatentAttentionParams):
        up = _latent_up(config, params.attention, x.dtype, rows)
    projected = functools.partial(_projected, config, index, params, up)
    query, gate, *made = rows.each(projected, x, rows.take(paths.positions))
    if up is None:
        for name, array in zip(("query", "key", "value"), (query, *made), strict=False):
            at(name, array)
    if not config.layer(index).makes_keys:
        assert entry is not None
        read = entry
    elif entry is None:
        read = tuple(made)
    else:
        assert isinstance(entry, LayerCache)
        read = _written(entry, made, paths)
    arrays = _arrays(read)
    count = query.shape[1]
    own, num_read = _read_heads(config, heads, kv_heads, count, arrays[0].shape[1])
    tasks, last = paths.tasks(count // num_read, query.shape[0])
    width = config.heads(index).head_dim
    if config.latent is not None:
        width = config.latent.kv_rank

    def pair(found: list[Array]) -> tuple[Array, Array]:
        """Keys and values of a block; a latent is the first part of its entry."""
        return found[0], found[-1][..., :width]

    if not isinstance(read, LayerCache):

        def fetch(numbers: Array, block: Array) -> tuple[Array, Array]:
            chosen = paths.find(last[numbers], block)
            found = [array.at[chosen].get(mode="clip") for array in arrays]
            return pair([array[:, :, own].swapaxes(1, 2) for array in found])

    else:

        def fetch(numbers: Array, block: Array) -> tuple[Array, Array]:
            sequences = last[numbers] // paths.length

            def one(array: Array) -> Array:
                shape = (1, array.shape[1], BLOCK, array.shape[3])
                found = jax.vmap(
                    lambda row: jax.lax.dynamic_slice(
                        array, (row, 0, block * BLOCK, 0), shape
                    )[0]
                )(sequences)
                return found[:, own]

            return pair([one(array) for array in arrays])

    # As many at once as half of a tile: decoding has a task a row.
    settings = PathSettings(
        max(8, rows.tile // 2),
        float(config.score_scale),
        config.window(index),
        config.attention_softcap,
    )
    sinks = getattr(params.attention, "sinks", None)
    attended = attend_paths(settings, query, tasks, fetch, sinks)
    return rows.each(functools.partial(_output, params, up), attended, gate), read


def _arrays(read: Read) -> tuple[Array, ...]:
    """Keys and values; with latent attention, entries alone."""
    if not isinstance(read, LayerCache):
        return read
    # A cache of codes is refused with exact mode.
    keys, values = cast("tuple[Array, Array]", (read.keys, read.values))
    return (keys, values) if values.shape[-1] else (keys,)


class _LatentUp(NamedTuple):
    """The up-projections of latents, to keys and to values: [kv_rank, heads, dim]."""

    key: Array
    value: Array


def _latent_up(
    config: ModelConfig,
    params: LatentAttentionParams[Array],
    dtype: jnp.dtype,
    rows: CountedRows,
) -> _LatentUp:
    """Makes and cuts the matrix once.

    Cut in every tile, the products took 3.4 times as long with the widths of
    DeepSeek-V2-Lite (float32, two cores).
    """
    latent, weight = config.latent, params.kv_up
    assert latent is not None
    if is_matrix(weight):
        weight = isolated(lambda weight: weight.dense(dtype), rows.count > 0, weight)
    return _LatentUp(weight[..., : latent.nope_dim], weight[..., latent.nope_dim :])


def _projected(
    config: ModelConfig,
    index: int,
    params: LayerParams[Array],
    up: _LatentUp | None,
    x: Array,
    positions: Array,
) -> tuple[Array | None, ...]:
    """Queries, gates, keys and values of a tile, [TILE, heads, head_dim] each.

    With latent attention, queries, no gates, and entries; for a layer that reads the
    keys of another, queries and gates.
    """
    spec, at, tables = config.layer(index), positions[None], None
    kind = rotation(config, index)
    if kind is not None:
        tables = rope_tables(config, at, kind)
    context = Context(at, None, None, tables, spec.window, None)
    attention = params.attention
    if up is None:
        query, gate = queries(config, attention, x, context)  # type: ignore[arg-type]
        entries = ()
        if spec.makes_keys:
            entries = keys_and_values(config, attention, x, context)  # type: ignore[arg-type]
    else:
        assert config.latent is not None
        assert isinstance(attention, LatentAttentionParams)
        parts = latent_parts(config, config.latent, attention, x, context)
        query, *entries = to_latents(parts, up.key)
        gate = None
    found = query, gate, *entries
    return tuple(None if heads is None else heads[0] for heads in found)


def _output(
    params: LayerParams[Array],
    up: _LatentUp | None,
    attended: Array,
    gate: Array | None,
) -> Array:
    """This device's part of the output of attention."""
    if up is not None:
        attended = from_latents(attended[None], up.value)[0]
    flat = with_gate(attended, gate).reshape(attended.shape[0], -1)
    assert params.attention is not None
    output, bias = params.attention.output, params.attention.output_bias
    return project(flat, output, bias, inputs=2)


def _written(entry: LayerCache, entries: list[Array], paths: Paths) -> LayerCache:
    """Writes the keys and values of rows, [rows, heads, dim] each, to the cache."""
    # Tokens that are not counted are written nowhere.
    to = jnp.where(paths.counted, paths.positions, entry.keys.shape[2])
    key, value = (
        paths.rows.batch(each).swapaxes(1, 2) for each in (entries[0], entries[-1])
    )
    if len(entries) == 1:
        value = value[..., :0]
    return entry.write(key, value, to.reshape(-1, paths.length), kernels="xla")


def _read_heads(
    config: ModelConfig,
    over_heads: tuple[str, ...],
    over_kv_heads: tuple[str, ...],
    heads: int,
    kv_heads: int,
) -> tuple[slice | Array, int]:
    """First and number of the key/value heads that this device's query heads read."""
    if not over_heads or over_kv_heads or kv_heads == 1:
        return slice(None), kv_heads
    # All key/value heads are on every device. If each group of query heads lies on one
    # device, or a device's heads are in one group, each is read once.
    group = config.num_heads // kv_heads
    first = jax.lax.axis_index(over_heads) * heads
    step = min(group, heads) if max(group, heads) % min(group, heads) == 0 else 1
    return (first + jnp.arange(0, heads, step, dtype=jnp.int32)) // group, heads // step
