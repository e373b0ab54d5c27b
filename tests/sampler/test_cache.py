"""Cached entries are computed once, and do not change the samples."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models.adapters import lora
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from tests import tiny
from tests.sampler.test_engine import argmax_loop, assert_same_samples, ids

SIZES = EngineConfig(
    num_slots=12,
    max_prompt_tokens=48,
    max_tokens=16,
    steps_per_call=4,
    prefill_tokens=64,
    max_stop_ids=1,
)
CONFIG = dataclasses.replace(tiny.CONFIG, max_length=128)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def params():
    return tiny.shared()


def prompt(length, seed=0):
    rng = np.random.default_rng([seed, length])
    return tuple(rng.integers(0, CONFIG.vocab_size, length).tolist())


def test_a_conversation_of_six_turns_prefills_each_token_once(params):
    engine, fresh = Engine(CONFIG, SIZES), Engine(CONFIG, SIZES)
    said = {0: prompt(7), 1: prompt(7)}
    reply = prompt(2, seed=5)
    for turn in range(6):
        before = engine.prefilled_tokens
        sampling = SamplingParams(max_tokens=4)
        if turn == 0:
            requests = [Request(3, said[0], 2, sampling=sampling)]
        else:
            requests = [Request(3, said[i], 1, i, sampling) for i in range(2)]
        done = engine.generate(params, requests)
        new = engine.prefilled_tokens - before
        # The first prompt once for both samples. Later the reply, and the last token
        # that was sampled, which has not been fed; the two answers differ.
        assert new == (7 if turn == 0 else 2 * (1 + len(reply)))
        assert ids(done[0]) != ids(done[1])
        again = [dataclasses.replace(r, prompt=tuple(r.prompt)) for r in requests]
        expected = Engine(CONFIG, SIZES) if turn in (1, 5) else fresh
        assert_same_samples(done, expected.generate(params, again))
        for completion in done:
            said[completion.sample_index] += (*ids(completion), *reply)


def test_a_group_of_64_holds_one_prompt(params):
    sizes = dataclasses.replace(SIZES, num_slots=64)
    # A prompt of three pages, and for each sample its page and one to resume.
    assert sizes.cache_for_groups(64) == 16 * (2 * 3 + 64 * 2)
    sizes = dataclasses.replace(sizes, cache_tokens=16 * (3 + 64))
    engine = Engine(CONFIG, sizes)
    shapes = {leaf.shape for leaf in jax.tree.leaves(engine.cache)}
    assert shapes == {(67, 4, 16, 4)}
    engine.submit(Request(1, prompt(48), 64, sampling=GREEDY))
    engine.dispatch(params)
    assert len(engine.scheduler.running) == 64
    assert engine.scheduler.used_pages == 67
    assert engine.prefilled_tokens == 48
    engine.cancel()


def requests(samples=4):
    """Ragged lengths of prompts and answers, drawn and greedy."""
    sizes = zip((3, 17, 30, 48), (3, 16, 9, 5), strict=True)
    return [
        Request(
            10 + i,
            prompt(length),
            samples,
            sampling=SamplingParams(temperature=0.8 * (i % 2), max_tokens=most),
        )
        for i, (length, most) in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def expected(params):
    return Engine(CONFIG, SIZES).generate(params, requests())


@pytest.mark.parametrize(
    "changes",
    [
        # The batch shrinks from 16 rows to 8; then pages for two samples, which wait
        # for each other and evict what is left; then one page a chunk.
        {"num_slots": 16},
        {"cache_tokens": 16 * 10},
        {"prefill_tokens": 16, "num_slots": 5},
    ],
    ids=str,
)
def test_the_batch_the_cache_and_the_chunks_do_not_matter(params, expected, changes):
    engine = Engine(CONFIG, dataclasses.replace(SIZES, **changes))
    for _ in range(2):
        assert_same_samples(engine.generate(params, requests()), expected)


def test_a_caller_can_have_everything_computed_again(params):
    engine, request = Engine(CONFIG, SIZES), Request(1, prompt(20), sampling=GREEDY)
    engine.forget()
    expected = engine.generate(params, [request])
    engine.generate(params, [request])
    assert engine.prefilled_tokens == 20
    engine.forget()
    assert_same_samples(engine.generate(params, [request]), expected)
    assert engine.prefilled_tokens == 40


def test_an_adapter_of_another_scale_is_another_model(params):
    """Its arrays are the same; the scale is static."""
    config = lora.LoRAConfig(rank=2, alpha=1.0)
    adapter = lora.initialize_adapter(jax.random.key(0), params, CONFIG, config)
    adapter = jax.tree.map(lambda array: array + 0.1, adapter)
    request = Request(1, prompt(30), sampling=GREEDY)
    engine = Engine(CONFIG, SIZES)
    for alpha in (1.0, 40.0):
        config = dataclasses.replace(config, alpha=alpha)
        scaled = lora.adapted(params, adapter, CONFIG, config)
        expected = Engine(CONFIG, SIZES).generate(scaled, [request])
        assert_same_samples(engine.generate(scaled, [request]), expected)


def test_an_embedding_that_is_nan_fails_no_prompt_without_it(params):
    """Rows of a prefill call are padded, and 0 times NaN is NaN."""
    table = params.embedding.at[0].set(jnp.nan)
    broken = dataclasses.replace(params, embedding=table)
    request = Request(1, tuple(range(1, 10)), sampling=GREEDY)
    (expected,) = Engine(CONFIG, SIZES).generate(params, [request])
    (found,) = Engine(CONFIG, SIZES).generate(broken, [request])
    assert (found.finish_reason, ids(found)) == ("length", ids(expected))


def test_sizes_need_not_be_multiples_of_a_page(params):
    sizes = EngineConfig(
        num_slots=3, max_prompt_tokens=20, max_tokens=5, prefill_tokens=27
    )
    assert sizes.chunks == (16,)
    wide = dataclasses.replace(sizes, prefill_tokens=100)
    assert wide.chunks == (16, 32)
    sampling = SamplingParams(max_tokens=5)
    wanted = [
        Request(i, prompt(n), 2, sampling=sampling) for i, n in enumerate((20, 3))
    ]
    expected = Engine(CONFIG, SIZES).generate(params, wanted)
    for each in (sizes, wide):
        assert_same_samples(Engine(CONFIG, each).generate(params, wanted), expected)


def test_prompts_with_the_same_beginning_share_it(params):
    """They come at once: the second may not read what is not yet computed."""
    system = prompt(33, seed=3)
    sampling = SamplingParams(max_tokens=6)
    wanted = [
        Request(i, (*system, *prompt(4, seed=i)), 2, sampling=sampling)
        for i in range(3)
    ]
    alone = Engine(CONFIG, dataclasses.replace(SIZES, num_slots=1))
    expected = [c for r in wanted for c in alone.generate(tiny.params(), [r])]
    engine = Engine(CONFIG, SIZES)
    assert_same_samples(engine.generate(params, wanted), expected)
    assert engine.prefilled_tokens == 33 + 3 * 4


def test_what_was_cancelled_goes_on_where_the_cache_ends(params, expected):
    engine = Engine(CONFIG, SIZES)
    (whole,) = [c for c in expected if (c.prompt_id, c.sample_index) == (11, 2)]
    request = dataclasses.replace(requests()[1], num_samples=1, first_sample=2)
    engine.submit(request)
    engine.step(params)
    (part,) = engine.cancel()
    assert (len(part.tokens), engine.prefilled_tokens) == (8, 17)
    rest = dataclasses.replace(
        request,
        prompt=(*request.prompt, *ids(part)),
        num_sampled=8,
        sampling=dataclasses.replace(request.sampling, max_tokens=8),
    )
    (done,) = engine.generate(params, [rest])
    # Seven of eight sampled tokens have been fed.
    assert engine.prefilled_tokens == 17 + 1
    joined = dataclasses.replace(whole, tokens=part.tokens + done.tokens)
    assert_same_samples([joined], [whole])


def test_a_long_answer_is_read_to_its_end(params):
    """The view of a sample's own tokens grows: from four pages to five."""
    engine = Engine(
        CONFIG, dataclasses.replace(SIZES, max_tokens=80, steps_per_call=32)
    )
    sampling = SamplingParams(max_tokens=80)
    request = Request(1, prompt(5), 2, sampling=sampling)
    whole = engine.generate(params, [request])
    for completion in whole:
        begun = ids(completion)[:40]
        rest = Request(
            1,
            (*request.prompt, *begun),
            1,
            completion.sample_index,
            dataclasses.replace(sampling, max_tokens=40),
            num_sampled=40,
        )
        (done,) = engine.generate(params, [rest])
        joined = dataclasses.replace(
            completion, tokens=completion.tokens[:40] + done.tokens
        )
        assert_same_samples([joined], [completion])


@pytest.mark.parametrize("recompute", [False, True])
def test_new_parameters_between_bursts(params, recompute):
    """Kept keys are of the parameters that computed them; or they are made again."""
    engine = Engine(CONFIG, dataclasses.replace(SIZES, recompute_cache=recompute))
    changed = tiny.params(seed=1)
    sampling = dataclasses.replace(GREEDY, max_tokens=12)
    request = Request(1, prompt(9), 2, sampling=sampling)
    engine.submit(request)
    assert engine.step(params, version=3) == []
    assert engine.step(changed, version=4) == []
    done = engine.step(changed, version=4)
    assert [c.tokens.versions.tolist() for c in done] == [[3] * 8 + [4] * 4] * 2
    first = ids(done[0])[:8]
    _, fresh = argmax_loop(changed, (*request.prompt, *first), 4)
    near = np.allclose(done[0].tokens.logprobs[8:], fresh, atol=1e-5)
    assert near == recompute
    assert engine.prefilled_tokens == 9 + (recompute * (9 + 8))


def test_logits_that_are_not_finite_fail_their_request_alone(params):
    poisoned = params.replace(embedding=params.embedding.at[39].set(jnp.nan))
    engine = Engine(CONFIG, dataclasses.replace(SIZES, cache_tokens=16 * 24))
    good = [Request(20 + i, (1 + i, *([7] * 20)), 2, sampling=GREEDY) for i in range(3)]
    bad = Request(5, (2, 39, 4), 3, sampling=GREEDY)
    expected = Engine(CONFIG, SIZES).generate(params, good)
    assert all(39 not in ids(c) for c in expected)
    for _ in range(3):
        done = engine.generate(poisoned, [good[0], bad, *good[1:]])
        failed = [c for c in done if c.prompt_id == 5]
        assert [(c.finish_reason, len(c.tokens)) for c in failed] == [("failed", 0)] * 3
        assert failed[2].error.startswith(
            "request 5, sample 2: the logits of token 0 were not finite. Are the param"
        )
        # The pages of the failed samples serve others, and nothing of them is left.
        assert_same_samples([c for c in done if c.prompt_id != 5], expected)
    # Nor is what they left found by its tokens.
    (healthy,) = engine.generate(params, [dataclasses.replace(bad, num_samples=1)])
    assert ids(healthy) == argmax_loop(params, bad.prompt, 6)[0]
