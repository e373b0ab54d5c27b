"""Pictures are resized to whole blocks, and cut in the order of blocks.

tests/parity/test_vision.py compares patches with transformers.
"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.pictures import PictureError, PictureProcessor
from tests.pictures.files import colours

# As in the repositories of the released models.
QWEN2_5 = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}
QWEN3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
HALF = (0.5, 0.5, 0.5)


def written(folder, values):
    path = folder / "preprocessor_config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def test_released_files_are_read(tmp_path):
    found = PictureProcessor.from_file(written(tmp_path, QWEN2_5))
    assert found == PictureProcessor(max_pixels=12845056)
    found = PictureProcessor.from_file(written(tmp_path, QWEN3))
    wanted = PictureProcessor(16, 2, 2, 65536, 16777216, mean=HALF, std=HALF)
    assert found == wanted
    # transformers 5 saves a processor with its parts inside.
    nested = {"image_processor": QWEN3, "processor_class": "Qwen3VLProcessor"}
    assert PictureProcessor.from_file(written(tmp_path, nested)) == wanted
    least = {"image_processor_type": "Qwen2VLImageProcessorPil"}
    assert PictureProcessor.from_file(written(tmp_path, least)) == PictureProcessor()


def test_older_limits_win_over_newer_ones(tmp_path):
    both = {**QWEN3, "min_pixels": 4096, "max_pixels": None}
    found = PictureProcessor.from_file(written(tmp_path, both))
    assert (found.min_pixels, found.max_pixels) == (4096, 16777216)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"image_processor_type": "CLIPImageProcessor"},
            "must be one of Qwen2VL.*CLIP",
        ),
        ({"image_processor_type": None}, "got None; other processors"),
        ({"do_resize": False}, "do_resize must be true; got False"),
        ({"do_convert_rgb": None}, "do_convert_rgb must be true; got None"),
        ({"resample": 2}, "resample must be 3, bicubic; got 2"),
        ({"patch_size": "16"}, "patch_size must be an integer; got '16'"),
        ({"patch_size": True}, "patch_size must be an integer"),
        ({"merge_size": 0}, "merge_size must be at least 1; got 0"),
        ({"size": {"height": 3, "width": 3}}, "size must have shortest_edge"),
        ({"size": 4}, "size must be an object"),
        ({"image_mean": [0.5]}, "image_mean must be three numbers"),
        ({"image_std": [0.5, 0.5, "a"]}, "image_std must be a number; got 'a'"),
        ({"image_std": [0.5, 0.0, 0.5]}, "std must be greater than 0"),
        ({"rescale_factor": 0}, "rescale and std must be greater than 0"),
        ({"max_pixels": 1000}, "max_pixels must be at least 65536"),
        ({"min_pixels": 1, "max_pixels": 1000}, "max_pixels must be at least 1024"),
    ],
)
def test_other_processors_are_refused_with_the_file(change, message, tmp_path):
    path = written(tmp_path, {**QWEN3, **change})
    with pytest.raises(PictureError, match=f"{path}: .*{message}"):
        PictureProcessor.from_file(path)


@pytest.mark.parametrize("content", ["", "[]", "{", "3"])
def test_other_files_are_refused(content, tmp_path):
    path = written(tmp_path, content)
    with pytest.raises(PictureError, match=str(path)):
        PictureProcessor.from_file(path)
    with pytest.raises(PictureError, match=r"none\.json: cannot be read"):
        PictureProcessor.from_file(tmp_path / "none.json")


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_a_grid_is_whole_blocks_within_the_limits(height, width):
    processor = PictureProcessor(16, min_pixels=65536, max_pixels=2**20)
    if max(height, width) >= 200 * min(height, width):
        with pytest.raises(PictureError, match="less than 200 times"):
            processor.grid(height, width)
        return
    rows, columns = processor.grid(height, width)
    assert rows % 2 == columns % 2 == 0
    assert processor.tokens((rows, columns)) == rows * columns // 4
    area = rows * columns * 16**2
    assert area >= 65536 * 0.6
    # A strip keeps one block across, and may be larger for that.
    assert area <= 2**20 or min(rows, columns) == 2
    # Within the limits each side is rounded to the nearest block.
    if 2**18 <= height * width <= 2**19 and min(height, width) > 200:
        assert abs(rows * 16 - height) <= 16
        assert abs(columns * 16 - width) <= 16


@pytest.mark.parametrize(
    ("size", "grid"),
    # By hand, blocks of 28 pixels: 1000 x 1000 has 36 x 36 blocks, more than 1280 of
    # them; shrunk to 28 sqrt(1280) = 1001.8 pixels a side it has 35 x 35.
    [
        ((1000, 1000), (70, 70)),
        ((28, 56), (4, 6)),
        ((42, 70), (4, 4)),
        ((1, 1), (4, 4)),
    ],
)
def test_grids_by_hand(size, grid):
    """28 x 56 has half of the least area: its sides grow by sqrt(2), then up."""
    assert PictureProcessor().grid(*size) == grid


def test_patches_are_in_the_order_of_blocks():
    """Patches of one pixel, in blocks of two by two, and two equal frames."""
    processor = PictureProcessor(1, min_pixels=1, mean=(0, 0, 0), std=(1, 1, 1))
    picture = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    found = processor.patches(picture) * 255
    order = [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert np.allclose(found[:, 0], [3 * place for place in order])
    # Channels, and in each of them the frames.
    assert np.allclose(found[1], [3, 3, 4, 4, 5, 5])


def test_a_patch_has_rows_in_a_frame_in_a_channel():
    processor = PictureProcessor(2, 1, min_pixels=1, mean=(0, 0, 0), std=(1, 1, 1))
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    (found,) = processor.patches(picture) * 255
    red, green = [0, 3, 6, 9], [1, 4, 7, 10]
    assert np.allclose(found[:16], [*red, *red, *green, *green])


def test_values_are_normalized_by_channel():
    processor = PictureProcessor(1, 1, 1, 1, mean=(0, 0.5, 1), std=(1, 2, 4))
    picture = np.array([[[255, 255, 0]]], np.uint8)
    assert processor.patches(picture).tolist() == [[1.0, 0.25, -0.25]]


@pytest.mark.parametrize(
    "picture",
    [colours()[..., 0], colours().astype(np.float32), np.zeros((4, 4, 4), np.uint8)],
)
def test_other_arrays_are_refused(picture):
    with pytest.raises(PictureError, match=r"must be uint8 \[height, width, 3\]"):
        PictureProcessor().patches(picture)


def test_a_grid_needs_no_pixels():
    processor = PictureProcessor(4, min_pixels=256, max_pixels=1024)
    for size in ((1, 1), (9, 40), (64, 3), (100, 101)):
        rows, columns = processor.grid(*size)
        found = processor.patches(colours(*size))
        assert found.shape == (rows * columns, processor.width)
