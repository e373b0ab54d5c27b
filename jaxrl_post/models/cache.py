"""The cache of keys and values of earlier tokens, for prefill and decoding.

A `KVCache` holds, per layer, keys and values [slots, kv_heads, length, head_dim]. Entry
`i` of a slot belongs to the token at position `start + i`; the tokens before `start`
are in keys and values that the slot shares with others. Entries that were never written
may hold any finite number: a query at position `p` attends to positions 0..p only, and
all of them are written, because a token's own key is written before it attends. With
latent attention the keys hold the latents, kv_heads is 1 and the values have width 0.

A cache of dtype int8 or float8_e4m3fn holds `QuantizedEntries`. A new token is
quantised when it is written, and attends to itself as quantised; so what a token sees
does not depend on the calls in which it and those before it were computed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl_post.kernels.decode_attention import (
    CODE_DTYPES,
    Entries,
    QuantizedEntries,
    SharedKeys,
    quantize_entries,
    write_entries,
)
from jaxrl_post.kernels.dispatch import Implementation
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.recurrences import LinearAttention, ShortConvolution
from jaxrl_post.models.spec import ParamSpec, is_spec
from jaxrl_post.sharding import DEFAULT_RULES, Rules
from jaxrl_post.types import Array, Float, Int

__all__ = [
    "KVCache",
    "KVView",
    "LayerCache",
    "LinearState",
    "SharedCache",
    "StateCache",
    "state_specs",
    "states",
]


@runtime_checkable
class KVView(Protocol):
    """The interface of a cache in `forward`; it has a part for every layer."""

    def layer(self, index: int) -> "LayerCache | StateCache | None":
        """Returns the part of one layer; None for a layer without a mixer."""
        ...

    def with_layers(
        self, layers: Sequence["LayerCache | StateCache | None"]
    ) -> "KVView":
        """Returns the view with all layers replaced."""
        ...


@struct.dataclass
class StateCache:
    """The state of one layer that has one in place of keys and values.

    Attributes:
        state: an array [slots, ...], or several, after the tokens before these.
        counts: int32, number of tokens in this call that count in each slot. They come
            first; the others do not change the state. None if all count.
        opened: whether the call leaves open how many of its tokens count: the layer
            then returns in place of each array what gives it by `after(counts)`.
    """

    state: Any
    counts: Int[Array, " slots"] | None = None
    opened: bool = struct.field(pytree_node=False, default=False)

    replace = dataclasses.replace

    def counted(self, shape: tuple[int, ...]) -> Int[Array, " slots"]:
        """`counts`, for tokens of the shape [slots, length]."""
        if self.counts is not None:
            return self.counts
        return jnp.full(shape[:1], shape[1], jnp.int32)


@struct.dataclass
class SharedCache:
    """Keys and values of all layers that groups of sequences share; only read.

    Attributes:
        keys: one array per layer, as `KVCache.keys`.
        values: one array per layer.
        positions: int32, as in `kernels.decode_attention.SharedKeys`.
        places: int32, as there.
        members: as there.
    """

    keys: tuple[Entries | None, ...]
    values: tuple[Entries | None, ...]
    positions: Int[Array, "groups length"]
    places: Int[Array, " slots"]
    members: int = struct.field(pytree_node=False)


@struct.dataclass
class LayerCache:
    """Keys and values of one layer; see `KVCache`."""

    keys: Entries
    values: Entries
    starts: Int[Array, " slots"] | None = None
    shared: SharedKeys | None = None

    def write(
        self,
        key: Float[Array, "slots kv_heads new head_dim"],
        value: Float[Array, "slots kv_heads new value_dim"],
        positions: Int[Array, "slots new"],
        rules: Rules = DEFAULT_RULES,
        kernels: Implementation = "auto",
    ) -> "LayerCache":
        """Stores the tokens of every slot; drops positions outside of its entries."""
        length = self.keys.shape[2]
        if self.starts is not None:
            entries = positions - self.starts[:, None]
            positions = jnp.where(entries < 0, length, entries)

        def coded(cache: Entries, new: Array) -> Entries:
            if isinstance(cache, QuantizedEntries):
                return quantize_entries(new, cache.codes.dtype)
            return new

        # Latent attention has no values.
        count = 1 if not value.shape[-1] else 2
        caches = (self.keys, self.values)[:count]
        made = tuple(map(coded, caches, (key, value)[:count]))
        written = write_entries(
            caches, made, positions, rules=rules, implementation=kernels
        )
        return dataclasses.replace(
            self, keys=written[0], values=written[1] if count > 1 else self.values
        )

    @property
    def positions(self) -> Int[Array, "slots length"]:
        """Positions of all entries."""
        slots, _, length, _ = self.keys.shape
        positions = jnp.arange(length, dtype=jnp.int32)[None]
        if self.starts is not None:
            positions = positions + self.starts[:, None]
        return jnp.broadcast_to(positions, (slots, length))


@struct.dataclass
class KVCache:
    """The caches of all layers; one array per layer allows updates in place.

    Attributes:
        keys: one array per layer; None for a layer without attention, or that reads the
            keys of another.
        values: as the keys.
        starts: int32, position of the first entry of each slot; None: 0.
        shared: keys and values that slots share; None if there are none.
        states: the state of each layer that has one, as `state_specs` has it; None
            for the other layers; () if no layer has one.
        counts: as `StateCache.counts`; None if all tokens count.
        opened: as `StateCache.opened`.
    """

    keys: tuple[Entries | None, ...]
    values: tuple[Entries | None, ...]
    starts: Int[Array, " slots"] | None = None
    shared: SharedCache | None = None
    states: tuple[Any, ...] = ()
    counts: Int[Array, " slots"] | None = None
    opened: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def zeros(
        cls, config: ModelConfig, slots: int, length: int, dtype: DTypeLike
    ) -> "KVCache":
        """Makes an empty cache for `slots` sequences of up to `length` tokens.

        Args:
            config: of the model.
            slots: number of sequences.
            length: most tokens of a sequence.
            dtype: a float dtype; int8 or float8_e4m3fn for quantised entries.
        """
        codes = jnp.dtype(dtype).name in CODE_DTYPES

        def one(heads: int, width: int) -> Entries:
            empty = jnp.zeros((slots, heads, length, width), dtype)
            if not codes or not width:
                return empty
            scales = jnp.zeros((slots, heads, length, 1), jnp.float32)
            return QuantizedEntries(empty, scales)

        def fresh(part: int) -> tuple[Entries | None, ...]:
            shapes = map(config.cache_shape, range(config.num_layers))
            return tuple(each and one(each[0], each[part]) for each in shapes)

        keys, values = fresh(1), fresh(2)
        return cls(keys, values, states=states(state_specs(config), slots, dtype))

    @property
    def length(self) -> int:
        """Number of tokens that a slot can hold, without the shared ones."""
        return next(keys.shape[2] for keys in self.keys if keys is not None)

    def layer(self, index: int) -> LayerCache | StateCache | None:
        """Returns one layer's part; None for a layer without a mixer."""
        shared, keys, values = self.shared, self.keys[index], self.values[index]
        if keys is None or values is None:
            state = self.states[index] if self.states else None
            if state is None:
                return None
            return StateCache(state, self.counts, self.opened)
        together = None
        if shared is not None:
            key, value = shared.keys[index], shared.values[index]
            assert key is not None
            together = SharedKeys(
                key, value, shared.positions, shared.places, shared.members
            )
        return LayerCache(keys, values, self.starts, together)

    def with_layers(
        self, layers: Sequence[LayerCache | StateCache | None]
    ) -> "KVCache":
        """Returns the cache with all layers replaced."""
        keyed = [each if isinstance(each, LayerCache) else None for each in layers]
        held = [each if isinstance(each, StateCache) else None for each in layers]
        return dataclasses.replace(
            self,
            keys=tuple(each and each.keys for each in keyed),
            values=tuple(each and each.values for each in keyed),
            states=tuple(None if each is None else each.state for each in held)
            if self.states
            else (),
        )


@struct.dataclass
class LinearState[Leaf]:
    """The state of a layer of linear attention.

    Attributes:
        memory: float32 [slots, heads, key_dim, value_dim].
        query: [slots, kernel - 1, key_heads, key_dim], what the convolution of queries
            has of the last tokens, the oldest first.
        key: the same, of keys.
        value: [slots, kernel - 1, heads, value_dim].
    """

    memory: Leaf
    query: Leaf
    key: Leaf
    value: Leaf


def state_specs(config: ModelConfig) -> tuple[Any, ...]:
    """Specs of a sequence's state in each layer that has one; None for the others."""
    if not config.has_states:
        return ()

    def one(layer: int) -> Any:
        kind = config.recurrent(layer)
        if isinstance(kind, ShortConvolution):
            shape, axes = (kind.kernel - 1, config.hidden_size), ("kernel", "channels")
            return ParamSpec(shape, axes, init="zeros")
        if isinstance(kind, LinearAttention):
            by_key = kind.kernel - 1, kind.key_heads, kind.key_dim
            by_value = kind.kernel - 1, kind.value_heads, kind.value_dim
            axes = "kernel", "heads", "head_dim"
            memory = kind.value_heads, kind.key_dim, kind.value_dim
            return LinearState(
                memory=ParamSpec(memory, axes[1:] + axes[2:], wide=True),
                query=ParamSpec(by_key, axes),
                key=ParamSpec(by_key, axes),
                value=ParamSpec(by_value, axes),
            )
        return None

    return tuple(map(one, range(config.num_layers)))


def states(specs: tuple[Any, ...], slots: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """Makes the states before a first token, as in `KVCache.states`.

    Args:
        specs: of a sequence's states, such as `state_specs`.
        slots: number of sequences.
        dtype: of the cache; states are not quantised, and float32 if it is.
    """
    wide = jnp.float32 if jnp.dtype(dtype).name in CODE_DTYPES else dtype
    return jax.tree.map(
        lambda spec: jnp.zeros((slots, *spec.shape), spec.dtype(wide)),
        specs,
        is_leaf=is_spec,
    )
