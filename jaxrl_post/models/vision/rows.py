"""Rows of tokens some of which stand for blocks of pictures."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.models.params import DecoderParams
from jaxrl_post.models.vision.pictures import Pictures, arrange
from jaxrl_post.models.vision.tower import VisionOutput, VisionRemat, tower
from jaxrl_post.models.vision_config import VisionInputs
from jaxrl_post.pictures.numbered import spots, without
from jaxrl_post.sharding import DEFAULT_RULES, Rules
from jaxrl_post.types import (
    Array,
    Float,
    HostOrDevice,
    Int,
    PackedPictures,
    TokenBatch,
)

__all__ = [
    "PictureTokens",
    "RowPictures",
    "for_devices",
    "row_pictures",
    "with_pictures",
]


@struct.dataclass
class RowPictures:
    """Pictures in rows of tokens.

    Attributes:
        places: int32, for an image token the number of its embedding, counted over all
            pictures with their padding; -1 for a token of text.
        rotations: int32, positions in time, row and column (`rotary_positions`).
        pictures: of the rows, padded to a bucket; None if all tokens are text.
    """

    places: Int[HostOrDevice, "rows length"]
    rotations: Int[HostOrDevice, "rows length 3"]
    pictures: Pictures | None


@struct.dataclass
class PictureTokens:
    """Tokens, and what the tower gives for the image tokens among them.

    Attributes:
        tokens: int32 ids; image tokens have the model's id of such tokens.
        rotations: int32, positions in time, row and column.
        places: int32, as `RowPictures.places`; None if all tokens are text.
        output: of `tower`; None if all tokens are text.
    """

    tokens: Int[Array, "batch length"]
    rotations: Int[Array, "batch length 3"]
    places: Int[Array, "batch length"] | None = None
    output: VisionOutput | None = None

    def embedded(
        self, hidden: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens hidden"]:
        """Puts embeddings of pictures in the places of image tokens."""
        if self.output is None:
            return hidden
        found, there = self._of_tokens(self.output.embeddings)
        return jnp.where(there, found.astype(hidden.dtype), hidden)

    @property
    def num_levels(self) -> int:
        """Layers whose output has a level of the tower added, from the first on."""
        return 0 if self.output is None else len(self.output.levels)

    def levels(self, dtype: DTypeLike) -> list[Float[Array, "tokens hidden"]]:
        """Returns the levels of all tokens, zeros for tokens of text."""
        found = () if self.output is None else self.output.levels
        return [self._of_tokens(level)[0].astype(dtype) for level in found]

    def _of_tokens(self, array: Array) -> tuple[Array, Array]:
        """The vectors of all tokens (zeros for text), and which tokens have one."""
        assert self.places is not None
        flat = array.reshape(-1, array.shape[-1])
        places = self.places.reshape(-1)
        there = places >= 0
        # A negative index would count from the end.
        found = flat.at[jnp.where(there, places, len(flat))].get(
            mode="fill", fill_value=0
        )
        return found, there[:, None]


def row_pictures(
    vision: VisionInputs,
    ids: np.ndarray,
    rotations: np.ndarray,
    *,
    multiple: int = 1,
) -> RowPictures:
    """Makes the arrays of the pictures in rows, on the host.

    A picture that stands in several rows is there once.

    Args:
        vision: the model's.
        ids: int32 [rows, length]; tokens of pictures have their numbers
            (`pictures.number`).
        rotations: int32 [rows, length, 3].
        multiple: the number of pictures is a power of two times this, such as the parts
            into which a mesh splits the batch.

    Raises:
        PictureError: no picture in memory has a number of `ids`.
        ValueError: a picture was cut into patches of another size than the tower's.
    """
    found: dict[int, tuple] = {}
    places = np.full(ids.shape, -1, np.int32)
    standing = [(row, spot) for row in range(len(ids)) for spot in spots(ids[row])]
    for _, spot in standing:
        found.setdefault(spot.picture.first, (len(found), spot.picture))
    if not found:
        return RowPictures(places, rotations, None)
    count = multiple
    while count < len(found):
        count *= 2
    pictures = arrange(
        vision.tower,
        [(each.patches(), each.grid) for _, each in found.values()],
        pictures=count,
        scaling=standing[0][1].picture.processor.scaling,
    )
    tokens = pictures.pixels.shape[1] // vision.tower.merge_size**2
    for row, spot in standing:
        first = found[spot.picture.first][0] * tokens + spot.block
        span = slice(spot.start, spot.start + spot.count)
        places[row, span] = np.arange(first, first + spot.count)
    return RowPictures(places, rotations, pictures)


def for_devices(
    batch: TokenBatch, config: ModelConfig, *, multiple: int = 1
) -> TokenBatch:
    """Cuts the pictures of a microbatch into patches, for its vision tower.

    Args:
        batch: NumPy arrays; returned as it is if it is of text alone.
        config: the model's.
        multiple: as in `row_pictures`.

    Returns:
        The batch with image tokens in place of the pictures' numbers. Without a picture
        in its rows it has no `pictures`, and costs no tower.

    Raises:
        ValueError: the model does not see.
        PictureError: no picture in memory has a number of the batch.
    """
    packed = batch.pictures
    if packed is None:
        return batch
    assert isinstance(packed, PackedPictures)
    if config.vision is None:
        raise ValueError(
            f"batch: it has pictures, and this {config.model_type} was loaded without "
            "a vision tower; load it with --vision"
        )
    ids = np.asarray(batch.tokens)
    found = row_pictures(config.vision, ids, packed.rotations, multiple=multiple)
    return dataclasses.replace(
        batch,
        tokens=without(ids, config.vision.image_token),
        pictures=None if found.pictures is None else found,
    )


def with_pictures(
    params: DecoderParams[Array],
    config: ModelConfig,
    tokens: Int[Array, "batch length"],
    rows: RowPictures | None,
    *,
    rules: Rules = DEFAULT_RULES,
    remat: VisionRemat = "none",
) -> Int[Array, "batch length"] | PictureTokens:
    """Returns the tokens for `forward`, with the embeddings of their pictures.

    Args:
        params: parameters in the compute dtype.
        config: of a model that also sees.
        tokens: int32 ids in [0, vocab_size).
        rows: from `row_pictures`; None for rows of text.
        rules: sharding of activations.
        remat: activations of the tower that are kept for the backward pass.

    Raises:
        ValueError: there are pictures, and the parameters have no vision tower.
    """
    if rows is None:
        return tokens
    rotations = jnp.asarray(rows.rotations)
    if rows.pictures is None:
        return PictureTokens(tokens, rotations)
    if config.vision is None or params.vision is None:
        raise ValueError(
            f"pictures: {config.model_type} was loaded without a vision tower; load it "
            "with vision=True"
        )
    output = tower(
        params.vision, config.vision.tower, rows.pictures, rules=rules, remat=remat
    )
    return PictureTokens(tokens, rotations, jnp.asarray(rows.places), output)
