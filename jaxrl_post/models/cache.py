"""The cache of keys and values of earlier tokens, for prefill and decoding.

A `KVCache` holds, per layer, keys and values [slots, kv_heads, length, head_dim]. Entry
`i` of a slot belongs to the token at position `start + i`; the tokens before `start`
are in keys and values that the slot shares with others. Entries that were never written
may hold any finite number: a query at position `p` attends to positions 0..p only, and
all of them are written, because a token's own key is written before it attends. With
latent attention the keys hold the latents, kv_heads is 1 and the values have width 0.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl_post.kernels.decode_attention import SharedKeys
from jaxrl_post.models.config import ModelConfig
from jaxrl_post.types import Array, Float, Int

__all__ = ["KVCache", "KVView", "LayerCache", "SharedCache"]


@runtime_checkable
class KVView(Protocol):
    """The interface of a cache in `forward`; `LayerCache` is one layer's part."""

    def layer(self, index: int) -> "LayerCache":
        """Returns the part of one layer."""
        ...

    def with_layers(self, layers: Sequence["LayerCache"]) -> "KVView":
        """Returns the view with all layers replaced."""
        ...


@struct.dataclass
class SharedCache:
    """Keys and values of all layers that groups of sequences share; only read.

    Attributes:
        keys: one array per layer.
        values: one array per layer.
        positions: int32, as in `kernels.decode_attention.SharedKeys`.
        places: int32, as there.
        members: as there.
    """

    keys: tuple[Float[Array, "groups kv_heads length head_dim"], ...]
    values: tuple[Float[Array, "groups kv_heads length value_dim"], ...]
    positions: Int[Array, "groups length"]
    places: Int[Array, " slots"]
    members: int = struct.field(pytree_node=False)


@struct.dataclass
class LayerCache:
    """Keys and values of one layer; see `KVCache`."""

    keys: Float[Array, "slots kv_heads length head_dim"]
    values: Float[Array, "slots kv_heads length value_dim"]
    starts: Int[Array, " slots"] | None = None
    shared: SharedKeys | None = None

    def write(
        self,
        key: Float[Array, "slots kv_heads new head_dim"],
        value: Float[Array, "slots kv_heads new value_dim"],
        positions: Int[Array, "slots new"],
    ) -> "LayerCache":
        """Stores the tokens of every slot; drops positions outside of its entries."""
        length = self.keys.shape[2]
        if self.starts is not None:
            entries = positions - self.starts[:, None]
            positions = jnp.where(entries < 0, length, entries)

        def put(cache: Array, new: Array, at: Array) -> Array:
            return cache.at[:, at].set(new, mode="drop", unique_indices=True)

        # vmap over slots, so that slots split over a mesh need no communication.
        return dataclasses.replace(
            self,
            keys=jax.vmap(put)(self.keys, key, positions),
            values=jax.vmap(put)(self.values, value, positions),
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
        keys: one array per layer.
        values: one array per layer.
        starts: int32, position of the first entry of each slot; None: 0.
        shared: keys and values that slots share; None if there are none.
    """

    keys: tuple[Float[Array, "slots kv_heads length head_dim"], ...]
    values: tuple[Float[Array, "slots kv_heads length value_dim"], ...]
    starts: Int[Array, " slots"] | None = None
    shared: SharedCache | None = None

    @classmethod
    def zeros(
        cls, config: ModelConfig, slots: int, length: int, dtype: DTypeLike
    ) -> "KVCache":
        """Makes an empty cache for `slots` sequences of up to `length` tokens."""
        heads, *widths = config.cache_shape

        def fresh(width: int) -> tuple[Array, ...]:
            shape = (slots, heads, length, width)
            return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

        keys, values = map(fresh, widths)
        return cls(keys, values)

    @property
    def length(self) -> int:
        """Number of tokens that a slot can hold beside those that it shares."""
        return self.keys[0].shape[2]

    def layer(self, index: int) -> LayerCache:
        """Returns one layer's part."""
        shared = self.shared
        return LayerCache(
            self.keys[index],
            self.values[index],
            self.starts,
            None
            if shared is None
            else SharedKeys(
                shared.keys[index],
                shared.values[index],
                shared.positions,
                shared.places,
                shared.members,
            ),
        )

    def with_layers(self, layers: Sequence[LayerCache]) -> "KVCache":
        """Returns the cache with all layers replaced."""
        return dataclasses.replace(
            self,
            keys=tuple(layer.keys for layer in layers),
            values=tuple(layer.values for layer in layers),
        )
