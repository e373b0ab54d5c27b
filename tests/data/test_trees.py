"""Packing what sequences share once: every path whole, every token trained once."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.data.packing import (
    Sequence,
    Tree,
    by_context,
    num_tokens,
    pack,
    sharing,
    trees,
)
from jaxrl_post.tokens import Tokens
from tests.packed_rows import sequences_in

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


def test_what_begins_with_a_whole_context_is_joined_and_other_things_are_not():
    one, other = answer([1, 2], [5]), answer([1, 2], [6, 7])
    longer, alone = answer([1, 2, 3], [8]), answer([], [9, 10])
    units = trees([one, alone, longer, other, alone])
    # The context of `longer` begins with the others' context.
    assert [num_tokens(unit) for unit in units] == [2 + 1 + 2 + 2, 2, 2]
    # A text that was never sampled is shared up to its last token.
    untrained = Sequence.of([1, 2, 3], [])
    shared = trees([one, Sequence.of([1, 2, 4], []), untrained])
    assert [num_tokens(unit) for unit in shared] == [2 + 1 + 1 + 1]


@pytest.mark.parametrize(("size", "found"), [(15, [17, 18]), (16, [16 + 2 + 3])])
def test_a_beginning_that_is_nobodys_whole_context_is_shared_from_16_tokens_on(
    size, found
):
    system = list(range(100, 100 + size))
    chats = [answer([*system, 1], [5]), answer([*system, 2], [5, 6])]
    assert [num_tokens(unit) for unit in trees(chats)] == found


def test_a_minibatch_keeps_samples_and_their_branches_and_no_more():
    sample, other = answer([1, 2], [5]), answer([1, 2], [6, 7])
    branch, alone = answer([1, 2, 6, 7, 3], [8]), answer([], [9, 10])
    # 16 tokens in common make a tree, but not a list, which might be a whole batch.
    system = list(range(100, 116))
    chats = [answer([*system, 1], [5]), answer([*system, 2], [5])]
    units = [branch, alone, chats[0], sample, chats[1], alone, other]
    found = [[branch, sample, other], [alone], [chats[0]], [chats[1]], [alone]]
    assert by_context(units) == found
    assert len(trees(units)) == 4


def turns(*marked):
    """A sequence of turns, and whether each is trained on; ids tell values."""
    parts = [
        Tokens.generated(ids, [-i / 8 for i in ids], version=3)
        if trained
        else Tokens.context(ids)
        for ids, trained in marked
    ]
    tokens = Tokens.concatenate(parts)
    return Sequence(tokens, np.where(tokens.sampled, tokens.ids / 2, 0))


def test_branches_of_an_episode_share_the_turns_that_one_of_them_trains():
    first, other = ([11, 12], True), ([21, 22, 23], True)
    a = turns(([1, 2], False), first, ([3, 4], False), ([13], True))
    b = turns(([1, 2], False), ([11, 12], False), ([3, 5], False), ([14, 15], True))
    # Another sample, whose answer begins with the same token: that is trained twice.
    c = turns(([1, 2], False), ([11, 16], True))
    (tree,) = trees([a, b, c])
    batch = pack([tree], 16, 1)
    # The prompt, c, then a's first turn, with b beneath it and a's own end last.
    ids = [1, 2, 11, 12, 3, 5, 14, 15, 4, 13, 11, 16, 0, 0, 0, 0]
    assert batch.tokens.tolist() == [ids]
    ends = [12, 12, 10, 10, 10, 8, 8, 8, 10, 10, 12, 12, 0, 0, 0, 0]
    assert batch.ends.tolist() == [ends]
    assert batch.positions[0, :12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 2, 3]
    trained = [2, 3, 6, 7, 9, 10, 11]
    assert np.flatnonzero(batch.loss_mask[0]).tolist() == trained
    expected = np.zeros(16, np.float32)
    expected[trained] = [ids[place] / 2 for place in trained]
    assert batch.advantages.tolist() == [expected.tolist()]
    assert batch.behavior_logprobs.tolist() == (-expected / 4)[None].tolist()
    assert batch.versions[0].tolist() == [3 if i in trained else -1 for i in range(16)]
    # Where both train, nothing is shared: neither the token nor what follows it.
    twice = [turns(([1, 2], False), first, ([3], False), other) for _ in range(2)]
    assert [num_tokens(unit) for unit in trees(twice)] == [2 + 6 + 6]
    # Nor where each trains a turn of its own in what both contain: a row's losses know
    # one sequence of each token.
    crossed = [
        turns(([1], False), (first[0], one), ([3], False), ([4], not one), ([9], True))
        for one in (True, False)
    ]
    assert [num_tokens(unit) for unit in trees(crossed)] == [4 + 2 + 2]


def test_a_chat_that_ends_within_another_keeps_its_last_token():
    """The last answer of each chat is trained: all others are context in the next."""
    chats = [
        turns(*(([10 * n + 1, 10 * n + 2], n == last) for n in range(last + 1)))
        for last in (1, 2, 3)
    ]
    (tree,) = trees(chats)
    assert num_tokens(tree) == 8 + 2
    batch = pack([tree], 10, 1)
    assert batch.tokens.tolist() == [[1, 2, 11, 12, 21, 22, 31, 32, 22, 12]]
    assert batch.ends.tolist() == [[10, 10, 10, 9, 9, 8, 8, 8, 9, 10]]
    marks = [0, 0, 1, 0, 1, 0, 1, 1, 1, 1]
    assert batch.loss_mask.tolist() == [[bool(mark) for mark in marks]]


@st.composite
def episodes(draw):
    """Sequences of one to three ids, so that many begin alike, and their masks.

    Half of the time each token is trained in the first sequence that contains it, as
    the answers of an agent are; else in any.
    """
    ids = draw(
        st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=12), max_size=9)
    )
    kind = draw(st.sampled_from(["first", "any"]))
    random = draw(st.randoms(use_true_random=False))
    taken: set[tuple[int, ...]] = set()
    made = []
    for number, own in enumerate(ids):
        mask = []
        for end in range(1, len(own) + 1):
            prefix = tuple(own[:end])
            # Whether it was sampled is the same for all: a hash of what precedes it.
            sampled = (
                hash(prefix) % 3 != 0 if kind == "first" else random.random() < 0.3
            )
            mask.append(sampled and (kind == "any" or prefix not in taken))
            taken.add(prefix)
        made.append(valued(number, own, mask))
    return kind, made


def valued(number, ids, mask):
    """A sequence whose trained tokens carry values of their own."""
    mask = np.array(mask, np.bool_)
    values = np.where(mask, 100 * number + np.arange(1, len(ids) + 1), 0)
    values = values.astype(np.float32)
    none = np.full(len(ids), -1, np.int32)
    kept = np.where(mask, np.array(ids), -1)[:, None].astype(np.int32)
    versions = np.where(mask, number, none)
    tokens = Tokens(np.array(ids), -values, -values / 2, versions, mask, kept)
    return Sequence(
        tokens, values * 2, rewards=values * 3, labels=values * 4, margins=values * 5,
        truncated=number % 2 == 0,
    )  # fmt: skip


def told(places, ids, cut, *arrays):
    """Trained part of a sequence: its ids, and values where it is trained."""
    return (ids.tolist(), cut, places.tolist(), [each.tolist() for each in arrays])


def as_given(sequence):
    # A path's first token has none before it to be predicted from.
    trained = np.flatnonzero(sequence.loss_mask & (np.arange(len(sequence.ids)) > 0))
    tokens = sequence.tokens
    arrays = (
        sequence.advantages, tokens.logprobs - tokens.log_masses, tokens.versions,
        sequence.rewards, sequence.labels, sequence.margins, tokens.padded_kept(1),
    )  # fmt: skip
    values = [each[trained] for each in arrays]
    return told(trained, sequence.ids, sequence.truncated, *values)


def as_packed(batch, row, path):
    own = batch.ends[row, path] == batch.ends[row, path[-1]]
    trained = np.flatnonzero(batch.loss_mask[row, path] & own)
    assert batch.positions[row, path].tolist() == list(range(len(path)))
    arrays = (
        batch.advantages, batch.behavior_logprobs, batch.versions, batch.token_rewards,
        batch.labels, batch.margins, batch.kept,
    )  # fmt: skip
    values = [each[row, path][trained] for each in arrays]
    cut = bool(batch.truncated[row, path[-1]])
    return told(trained, batch.tokens[row, path], cut, *values)


@pytest.fixture(scope="module", params=[1, 16])
def shortest(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "SHORTEST", request.param)
        yield request.param


@settings(LAWS, max_examples=150)
@given(episodes(), st.sampled_from([12, 30]))
def test_a_packed_path_is_a_sequence_with_what_it_trains(shortest, drawn, length):
    kind, sequences = drawn
    units = trees(sequences)
    batch = pack(units, length, 1, kept_ids=1)
    if not sequences:
        return
    found = [as_packed(batch, row, path) for row, path in sequences_in(batch)]
    assert sorted(found) == sorted(map(as_given, sequences))
    # No token is trained that is not one of these.
    plain = pack(sequences, length, 1, kept_ids=1)
    assert batch.loss_mask.sum() == plain.loss_mask.sum()
    if kind == "first" and shortest == 1:
        # Each beginning once, and the last token of what ends within another.
        given_ids = [tuple(each.ids.tolist()) for each in sequences]
        prefixes = {ids[:end] for ids in given_ids for end in range(1, len(ids))}
        assert sum(map(num_tokens, units)) == len(prefixes) + len(given_ids)
    repeated = sum(map(num_tokens, units)) < np.count_nonzero(batch.ends)
    assert not repeated or any(num_tokens(unit) > length for unit in units)


def test_a_path_has_a_bounded_number_of_nodes(monkeypatch):
    """Each turn's context is the beginning of the next one's, a thousand times."""
    chain = [answer(range(1, size), [size]) for size in range(2, 1200)]
    assert sum(map(num_tokens, trees(chain[:30]))) == 60
    made = trees(chain)
    # 100 nodes of a token; what is deeper has the tokens behind them for itself.
    below = [size - 100 for size in range(102, 1200)]
    assert sum(map(num_tokens, made)) == 100 + 100 + sum(below)
    monkeypatch.setattr(sharing, "DEEPEST", 3)
    batch = pack(trees(chain[:8]), length=40, row_multiple=1)
    paths = [batch.tokens[row][at].tolist() for row, at in sequences_in(batch)]
    assert sorted(paths) == [each.ids.tolist() for each in chain[:8]]


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
