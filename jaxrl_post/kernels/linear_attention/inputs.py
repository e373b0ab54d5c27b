"""The arguments of linear attention."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_post.types import Array, Float

__all__ = ["LinearInputs"]


class LinearInputs(NamedTuple):
    """The changes that tokens make to a head's state, S, and what they ask of it.

        S <- e^decay S;   S <- S + k v^T;   o = S^T q

    or, with beta, by the delta rule:

        S <- e^decay S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

    Attributes:
        query: q, of any scale.
        key: k; for the delta rule, of length 1 or less.
        value: v; heads is a multiple of key_heads, and each key head serves as many
            neighbouring heads.
        decay: float32, at most 0, in nats.
        beta: in [0, 1], the part of v that replaces what the state has for k; None if
            values are added.
    """

    query: Float[Array, "batch length key_heads key_dim"]
    key: Float[Array, "batch length key_heads key_dim"]
    value: Float[Array, "batch length heads value_dim"]
    decay: Float[Array, "batch length heads"]
    beta: Float[Array, "batch length heads"] | None = None

    def by_head(self) -> "LinearInputs":
        """The same, with queries and keys of every head."""
        times = self.value.shape[2] // self.key.shape[2]
        query, key = (jnp.repeat(each, times, axis=2) for each in self[:2])
        return self._replace(query=query, key=key)
