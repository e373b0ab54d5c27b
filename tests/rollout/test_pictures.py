"""Episodes whose messages have pictures."""

import pytest

from jaxrl_post.data.codec import Codec
from jaxrl_post.data.tokenizer import TokenizerError
from jaxrl_post.data.tools import thinks
from jaxrl_post.envs import Message, Task
from jaxrl_post.messages import PICTURE
from jaxrl_post.pictures import PictureError
from jaxrl_post.rollout import EpisodeLimits
from jaxrl_post.rollout import flight as flights
from jaxrl_post.sampler.requests import SamplingParams
from tests.rollout.scripts import collector
from tests.rollout.test_chat_episodes import Asking, Scripted, turn
from tests.seeing import BLIND, EYES, RED, SEEING, WIDE, seeing

ASKED = Message("user", f"{PICTURE}?", pictures=(RED,))
SAID = turn(SEEING.encode("3<|im_end|>"))


def played(question, tokenizer=SEEING, asked=ASKED):
    """An episode of two turns: what was asked of the sampler, and how it ended."""
    sampler = Scripted([SAID, SAID])
    judges = Asking(2, question)
    source = collector(Codec(tokenizer), judges, EpisodeLimits(2, 9999), deadline_s=9.0)
    [group] = source.run(sampler, [(3, Task(5, (asked,), ""))], 1, SamplingParams())
    return group.episodes[0], [request.prompt for request in sampler.requests]


def test_tasks_and_replies_show_pictures():
    held = EYES.picture(RED), EYES.picture(WIDE)
    again = Message("user", PICTURE, pictures=(WIDE,))
    episode, prompts = played(again)
    assert episode.finish_reason == "stop"
    assert [i for i in prompts[0] if i < 0] == list(held[0].ids)
    assert [i for i in prompts[1] if i < 0] == [*held[0].ids, *held[1].ids]
    assert prompts[1][: len(prompts[0])] == prompts[0]


@pytest.mark.parametrize("bad", [RED[:-30], b"no picture"])
def test_a_reply_with_a_bad_picture_fails_its_episode_alone(bad):
    episode, prompts = played(Message("user", PICTURE, pictures=(bad,)))
    assert episode.finish_reason == "failed"
    assert episode.error.startswith("reply: messages[0], picture 1: picture of")
    assert len(prompts) == 1


def test_a_bad_picture_of_a_task_ends_the_run_and_names_the_task():
    asked = Message("user", PICTURE, pictures=(RED[:-30],))
    with pytest.raises(PictureError, match=r"--env: task 5: messages\[0\], picture 1"):
        played(ASKED, asked=asked)


LAST = Message("user", f"?{PICTURE}", pictures=(RED,))
# Without a template nothing follows the last message.
BARE = seeing(None, PICTURE)


def test_a_prompt_that_ends_with_a_picture_is_named():
    with pytest.raises(PictureError, match=r"--env: task 5: the prompt ends with a p"):
        played(ASKED, BARE, asked=LAST)


def test_a_reply_that_ends_with_a_picture_fails_its_episode_alone():
    episode, prompts = played(LAST, BARE)
    assert episode.error.startswith("reply: the prompt ends with a picture")
    assert len(prompts) == 1


def test_a_template_begins_the_answer_after_a_picture():
    episode, _ = played(LAST, asked=LAST)
    assert episode.finish_reason == "stop"


@pytest.mark.parametrize("tokenizer", [SEEING, BARE])
def test_the_numbers_of_pictures_are_no_text(tokenizer):
    held = EYES.picture(RED)
    assert not thinks(tokenizer, [*held.ids, *tokenizer.encode("?")])
    assert thinks(tokenizer, [*tokenizer.encode("<think>"), held.ids[0]])


def test_an_environment_of_pictures_needs_a_model_that_sees():
    with pytest.raises(TokenizerError, match="load a model that sees"):
        played(ASKED, BLIND, asked=Message("user", "1+2="))


def test_tasks_with_other_pictures_have_other_fingerprints():
    tasks = [
        Task(0, (Message("user", PICTURE, pictures=(each,)),), "")
        for each in (RED, WIDE)
    ]
    saved = [flights.begin(0, 0, task, SEEING.encode("?")).to_json() for task in tasks]
    flights.Flight.from_json(saved[0], tasks[0])
    with pytest.raises(flights.ChangedTaskError):
        flights.Flight.from_json(saved[0], tasks[1])


def test_a_saved_conversation_keeps_its_pictures():
    task = Task(0, (ASKED,), "")
    saved = flights.begin(0, 0, task, SEEING.encode("?")).to_json()
    assert flights.Flight.from_json(saved, task).conversation == (ASKED,)
