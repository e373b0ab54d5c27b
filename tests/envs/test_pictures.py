"""Drawn pictures: what they show is what the question asks."""

import pickle
import struct
import zlib
from random import Random

import numpy as np
import pytest

from jaxrl_post.envs import Message, make
from jaxrl_post.envs.tasks.pictures import QUESTIONS, DrawnPictures, drawing
from jaxrl_post.messages import PICTURE
from jaxrl_post.pictures import read_picture

SIDES = pytest.mark.parametrize("side", [16, 32, 48])
NAMES = list(drawing.COLOURS)


def pixels(task) -> np.ndarray:
    (message,) = task.messages
    (source,) = message.pictures
    return read_picture(source)


def names(picture: np.ndarray) -> np.ndarray:
    """The number of each pixel's colour in `COLOURS`, -1 for the background."""
    found = np.full(picture.shape[:2], -1)
    for number, colour in enumerate(drawing.COLOURS.values()):
        found[(picture == colour).all(axis=-1)] = number
    return found


def components(filled: np.ndarray) -> int:
    """Counts connected parts; pixels that touch at a corner are connected."""
    waiting, count = set(map(tuple, np.argwhere(filled).tolist())), 0
    while waiting:
        count += 1
        reached = [waiting.pop()]
        while reached:
            row, column = reached.pop()
            near = {(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)}
            reached += near & waiting
            waiting -= near
    return count


def grade(environment, task, text) -> float:
    step = environment.step(task, (*task.messages, Message("assistant", text)))
    assert step.done
    return step.reward


@SIDES
def test_as_many_shapes_are_there_as_the_answer_says(side):
    tasks = DrawnPictures("count", side, most=6).tasks("train")[:200]
    counts = [components(names(pixels(task)) >= 0) for task in tasks]
    assert [str(count) for count in counts] == [task.reference for task in tasks]
    assert {*counts} == {*range(1, 7)}


@SIDES
def test_a_picture_has_the_colour_of_the_answer_and_no_other(side):
    tasks = DrawnPictures("colour", side).tasks("train")[:200]
    for task in tasks:
        found = {NAMES[number] for number in names(pixels(task)).ravel() if number >= 0}
        assert found == {task.reference}
    assert {task.reference for task in tasks} == {*NAMES}


@SIDES
def test_a_digit_is_the_scaled_bitmap_of_the_answer(side):
    tasks = DrawnPictures("digit", side).tasks("train")[:200]
    for task in tasks:
        filled = names(pixels(task)) >= 0
        rows, columns = (np.flatnonzero(filled.any(axis=axis)) for axis in (1, 0))
        box = filled[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        dots = box[:: side // 8, :: side // 8]
        assert (box == dots.repeat(side // 8, 0).repeat(side // 8, 1)).all()
        digits = map(np.array, drawing.DIGITS)
        shapes = [bitmap[:, bitmap.any(axis=0)] for bitmap in digits]
        same = [s.shape == dots.shape and (s == dots).all() for s in shapes]
        assert same.index(True) == int(task.reference)
        assert same.count(True) == 1
    assert len({task.reference for task in tasks}) == 10


def test_a_file_has_the_pixels_from_which_it_was_made():
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    assert (
        read_picture(drawing.png([row.tobytes() for row in picture])) == picture
    ).all()


def test_a_file_is_what_the_standard_says():
    data = drawing.png([bytes([9] * 9)] * 2)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    kinds, place = [], 8
    while place < len(data):
        (size,) = struct.unpack_from(">I", data, place)
        chunk, place = data[place + 4 : place + 8 + size], place + 12 + size
        assert struct.unpack_from(">I", data, place - 4) == (zlib.crc32(chunk),)
        kinds.append(chunk[:4])
    assert kinds == [b"IHDR", b"IDAT", b"IEND"]


def test_tasks_depend_on_seed_split_and_index_alone():
    first, again, other = (
        DrawnPictures(),
        DrawnPictures(train_size=5),
        DrawnPictures(seed=1),
    )
    assert list(again.tasks("train")) == list(first.tasks("train")[:5])
    assert list(other.tasks("train")[:5]) != list(again.tasks("train"))
    assert pickle.loads(pickle.dumps(first)) == first
    task = first.tasks("train")[0]
    assert pickle.loads(pickle.dumps(task)) == task


def test_nothing_that_is_held_out_is_trained_on_even_with_another_background():
    environment = DrawnPictures(train_size=3000, eval_size=300)

    def drawn(split):
        return {
            (task.data["kind"], names(pixels(task)).tobytes())
            for task in environment.tasks(split)
        }

    assert not drawn("train") & drawn("eval")


def test_the_right_text_alone_is_rewarded():
    environment = DrawnPictures("digit")
    task = environment.tasks("eval")[0]
    right = task.reference
    assert grade(environment, task, f" {right}\n") == 1.0
    for wrong in ("", f"{right}.", f"{right}{right}", str((int(right) + 1) % 10)):
        assert grade(environment, task, wrong) == 0.0


def test_the_question_says_nothing_about_the_answer():
    for task in DrawnPictures().tasks("train")[:50]:
        (message,) = task.messages
        assert message.content == PICTURE + QUESTIONS[task.data["kind"]]
        assert task.part == task.data["kind"]


def test_a_share_of_the_demonstrations_are_guesses():
    tasks = DrawnPictures(guesses=1.0).tasks("train")[:900]
    for share, low, high in ((0.0, 1, 1), (0.5, 0.5, 0.7), (1.0, 0.1, 0.25)):
        environment = DrawnPictures(guesses=share)
        shown = [environment.demonstration(task) for task in tasks]
        assert shown == [environment.demonstration(task) for task in tasks]
        right = [
            answer == task.reference for answer, task in zip(shown, tasks, strict=True)
        ]
        assert low <= np.mean(right) <= high
        said = (*tasks[0].messages, Message("assistant", shown[0]))
        assert environment.step(tasks[0], said).metrics == {"possible": 1.0}


def test_shapes_do_not_touch():
    for seed in range(50):
        layout = np.array(drawing.scattered(Random(seed), 16, 6))
        assert components(layout > 0) == 6
        assert {*layout.ravel()} == {*range(7)}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            "kinds=counts",
            "kinds must be different ones of count, colour, digit, joined",
        ),
        ("kinds=count,count", "kinds must be different ones"),
        ("kinds=", "kinds must be different ones"),
        ("side=24", "side must be a multiple of 16, got 24"),
        ("side=8", r"side must be an integer in \[16, 512\], got 8"),
        ("most=7", r"most must be an integer in \[2, 6\], got 7"),
        ("guesses=2", r"guesses must be a share in \[0, 1\], got 2"),
        ("eval_size=0", "eval_size must be an integer"),
    ],
)
def test_options_outside_their_range_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        make(f"pictures?{options}")
