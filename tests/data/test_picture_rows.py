"""Data sets with pictures: read, checked, and refused by name."""

import base64
import json

import pytest

from jaxrl_post.data.chats import read_chats
from jaxrl_post.data.preferences import read_preferences
from jaxrl_post.data.steps import read_steps
from jaxrl_post.envs.tasks.prompt_answers import PromptAnswers
from jaxrl_post.messages import PICTURE, Message
from jaxrl_post.pictures.contents import data_url
from tests.pictures.files import colours, encoded, frames, png
from tests.row_files import write_rows
from tests.seeing import RED, WIDE

URL = data_url(RED)
SAID = {"role": "assistant", "content": "red"}
FORMATS = pytest.mark.parametrize("suffix", ["jsonl", "parquet"])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data" / "cats").mkdir(parents=True)
    (tmp_path / "data" / "cats" / "red.png").write_bytes(RED)
    (tmp_path / "data" / "wide.jpg").write_bytes(WIDE)
    (tmp_path / "secret.png").write_bytes(RED)
    return tmp_path / "data"


def chats(folder, *rows, suffix="jsonl", **options):
    return read_chats(write_rows(folder / f"rows.{suffix}", rows), **options)


def asked(*parts):
    # A column of a table has contents of one type.
    said = {"role": "assistant", "content": [{"type": "text", "text": "red"}]}
    return [{"role": "user", "content": list(parts)}, said]


def first(folder, row, **options):
    (chat,), _ = chats(folder, row, **options)
    return chat.messages[0]


WHAT = {"type": "text", "text": "What?"}
VALUES = [
    {"type": "image", "image": "cats/red.png"},
    {"type": "image", "image": "cats/../cats/red.png"},
    {"type": "image", "path": "cats/red.png"},
    {"type": "image", "url": URL},
    {"type": "image", "image": {"bytes": None, "path": "cats/red.png"}},
    {"type": "image", "base64": base64.b64encode(RED).decode()},
    {"type": "image", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    {"type": "image_url", "image_url": URL},
    {"type": "image_url", "image_url": "cats/red.png"},
    {"type": "image", "image": "cats/red.png", "text": None},
]


@pytest.mark.parametrize("part", VALUES)
def test_a_part_names_its_picture(folder, part):
    found = first(folder, {"messages": asked(part, WHAT)})
    assert found == {
        "role": "user", "content": f"{PICTURE}What?", "pictures": (RED,)
    }  # fmt: skip


@pytest.mark.parametrize(
    "value", [RED, {"bytes": RED, "path": "elsewhere.png"}, {"bytes": RED}]
)
def test_tables_hold_bytes(folder, value):
    found = first(
        folder, {"messages": asked({"type": "image", "image": value})}, suffix="parquet"
    )
    assert found["pictures"] == (RED,)


@FORMATS
def test_parts_are_joined_in_order(folder, suffix):
    parts = [WHAT, {"type": "image", "image": "wide.jpg"}, {**WHAT, "text": " or "},
             {"type": "image", "image": "cats/red.png"}]  # fmt: skip
    found = first(folder, {"messages": asked(*parts)}, suffix=suffix)
    assert found["content"] == f"What?{PICTURE} or {PICTURE}"
    assert found["pictures"] == (WIDE, RED)


def test_parts_of_text_alone_are_a_text(folder):
    found = first(folder, {"messages": asked(WHAT, {**WHAT, "text": " This"})})
    assert found == {"role": "user", "content": "What? This"}


def test_rows_of_text_are_read_as_before(folder):
    row = {"messages": [{"role": "user", "content": f"<image> {PICTURE}"}, SAID]}
    assert first(folder, row)["content"] == f"<image> {PICTURE}"
    row = {"messages": [{"role": "user", "content": f"What? {PICTURE}"}, SAID]}
    row |= {"image": "python:3.12", "images": []}
    assert first(folder, row)["content"] == f"What? {PICTURE}"


# TRL: parts without a value. LLaMA-Factory and verl: marks in a text. TRL: neither.
IMAGE = {"type": "image"}
LAYOUTS = [
    (asked(IMAGE, WHAT, IMAGE), f"{PICTURE}What?{PICTURE}"),
    ([{"role": "user", "content": "<image>What<image>?"}, SAID],
     f"{PICTURE}What{PICTURE}?"),
    ([{"role": "user", "content": "What?"}, SAID], f"{PICTURE * 2}What?"),
]  # fmt: skip


@FORMATS
@pytest.mark.parametrize(("messages", "content"), LAYOUTS)
def test_a_column_gives_pictures_to_places(folder, messages, content, suffix):
    images = ["cats/red.png", "wide.jpg"]
    found = first(folder, {"messages": messages, "images": images}, suffix=suffix)
    assert found["content"] == content
    assert found["pictures"] == (RED, WIDE)


def test_a_place_may_be_in_the_text_of_a_part(folder):
    two = {"type": "text", "text": "<image>What<image>?"}
    row = {"messages": asked(two), "images": ["cats/red.png", "wide.jpg"]}
    found = first(folder, row)
    assert found["content"] == f"{PICTURE}What{PICTURE}?"
    assert found["pictures"] == (RED, WIDE)


ASKS = [{"role": "user", "content": "<image>What?"}, SAID]
PLAIN = [{"role": "user", "content": "What?"}, SAID]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        # Values of a column that are no pictures are never passed over.
        *(
            ({"messages": messages, "images": images}, "field 'images', picture")
            for messages in (ASKS, PLAIN)
            for images in (
                [{"bytes": None, "path": None}],
                ["none.avif"],
                ["none.heic"],
                ["cats/0001"],
                ["https://example.com/img?id=3"],
                "https://example.com/a.png?x=1",
                [3],
                [None],
                ["wide.jpg", None],
                [{"bytes": None, "path": "wide.jpg"}, {"bytes": None, "path": None}],
                "iVBORw0KGgo=",
            )
        ),
        ({"messages": ASKS, "image": "cats/0001"}, "field 'image', picture 1"),
        ({"messages": PLAIN, "image": "none.heic"}, "field 'image', picture 1"),
        ({"messages": ASKS, "image": "python:3.12"}, "drop or rename the field"),
        ({"prompt": "<image>", "completion": "a", "image": "a"}, "field 'image', pict"),
        # Places without a picture.
        ({"messages": ASKS, "images": []}, "message 1: has a place <image>"),
        ({"messages": ASKS, "images": None}, "message 1: has a place <image>"),
        ({"messages": ASKS, "image": None}, "message 1: has a place <image>"),
        ({"prompt": "<image>", "completion": "a", "images": []}, "has a place <image>"),
        (
            {
                "messages": [{"role": "user", "content": "<image><image>"}, SAID],
                "images": ["wide.jpg"],
            },
            "message 1: has a place <image>",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "<image><image>"},
                    {"from": "gpt", "value": "red"},
                ],
                "images": ["wide.jpg"],
            },
            "message 1: has a place <image>",
        ),
        (
            {
                "messages": asked(IMAGE, {**WHAT, "text": "<image>What?"}),
                "images": ["wide.jpg"],
            },
            "part 3: has no picture",
        ),
        (
            {"messages": asked(VALUES[0], {**WHAT, "text": "<image>What?"})},
            "message 1: has a place <image>",
        ),
        # Both forms at a time.
        (
            {"messages": asked(VALUES[0], WHAT), "images": ["wide.jpg"]},
            "pictures in its parts",
        ),
    ],
)  # fmt: skip
def test_no_picture_and_no_place_is_passed_over(folder, row, told):
    with pytest.raises(ValueError, match=r"rows.jsonl:1: ") as caught:
        chats(folder, row)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        {**WHAT, "image": "wide.jpg"},
        {**WHAT, "image_url": {"url": URL}},
        {**IMAGE, "image": "wide.jpg", "text": "What?"},
        {**IMAGE, "image_path": "wide.jpg"},
        {**IMAGE, "image": "wide.jpg", "resized_height": 28},
        {**IMAGE, "image": "wide.jpg", "max_pixels": 784},
        {"type": "image_url", "image_url": URL, "path": "wide.jpg"},
    ],
)
def test_a_part_says_one_thing(folder, part):
    row = {"messages": asked(WHAT, part), "images": ["cats/red.png"]}
    with pytest.raises(ValueError, match=r"message 1: part 2: of type .* has the key"):
        chats(folder, row)


@pytest.mark.parametrize("value", ["wide.jpg", {"path": "wide.jpg"}, ["wide.jpg"]])
def test_a_column_may_have_one_picture(folder, value):
    row = {"messages": [{"role": "user", "content": "What?"}, SAID], "image": value}
    assert first(folder, row)["pictures"] == (WIDE,)


def test_a_column_may_have_another_name(folder):
    row = {"messages": [{"role": "user", "content": "<image>?"}, SAID]}
    row["photo"] = ["wide.jpg"]
    found = first(folder, row, columns={"images": "photo"})
    assert found["pictures"] == (WIDE,)


def test_pictures_are_taken_in_the_order_of_messages(folder):
    two = [*LAYOUTS[1][0][:0], {"role": "user", "content": "<image>1"}, SAID,
           {"role": "user", "content": "2<image>"}, SAID]  # fmt: skip
    (chat,), _ = chats(folder, {"messages": two, "images": ["wide.jpg", URL]})
    shown = [message.get("pictures") for message in chat.messages]
    assert shown == [(WIDE,), None, (RED,), None]


def test_sharegpt_has_pictures(folder):
    turns = [
        {"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "red"}
    ]  # fmt: skip
    found = first(folder, {"conversations": turns, "images": ["cats/red.png"]})
    assert found == {
        "role": "user", "content": f"{PICTURE}What?", "pictures": (RED,)
    }  # fmt: skip


@pytest.mark.parametrize("prompt", ["What?", "<image>What?"])
def test_a_prompt_of_text_shows_the_column(folder, prompt):
    row = {"prompt": prompt, "completion": "red", "images": ["cats/red.png"]}
    (chat,), _ = chats(folder, row)
    assert chat.messages[0]["pictures"] == (RED,)
    assert chat.messages[0]["content"] == f"{PICTURE}What?"
    assert chat.only_last


def test_prompts_with_other_pictures_are_no_group(folder):
    rows = [
        {"messages": asked({"type": "image", "image": name}, WHAT)}
        for name in ("cats/red.png", "wide.jpg", "cats/red.png")
    ]
    found, _ = chats(folder, *rows)
    groups = [chat.group for chat in found]
    assert groups[0] == groups[2] != groups[1]
    assert "PNG" not in groups[0]


def bad_files(folder):
    files = {
        "cut.png": RED[:-30],
        "text.png": b"no picture",
        "moving.gif": frames("GIF"),
        "strip.png": encoded(colours(1, 300)),
        "huge.png": png(2**14, 2**14, 8, 2, b""),
        "empty.png": b"",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "out.png").symlink_to(folder.parent / "secret.png")
    (folder / "away.png").symlink_to(folder / "nowhere.png")


BAD = {
    "cut.png": "truncated or damaged",
    "text.png": "no picture in a format",
    "moving.gif": "GIF with 3 frames",
    "strip.png": "less than 200 times",
    "huge.png": "at most 67,108,864 pixels",
    "empty.png": "no picture in a format",
    "out.png": "leads out of the folder",
    "../secret.png": "leads out of the folder",
    "away.png": "cannot be found",
    "none.png": "cannot be found",
    "cats": "is no file",
    "/etc/passwd": "got an absolute one",
    "http://127.0.0.1:9/a.png": "pictures are never fetched",
    "https://example.com/a.png": "pictures are never fetched",
    "file:///etc/passwd": "pictures are never fetched",
    "data:image/png;base64,????": "base64 is damaged",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_picture_is_a_bad_row(folder, name):
    bad_files(folder)
    good = {"messages": asked(WHAT, {"type": "image", "image": "wide.jpg"})}
    bad = {"messages": asked(WHAT, {"type": "image", "image": name})}
    message = r"rows.jsonl:2: field 'messages', message 1: part 2: picture"
    with pytest.raises(ValueError, match=message) as caught:
        chats(folder, good, bad, good)
    assert BAD[name] in str(caught.value)
    found, report = chats(folder, good, bad, good, on_bad_row="skip")
    assert len(found) == 2
    assert [row.line for row in report.first_bad] == [2]


MISPLACED = [
    (asked(IMAGE, WHAT), ["wide.jpg"] * 2, "places for 1 pictures, and the row has 2"),
    (asked(IMAGE, IMAGE), ["wide.jpg"], "message 1: part 2: has no picture"),
    (asked(IMAGE, WHAT), None, "message 1: part 1: has no picture"),
    ([{"role": "user", "content": "<image>"}, SAID], ["wide.jpg"] * 2, "places for 1"),
    (asked(WHAT, {"type": "video", "video": "a.mp4"}), None, "type 'video'"),
    (asked({"type": "image", "image": 3}), None, "got int"),
    (asked({"type": "image", "image": "a.png", "path": "b.png"}), None, "give one"),
    (asked({"text": "no type"}), None, "must be an object with a type"),
    (asked("text"), None, "must be an object with a type"),
    (asked({"type": "text", "text": 3}), None, "of text; got int"),
    (asked({"type": "image", "image": "wide.jpg"}, {**WHAT, "text": PICTURE}), None,
     "must not contain U+FFFC"),
    ([{"role": "user", "content": PICTURE}, SAID], ["wide.jpg"], "U+FFFC"),
    ([{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "<image>"}],
     ["wide.jpg"], "message 2: a turn of the assistant must be text"),
    ([{"role": "user", "content": "Hi!"},
      {"role": "assistant", "content": [{"type": "image", "image": "wide.jpg"}]}],
     None, "message 2: a turn of the assistant must be text"),
    ([{"role": "system", "content": "Hi!"}, SAID], ["wide.jpg"], "no message of the"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "images", "told"), MISPLACED)
def test_places_and_pictures_belong_together(folder, messages, images, told):
    row = {"messages": messages} | ({"images": images} if images else {})
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: ") as caught:
        chats(folder, row)
    assert told in str(caught.value)


def test_a_bad_column_is_named(folder):
    row = {"messages": LAYOUTS[1][0], "images": ["wide.jpg", "none.png"]}
    with pytest.raises(ValueError, match="field 'images', picture 2: picture 'none"):
        chats(folder, row)
    row = {"messages": LAYOUTS[1][0], "images": ["wide.jpg"], "image": "wide.jpg"}
    with pytest.raises(ValueError, match="both have pictures"):
        chats(folder, row)


def test_a_key_of_a_file_is_no_picture(folder):
    row = {"messages": [{"role": "user", "content": PICTURE, "pictures": ["a"]}, SAID]}
    with pytest.raises(ValueError, match="the key 'pictures' is not known"):
        chats(folder, row)


def test_alpaca_shows_no_pictures(folder):
    row = {"instruction": "<image>?", "output": "red", "images": ["wide.jpg"]}
    with pytest.raises(ValueError, match="no message of the user shows them"):
        chats(folder, row)


def test_many_rows_stay_in_order(folder):
    """More than are read ahead, rows of text among them."""
    rows = []
    for number in range(150):
        content = [{"type": "text", "text": f"{number}"}]
        content += [{"type": "image", "image": "wide.jpg"}] * (number % 3)
        plain = number % 5 == 0
        said = f"{number}" if plain else content
        rows.append({"messages": [{"role": "user", "content": said}, SAID]})
    found, report = chats(folder, *rows)
    assert report.num_rows == 150
    numbers = [int(chat.messages[0]["content"].strip(PICTURE)) for chat in found]
    assert numbers == list(range(150))


PAIR = {"chosen": [SAID], "rejected": [{**SAID, "content": "blue"}]}


@FORMATS
def test_preferences_have_prompts_with_pictures(folder, suffix):
    prompt = [{"role": "user", "content": [IMAGE, WHAT]}]
    path = write_rows(
        folder / f"pairs.{suffix}",
        [{"prompt": prompt, **PAIR, "images": ["cats/red.png"]}],
    )
    (pair,), _ = read_preferences(path)
    assert pair.messages == (Message("user", f"{PICTURE}What?", pictures=(RED,)),)
    assert (pair.chosen, pair.rejected) == ("red", "blue")


@pytest.mark.parametrize("content", [[IMAGE, WHAT], "<image>What?", "What?"])
def test_conversations_of_a_pair_both_show_the_pictures(folder, content):
    asks = {"role": "user", "content": content}
    row = {name: [asks, *said] for name, said in PAIR.items()}
    path = write_rows(folder / "pairs.jsonl", [{**row, "images": ["cats/red.png"]}])
    (pair,), _ = read_preferences(path)
    assert pair.messages == (Message("user", f"{PICTURE}What?", pictures=(RED,)),)


def test_conversations_with_other_pictures_are_no_pair(folder):
    names = {"chosen": "wide.jpg", "rejected": "cats/red.png"}
    row = {
        name: [{"role": "user", "content": [{**IMAGE, "image": names[name]}]}, *said]
        for name, said in PAIR.items()
    }
    path = write_rows(folder / "pairs.jsonl", [row])
    with pytest.raises(ValueError, match="must differ in the last message alone"):
        read_preferences(path)


def test_judged_answers_and_steps_have_prompts_with_pictures(folder):
    prompt = [{"role": "user", "content": [{**IMAGE, "image": "wide.jpg"}, WHAT]}]
    row = {"prompt": prompt, "completion": "red", "label": True}
    (judged,), _ = read_preferences(write_rows(folder / "judged.jsonl", [row]))
    row = {"prompt": prompt, "completions": ["red"], "labels": [True]}
    (solution,), _ = read_steps(write_rows(folder / "steps.jsonl", [row]))
    asks = (Message("user", f"{PICTURE}What?", pictures=(WIDE,)),)
    assert judged.messages == solution.messages == asks


def environment(folder, *rows, **options):
    path = str(write_rows(folder / "tasks.jsonl", rows))
    return PromptAnswers(path, path, **options)


@pytest.mark.parametrize(
    "prompt", ["What?", "<image>What?", [{"role": "user", "content": [IMAGE, WHAT]}]]
)
@pytest.mark.parametrize("field", ["prompt", "problem"])
def test_tasks_show_pictures(folder, prompt, field):
    row = {field: prompt, "answer": "red", "images": [{"path": "cats/red.png"}]}
    options = {} if field == "prompt" else {"prompt": field}
    found = environment(folder, row, instruction="Be brief.", system="Look.", **options)
    [task] = found.tasks("train")
    asks = Message("user", f"{PICTURE}What?\n\nBe brief.", pictures=(RED,))
    assert task.messages == (Message("system", "Look."), asks)


def test_a_bad_picture_of_a_task_is_a_bad_row(folder):
    rows = [
        {"prompt": "What?", "answer": "red", "images": [name]}
        for name in ("wide.jpg", "none.png")
    ]
    with pytest.raises(ValueError, match=r"tasks\.jsonl:2: field 'images', picture 1"):
        environment(folder, *rows).tasks("train")
    assert len(environment(folder, *rows, on_bad_row="skip").tasks("train")) == 1


def test_graders_get_texts(folder):
    asks = [{"role": "user", "content": [{**IMAGE, "image": "wide.jpg"}, WHAT]}]
    found = environment(
        folder,
        {"prompt": asks, "answer": "red"},
        grader="tests.data.test_picture_rows:length",
    )
    [task] = found.tasks("train")
    answer = Message("assistant", "red")
    assert found.step(task, (*task.messages, answer)).reward == len(f"{PICTURE}What?")


def length(prompt: str) -> int:
    return len(prompt)


def test_json_lines_without_pictures_need_no_pillow(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    assert first(folder, {"messages": asked(WHAT)})["content"] == "What?"
    row = {"messages": asked({"type": "image", "image": "wide.jpg"})}
    with pytest.raises(ModuleNotFoundError, match="pictures"):
        chats(folder, json.loads(json.dumps(row)))
