"""Numbers of the tokens of pictures."""

import gc

import numpy as np
import pytest

from jaxrl_post.data.packing import Sequence, pack
from jaxrl_post.pictures import PictureError, PictureProcessor, expanded, number
from jaxrl_post.pictures import numbered as module
from jaxrl_post.pictures.numbered import pictures_in, spots
from jaxrl_post.pictures.positions import rotary_positions
from jaxrl_post.tokens import Tokens

PROCESSOR = PictureProcessor(patch_size=2, min_pixels=16)


def drawn(rows, columns, seed):
    """A picture of so many tokens a side."""
    shape = 4 * rows, 4 * columns, 3
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return number(pixels, PROCESSOR)


def test_equal_pictures_have_equal_numbers_and_others_have_others():
    one, again, other = drawn(2, 3, 0), drawn(2, 3, 0), drawn(2, 3, 1)
    assert one is again
    assert len(one.ids) == 6
    assert not set(one.ids) & set(other.ids)
    assert max(*one.ids, *other.ids) < -1


def test_another_processor_is_another_picture():
    pixels = np.zeros((8, 8, 3), np.uint8)
    darker = PictureProcessor(patch_size=2, min_pixels=16, mean=(0.1, 0.1, 0.1))
    assert number(pixels, PROCESSOR).first != number(pixels, darker).first


def test_a_picture_that_was_forgotten_gets_its_number_again():
    first = drawn(1, 1, 7).first
    gc.collect()
    with pytest.raises(PictureError, match="picture in memory has this one"):
        spots([first])
    assert drawn(1, 1, 7).first == first


def test_numbers_go_round(monkeypatch):
    ring = module._Numbers()
    monkeypatch.setattr(module, "_NUMBERS", ring)
    monkeypatch.setattr(module, "LAST", module.FIRST + 7)
    first, second = drawn(1, 3, 0), drawn(1, 3, 1)
    del first
    # Two numbers are left at the end, so the third picture takes the first one's.
    third = drawn(1, 3, 2)
    assert third.first == module.FIRST
    assert {*third.ids}.isdisjoint(second.ids)
    assert pictures_in([*third.ids, *second.ids]) == (third, second)
    with pytest.raises(PictureError, match="in use"):
        drawn(1, 3, 3)


def test_spots_of_slices_and_of_neighbours():
    one, other = drawn(1, 2, 0), drawn(1, 2, 1)
    row = [5, *one.ids, *one.ids, *other.ids, 6]
    found = [(s.picture, s.start, s.block, s.count) for s in spots(row)]
    assert found == [(one, 1, 0, 2), (one, 3, 0, 2), (other, 5, 0, 2)]
    cut = [(s.picture, s.start, s.block, s.count) for s in spots(row[2:4])]
    assert cut == [(one, 0, 1, 1), (one, 1, 0, 1)]


@pytest.mark.parametrize("ids", [[9], [9, 9, 9], [7]])
def test_every_picture_needs_one_place(ids):
    one, other = drawn(1, 2, 0), drawn(1, 2, 1)
    with pytest.raises(PictureError, match="has 2 pictures, and its chat template"):
        expanded(ids, [one, other], 9)
    assert expanded([9, 7, 9], [one, other], 9) == (*one.ids, 7, *other.ids)


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((4, 6, 3), np.uint8), np.zeros((0, 4, 3), np.uint8)],
)
def test_sides_are_whole_blocks(pixels):
    with pytest.raises(PictureError, match="multiples of 4"):
        number(pixels, PROCESSOR)


def test_positions_of_parts_continue_those_before():
    one, other = drawn(2, 3, 0), drawn(3, 1, 1)
    row = [5, *one.ids, 6, 7, *other.ids, 8]
    whole, after = rotary_positions(row)
    # Text at 0; the picture at 1, three tokens wide; text from 4 on.
    assert whole[:8].tolist() == [
        [0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3],
        [4, 4, 4],
    ]  # fmt: skip
    assert after == 10
    for cut in (1, 7, 8, 9, 12):
        before, begin = rotary_positions(row[:cut])
        rest, end = rotary_positions(row[cut:], begin)
        np.testing.assert_array_equal(np.concatenate([before, rest]), whole)
        assert end == after


def test_a_cut_picture_is_refused():
    one = drawn(2, 3, 0)
    for row in ([*one.ids[1:], 5], [*one.ids[:3], 5], [5, *one.ids[2:]]):
        with pytest.raises(PictureError, match="before or after"):
            rotary_positions(row)
    # Its end may follow, as in a chunk of a prompt.
    assert rotary_positions([5, *one.ids[:3]])[0].shape == (4, 3)
    broken = Sequence(Tokens.context([5, *one.ids[2:]]), np.zeros(5, np.float32))
    with pytest.raises(PictureError, match="before or after"):
        pack([broken], 8, 1)


def test_tokens_hold_their_pictures():
    picture = drawn(1, 2, 11)
    tokens = Tokens.context([5, *picture.ids])
    del picture
    tokens += Tokens.context([6])
    gc.collect()
    picture = tokens.pictures[0]
    assert tokens.ids.tolist() == [5, *picture.ids, 6]
    assert tokens[2:].pictures == (picture,)
    value = tokens.to_json()
    first = picture.first
    del tokens, picture
    gc.collect()
    assert Tokens.from_json(value).ids.tolist() == [5, first, first + 1, 6]


def test_stored_tokens_get_the_numbers_of_their_new_process(monkeypatch):
    one, other = drawn(1, 2, 12), drawn(2, 1, 13)
    tokens = Tokens.context([5, *one.ids, 6, *other.ids, *one.ids])
    value = tokens.to_json()
    pixels = one.pixels, other.pixels
    assert len(value["pictures"]) == 2
    monkeypatch.setattr(module, "_NUMBERS", module._Numbers())
    # In this process the second picture was met first, and has the first one's number.
    second = number(pixels[1], PROCESSOR)
    found = Tokens.from_json(value)
    first = number(pixels[0], PROCESSOR)
    assert second.first == module.FIRST
    assert found.ids.tolist() == [5, *first.ids, 6, *second.ids, *first.ids]
    assert set(found.pictures) == {first, second}


def test_ids_without_a_picture_are_refused():
    with pytest.raises(PictureError, match="picture in memory has this one"):
        Tokens.context([5, -7])
