"""Positions of rows with pictures; tests/parity compares with transformers."""

import numpy as np
import pytest

from jaxrl_post.models.vision import mrope_axes
from jaxrl_post.pictures.positions import PictureSpan, mrope_positions


def test_text_alone_has_its_places():
    assert np.array_equal(mrope_positions(4, [], 2), np.tile(np.arange(4), (3, 1)))
    assert mrope_positions(0, [], 2).shape == (3, 0)


def test_pictures_side_by_side_are_two_pictures():
    """transformers takes them for one, and fails; our spans say where one ends."""
    found = mrope_positions(5, [PictureSpan(0, (2, 4)), PictureSpan(2, (4, 2))], 2)
    assert found.tolist() == [[0, 0, 2, 2, 4], [0, 0, 2, 3, 4], [0, 1, 2, 2, 4]]


def test_a_prefix_has_the_positions_of_the_whole():
    spans = [PictureSpan(2, (4, 6)), PictureSpan(10, (2, 2))]
    whole = mrope_positions(14, spans, 2)
    for length, known in ((2, []), (8, spans[:1]), (10, spans[:1]), (12, spans)):
        assert np.array_equal(mrope_positions(length, known, 2), whole[:, :length])


@pytest.mark.parametrize(
    "spans",
    [
        [PictureSpan(0, (4, 4)), PictureSpan(3, (2, 2))],
        [PictureSpan(2, (2, 2)), PictureSpan(0, (2, 2))],
        [PictureSpan(7, (4, 4))],
        [PictureSpan(-1, (2, 2))],
    ],
)
def test_spans_that_overlap_or_leave_the_row_are_refused(spans):
    with pytest.raises(ValueError, match=r"spans: the . x . tokens of the picture at"):
        mrope_positions(9, spans, 2)


def test_axes_of_released_models():
    """Qwen3-VL-8B, Qwen3.5 and Qwen2.5-VL-7B."""
    found = mrope_axes([24, 20, 20], interleaved=True)
    assert np.bincount(found).tolist() == [24, 20, 20]
    assert found[:6].tolist() == [0, 1, 2, 0, 1, 2]
    assert found[60:].tolist() == [0, 0, 0, 0]
    assert np.bincount(mrope_axes([11, 11, 10], interleaved=True)).tolist() == [
        11,
        11,
        10,
    ]
    found = mrope_axes([16, 24, 24], interleaved=False)
    assert found.tolist() == [0] * 16 + [1] * 24 + [2] * 24


@pytest.mark.parametrize("sections", [[4, 2], [4, 2, 2, 2], [4, -1, 2]])
def test_sections_are_three_counts(sections):
    with pytest.raises(ValueError, match="sections must be three counts"):
        mrope_axes(sections, interleaved=False)


def test_sections_that_cannot_be_interleaved_are_refused():
    with pytest.raises(ValueError, match="cannot be interleaved"):
        mrope_axes([2, 3, 3], interleaved=True)
