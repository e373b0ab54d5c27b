"""Leases: what samplers are granted, what of their news counts, and what is lost."""

import itertools
import math

import numpy as np
import pytest

from jaxrl_post.fleet.leases import Leases, UnknownSamplerError
from jaxrl_post.fleet.ledger import Member
from jaxrl_post.fleet.orders import Grant, News, PolicyVersion, Progress, Revoke
from jaxrl_post.sampler.requests import (
    MOST_ALTERNATIVES,
    Alternatives,
    Request,
    SamplingParams,
)
from jaxrl_post.tokens import Tokens

FIRST, SECOND = PolicyVersion(1, "one"), PolicyVersion(2, "two")


def request(prompt_id: int = 7, count: int = 1, first: int = 0, **sampling) -> Request:
    chosen = SamplingParams(**{"max_tokens": 8, **sampling})
    return Request(prompt_id, (1, 2), count, first, chosen)


def tokens(*ids: int, version: int = 1) -> Tokens:
    return Tokens.generated(ids, [-0.5] * len(ids), version=version)


class Side:
    """A sampler's side, without losses."""

    def __init__(
        self, leases: Leases, name: str, slots: int = 4, ready=("one",), now=0.0
    ) -> None:
        self.leases, self.name = leases, name
        self.epoch = leases.join(name, "", slots, now)
        self.acknowledged = self.number = 0
        if ready:
            self.tell(ready=ready, now=now)

    def ask(self, now: float = 0.0) -> list:
        """Its next orders."""
        found = self.leases.orders(self.name, self.epoch, self.acknowledged, now)
        self.acknowledged = max([self.acknowledged, *[number for number, _ in found]])
        return [order for _, order in found]

    def tell(self, *progress: Progress, ready=("one",), now=0.0, refused=()) -> None:
        """Its next news."""
        self.number += 1
        why = dict.fromkeys(refused, "it is wrong")
        news = News(self.number, "", tuple(ready), why, progress)
        self.leases.hear(self.name, self.epoch, news, now)

    def samples(self, now: float = 0.0) -> list[tuple[int, int]]:
        """The samples that its next orders grant."""
        return [
            (order.request.prompt_id, order.request.first_sample + index)
            for order in self.ask(now)
            if isinstance(order, Grant)
            for index in range(order.request.num_samples)
        ]

    @property
    def member(self) -> Member:
        """The trainer's entry of it."""
        return self.leases.member(self.name, self.epoch)


def part(lease: int, index: int, start: int, *ids: int, **end) -> Progress:
    return Progress(lease, index, start, tokens(*ids), **end)


# The life of a sample.


def test_a_sample_is_granted_told_and_ended():
    leases = Leases()
    leases.submit(request(count=2), FIRST, job=3)
    side = Side(leases, "a")
    assert side.ask() == [Grant(2, FIRST, 3, request(count=2))]
    assert side.ask() == []
    side.tell(part(2, 0, 0, 5, 6), part(2, 1, 0, 9, finish_reason="stop"))
    (first,) = leases.unfinished()
    assert (first.prompt_id, first.sample_index) == (7, 0)
    assert first.tokens == tokens(5, 6)
    (done,) = leases.take()
    assert (done.prompt_id, done.sample_index, done.finish_reason) == (7, 1, "stop")
    assert done.tokens == tokens(9)
    assert leases.busy
    assert not leases.has_finished
    side.tell(part(2, 0, 2, finish_reason="failed", error="not finite", refused=True))
    (done,) = leases.take()
    assert (done.error, done.refused, done.tokens) == ("not finite", True, tokens(5, 6))
    assert not leases.busy
    assert leases.counts == {"joins": 1, "deaths": 0, "takeovers": 0, "stale_news": 0}


def test_orders_come_until_they_are_acknowledged_and_news_count_once():
    leases = Leases()
    leases.submit(request(), FIRST, 1)
    leases.join("a", "", 1, 0.0)
    news = [News(1, ready=("one",)), News(2, progress=[part(2, 0, 0, 5)])]
    leases.hear("a", 1, news[0], 0.0)
    for _ in range(3):
        assert leases.orders("a", 1, 0, 0.0) == [(1, Grant(2, FIRST, 1, request()))]
    leases.cancel()
    leases.submit(request(), FIRST, 1)
    leases.hear("a", 1, news[0], 0.0)
    expected = [(2, Revoke(2, (0,))), (3, Grant(3, FIRST, 1, request()))]
    assert leases.orders("a", 1, 1, 0.0) == expected
    # The lease has ended.
    leases.hear("a", 1, news[1], 0.0)
    assert leases.counts["stale_news"] == 1
    assert not leases.unfinished()
    for _ in range(2):
        leases.hear("a", 1, News(3, progress=[part(3, 0, 0, 5)]), 0.0)
    assert leases.unfinished()[0].tokens == tokens(5)


def test_another_sampler_goes_on_where_one_has_died():
    leases = Leases()
    leases.submit(request(count=2, min_tokens=2), FIRST, 1)
    dead, other = Side(leases, "a", 2), Side(leases, "b", 2)
    assert dead.samples() == [(7, 0), (7, 1)]
    dead.tell(part(3, 1, 0, 5, 6, 4))
    leases.lost("a", dead.epoch, "its connection broke")
    rest = Request(
        7, (1, 2, 5, 6, 4), 1, 1, SamplingParams(max_tokens=5, min_tokens=2), 3
    )
    fresh = request(count=1, min_tokens=2)
    assert other.ask() == [Grant(4, FIRST, 1, fresh), Grant(5, FIRST, 1, rest)]
    with pytest.raises(UnknownSamplerError, match="join again"):
        dead.tell(part(3, 1, 3, 8))
    other.tell(part(5, 1, 0, 7, finish_reason="stop"))
    assert leases.take()[0].tokens == tokens(5, 6, 4, 7)
    assert leases.counts == {"joins": 2, "deaths": 1, "takeovers": 2, "stale_news": 0}


def test_a_silent_sampler_is_given_up_unless_its_connection_is_open():
    leases = Leases(silence_s=5.0)
    leases.submit(request(), FIRST, 1)
    side = Side(leases, "a")
    side.ask(now=1.0)
    side.member.present = True
    assert leases.expire(100.0) == []
    side.member.present = False
    assert leases.expire(6.0) == []
    assert leases.expire(6.1) == ["a"]
    assert leases.counts["deaths"] == 1
    # One of an earlier epoch changes nothing.
    again = Side(leases, "a", now=7.0)
    leases.lost("a", side.epoch, "its connection broke")
    assert again.samples(now=7.0) == [(7, 0)]


def test_a_sampler_of_the_same_name_has_ended():
    leases = Leases()
    leases.submit(request(), FIRST, 1)
    old = Side(leases, "a")
    assert old.samples() == [(7, 0)]
    new = Side(leases, "a")
    with pytest.raises(UnknownSamplerError):
        old.ask()
    assert new.samples() == [(7, 0)]
    assert leases.counts["takeovers"] == 1


def test_a_sample_that_nobody_took_over_is_no_takeover():
    leases = Leases()
    leases.submit(request(), FIRST, 1)
    side = Side(leases, "a")
    side.ask()
    leases.leave("a", "it was stopped")
    leases.cancel()
    assert leases.counts["takeovers"] == 0
    # Nor is one that comes back to who gave it up.
    leases.submit(request(), FIRST, 1)
    side = Side(leases, "b")
    (grant,) = side.ask()
    side.tell(part(grant.lease, 0, 0, 5, finish_reason="cancelled"))
    (again,) = side.ask()
    assert again.request.prompt == (1, 2, 5)
    assert leases.counts["takeovers"] == 0


# News that a sampler may not tell.


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (part(2, 0, 1, 5), "from 1 on, 0 are known"),
        (Progress(2, 0, 0, tokens(5, version=2)), "of versions .2., not of 1"),
        (part(2, 0, 0, *range(9)), "9 tokens of at most 8"),
        (part(2, 0, 0, *range(8)), "all of 8 tokens, and not that it has ended"),
        (part(2, 0, 0, *range(8), finish_reason="cancelled"), "not that it has"),
        (part(2, 0, 0, 5, alternatives=Alternatives.none()), "alternatives or not"),
    ],
)
def test_news_that_cannot_be_are_refused_and_nothing_is_lost(told, why):
    leases = Leases()
    leases.submit(request(), FIRST, 1)
    side = Side(leases, "a")
    side.ask()
    with pytest.raises(UnknownSamplerError, match=why):
        side.tell(told)
    assert "a" not in leases.members
    assert Side(leases, "b").samples() == [(7, 0)]
    assert not leases.unfinished()


def test_news_that_are_missing_are_noticed():
    leases = Leases()
    side = Side(leases, "a")
    with pytest.raises(UnknownSamplerError, match="news 2 are missing"):
        leases.hear("a", side.epoch, News(3), 0.0)
    assert not leases.members


def test_orders_that_were_not_given_are_not_acknowledged():
    leases = Leases()
    leases.submit(request(), FIRST, 1)
    side = Side(leases, "a")
    side.acknowledged = 1
    with pytest.raises(UnknownSamplerError, match="was given 0 orders"):
        side.ask()
    assert Side(leases, "b").samples() == [(7, 0)]


def test_alternatives_are_joined_over_samplers():
    leases = Leases()
    leases.submit(request(alternatives=True), FIRST, 1)

    def others(*ids: int) -> Alternatives:
        wide = np.repeat(np.array(ids, np.int32)[:, None], MOST_ALTERNATIVES, 1)
        return Alternatives(wide, -wide.astype(np.float32))

    first = Side(leases, "a")
    first.ask()
    first.tell(part(2, 0, 0, 5, alternatives=others(5)))
    with pytest.raises(UnknownSamplerError, match="alternatives of 1 tokens of 2"):
        first.tell(part(2, 0, 1, 3, 3, alternatives=others(3)))
    second = Side(leases, "b")
    (grant,) = second.ask()
    second.tell(part(grant.lease, 0, 0, 6, 7, alternatives=others(6, 7)))
    (found,) = leases.cancel()
    assert found.tokens == tokens(5, 6, 7)
    assert found.alternatives.ids[:, 0].tolist() == [5, 6, 7]
    assert found.alternatives.logprobs[:, 3].tolist() == [-5, -6, -7]
    # As of an engine, if it has no tokens.
    leases.submit(request(alternatives=True), FIRST, 1)
    assert leases.cancel()[0].alternatives.ids.shape == (0, MOST_ALTERNATIVES)


def test_many_pieces_are_joined_in_order():
    leases = Leases()
    leases.submit(request(max_tokens=200), FIRST, 1)
    side = Side(leases, "a")
    side.ask()
    for at in range(100):
        side.tell(part(2, 0, at, at))
    assert leases.unfinished()[0].tokens == tokens(*range(100))


# The trainer.


def test_cancelled_samples_come_with_their_tokens_and_one_order_a_lease():
    leases = Leases()
    leases.submit(request(1, count=3), FIRST, 1)
    leases.submit(request(2, count=2), FIRST, 1)
    side = Side(leases, "a", slots=4)
    assert len(side.samples()) == 5
    side.tell(part(2, 2, 0, 5, 6))
    found = leases.cancel([(1, 2), (1, 0), (9, 9), (1, 2), (2, 1)])
    assert [(each.prompt_id, each.sample_index) for each in found] == [
        *((1, 2), (1, 0), (2, 1))
    ]
    assert [each.tokens for each in found] == [tokens(5, 6), tokens(), tokens()]
    assert {each.finish_reason for each in found} == {"cancelled"}
    assert side.ask() == [Revoke(2, (2, 0)), Revoke(3, (1,))]
    assert len(leases.cancel()) == 2
    assert side.member.running == 0
    assert not leases.busy


def test_a_request_is_queued_wholly_or_not_at_all():
    leases = Leases()
    leases.submit(request(count=1, first=2), FIRST, 1)
    with pytest.raises(ValueError, match=r"sample \(7, 2\) has not ended yet"):
        leases.submit(request(count=4), FIRST, 1)
    assert Side(leases, "a").samples() == [(7, 2)]


@pytest.mark.parametrize("slots", [0, -3])
def test_a_sampler_has_slots(slots: int):
    with pytest.raises(ValueError, match=f"slots >= 1; got {slots}"):
        Leases().join("a", "", slots, 0.0)


def test_nothing_is_granted_while_that_is_held():
    leases = Leases(held=True)
    leases.submit(request(), FIRST, 1)
    side = Side(leases, "a")
    assert side.ask() == []
    leases.held = False
    assert side.samples() == [(7, 0)]


# Policies and jobs.


def test_a_sampler_does_one_work_at_a_time_and_the_oldest_first():
    leases = Leases()
    leases.submit(request(1, 2), FIRST, 1)
    leases.submit(request(2, 2), FIRST, 2)
    leases.submit(request(3, 2), SECOND, 3)
    side = Side(leases, "a", ready=("one", "two"))
    assert side.samples() == [(1, 0), (1, 1)]
    side.tell(part(2, 0, 0, 5, finish_reason="stop"), ready=("one", "two"))
    assert side.ask() == []
    side.tell(part(2, 1, 0, 5, finish_reason="stop"), ready=("one", "two"))
    assert side.samples() == [(2, 0), (2, 1)]
    # A turn of the first job comes before what is younger.
    leases.submit(request(4), FIRST, 1)
    leases.submit(request(5), FIRST, 2)
    assert side.ask() == []
    done = [part(3, index, 0, 5, finish_reason="stop") for index in range(2)]
    side.tell(*done, ready=("one", "two"))
    assert side.samples() == [(4, 0)]


def test_a_policy_is_sampled_by_who_has_it():
    leases = Leases()
    leases.submit(request(1), SECOND, 1)
    leases.submit(request(2), FIRST, 1)
    refusing = Side(leases, "a", ready=("one",))
    refusing.tell(ready=("one", "two"), refused=("two",))
    assert ("refuse", "a", "it is wrong") in leases.happened
    assert refusing.samples() == [(2, 0)]
    late = Side(leases, "b", ready=())
    assert late.ask() == []
    late.tell(ready=("two",))
    assert late.samples() == [(1, 0)]


def test_a_sampler_helps_though_others_samples_wait():
    """No sampler is ready for the second policy; this does not keep it from helping."""
    leases = Leases()
    leases.submit(request(1, 5), FIRST, 1)
    leases.submit(request(2), SECOND, 2)
    assert len(Side(leases, "a", slots=4).samples()) == 5
    assert Side(leases, "b").samples() == [(1, 4)]


# Shares.


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_equal_samplers_get_equal_shares_but_for_a_prompt(count: int, size: int):
    for prompts, order in itertools.product((1, count, 2 * count + 1, 12), (1, -1)):
        leases = Leases()
        for prompt in range(prompts):
            leases.submit(request(prompt, size), FIRST, 1)
        sides = [Side(leases, f"s{k}", slots=96) for k in range(count)]
        found = [list[tuple[int, int]]() for _ in sides]
        for _ in range(prompts):
            for side, samples in list(zip(sides, found, strict=True))[::order]:
                samples += side.samples()
        sizes = [len(samples) for samples in found]
        assert sum(sizes) == prompts * size
        assert max(sizes) - min(sizes) <= size
        # Each prompt is with one sampler.
        homes = {prompt for samples in found for prompt, _ in samples}
        assert sum(len({p for p, _ in samples}) for samples in found) == len(homes)


def test_samplers_are_full_while_more_waits():
    leases = Leases()
    leases.submit(request(count=100), FIRST, 1)
    # A share of the slots, at least one sample, waits at the sampler.
    for slots, granted in ((1, 2), (4, 5), (8, 10), (16, 20)):
        assert len(Side(leases, f"{slots} slots", slots).samples()) == granted


def test_a_prompt_goes_back_to_its_sampler_and_elsewhere_if_that_is_full_or_gone():
    leases = Leases()
    leases.submit(request(1, 2), FIRST, 1)
    first = Side(leases, "a", slots=2)
    assert first.samples() == [(1, 0), (1, 1)]
    second = Side(leases, "b", slots=2)
    first.tell(part(2, 0, 0, 5, finish_reason="stop"))
    # The next turn: the first sampler has a slot.
    leases.submit(request(1), FIRST, 1)
    assert second.ask() == []
    assert first.samples() == [(1, 0)]
    # It has none.
    leases.submit(request(1, first=2), FIRST, 1)
    assert second.samples() == [(1, 2)]
    # It is gone.
    leases.submit(request(1, first=3), FIRST, 1)
    leases.leave("b", "it was stopped")
    third = Side(leases, "c", slots=8)
    assert third.samples() == [(1, 2), (1, 3)]
    leases.forget_homes()
    leases.submit(request(1, first=4), FIRST, 1)
    assert first.ask() == []
    assert third.samples() == [(1, 4)]
    # It has no more the policy.
    third.tell(ready=())
    leases.submit(request(1, first=5), FIRST, 1)
    assert Side(leases, "d", slots=8).samples() == [(1, 5)]


def test_prompts_that_were_begun_and_lost_come_first():
    leases = Leases()
    leases.submit(request(1, 2), FIRST, 1)
    first = Side(leases, "a", slots=1)
    assert first.samples() == [(1, 0), (1, 1)]
    for prompt in (2, 3):
        leases.submit(request(prompt, 2), FIRST, 1)
    leases.leave("a", "it was stopped")
    assert Side(leases, "b", slots=1).samples() == [(1, 0), (1, 1)]


def test_a_share_is_kept_for_a_while_for_who_is_about_to_be_ready():
    leases = Leases()
    leases.submit(request(1, 2), FIRST, 1)
    sides = [Side(leases, name, slots=8) for name in "ab"]
    for side in sides:
        for order in side.ask():
            done = [part(order.lease, i, 0, 5, finish_reason="stop") for i in (0, 1)]
            side.tell(*done, now=1.0)
        leases.submit(request(2, 2), FIRST, 1)
    assert all(side.member.measured for side in sides)
    for prompt in range(4):
        leases.submit(request(10 + prompt, 2), SECOND, 2)
    sides[0].tell(ready=("two",))
    assert sides[0].samples(now=10.0) == [(10, 0), (10, 1), (11, 0), (11, 1)]
    assert sides[0].samples(now=14.9) == []
    assert len(sides[0].samples(now=15.1)) == 4


def test_no_share_is_kept_for_who_refuses():
    leases = Leases()
    sides = [running(leases, name, 8, 4.0) for name in "ab"]
    leases.submit(request(1, 4), SECOND, 2)
    leases.submit(request(2, 4), SECOND, 2)
    sides[1].tell(refused=("two",))
    sides[0].tell(ready=("two",))
    assert len(sides[0].samples(now=2.0)) == 8


# Paces, and samples that are taken over.


def running(leases: Leases, name: str, slots: int, pace: float, now=1.0) -> Side:
    """A sampler of known pace that has drawn a sample."""
    leases.submit(request(1000 + len(leases.members), max_tokens=999), FIRST, 0)
    side = Side(leases, name, slots)
    (grant,) = side.ask()
    count = int(pace * now)
    ids = range(count)
    end = {"finish_reason": "stop"}
    side.tell(Progress(grant.lease, 0, 0, tokens(*ids), **end), now=now)
    leases.take()
    return side


def test_a_pace_is_tokens_a_second_of_a_sample():
    member = Member("a", "", 4, 1, 0.0)
    assert math.isnan(member.pace(0.0))
    assert member.pace(0.0, usual=3.0) == 3.0
    member.begin(10.0)
    member.samples[1, 0] = object()
    # It has told nothing for as long as paces are remembered.
    assert member.pace(20.0, usual=3.0) == 1.5
    assert not member.measured
    member.count(40, 2, 14.0)
    assert member.pace(14.0) == 5.0
    # News that were held up and come together do not change it.
    member.count(60, 2, 20.0)
    assert member.pace(20.0) == pytest.approx(5.0)
    member.count(10, 2, 20.0)
    assert 5.0 < member.pace(20.0) < 6.0
    # Old measurements count less.
    for now in range(21, 60):
        member.count(2, 2, float(now))
    assert member.pace(59.0) == pytest.approx(1.0, abs=0.2)
    assert member.pace(69.0) == member.pace(59.0) / 2
    # While it has nothing to do it keeps its pace.
    del member.samples[1, 0]
    assert member.pace(1000.0) == member.pace(59.0)
    member.begin(1000.0)
    member.samples[1, 0] = object()
    assert member.pace(1001.0) > 0.8


def test_a_late_sampler_gets_what_others_hold_and_have_not_begun():
    leases = Leases()
    leases.submit(request(1, 10), FIRST, 1)
    first = Side(leases, "a", slots=8)
    assert len(first.samples()) == 10
    first.tell(*[part(2, index, 0, 5) for index in range(8)])
    second = Side(leases, "b", slots=8)
    assert second.samples() == [(1, 8), (1, 9)]
    assert first.ask() == [Revoke(2, (9, 8))]
    assert ("move", "a", "2 samples to b") in leases.happened
    assert leases.counts["takeovers"] == 2
    # And no more, of a sampler that is as fast.
    assert second.ask() == []
    assert Side(leases, "c").ask() == []


def test_a_late_sampler_gets_nothing_that_was_begun():
    leases = Leases()
    leases.submit(request(1, 10), FIRST, 1)
    first = Side(leases, "a", slots=8)
    first.ask()
    # In an order of its own.
    first.tell(*[part(2, index, 0, 5) for index in range(2, 10)])
    assert Side(leases, "b", slots=8).samples() == [(1, 0), (1, 1)]


def test_a_slow_sampler_takes_nothing_from_a_fast_one():
    leases = Leases()
    fast, slow = running(leases, "b", 4, 40.0), running(leases, "a", 4, 2.0)
    leases.submit(request(1, 5), FIRST, 0)
    assert len(fast.samples(1.0)) == 5
    assert slow.ask(1.0) == []
    # One that is about as fast takes the sample that waits.
    assert running(leases, "c", 4, 30.0).samples(1.0) == [(1, 4)]


def test_a_slow_sampler_is_relieved_as_far_as_slots_are_free():
    leases = Leases()
    slow = running(leases, "a", 4, 2.0)
    leases.submit(request(1, 5), FIRST, 0)
    (grant,) = slow.ask(1.0)
    slow.tell(*[part(grant.lease, index, 0, 5, 6) for index in range(3)], now=2.0)
    fast = running(leases, "b", 4, 40.0)
    # Samples that have not begun are chosen first; the others keep their tokens.
    *begun, fresh = fast.ask(2.0)
    assert (fresh.request.first_sample, fresh.request.num_samples) == (3, 2)
    assert [each.request.first_sample for each in begun] == [1, 2]
    assert {each.request.prompt for each in begun} == {(1, 2, 5, 6)}
    assert slow.ask(2.0) == [Revoke(grant.lease, (4, 3, 2, 1))]
    assert fast.ask(2.0) == []
    fast.tell(part(begun[0].lease, 1, 0, 5, finish_reason="stop"), now=2.1)
    assert fast.samples(2.1) == [(1, 0)]
    # The slow one has nothing left, and gets none of it back.
    assert slow.ask(2.1) == [Revoke(grant.lease, (0,))]
    assert slow.ask(2.2) == []
    assert leases.counts["takeovers"] == 5


def test_little_work_is_left_to_a_fast_sampler():
    leases = Leases()
    slow, fast = running(leases, "a", 4, 2.0), running(leases, "b", 4, 40.0)
    leases.submit(request(1, 3), FIRST, 0)
    leases.submit(request(2, 4), FIRST, 0)
    assert slow.samples(1.0) == []
    assert fast.samples(1.0) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    # The other two are drawn sooner if they wait for it.
    assert slow.samples(1.0) == []
    # The slow one has its part of very many.
    leases.submit(request(3, 100), FIRST, 0)
    assert len(slow.samples(1.0)) == 5


def test_a_sampler_that_hangs_is_relieved():
    leases = Leases()
    hung, other = running(leases, "a", 4, 10.0), running(leases, "b", 4, 10.0)
    leases.submit(request(1, 4), FIRST, 0)
    assert len(hung.samples(1.0)) == 4
    now = 1.0
    while not (moved := other.samples(now)):
        now += 0.25
    assert len(moved) == 4
    # As long as paces are remembered.
    assert 10.0 <= now < 12.0


def test_samples_do_not_move_back_and_forth():
    """Two samplers hang for an hour; each seems faster while it has nothing."""
    leases = Leases()
    sides = [running(leases, "a", 4, 10.0), running(leases, "b", 4, 10.0)]
    leases.submit(request(1), FIRST, 0)
    for now in range(3600):
        for side in sides:
            side.ask(float(now + 1))
    # The one that has it counts as half as fast after 10 s, as a quarter after 30 s ...
    assert leases.counts["takeovers"] == 7


def test_samplers_of_one_speed_leave_each_other_alone():
    leases = Leases()
    first, second = running(leases, "a", 4, 10.0), running(leases, "b", 4, 7.0)
    leases.submit(request(1, 4), FIRST, 0)
    assert len(first.samples(1.0)) == 4
    for now in (1.1, 1.3, 1.6):
        assert second.ask(now) == []
        told = [
            part(lease, index, sample.length, 5)
            for (lease, index), sample in first.member.samples.items()
        ]
        first.tell(*told, now=now)
