"""Messages, and the pictures in them."""

import copy
import pickle

import pytest

from jaxrl_post.envs.env import Answer
from jaxrl_post.messages import PICTURE, Message, identity

ONE, TWO = b"\x89PNG one", b"GIF89a two"
SHOWN = Message("user", f"{PICTURE} or {PICTURE}?", pictures=(ONE, TWO))


def test_a_message_with_pictures_survives_json_pickle_and_copies():
    assert Message.from_json(SHOWN.to_json()) == SHOWN
    assert SHOWN.to_json()["pictures"] == ["iVBORyBvbmU=", "R0lGODlhIHR3bw=="]
    for other in (pickle.loads(pickle.dumps(SHOWN)), copy.deepcopy(SHOWN)):
        assert other == SHOWN
        assert hash(other) == hash(SHOWN)
        assert other.pictures == (ONE, TWO)
    assert "pictures" not in Message("user", "7").to_json()
    assert Message.from_json({"role": "user", "content": "7"}).pictures == ()


def test_pictures_belong_to_equality():
    other = Message("user", SHOWN.content, pictures=(TWO, ONE))
    assert other != SHOWN
    assert Message("user", SHOWN.content) != SHOWN
    assert len({SHOWN, other, Message.from_json(SHOWN.to_json())}) == 2


def test_repr_tells_pictures_apart_and_shows_no_bytes():
    text, other = repr(SHOWN), repr(Message("user", PICTURE, pictures=(TWO,)))
    assert "picture of 8 bytes, " in text
    assert "picture of 10 bytes, " in text
    assert "GIF" not in text + other
    swapped = Message("user", SHOWN.content, pictures=(TWO, ONE))
    assert repr(swapped) != text
    long = Message("user", PICTURE, pictures=(bytes(1234),))
    assert "picture of 1,234 bytes" in repr(long)
    assert len(repr(long)) < 120
    assert repr(Message("user", "7")) == "Message(role='user', content='7')"


@pytest.mark.parametrize("content", ["", "?", PICTURE, PICTURE * 3])
def test_each_picture_has_one_place(content):
    places = content.count(PICTURE)
    with pytest.raises(ValueError, match=rf"got {places} of them and 2 pictures"):
        Message("user", content, pictures=(ONE, TWO))


def test_without_pictures_the_character_is_text():
    assert Message("user", f"a{PICTURE}b").content == f"a{PICTURE}b"


@pytest.mark.parametrize("given", [ONE, "cat.png", ("cat.png",), (3,), (bytearray(3),)])
def test_pictures_are_bytes(given):
    with pytest.raises(TypeError, match="pictures must be"):
        Message("user", PICTURE, pictures=given)


@pytest.mark.parametrize("given", ["R0lG", [3], ["no base64"], [None]])
def test_json_of_pictures_is_checked(given):
    with pytest.raises((TypeError, ValueError)):
        Message.from_json({"role": "user", "content": PICTURE, "pictures": given})


def test_identity_tells_texts_with_other_pictures_apart():
    texts = {
        identity(SHOWN.content, pictures)
        for pictures in [(ONE, TWO), (TWO, ONE), (ONE, ONE), ()]
    }
    assert len(texts) == 4


def test_subclasses_have_pictures():
    said = Answer("assistant", PICTURE, "stop", 3, pictures=(ONE,))
    assert Answer.from_json(said.to_json()) == said
