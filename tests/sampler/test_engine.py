"""The engine: what is sampled depends on the request and the parameters alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.data.packing import Sequence, pack
from jaxrl_post.kernels.token_logprob import from_logits
from jaxrl_post.learner.step import Policy, predict
from jaxrl_post.models import RopeScaling, forward, logits
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.jitted import shared_functions
from jaxrl_post.sharding import MeshError, create_mesh
from jaxrl_post.tokens import Tokens
from tests import tiny

SIZES = EngineConfig(
    num_slots=4,
    max_prompt_tokens=24,
    max_tokens=24,
    steps_per_call=4,
    prefill_tokens=64,
    max_stop_ids=2,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def detokenize(ids):
    return "".join(f"<{index}>" for index in ids)


def make_engine(sizes=SIZES, **options):
    return Engine(tiny.CONFIG, sizes, detokenize=detokenize, **options)


@pytest.fixture(scope="module")
def params():
    return tiny.shared()


@pytest.fixture(scope="module")
def engine():
    """Compiled once for this file; every test leaves it idle."""
    shared_functions.cache_clear()
    return make_engine()


def prompt(length, seed=0):
    rng = np.random.default_rng([seed, length])
    return tuple(rng.integers(0, tiny.CONFIG.vocab_size, length).tolist())


def ids(completion) -> tuple[int, ...]:
    return tuple(completion.tokens.ids.tolist())


def tokens_of(completions):
    return {(c.prompt_id, c.sample_index): ids(c) for c in completions}


@functools.partial(jax.jit, static_argnames="config")
def next_logits(params, config, row, last):
    return logits(params, config, forward(params, config, row)[0, last])


def argmax_loop(params, prompt, count):
    """Tokens and log-probs of greedy decoding by whole forwards, without a cache."""
    row = np.zeros((1, SIZES.max_length), np.int32)
    row[0, : len(prompt)] = prompt
    logprobs, length = [], len(prompt)
    for at in range(length, length + count):
        scores = next_logits(params, tiny.CONFIG, row, at - 1)
        row[0, at] = np.argmax(scores)
        target = jnp.asarray(row[0, at])
        logprobs.append(float(from_logits(scores[None], target[None]).logprob[0]))
    return tuple(row[0, length : length + count].tolist()), logprobs


# Shortest, in between, a first burst whose last step needs entry 16 of a view of 16,
# exactly a bucket, longest; up to the last entry of a slot.
@pytest.mark.parametrize(
    ("length", "count"), [(1, 6), (5, 6), (14, 6), (16, 17), (24, 24)]
)
def test_greedy_equals_the_argmax_of_whole_forwards(engine, params, length, count):
    sampling = dataclasses.replace(GREEDY, max_tokens=count)
    request = Request(length, prompt(length), sampling=sampling)
    (completion,) = engine.generate(params, [request])
    tokens, logprobs = argmax_loop(params, request.prompt, count)
    assert ids(completion) == tokens
    np.testing.assert_allclose(
        completion.tokens.logprobs, logprobs, rtol=1e-5, atol=1e-5
    )
    assert completion.finish_reason == "length"
    assert completion.tokens.log_masses.tolist() == [0.0] * count
    assert completion.tokens.versions.tolist() == [0] * count
    assert completion.tokens.sampled.all()


def mixed_requests():
    """Lengths of two buckets, four kinds of sampling, more samples than slots."""
    kinds = [
        SamplingParams(temperature=0.7, max_tokens=9),
        SamplingParams(top_p=0.8, max_tokens=7),
        SamplingParams(top_k=5, min_p=0.05, max_tokens=5, stop_ids=(3, 8)),
        GREEDY,
    ]
    lengths = (3, 17, 8, 20, 1)
    return [
        Request(100 + i, prompt(length), 3, sampling=kinds[i % 4])
        for i, length in enumerate(lengths)
    ]


def assert_same_samples(actual, expected):
    assert tokens_of(actual) == tokens_of(expected)
    ordered = [
        sorted(found, key=lambda c: (c.prompt_id, c.sample_index))
        for found in (actual, expected)
    ]
    for left, right in zip(*ordered, strict=True):
        assert left.finish_reason == right.finish_reason
        for name in ("logprobs", "log_masses"):
            np.testing.assert_allclose(
                getattr(left.tokens, name),
                getattr(right.tokens, name),
                rtol=1e-5,
                atol=1e-5,
            )


@pytest.fixture(scope="module")
def mixed(engine, params):
    return engine.generate(params, mixed_requests())


def test_completions_come_in_the_order_of_requests(mixed):
    expected = [(100 + i, k) for i in range(5) for k in range(3)]
    assert [(c.prompt_id, c.sample_index) for c in mixed] == expected


def test_order_and_companions_do_not_matter(engine, params, mixed):
    again = engine.generate(params, mixed_requests()[::-1])
    assert_same_samples(again, mixed)
    # One sample alone, by its index.
    middle = dataclasses.replace(mixed_requests()[1], num_samples=1, first_sample=2)
    assert_same_samples(engine.generate(params, [middle]), mixed[5:6])


def test_slots_steps_and_a_restart_do_not_matter(params, mixed):
    other = make_engine(
        dataclasses.replace(SIZES, num_slots=7, steps_per_call=3, prefill_tokens=16)
    )
    assert_same_samples(other.generate(params, mixed_requests()), mixed)


def test_the_seed_and_the_prompt_id_are_the_noise(engine, params):
    sampling = SamplingParams(max_tokens=8)
    base = Request(1, prompt(4), 4, sampling=sampling)
    samples = engine.generate(params, [base])
    # No two samples of a group share their noise.
    assert len({ids(c) for c in samples}) == 4
    other_id = engine.generate(params, [dataclasses.replace(base, prompt_id=2)])
    assert not {ids(c) for c in samples} & {ids(c) for c in other_id}
    other_seed = make_engine(seed=1).generate(params, [base])
    assert not {ids(c) for c in samples} & {ids(c) for c in other_seed}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7, max_tokens=12),
        SamplingParams(temperature=1.3, top_p=0.7, max_tokens=12),
    ],
    ids=["0.7", "1.3, top-p"],
)
def test_logprobs_equal_the_trainers(engine, params, sampling):
    requests = [
        Request(i, prompt(n), 2, sampling=sampling) for i, n in enumerate((2, 9))
    ]
    done = engine.generate(params, requests)
    prompts = {r.prompt_id: r.prompt for r in requests}
    batch = pack(
        [
            Sequence(
                Tokens.context(prompts[c.prompt_id]) + c.tokens,
                np.zeros(len(prompts[c.prompt_id]) + len(c.tokens), np.float32),
            )
            for c in done
        ],
        length=48,
        row_multiple=1,
    )
    policy = Policy(tiny.CONFIG, sampling.temperature)
    batch = jax.tree.map(jnp.asarray, batch)
    scored = jax.jit(predict, static_argnums=0)(policy, params, batch).logprobs
    assert int(batch.loss_mask.sum()) == 48
    np.testing.assert_allclose(scored, batch.behavior_logprobs, rtol=1e-5, atol=1e-5)


def test_a_stop_id_is_the_last_token(engine, params):
    request = Request(1, prompt(5), 6, sampling=SamplingParams(max_tokens=12))
    free = engine.generate(params, [request])
    stops = (ids(free[0])[5], ids(free[1])[2])
    sampling = dataclasses.replace(request.sampling, stop_ids=stops)
    stopped = engine.generate(params, [dataclasses.replace(request, sampling=sampling)])
    for before, after in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(ids(before)) if token in stops]
        size = ends[0] + 1 if ends else 12
        assert ids(after) == ids(before)[:size]
        assert after.finish_reason == ("stop" if ends else "length")
    assert stopped[0].finish_reason == stopped[1].finish_reason == "stop"


def test_a_stop_string_cuts_at_the_token_that_completes_it(engine, params):
    """Bursts are of 4 tokens; strings end in each place of a burst, or span two."""
    base = Request(1, prompt(5), sampling=SamplingParams(max_tokens=12))
    (free,) = engine.generate(params, [base])
    text = detokenize(ids(free))
    for end in range(1, 12):
        two = detokenize(ids(free)[end - 1 : end + 1])
        stop = two[1:-2]  # without the brackets around the two
        if stop in text[: len(detokenize(ids(free)[:end]))]:
            continue
        sampling = SamplingParams(max_tokens=12, stop_strings=("never", stop))
        (cut,) = engine.generate(params, [dataclasses.replace(base, sampling=sampling)])
        assert cut.tokens == free.tokens[: end + 1]
        assert cut.finish_reason == "stop_string"


def test_a_slot_that_a_stop_string_freed_serves_the_next_sample(engine, params):
    base = Request(1, prompt(5), 11, sampling=SamplingParams(max_tokens=10))
    free = engine.generate(params, [base])
    stop = detokenize([ids(free[0])[1]])
    sampling = dataclasses.replace(base.sampling, stop_strings=(stop,))
    cut = engine.generate(params, [dataclasses.replace(base, sampling=sampling)])
    for before, after in zip(free, cut, strict=True):
        texts = [detokenize([token]) for token in ids(before)]
        size = texts.index(stop) + 1 if stop in texts else 10
        assert ids(after) == ids(before)[:size]
    assert sum(c.finish_reason == "stop_string" for c in cut) >= 2


def test_a_prompt_is_prefilled_once_however_many_samples(engine, params):
    before = engine.prefilled_tokens
    requests = [
        Request(i, prompt(n, seed=9), 6, sampling=SamplingParams(max_tokens=5))
        for i, n in enumerate((4, 18, 4))
    ]
    # The third prompt is the first one again.
    assert len(engine.generate(params, requests)) == 18
    assert engine.prefilled_tokens == before + 4 + 18


def test_a_request_reused_with_other_parameters_sees_them_in_its_prompt(engine, params):
    """The cache still holds the prompt as the former parameters saw it."""
    request = Request(1, prompt(9), 2, sampling=GREEDY)
    engine.generate(params, [request])
    changed = tiny.params(seed=1)
    tokens, logprobs = argmax_loop(changed, request.prompt, 6)
    for completion in engine.generate(changed, [request]):
        assert ids(completion) == tokens
        np.testing.assert_allclose(
            completion.tokens.logprobs, logprobs, rtol=1e-5, atol=1e-5
        )


def test_every_token_names_the_version_that_sampled_it(engine, params):
    """Two bursts are running when other parameters come, and keep their own."""
    request = Request(1, prompt(5), 5, sampling=SamplingParams(max_tokens=12))
    engine.submit(request)
    assert engine.step(params, version=3) == []
    changed = tiny.params(seed=1)
    assert engine.step(changed, version=4) == []
    done = engine.step(changed, version=4)
    assert [c.tokens.versions.tolist() for c in done] == [[3] * 8 + [4] * 4] * 4
    old = [c for _ in range(3) for c in engine.step(params)]  # the fifth sample
    assert [c.tokens.versions.tolist() for c in old] == [[0] * 12]
    (late, *_), kept = done, engine.generate(params, [request])
    assert ids(late)[:8] == ids(kept[0])[:8]
    assert late.tokens.logprobs[:8] == pytest.approx(
        kept[0].tokens.logprobs[:8], abs=1e-5
    )
    assert late.tokens.logprobs[8:] != pytest.approx(
        kept[0].tokens.logprobs[8:], abs=1e-2
    )


def test_cancel_drops_everything_and_leaves_the_engine_ready(engine, params):
    request = Request(1, prompt(5), 6, sampling=GREEDY)
    expected = engine.generate(params, [request])
    engine.submit(request)
    engine.step(params)
    assert engine.busy
    engine.cancel()
    assert not engine.busy
    assert engine.step(params) == []
    assert_same_samples(engine.generate(params, [request]), expected)
    # Cancelled between two bursts, and asked again at once.
    engine.submit(request)
    engine.step(params)
    engine.cancel()
    assert_same_samples(engine.generate(params, [request]), expected)


def test_dispatch_and_collect_may_be_called_at_any_time(engine, params):
    request = Request(1, prompt(5), 2, sampling=GREEDY)
    expected = engine.generate(params, [request])
    assert engine.collect() == []
    engine.submit(request)
    for _ in range(3):
        engine.dispatch(params)
    # Two bursts of four steps are six tokens.
    assert engine.collect() == []
    done = engine.collect()
    assert not engine.busy
    engine.dispatch(params)
    assert engine.collect() == []
    assert_same_samples(done, expected)


def test_a_cancelled_sample_goes_on_as_if_nothing_had_happened(engine, params):
    """Cancelled in bursts, in slots and in the queue, with any kind of sampling."""
    requests = mixed_requests()
    expected = engine.generate(params, requests)
    sampling = {request.prompt_id: request.sampling for request in requests}
    begun = {request.prompt_id: request.prompt for request in requests}
    for request in requests:
        engine.submit(request)
    have = {(r.prompt_id, k): Tokens.context(()) for r in requests for k in range(3)}
    done, interruptions = [], 0
    while engine.busy:
        engine.dispatch(params)
        # The running bursts are waited for: none of their tokens is lost.
        for found in engine.cancel():
            sample = found.prompt_id, found.sample_index
            have[sample] += found.tokens
            if found.finish_reason != "cancelled":
                done.append(dataclasses.replace(found, tokens=have[sample]))
                continue
            interruptions += len(have[sample]) > 0
            before = have[sample].ids.tolist()
            left = sampling[sample[0]].max_tokens - len(before)
            engine.submit(
                Request(
                    sample[0],
                    (*begun[sample[0]], *before),
                    1,
                    sample[1],
                    dataclasses.replace(sampling[sample[0]], max_tokens=left),
                    num_sampled=len(before),
                )
            )
    assert interruptions > 10, "the test shows nothing"
    assert_same_samples(done, expected)


def test_a_stop_string_may_begin_before_the_interruption(engine, params):
    base = Request(1, prompt(5), sampling=SamplingParams(max_tokens=12))
    (free,) = engine.generate(params, [base])
    two = detokenize(ids(free)[3:5])
    stop = two[1:-2]
    assert stop not in detokenize(ids(free)[:4])
    sampling = SamplingParams(max_tokens=8, stop_strings=(stop,))
    rest = Request(1, (*base.prompt, *ids(free)[:4]), 1, 0, sampling, num_sampled=4)
    (found,) = engine.generate(params, [rest])
    assert found.finish_reason == "stop_string"
    assert ids(found) == ids(free)[4:5]


def test_a_sample_that_goes_on_has_the_same_limit(engine):
    sampling = SamplingParams(max_tokens=SIZES.max_tokens - 3)
    engine.submit(Request(7, prompt(9), 1, 0, sampling, num_sampled=3))
    engine.cancel()
    with pytest.raises(ValueError, match=r"engine's 24; got 21, and 4 sampled before"):
        engine.submit(Request(7, prompt(9), 1, 0, sampling, num_sampled=4))
    with pytest.raises(ValueError, match=r"num_sampled must be .*, 9; got 9"):
        Request(7, prompt(9), num_sampled=9)


def test_some_samples_are_cancelled_and_the_others_go_on(engine, params):
    sampling = dataclasses.replace(GREEDY, max_tokens=12)
    request = Request(1, prompt(5), 6, sampling=sampling)
    expected = engine.generate(params, [request])
    engine.submit(request)
    engine.dispatch(params)
    # One in a slot, one in the queue, and one that was never requested.
    ended = engine.cancel([(1, 1), (1, 5), (9, 9)])
    found = {c.sample_index: len(c.tokens) for c in ended}
    assert found == {1: 8, 5: 0}
    assert {c.finish_reason for c in ended} == {"cancelled"}
    rest = []
    while engine.busy:
        rest += engine.step(params)
    assert_same_samples(rest, [c for c in expected if c.sample_index not in (1, 5)])


def test_an_engine_of_the_same_model_and_sizes_compiles_nothing_again(params):
    shared_functions.cache_clear()
    requests = [Request(0, prompt(5), 2, sampling=GREEDY)]
    first = make_engine()
    other = make_engine(dataclasses.replace(SIZES, steps_per_call=2))
    expected = first.generate(params, requests)
    assert first.compilations.keys() == {"prefill", "decode"}
    again = make_engine()
    assert_same_samples(again.generate(params, requests), expected)
    assert again.compilations.total() == 0
    assert_same_samples(other.generate(params, requests), expected)
    assert other.compilations.keys() == {"prefill", "decode"}


def test_compilations_are_bounded(engine, params):
    """Runs after other tests of this file, and alone: the bound is on both."""
    rng = np.random.default_rng(0)
    for seed in range(8):
        lengths = rng.integers(1, SIZES.max_prompt_tokens + 1, rng.integers(1, 7))
        requests = [
            Request(
                i,
                prompt(int(length), seed),
                int(rng.integers(1, 5)),
                sampling=SamplingParams(
                    temperature=float(rng.random()),
                    top_k=int(rng.integers(0, 2)) * 5,
                    max_tokens=int(rng.integers(1, SIZES.max_tokens + 1)),
                ),
            )
            for i, length in enumerate(lengths)
        ]
        engine.generate(params, requests)
    # Chunks of 16, 32 and 48 tokens, many or few, after 0, 2 or 4 pages.
    assert engine.compilations["prefill"] <= 3 * 2 * 3
    # Groups of 1, 2 and 4 members: 4 groups, 2 or 4, and 1, 2 or 4 of them; with 2 or 4
    # pages; truncating or not.
    assert engine.compilations["decode"] <= (1 + 2 + 3) * 2 * 2


@pytest.mark.meshes
@pytest.mark.parametrize("spec", ["dp2,tp4", "dp2,fsdp2,tp2"])
def test_a_mesh_gives_the_same_tokens(spec, engine, params):
    requests = [
        Request(i, prompt(n), 2, sampling=GREEDY) for i, n in enumerate((3, 9, 5))
    ]
    expected = engine.generate(params, requests)
    mesh = create_mesh(spec)
    spread = make_engine(mesh=mesh)
    with jax.set_mesh(mesh):
        placed = tiny.params(mesh=mesh)
        assert_same_samples(spread.generate(placed, requests), expected)
    pages = spread.cache.keys[0]
    shape = pages.sharding.shard_shape(pages.shape)
    assert pages.shape == (4 * 5, 4, 16, 4)
    assert shape == {"dp2,tp4": (10, 1, 16, 4), "dp2,fsdp2,tp2": (5, 2, 16, 4)}[spec]


# Refusals.


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((), {}, r"a prompt must have 1 to 24 tokens; got 0"),
        (
            (1,) * 25,
            {},
            r"a prompt must have 1 to 24 tokens; got 25\. Raise max_prompt",
        ),
        (
            (1,),
            {"max_tokens": 25},
            r"max_tokens must be at most the engine's 24; got 25",
        ),
        ((1,), {"stop_ids": (1, 2, 3)}, r"at most 2 stop ids \(max_stop_ids\); got 3"),
        ((1,), {"stop_ids": (2**31,)}, r"stop ids must lie in 0..\d+; got 2147483648"),
        ((1,), {"stop_ids": (-1,)}, r"stop ids must lie in 0..\d+; got -1"),
        ((1, 40), {}, r"token ids must lie in 0\.\.39; got 40\. Is this the model's"),
        ((-1, 4), {}, r"token ids must lie in 0\.\.39; got -1"),
    ],
)
def test_bad_requests_are_refused_and_not_queued(engine, prompt, sampling, message):
    sampling = SamplingParams(**{"max_tokens": 4, **sampling})
    with pytest.raises(ValueError, match=f"^request 7: {message}"):
        engine.submit(Request(7, prompt, sampling=sampling))
    assert not engine.busy


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 1e39}, r"temperature must be in \[0, 3.4e38\]; got 1e\+39"),
        ({"temperature": float("nan")}, r"temperature must be in .*; got nan"),
        ({"top_k": 2**31}, r"top_k must be in \[0, 2\*\*31\) .*; got 2147483648"),
    ],
)
def test_numbers_that_the_device_cannot_hold_are_refused(sampling, message):
    with pytest.raises(ValueError, match=f"SamplingParams: {message}"):
        SamplingParams(**sampling)


def test_indices_of_samples_are_those_of_the_noise():
    Request(1, (5,), num_samples=2, first_sample=2**32 - 2)
    with pytest.raises(ValueError, match=r"indices of the samples must lie in 0\.\."):
        Request(1, (5,), num_samples=2, first_sample=2**32 - 1)


def test_a_prompt_and_its_completion_may_share_one_budget(params):
    sizes = dataclasses.replace(
        SIZES, max_prompt_tokens=47, max_tokens=47, context_tokens=48, num_slots=2
    )
    # A page for each of three sixteens, and two that are partly filled.
    assert (sizes.max_length, sizes.pages_per_sample) == (48, 5)
    engine = make_engine(sizes)
    long, short = prompt(47), prompt(1)
    for number, (tokens, most) in enumerate(((long, 1), (short, 47))):
        sampling = SamplingParams(temperature=0.0, max_tokens=most)
        [found] = engine.generate(params, [Request(number, tokens, sampling=sampling)])
        assert len(found.tokens) == most
        more = dataclasses.replace(sampling, max_tokens=most + 1)
        with pytest.raises(ValueError, match=r"at most 48 tokens|at most the engine's"):
            engine.submit(Request(9, tokens, sampling=more))
    sampling = SamplingParams(max_tokens=25)
    with pytest.raises(ValueError, match=r"at most 48 tokens \(context_tokens\); got"):
        engine.submit(Request(9, prompt(24), sampling=sampling))
    assert not engine.busy


def test_stop_strings_need_detokenize():
    engine = Engine(tiny.CONFIG, dataclasses.replace(SIZES, num_slots=1))
    sampling = SamplingParams(max_tokens=4, stop_strings=("a",))
    with pytest.raises(ValueError, match="stop_strings need an Engine with detokenize"):
        engine.submit(Request(7, (1,), sampling=sampling))


@pytest.mark.parametrize("field", sorted(vars(EngineConfig()).keys() - {"few_shapes"}))
def test_sizes_are_positive(field):
    if field in ("cache_tokens", "context_tokens", "guesses", "kept_ids", "exact"):
        with pytest.raises(ValueError, match=f"{field} must be at least 0; got -1"):
            EngineConfig(**{field: -1})
        return
    with pytest.raises(
        ValueError, match=f"^EngineConfig: {field} must be at least 1; got 0"
    ):
        EngineConfig(**{field: 0})


def test_sizes_fit_the_context():
    sizes = dataclasses.replace(SIZES, max_tokens=41)
    message = r"max_prompt_tokens \+ max_tokens is 65, longer than .* context of 64"
    with pytest.raises(ValueError, match=message):
        Engine(tiny.CONFIG, sizes)


def test_sizes_stay_where_the_rotation_does_not_depend_on_them():
    scaling = RopeScaling("dynamic", 2.0, original_length=40)
    config = dataclasses.replace(tiny.CONFIG, rope_scaling=scaling)
    message = r"max_prompt_tokens \+ max_tokens is 64, longer than 40, where"
    with pytest.raises(ValueError, match=message):
        Engine(config, dataclasses.replace(SIZES, max_tokens=40))


def test_slots_that_the_mesh_does_not_divide_are_refused():
    sizes = dataclasses.replace(SIZES, num_slots=3)
    with pytest.raises(MeshError, match="num_slots has batch=3, which dp=2 does not"):
        Engine(tiny.CONFIG, sizes, mesh=create_mesh("dp2,tp4"))


def test_the_implementation_of_attention_is_the_one_that_is_named(params):
    request = Request(1, (3, 1, 4), sampling=SamplingParams(max_tokens=2))
    for kernels, message in (
        ("pallas_tpu", "write_entries: pallas_tpu runs on tpu, and this program is"),
        ("pallas_gpu", "write_entries: pallas_gpu runs on hopper, and this program is"),
    ):
        engine = Engine(tiny.CONFIG, SIZES, kernels=kernels)
        with pytest.raises(ValueError, match=message):
            engine.generate(params, [request])
    both = [
        Engine(tiny.CONFIG, SIZES, kernels=name).generate(params, [request])
        for name in ("xla", "auto")
    ]
    assert both[0] == both[1]
