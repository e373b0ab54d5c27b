"""Microbatches: as few and as full as the batch allows, in few shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.data.packing import (
    Sequence,
    largest_row,
    num_tokens,
    pack,
    pack_microbatches,
    trees,
)
from tests.data.test_packing import sequence

LAWS = settings(max_examples=60, deadline=None, derandomize=True)


def groups(count, seed, *, prompt=40, samples=8, longest=128):
    """Ragged groups, whose prompts are packed once."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        begin = [number + 1] * int(random.integers(prompt // 2, prompt + 1))
        for sample in range(samples):
            size = int(random.integers(longest // 8, longest + 1))
            made.append(Sequence.of(begin, [1000 + sample] * size))
    return trees(made)


def fill(batch):
    return np.count_nonzero(batch.ends) / batch.ends.size


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("count", [1, 3, 8, 20, 64])
@pytest.mark.parametrize("longest", [16, 400])
def test_ragged_batches_of_any_size_are_full(count, seed, longest):
    batch = pack_microbatches(groups(count, seed, longest=longest), 4096, rows=1)
    assert fill(batch) >= 0.85
    used = np.count_nonzero(batch.ends)
    assert len(batch.ends) <= -(-used // (0.85 * 4096)), "no more than are needed"


@pytest.mark.parametrize(
    ("count", "size"),
    [(3, 1500), (3, 1700), (3, 2000), (7, 1300), (5, 900), (3, 600), (5, 1000)],
)
def test_long_sequences_are_no_two_thirds_of_a_batch(count, size):
    """A microbatch more, of shorter rows, may have less padding."""
    batch = pack_microbatches([Sequence.of([1], [2] * (size - 1))] * count, 4096, 1)
    assert fill(batch) >= 0.9
    assert np.count_nonzero(batch.ends) == count * size


@pytest.mark.parametrize(("rows", "least"), [(2, 0.85), (4, 0.85), (8, 0.8)])
def test_the_parts_of_a_mesh_have_rows_of_the_same_tokens(rows, least):
    """A tree is split where whole trees would leave parts with padding."""
    for seed in range(5):
        batch = pack_microbatches(groups(8, seed), 8 * 4096, rows)
        assert batch.shape[0] == rows
        assert fill(batch) >= least


def test_a_run_needs_few_programs():
    """Ragged steps of one run, and steps of a run whose answers grow tenfold."""
    shapes = {
        pack_microbatches(groups(8, seed), 4096, rows=1).shape[1] for seed in range(60)
    }
    assert len(shapes) <= 5
    shapes = {
        pack_microbatches(
            groups(16, seed, longest=100 + 10 * seed), 4096, rows=1
        ).shape[1]
        for seed in range(90)
    }
    assert len(shapes) <= 8, "lengths from 2,048 to 4,096"


@LAWS
@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=12
    ),
    st.integers(1, 200),
    st.integers(1, 5),
)
def test_every_token_is_there_and_a_microbatch_is_bounded(parts, tokens, rows):
    units = [sequence(n, *part) for n, part in enumerate(parts)]
    batch = pack_microbatches(units, tokens, rows)
    height, length = batch.shape
    assert height % rows == 0
    longest = max(map(num_tokens, units))
    assert length <= largest_row(longest, tokens, rows)
    assert length * rows <= tokens or length <= 9 / 8 * longest
    np.testing.assert_array_equal(
        np.sort(batch.tokens[batch.ends > 0]),
        np.sort(np.concatenate([unit.ids for unit in units])),
    )
    again = pack(units, length, rows)
    np.testing.assert_array_equal(batch.tokens, again.tokens)


def test_pairs_stay_together_and_extend_the_rows():
    one, other = sequence(1, 2, 30), sequence(2, 2, 31)
    batch = pack_microbatches([(one, other)], 16, rows=1)
    assert batch.shape == (1, 72)
    assert np.count_nonzero(batch.ends) == 65


def test_rows_may_be_as_long_as_those_of_another_minibatch():
    long = pack_microbatches(groups(8, 0), 1 << 14, rows=1)
    short = pack_microbatches(groups(3, 0), 1 << 14, rows=1, least=long.shape[1])
    assert short.shape == long.shape == (1, long.shape[1])
    assert np.count_nonzero(short.ends) < np.count_nonzero(long.ends)


def test_nothing_to_train_on_is_a_row_of_padding():
    batch = pack_microbatches([], 4096, rows=2)
    assert batch.shape == (2, 1)
    assert not batch.loss_mask.any()
