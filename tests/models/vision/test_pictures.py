"""Pictures are arranged into arrays of one size."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.models.vision import VisionConfig, arrange, bucket, tower
from tests.models.vision.rows_of_pictures import drawn, processor_of, seeing
from tests.models.vision.towers import CONFIGS, pictures_of

QWEN2_5, QWEN3 = CONFIGS["qwen2_5_vl"], CONFIGS["qwen3_vl"]
even = st.integers(1, 9).map(lambda half: 2 * half)


def test_windows_by_hand():
    """A grid of 3 x 3 tokens has windows of 2 x 2, 2 x 1, 1 x 2 and 1 x 1 tokens."""
    arranged = arrange(QWEN2_5, pictures_of(QWEN2_5, (6, 6)), patches=64)
    assert arranged.windows is not None
    assert arranged.order is not None
    windows = np.repeat([0, 1, 2, 3], [16, 8, 8, 4])
    assert np.array_equal(arranged.windows[0, :36], windows)
    assert (arranged.windows[0, 36:] == -1).all()
    # Tokens by windows: 0 1 3 4, 2 5, 6 7, 8.
    assert arranged.order[0, :9].tolist() == [0, 1, 4, 2, 3, 5, 6, 7, 8]
    assert arranged.rows[0, :8].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert arranged.columns[0, 16:24].tolist() == [4, 5, 4, 5, 4, 5, 4, 5]


@given(even, even)
def test_windows_hold_all_patches_in_order(rows, columns):
    parts = pictures_of(QWEN2_5, (rows, columns))
    count = rows * columns
    arranged = arrange(QWEN2_5, parts)
    assert arranged.windows is not None
    assert arranged.order is not None
    windows = arranged.windows[0, :count]
    # A window follows the other, and none is larger than 4 x 4 patches.
    assert (np.diff(windows) >= 0).all()
    assert np.bincount(windows).max() <= 16
    # The order undoes the order of windows.
    blocks = arranged.pixels[0, :count].reshape(count // 4, -1)
    back = blocks[arranged.order[0, : count // 4]]
    assert np.array_equal(back.reshape(count, -1), parts[0][0])
    at = arranged.rows[0, :count] // 4, arranged.columns[0, :count] // 4
    for first, second in zip(range(count - 1), range(1, count), strict=True):
        same = all(each[first] == each[second] for each in at)
        assert same == (windows[first] == windows[second])


@given(even, even)
def test_learned_positions_are_interpolated_between_corners(rows, columns):
    arranged = arrange(QWEN3, pictures_of(QWEN3, (rows, columns)))
    count, side = rows * columns, QWEN3.side
    assert arranged.corners is not None
    assert arranged.weights is not None
    corners, weights = arranged.corners[0, :count], arranged.weights[0, :count]
    assert corners.min() >= 0
    assert corners.max() < side**2
    assert np.allclose(weights.sum(axis=-1), 1)
    # A plane is interpolated exactly: the corners of both grids are the same.
    for found, size, place in (
        (corners // side, rows, arranged.rows),
        (corners % side, columns, arranged.columns),
    ):
        wanted = place[0, :count] * (side - 1) / (size - 1)
        assert np.allclose((found * weights).sum(axis=-1), wanted, atol=1e-5)


def test_buckets_grow_by_at_most_half():
    sizes = [bucket(patches) for patches in range(1, 5000)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 14
    for patches, size in enumerate(sizes, start=1):
        assert size >= patches
        assert size == 64 or size <= 1.5 * patches


def test_default_sizes():
    parts = pictures_of(QWEN3, (2, 2), (10, 8))
    arranged = arrange(QWEN3, parts)
    assert arranged.pixels.shape == (2, 96, QWEN3.patch_width)
    assert arranged.counts.tolist() == [4, 80]
    assert arrange(QWEN3, []).pixels.shape == (1, 64, QWEN3.patch_width)


@pytest.mark.parametrize(
    ("grid", "shape", "message"),
    [
        ((3, 4), (12, 24), r"picture 1: the sides of its grid must be multiples of 2"),
        ((0, 4), (0, 24), "multiples of 2"),
        ((4, 4), (12, 24), r"a grid of 4 x 4 needs patches \[16, 24\]; got \[12, 24\]"),
        ((4, 4), (16, 12), "use the model's own PictureProcessor"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(grid, shape, message):
    parts = [*pictures_of(QWEN3, (2, 2)), (np.zeros(shape, np.float32), grid)]
    with pytest.raises(ValueError, match=message):
        arrange(QWEN3, parts)


@pytest.mark.parametrize("sizes", [{"patches": 60}, {"patches": 66}, {"pictures": 1}])
def test_buckets_that_are_too_small_are_refused(sizes):
    parts = pictures_of(QWEN3, (8, 8), (2, 2))
    with pytest.raises(ValueError, match=r"must hold 2 pictures of up to 64 patches"):
        arrange(QWEN3, parts, **sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "hidden_size must be a multiple of 4 x num_heads"),
        ({"num_positions": 15}, "num_positions must be a square; got 15"),
        ({"window_size": 3}, "window_size must be at least one block"),
        ({"levels": (2,)}, r"levels must be layers below 2, in order; got \(2,\)"),
        ({"levels": (1, 0)}, "levels must be layers"),
        ({"full_layers": (1, 1)}, "full_layers must be layers"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(change, message):
    sizes = {"hidden_size": 32, "intermediate_size": 8, "num_layers": 2, "num_heads": 4}
    with pytest.raises(ValueError, match=message):
        VisionConfig("qwen3_vl", **{**sizes, "out_hidden_size": 8, **change})


def test_the_tower_normalizes_pixels_as_the_processor_does():
    config, params = seeing("qwen2_5_vl")
    processor, picture = processor_of(config), drawn(config, 3, 2, 0)
    processor = dataclasses.replace(processor, mean=(0.1, 0.5, 0.3), std=(0.2, 1, 0.4))
    found = [(processor.cut(picture.pixels), picture.grid)]
    raw = [(processor.raw(picture.pixels), picture.grid)]
    tower_config = config.vision.tower
    expected = tower(params.vision, tower_config, arrange(tower_config, found))
    arranged = arrange(tower_config, raw, scaling=processor.scaling, pictures=2)
    assert arranged.pixels.dtype == np.uint8
    computed = tower(params.vision, tower_config, arranged)
    np.testing.assert_allclose(
        computed.embeddings[0], expected.embeddings[0], atol=1e-5
    )
