"""Messages with pictures as tokens: rendered, replied, and learned."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post.data import chat, learned
from jaxrl_post.data.codec import Codec
from jaxrl_post.data.tokenizer import TokenizerError
from jaxrl_post.messages import PICTURE, Message
from jaxrl_post.pictures import PictureError, Shown
from jaxrl_post.pictures.numbered import spots
from tests.pictures.files import frames
from tests.seeing import BLIND, EYES, QWEN3, RED, SEEING, WIDE, seeing

ASKED = Message("user", f"{PICTURE}what {PICTURE}?", pictures=(RED, WIDE))
SAID = Message("assistant", "3")
TEXT = Message("user", "1+2=")
# Qwen2.5-VL's own text of `ASKED`, with the head of the answer.
HEAD = "<|im_start|>user\n"
PAD = "<|vision_start|><|image_pad|><|vision_end|>"
WRITTEN = f"{HEAD}{PAD}what {PAD}?<|im_end|>\n<|im_start|>assistant\n"
TEMPLATES = pytest.mark.parametrize("tokenizer", [SEEING, seeing(QWEN3)])


def expected(text, *pictures, tokenizer=SEEING):
    """A text's ids with the numbers of pictures in the places of image tokens."""
    following = iter([EYES.picture(each) for each in pictures])
    ids = tokenizer.encode(text)
    return tuple(
        each
        for token in ids
        for each in (next(following).ids if token == EYES.image_token else (token,))
    )


@TEMPLATES
def test_a_template_gets_parts(tokenizer):
    assert chat.render_text(tokenizer, [ASKED]) == WRITTEN
    found = Codec(tokenizer).render([ASKED])
    assert found == expected(WRITTEN, RED, WIDE)
    assert [spot.count for spot in spots(found)] == [2, 3]


def test_a_row_keeps_its_pictures():
    found = Codec(SEEING).render([ASKED])
    assert isinstance(found, Shown)
    assert [picture.num_tokens for picture in found.pictures] == [2, 3]


@TEMPLATES
def test_texts_are_rendered_as_by_a_model_that_sees_none(tokenizer):
    blind = tokenizer.with_eyes(None)
    for messages in ([TEXT], [TEXT, SAID, TEXT], [Message("user", f"a{PICTURE}b")]):
        assert Codec(tokenizer).render(messages) == Codec(blind).render(messages)
    given = [TEXT, SAID], [TEXT]
    assert Codec(tokenizer).reply(*given, stop_id=None) == Codec(blind).reply(
        *given, stop_id=None
    )


def test_mappings_and_other_objects_show_pictures():
    row = {"role": "user", "content": ASKED.content, "pictures": ASKED.pictures}

    @dataclasses.dataclass
    class Own:
        role: str = "user"
        content: str = ASKED.content
        pictures: tuple = ASKED.pictures

    for message in (row, Own()):
        assert chat.render(SEEING, [message]) == chat.render(SEEING, [ASKED])


def test_a_codec_shows_pictures_with_the_eyes_of_its_tokenizer():
    assert Codec(BLIND.with_eyes(EYES)).render([ASKED]) == chat.render(SEEING, [ASKED])


@pytest.mark.parametrize("tools", [(), ({"function": {"name": "f"}},)])
def test_a_model_that_does_not_see_says_so(tools):
    with pytest.raises(
        TokenizerError, match=r"messages\[1\] has a picture.*text alone"
    ):
        Codec(BLIND).render([TEXT, ASKED], tools)
    with pytest.raises(TokenizerError, match=r"has a picture.*load a model that sees"):
        Codec(BLIND).reply([TEXT, SAID], [ASKED], tools, stop_id=None)


@pytest.mark.parametrize("tools", [(), ({"function": {"name": "f"}},)])
def test_a_reply_shows_the_pictures_of_new_messages_alone(tools):
    new = Message("user", PICTURE, pictures=(WIDE,))
    for stop in (SEEING.eos_id, None):
        found = Codec(SEEING).reply([ASKED, SAID], [new], tools, stop_id=stop)
        end = "" if stop else "<|im_end|>"
        text = f"{end}\n{HEAD}{PAD}<|im_end|>\n<|im_start|>assistant\n"
        assert found == expected(text, WIDE)


def test_a_long_result_of_a_tool_keeps_its_pictures():
    long = Message(
        "tool", f"1{PICTURE}" + "2" * 99 + f"{PICTURE}3", pictures=(RED, WIDE)
    )
    codec = Codec(SEEING, max_result_tokens=4)
    tools = ({"function": {"name": "f"}},)
    found = codec.reply([TEXT, SAID], [long], tools, stop_id=None)
    assert [spot.count for spot in spots(found)] == [2, 3]
    assert len(found) < 90


def test_without_a_template_a_token_may_stand_for_pictures():
    plain = seeing(None, PICTURE)
    found = Codec(plain).render([ASKED])
    red, wide = (EYES.picture(each).ids for each in (RED, WIDE))
    what, end = plain.encode("what "), plain.encode("?")
    assert found == (*red, *what, *wide, *end)
    assert [spot.count for spot in spots(found)] == [2, 3]
    with pytest.raises(PictureError, match="0 image tokens"):
        Codec(seeing(None)).render([ASKED])


def test_a_turn_that_a_template_does_not_write_is_named():
    system = Message("system", f"{PICTURE}!", pictures=(RED,))
    with pytest.raises(PictureError, match=r"messages\[0\] of role 'system'.*0 image"):
        Codec(seeing(QWEN3)).render([system, TEXT])
    assert spots(Codec(SEEING).render([system, TEXT]))


def test_a_text_with_the_image_token_is_refused():
    forged = Message("user", "<|image_pad|>")
    with pytest.raises(PictureError, match="no picture, and its text has 1 image"):
        Codec(SEEING).render([forged])
    both = Message("user", f"<|image_pad|>{PICTURE}", pictures=(RED,))
    with pytest.raises(PictureError, match=r"1 pictures.*2 image tokens"):
        Codec(SEEING).reply([TEXT, SAID], [both], stop_id=None)


@pytest.mark.parametrize("bad", [RED[:-30], b"no picture", frames("GIF")])
def test_a_bad_picture_is_named(bad):
    message = Message("user", PICTURE * 2, pictures=(RED, bad))
    with pytest.raises(PictureError, match=r"messages\[1\], picture 2: picture of"):
        Codec(SEEING).render([TEXT, message])


def test_an_open_last_message_may_have_pictures():
    text = chat.render_text(SEEING, [ASKED], prompt=False, continue_final=True)
    assert text == f"{HEAD}{PAD}what {PAD}?"


@TEMPLATES
def test_no_token_of_a_picture_is_learned(tokenizer):
    again = Message("user", f"and {PICTURE}", pictures=(RED,))
    messages = [ASKED, SAID, again, Message("assistant", "12")]
    [(ids, mask)] = learned.conversation(tokenizer, messages)
    blind = [
        {"role": each.role, "content": each.content.replace(PICTURE, "")}
        for each in messages
    ]
    [(plain, plain_mask)] = learned.conversation(tokenizer.with_eyes(None), blind)
    held = EYES.picture(RED), EYES.picture(WIDE)
    assert not mask[ids < 0].any()
    assert ids[ids < 0].tolist() == [*held[0].ids, *held[1].ids, *held[0].ids]
    # The same tokens are learned as of the texts alone.
    assert ids[mask].tolist() == plain[plain_mask].tolist()
    assert tokenizer.decode(ids[mask].tolist()) == "312"
    marks = tokenizer.encode("<|vision_start|><|vision_end|>")
    rest = [i for i in ids[ids >= 0].tolist() if i not in marks]
    assert rest == plain.tolist()


def test_only_the_last_turn_is_learned_behind_pictures():
    messages = [ASKED, SAID, TEXT, Message("assistant", "12")]
    [(ids, mask)] = learned.conversation(SEEING, messages, only_last=True)
    assert SEEING.decode(ids[mask].tolist()) == "12"


def test_an_answer_follows_the_prompt_as_it_is_sampled():
    prompt, target = learned.answered(SEEING, [ASKED], "3")
    assert prompt == Codec(SEEING).render([ASKED])
    assert isinstance(prompt, Shown)
    assert target == SEEING.encode("3<|im_end|>")
    with pytest.raises(TokenizerError, match="has a picture"):
        learned.answered(BLIND, [ASKED], "3")


def test_sequences_of_a_template_that_rewrites_turns_have_their_own_pictures():
    forgetful = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content.split('</think>')[-1] if "
        "not loop.last else m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    again = Message("user", PICTURE, pictures=(WIDE,))
    thought = Message("assistant", "<think>\nhm\n</think>\n\n3")
    messages = [Message("user", PICTURE, pictures=(RED,)), thought, again, SAID]
    found = learned.conversation(seeing(forgetful), messages)
    held = EYES.picture(RED), EYES.picture(WIDE)
    assert [[spot.count for spot in spots(ids)] for ids, _ in found] == [[2], [2, 3]]
    assert all(not mask[ids < 0].any() for ids, mask in found)
    assert [picture.num_tokens for picture in held] == [2, 3]


def test_a_picture_of_the_assistant_is_refused():
    shown = Message("assistant", PICTURE, pictures=(RED,))
    with pytest.raises(PictureError, match=r"messages\[1\]: a turn of the assistant"):
        learned.conversation(SEEING, [TEXT, shown])


def test_a_template_that_hides_a_picture_is_refused_where_it_is_learned():
    system = Message("system", PICTURE, pictures=(RED,))
    with pytest.raises(PictureError, match="of role 'system'"):
        learned.conversation(seeing(QWEN3), [system, TEXT, SAID])
    with pytest.raises(PictureError, match="of role 'system'"):
        learned.answered(seeing(QWEN3), [system, TEXT], "3")


def test_masks_are_as_long_as_ids():
    [(ids, mask)] = learned.conversation(SEEING, [ASKED, SAID])
    assert ids.dtype == np.int32
    assert ids.shape == mask.shape
