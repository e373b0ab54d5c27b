"""Texts of running and ended samples."""

import itertools

import pytest

from jaxrl_post.serve.texts import Texts


@pytest.fixture(scope="module")
def texts(tokenizer):
    return Texts(tokenizer)


def test_an_incomplete_character_waits_for_its_end_and_is_written_at_the_end(texts):
    ids = texts.tokenizer.encode("aü")
    assert len(ids) == 2 or len(ids) == 3
    assert texts.text(ids, None) == "aü"
    begun = texts.tokenizer.encode("a€")[:-1]
    assert texts.text(begun, None) == "a"
    assert texts.text(begun, "length").startswith("a\ufffd")


@pytest.mark.parametrize(
    ("said", "going_on", "ended"),
    [
        ("a b EN", "a b ", "a b EN"),
        ("a b END and", "a b ", "a b "),
        ("a b Eno", "a b Eno", "a b Eno"),
        ("END", "", ""),
        ("a ##", "a #", "a ##"),
        ("a ###x", "a ", "a "),
    ],
)
def test_what_may_begin_a_stop_string_waits(tokenizer, said, going_on, ended):
    texts = Texts(tokenizer, ("END", "###"))
    ids = tokenizer.encode(said)
    assert texts.text(ids, None) in (going_on, going_on.rstrip("#"))
    assert texts.text(ids, "length") == ended


def test_the_stop_token_is_no_text_and_special_tokens_are_on_request(tokenizer):
    end = tokenizer.backend.token_to_id("<|im_end|>")
    begin = tokenizer.backend.token_to_id("<|im_start|>")
    ids = [begin, *tokenizer.encode("yes"), end]
    assert Texts(tokenizer).text(ids, "stop") == "yes"
    special = Texts(tokenizer, special=True)
    assert special.text(ids, "stop") == "<|im_start|>yes"
    # A token that only looks like a stop token, where stop tokens are ignored, stays.
    assert special.text(ids, "length") == "<|im_start|>yes<|im_end|>"
    kept = Texts(tokenizer, keep=("<|im_start|>",))
    assert kept.text([*ids[:-1], end, end], "stop") == "<|im_start|>yes"


def test_pieces_are_beginnings_of_the_whole(tokenizer):
    texts = Texts(tokenizer, ("ow",))
    ids = tokenizer.encode("ä answer € of now and later")
    whole = texts.text(ids, "stop_string")
    assert whole == "ä answer € of n"
    pieces = [texts.text(ids[:size], None) for size in range(len(ids))]
    assert all(whole.startswith(piece) for piece in pieces)
    assert all(len(a) <= len(b) for a, b in itertools.pairwise(pieces))
