"""Rows of tokens some of which stand for blocks of pictures."""

import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl_post.models.vision.tower import VisionOutput
from jaxrl_post.types import Array, Float, Int

__all__ = ["PictureTokens"]


@struct.dataclass
class PictureTokens:
    """Tokens, and what the tower gives for the image tokens among them.

    Attributes:
        tokens: int32 ids; image tokens have the model's id of such tokens.
        places: int32, for an image token the number of its embedding, counted over all
            pictures of `output` with their padding; -1 for a token of text.
        rotations: int32, positions in time, row and column (`mrope_positions`).
        output: of `tower`.
    """

    tokens: Int[Array, "batch length"]
    places: Int[Array, "batch length"]
    rotations: Int[Array, "3 batch length"]
    output: VisionOutput

    def embedded(
        self, hidden: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens hidden"]:
        """Puts embeddings of pictures in the places of image tokens."""
        found, there = self._of_tokens(self.output.embeddings)
        return jnp.where(there, found.astype(hidden.dtype), hidden)

    @property
    def num_levels(self) -> int:
        """Layers whose output has a level of the tower added, from the first on."""
        return len(self.output.levels)

    def levels(self, dtype: DTypeLike) -> list[Float[Array, "tokens hidden"]]:
        """Returns the levels of all tokens, zeros for those of text."""
        return [self._of_tokens(level)[0].astype(dtype) for level in self.output.levels]

    def _of_tokens(self, array: Array) -> tuple[Array, Array]:
        """The vectors of all tokens (zeros for text), and which tokens have one."""
        flat = array.reshape(-1, array.shape[-1])
        places = self.places.reshape(-1)
        there = places >= 0
        # A negative index would count from the end.
        found = flat.at[jnp.where(there, places, len(flat))].get(
            mode="fill", fill_value=0
        )
        return found, there[:, None]
