"""The cache of keys and values of earlier tokens, for prefill and decoding.

A `KVCache` holds, per layer, keys and values [slots, kv_heads, length, head_dim]. Entry
`p` of a slot belongs to the token at position `p`. Entries that were never written may
hold any finite number: a query at position `p` attends to entries 0..p only, and all of
them are written, because a token's own key is written before it attends. With latent
attention the keys hold the latents, kv_heads is 1 and the values have width 0.
"""

import functools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.types import Array, Float, Int

__all__ = ["KVCache", "KVView", "LayerCache"]


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
class LayerCache:
    """Keys and values of one layer."""

    keys: Float[Array, "slots kv_heads length head_dim"]
    values: Float[Array, "slots kv_heads length value_dim"]

    def write(
        self,
        key: Float[Array, "slots kv_heads new head_dim"],
        value: Float[Array, "slots kv_heads new value_dim"],
        positions: Int[Array, "slots new"],
    ) -> "LayerCache":
        """Stores the tokens of every slot; drops positions beyond the cache."""

        def put(cache: Array, new: Array, at: Array) -> Array:
            return cache.at[:, at].set(new, mode="drop", unique_indices=True)

        # vmap over slots, so that slots split over a mesh need no communication.
        return LayerCache(
            keys=jax.vmap(put)(self.keys, key, positions),
            values=jax.vmap(put)(self.values, value, positions),
        )

    def read(self) -> tuple[Array, Array, Int[Array, "slots length"]]:
        """Returns keys, values and the positions of all entries."""
        slots, _, length, _ = self.keys.shape
        positions = jnp.arange(length, dtype=jnp.int32)
        return self.keys, self.values, jnp.broadcast_to(positions, (slots, length))


@struct.dataclass
class KVCache:
    """The caches of all layers; one array per layer allows updates in place."""

    keys: tuple[Float[Array, "slots kv_heads length head_dim"], ...]
    values: tuple[Float[Array, "slots kv_heads length value_dim"], ...]

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
        """Number of tokens that a slot can hold."""
        return self.keys[0].shape[2]

    def prefix(self, length: int) -> "KVCache":
        """Returns a copy of the first `length` entries of every slot.

        Attention reads all entries of its cache. Copying the needed entries once before
        decoding avoids a copy for every token.
        """
        if length == self.length:
            return self
        return jax.tree.map(lambda cache: cache[:, :, :length], self)

    def with_prefix(self, prefix: "KVCache") -> "KVCache":
        """Returns the cache with its first entries replaced."""
        if prefix.length == self.length:
            return prefix
        put = functools.partial(
            jax.lax.dynamic_update_slice, start_indices=(0, 0, 0, 0)
        )
        return jax.tree.map(put, self, prefix)

    def layer(self, index: int) -> LayerCache:
        """Returns one layer's part."""
        return LayerCache(self.keys[index], self.values[index])

    def with_layers(self, layers: Sequence[LayerCache]) -> "KVCache":
        """Returns the cache with all layers replaced."""
        return KVCache(
            keys=tuple(layer.keys for layer in layers),
            values=tuple(layer.values for layer in layers),
        )
