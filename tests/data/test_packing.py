"""Packing: every sequence once, whole, and told apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.data.packing import Sequence, pack
from jaxrl_post.tokens import Tokens

LAWS = settings(max_examples=60, deadline=None, derandomize=True)
FIELDS = ("tokens", "loss_mask", "behavior_logprobs", "advantages", "versions")
LENGTH = 12


def sequence(number, prompt, completion):
    """Values that occur nowhere else."""
    base = 100 * number
    ids = range(base + 1, base + 1 + prompt + completion)
    answer = Tokens.generated(
        list(ids[prompt:]), [-i / 8 for i in ids[prompt:]], version=number
    )
    advantages = np.full(prompt + completion, number + 0.5, np.float32)
    advantages[:prompt] = 0
    return Sequence(Tokens.context(ids[:prompt]) + answer, advantages)


def test_a_sequence_is_a_prompt_and_what_the_policy_produced():
    made = Sequence.of([5, 6], [7, 8], behavior_logprobs=[-1, -2], advantage=2.0)
    assert made.ids.tolist() == [5, 6, 7, 8]
    assert made.loss_mask.tolist() == [False, False, True, True]
    assert made.tokens.logprobs.tolist() == [0, 0, -1, -2]
    assert made.advantages.tolist() == [0, 0, 2, 2]
    assert made.tokens.versions.tolist() == [-1, -1, 0, 0]
    plain = Sequence.of([5], [6])
    assert plain.tokens.logprobs.tolist() == plain.advantages.tolist() == [0, 0]
    batch = pack([made], 4, 1)
    dtypes = [getattr(batch, name).dtype.name for name in FIELDS]
    assert dtypes == ["int32", "bool", "float32", "float32", "int32"]


def test_rows_worked_by_hand():
    """Longest first, where least room is left: 7, 5 | 6, 4 | 3."""
    parts = [(2, 1), (3, 4), (1, 3), (2, 3), (1, 5)]  # 3, 7, 4, 5, 6 tokens
    batch = pack(
        [sequence(n, *part) for n, part in enumerate(parts)], length=12, row_multiple=2
    )
    assert batch.shape == (4, 12)
    assert batch.ends.tolist() == [
        [7] * 7 + [12] * 5,
        [6] * 6 + [10] * 4 + [0] * 2,
        [3] * 3 + [0] * 9,
        [0] * 12,
    ]
    assert batch.tokens[1].tolist() == [*range(401, 407), *range(201, 205), 0, 0]
    assert batch.positions[1].tolist() == [*range(6), *range(4), 0, 0]
    assert batch.versions[3].tolist() == [-1] * 12
    assert batch.proximal_logprobs is batch.reference_logprobs is None


@LAWS
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), max_size=12),
    st.integers(1, 4),
)
def test_every_sequence_is_there_once_and_whole(parts, row_multiple):
    sequences = [sequence(n, *part) for n, part in enumerate(parts)]
    batch = pack(sequences, LENGTH, row_multiple)
    rows, length = batch.shape
    assert length == LENGTH
    assert rows % row_multiple == 0
    assert rows >= row_multiple
    found = []
    for row in range(rows):
        ends = batch.ends[row]
        used = ends > 0
        # 2, 2, 5, 5, 5, ..., then padding alone.
        assert not used[used.argmin() :].any() or used.all()
        assert (np.diff(ends[used]) >= 0).all()
        assert not batch.loss_mask[row][~used].any()
        start = 0
        while start < used.sum():
            span = np.zeros(length, np.bool_)
            span[start : ends[start]] = True
            assert (ends[span] == ends[start]).all()
            start = ends[start]
            source = sequences[int(batch.tokens[row][span][0]) // 100]
            found.append(int(batch.tokens[row][span][0]) // 100)
            assert batch.positions[row][span].tolist() == list(range(span.sum()))
            mask = source.loss_mask.copy()
            mask[0] = False
            np.testing.assert_array_equal(batch.loss_mask[row][span], mask)
            for name, value in (
                ("tokens", source.ids),
                ("behavior_logprobs", source.tokens.logprobs),
                ("advantages", source.advantages),
                ("versions", source.tokens.versions),
            ):
                np.testing.assert_array_equal(getattr(batch, name)[row][span], value)
    assert sorted(found) == list(range(len(sequences)))


def test_the_first_token_is_never_trained_on_even_if_asked():
    batch = pack([sequence(0, 0, 3), sequence(1, 0, 4)], LENGTH, 1)
    assert batch.loss_mask.tolist() == [
        [False, True, True, True, False, True, True] + [False] * 5
    ]


def test_packing_is_deterministic_and_keeps_equal_lengths_in_order():
    sequences = [sequence(n, 1, 3) for n in range(6)]
    first, second = (pack(sequences, LENGTH, 1) for _ in range(2))
    for name in (*FIELDS, "positions", "ends"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    starts = first.tokens[first.positions == 0]
    assert starts.tolist() == [1, 101, 201, 301, 401, 501]


def test_no_sequences_give_empty_rows():
    batch = pack([], 8, 3)
    assert batch.shape == (3, 8)
    assert not batch.ends.any()
    assert not batch.loss_mask.any()


def test_a_sequence_longer_than_a_row_is_refused():
    message = r"unit 1 has 13 tokens that must stay together, a row only 12; raise"
    with pytest.raises(ValueError, match=f"^pack: {message}"):
        pack([sequence(0, 1, 2), sequence(1, 6, 7)], LENGTH, 1)


@pytest.mark.parametrize(("tokens", "advantages"), [([], 0), ([1, 2], 1)])
def test_arrays_that_are_not_aligned_are_refused(tokens, advantages):
    with pytest.raises(
        ValueError, match=r"one entry a token, at least one; got \{'tok"
    ):
        Sequence(Tokens.context(tokens), np.zeros(advantages, np.float32))
