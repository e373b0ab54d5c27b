"""Pairs, judged answers, steps: what is packed, in which order, what does not fit."""

import itertools
import logging
from collections import Counter
from dataclasses import replace

import pytest

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data.preferences import JudgedAnswer, Preference
from jaxrl_post.data.prompts import task_indices
from jaxrl_post.data.steps import Solution
from jaxrl_post.examples.packed import (
    JudgedExamples,
    Pairs,
    Solutions,
    batches,
    packed,
)
from jaxrl_post.messages import Message
from tests.packed_rows import sequences_in
from tests.programs.trainers import make_model


def pair(prompt: str, chosen: str = "yes", rejected: str = "no") -> Preference:
    return Preference((Message("user", prompt),), chosen, rejected, prompt)


TRAIN = [pair(f"{i}=", chosen="y" * (i + 1)) for i in range(4)]
JUDGED = [
    JudgedAnswer((Message("user", f"{i}="),), f"{letter}{i}", letter == "y", f"{i}=")
    for i in range(3)
    for letter in "yn"
]
STEPS = [
    Solution(
        (Message("user", f"{i}="),), ("no",) * i + ("yes",), (0.0,) * i + (1.0,), ""
    )
    for i in range(3)
]


def test_a_pair_is_two_segments_side_by_side_the_chosen_first():
    tokenizer = make_model().tokenizer
    data = batches(
        Pairs(TRAIN, TRAIN),
        tokenizer,
        task_indices(4, seed=0),
        count=4,
        microbatch_tokens=128,
        rows=2,
    )
    batch, seen = next(data), set()
    assert batch.shape == (2, 18), "two pairs of nine tokens in a row"
    answers = list(sequences_in(batch))
    for (row, first), (same_row, second) in itertools.batched(answers, 2, strict=True):
        assert row == same_row
        # The rejected answer begins where the chosen one ends.
        assert batch.ends[row, first[-1]] == second[batch.loss_mask[row][second]][0]
        texts = []
        for places, label in ((first, 1), (second, -1)):
            tokens, mask = batch.tokens[row][places], batch.loss_mask[row][places]
            assert tokens[mask][-1] == tokenizer.eos_id
            assert (batch.labels[row][places][mask] == label).all()
            assert batch.margins is None
            texts.append(
                tuple(
                    tokenizer.decode(part.tolist()) for part in (tokens[~mask], tokens)
                )
            )
        (prompt, chosen), (same_prompt, rejected) = texts
        assert prompt == same_prompt
        assert rejected == prompt + "no"
        seen.add(chosen)
    assert seen == {f"{i}=" + "y" * (i + 1) for i in range(4)}


def test_a_margin_is_a_multiple_of_the_difference_of_scores():
    tokenizer = make_model().tokenizer
    scored = [replace(TRAIN[0], margin=3.0), replace(TRAIN[1], margin=-1.0)]
    pairs = Pairs(scored, scored, margin=0.5)
    for index, margin in enumerate((1.5, -0.5)):
        chosen, rejected = pairs.encode(tokenizer, "train", index)
        assert set(chosen.margins[chosen.loss_mask]) == {margin}
        assert rejected.margins is None


def test_a_warm_start_sees_the_chosen_answers_alone():
    tokenizer = make_model().tokenizer
    imitated = Pairs(TRAIN, TRAIN).imitated()
    assert imitated.size("train") == 4
    (sequence,) = imitated.encode(tokenizer, "eval", 2)
    assert tokenizer.decode(sequence.ids.tolist()) == "2=yyy"
    (sequence,) = (
        JudgedExamples(JUDGED, JUDGED).imitated().encode(tokenizer, "train", 1)
    )
    assert tokenizer.decode(sequence.ids.tolist()) == "1=y1"


def test_a_judged_answer_is_one_segment_with_its_label():
    tokenizer = make_model().tokenizer
    judgements = JudgedExamples(JUDGED, JUDGED)
    for index, each in enumerate(JUDGED):
        (sequence,) = judgements.encode(tokenizer, "train", index)
        counted = sequence.loss_mask
        assert tokenizer.decode(sequence.ids[~counted].tolist()) == each.group
        assert sequence.ids[counted][-1] == tokenizer.eos_id
        assert tokenizer.decode(sequence.ids[counted].tolist()) == each.answer
        label = 1 if each.desirable else -1
        assert (sequence.labels[counted] == label).all()


def test_mismatched_prompts_are_the_same_and_the_answers_those_of_others():
    tokenizer = make_model().tokenizer
    mismatched = JudgedExamples(JUDGED, JUDGED[:2] + JUDGED[4:]).mismatched(
        max_tokens=16
    )
    given = Counter()
    for index, each in enumerate(JUDGED):
        (sequence,) = mismatched.encode(tokenizer, "train", index)
        prompt, answer = (
            tokenizer.decode(part.tolist())
            for part in (
                sequence.ids[~sequence.loss_mask],
                sequence.ids[sequence.loss_mask],
            )
        )
        assert prompt == each.group
        assert answer[1] != prompt[0], "the number in the answer is its prompt's"
        given[answer] += 1
    assert given == Counter(each.answer for each in JUDGED)
    assert mismatched.size("eval") == len(JUDGED) - 2


def test_what_of_a_mismatched_answer_is_too_long_is_cut_off():
    tokenizer = make_model().tokenizer
    judged = [JUDGED[0], replace(JUDGED[2], answer="y1" + "n" * 50)]
    mismatched = JudgedExamples(judged, judged).mismatched(max_tokens=8)
    (cut,), (whole,) = (mismatched.encode(tokenizer, "train", i) for i in (0, 1))
    assert len(cut.tokens) == 8
    assert tokenizer.decode(cut.ids.tolist()).startswith("0=y1n")
    assert tokenizer.eos_id not in cut.ids
    assert whole.ids[-1] == tokenizer.eos_id


def test_a_solution_is_one_segment_whose_steps_are_judged_at_their_ends():
    tokenizer = make_model().tokenizer
    solutions = Solutions(STEPS, STEPS[:1], separator=";\n")
    assert (solutions.size("train"), solutions.size("eval")) == (3, 1)
    batch = packed(solutions, tokenizer, "train", [2, 0], microbatch_tokens=32, rows=1)
    (_, first), (_, second) = sequences_in(batch)
    for inside, text, labels in (
        (first, "2=no;\nno;\nyes;\n", [0.0, 0.0, 1.0]),
        (second, "0=yes;\n", [1.0]),
    ):
        tokens, mask = batch.tokens[0][inside], batch.loss_mask[0][inside]
        assert tokenizer.decode(tokens.tolist()) == text
        assert batch.labels[0][inside][mask].tolist() == labels
        # The text up to and including a judged token ends with a separator.
        ends = [tokenizer.decode(tokens[: i + 1].tolist()) for i in mask.nonzero()[0]]
        assert all(end.endswith(";\n") for end in ends)
        assert [end.count(";") for end in ends] == list(range(1, len(labels) + 1))


def test_a_prompt_with_most_answers_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"--data\.path: .* got 2 of 2 answers to one prompt; give answers to",
    ):
        JudgedExamples(JUDGED, JUDGED[:2]).mismatched(max_tokens=16)


def test_chosen_examples_of_a_split_are_packed():
    tokenizer = make_model().tokenizer
    judgements = JudgedExamples(JUDGED, JUDGED[2:])
    batch = packed(judgements, tokenizer, "eval", [3, 0], microbatch_tokens=32, rows=1)
    found = [batch.tokens[0][places] for _, places in sequences_in(batch)]
    texts = {tokenizer.decode(tokens.tolist()) for tokens in found}
    assert texts == {
        judgements.eval[i].group + judgements.eval[i].answer for i in (3, 0)
    }


def test_answers_that_are_too_long_are_left_out_and_counted(caplog):
    tokenizer = make_model().tokenizer
    long = replace(JUDGED[0], answer="n" * 50)
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        kept = JudgedExamples(JUDGED, [*JUDGED, long]).fitting(tokenizer, max_tokens=16)
    assert kept == JudgedExamples(JUDGED, JUDGED)
    assert caplog.messages == [
        "1 of 7 eval answers left out: prompt plus answer of more than --max-tokens 16"
    ]


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


def test_solutions_that_are_too_long_are_left_out_and_counted(caplog):
    tokenizer = make_model().tokenizer
    long = replace(STEPS[0], steps=("n" * 50,))
    solutions = Solutions([*STEPS, long], STEPS, separator="\n")
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        kept = solutions.fitting(tokenizer, max_tokens=16)
    assert kept == Solutions(STEPS, STEPS, separator="\n")
    assert caplog.messages == [
        "1 of 4 train solutions left out: prompt plus answer of more than --max-tokens "
        "16"
    ]


def test_a_split_of_which_nothing_fits_is_refused():
    tokenizer = make_model().tokenizer
    with pytest.raises(ConfigError, match=r"--max-tokens: all 1 eval pairs have .* 16"):
        Pairs(TRAIN, [pair("9=", chosen="y" * 50)]).fitting(tokenizer, max_tokens=16)


def test_texts_for_a_tokenizer_are_prompts_and_answers():
    texts = Pairs(TRAIN[:1], TRAIN).texts()
    assert texts == ["0=", "y", "no"]
    assert JudgedExamples(JUDGED[:1], JUDGED).texts() == ["0=", "y0"]
    texts = Solutions(STEPS[1:2], STEPS, separator=";").texts()
    assert texts == ["1=", "no;", "yes;"]
