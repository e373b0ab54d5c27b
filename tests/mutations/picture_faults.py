"""Faults of pictures in messages, data sets, examples and requests."""

from tests.mutations.fault import Fault

__all__ = ["PICTURES"]

PICTURES = [
    Fault(
        "tasks with other pictures look alike",
        "messages.py::named",
        "hashlib.blake2b(picture, digest_size=8)",
        "hashlib.blake2b(b'', digest_size=8)",
        "test_messages.py",
    ),
    Fault(
        "tokens of pictures are trained on",
        "data/learned/pictures.py::Expansion._expanded",
        "np.repeat(mask, counts)",
        "np.repeat(mask, counts) | (np.repeat(ids, counts) == self.image_token)",
        "data/test_pictures.py",
    ),
    Fault(
        "the mask does not move behind a picture",
        "data/learned/pictures.py::Expansion._expanded",
        "np.repeat(mask, counts)",
        "np.resize(mask, counts.sum())",
        "data/test_pictures.py",
    ),
    Fault(
        "a message that the template hides is not noticed",
        "data/chat.py::shown",
        "(places := ids.count(token)) != count",
        "(places := ids.count(token)) > count",
        "data/test_pictures.py",
    ),
    Fault(
        "a bad picture of a data set is found in training",
        "pictures/rows.py::_given",
        "checked(source, root)",
        "root.joinpath(source).read_bytes()",
        "data/test_picture_rows.py",
    ),
    Fault(
        "a picture of the assistant is learned",
        "pictures/rows.py::_turn",
        "pictures and turn.get(speaker) in ASSISTANTS",
        "False",
        "data/test_picture_rows.py",
    ),
    Fault(
        "pictures without a place are dropped",
        "pictures/rows.py::read_row",
        "count not in (0, len(pictures))",
        "count > len(pictures)",
        "data/test_picture_rows.py",
    ),
    Fault(
        "prompts with other pictures are held out together",
        "conversations.py::group_of",
        "identity(each.content, each.pictures)",
        "each.content",
        "data/test_picture_rows.py",
    ),
    Fault(
        "the tokens of pictures are not counted",
        "data/learned/pictures.py::added_tokens",
        "eyes.num_tokens(source) - 1",
        "0",
        "examples/test_pictures.py",
    ),
    Fault(
        "agents' conversations with other pictures are one",
        "serve/recordings.py::_key",
        "identity(content, chat.sources(message))",
        "content",
        "serve/test_pictures.py",
    ),
    Fault(
        "pictures are decoded before their tokens are counted",
        "serve/prompts.py::messages_of",
        "count > most",
        "False",
        "serve/test_pictures.py",
    ),
]
