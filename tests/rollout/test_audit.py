"""The audit of a packed batch against its episodes: silent, and naming each fault."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post.data import packing
from jaxrl_post.rollout import batch as batching
from jaxrl_post.rollout.audit import audit
from jaxrl_post.rollout.episode import Episode, Group, Turn
from jaxrl_post.tokens import Tokens

VALUES = np.array([[1.0, -1.0], [0.5, -0.5]], np.float32)


def turn(rng, context, size, **options) -> Turn:
    ids = rng.integers(1, 1000, size).tolist()
    sampled = Tokens.generated(ids, rng.normal(size=size).tolist(), version=0)
    # Spans of the policy end with the stop token, 0.
    sampled = dataclasses.replace(sampled, ids=np.append(sampled.ids[:-1], 0))
    before = Tokens.context(rng.integers(1, 1000, context).tolist())
    return Turn(before, sampled, "", "", "stop", reward=0.0, **options)


def groups(seed=0, turns=3) -> list[Group]:
    rng = np.random.default_rng(seed)
    found = []
    for prompt in range(2):
        first = turn(rng, 40, 7)
        episodes = []
        for sample in range(2):
            # The samples of a prompt share its context.
            begin = dataclasses.replace(turn(rng, 40, 7), context=first.context)
            rest = [turn(rng, 5, 3 + sample) for _ in range(turns - 1)]
            episodes.append(Episode(prompt, sample, prompt, "", (begin, *rest), "done"))
        found.append(Group(prompt, tuple(episodes)))
    return found


def every(episode: Episode) -> bool:
    return True


def audited(made, sampled, values=VALUES, *, trees=True, kept_ids=0):
    units = packing.trees(made) if trees else made
    batch = packing.pack_microbatches(units, 256, 1, kept_ids=kept_ids)
    found = audit(sampled, values, [batch], every)
    return {name.removeprefix("audit/"): v for name, v in found.items() if v}


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_right_is_silent(trees, seed):
    sampled = groups(seed)
    made = batching.sequences(sampled, VALUES)
    assert audited(made, sampled, trees=trees) == {}


def test_turns_may_have_values_of_their_own_and_sequences_of_an_agent_begin_anew():
    sampled = groups()
    values = np.arange(12, dtype=np.float32).reshape(2, 2, 3) + 1
    assert audited(batching.sequences(sampled, values), sampled, values) == {}
    apart = [
        dataclasses.replace(
            group,
            episodes=tuple(
                dataclasses.replace(e, segments=(2,)) for e in group.episodes
            ),
        )
        for group in sampled
    ]
    made = batching.sequences(apart, values)
    assert len(made) == 8
    assert audited(made, apart, values) == {}


def changed(change, seed=0):
    """The audit of sequences that a fault changed."""
    sampled = groups(seed)
    made = [change(each) for each in batching.sequences(sampled, VALUES)]
    return audited(made, sampled)


def masked(sequence, sampled):
    tokens = dataclasses.replace(sequence.tokens, sampled=sampled)
    return dataclasses.replace(sequence, tokens=tokens)


def with_ids(sequence, ids):
    tokens = dataclasses.replace(sequence.tokens, ids=ids.astype(np.int32))
    return dataclasses.replace(sequence, tokens=tokens)


def stops(sequence):
    mask = sequence.loss_mask
    return mask & ~np.append(mask[1:], False)


def first(sequence):
    mask = sequence.loss_mask
    return mask & ~np.append(False, mask[:-1])


FAULTS = {
    "advantages shifted": (
        lambda s: dataclasses.replace(s, advantages=np.roll(s.advantages, 1)),
        {"advantage"},
    ),
    "advantages of another sign": (
        lambda s: dataclasses.replace(s, advantages=-s.advantages),
        {"advantage"},
    ),
    "context trained": (
        lambda s: masked(s, np.append(False, np.ones(len(s.ids) - 1, np.bool_))),
        {"unsampled"},
    ),
    "stop tokens not trained": (
        lambda s: masked(s, s.loss_mask & ~stops(s)),
        {"stops_untrained"},
    ),
    "first tokens not trained": (
        lambda s: masked(s, s.loss_mask & ~first(s)),
        {"untrained"},
    ),
    "mask shifted": (
        lambda s: masked(s, np.roll(s.loss_mask, -1)),
        {"unsampled", "stops_untrained"},
    ),
    "other ids": (
        lambda s: with_ids(s, np.where(s.loss_mask, s.ids + 1, s.ids)),
        {"retokenized"},
    ),
    "context in another order": (
        lambda s: with_ids(s, np.where(s.loss_mask, s.ids, s.ids[::-1] % 7)),
        {"misplaced"},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_name(name, seed):
    change, expected = FAULTS[name]
    found = changed(change, seed)
    assert found.keys() == expected
    assert all(0 < share <= 1 for share in found.values())


def test_shares_are_counted():
    assert changed(FAULTS["stop tokens not trained"][0]) == {"stops_untrained": 1.0}
    # 17 or 15 sampled tokens in 3 turns, of which 3 are first ones.
    sizes = sum(each.num_sampled for group in groups() for each in group.episodes)
    found = changed(FAULTS["first tokens not trained"][0])
    assert found["untrained"] == pytest.approx(12 / sizes)


def test_one_episode_among_many_is_found():
    sampled = groups()
    made = batching.sequences(sampled, VALUES)
    made[2] = dataclasses.replace(made[2], advantages=made[2].advantages * 1.001)
    found = audited(made, sampled)
    assert found.keys() == {"advantage"}


def test_the_log_probs_among_kept_tokens_are_compared_as_such():
    sampled = []
    for group in groups():
        episodes = []
        for episode in group.episodes:
            turns = []
            for each in episode.turns:
                size = len(each.sampled)
                kept = np.full((size, 2), -1, np.int32)
                kept[::2, 0] = each.sampled.ids[::2]
                masses = np.full(size, -0.1, np.float32)
                tokens = dataclasses.replace(each.sampled, kept=kept, log_masses=masses)
                turns.append(dataclasses.replace(each, sampled=tokens))
            episodes.append(dataclasses.replace(episode, turns=tuple(turns)))
        sampled.append(dataclasses.replace(group, episodes=tuple(episodes)))
    made = batching.sequences(sampled, VALUES)
    assert audited(made, sampled, kept_ids=2) == {}
    assert audited(made, sampled) == {}


def test_demonstrations_and_empty_batches_have_nothing_to_compare():
    assert audited([packing.Sequence.of([1, 2], [3])], []) == {"unsampled": 1.0}
