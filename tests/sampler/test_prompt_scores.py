"""A prompt's log-probs are the model's, also if the cache has its beginning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxrl_post.models import forward, logits
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.requests import MOST_ALTERNATIVES
from jaxrl_post.sharding import create_mesh
from tests import tiny

SIZES = EngineConfig(
    num_slots=4,
    max_prompt_tokens=48,
    max_tokens=16,
    steps_per_call=4,
    # Prompts of more than 16 tokens come in several chunks.
    prefill_tokens=16,
    max_stop_ids=2,
)
LONG = tuple(np.random.default_rng(5).integers(0, 40, 45).tolist())
PLAIN = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def params():
    return tiny.shared()


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny.CONFIG, SIZES)


def asked(prompt_id, prompt, *, count=2, **fields):
    sampling = SamplingParams(max_tokens=count, prompt_scores=True)
    sampling = dataclasses.replace(sampling, **fields.pop("sampling", {}))
    return Request(prompt_id, tuple(prompt), sampling=sampling, **fields)


def expected(params, prompt, temperature=1.0):
    """All log-probs at the place of each token from the second on, in float64."""
    every = log_softmax(all_logits(params, prompt) / temperature, axis=-1)
    return every[: len(prompt) - 1]


def all_logits(params, prompt):
    """All rows have one length: padding behind a token changes nothing."""
    row = jnp.asarray([[*prompt, *[0] * (48 - len(prompt))]], jnp.int32)
    hidden = forward(params, tiny.CONFIG, row)[0]
    return np.asarray(logits(params, tiny.CONFIG, hidden), np.float64)


def check(found, params, prompt, temperature=1.0):
    every = expected(params, prompt, temperature)
    own = every[np.arange(len(prompt) - 1), prompt[1:]]
    assert found.logprobs.dtype == np.float32
    np.testing.assert_allclose(found.logprobs, own, atol=5e-5)
    np.testing.assert_array_equal(found.ranks, 1 + (every > own[:, None]).sum(axis=1))
    best = np.sort(every, axis=1)[:, ::-1][:, :MOST_ALTERNATIVES]
    np.testing.assert_allclose(found.alternatives.logprobs, best, atol=5e-5)
    # To the last bit: clients find out so whether a token was the likeliest.
    first = found.ranks == 1
    assert first.any()
    np.testing.assert_array_equal(
        found.logprobs[first], found.alternatives.logprobs[first, 0]
    )
    np.testing.assert_array_equal(found.alternatives.ids[:, 0], every.argmax(axis=1))


@pytest.mark.parametrize("length", [2, 3, 16, 17, 45])
def test_prompts_of_any_length(engine, params, length):
    # Greedy requests are scored at temperature 1, as what they sample is.
    for temperature, at in ((1.0, 1.0), (0.0, 1.0), (0.6, 0.6)):
        sampling = {"temperature": temperature}
        [done] = engine.generate(params, [asked(1, LONG[:length], sampling=sampling)])
        every = expected(params, LONG[:length], at)
        own = every[np.arange(length - 1), LONG[1:length]]
        np.testing.assert_allclose(done.prompt.logprobs, own, atol=5e-5)
        assert len(done.tokens) == 2


def test_all_that_is_told_of_a_token(engine, params):
    # Some tokens are the likeliest of their places.
    row = [5]
    for _ in range(20):
        row.append(int(all_logits(params, row)[len(row) - 1].argmax()))
    row[7:10] = LONG[:3]
    [done] = engine.generate(params, [asked(1, row)])
    check(done.prompt, params, row)


def test_a_prompt_of_one_token_has_no_scores(engine, params):
    [done] = engine.generate(params, [asked(1, LONG[:1])])
    assert done.prompt.logprobs.shape == (0,)
    assert done.prompt.alternatives.ids.shape == (0, MOST_ALTERNATIVES)


def test_what_the_cache_holds_changes_nothing(params):
    engine = Engine(tiny.CONFIG, SIZES)
    plain = Request(1, LONG, sampling=SamplingParams(max_tokens=2))
    alone = engine.generate(params, [asked(2, LONG)])[0]
    before = engine.prefilled_tokens
    [after] = engine.generate(params, [plain])
    # The scored prompt is in the cache, for others.
    assert engine.prefilled_tokens == before
    again = engine.generate(params, [asked(2, LONG)])[0]
    assert engine.prefilled_tokens == before + len(LONG)
    np.testing.assert_array_equal(again.prompt.logprobs, alone.prompt.logprobs)
    assert after.prompt is None
    # The same samples, with scores and without.
    same = engine.generate(params, [dataclasses.replace(plain, prompt_id=2)])[0]
    assert same.tokens.ids.tolist() == alone.tokens.ids.tolist()


def test_the_first_of_several_samples_has_them(engine, params):
    three = asked(1, LONG[:20], num_samples=3, first_sample=4)
    others = [Request(2, LONG[:18], sampling=PLAIN), asked(3, LONG[10:40])]
    done = engine.generate(params, [three, *others])
    assert [each.prompt is None for each in done] == [False, True, True, True, False]
    np.testing.assert_allclose(
        done[0].prompt.logprobs,
        expected(params, LONG[:20])[np.arange(19), LONG[1:20]],
        atol=5e-5,
    )
    alone = engine.generate(params, [asked(3, LONG[10:40])])[0]
    np.testing.assert_allclose(
        done[-1].prompt.logprobs, alone.prompt.logprobs, atol=1e-5
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_new_parameters_in_the_middle(params, recompute):
    sizes = dataclasses.replace(SIZES, recompute_cache=recompute)
    engine, new = Engine(tiny.CONFIG, sizes), tiny.params(seed=1)
    # 45 tokens are three chunks: the parameters change between two of them.
    engine.submit(Request(2, LONG[:4], sampling=SamplingParams(max_tokens=12)))
    engine.submit(asked(1, LONG))
    done = engine.step(params)
    engine.settle()
    while engine.busy:
        done += engine.step(new)
    [scored] = [each for each in done if each.prompt_id == 1]
    every = expected(new, LONG)
    own = every[np.arange(44), LONG[1:]]
    np.testing.assert_allclose(scored.prompt.logprobs, own, atol=5e-5)


def test_a_continued_sample_scores_its_own_prompt(engine, params):
    rest = asked(1, LONG[:20], num_sampled=5)
    [done] = engine.generate(params, [rest])
    assert done.prompt.logprobs.shape == (14,)


@pytest.mark.meshes
def test_a_mesh_that_splits_the_vocabulary(params):
    mesh = create_mesh("dp2,tp2", jax.devices()[:4])
    requests = [
        asked(1, LONG),
        asked(2, LONG[:7]),
        Request(3, LONG[:4], sampling=PLAIN),
    ]
    split = Engine(tiny.CONFIG, SIZES, mesh=mesh)
    found = split.generate(tiny.params(mesh=mesh), requests)
    alone = Engine(tiny.CONFIG, SIZES).generate(params, requests)
    for one, other in zip(found[:2], alone[:2], strict=True):
        np.testing.assert_allclose(
            one.prompt.logprobs, other.prompt.logprobs, atol=1e-5
        )
        np.testing.assert_array_equal(one.prompt.ranks, other.prompt.ranks)
        np.testing.assert_array_equal(
            one.prompt.alternatives.ids, other.prompt.alternatives.ids
        )


def test_requests_without_scores_compile_none(params):
    sizes = dataclasses.replace(SIZES, max_stop_ids=3)
    engine = Engine(tiny.CONFIG, sizes)
    engine.generate(params, [Request(1, LONG, sampling=SamplingParams(max_tokens=2))])
    assert "score" not in engine._functions.compilations


def test_an_exact_engine_says_that_it_does_not(params):
    engine = Engine(tiny.CONFIG, dataclasses.replace(SIZES, exact=8))
    with pytest.raises(ValueError, match="an exact engine does not score prompts"):
        engine.submit(asked(1, LONG))
