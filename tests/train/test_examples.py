"""Preference pairs: what is packed, in which order, and what does not fit."""

import logging

import pytest

from jaxrl_post.data.preferences import Message, Preference
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.train.config import ConfigError
from jaxrl_post.train.examples import Pairs, batches
from tests.train.trainers import make_model


def pair(prompt: str, chosen: str = "yes", rejected: str = "no") -> Preference:
    return Preference((Message("user", prompt),), chosen, rejected, prompt)


TRAIN = [pair(f"{i}=", chosen="y" * (i + 1)) for i in range(4)]


def test_a_pair_is_two_segments_side_by_side_the_chosen_first():
    tokenizer = make_model().tokenizer
    data = batches(
        Pairs(TRAIN, TRAIN),
        tokenizer,
        task_indices(4, seed=0),
        count=4,
        row_tokens=64,
        row_multiple=2,
    )
    batch, seen = next(data), set()
    assert batch.shape == (2, 64)
    for row in range(2):
        assert batch.segment_ids[row].max() % 2 == 0
        for first in range(1, int(batch.segment_ids[row].max()), 2):
            texts = []
            for segment, label in ((first, 1), (first + 1, -1)):
                inside = batch.segment_ids[row] == segment
                tokens = batch.tokens[row][inside]
                mask = batch.loss_mask[row][inside]
                assert tokens[mask][-1] == tokenizer.eos_id
                assert (batch.advantages[row][inside][mask] == label).all()
                texts.append(
                    tuple(
                        tokenizer.decode(part.tolist())
                        for part in (tokens[~mask], tokens)
                    )
                )
            (prompt, chosen), (same_prompt, rejected) = texts
            assert prompt == same_prompt
            assert rejected == prompt + "no"
            seen.add(chosen)
    assert seen == {f"{i}=" + "y" * (i + 1) for i in range(4)}


def test_a_warm_start_sees_the_chosen_answers_alone():
    tokenizer = make_model().tokenizer
    (sequence,) = Pairs(TRAIN, TRAIN, only_chosen=True).encode(tokenizer, "eval", 2)
    assert tokenizer.decode(sequence.tokens.tolist()) == "2=yyy"


def test_pairs_that_are_too_long_are_left_out_and_counted(caplog):
    tokenizer = make_model().tokenizer
    long = pair("9=", rejected="n" * 50)
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        kept = Pairs([*TRAIN, long], TRAIN).fitting(tokenizer, max_tokens=16)
    assert list(kept.train) == TRAIN
    assert list(kept.eval) == TRAIN
    assert caplog.messages == [
        "1 of 5 train pairs left out: prompt plus answer of more than --max-tokens 16"
    ]


def test_a_split_of_which_nothing_fits_is_refused():
    tokenizer = make_model().tokenizer
    with pytest.raises(ConfigError, match=r"--max-tokens: all 1 eval pairs have .* 16"):
        Pairs(TRAIN, [pair("9=", chosen="y" * 50)]).fitting(tokenizer, max_tokens=16)


def test_texts_for_a_tokenizer_are_prompts_and_answers():
    texts = Pairs(TRAIN[:1], TRAIN).texts()
    assert texts == ["0=", "y", "no"]
