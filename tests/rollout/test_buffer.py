"""The buffer: which groups a step takes, and how old they become."""

import json
import random

import pytest

from jaxrl_post.rollout.buffer import Admission, Buffer
from jaxrl_post.rollout.episode import Group


def groups(*prompt_ids: int) -> list[Group]:
    return [Group(prompt_id, ()) for prompt_id in prompt_ids]


def ids(found: list[Group]) -> list[int]:
    return [group.prompt_id for group in found]


def opened(admission: Admission, number: int = 1) -> Buffer:
    buffer = Buffer(admission)
    buffer.open(number)
    return buffer


def test_a_step_takes_the_oldest_groups_that_have_ended():
    buffer = opened(Admission(groups=2, spare=2))
    assert buffer.admits(0) == 4
    buffer.begin(range(4))
    buffer.put(groups(3, 1))
    buffer.put(groups(2))
    assert buffer.complete([0])
    assert ids(buffer.take()) == [1, 2]
    buffer.open(2)
    # Group 3 waits, and group 0 is unfinished.
    assert buffer.admits(1) == 2


@pytest.mark.parametrize(
    ("steps", "ended", "under_way", "complete"),
    [
        # A step takes two groups, and all were begun for step 1.
        (1, [1, 2], [0], True),
        (1, [1, 3], [0, 2], True),
        # Step 2 would take groups 0 and 3, and step 3 is too late for group 4.
        (1, [1, 2], [0, 3, 4], False),
        (1, [0, 1, 4], [2, 3], False),
        (2, [3, 4], [0, 1, 2], True),
        (2, [5, 6], [0, 1, 2, 3, 4], False),
    ],
)
def test_a_step_waits_for_a_group_that_would_be_too_old(
    steps, ended, under_way, complete
):
    buffer = opened(Admission(2, 2 * steps, most_steps=steps))
    buffer.begin(range(7))
    buffer.put(groups(*ended))
    assert buffer.complete(under_way) == complete


def test_a_bound_that_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"5 spare groups cannot be .* 2 steps of 2"):
        Admission(groups=2, spare=5, most_steps=2)
    assert Admission(groups=2, spare=4, most_steps=2).most_steps == 2


def test_a_checkpoint_holds_when_groups_were_begun():
    buffer = opened(Admission(1, 1, most_steps=1), number=7)
    buffer.begin([4, 5])
    buffer.put(groups(5))
    assert ids(buffer.take()) == [5]
    other = Buffer(buffer.admission)
    other.load(json.loads(json.dumps(buffer.to_json())))
    for each in (buffer, other):
        each.open(8)
        each.begin([6])
        each.put(groups(6))
        # Group 4 was begun for step 7, so step 8 must train on it.
        assert not each.complete([4])
        each.put(groups(4))
        assert each.complete([])
        assert (ids(each.take()), len(each)) == ([4], 1)


def test_checkpoints_of_earlier_versions_have_groups_alone():
    buffer = opened(Admission(1, 1, most_steps=1), number=9)
    buffer.load([group.to_json() for group in groups(3, 4)])
    assert ids(buffer.take()) == [3]
    # It is not known when group 2 was begun: it is waited for.
    assert not buffer.complete([2])


def play(seed: int) -> int:
    """Plays a run of random sizes and speeds, stopped and resumed at random.

    Returns the largest age of a group, less the bound.
    """
    draw = random.Random(seed)
    size = draw.randint(1, 5)
    most = draw.randint(1, 4)
    spare = draw.randint(1, most * size)
    draws = draw.choice([1, 1, 3])
    steps, slow = draw.randint(1, 15), draw.choice([0.0, 0.1, 0.5])
    admission = Admission(size, spare, draws, most)
    kept = draw.choice([1.0, 0.6]) if draws > 1 else 1.0

    def worth(group: Group) -> bool:
        return random.Random(f"{seed} {group.prompt_id}").random() < kept

    buffer, under_way = Buffer(admission, worth), dict[int, int]()
    begun, drawn, dropped, oldest = dict[int, int](), 0, set[int](), 0
    trained = list[int]()
    for number in range(1, steps + 1):
        if draw.random() < 0.2:
            resumed = Buffer(admission, worth)
            resumed.load(json.loads(json.dumps(buffer.to_json())))
            buffer = resumed
        buffer.open(number)
        while True:
            count = buffer.admits(len(under_way))
            new = range(drawn, drawn + count)
            buffer.begin(new)
            drawn += count
            for prompt_id in new:
                begun[prompt_id] = number
                # Rounds until it ends: a few, or very many.
                under_way[prompt_id] = (
                    100 if draw.random() < slow else draw.randint(1, 4)
                )
            if buffer.complete(under_way) or not under_way:
                break
            for prompt_id in under_way:
                under_way[prompt_id] -= 1
            ended = [each for each, left in under_way.items() if left <= 0]
            draw.shuffle(ended)
            for prompt_id in ended:
                del under_way[prompt_id]
            dropped |= {each for each in ended if not worth(Group(each, ()))}
            buffer.put(groups(*ended))
        taken = ids(buffer.take())
        assert len(taken) == size or (draws > 1 and not under_way)
        assert taken == sorted(taken)
        oldest = max([oldest, *(number - begun[each] for each in taken)])
        # The groups that are left can be trained on in time.
        trained += taken
    left = ids(buffer.take()) if len(buffer) <= size else None
    assert len({*trained}) == len(trained), "a group was trained on twice"
    if left is not None:
        found = {*trained, *left, *under_way, *dropped}
        assert found == {*range(drawn)}, "a group was lost"
    return oldest - most


@pytest.mark.parametrize("first", [0, 500])
def test_no_group_becomes_too_old_or_is_lost(first):
    ages = [play(seed) for seed in range(first, first + 500)]
    # The bound holds, and is met.
    assert max(ages) == 0


@pytest.mark.all
@pytest.mark.slow("100,000 random runs")
def test_no_group_becomes_too_old_in_100000_runs():
    assert max(play(seed) for seed in range(100_000)) == 0


def test_without_the_bound_groups_do_become_too_old(monkeypatch):
    def complete(self: Buffer, in_flight: object) -> bool:
        del in_flight
        return self.full

    monkeypatch.setattr(Buffer, "complete", complete)
    assert max(play(seed) for seed in range(200)) > 0


def test_the_order_of_the_prompts_matters_to_the_bound(monkeypatch):
    def put(self: Buffer, found: list[Group]) -> None:
        self._groups += filter(self.worth_training, found)

    monkeypatch.setattr(Buffer, "put", put)
    with pytest.raises(AssertionError):
        assert max(play(seed) for seed in range(200)) <= 0
