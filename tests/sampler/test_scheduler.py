"""Tests of the scheduler's pure decisions: starts, chunks, bursts, cancels."""

import dataclasses
import random

import numpy as np
import pytest

from jaxrl_post.sampler import EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.scheduler import Scheduler
from jaxrl_post.tokens import Tokens

SIZES = EngineConfig(
    num_slots=3, max_prompt_tokens=40, max_tokens=8, steps_per_call=4, prefill_tokens=64
)


def request(prompt_id, num_samples=1, first_sample=0, *, length=3, max_tokens=8):
    """No two prompts begin alike."""
    return Request(
        prompt_id,
        (prompt_id,) * length,
        num_samples,
        first_sample,
        SamplingParams(max_tokens=max_tokens),
    )


def names(samples):
    return [(s.request.prompt_id, s.sample_index) for s in samples]


def sampled(scheduler, burst, steps=4):
    """Every sample of a burst samples some tokens; those that are done are released."""
    ended = []
    for sample in [s for part in burst.rows for s in part]:
        count = min(steps, sample.remaining)
        ids = np.arange(count, dtype=np.int32)
        tokens = Tokens.generated(ids, np.zeros(count, np.float32), version=0)
        scheduler.advance(sample, tokens)
        if not sample.remaining:
            ended.append(scheduler.release(sample))
    return ended


def started(scheduler):
    scheduler.prefill()
    return names(scheduler.running)


def test_samples_start_in_the_order_of_their_requests():
    scheduler = Scheduler(SIZES)
    assert not scheduler.busy
    for item in (request(9, 2), request(4, 2, first_sample=5), request(7)):
        scheduler.submit(item)
    assert scheduler.busy
    assert started(scheduler) == [(9, 0), (9, 1), (4, 5)]
    assert started(scheduler) == [(9, 0), (9, 1), (4, 5)]
    scheduler.release(scheduler.running[1])
    assert started(scheduler) == [(9, 0), (4, 5), (4, 6)]
    for sample in list(scheduler.running):
        scheduler.release(sample)
    assert started(scheduler) == [(7, 0)]
    scheduler.release(scheduler.running[0])
    assert not scheduler.busy
    assert scheduler.prefill() == []
    assert scheduler.burst() is None


def test_a_prompt_is_prefilled_once_and_read_once():
    scheduler = Scheduler(dataclasses.replace(SIZES, num_slots=8))
    scheduler.submit(request(1, 5, length=20))
    scheduler.submit(request(2, 3, length=7))
    chunks = scheduler.prefill()
    assert [(c.segment.tokens, c.first, c.size) for c in chunks] == [
        ([1] * 20, 0, 20),
        ([2] * 7, 0, 7),
    ]
    burst = scheduler.burst()
    assert burst is not None
    assert [rows for _, rows in burst.groups[0]] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert (burst.slots, burst.num_groups, burst.members) == (8, 2, 8)
    # The prompts, and a page for each sample.
    assert scheduler.used_pages == 2 + 1 + 8


def test_a_long_prompt_does_not_hold_up_the_others():
    sizes = dataclasses.replace(SIZES, prefill_tokens=16)
    scheduler = Scheduler(sizes)
    scheduler.submit(request(1, length=40))
    scheduler.submit(request(2, length=5))
    assert [(c.first, c.size) for c in scheduler.prefill()] == [(0, 16), (0, 5)]
    burst = scheduler.burst()
    assert burst is not None
    assert names(burst.rows[0]) == [(2, 0)]
    (chunk,) = scheduler.prefill()
    assert (chunk.first, chunk.size, [n for _, n in chunk.path]) == (16, 16, [16])
    assert [(c.first, c.size) for c in scheduler.prefill()] == [(32, 8)]
    burst = scheduler.burst()
    assert burst is not None
    assert names(burst.rows[0]) == [(1, 0), (2, 0)]


def test_a_prompt_waits_for_the_beginning_that_it_shares():
    """Entries that it reads must have been computed by an earlier call."""
    scheduler = Scheduler(dataclasses.replace(SIZES, prefill_tokens=16))
    system = tuple(range(100, 120))
    for i in range(2):
        prompt = (*system, *([i] * 4))
        scheduler.submit(Request(i, prompt, sampling=SamplingParams(max_tokens=8)))
    scheduler.submit(request(7))
    chunks = scheduler.prefill()
    # The second prompt reads 20 tokens of the first one; 16 of them are computed.
    assert [(c.segment.tokens[-1], c.size, c.wave) for c in chunks] == [
        (0, 16, 0),
        (7, 3, 0),
    ]
    chunks = scheduler.prefill()
    assert [(c.first, c.size, c.wave) for c in chunks] == [(16, 8, 0), (0, 4, 1)]
    assert [count for _, count in chunks[1].path] == [20]
    assert scheduler.prefilled_tokens == 16 + 3 + 8 + 4


def test_the_batch_shrinks_and_ends_early_to_do_so():
    sizes = dataclasses.replace(SIZES, num_slots=32)
    scheduler = Scheduler(sizes)
    for i in range(32):
        scheduler.submit(request(i, max_tokens=4 if i < 20 else 8))
    scheduler.prefill()
    burst = scheduler.burst()
    assert burst is not None
    assert (burst.slots, burst.floor, burst.members) == (32, 24, 1)
    sampled(scheduler, burst)
    assert scheduler.prefill() == []
    burst = scheduler.burst()
    assert burst is not None
    assert (burst.slots, burst.floor) == (12, 8)
    # While samples wait, a burst also ends when an eighth of the slots is free.
    for i in range(32, 64):
        scheduler.submit(request(i))
    scheduler.prefill()
    burst = scheduler.burst()
    assert burst is not None
    assert (burst.slots, burst.floor) == (32, 28)


def test_samples_wait_while_the_cache_is_full():
    sizes = dataclasses.replace(SIZES, num_slots=8)
    needed = sizes.pages_per_sample
    scheduler = Scheduler(dataclasses.replace(sizes, cache_tokens=16 * (needed + 1)))
    for i in range(3):
        scheduler.submit(request(i, 2, length=40))
    # A prompt of three pages and a page for each of its samples; then one more page.
    assert started(scheduler) == [(0, 0), (0, 1)]
    while (burst := scheduler.burst()) is not None:
        sampled(scheduler, burst)
    assert started(scheduler) == [(1, 0), (1, 1)]
    assert scheduler.prefilled_tokens == 80


def test_a_cache_that_is_too_small_is_refused():
    small = dataclasses.replace(SIZES, cache_tokens=64)
    with pytest.raises(
        ValueError, match=r"does not hold one sample of 40 .* 8 .* at least 80"
    ):
        Scheduler(small)
    enough = dataclasses.replace(SIZES, cache_tokens=80)
    with pytest.raises(
        ValueError, match=r"in each of 3 parts of the mesh; .* least 240"
    ):
        Scheduler(enough, 3)
    assert Scheduler(enough).busy is False


def test_what_a_part_of_the_cache_holds_is_found_there():
    sizes = dataclasses.replace(SIZES, num_slots=4)
    scheduler = Scheduler(sizes, split=2)
    scheduler.submit(request(1, 2))
    scheduler.submit(request(2, 2))
    scheduler.prefill()
    assert [s.part for s in scheduler.running] == [0, 0, 1, 1]
    assert scheduler.prefilled_tokens == 6
    # A group that a part cannot hold is spread, and its prompt is in both.
    other = Scheduler(sizes, split=2)
    other.submit(request(1, 4))
    other.prefill()
    assert [s.part for s in other.running] == [0, 0, 1, 1]
    assert other.prefilled_tokens == 6


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("cache_pages", [0, 12])
@pytest.mark.parametrize("seed", range(5))
def test_laws_under_random_traffic(split, cache_pages, seed):
    """In order, all are served, no prompt twice, no page of two segments."""
    rng = random.Random(seed)
    sizes = dataclasses.replace(
        SIZES, num_slots=6, cache_tokens=16 * cache_pages, prefill_tokens=16
    )
    scheduler = Scheduler(sizes, split)
    waiting = [
        request(
            i,
            rng.randint(1, 6),
            length=rng.randint(1, 40),
            max_tokens=rng.randint(1, 8),
        )
        for i in range(12)
    ]
    expected = [(r.prompt_id, k) for r in waiting for k in range(r.num_samples)]
    begun, ended, rounds = [], [], 0
    while waiting or scheduler.busy:
        rounds += 1
        assert rounds < 500, "nothing moves"
        for _ in range(min(len(waiting), rng.randint(0, 3))):
            scheduler.submit(waiting.pop(0))
        before = names(scheduler.running)
        scheduler.prefill()
        begun += [name for name in names(scheduler.running) if name not in before]
        for part in range(split):
            segments = {
                segment
                for sample in scheduler.running
                if sample.part == part
                for segment in (*(s for s, _ in sample.path), sample.own)
            }
            pages = [page for segment in segments for page in segment.pages]
            assert len(set(pages)) == len(pages)
            assert sum(s.part == part for s in scheduler.running) <= 6 // split
        burst = scheduler.burst()
        if burst is None:
            continue
        assert burst.floor < max(map(len, burst.rows)) <= burst.slots
        for part, rows in zip(burst.groups, burst.rows, strict=True):
            read = sorted(row for _, members in part for row in members)
            assert read == list(range(len(rows)))
            assert len(part) <= burst.num_groups
            assert all(len(members) <= burst.members for _, members in part)
        ended += names(sampled(scheduler, burst, rng.randint(1, 4)))
    assert begun == expected
    assert sorted(ended) == expected
    for tree in scheduler.trees:
        tree.forget()
        assert tree.free == tree.room() == sizes.num_pages(split) // split


def test_new_parameters_prefill_anew_and_may_restart_what_runs():
    scheduler = Scheduler(dataclasses.replace(SIZES, prefill_tokens=16))
    scheduler.submit(request(1, length=10))
    scheduler.submit(request(2, length=40))
    scheduler.prefill()
    burst = scheduler.burst()
    assert burst is not None
    sampled(scheduler, burst)
    scheduler.forget(restart=False)
    # The first continues; the second, whose prompt was partly computed, begins again.
    assert names(scheduler.running) == [(1, 0)]
    assert [(c.first, c.size) for c in scheduler.prefill()] == [(0, 16)]
    scheduler.forget(restart=True)
    assert names(scheduler.running) == []
    first, second = scheduler.prefill()
    assert first.segment.tokens == [1] * 10 + [0, 1, 2, 3]
    assert second.segment.tokens == [2] * 40


def test_cancel_returns_what_there_was_and_leaves_nothing():
    scheduler = Scheduler(dataclasses.replace(SIZES, num_slots=2))
    scheduler.submit(request(1, 3))
    scheduler.prefill()
    assert names(scheduler.cancel({(1, 0), (7, 0)})) == [(1, 0)]
    assert started(scheduler) == [(1, 1), (1, 2)]
    scheduler.submit(request(3, 1))
    # Running requests, then the queue.
    assert names(scheduler.cancel()) == [(1, 1), (1, 2), (3, 0)]
    assert not scheduler.busy
    assert scheduler.prefill() == []
    assert all(tree.promised == 0 for tree in scheduler.trees)


# Requests.


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, r"temperature must be in \[0, 3.4e38\]; got -0\.1"),
        ("temperature", float("nan"), r"temperature must be in \[0, 3.4e38\]; got nan"),
        ("top_k", -1, r"top_k must be in \[0, 2\*\*31\) \(0 keeps all\); got -1"),
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
