"""The relay's broker: what leaves the trainer, and that everyone gets everything."""

import heapq
import itertools
from collections import Counter

import numpy as np
import pytest

from jaxrl_post.fleet.holders import Holders, Refer, Send, Wait


def test_the_first_two_are_sent_it_and_the_others_get_it_from_them():
    holders = Holders()
    assert holders.ask("k", "a") == Send()
    assert holders.ask("k", "b") == Send()
    assert holders.ask("k", "c") == Wait(("a", "b"))
    holders.has("b", ["k"])
    assert holders.ask("k", "c") == Refer(("b",))
    holders.has("a", ["k"])
    # The one that was named less often comes first.
    assert holders.ask("k", "d") == Refer(("a", "b"))
    assert (holders.sends, holders.extra_sends) == (2, 0)


def test_at_most_three_are_named_and_they_take_turns():
    holders = Holders()
    members = ["a", "b", "c", "d", "e"]
    for member in members:
        holders.has(member, ["k", "l"])
    for key, name in itertools.product("kl", ("v", "w")):
        assert holders.ask(key, name) == Send()
    first = Counter()
    for number in range(50):
        answer = holders.ask("kl"[number % 2], f"asker {number}")
        assert len(answer.members) == 3
        first[answer.members[0]] += 1
    assert first == dict.fromkeys(members, 10)


def test_keys_have_holders_of_their_own():
    holders = Holders(copies=1)
    assert holders.ask("k", "a") == holders.ask("l", "a") == Send()
    holders.has("a", ["k"])
    assert holders.ask("k", "b") == Refer(("a",))
    assert holders.ask("l", "b") == Wait(("a",))
    holders.forget(["k"])
    assert holders.ask("k", "c") == Send()
    assert holders.extra_sends == 0


def test_a_holder_that_failed_is_not_named_to_who_says_so():
    holders = Holders(copies=1)
    holders.ask("k", "a")
    holders.has("a", ["k"])
    assert holders.ask("k", "b", failed={"a"}) == Send()
    assert holders.extra_sends == 1
    assert holders.ask("k", "c") == Refer(("a",))
    assert holders.ask("k", "c", failed={"a"}) == Wait(("b",))
    assert holders.ask("k", "c", failed={"a", "b"}) == Send()
    assert (holders.sends, holders.extra_sends) == (3, 2)


def test_when_all_have_left_the_trainer_sends_it_again():
    holders = Holders(copies=1)
    holders.ask("k", "a")
    assert holders.ask("k", "b") == Wait(("a",))
    holders.leave("a")
    assert holders.ask("k", "b") == Send()
    holders.has("b", ["k"])
    holders.leave("b")
    assert holders.ask("k", "c") == Send()
    assert holders.extra_sends == 2
    holders.leave("unknown")
    holders.forget(["unknown"])


def test_who_asks_again_was_not_sent_it():
    holders = Holders()
    assert [holders.ask("k", "a") for _ in range(3)] == [Send()] * 3
    assert holders.extra_sends == 1
    assert holders.ask("k", "b") == Wait(("a",))
    # Nor does a member wait for itself, or is it referred to itself.
    holders.has("b", ["k"])
    assert holders.ask("k", "b") == Wait(("a",))


def test_payloads_that_a_member_brings_along_are_relayed():
    holders = Holders(copies=1)
    holders.has("a", ["k"])
    assert holders.ask("k", "b") == Send()
    assert holders.ask("k", "c") == Refer(("a",))


def test_there_is_at_least_one_copy():
    with pytest.raises(ValueError, match="copies must be at least 1, got 0"):
        Holders(copies=0)


@pytest.mark.parametrize("seed", range(20))
def test_in_any_state_who_adds_to_failed_what_it_is_told_is_sent_it(seed):
    rng = np.random.default_rng(seed)
    holders = Holders(copies=int(rng.integers(1, 4)))
    members, keys = [f"m{i}" for i in range(8)], [f"k{i}" for i in range(4)]

    def pick(names):
        return names[rng.integers(0, len(names))]

    for _ in range(300):
        match rng.integers(0, 8):
            case 0:
                holders.leave(pick(members))
            case 1:
                holders.forget([pick(keys)])
            case 2 | 3:
                holders.has(pick(members), [pick(keys)])
            case 4 | 5 | 6:
                holders.ask(pick(keys), pick(members))
            case _:
                asker, key, failed = pick(members), pick(keys), set()
                for _ in range(len(members) + 1):
                    answer = holders.ask(key, asker, failed)
                    if answer == Send():
                        break
                    assert asker not in answer.members
                    assert failed.isdisjoint(answer.members)
                    failed |= set(answer.members)
                else:
                    pytest.fail("it was never sent")


class Simulation:
    """Members that want all payloads, in orders and with times of their own.

    A member has two streams. A transfer takes a random time, and fails if its sender is
    dead. A dead member leaves when its lease of 3 ends. A stalled member keeps its
    lease, and what it is sent never comes. Who waits asks again after 0.1, and gives up
    on the members that it waited for after 5.
    """

    def __init__(self, seed, members, keys, *, dead=0, stalled=0):
        self.rng = np.random.default_rng(seed)
        self.holders = Holders()
        self.members = [f"m{i}" for i in range(members)]
        self.keys = [f"k{i}" for i in range(keys)]
        self.got = {member: set() for member in self.members}
        self.sent_to = Counter()
        self.relayed_by = Counter()
        self.dead = set()
        self.now = 0.0
        self.events = []
        self.number = itertools.count()
        lot = [str(each) for each in self.rng.permutation(self.members)]
        dying, self.stalled = lot[:dead], set(lot[dead : dead + stalled])
        self.living = set(self.members) - set(dying) - self.stalled
        for member in dying:
            self.after(self.rng.uniform(0, keys / 2), self.die, member)
        for member in self.members:
            todo = [str(key) for key in self.rng.permutation(self.keys)]
            for _ in range(2):
                self.after(self.rng.uniform(0, 2), self.next, member, todo)

    def after(self, delay, action, *args):
        heapq.heappush(self.events, (self.now + delay, next(self.number), action, args))

    def run(self, most=200_000):
        for _ in range(most):
            if not self.events:
                return self
            self.now, _, action, args = heapq.heappop(self.events)
            action(*args)
        raise AssertionError("events without end")

    def die(self, member):
        self.dead.add(member)
        self.after(3, self.holders.leave, member)

    def next(self, member, todo):
        if todo:
            self.ask(member, todo.pop(), todo, frozenset(), self.now)

    def ask(self, member, key, todo, failed, since):
        if member in self.dead:
            return
        match self.holders.ask(key, member, failed):
            case Send():
                self.sent_to[key] += 1
                if member not in self.stalled:
                    self.after(self.rng.exponential(), self.receive, member, key, todo)
            case Refer(others):
                failed |= {others[0]}
                delay = self.rng.exponential()
                args = (others[0], member, key, todo, failed)
                self.after(delay, self.relay, *args)
            case Wait(others) if self.now - since > 5:
                self.ask(member, key, todo, failed | {*others}, self.now)
            case Wait(others):
                assert others
                self.after(0.1, self.ask, member, key, todo, failed, since)

    def relay(self, sender, member, key, todo, failed):
        if sender in self.dead:
            self.ask(member, key, todo, failed, self.now)
            return
        assert key in self.got[sender]
        self.relayed_by[sender] += 1
        self.receive(member, key, todo)

    def receive(self, member, key, todo):
        if member in self.dead:
            return
        self.got[member].add(key)
        self.holders.has(member, [key])
        self.next(member, todo)


@pytest.mark.parametrize("members", [1, 4, 8])
def test_twice_the_version_leaves_the_trainer_and_all_get_all(members):
    for seed in range(25):
        simulation = Simulation(seed, members, keys=40).run()
        assert all(len(got) == 40 for got in simulation.got.values())
        copies = min(members, 2)
        assert simulation.holders.sends == 40 * copies
        assert set(simulation.sent_to.values()) == {copies}
        assert simulation.holders.extra_sends == 0
        # Each member sends a fair share of the rest.
        rest = 40 * (members - copies)
        assert sum(simulation.relayed_by.values()) == rest
        assert all(
            count < 1.6 * rest / members for count in simulation.relayed_by.values()
        )


@pytest.mark.parametrize(("members", "dead"), [(4, 1), (4, 3), (8, 2), (8, 7)])
def test_those_that_live_finish_whoever_dies_midway(members, dead):
    extra = 0
    for seed in range(25):
        simulation = Simulation(seed, members, keys=40, dead=dead).run()
        for member in simulation.living:
            assert len(simulation.got[member]) == 40
        # Only for payloads that no living member had when somebody asked.
        assert simulation.holders.sends == simulation.sent_to.total()
        assert simulation.holders.extra_sends <= 40 * (dead - 1) + 4 * dead
        extra += simulation.holders.extra_sends
    assert (extra > 0) == (dead > 1)


@pytest.mark.parametrize("members", [4, 8])
def test_members_that_stall_hold_nobody_up_for_ever(members):
    for seed in range(15):
        simulation = Simulation(seed, members, keys=40, dead=1, stalled=2).run()
        for member in simulation.living:
            assert len(simulation.got[member]) == 40
        # Each of a stalled member's two streams took one send.
        assert simulation.holders.sends <= 2 * 40 + simulation.holders.extra_sends
        assert simulation.holders.extra_sends <= 3 * members


def test_the_same_calls_give_the_same_answers():
    runs = [Simulation(3, 8, keys=40, dead=2).run() for _ in range(2)]
    assert runs[0].sent_to == runs[1].sent_to
    assert runs[0].relayed_by == runs[1].relayed_by
    assert runs[0].now == runs[1].now
