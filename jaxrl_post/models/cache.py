"""Keys and values of earlier tokens: the one thing in which decoding differs.

A `KVCache` holds, per layer, keys and values [slots, kv_heads, length, head_dim]. Entry
`p` of a slot belongs to the token at position `p`. Entries beyond what was written may
hold any finite number: a query at position `p` sees entries 0..p, all of which have
been written, because a token's own key is written before it attends.
"""

import dataclasses
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
    """What `forward` needs of a cache; see `LayerCache` for one layer's part."""

    def layer(self, index: int) -> "LayerCache":
        """Returns the part of one layer."""
        ...

    def with_layers(self, layers: Sequence["LayerCache"]) -> "KVView":
        """Returns the view with all layers replaced."""
        ...


@struct.dataclass
class LayerCache:
    """Keys and values of one layer, [slots, kv_heads, length, head_dim] each.

    `view_length` bounds what is read: no position at or beyond it has been written.
    """

    keys: Float[Array, "slots kv_heads length head_dim"]
    values: Float[Array, "slots kv_heads length head_dim"]
    view_length: int = struct.field(pytree_node=False)

    def write(
        self,
        key: Float[Array, "slots kv_heads new head_dim"],
        value: Float[Array, "slots kv_heads new head_dim"],
        positions: Int[Array, "slots new"],
    ) -> "LayerCache":
        """Stores consecutive tokens of every slot, the first at `positions[:, 0]`.

        They must fit: where they would not, XLA moves them to the end of the slot.
        """
        start = positions[:, 0]

        def put(cache: Array, new: Array, at: Array) -> Array:
            zero = jnp.zeros_like(at)
            return jax.lax.dynamic_update_slice(cache, new, (zero, at, zero))

        return dataclasses.replace(
            self,
            keys=jax.vmap(put)(self.keys, key, start),
            values=jax.vmap(put)(self.values, value, start),
        )

    def read(self) -> tuple[Array, Array, Int[Array, "slots view"]]:
        """Returns keys, values and the positions of what may have been written."""
        slots = self.keys.shape[0]
        positions = jnp.arange(self.view_length, dtype=jnp.int32)
        return (
            self.keys[:, :, : self.view_length],
            self.values[:, :, : self.view_length],
            jnp.broadcast_to(positions, (slots, self.view_length)),
        )


@struct.dataclass
class KVCache:
    """The caches of all layers, one array a layer so that each is updated in place."""

    keys: tuple[Float[Array, "slots kv_heads length head_dim"], ...]
    values: tuple[Float[Array, "slots kv_heads length head_dim"], ...]
    view_length: int = struct.field(pytree_node=False)

    @classmethod
    def zeros(
        cls, config: ModelConfig, slots: int, length: int, dtype: DTypeLike
    ) -> "KVCache":
        """Makes an empty cache for `slots` sequences of up to `length` tokens."""
        shape = (slots, config.num_kv_heads, length, config.head_dim)
        fresh = lambda: tuple(  # noqa: E731
            jnp.zeros(shape, dtype) for _ in range(config.num_layers)
        )
        return cls(fresh(), fresh(), length)

    @property
    def length(self) -> int:
        """Tokens that a slot can hold."""
        return self.keys[0].shape[2]

    def view(self, length: int) -> "KVCache":
        """Returns the cache with reads bounded to the first `length` positions."""
        return dataclasses.replace(self, view_length=length)

    def layer(self, index: int) -> LayerCache:
        """Returns one layer's part."""
        return LayerCache(self.keys[index], self.values[index], self.view_length)

    def with_layers(self, layers: Sequence[LayerCache]) -> "KVCache":
        """Returns the cache with all layers replaced."""
        return dataclasses.replace(
            self,
            keys=tuple(layer.keys for layer in layers),
            values=tuple(layer.values for layer in layers),
        )
