"""From groups to sequences: each advantage lands on the tokens that earned it."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxrl_post import algorithms
from jaxrl_post.data import packing
from jaxrl_post.rollout import Group, Rollout, batch


def make_rollout(prompt: int, index: int, reward: float | None) -> Rollout:
    # Tokens tell the sample they belong to: 100 for the prompt, 10 for the sample.
    name = 100 * prompt + 10 * index
    count = index + 1
    mask = (False, True, False, *[True] * count)
    size = len(mask)
    return Rollout(
        prompt_id=prompt,
        sample_index=index,
        task_id=0,
        tokens=tuple(name + i for i in range(size)),
        loss_mask=mask,
        logprobs=tuple(-float(name + i) if on else 0.0 for i, on in enumerate(mask)),
        log_masses=(0.0,) * size,
        versions=tuple(prompt if on else -1 for on in mask),
        reward=reward,
        error="",
        finish_reason="stop",
        prompt_text="",
        response_text="",
    )


REWARDS = {1: (3.0, 1.0, None, 2.0), 2: (0.0, 0.0, 4.0, 0.0)}
GROUPS = [
    Group(prompt, tuple(make_rollout(prompt, i, r) for i, r in enumerate(rewards)))
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

    # A sample has sampled two tokens more than its index: one of them a turn before.
    assert GROUPS[0].lengths.tolist() == [2, 3, 4, 5]
    seen = []
    batch.advantages(
        GROUPS,
        lambda facts: seen.append(facts.rewards) or facts.rewards,
        longer_is_worse,
    )
    expected = [[2.0, -0.5, -2.0, -0.5], [-1.0, -1.5, 2.0, -2.5]]
    np.testing.assert_array_equal(seen[0], np.float32(expected))
    # Lengths that differ make no group worth training on.
    equal = Group(3, tuple(make_rollout(3, i, 1.0) for i in range(3)))
    assert not equal.has_spread


def test_reward_to_advantage_to_the_tokens_of_its_sample():
    values = batch.advantages(GROUPS, estimate)
    assert values.shape == (2, 4)
    assert values.dtype == np.float32
    made = batch.sequences(GROUPS, values)
    assert len(made) == 7, "a failed rollout is left out"
    for sequence in made:
        name = int(sequence.tokens[0])
        prompt, index = name // 100, name % 100 // 10
        advantage = EXPECTED.pop((prompt, index))
        mask = sequence.loss_mask
        np.testing.assert_array_equal(sequence.tokens, name + np.arange(len(mask)))
        np.testing.assert_allclose(sequence.advantages[mask], advantage, atol=1e-6)
        assert np.all(sequence.advantages[~mask] == 0)
        np.testing.assert_array_equal(
            sequence.behavior_logprobs, np.where(mask, -sequence.tokens, 0)
        )
        np.testing.assert_array_equal(sequence.versions, np.where(mask, prompt, -1))
        assert mask.tolist() == [False, True, False] + [True] * (index + 1)
    assert not EXPECTED


def test_a_packed_row_keeps_each_token_with_its_advantage():
    values = np.float32([[1, 2, 0, 4], [5, 6, 7, 8]])
    packed = packing.pack(batch.sequences(GROUPS, values), 16, 1)
    assert packed.shape[0] < 7, "several sequences share a row"
    expected = {
        token: value if on else 0.0
        for group, row in zip(GROUPS, values, strict=True)
        for rollout, value in zip(group.rollouts, row, strict=True)
        if rollout.reward is not None
        for token, on in zip(rollout.tokens, rollout.loss_mask, strict=True)
    }
    real = packed.segment_ids > 0
    found = dict(
        zip(packed.tokens[real].tolist(), packed.advantages[real].tolist(), strict=True)
    )
    assert found == expected
    assert np.all(packed.advantages[~real] == 0)


def test_what_was_cut_is_worth_nothing_left_out_or_marked():
    cut = dataclasses.replace(
        make_rollout(1, 0, 1.0), finish_reason="length", rewards={"a": 2.0, "b": -1.0}
    )
    poor = dataclasses.replace(make_rollout(1, 1, -0.5), finish_reason="length")
    failed = dataclasses.replace(make_rollout(1, 2, None), finish_reason="length")
    whole = make_rollout(1, 3, 1.0)
    group = Group(1, (cut, poor, failed, whole))
    [judged] = batch.worthless_if_truncated([group])
    assert [r.reward for r in judged.rollouts] == [0.0, -0.5, None, 1.0]
    assert judged.rollouts[0].rewards == {"a": 0.0, "b": -1.0}
    assert judged.rollouts[3] == whole
    values = np.ones((1, 4), np.float32)
    kept = batch.sequences([group], values, skip_truncated=True)
    assert [int(each.tokens[0]) for each in kept] == [130]
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
    def part(index: int, reward: float | None) -> Rollout:
        rewards = {} if reward is None else {"a": reward, "b": 10.0 + index}
        return dataclasses.replace(make_rollout(1, index, reward), rewards=rewards)

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
    # 2 - 0.5 * 5, shaped as the samples are.
    assert facts.greedy[0] == -0.5
    assert facts.valid.tolist() == [[True, False], [False, False]]
    assert facts.rewards.tolist() == [[0.0, -1.5]] * 2
