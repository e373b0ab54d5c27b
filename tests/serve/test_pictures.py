"""Requests with pictures: read, refused, and recorded; nothing is ever fetched."""

import asyncio
import json
import socket
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from jaxrl_post.data import chat
from jaxrl_post.data.codec import Codec
from jaxrl_post.envs import Step, Task
from jaxrl_post.envs.workers.interface import Judgement
from jaxrl_post.messages import PICTURE, Message
from jaxrl_post.pictures import Shown
from jaxrl_post.pictures.contents import data_url
from jaxrl_post.pictures.numbered import spots
from jaxrl_post.serve.agents import _episode, _message
from jaxrl_post.serve.calls import ApiError
from jaxrl_post.serve.episodes import Episodes
from jaxrl_post.serve.fields import ChatMessage, EndFields, EpisodeFields
from jaxrl_post.serve.prompts import messages_of, prompt_of, with_pictures
from jaxrl_post.serve.recordings import Recording
from jaxrl_post.serve.responses.fields import ResponsesFields
from jaxrl_post.serve.responses.items import chat_of, input_of
from jaxrl_post.serve.responses.routes import Responses, _chat
from jaxrl_post.tokens import Tokens
from tests.pictures.files import colours, encoded, frames, png
from tests.seeing import BLIND, EYES, QWEN3, RED, SEEING, WIDE, seeing
from tests.serve.conftest import listening, make_served

WHAT = {"type": "text", "text": "What?"}


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts):
    return {"role": "user", "content": list(parts)}


ASKED = user(image(data_url(RED)), WHAT, image(data_url(WIDE)))
SHOWN = Message("user", f"{PICTURE}What?{PICTURE}", pictures=(RED, WIDE))


def read(*rows):
    return [ChatMessage.model_validate(row) for row in rows]


def prompt(*rows, tokenizer=SEEING, **options):
    return prompt_of(tokenizer, read(*rows), chat.NO_OPTIONS, **options)


def test_parts_become_a_prompt():
    found = prompt({"role": "system", "content": "1"}, ASKED)
    assert found == Codec(SEEING).render([Message("system", "1"), SHOWN])
    assert isinstance(found, Shown)


@pytest.mark.parametrize(
    "part",
    [
        image(data_url(RED)),
        {"type": "image_url", "image_url": data_url(RED)},
        {"type": "input_image", "image_url": data_url(RED), "detail": "low"},
        {"type": "image_url", "image_url": {"url": data_url(RED), "detail": "high"}},
    ],
)
def test_a_picture_has_several_forms(part):
    [row] = messages_of(read(user(part)), EYES, 99)
    assert row == {"role": "user", "content": PICTURE, "pictures": (RED,)}


def test_a_result_of_a_tool_may_be_a_picture():
    row = {"role": "tool", "tool_call_id": "1", "content": [image(data_url(RED))]}
    [found] = messages_of(read(row), EYES, 99)
    assert found["pictures"] == (RED,)


def test_a_clients_own_key_is_no_picture():
    [row] = messages_of(read({**user(WHAT), "pictures": ["a"]}), EYES, 99)
    assert "pictures" not in row


BAD = [
    (user(image("http://127.0.0.1:9/a.png")), "pictures are never fetched"),
    (user(image("HTTPS://example.com/a.png")), "pictures are never fetched"),
    (user(image("file:///etc/passwd")), "pictures are never fetched"),
    (user(image("/etc/passwd")), "a path needs a folder"),
    (user(image("a.png")), "a path needs a folder"),
    (user(image("data:image/png;base64,????")), "base64 is damaged"),
    (user(image(data_url(b"no picture"))), "no picture in a format"),
    (user(image(data_url(frames("GIF")))), "GIF with 3 frames"),
    (user(image(data_url(encoded(colours(1, 300))))), "less than 200 times"),
    (user(image(data_url(png(2**14, 2**14, 8, 2, b"")))), "at most 67,108,864 pixels"),
    (user(image(data_url(RED[:-30]))), "truncated or damaged"),
    (user({"type": "image_url"}), "has no picture"),
    (user({"type": "image_url", "image_url": 3}), "got int"),
    (user({"type": "input_audio", "input_audio": {}}), "a part of type 'input_audio'"),
    (user(image(data_url(RED)), {**WHAT, "text": PICTURE}), "U+FFFC"),
    ({"role": "assistant", "content": [image(data_url(RED))]}, "an answer is text"),
    (user({"type": "text", "text": "<|image_pad|>"}), "has 1 image tokens"),
]


@pytest.mark.parametrize(("row", "told"), BAD)
def test_a_bad_picture_is_refused(row, told):
    with pytest.raises(ApiError) as caught:
        prompt(user(WHAT), row, user(WHAT))
    assert caught.value.status == 400
    assert told in str(caught.value)
    assert "messages" in str(caught.value)


def test_a_bad_picture_is_named():
    with pytest.raises(ApiError, match=r"messages\[1\]\.content: part 2: picture 'ht"):
        prompt(user(WHAT), user(WHAT, image("http://a/b.png")))


def test_no_address_is_fetched(monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("looked up"))
    with pytest.raises(ApiError, match="never fetched"):
        prompt(user(image("http://example.com/a.png")))


def test_pictures_that_are_too_long_are_not_decoded(monkeypatch):
    monkeypatch.setattr(
        "jaxrl_post.pictures.eyes.read_picture",
        lambda *args, **options: pytest.fail("decoded"),
    )
    with pytest.raises(ApiError, match=r"your pictures have 5 tokens") as caught:
        prompt(ASKED, most=4)
    assert caught.value.code == "context_length_exceeded"


def test_a_model_that_does_not_see_says_so():
    with pytest.raises(ApiError, match=r"messages\[0\].*reads text alone.*image_url"):
        prompt(ASKED, tokenizer=BLIND)


def test_a_message_that_the_template_hides_is_refused():
    system = {"role": "system", "content": [image(data_url(RED))]}
    with pytest.raises(ApiError, match="of role 'system'"):
        prompt(system, user(WHAT), tokenizer=seeing(QWEN3))


def clients(ids):
    """The ids that a client gets."""
    return [token if token >= 0 else EYES.image_token for token in ids]


def test_ids_of_a_client_get_their_pictures_back():
    """An answer with its token ids comes first as it is."""
    before, said = prompt(ASKED), SEEING.encode("3<|im_end|>")
    answer = {
        "role": "assistant",
        "content": "3",
        "prompt_token_ids": clients(before),
        "generation_token_ids": list(said),
    }
    again = user(image(data_url(RED)))
    found = prompt(ASKED, answer, again)
    assert found[: len(before) + len(said)] == (*before, *said)
    assert [spot.count for spot in spots(found)] == [2, 3, 2]
    assert isinstance(found, Shown)
    assert found == Codec(SEEING).render(
        [SHOWN, Message("assistant", "3"), Message("user", PICTURE, pictures=(RED,))]
    )
    last = prompt(ASKED, answer, continue_final=True, prompt=False)
    assert last == (*before, *said[:-1])
    other = user(image(data_url(RED)), WHAT)
    with pytest.raises(ApiError, match="5 of the token ids are image tokens, and"):
        prompt(other, answer, again)


def test_ids_without_pictures_stay_as_they_are():
    assert with_pictures(SEEING, [5, 6], [{"role": "user", "content": "a"}]) == (5, 6)
    assert with_pictures(BLIND, [5, EYES.image_token], []) == (5, EYES.image_token)


def rows(*given):
    return messages_of(read(*given), EYES, 99)


def served_turn(recording, messages, answer="3"):
    """Serves a turn, and records it."""
    begun = recording.find(SEEING, messages, chat.NO_OPTIONS)(1)
    said = SEEING.encode(f"{answer}<|im_end|>")
    sampled = Tokens.generated(said, [-1.0] * len(said), version=0)
    held = begun.prompt
    recording.add(begun, sampled, {"role": "assistant", "content": answer}, "stop")
    return begun, held


def test_an_agents_conversation_continues_with_pictures():
    held = EYES.picture(RED), EYES.picture(WIDE)
    recording = Recording("one", seed=3)
    begun, before = served_turn(recording, rows(ASKED))
    answer = {"role": "assistant", "content": "3"}
    again, found = served_turn(
        recording, rows(ASKED, answer, user(image(data_url(WIDE))))
    )
    assert again.kind == "bridged"
    assert found[: len(before)] == before
    assert isinstance(found, Shown)
    assert [spot.count for spot in spots(found)] == [2, 3, 3]
    assert begun.prompt == Codec(SEEING).render([SHOWN])
    assert held[0] is not held[1]


def test_a_conversation_with_another_picture_is_another():
    held = EYES.picture(RED), EYES.picture(WIDE)
    recording = Recording("one", seed=3)
    served_turn(recording, rows(user(image(data_url(RED)))))
    answer = {"role": "assistant", "content": "3"}
    begun, _ = served_turn(
        recording, rows(user(image(data_url(WIDE))), answer, user(WHAT))
    )
    assert begun.kind == "edited"
    assert held[0] is not held[1]


def test_noise_depends_on_the_picture_and_not_on_its_numbers(monkeypatch):
    def noise(picture):
        recording = Recording("one", seed=3)
        begun = recording.find(
            SEEING, rows(user(image(data_url(picture)))), chat.NO_OPTIONS
        )(1)
        return recording.noise(begun), begun.prompt

    first, ids = noise(RED)
    assert noise(RED)[0] == first
    assert noise(encoded(colours(4, 8, seed=9)))[0] != first
    # Another process gives other numbers.
    from jaxrl_post.pictures import numbered

    monkeypatch.setattr(numbered, "_NUMBERS", numbered._Numbers())
    numbered._NUMBERS.next += 77
    monkeypatch.setattr(
        SEEING, "eyes", EYES.__class__(EYES.processor, EYES.image_token)
    )
    again, others = noise(RED)
    assert others != ids
    assert again == first


def test_a_recorded_message_has_its_pictures():
    [row] = rows(user(image(data_url(RED)), WHAT))
    assert _message(row) == Message("user", f"{PICTURE}What?", pictures=(RED,))


@pytest.fixture(scope="module")
def seen():
    model = make_served(SEEING)
    with listening(model) as address:
        yield address
    assert model.service.close(60)


def post(url, path, body):
    return httpx.post(f"{url}{path}", json=body, timeout=60)


def test_the_server_tells_ids_of_the_vocabulary(seen):
    told = post(seen, "/tokenize", {"messages": [ASKED]})
    assert told.status_code == 200, told.text
    ids = told.json()["tokens"]
    assert ids == clients(prompt(ASKED))
    assert np.count_nonzero(np.equal(ids, EYES.image_token)) == 5


@pytest.mark.parametrize(("row", "told"), BAD)
def test_the_server_refuses_bad_pictures(seen, row, told):
    body = {"messages": [row, user(WHAT)], "max_tokens": 1}
    answer = post(seen, "/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]


def test_the_server_refuses_tokens_of_other_pictures(seen):
    body = {"messages": [ASKED], "tokens": [5, EYES.image_token], "max_tokens": 1}
    answer = post(seen, "/v1/chat/completions/tokens", body)
    assert answer.status_code == 400, answer.text
    assert "tokens: 1 of the token ids are image tokens" in answer.text


def test_the_server_refuses_pictures_beyond_the_context(seen):
    """Fast: 300 bytes of a picture may have 64 million pixels."""
    url = data_url(encoded(colours(2, 2).repeat(400, 0).repeat(400, 1)))
    body = {"messages": [user(*[image(url)] * 9)], "max_tokens": 1}
    answer = post(seen, "/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    assert json.loads(answer.text)["error"]["code"] == "context_length_exceeded"


def shown(url):
    return {"type": "input_image", "image_url": url}


TOLD = {"type": "input_text", "text": "What?"}


@pytest.mark.parametrize("name", ["function_call_output", "message"])
def test_items_of_responses_have_pictures(name):
    """A user's message and a call's output give the chat with these pictures."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    parts = [shown(data_url(RED)), TOLD]
    item = {"role": "user", "content": parts}
    if name == "function_call_output":
        item = {"type": name, "call_id": "1", "output": parts}
    asked = [user(TOLD), call, item]
    found = chat_of(ResponsesFields.model_validate({"input": asked}))
    [first, *_, last] = messages_of(found.messages, EYES, 99)
    assert first == {"role": "user", "content": "What?"}
    assert last["role"] == ("user" if name == "message" else "tool")
    assert last["content"] == f"{PICTURE}What?"
    assert last["pictures"] == (RED,)


def test_a_response_with_pictures_is_continued():
    asked = user(shown(data_url(RED)), TOLD, shown(data_url(WIDE)))
    kept, fields = Responses(), ResponsesFields.model_validate({"input": [asked]})
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "3"}]}
    answer = {"id": "one", "previous_response_id": None}
    kept.add(answer | {"output": [{"type": "message", **said}]}, input_of(fields))
    further = ResponsesFields.model_validate({"input": "And now?"})
    found = _chat(further, kept.conversation("one")).messages
    rows = (
        ASKED,
        {"role": "assistant", "content": "3"},
        user(WHAT | {"text": "And now?"}),
    )
    assert prompt_of(SEEING, found, chat.NO_OPTIONS) == prompt(*rows)


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (
            user(TOLD, shown("http://a/b.png")),
            "content of message 2 of the conversation",
        ),
        (user(TOLD, shown("http://a/b.png")), "never fetched"),
        (user({"type": "input_image", "file_id": "f"}), "has the key 'file_id'"),
        (
            user(shown(data_url(RED)), {"type": "input_file"}),
            "part of type 'input_file'",
        ),
        ({"role": "assistant", "content": [shown(data_url(RED))]}, "of the assistant"),
        ({"role": "system", "content": [shown(data_url(RED))]}, "of the system"),
        ({"role": "developer", "content": [shown(data_url(RED))]}, "of the developer"),
    ],
)
def test_a_response_refuses_bad_pictures(seen, item, told):
    body = {"input": [item], "instructions": "Look.", "max_output_tokens": 1}
    answer = post(seen, "/v1/responses", body)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "input"


@pytest.mark.parametrize("given", ["\ufffc hi<|image_pad|>", [5, EYES.image_token, 6]])
def test_completions_have_no_pictures(seen, given):
    answer = post(seen, "/v1/completions", {"prompt": given, "max_tokens": 1})
    assert answer.status_code == 400, answer.text
    assert "prompt: has 1 image tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize("special", [True, False])
def test_numbers_of_pictures_are_decoded_as_a_mark_each(special):
    """Also of pictures side by side, and of a picture that is cut."""
    asked = user(image(data_url(RED)), image(data_url(WIDE)), WHAT)
    found, held = prompt(asked), [EYES.picture(RED), EYES.picture(WIDE)]
    text = SEEING.decoded(found, special=special)
    assert text.replace("<|vision_end|><|vision_start|>", "").count(PICTURE * 2) == 1
    assert "What?" in text
    beside = [held[0].ids[-1], *held[1].ids, *held[0].ids]
    assert SEEING.decoded(beside, special=special) == PICTURE * 3
    assert SEEING.decode(found, keep=["<|im_end|>"]).count(PICTURE) == 2


def test_an_agents_episode_shows_its_pictures():
    recording = Recording("one", seed=3)
    begun, held = served_turn(recording, rows(ASKED))
    task = Task(0, (Message("user", "?"),), "")
    outcome = Judgement(Step(1.0, done=True), None, "ok", 0.1)
    episode = _episode((0, 0), task, recording, outcome, SEEING.decode)
    assert episode.turns[0].heard.count(PICTURE) == 2
    assert "What?" in episode.turns[0].heard
    assert held == begun.prompt


def test_an_episode_tells_ids_of_the_vocabulary():
    """A trainer of other people gets the image token, as from other routes."""
    episodes, model = Episodes(), make_served(SEEING)
    recording = episodes.open(EpisodeFields())
    _, held = served_turn(recording, rows(ASKED))
    http = SimpleNamespace(path_params={"id": recording.id})
    try:
        for answer in (
            asyncio.run(episodes.shown(model, http)),
            asyncio.run(episodes.ended(http, model, EndFields())),
        ):
            [branch] = json.loads(answer.body)["branches"]
            assert branch["token_ids"][: len(held)] == clients(held)
            assert min(branch["token_ids"]) >= 0
    finally:
        assert model.service.close(60)
