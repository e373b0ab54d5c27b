"""Resizes pictures and cuts them into patches, as Qwen's vision towers read them."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.pictures.errors import PictureError, check_sides
from jaxrl_post.pictures.reading import pillow

__all__ = ["PictureProcessor"]

# Classes of transformers that compute the same patches.
TYPES = (
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorFast",
    "Qwen2VLImageProcessorPil",
)
# Steps that no file of a released model turns off.
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
BICUBIC = 3
type Three = tuple[float, float, float]
CLIP_MEAN: Three = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Three = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class PictureProcessor:
    """Turns pictures into patches for a vision tower.

    A picture is resized to whole blocks of `merge_size` x `merge_size` patches, with
    about its aspect ratio and an area within the limits; one block becomes one token
    of the language model.

    Attributes:
        patch_size: side of a patch, in pixels.
        merge_size: side of a block, in patches.
        temporal_patch_size: frames of a patch; a still picture repeats its frame.
        min_pixels: smallest area after resizing, in pixels.
        max_pixels: largest area, in pixels.
        mean: of the channels red, green, blue, in units of the rescaled values.
        std: their standard deviations.
        rescale: factor of the values 0 to 255 before `mean` is subtracted.

    Raises:
        PictureError: a value is out of its range.

    References:
        Wang et al., Qwen2-VL, arXiv:2409.12191 (dynamic resolution).

    >>> processor = PictureProcessor(patch_size=16)
    >>> processor.grid(480, 640)
    (30, 40)
    >>> processor.tokens((30, 40))
    300
    """

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: Three = CLIP_MEAN
    std: Three = CLIP_STD
    rescale: float = 1 / 255

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "temporal_patch_size", "min_pixels"):
            if getattr(self, name) < 1:
                raise PictureError(
                    f"{name} must be at least 1; got {getattr(self, name)}"
                )
        # A smaller area than one block could not be kept.
        least = max(self.min_pixels, self.block**2)
        if self.max_pixels < least:
            raise PictureError(
                f"max_pixels must be at least {least}, the larger of min_pixels and "
                f"one block of patches; got {self.max_pixels}"
            )
        if not self.rescale > 0 or not all(each > 0 for each in self.std):
            raise PictureError(
                "rescale and std must be greater than 0; got "
                f"rescale={self.rescale}, std={self.std}"
            )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "PictureProcessor":
        """Reads preprocessor_config.json, or the processor_config.json around it.

        The limits are `min_pixels` and `max_pixels`, as older files have them, or
        `shortest_edge` and `longest_edge` in `size`, which are areas too.

        Args:
            path: of the file.

        Raises:
            PictureError: the file cannot be read, is of another kind of processor, or
                turns off a step that this one always takes.
        """
        try:
            raw = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise PictureError(
                f"{path}: cannot be read as JSON ({error}); copy it from the model's "
                "repository"
            ) from None
        try:
            return _from_json(raw)
        except PictureError as error:
            raise PictureError(f"{path}: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """The content of a preprocessor_config.json that `from_file` reads."""
        return {
            "image_processor_type": TYPES[0],
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "temporal_patch_size": self.temporal_patch_size,
            "size": {
                "shortest_edge": self.min_pixels,
                "longest_edge": self.max_pixels,
            },
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "rescale_factor": self.rescale,
        }

    @property
    def block(self) -> int:
        """Side of a block of patches, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def width(self) -> int:
        """Numbers of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the (rows, columns) of patches of a picture, without its pixels.

        Args:
            height: of the picture, in pixels.
            width: in pixels.

        Raises:
            PictureError: as `check_sides`.
        """
        check_sides(height, width, "picture")
        rows, columns = (round(side / self.block) for side in (height, width))
        area = rows * columns * self.block**2
        if area > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = (
                max(1, math.floor(side / shrink / self.block))
                for side in (height, width)
            )
        elif area < self.min_pixels:
            growth = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (
                math.ceil(side * growth / self.block) for side in (height, width)
            )
        return rows * self.merge_size, columns * self.merge_size

    def tokens(self, grid: tuple[int, int]) -> int:
        """Returns the number of the language model's tokens for a grid of patches."""
        return grid[0] * grid[1] // self.merge_size**2

    def resized(self, picture: np.ndarray) -> np.ndarray:
        """Resizes a picture to whole blocks of patches.

        The resize is bicubic, along rows first, and each of the two passes rounds to
        integers from 0 to 255. So do transformers' default processor, the one of
        torchvision (the resized values are within 2 of 255), and its Pillow processor
        with older versions of Pillow (equal to the bit). Pillow 13 begins with the
        cheaper pass: where that is the other one, values after overshoots that were
        cut off differ, by up to 23 of 255 in noise.

        Args:
            picture: uint8 [height, width, 3].

        Returns:
            uint8 [rows * patch_size, columns * patch_size, 3], by `grid`.

        Raises:
            PictureError: the array is no picture, or as `check_sides`.
        """
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise PictureError(
                "picture must be uint8 [height, width, 3]; got "
                f"{picture.dtype} {list(picture.shape)}; use read_picture"
            )
        rows, columns = self.grid(*picture.shape[:2])
        image = pillow("picture").Image.fromarray(picture)
        wide, high = columns * self.patch_size, rows * self.patch_size
        # Two calls: in one the order of the passes depends on the version of Pillow.
        image = image.resize((wide, image.height), resample=BICUBIC)
        return np.array(image.resize((wide, high), resample=BICUBIC))

    def patches(self, picture: np.ndarray) -> np.ndarray:
        """Resizes a picture, normalizes it and cuts it into patches.

        Args:
            picture: uint8 [height, width, 3].

        Returns:
            As `cut`.

        Raises:
            PictureError: as `resized`.
        """
        return self.cut(self.resized(picture))

    def cut(self, resized: np.ndarray) -> np.ndarray:
        """Normalizes a resized picture and cuts it into patches.

        Args:
            resized: uint8 [height, width, 3], whole blocks of patches.

        Returns:
            float32 [rows * columns, `width`]. Blocks are in the order of rows, and the
            patches of a block follow one another. A patch's numbers are in the order
            (channel, frame, row, column).
        """
        side = self.patch_size
        found = self._blocks(self._normalized(resized)).reshape(-1, 3, 1, side * side)
        found = np.repeat(found, self.temporal_patch_size, axis=2)
        return found.reshape(-1, self.width)

    def raw(self, resized: np.ndarray) -> np.ndarray:
        """Cuts a resized picture into patches of one frame, which are not normalized.

        An eighth of the bytes of `cut`, which devices get: `scaling` normalizes them.

        Args:
            resized: as for `cut`.

        Returns:
            uint8 [rows * columns, 3 * patch_size * patch_size].
        """
        return self._blocks(resized).reshape(-1, 3 * self.patch_size**2)

    @property
    def scaling(self) -> np.ndarray:
        """float32 [3, 2]: a channel's x becomes scaling[c, 0] x + scaling[c, 1]."""
        mean, std = np.array(self.mean), np.array(self.std)
        return np.stack([self.rescale / std, -mean / std], axis=-1).astype(np.float32)

    def _blocks(self, values: np.ndarray) -> np.ndarray:
        """The values in the order of blocks: [..., channel, row, column]."""
        merge, side = self.merge_size, self.patch_size
        rows, columns = (each // side for each in values.shape[:2])
        split = (rows // merge, merge, side, columns // merge, merge, side, 3)
        # Dims: block row, block column, row and column in the block, channel, pixels.
        return values.reshape(split).transpose(0, 3, 1, 4, 6, 2, 5)

    def _normalized(self, resized: np.ndarray) -> np.ndarray:
        # The product is rounded once and the rest is float32, as in transformers.
        values = np.arange(256, dtype=np.float64) * self.rescale
        mean, std = (np.array(each, np.float32) for each in (self.mean, self.std))
        table = (values.astype(np.float32)[:, None] - mean) / std
        return table[resized, np.arange(3)]


def _from_json(raw: Any) -> PictureProcessor:
    if isinstance(raw, Mapping) and isinstance(raw.get("image_processor"), Mapping):
        raw = raw["image_processor"]
    if not isinstance(raw, Mapping):
        raise PictureError(f"must be a JSON object; got {raw!r:.80}")
    kind = raw.get("image_processor_type")
    if kind not in TYPES:
        raise PictureError(
            f"image_processor_type must be one of {', '.join(TYPES)}; got {kind!r}; "
            "other processors are not supported"
        )
    for step in STEPS:
        if raw.get(step, True) is not True:
            raise PictureError(
                f"{step} must be true; got {raw[step]!r}; leaving it out is not "
                "supported"
            )
    if raw.get("resample", BICUBIC) != BICUBIC:
        raise PictureError(
            f"resample must be {BICUBIC}, bicubic; got {raw['resample']!r}"
        )
    least, most = _limits(raw)
    default = PictureProcessor
    return PictureProcessor(
        patch_size=_integer(raw, "patch_size", default.patch_size),
        merge_size=_integer(raw, "merge_size", default.merge_size),
        temporal_patch_size=_integer(
            raw, "temporal_patch_size", default.temporal_patch_size
        ),
        min_pixels=least,
        max_pixels=most,
        mean=_three(raw, "image_mean", default.mean),
        std=_three(raw, "image_std", default.std),
        rescale=_number(raw.get("rescale_factor", default.rescale), "rescale_factor"),
    )


def _limits(raw: Mapping[str, Any]) -> tuple[int, int]:
    """The smallest and the largest area; the older keys win over `size`."""
    default = PictureProcessor
    size = raw.get("size")
    if size is None:
        size = {"shortest_edge": default.min_pixels, "longest_edge": default.max_pixels}
    if not isinstance(size, Mapping):
        raise PictureError(
            "size must be an object with shortest_edge and longest_edge; got "
            f"{size!r:.80}"
        )
    found = []
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        place, key = (raw, old) if raw.get(old) is not None else (size, new)
        if key not in place:
            raise PictureError(f"size must have {new}; got {sorted(size)}")
        found.append(_integer(place, key))
    return found[0], found[1]


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise PictureError(f"{key} must be an integer; got {value!r:.80}")
    return value


def _number(value: Any, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise PictureError(f"{key} must be a number; got {value!r:.80}")
    return float(value)


def _three(raw: Mapping[str, Any], key: str, default: Three) -> Three:
    value = raw.get(key, default)
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise PictureError(f"{key} must be three numbers; got {value!r:.80}")
    red, green, blue = (_number(each, key) for each in value)
    return red, green, blue
