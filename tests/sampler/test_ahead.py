"""The device computes on while the host looks at the results of the burst before."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.jitted import shared_functions
from jaxrl_post.sampler.scheduler import Scheduler
from jaxrl_post.sharding import create_mesh
from jaxrl_post.tokens import Tokens
from tests import tiny
from tests.sampler.test_engine import assert_same_samples, detokenize, ids
from tests.tiers import daily

CONFIG = dataclasses.replace(tiny.CONFIG, max_length=128)
SIZES = EngineConfig(
    num_slots=8,
    max_prompt_tokens=64,
    max_tokens=32,
    steps_per_call=4,
    prefill_tokens=64,
    max_stop_ids=2,
)


@pytest.fixture(scope="module")
def params():
    return tiny.shared()


def make_engine(sizes=SIZES, **options):
    return Engine(CONFIG, sizes, detokenize=detokenize, **options)


def one_by_one(sizes=SIZES, **options):
    """An engine that starts no burst before the host has seen the one before."""
    engine = make_engine(sizes, **options)
    engine.scheduler.ahead = lambda burst: None
    return engine


def prompt(number, length):
    rng = np.random.default_rng([number, length])
    return tuple(rng.integers(0, 40, length).tolist())


SAMPLINGS = (
    SamplingParams(max_tokens=32),
    SamplingParams(temperature=0.7, max_tokens=21, stop_ids=(3, 8)),
    SamplingParams(top_k=7, max_tokens=13),
    SamplingParams(max_tokens=32, stop_strings=("7", "<1")),
)


def requests(samples=3):
    return [
        Request(number, prompt(number, 3 + 13 * number), samples, sampling=sampling)
        for number, sampling in enumerate(SAMPLINGS)
    ]


@pytest.fixture(scope="module")
def expected(params):
    done = one_by_one().generate(params, requests())
    reasons = {c.finish_reason for c in done}
    assert reasons == {"length", "stop", "stop_string"}
    return done


def watched(engine):
    """The calls of an engine: "decode" with what it begins with, and "look"."""
    calls, decode = [], engine._functions.decode

    def recorded(params, pages, rows, *rest, **static):
        result = decode(params, pages, rows, *rest, **static)
        calls.append(("decode", rows.progress.tokens, result[3].tokens))
        return result

    engine._functions.__dict__["decode"] = recorded
    return calls


def test_a_second_burst_begins_where_the_first_will_end(params):
    engine = make_engine()
    calls = watched(engine)
    sampling = SamplingParams(max_tokens=16)
    engine.submit(Request(1, prompt(1, 5), 8, sampling=sampling))
    for started in (2, 3, 4, 4):
        engine.dispatch(params)
        # Two are in flight: one that is looked at, one that runs meanwhile.
        assert len(calls) == started
        engine.collect()
    assert not engine.busy
    for (_, _, after), (_, begins, _) in itertools.pairwise(calls):
        assert begins is after
    # Sixteen tokens are four bursts, which the host knows beforehand.
    assert engine.decoded_rows == 16 * 8


def test_samples_are_those_of_one_burst_at_a_time(params, expected):
    assert_same_samples(make_engine().generate(params, requests()), expected)


@pytest.mark.parametrize(
    "change",
    [
        # Five slots are full as well.
        pytest.param({"num_slots": 2}, marks=pytest.mark.all),
        {"num_slots": 5, "steps_per_call": 3},
        {"steps_per_call": 1},
        {"steps_per_call": 20},
        {"cache_tokens": 16 * 16},
        {"prefill_tokens": 16},
    ],
    ids=str,
)
def test_whatever_waits_and_ends(params, expected, change):
    """Full slots, a full cache, prompts in chunks, and ends in any burst."""
    engine = make_engine(dataclasses.replace(SIZES, **change))
    assert_same_samples(engine.generate(params, requests()), expected)


@pytest.mark.parametrize("stop", ["stop", "stop_string"])
def test_what_ended_in_the_first_burst_is_whole_after_the_second(params, stop):
    """The next turn reads the keys of an answer that ended while a burst waited.

    Of a stop string only the host knows, so that the device has gone on.
    """
    (free,) = make_engine().generate(
        params, [Request(1, prompt(1, 5), sampling=SamplingParams(max_tokens=32))]
    )
    said = ids(free)
    last = next(i for i in range(5, 32) if said[i] not in said[:i])
    ends = SamplingParams(
        max_tokens=32,
        stop_ids=(said[last],) if stop == "stop" else (),
        stop_strings=(f"<{said[last]}>",) if stop == "stop_string" else (),
    )
    engine = make_engine()
    engine.submit(Request(1, prompt(1, 5), sampling=ends))
    engine.submit(Request(2, prompt(2, 9), 3, sampling=SAMPLINGS[0]))
    done = []
    while not any(c.prompt_id == 1 for c in done):
        done += engine.step(params)
    assert done[-1].finish_reason == stop
    assert ids(done[-1]) == said[: last + 1]
    # A burst is running in which the sample's row is idle, or has continued.
    assert engine._running
    before = engine.prefilled_tokens
    turn = Request(
        3,
        (*prompt(1, 5), *said[: last + 1], 4, 4, 4),
        2,
        sampling=SamplingParams(max_tokens=9),
    )
    engine.submit(turn)
    while engine.busy:
        done += engine.step(params)
    # A token that stops is not fed; one that completes a stop string may have been.
    new = engine.prefilled_tokens - before
    assert new == 4 if stop == "stop" else 1 <= new <= 3
    fresh = one_by_one().generate(params, [turn])
    assert_same_samples([c for c in done if c.prompt_id == 3], fresh)


def test_other_parameters_wait_for_what_is_under_way(params):
    engine = make_engine(dataclasses.replace(SIZES, recompute_cache=True))
    calls = watched(engine)
    engine.submit(Request(1, prompt(1, 5), 4, sampling=SamplingParams(max_tokens=32)))
    engine.step(params, version=1)
    changed = tiny.params(seed=1)
    engine.dispatch(changed, version=2)
    assert len(calls) == 2
    engine.collect()
    engine.dispatch(changed, version=2)
    assert len(calls) == 4
    (ended, *_) = engine.cancel()
    assert ended.tokens.versions.tolist() == [1] * 8 + [2] * 8


def test_parameters_may_be_donated_when_nothing_is_left():
    """The second burst may still be there, without rows: the host did not know."""
    params = tiny.params()
    sampling = SamplingParams(max_tokens=32)
    request = Request(1, prompt(1, 5), 4, sampling=sampling)
    (first, *_) = make_engine().generate(params, [request])
    stops = dataclasses.replace(sampling, stop_ids=(ids(first)[1],))
    halve = jax.jit(lambda tree: jax.tree.map(lambda x: x / 2, tree), donate_argnums=0)
    engine = make_engine()
    calls = watched(engine)
    for _ in range(3):
        engine.submit(dataclasses.replace(request, num_samples=1, sampling=stops))
        engine.step(params)
        assert not engine.busy
        assert len(calls) == 2
        expected = np.asarray(params.embedding) / 2
        params = jax.tree.map(lambda x: 2 * x, halve(params))
        np.testing.assert_array_equal(params.embedding, 2 * expected)
        calls.clear()


@pytest.mark.meshes
# Slots and heads are divided on both; tests/sampler has other meshes in other files.
@pytest.mark.parametrize("spec", daily(["dp4,tp2", "fsdp2,tp4"], ["dp4,tp2"]))
def test_on_a_mesh_each_shape_is_compiled_once(params, expected, spec):
    shared_functions.cache_clear()
    mesh = create_mesh(spec)
    engine = make_engine(mesh=mesh)
    jitted = engine._functions.decode
    calls = watched(engine)
    found = engine.generate(tiny.params(mesh=mesh), requests())
    assert_same_samples(found, expected)
    assert any(
        begins is after for (_, _, after), (_, begins, _) in itertools.pairwise(calls)
    )
    assert jitted._cache_size() == engine.compilations["decode"]


def test_nan_ends_a_sample_that_had_gone_on(params):
    """The device samples on from NaN; the host, which fails it, is a burst behind."""
    poisoned = params.replace(embedding=params.embedding.at[39].set(jnp.nan))
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    bad = Request(1, (2, 39, 4), 2, sampling=sampling)
    good = Request(2, (1, *([7] * 20)), 2, sampling=sampling)
    expected = one_by_one().generate(params, [good])
    assert all(39 not in ids(c) for c in expected)
    found = make_engine().generate(poisoned, [bad, good])
    assert [c.finish_reason for c in found] == ["failed"] * 2 + ["length"] * 2
    assert_same_samples(found[2:], expected)


# The scheduler's choice.


def started(num_samples=8, max_tokens=16, **sizes):
    scheduler = Scheduler(dataclasses.replace(SIZES, **sizes))
    sampling = SamplingParams(max_tokens=max_tokens)
    scheduler.submit(Request(1, (5,) * 10, num_samples, sampling=sampling))
    scheduler.prefill()
    burst = scheduler.burst()
    assert burst is not None
    return scheduler, burst


def advance(scheduler, burst, count=4):
    tokens = Tokens.generated(
        np.zeros(count, np.int32), np.zeros(count, np.float32), version=0
    )
    for sample in burst.rows[0]:
        if sample.own is not None:
            scheduler.advance(sample, tokens)


def test_pages_are_there_for_both_bursts():
    scheduler, burst = started(max_tokens=32, steps_per_call=12)
    following = scheduler.ahead(burst)
    assert following is not None
    assert [len(sample.own.pages) for sample in burst.rows[0]] == [2] * 8
    assert (burst.own_pages, following.own_pages) == (2, 2)
    advance(scheduler, burst, 12)
    third = scheduler.ahead(following)
    assert third is not None
    # 11 entries, and 21 to come.
    assert [len(sample.own.pages) for sample in burst.rows[0]] == [2] * 8
    advance(scheduler, third, 12)
    # 8 tokens are left, and the running burst samples them.
    assert scheduler.ahead(third) is None


def test_pages_of_a_prompt_may_go_while_another_sample_goes_on(params):
    # The third prompt needs the pages of the first, whose sample has ended. It is
    # computed in chunks, and meanwhile bursts of the second follow one another.
    config = dataclasses.replace(CONFIG, max_length=256)
    sizes = dataclasses.replace(
        SIZES, max_prompt_tokens=128, prefill_tokens=32, cache_tokens=208
    )
    asked = [
        Request(i, prompt(i, length), sampling=SamplingParams(max_tokens=most))
        for i, (length, most) in enumerate([(96, 2), (3, 32), (128, 2)])
    ]
    ahead, alone = Engine(config, sizes), Engine(config, sizes)
    alone.scheduler.ahead = lambda burst: None
    assert_same_samples(ahead.generate(params, asked), alone.generate(params, asked))
    # Some bursts did follow others unseen.
    assert ahead.decoded_rows == alone.decoded_rows


def test_no_burst_follows_that_could_sample_nothing():
    scheduler, burst = started(max_tokens=4)
    assert scheduler.ahead(burst) is None
    scheduler, burst = started(max_tokens=5)
    assert scheduler.ahead(burst) is not None


def test_a_smaller_batch_is_not_put_off():
    scheduler, burst = started(num_slots=32, num_samples=30)
    assert burst.slots == 32
    for sample in burst.rows[0][:5]:
        scheduler.release(sample)
    assert scheduler.ahead(burst) is not None
    scheduler.release(burst.rows[0][5])
    # 24 are left.
    assert scheduler.ahead(burst) is None


def test_samples_that_are_ready_are_not_put_off():
    scheduler, burst = started(num_samples=4)
    assert scheduler.ahead(burst) is not None
    scheduler.submit(Request(2, (6,) * 30, 1, sampling=SamplingParams(max_tokens=8)))
    # It waits in the queue, and a burst may end a little earlier for it.
    following = scheduler.ahead(burst)
    assert following is not None
    assert (burst.floor, following.floor) == (0, 3)
    scheduler.prefill()
    assert scheduler.ahead(burst) is None


def test_a_burst_without_samples_is_known():
    scheduler, burst = started(num_samples=2)
    assert scheduler.has(burst)
    for sample in burst.rows[0]:
        scheduler.release(sample)
    assert not scheduler.has(burst)
