"""From groups to sequences: each advantage lands on the tokens that earned it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.data import packing
from jaxrl_post.rollout import Episode, Group, Turn, batch
from jaxrl_post.tokens import Tokens


def make_episode(prompt: int, index: int, reward: float | None, **changes) -> Episode:
    """Two turns, the reward is the second one's."""
    # Tokens tell the sample they belong to: 100 for the prompt, 10 for the sample.
    name = 100 * prompt + 10 * index

    def said(first: int, count: int) -> Tokens:
        ids = [name + first + i for i in range(count)]
        return Tokens.generated(ids, [-float(i) for i in ids], version=prompt)

    first = Turn(Tokens.context([name]), said(1, 1), "", "", "stop", 0.0)
    last = Turn(Tokens.context([name + 2]), said(3, index + 1), "", "", "stop", reward)
    return Episode(
        prompt_id=prompt,
        sample_index=index,
        task_id=0,
        prompt_text="",
        turns=(first, dataclasses.replace(last, **changes)),
        finish_reason="stop" if reward is not None else "failed",
        error="" if reward is not None else "boom",
    )


REWARDS = {1: (3.0, 1.0, None, 2.0), 2: (0.0, 0.0, 4.0, 0.0)}
GROUPS = [
    Group(prompt, tuple(make_episode(prompt, i, r) for i, r in enumerate(rewards)))
    for prompt, rewards in REWARDS.items()
]
# Leave-one-out means, over the samples that did not fail: 3 - 1.5, 1 - 2.5, 2 - 2.
EXPECTED = {
    (1, 0): 1.5, (1, 1): -1.5, (1, 3): 0.0,
    (2, 0): -4 / 3, (2, 1): -4 / 3, (2, 2): 4.0, (2, 3): -4 / 3,
}  # fmt: skip


def estimate(facts: batch.GroupFacts) -> np.ndarray:
    return np.asarray(
        algorithms.rloo().advantages(
            jnp.asarray(facts.rewards), jnp.asarray(facts.valid)
        )
    )


def test_shaping_acts_on_rewards_by_length_and_not_on_the_choice_of_groups():
    def longer_is_worse(lengths: np.ndarray) -> np.ndarray:
        return -0.5 * lengths.astype(np.float32)

    # A sample has sampled two tokens more than its index: one of them a turn before,
    # which is not the longest.
    assert GROUPS[0].lengths.tolist() == [2, 3, 4, 5]
    seen = []
    batch.advantages(
        GROUPS,
        lambda facts: seen.append(facts.rewards) or facts.rewards,
        longer_is_worse,
    )
    expected = [[2.5, 0.0, -1.5, 0.0], [-0.5, -1.0, 2.5, -2.0]]
    np.testing.assert_array_equal(seen[0], np.float32(expected))
    # Lengths that differ make no group worth training on.
    equal = Group(3, tuple(make_episode(3, i, 1.0) for i in range(3)))
    assert not equal.has_spread


def test_reward_to_advantage_to_the_tokens_of_its_sample():
    values = batch.advantages(GROUPS, estimate)
    assert values.shape == (2, 4)
    assert values.dtype == np.float32
    made = batch.sequences(GROUPS, values)
    assert len(made) == 7, "a failed rollout is left out"
    for sequence in made:
        name = int(sequence.ids[0])
        prompt, index = name // 100, name % 100 // 10
        advantage = EXPECTED.pop((prompt, index))
        mask = sequence.loss_mask
        np.testing.assert_array_equal(sequence.ids, name + np.arange(len(mask)))
        np.testing.assert_allclose(sequence.advantages[mask], advantage, atol=1e-6)
        assert np.all(sequence.advantages[~mask] == 0)
        np.testing.assert_array_equal(
            sequence.tokens.logprobs, np.where(mask, -sequence.ids, 0)
        )
        versions = np.where(mask, prompt, -1)
        np.testing.assert_array_equal(sequence.tokens.versions, versions)
        assert mask.tolist() == [False, True, False] + [True] * (index + 1)
    assert not EXPECTED


def test_a_packed_row_keeps_each_token_with_its_advantage():
    values = np.float32([[1, 2, 0, 4], [5, 6, 7, 8]])
    packed = packing.pack(batch.sequences(GROUPS, values), 16, 1)
    assert packed.shape[0] < 7, "several sequences share a row"
    expected = {
        token: value if on else 0.0
        for group, row in zip(GROUPS, values, strict=True)
        for episode, value in zip(group.episodes, row, strict=True)
        if episode.reward is not None
        for token, on in zip(episode.tokens.ids, episode.tokens.sampled, strict=True)
    }
    real = packed.ends > 0
    found = dict(
        zip(packed.tokens[real].tolist(), packed.advantages[real].tolist(), strict=True)
    )
    assert found == expected
    assert np.all(packed.advantages[~real] == 0)


def test_what_was_cut_is_worth_nothing_left_out_or_marked():
    cut = make_episode(1, 0, 1.0, finish_reason="length", rewards={"a": 2.0, "b": -1.0})
    poor = make_episode(1, 1, -0.5, finish_reason="length")
    failed = make_episode(1, 2, None, finish_reason="length")
    whole = make_episode(1, 3, 1.0)
    group = Group(1, (cut, poor, failed, whole))
    [judged] = batch.worthless_if_truncated([group])
    assert [e.reward for e in judged.episodes] == [0.0, -0.5, None, 1.0]
    assert judged.episodes[0].rewards == {"a": 0.0, "b": -1.0}
    assert judged.episodes[3] == whole
    values = np.ones((1, 4), np.float32)
    kept = batch.sequences([group], values, skip_truncated=True)
    assert [int(each.ids[0]) for each in kept] == [130]
    marked = batch.sequences([group], values, mark_truncated=True)
    assert [each.truncated for each in marked] == [True, True, False]
    packed = packing.pack(marked, 24, 1)
    assert packed.truncated is not None
    assert packing.pack(kept, 24, 1).truncated is None
    ends = np.flatnonzero(packed.truncated)
    names = packed.tokens.ravel()[ends]
    # The last of the tokens that are named after the sample.
    assert sorted(names.tolist()) == [100 + 3, 110 + 4]


def test_facts_of_groups_are_aligned_with_their_samples():
    def part(index: int, reward: float | None) -> Episode:
        rewards = {} if reward is None else {"a": reward, "b": 10.0 + index}
        return make_episode(1, index, reward, rewards=rewards)

    def longer_is_worse(lengths: np.ndarray) -> np.ndarray:
        return -0.5 * lengths.astype(np.float32)

    samples = (part(0, 1.0), part(1, None))
    groups = [
        Group(1, samples, greedy=part(3, 2.0)),
        # Without a baseline that could be judged there is nothing to compare with.
        Group(2, samples, greedy=part(0, None)),
    ]
    seen = []
    batch.advantages(
        groups,
        lambda facts: seen.append(facts) or facts.rewards,
        longer_is_worse,
        parts=("b", "a"),
    )
    [facts] = seen
    assert facts.lengths.tolist() == [[2, 3]] * 2
    assert facts.components.tolist() == [[[10.0, 1.0], [0.0, 0.0]]] * 2
    # 2 - 0.5 * 4, shaped as the samples are.
    assert facts.greedy[0] == 0.0
    assert facts.valid.tolist() == [[True, False], [False, False]]
    assert facts.rewards.tolist() == [[0.5, -1.0]] * 2


def turns_of(*rewards: float, index: int = 0) -> Episode:
    """An episode of as many turns, of two tokens each, as there are rewards."""
    turns = tuple(
        Turn(
            Tokens.context([9]),
            Tokens.generated([10 * k, 10 * k + 1], [0.0, 0.0], version=0),
            "",
            "",
            "stop",
            reward,
        )
        for k, reward in enumerate(rewards, 1)
    )
    return Episode(1, index, 0, "", turns, "stop")


def centred(facts: batch.GroupFacts) -> np.ndarray:
    count = facts.valid.sum(axis=1, keepdims=True)
    total = np.where(facts.valid, facts.rewards, 0).sum(axis=1, keepdims=True)
    return facts.rewards - total / np.maximum(count, 1)


def test_turns_are_credited_in_the_order_in_which_they_were_served():
    """By hand: served are 0, 2, 1, with rewards 1, 4, 2, and returns 7, 6, 2."""
    turns = turns_of(1.0, 2.0, 4.0).turns
    served = tuple(
        dataclasses.replace(turn, served=number)
        for turn, number in zip(turns, (0, 2, 1), strict=True)
    )
    beside = dataclasses.replace(turns_of(), turns=served, segments=(2,))
    alone = turns_of(0.0, 0.0, 0.0, index=1)
    groups = [Group(1, (beside, alone))]
    values = batch.turn_advantages(groups, centred, discount=1.0)
    # The second turn that was served, 6, is compared with the other's second turn.
    expected = [[3.5, 1.0, 3.0], [-3.5, -3.0, -1.0]]
    np.testing.assert_allclose(values, [expected], atol=1e-6)
    in_order = turns_of(1.0, 4.0, 2.0, index=1)
    assert not Group(1, (beside, in_order)).has_turn_spread(0.0)
    # If turns have equal length, the shaping is at the one that was served last.
    rewards, _ = batch.turn_rewards(groups, lambda n: n.astype(np.float32))
    length = beside.longest_turn
    np.testing.assert_allclose(rewards[0, 0], [1.0, 2.0 + length, 4.0])
    assert Episode.from_json(beside.to_json()) == beside
    assert beside.last_turns == {"": served[1]}


def test_each_turn_is_credited_with_the_rewards_from_it_on():
    """By hand: returns are [2.5, 3, 4] and [3, 4] with a discount of 1/2."""
    long, short = turns_of(1.0, 1.0, 4.0), turns_of(1.0, 4.0, index=1)
    failed = dataclasses.replace(turns_of(9.0, 9.0, 9.0), error="boom")
    groups = [Group(1, (long, short, failed))]
    values = batch.turn_advantages(groups, centred, discount=0.5)
    expected = [[2.5 - 2.75, 3 - 3.5, 0.0], [3 - 2.75, 4 - 3.5, 0.0], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(values, [expected], atol=1e-6)
    own = batch.turn_advantages(groups, centred, discount=0.0)
    np.testing.assert_allclose(own[0, :2], [[0, -1.5, 0], [0, 1.5, 0]], atol=1e-6)
    made = batch.sequences(groups, values)
    assert len(made) == 2
    np.testing.assert_allclose(
        made[0].advantages, [0, -0.25, -0.25, 0, -0.5, -0.5, 0, 0, 0], atol=1e-6
    )
    assert made[0].rewards is None


@pytest.mark.parametrize(
    ("discount", "samples", "spread"),
    [
        # Equal sums, and second turns that earned different rewards.
        (1.0, ((1.0, 0.0), (0.0, 1.0)), True),
        (0.0, ((1.0, 0.0), (0.0, 1.0)), True),
        (1.0, ((1.0, 0.5), (1.0, 0.5)), False),
        # Different sums, and no sample with which to compare the second turn.
        (1.0, ((1.0,), (1.0, 1.0)), True),
        (0.0, ((1.0,), (1.0, 1.0)), False),
        # Equal sums, and one sample alone has a second turn.
        (1.0, ((1.0,), (0.0, 1.0)), False),
        (0.5, ((1.0,), (0.0, 1.0)), True),
        # 0.1 + 0.2 + 0.3 and 0.6 differ by rounding alone.
        (1.0, ((0.1, 0.2, 0.3), (0.6,)), False),
    ],
)
def test_the_spread_of_turns_is_what_turn_credit_learns_from(discount, samples, spread):
    group = Group(1, tuple(turns_of(*r, index=i) for i, r in enumerate(samples)))
    assert group.has_turn_spread(discount) is spread
    values = batch.turn_advantages([group], centred, discount=discount)
    assert (abs(values).max() > 1e-6) == spread
    failed = dataclasses.replace(turns_of(9.0, 9.0, index=9), error="boom")
    with_failed = Group(1, (*group.episodes, failed))
    assert with_failed.has_turn_spread(discount) is spread


def test_rewards_stand_at_the_last_token_of_their_turn():
    long, short = turns_of(1.0, -2.0, 4.0), turns_of(3.0, index=1)
    groups = [Group(1, (long, short))]
    rewards, mask = batch.turn_rewards(groups, lambda lengths: -0.1 * lengths)
    # Turns have two tokens each; of equally long ones the last is shaped.
    np.testing.assert_allclose(rewards, [[[1, -2, 3.8], [2.8, 0, 0]]], atol=1e-6)
    assert mask.tolist() == [[[True] * 3, [True, False, False]]]
    made = batch.sequences(groups, rewards, rewards=rewards)
    np.testing.assert_allclose(made[0].rewards, [0, 0, 1, 0, 0, -2, 0, 0, 3.8])
    np.testing.assert_allclose(made[1].rewards, [0, 0, 2.8])
    packed = packing.pack(made, 16, 1)
    assert packed.token_rewards is not None
    assert packed.token_rewards.sum() == np.float32(1 - 2 + 3.8 + 2.8)


def test_the_longest_turn_is_shaped_by_its_own_length():
    episode = turns_of(1.0, 2.0, 3.0)
    said = Tokens.generated([20] * 5, [0.0] * 5, version=0)
    long = dataclasses.replace(episode.turns[1], sampled=said)
    episode = dataclasses.replace(
        episode, turns=(episode.turns[0], long, episode.turns[2])
    )
    groups = [Group(1, (episode, turns_of(6.0, index=1)))]

    def over_four(lengths: np.ndarray) -> np.ndarray:
        return -np.maximum(lengths - 4, 0).astype(np.float32)

    rewards, _ = batch.turn_rewards(groups, over_four)
    np.testing.assert_array_equal(rewards, [[[1, 1, 3], [6, 0, 0]]])
    # Nine tokens were sampled, five of them at once.
    values = batch.advantages(groups, lambda facts: facts.rewards, over_four)
    np.testing.assert_array_equal(values, [[5, 6]])
    greedy = [dataclasses.replace(groups[0], greedy=episode)]
    seen = []
    batch.advantages(greedy, lambda f: seen.append(f) or f.rewards, over_four)
    np.testing.assert_array_equal(seen[0].greedy, [5])


def test_outcomes_are_labels_of_answers_with_numbers():
    values = batch.advantages(GROUPS, estimate)
    assert all(each.labels is None for each in batch.sequences(GROUPS, values))
    outcomes = np.array([[1, 0, 0, 0.5], [0, 0, 1, 0]], np.float32)
    made = batch.sequences(GROUPS, values, outcomes=outcomes)
    found = {}
    for sequence in made:
        name, mask = int(sequence.ids[0]), sequence.loss_mask
        arrays = (sequence.labels, sequence.answers, sequence.groups)
        assert [array.dtype for array in arrays] == [np.float32, np.int32, np.int32]
        assert not any(array[~mask].any() for array in arrays)
        (label,), (answer,), (group,) = (set(a[mask].tolist()) for a in arrays)
        found[name // 100, name % 100 // 10] = label, answer, group
    # Numbers are dense though a rollout failed.
    assert found == {
        (1, 0): (1.0, 1, 1), (1, 1): (0.0, 2, 1), (1, 3): (0.5, 3, 1),
        (2, 0): (0.0, 4, 2), (2, 1): (0.0, 5, 2), (2, 2): (1.0, 6, 2),
        (2, 3): (0.0, 7, 2),
    }  # fmt: skip


def test_the_sequences_of_an_episode_are_one_answer():
    episode = dataclasses.replace(GROUPS[0].episodes[0], segments=(1,))
    group = Group(1, (episode, *GROUPS[0].episodes[1:]))
    values = np.zeros((1, 4), np.float32)
    outcomes = np.array([[1, 0, 0, 0]], np.float32)
    made = batch.sequences([group], values, outcomes=outcomes)
    assert [max(each.answers.tolist()) for each in made] == [1, 1, 2, 3]
    assert [max(each.labels.tolist()) for each in made] == [1, 1, 0, 0]


def test_marks_of_an_answer_come_through_packing():
    values = batch.advantages(GROUPS, estimate)
    outcomes = np.array([[1, 0, 0, 0.5], [0, 0, 1, 0]], np.float32)
    made = batch.sequences(GROUPS, values, outcomes=outcomes)
    for units in (made, packing.trees(made)):
        packed = packing.pack(units, 24, 2)
        assert packed.answers.dtype == packed.groups.dtype == np.int32
        at = {}
        for row, place in np.argwhere(packed.loss_mask):
            token = int(packed.tokens[row, place])
            at[token // 100, token % 100 // 10] = (
                float(packed.labels[row, place]),
                int(packed.answers[row, place]),
                int(packed.groups[row, place]),
            )
        assert at[1, 3] == (0.5, 3, 1)
        assert at[2, 2] == (1.0, 6, 2)
        assert len(at) == 7
