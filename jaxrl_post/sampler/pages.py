"""The cache on the device: pages of keys and values, and dense views of them.

A call copies the pages that it reads into a view, computes, and writes the new entries
back. On a mesh that splits the batch each part works on its own pages and rows, by
local page numbers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxrl_post.kernels.attention.paths import BLOCK
from jaxrl_post.kernels.decode_attention import Entries
from jaxrl_post.models import KVCache, ModelConfig
from jaxrl_post.models.cache import SharedCache, state_specs, states
from jaxrl_post.models.spec import is_spec
from jaxrl_post.sampler.sizes import PAGE
from jaxrl_post.sampler.snapshots import NO_STATE
from jaxrl_post.sharding import Rules, dividing_axes, on_parts
from jaxrl_post.types import Array, HostOrDevice, Int, PyTree

__all__ = [
    "Pages",
    "Shared",
    "StateSlots",
    "own_entries",
    "read_pages",
    "read_paths",
    "read_shared",
    "read_states",
    "write_pages",
    "write_states",
]

NO_TOKEN = jnp.iinfo(jnp.int32).max


@struct.dataclass
class Pages:
    """Keys and values of all layers in pages of PAGE tokens, and states in slots.

    Attributes:
        keys: [pages, kv_heads, PAGE, head_dim] for every layer; None for a layer with a
            state, or that reads another's keys.
        values: like the keys, but of any width.
        states: as `KVCache.states`, in slots; of a layer for multi-token prediction, in
            the same slots, the model's final hidden state at a sequence's last token.
    """

    keys: tuple[Entries | None, ...]
    values: tuple[Entries | None, ...]
    states: tuple[Any, ...] = ()

    replace = dataclasses.replace

    @classmethod
    def zeros(
        cls, config: ModelConfig, pages: int, slots: int, dtype: DTypeLike
    ) -> "Pages":
        """Makes an empty cache; `dtype` as in `KVCache.zeros`."""
        cache = KVCache.zeros(config, pages, PAGE, dtype)
        return cls(cache.keys, cache.values, states(state_specs(config), slots, dtype))

    @property
    def dtype(self) -> DTypeLike:
        """Dtype of the entries, or of their codes."""
        return jax.tree.leaves(self.keys)[0].dtype


@struct.dataclass
class Shared:
    """Entries that groups of rows read together; padded with groups without tokens.

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
class StateSlots:
    """The slots of the states of a call's rows, for a model with states.

    Attributes:
        sources: int32, where the state before the row's first token is; the number of
            slots or more for a state of zeros.
        targets: int32, where the state after its last token goes; the number of slots
            or more for nowhere.
    """

    sources: Int[HostOrDevice, " rows"]
    targets: Int[HostOrDevice, " rows"]

    @classmethod
    def none(cls, rows: int) -> "StateSlots":
        """Slots that are nowhere."""
        return cls(*(np.full((rows,), NO_STATE, np.int32) for _ in range(2)))


def read_states(
    specs: PyTree, pages: Pages, slots: StateSlots | None, rules: Rules
) -> tuple[Any, ...]:
    """Copies the states with which the rows of a call begin; () without any.

    Args:
        specs: of a sequence's states.
        pages: with the states.
        slots: of the rows.
        rules: logical axis to mesh axes.
    """
    if slots is None or not pages.states:
        return ()

    def read(states: Any, sources: Array) -> Any:
        return jax.tree.map(
            lambda held: held.at[sources].get(mode="fill", fill_value=0), states
        )

    sources = jnp.asarray(slots.sources)
    return _on_state_parts(specs, pages, rules, read, pages.states, sources)


def write_states(
    specs: PyTree,
    pages: Pages,
    new: tuple[Any, ...],
    slots: StateSlots | None,
    rules: Rules,
) -> tuple[Any, ...]:
    """Returns the states of a cache with those with which the rows of a call end.

    Args:
        specs: of a sequence's states.
        pages: with the states.
        new: of the rows.
        slots: of the rows.
        rules: logical axis to mesh axes.
    """
    if slots is None:
        return pages.states

    def write(states: Any, new: Any, targets: Array) -> Any:
        return jax.tree.map(
            lambda held, one: held.at[targets].set(one, mode="drop"), states, new
        )

    targets = jnp.asarray(slots.targets)
    return _on_state_parts(specs, pages, rules, write, pages.states, new, targets)


def read_paths(
    pages: Pages,
    shared: Shared | None,
    ids: Int[Array, "rows own_pages"],
    starts: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    rules: Rules,
) -> KVCache:
    """Copies the path of every row: entry p is the token at position p.

    A path lies in pages that groups share, each perhaps partly filled, and in own
    pages. Entries without a token are zeros.

    Args:
        pages: the cache.
        shared: what groups of rows share; None if nothing is.
        ids: int32, own pages of each row.
        starts: int32, position of each row's first own entry.
        counts: int32, number of own entries that have been computed.
        rules: logical axis to mesh axes.
    """
    count, num_own = ids.shape
    num_shared = 0 if shared is None else shared.pages.shape[1]
    length = -(-(num_shared + num_own) * PAGE // BLOCK) * BLOCK
    at = jnp.arange(length, dtype=jnp.int32)

    def read(page: Array, own: Array, starts: Array, counts: Array, *common: Array):
        inside = at - starts[:, None]
        found = (inside >= 0) & (inside < counts[:, None])
        number = jnp.clip(inside // PAGE, 0, own.shape[1] - 1)
        chosen = jnp.take_along_axis(own, number, axis=1)
        entry = inside % PAGE
        if shared is not None:
            from_ids, begins, sizes, places = common
            group = places // shared.members
            alone = group >= from_ids.shape[0]
            used = (sizes[group] > 0) & ~alone[:, None]
            # Pages lie in the order of the path; those without tokens come last.
            begin = jnp.where(used, begins[group], NO_TOKEN)
            before = jax.vmap(
                lambda row: jnp.searchsorted(row, at, side="right").astype(jnp.int32)
            )(begin)
            number = jnp.maximum(before - 1, 0)
            within = at - jnp.take_along_axis(begin, number, axis=1)
            size = jnp.take_along_axis(sizes[group], number, axis=1)
            known = (before > 0) & (within < size)
            from_group = jnp.take_along_axis(from_ids[group], number, axis=1)
            chosen = jnp.where(known, from_group, chosen)
            entry = jnp.where(known, within, entry)
            found |= known
        entries = page.at[chosen, :, entry].get(mode="clip")
        entries = jnp.where(found[..., None, None], entries, 0)
        return entries.swapaxes(1, 2)

    arrays: tuple[Array, ...] = (ids, starts, counts)
    if shared is not None:
        arrays += shared.pages, shared.starts, shared.counts, shared.places
    specs = (True, *(False for _ in arrays))
    local = _on_parts(pages.keys, count, rules, specs)(read)
    return KVCache(
        *jax.tree.map(lambda leaf: local(leaf, *arrays), (pages.keys, pages.values))
    )


def own_entries(
    view: KVCache,
    starts: Int[Array, " rows"],
    length: int,
    rules: Rules,
) -> KVCache:
    """The entries of paths from `starts` on.

    Args:
        view: of `read_paths`.
        starts: int32, a position of each row.
        length: static, number of entries.
        rules: logical axis to mesh axes.
    """

    def cut(path: Array, starts: Array) -> Array:
        return jax.vmap(
            lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, length, 1)
        )(path, starts)

    specs = (True, False)
    local = _on_parts(view.keys, starts.shape[0], rules, specs)(cut)
    return KVCache(
        *jax.tree.map(lambda leaf: local(leaf, starts), (view.keys, view.values))
    )


def read_shared(pages: Pages, shared: Shared, rules: Rules) -> SharedCache:
    """Reads what groups share."""
    shared = jax.tree.map(jnp.asarray, shared)
    inside = jnp.arange(PAGE, dtype=jnp.int32)
    positions = jnp.where(
        inside < shared.counts[..., None], shared.starts[..., None] + inside, NO_TOKEN
    )
    return SharedCache(
        keys=read_pages(pages.keys, shared.pages, shared.counts, rules),
        values=read_pages(pages.values, shared.pages, shared.counts, rules),
        positions=positions.reshape(shared.pages.shape[0], -1),
        places=shared.places,
        members=shared.members,
    )


def read_pages(
    layers: tuple[Entries | None, ...],
    ids: Int[Array, "rows count"],
    filled: Int[Array, "rows count"],
    rules: Rules,
) -> tuple[Entries | None, ...]:
    """Copies pages into rows [rows, kv_heads, count * PAGE, dim].

    What a page holds beyond its tokens is replaced by zeros, because an infinite or NaN
    value of a sample that has ended would spoil the sums in which it has no weight.

    Args:
        layers: keys or values of all layers, as in `Pages`.
        ids: int32, pages of each row.
        filled: int32, number of tokens of each page.
        rules: logical axis to mesh axes.
    """

    def read(page: Array, ids: Array, filled: Array) -> Array:
        found = page.at[ids].get(mode="clip")
        seen = jnp.arange(PAGE, dtype=jnp.int32) < filled[..., None]
        found = jnp.where(seen[:, :, None, :, None], found, 0)
        rows, count, heads, _, dim = found.shape
        found = found.transpose(0, 2, 1, 3, 4)
        return found.reshape(rows, heads, count * PAGE, dim)

    specs = (True, False, False)
    local = _on_parts(layers, ids.shape[0], rules, specs)(read)
    return jax.tree.map(lambda leaf: local(leaf, ids, filled), layers)


def write_pages(
    pages: Pages,
    view: KVCache,
    ids: HostOrDevice,
    first: Int[Array, " rows"],
    count: int,
    rules: Rules,
) -> Pages:
    """Writes `count` pages of each row of a view, from page `first` on.

    Args:
        pages: the cache.
        view: own entries of the rows, whole pages.
        ids: int32 [rows, own_pages], where they go; the number of pages or more for
            nowhere.
        first: int32, a page of each row.
        count: static.
        rules: logical axis to mesh axes.
    """

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
    local = _on_parts(pages.keys, ids.shape[0], rules, specs)(write)
    keys, values = jax.tree.map(
        lambda old, new: local(old, new, ids, first),
        (pages.keys, pages.values),
        (view.keys, view.values),
    )
    return pages.replace(keys=keys, values=values)


def _on_parts(
    layers: tuple[Entries | None, ...],
    rows: int,
    rules: Rules,
    has_heads: tuple[bool, ...],
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Lets each part of a mesh work on its own pages and rows, by local page numbers.

    Args:
        layers: pages, or entries of rows.
        rows: number of rows.
        rules: logical axis to mesh axes.
        has_heads: for each argument, whether its second dimension is kv_heads. The
            first has it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return lambda function: function
    pages = jax.tree.leaves(layers)[0].shape[0]
    batch = dividing_axes("batch", pages, mesh, rules) or None
    assert batch == (dividing_axes("batch", rows, mesh, rules) or None)

    def split(function: Callable[..., Array]) -> Callable[..., Array]:
        def run(entries: Array, *arguments: Any) -> Array:
            # Layers may have other numbers of heads.
            heads = dividing_axes("kv_heads", entries.shape[1], mesh, rules) or None
            specs = tuple(P(batch, heads) if flag else P(batch) for flag in has_heads)
            local = on_parts(function, in_specs=specs, out_specs=P(batch, heads))
            return local(entries, *arguments)

        return run

    return split


def _on_state_parts(
    specs: PyTree,
    pages: Pages,
    rules: Rules,
    function: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """As `_on_parts`, for a function of states that returns states.

    Args:
        specs: of a sequence's states.
        pages: with the states.
        rules: logical axis to mesh axes.
        function: of the arguments.
        *arguments: trees of the states of slots or rows; then an array of rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(*arguments)
    slots = jax.tree.leaves(pages.states)[0].shape[0]
    batch = dividing_axes("batch", slots, mesh, rules) or None
    *trees, numbers = arguments
    assert batch == (dividing_axes("batch", numbers.shape[0], mesh, rules) or None)
    whole = jax.tree.map(
        lambda spec: P(
            batch,
            *(
                dividing_axes(axis, size, mesh, rules) or None
                for axis, size in zip(spec.axes, spec.shape, strict=True)
            ),
        ),
        specs,
        is_leaf=is_spec,
    )
    local = on_parts(
        function, in_specs=(*(whole for _ in trees), P(batch)), out_specs=whole
    )
    return local(*arguments)
