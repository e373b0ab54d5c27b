"""A sampler's side: orders in, progress out, one policy and one job in the engine."""

import numpy as np
import pytest

from jaxrl_post.fleet.orders import Grant, PolicyVersion, Progress, Revoke
from jaxrl_post.fleet.worker import OrderWorker
from jaxrl_post.sampler.port import Sampler
from jaxrl_post.sampler.requests import Completion, Request, SamplingParams
from tests.fleet.drawing import FOREIGN, Engine, same, undisturbed

FIRST, SECOND = PolicyVersion(1, "one"), PolicyVersion(2, "two")


def request(prompt_id: int = 1, count: int = 1, first: int = 0, **more) -> Request:
    sampling = SamplingParams(max_tokens=20, **more)
    return Request(prompt_id, (1, 2), count, first, sampling)


def worker(slots: int = 8, steps: int = 2) -> OrderWorker:
    return OrderWorker(
        {each.digest: Engine(*each[::-1], slots, steps) for each in (FIRST, SECOND)}
    )


def drained(worker: OrderWorker) -> list[Progress]:
    """Its progress until it has nothing to do."""
    found = list[Progress]()
    while worker.busy:
        found += worker.step()
    return found


def joined(progress: list[Progress], sample: Request, index: int) -> Completion:
    """The progress of a sample as one completion."""
    mine = [each for each in progress if each.index == index]
    tokens, others = mine[0].tokens, mine[0].alternatives
    for each in mine[1:]:
        assert each.start == len(tokens)
        tokens += each.tokens
        if others is not None:
            others += each.alternatives
    assert [each.finish_reason for each in mine[:-1]] == [None] * (len(mine) - 1)
    end = mine[-1]
    return Completion(
        sample.prompt_id, index, tokens, end.finish_reason, end.error, others
    )


def test_the_engine_of_the_tests_is_a_sampler():
    assert isinstance(Engine("one", 1, 4), Sampler)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_what_is_told_of_a_sample_is_the_sample(slots: int, asked: bool):
    work, wanted = worker(slots), request(count=3, first=4, alternatives=asked)
    work.order(Grant(9, FIRST, 1, wanted))
    told = drained(work)
    assert {each.lease for each in told} == {9}
    for index in (4, 5, 6):
        whole = undisturbed(wanted, index, "one", 1)
        assert same(joined(told, wanted, index), whole)
    # One after the other, if there is one slot.
    order = [each.index for each in told]
    assert (order == sorted(order)) == (slots == 1)


def test_tokens_have_the_version_of_their_lease():
    """A version with the bytes of an earlier one has its digest, and its engine."""
    work = worker()
    work.order(Grant(1, PolicyVersion(7, "one"), 1, request()))
    versions = {v for each in drained(work) for v in each.tokens.versions.tolist()}
    assert versions == {7}


def test_another_policy_or_job_waits_until_the_engine_is_empty():
    work = worker()
    orders = [(FIRST, 1), (FIRST, 1), (SECOND, 1), (SECOND, 2), (FIRST, 1)]
    for number, (policy, job) in enumerate(orders):
        work.order(Grant(number, policy, job, request(number, 2)))
    assert work.needed == {"one", "two"}
    spans = dict[int, list[int]]()
    for turn in range(99):
        # `Engine.renew` checks that nothing of the work before is in it.
        for each in work.step():
            spans.setdefault(each.lease, []).append(turn)
    assert sorted(spans) == [0, 1, 2, 3, 4]
    assert spans[0][0] == spans[1][0] == 0
    ends = max(spans[0][-1], spans[1][-1]), spans[2][-1], spans[3][-1]
    begins = spans[2][0], spans[3][0], spans[4][0]
    assert all(end < begin for end, begin in zip(ends, begins, strict=True))
    assert not work.busy
    assert work.needed == set()


def test_samples_are_stopped_wherever_they_are():
    work = worker(slots=2)
    work.order(Grant(1, FIRST, 1, request(1, 4)))
    work.order(Grant(2, SECOND, 1, request(2, 4)))
    told = work.step()
    assert not work.empty
    # In the engine, in a slot or not; in the queue; and of a lease that is not here.
    for each in (Revoke(1, (0, 3)), Revoke(2, (1, 2)), Revoke(5, (0,))):
        work.order(each)
    told += drained(work)
    assert {(e.lease, e.index) for e in told if e.finish_reason} == {
        *((1, 1), (1, 2), (2, 0), (2, 3))
    }
    assert "cancelled" not in {each.finish_reason for each in told}
    for lease, index, digest in ((1, 1, "one"), (2, 3, "two")):
        mine = [each for each in told if each.lease == lease]
        policy = FIRST if lease == 1 else SECOND
        whole = undisturbed(request(lease, 4), index, digest, policy.version)
        assert same(joined(mine, request(lease, 4), index), whole)


def test_a_sample_that_ends_while_others_are_stopped_is_told():
    work = worker(steps=30)
    work.order(Grant(1, FIRST, 1, request(1, 2)))
    work._begin()
    work._sampler.dispatch()
    # The burst that runs ends all of them; the one that was to be stopped is not told.
    work.order(Revoke(1, (0,)))
    (told,) = work.step()
    assert (told.index, told.finish_reason) == (1, "stop")
    assert not work.busy


def test_a_grant_that_is_stopped_whole_leaves_nothing():
    work = worker()
    work.order(Grant(1, FIRST, 1, request(1)))
    work.step()
    work.order(Grant(2, SECOND, 1, request(2, 2)))
    work.order(Revoke(2, (0, 1)))
    assert work.needed == {"one"}
    work.order(Revoke(1, (0,)))
    assert not work.busy
    assert work.empty


def test_a_sample_that_was_stopped_may_be_granted_again():
    work = worker()
    wanted = request(8)
    work.order(Grant(1, FIRST, 1, wanted))
    (told,) = work.step()
    work.order(Revoke(1, (0,)))
    rest = wanted.rest(0, told.tokens.ids.tolist())
    work.order(Grant(2, FIRST, 1, rest))
    more = drained(work)
    assert {each.lease for each in more} == {2}
    whole = undisturbed(wanted, 0, "one", 1)
    assert told.tokens + joined(more, wanted, 0).tokens == whole.tokens


def test_samples_of_a_policy_that_is_gone_are_given_back():
    work = worker()
    del work.policies["one"]
    work.order(Grant(1, FIRST, 1, request(1, 2)))
    work.order(Grant(2, SECOND, 1, request(2)))
    given, again, *rest = work.step()
    assert [given[:3], again[:3]] == [(1, 0, 0), (1, 1, 0)]
    assert {given.finish_reason, again.finish_reason} == {"cancelled"}
    assert len(given.tokens) == 0
    assert {each.lease for each in rest} == {2}


def test_a_request_that_the_engine_refuses_fails_alone():
    work = worker()
    bad = Request(3, (FOREIGN,), 2, sampling=SamplingParams(max_tokens=20))
    work.order(Grant(1, FIRST, 1, bad))
    work.order(Grant(2, FIRST, 1, request(2)))
    told = drained(work)
    failed = [each for each in told if each.lease == 1]
    assert [(each.index, each.finish_reason) for each in failed] == [
        *((0, "failed"), (1, "failed"))
    ]
    assert {(each.error, each.refused) for each in failed} == {("token 7777", False)}
    assert told[-1].finish_reason == "stop"


def test_a_worker_that_is_reset_has_no_orders():
    work = worker()
    work.order(Grant(1, FIRST, 1, request(1, 2)))
    work.step()
    work.order(Grant(2, SECOND, 1, request(2)))
    work.reset()
    assert not work.busy
    assert work.step() == []
    assert not work.policies["one"].busy
    # Its samples of before are not in the way.
    work.order(Grant(3, FIRST, 1, request(1, 2)))
    assert {each.lease for each in drained(work)} == {3}


def test_progress_has_no_tokens_that_were_told():
    work = worker(steps=1)
    work.order(Grant(1, FIRST, 1, request(count=4)))
    told = drained(work)
    assert all(len(each.tokens) or each.finish_reason for each in told)
    total = sum(len(each.tokens) for each in told)
    lengths = [len(undisturbed(request(), k, "one", 1).tokens) for k in range(4)]
    assert total == sum(lengths) > 8
    assert np.max(lengths) > np.min(lengths)
