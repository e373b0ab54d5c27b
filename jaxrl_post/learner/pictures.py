"""Pictures in training: their arrays on devices, and towers that are not trained."""

import dataclasses

import numpy as np
from flax import struct

from jaxrl_post.algorithms import Predictions
from jaxrl_post.learner.step import Policy, predict
from jaxrl_post.models import DecoderParams, ModelConfig
from jaxrl_post.models.vision import VisionParams, row_pictures
from jaxrl_post.pictures.numbered import without
from jaxrl_post.types import Array, PackedPictures, TokenBatch

__all__ = ["SeeingPolicy", "for_devices"]


@struct.dataclass
class SeeingPolicy:
    """The `Predictor` of a model whose vision tower is not trained.

    Attributes:
        tower: a jit argument that is never donated.
        policy: the model's policy.
    """

    tower: VisionParams[Array]
    policy: Policy = struct.field(pytree_node=False)

    def predict(self, params: DecoderParams[Array], batch: TokenBatch) -> Predictions:
        """Returns the predictions for a batch; differentiable in `params`."""
        whole = params.replace(vision=self.tower)  # type: ignore[attr-defined]
        return predict(self.policy, whole, batch)

    def in_training(self, step: Array, row: int) -> "SeeingPolicy":
        """Returns itself: it draws no random numbers."""
        del step, row
        return self


def for_devices(
    batch: TokenBatch, config: ModelConfig, *, multiple: int = 1
) -> TokenBatch:
    """Cuts the pictures of a microbatch into patches, for its vision tower.

    Args:
        batch: NumPy arrays; returned as it is if it is of text alone.
        config: the model's.
        multiple: as in `models.vision.row_pictures`.

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
