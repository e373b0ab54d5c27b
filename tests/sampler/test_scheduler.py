"""Admission as pure decisions: order, sharing, sources and cancellation."""

import random

import pytest

from jaxrl_post.sampler import Request, SamplingParams
from jaxrl_post.sampler.scheduler import Scheduler


def request(prompt_id, num_samples=1, first_sample=0):
    return Request(prompt_id, (1, 2, 3), num_samples, first_sample)


def names(admissions):
    return [(a.request.prompt_id, a.sample_index) for a in admissions]


def test_samples_are_admitted_in_the_order_of_their_requests():
    scheduler = Scheduler(num_slots=3)
    assert not scheduler.busy
    for item in (request(9, 2), request(4, 2, first_sample=5), request(7)):
        scheduler.submit(item)
    assert scheduler.busy
    assert names(scheduler.admit()) == [(9, 0), (9, 1), (4, 5)]
    assert scheduler.admit() == []
    scheduler.release(1)
    assert names(scheduler.admit()) == [(4, 6)]
    for slot in list(scheduler.running):
        scheduler.release(slot)
    assert names(scheduler.admit()) == [(7, 0)]
    scheduler.release(0)
    assert not scheduler.busy


def test_slots_are_filled_lowest_first():
    scheduler = Scheduler(num_slots=3)
    scheduler.submit(request(1, 3))
    scheduler.admit()
    scheduler.release(2)
    scheduler.release(0)
    scheduler.submit(request(2, 2))
    assert [a.slot for a in scheduler.admit()] == [0, 2]


def test_a_sample_goes_where_its_prompt_still_is():
    scheduler = Scheduler(num_slots=2)
    scheduler.submit(request(1))
    scheduler.submit(request(2, 2))
    first, second = scheduler.admit()
    assert (first.slot, second.slot) == (0, 1)
    scheduler.release(0)
    scheduler.release(1)
    (third,) = scheduler.admit()
    # Slot 0 is lower, but slot 1 holds the prompt of request 2.
    assert (third.slot, third.source, third.prefill) == (1, 1, False)


def test_a_request_submitted_again_is_prefilled_again():
    """The parameters may have changed since; what the slot holds is theirs."""
    scheduler = Scheduler(num_slots=1)
    again = request(1)
    for _ in range(2):
        scheduler.submit(again)
        (admission,) = scheduler.admit()
        assert admission.prefill
        assert scheduler.release(admission.slot).request == again


@pytest.mark.parametrize("num_slots", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_laws_of_sharing_under_random_traffic(num_slots, seed):
    """One prefill a request; a copy's source runs and has it; FIFO; all are served."""
    rng = random.Random(seed)
    scheduler, prefills, served, expected = Scheduler(num_slots), [], [], []
    waiting = [request(i, rng.randint(1, 6)) for i in range(12)]
    while waiting or scheduler.busy:
        for _ in range(min(len(waiting), rng.randint(0, 3))):
            new = waiting.pop(0)
            expected += [(new.prompt_id, i) for i in range(new.num_samples)]
            scheduler.submit(new)
        before = set(scheduler.running)
        admissions = scheduler.admit()
        copies = {a.slot for a in admissions if a.slot != a.source}
        for admission in admissions:
            assert admission.slot not in before
            assert admission.source not in copies  # these are all made at once
            served.append((admission.request.prompt_id, admission.sample_index))
            if admission.prefill:
                prefills.append(admission.request.prompt_id)
                assert admission.source == admission.slot
            else:
                source = scheduler.running[admission.source]
                assert source.request.prompt_id == admission.request.prompt_id
        assert len(scheduler.running) <= num_slots
        for slot in [s for s in scheduler.running if rng.random() < 0.5]:
            scheduler.release(slot)
    assert served == expected
    assert prefills == list(range(12))


def test_cancel_returns_what_there_was_and_leaves_nothing():
    scheduler = Scheduler(num_slots=2)
    scheduler.submit(request(1, 3))
    scheduler.admit()
    assert [r.id for r in scheduler.cancel({(1, 0), (7, 0)})] == [(1, 0)]
    assert [(a.sample_index, a.slot) for a in scheduler.admit()] == [(2, 0)]
    scheduler.submit(request(3, 1))
    # By slot, then in the order of the queue.
    assert [r.id for r in scheduler.cancel()] == [(1, 2), (1, 1), (3, 0)]
    assert not scheduler.busy
    assert scheduler.admit() == []
    scheduler.submit(request(2, 2))
    assert [(a.slot, a.prefill) for a in scheduler.admit()] == [(0, True), (1, False)]


# Requests.


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, r"temperature must be >= 0; got -0\.1"),
        ("temperature", float("nan"), r"temperature must be >= 0; got nan"),
        ("top_k", -1, r"top_k must be >= 0 \(0 keeps all\); got -1"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\]; got 0\.0"),
        ("top_p", 1.1, r"top_p must be in \(0, 1\]; got 1\.1"),
        ("min_p", -0.1, r"min_p must be in \[0, 1\]; got -0\.1"),
        ("min_p", 1.5, r"min_p must be in \[0, 1\]; got 1\.5"),
        ("max_tokens", 0, r"max_tokens must be >= 1; got 0"),
        ("stop_strings", ("a", ""), r"stop_strings must be non-empty strings; got \("),
    ],
)
def test_bad_sampling_parameters_are_refused(field, value, message):
    with pytest.raises(ValueError, match=f"^SamplingParams: {message}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_id": -1}, r"prompt_id must lie in 0\.\.2\*\*32 - 1, .*; got -1"),
        ({"prompt_id": 2**32}, r"prompt_id must lie in .*; got 4294967296"),
        ({"first_sample": -1}, r"first_sample must lie in .*; got -1"),
        ({"num_samples": 0}, r"num_samples must be at least 1; got 0"),
    ],
)
def test_bad_requests_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"^Request: {message}"):
        Request(**{"prompt_id": 1, "prompt": (1,), **fields})


def test_what_truncates():
    assert not SamplingParams(temperature=0.7).truncates
    for params in (
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.1),
    ):
        assert params.truncates
