"""Examples whose messages have pictures: what is learned, and what does not fit."""

import dataclasses
import logging

import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data.chats import Chat, Text
from jaxrl_post.data.codec import Codec
from jaxrl_post.data.preferences import JudgedAnswer, Preference
from jaxrl_post.data.steps import Solution
from jaxrl_post.envs import Task
from jaxrl_post.examples.chats import Chats
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.examples.packed import JudgedExamples, Pairs, Solutions
from jaxrl_post.examples.tasks import TaskSets, distinct, fitting_prompts, open_tasks
from jaxrl_post.messages import PICTURE, Message
from jaxrl_post.pictures import PictureError
from tests.pictures.files import colours, encoded
from tests.seeing import BLIND, EYES, QWEN3, RED, SEEING, WIDE, seeing

# Without a template nothing follows the last message.
BARE = seeing(None, PICTURE)
ASKED = Message("user", f"{PICTURE}?", pictures=(RED,))
# 40 tokens.
LARGE = encoded(colours(20, 32))
HUGE = Message("user", f"{PICTURE}?", pictures=(LARGE,))


def row(message):
    found = {"role": message.role, "content": message.content}
    return found | ({"pictures": message.pictures} if message.pictures else {})


def chat(*messages, only_last=False):
    return Chat(tuple(map(row, messages)), "group", only_last)


SAID = Message("assistant", "12")


def learned_text(sequence):
    return SEEING.decode(sequence.ids[sequence.loss_mask].tolist())


@pytest.mark.parametrize("only_last", [False, True])
def test_chats_learn_answers_and_no_pictures(only_last):
    held = EYES.picture(RED)
    examples = Chats([chat(ASKED, SAID, only_last=only_last)], [])
    [sequence] = examples.encode(SEEING, "train", 0)
    there = sequence.ids < 0
    assert sequence.ids[there].tolist() == list(held.ids)
    assert not sequence.loss_mask[there].any()
    assert learned_text(sequence) == "12"
    prompt = Codec(SEEING).render([ASKED])
    assert sequence.ids[: len(prompt)].tolist() == list(prompt)


def test_both_answers_of_a_pair_see_the_pictures():
    pairs = Pairs([Preference((ASKED,), "1", "2", "group")], [])
    prompt = Codec(SEEING).render([ASKED])
    found = pairs.encode(SEEING, "train", 0)
    for sequence, answer in zip(found, "12", strict=True):
        assert sequence.ids[: len(prompt)].tolist() == list(prompt)
        assert not sequence.loss_mask[: len(prompt)].any()
        assert learned_text(sequence) == answer


def test_judged_answers_steps_and_demonstrations_see_the_pictures():
    prompt = list(Codec(SEEING).render([ASKED]))
    judged = JudgedExamples([JudgedAnswer((ASKED,), "1", True, "group")], [])
    steps = Solutions([Solution((ASKED,), ("1",), (1.0,), "group")], [], separator="\n")
    shown = Demonstrations(Shows([ASKED]), 99)
    for examples in (judged, steps, shown):
        [sequence] = examples.encode(SEEING, "train", 0)
        assert sequence.ids[: len(prompt)].tolist() == prompt
        assert not sequence.loss_mask[sequence.ids < 0].any()


@dataclasses.dataclass(frozen=True)
class Shows:
    """Tasks of one message each."""

    messages: list[Message]
    name: str = "shows"

    def tasks(self, split):
        messages = self.messages if split == "train" else [Message("user", "held out")]
        return [Task(i, (each,), "") for i, each in enumerate(messages)]

    def demonstration(self, task):
        return "12"


SMALL = Chats([chat(ASKED, SAID), chat(HUGE, SAID)], [chat(ASKED, SAID)])
SIZES = Pairs(
    [Preference((each,), "1", "2", "group") for each in (ASKED, HUGE)],
    [Preference((ASKED,), "1", "2", "group")],
)


@pytest.mark.parametrize("examples", [SMALL, SIZES])
def test_tokens_of_pictures_count(examples, caplog):
    longest = max(len(each.tokens) for each in examples.encode(SEEING, "train", 1))
    with caplog.at_level(logging.WARNING):
        assert examples.fitting(SEEING, longest).size("train") == 2
        assert examples.fitting(SEEING, longest - 1).size("train") == 1
    assert "1 of 2" in caplog.text


@pytest.mark.parametrize("examples", [SMALL, SIZES])
def test_fitting_decodes_no_picture_that_fits(examples, monkeypatch):
    monkeypatch.setattr(
        "jaxrl_post.pictures.eyes.read_picture",
        lambda *args, **options: pytest.fail("decoded"),
    )
    assert examples.fitting(SEEING, 9999).size("train") == 2


@pytest.mark.parametrize("examples", [SMALL, SIZES])
def test_a_model_that_does_not_see_is_told_at_the_start(examples):
    with pytest.raises(ConfigError, match=r"number 0 of the train.*a model that sees"):
        examples.fitting(BLIND, 9999)


def test_a_message_that_the_template_hides_is_told_at_the_start():
    system = Message("system", f"{PICTURE}!", pictures=(RED,))
    user = Message("user", "1+2=")
    examples = Chats([chat(system, user, SAID)], [chat(user, SAID)])
    with pytest.raises(ConfigError, match=r"number 0.*messages\[0\] of role 'system'"):
        examples.fitting(seeing(QWEN3), 9999)
    assert examples.fitting(SEEING, 9999).size("train") == 1


def test_a_text_with_the_image_token_is_told_at_the_start():
    forged = Message("user", "<|image_pad|>")
    for examples in (
        Chats([chat(forged, SAID)], [chat(ASKED, SAID)]),
        Chats([Text("<|image_pad|>")], [Text("1")]),
    ):
        with pytest.raises(ConfigError, match="has 1 image tokens"):
            examples.fitting(SEEING, 9999)
    with pytest.raises(ConfigError, match="has 1 image tokens"):
        examples.encode(SEEING, "train", 0)


def test_a_picture_that_cannot_be_decoded_names_its_conversation():
    bad = Message("user", PICTURE, pictures=(RED[:-30],))
    with pytest.raises(
        ConfigError, match=r"begins with 'group'.*picture 1: picture of"
    ):
        Chats([chat(bad, SAID)], []).encode(SEEING, "train", 0)
    with pytest.raises(PictureError, match=r"messages\[0\], picture 1"):
        Pairs([Preference((bad,), "1", "2", "group")], []).encode(SEEING, "train", 0)


def test_later_pictures_of_the_user_are_no_error():
    """After the last answer nothing is learned."""
    later = Message("user", PICTURE, pictures=(WIDE,))
    examples = Chats([chat(ASKED, SAID, later)], [chat(ASKED, SAID)])
    examples = examples.fitting(SEEING, 9999)
    [sequence] = examples.encode(SEEING, "train", 0)
    assert (sequence.ids < 0).sum() == EYES.num_tokens(RED)


def fitted(messages, tokenizer, limit, context=9999):
    tasks = TaskSets.of(Shows(messages))
    return fitting_prompts(tasks, tokenizer, limit, "--most", context=context)


def test_prompts_are_measured_with_their_pictures():
    size = len(Codec(SEEING).render([HUGE]))
    for limit, kept in ((size, 2), (size - 1, 1)):
        tasks, _ = fitted([ASKED, HUGE], SEEING, limit)
        assert tasks.size("train") == kept
    assert fitted([ASKED, HUGE], SEEING, 0)[1] == size
    assert fitted([ASKED, HUGE], SEEING, 0, context=size - 1)[0].size("train") == 1


@pytest.mark.parametrize(
    ("message", "tokenizer", "told"),
    [
        (ASKED, BLIND, "load a model that sees"),
        (Message("user", PICTURE, pictures=(b"none",)), SEEING, "no picture in a form"),
        (Message("system", PICTURE, pictures=(RED,)), seeing(QWEN3), "role 'system'"),
        (Message("user", f"?{PICTURE}", pictures=(RED,)), BARE, "ends with a picture"),
    ],
)
def test_a_prompt_that_cannot_be_shown_names_its_task(message, tokenizer, told):
    with pytest.raises(ConfigError, match="--env: train task 1 of shows") as caught:
        fitted([Message("user", "1+2="), message], tokenizer, 99)
    assert told in str(caught.value)


def test_prompts_with_other_pictures_are_distinct():
    messages = [Message("user", PICTURE, pictures=(each,)) for each in (RED, WIDE, RED)]
    tasks = Shows(messages).tasks("train")
    assert distinct(tasks) == [0, 1]
    assert open_tasks(Shows(messages), "fail").size("train") == 3
