"""Packing what sequences share once: every path whole, every token trained once."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.data.packing import Sequence, Tree, by_context, num_tokens, pack, trees
from jaxrl_post.tokens import Tokens

LAWS = settings(max_examples=60, deadline=None, derandomize=True)
LENGTH = 24


def answer(prompt, ids, *, version=0):
    """A sequence whose tokens carry values made from their ids."""
    sampled = Tokens.generated(list(ids), [-i / 8 for i in ids], version=version)
    advantages = np.array([0.0] * len(prompt) + [i / 2 for i in ids], np.float32)
    return Sequence(Tokens.context(prompt) + sampled, advantages)


def group(number, prompt, sizes):
    """Samples of one prompt; no two sampled ids of a batch are equal."""
    ids = [1000 * number + i for i in range(prompt)]
    begins = np.cumsum([0, *sizes]).tolist()
    return [
        answer(ids, range(1000 * number + 500 + begin, 1000 * number + 500 + end))
        for begin, end in itertools.pairwise(begins)
    ]


def path_of(batch, row, index):
    """The places that the token at `index` sees, in order."""
    places = np.arange(batch.shape[1])
    return places[(places <= index) & (index < batch.ends[row])]


def test_a_group_and_a_lone_sequence_worked_by_hand():
    units = trees([*group(1, 3, [2, 1]), *group(2, 1, [2])])
    batch = pack(units, length=10, row_multiple=1)
    ids = [1000, 1001, 1002, 1500, 1501, 1502, 2000, 2500, 2501, 0]
    assert batch.tokens.tolist() == [ids]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 0]]
    assert batch.ends.tolist() == [[6, 6, 6, 5, 5, 6, 9, 9, 9, 0]]
    sampled = [False] * 3 + [True] * 3 + [False, True, True, False]
    assert batch.loss_mask.tolist() == [sampled]
    assert np.asarray(batch.previous).tolist() == [[0, 0, 1, 2, 3, 2, 0, 6, 7, 0]]
    assert [num_tokens(unit) for unit in units] == [6, 3]


GROUPS = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(1, 7), min_size=1, max_size=6)),
    max_size=6,
)


@LAWS
@given(GROUPS, st.integers(1, 3))
def test_every_sequence_is_a_path_and_every_sampled_token_is_trained_once(
    parts, row_multiple
):
    groups = [group(n, *part) for n, part in enumerate(parts, 1)]
    sequences = [each for members in groups for each in members]
    units = trees(sequences)
    batch = pack(units, LENGTH, row_multiple)
    assert batch.shape[0] % row_multiple == 0
    previous = np.asarray(batch.previous)
    paths, trained = [], []
    for row in range(batch.shape[0]):
        for index in np.flatnonzero(batch.ends[row]):
            path = path_of(batch, row, index)
            assert batch.positions[row][path].tolist() == list(range(len(path)))
            if len(path) > 1:
                assert previous[row, index] == path[-2]
            if batch.loss_mask[row, index]:
                identity = int(batch.tokens[row, index])
                trained.append(identity)
                assert batch.behavior_logprobs[row, index] == np.float32(-identity / 8)
                assert batch.advantages[row, index] == np.float32(identity / 2)
            paths.append(tuple(batch.tokens[row][path].tolist()))
        assert not batch.loss_mask[row][batch.ends[row] == 0].any()
    # A path's first token has none before it to be predicted from.
    expected = [
        i for s in sequences for i in s.ids[s.loss_mask & (np.arange(len(s.ids)) > 0)]
    ]
    assert sorted(trained) == sorted(expected)
    for sequence in sequences:
        assert paths.count(tuple(sequence.ids.tolist())) == 1
    # A prompt is repeated only for a group that is longer than a row.
    for number, (prompt, sizes) in enumerate(parts, 1):
        if prompt and prompt + sum(sizes) <= LENGTH:
            assert (batch.tokens[batch.ends > 0] == 1000 * number).sum() == 1


def test_a_group_longer_than_a_row_is_split_and_its_prompt_repeated():
    sequences = group(1, 4, [5, 3, 4, 4])  # 20 tokens; a row has room for 8 after 4.
    batch = pack(trees(sequences), length=12, row_multiple=1)
    assert batch.shape == (2, 12)
    assert batch.tokens[:, :4].tolist() == [[1000, 1001, 1002, 1003]] * 2
    # Largest first, each where it fits best: 5 and 3, then 4 and 4.
    assert batch.ends[:, 4:].tolist() == [[9] * 5 + [12] * 3, [8] * 4 + [12] * 4]
    assert not batch.loss_mask[:, :4].any()


def tree_of(depth, random, start=1):
    """A random tree of trained nodes with `depth` levels, and the next id."""
    size = int(random.integers(1, 4))
    node, after = answer([], range(start, start + size)), start + size
    branches = []
    if depth > 1:
        for _ in range(int(random.integers(1, 4))):
            branch, after = tree_of(depth - 1, random, after)
            branches.append(branch)
    return Tree(node, tuple(branches)), after


def paths_in(tree, before=()):
    path = (*before, *tree.node.ids.tolist())
    yield path
    for branch in tree.branches:
        yield from paths_in(branch, path)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(5))
def test_a_deep_tree_that_is_split_trains_every_node_once(depth, seed):
    tree, after = tree_of(depth, np.random.default_rng([depth, seed]))
    length = max(map(len, paths_in(tree))) + seed
    batch = pack([tree], length, 1)
    assert depth < 5 or batch.shape[0] > 1, "it is split"
    found = set()
    for row in range(batch.shape[0]):
        for index in np.flatnonzero(batch.ends[row]):
            path = path_of(batch, row, index)
            found.add(tuple(batch.tokens[row][path].tolist()))
    for path in paths_in(tree):
        assert path in found
    # All but the first token of all, which nothing predicts.
    trained = batch.tokens[batch.loss_mask].tolist()
    assert sorted(trained) == list(range(2, after))


def test_equal_contexts_are_joined_and_others_are_not():
    one, other = answer([1, 2], [5]), answer([1, 2], [6, 7])
    longer, alone = answer([1, 2, 3], [8]), answer([], [9, 10])
    units = trees([one, alone, longer, other, alone])
    assert [num_tokens(unit) for unit in units] == [5, 2, 4, 2]
    assert [len(each) for each in by_context([one, alone, longer, other])] == [2, 1, 1]
    # What was never sampled is shared up to its last token.
    untrained = Sequence.of([1, 2, 3], [])
    shared = trees([one, Sequence.of([1, 2, 4], []), untrained])
    assert [num_tokens(unit) for unit in shared] == [2 + 1 + 1 + 1]


def test_the_members_of_a_tuple_stay_side_by_side():
    pairs = [
        tuple(group(1, 2, [2, 3])),
        tuple(group(2, 3, [1, 1])),
        group(1, 2, [4])[0],
    ]
    (first, second) = trees(pairs)
    assert isinstance(first, Tree)
    assert [num_tokens(branch) for branch in first.branches] == [5, 4]
    assert num_tokens(second) == 5
    batch = pack([first, second], 20, 1)
    # The rejected answer begins where the chosen one ends.
    assert batch.ends[0, :11].tolist() == [11, 11, 4, 4, 7, 7, 7, 11, 11, 11, 11]
    # Room for one pair after the prompt, not for its halves apart.
    whole = Tree(
        answer([1, 2], []), (tuple(group(3, 0, [3, 2])), tuple(group(4, 0, [1, 4])))
    )
    batch = pack([whole], 8, 1)
    assert batch.ends[:, 2:7].tolist() == [[5, 5, 5, 7, 7], [3, 7, 7, 7, 7]]


def test_labels_margins_and_cut_ends_follow_their_tokens():
    def marked(ids, label, *, cut):
        made = answer([7, 8], ids)
        return Sequence(
            made.tokens, made.advantages, truncated=cut,
            rewards=np.arange(len(made.ids), dtype=np.float32),
            labels=np.full(len(made.ids), label, np.float32),
        )  # fmt: skip

    units = trees([marked([1, 2], 1.0, cut=True), marked([3], -1.0, cut=False)])
    batch = pack(units, 5, 1)
    assert batch.labels.tolist() == [[1, 1, 1, 1, -1]]
    assert batch.token_rewards.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.truncated.tolist() == [[False, False, False, True, False]]


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (group(1, 5, [9])[0], "unit 0 has 14 tokens"),
        (tuple(group(1, 5, [3, 2])), "unit 0 has 15 tokens"),
        (Tree(answer([1] * 8, []), tuple(group(2, 0, [3, 5]))), "unit 0 has 13 tokens"),
        (Tree(answer([1] * 12, []), tuple(group(2, 0, [3]))), "unit 0 has 15 tokens"),
    ],
)
def test_what_must_stay_together_and_is_longer_than_a_row_is_refused(unit, message):
    with pytest.raises(ValueError, match=f"^pack: {message} that must stay together"):
        pack([unit], 12, 1)


def test_rewards_by_token_before_a_branching_are_refused():
    made = answer([1], [2, 3])
    credited = Sequence(made.tokens, made.advantages, rewards=made.advantages)
    with pytest.raises(ValueError, match="its tokens would have several next tokens"):
        Tree(credited, (answer([], [4]), answer([], [5])))
