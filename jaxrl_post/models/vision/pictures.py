"""Puts the patches of pictures into arrays of one static size, on the host.

All that depends on the sizes of the pictures is computed here by NumPy, so that one
compiled program serves every picture of a bucket.
"""

from collections.abc import Sequence

import numpy as np
from flax import struct

from jaxrl_post.models.vision_config import VisionConfig
from jaxrl_post.types import Float, HostOrDevice, Int, Num

__all__ = ["Grid", "Pictures", "arrange", "block_order", "bucket"]

# Rows and columns of patches.
type Grid = tuple[int, int]

# Buckets are multiples of this number of patches: a window of 112 pixels, or 16 tokens.
SMALLEST_BUCKET = 64


@struct.dataclass
class Pictures:
    """The patches of pictures, padded to one number of patches.

    The patches of a block follow one another. With windows the blocks of a window do
    too; without, blocks are in the order of rows.

    Attributes:
        pixels: the patches, 0 in padding: float32; or uint8 of one frame, which the
            tower normalizes and repeats.
        counts: int32, patches of each picture; 0 for a picture that is padding.
        rows: int32, row of each patch in its picture.
        columns: int32, column.
        corners: int32, the four entries of the learned grid around each patch; None for
            a tower without such a grid.
        weights: float32, the weights of the corners, which sum to 1.
        windows: int32, number of each patch's attention window, -1 in padding; None
            for a tower without windows.
        order: int32, for each token in the order of rows the place of its block; None
            for a tower without windows, whose blocks are in that order.
        scaling: float32, with pixels of uint8: a channel's factor and what is added.
    """

    pixels: Num[HostOrDevice, "pictures patches width"]
    counts: Int[HostOrDevice, " pictures"]
    rows: Int[HostOrDevice, "pictures patches"]
    columns: Int[HostOrDevice, "pictures patches"]
    corners: Int[HostOrDevice, "pictures patches 4"] | None = None
    weights: Float[HostOrDevice, "pictures patches 4"] | None = None
    windows: Int[HostOrDevice, "pictures patches"] | None = None
    order: Int[HostOrDevice, "pictures tokens"] | None = None
    scaling: Float[HostOrDevice, "pictures 3 2"] | None = None


def bucket(patches: int) -> int:
    """Returns the smallest bucket with this number of patches, at most half more.

    Buckets are 64, 96, 128, 192, 256, ...: two for each power of 2, so that few
    programs are compiled.

    >>> [bucket(patches) for patches in (1, 65, 100, 129, 1024, 1025)]
    [64, 96, 128, 192, 1024, 1536]
    """
    size = SMALLEST_BUCKET
    while size < patches:
        if size * 3 // 2 >= patches:
            return size * 3 // 2
        size *= 2
    return size


def arrange(
    config: VisionConfig,
    found: Sequence[tuple[np.ndarray, Grid]],
    *,
    patches: int | None = None,
    pictures: int | None = None,
    scaling: np.ndarray | None = None,
) -> Pictures:
    """Arranges pictures for `tower`.

    Args:
        config: of the tower.
        found: for each picture its patches, float [rows * columns, width] in the order
            of `PictureProcessor.patches`, and its grid; with `scaling` uint8, as of
            `PictureProcessor.raw`.
        patches: size of the bucket; default: `bucket` of the largest picture.
        pictures: number of pictures with padding; default: as many as are given, and
            at least 1.
        scaling: of `PictureProcessor`; None for patches that are normalized.

    Returns:
        NumPy arrays.

    Raises:
        ValueError: a picture's patches do not fit its grid or the config, or the
            pictures do not fit the bucket.

    >>> config = VisionConfig("tiny", 8, 8, 1, 2, 8, patch_size=1)
    >>> arranged = arrange(config, [(np.ones((8, 6)), (2, 4))])
    >>> arranged.pixels.shape, arranged.counts.tolist()
    ((1, 64, 6), [8])
    >>> arranged.columns[0, :8].tolist()
    [0, 1, 0, 1, 2, 3, 2, 3]
    """
    block = config.merge_size**2
    for index, (values, grid) in enumerate(found):
        _check(config, values, grid, f"picture {index}", raw=scaling is not None)
    largest = max((len(values) for values, _ in found), default=0)
    patches = bucket(largest) if patches is None else patches
    pictures = max(1, len(found)) if pictures is None else pictures
    if patches < largest or patches % block or pictures < len(found):
        raise ValueError(
            f"arrange: a bucket of {pictures} pictures of {patches} patches, a "
            f"multiple of {block}, must hold {len(found)} pictures of up to {largest} "
            "patches; choose a larger one"
        )
    shape = (pictures, patches)
    arrays = {
        "pixels": np.zeros((*shape, config.patch_width), np.float32)
        if scaling is None
        else np.zeros((*shape, config.frame_width), np.uint8),
        "counts": np.zeros(pictures, np.int32),
        "rows": np.zeros(shape, np.int32),
        "columns": np.zeros(shape, np.int32),
    }
    if config.num_positions:
        arrays["corners"] = np.zeros((*shape, 4), np.int32)
        arrays["weights"] = np.zeros((*shape, 4), np.float32)
    if config.window_size is not None:
        arrays["windows"] = np.full(shape, -1, np.int32)
        arrays["order"] = np.zeros((pictures, patches // block), np.int32)
    if scaling is not None:
        arrays["scaling"] = np.tile(scaling, (pictures, 1, 1))
    for index, (values, grid) in enumerate(found):
        for name, array in _one(config, values, grid).items():
            arrays[name][index, : len(array)] = array
        arrays["counts"][index] = len(values)
    return Pictures(**arrays)


def block_order(grid: Grid, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns row and column of each patch, in the order of blocks.

    Args:
        grid: multiples of `merge`.
        merge: side of a block, in patches.

    >>> [each.tolist() for each in block_order((2, 4), 2)]
    [[0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 2, 3, 2, 3]]
    """
    rows, columns = grid
    split = (rows // merge, merge, columns // merge, merge)
    numbers = np.arange(rows * columns, dtype=np.int32).reshape(split)
    numbers = numbers.transpose(0, 2, 1, 3).reshape(-1)
    return numbers // columns, numbers % columns


def _check(
    config: VisionConfig, values: np.ndarray, grid: Grid, name: str, *, raw: bool
) -> None:
    merge = config.merge_size
    if min(grid) < 1 or any(side % merge for side in grid):
        raise ValueError(
            f"{name}: the sides of its grid must be multiples of {merge}; got {grid}"
        )
    width = config.frame_width if raw else config.patch_width
    wanted = (grid[0] * grid[1], width)
    if values.shape != wanted:
        raise ValueError(
            f"{name}: a grid of {grid[0]} x {grid[1]} needs patches {list(wanted)}; "
            f"got {list(values.shape)}; use the model's own PictureProcessor"
        )


def _one(config: VisionConfig, values: np.ndarray, grid: Grid) -> dict[str, np.ndarray]:
    """The arrays of one picture."""
    block = config.merge_size**2
    rows, columns = block_order(grid, config.merge_size)
    found = {"pixels": values, "rows": rows, "columns": columns}
    if config.num_positions:
        found["corners"], found["weights"] = _interpolation(config, grid, rows, columns)
    if config.window_size is None:
        return found
    # Windows are whole blocks, so the first patch of a block tells its window.
    span = config.merge_size * config.window
    across = -(-grid[1] // span)
    windows = (rows // span) * across + columns // span
    sorting = np.argsort(windows[::block], kind="stable").astype(np.int32)
    patches = (sorting[:, None] * block + np.arange(block)).reshape(-1)
    found = {name: array[patches] for name, array in found.items()}
    order = np.argsort(sorting).astype(np.int32)
    return {**found, "windows": windows[patches], "order": order}


def _interpolation(
    config: VisionConfig, grid: Grid, rows: np.ndarray, columns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Entries of the learned grid around each patch, and their bilinear weights.

    The corners of both grids lie on one another. float32, as in transformers.
    """
    side = config.side

    def taps(places: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        scaled = places.astype(np.float32) * np.float32(side - 1)
        scaled = scaled / np.float32(max(size - 1, 1))
        low = np.floor(scaled)
        share = scaled - low
        first = low.astype(np.int32)
        both = np.stack([first, np.minimum(first + 1, side - 1)], axis=-1)
        return both, np.stack([1 - share, share], axis=-1)

    (down, down_weights), (across, across_weights) = (
        taps(places, size) for places, size in zip((rows, columns), grid, strict=True)
    )
    corners = down[:, :, None] * side + across[:, None, :]
    weights = down_weights[:, :, None] * across_weights[:, None, :]
    return corners.reshape(-1, 4), weights.reshape(-1, 4)
