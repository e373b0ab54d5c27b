"""Dropout of what an adapter's A multiplies, in training.

References:
    LoRA, arXiv:2106.09685, and PEFT's lora_dropout; dropout, Srivastava et al., JMLR 15
    (2014).
"""

import zlib

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_post.types import Array, Float, Int

__all__ = ["Dropout"]


@struct.dataclass
class Dropout:
    """Drops entries of an input [tokens, inner].

    A token's random numbers are a function of the key and of the token's number, so
    they depend neither on the mesh, nor on the microbatch of a token, and the backward
    pass of a rematerialised layer computes the same.

    Attributes:
        key: a PRNG key.
        tokens: int32 number of each token.
        rate: probability of being dropped, in (0, 1).
    """

    key: Array
    tokens: Int[Array, " tokens"]
    rate: float = struct.field(pytree_node=False)

    def folded(self, name: str) -> "Dropout":
        """Returns the dropout of the matrix of a name, with a key of its own."""
        key = jax.random.fold_in(self.key, zlib.crc32(name.encode()))
        return self.replace(key=key)  # type: ignore[attr-defined]

    def of(self, x: Float[Array, "tokens inner"]) -> Float[Array, "tokens inner"]:
        """Returns x / (1 - rate) where it is kept and 0 elsewhere, in x's dtype."""

        def kept(token: Array) -> Array:
            own = jax.random.fold_in(self.key, token)
            return jax.random.bernoulli(own, 1 - self.rate, x.shape[1:])

        return jnp.where(jax.vmap(kept)(self.tokens), x / (1 - self.rate), 0)
