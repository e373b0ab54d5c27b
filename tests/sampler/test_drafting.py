"""A draft model guesses; samples stay as they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import ModelConfig
from jaxrl_post.sampler import Draft, Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.guessing import Guessing
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.sampler.test_engine import assert_same_samples, detokenize, ids
from tests.tiers import daily

CONFIG = dataclasses.replace(tiny.CONFIG, max_length=128)
SIZES = EngineConfig(
    num_slots=8,
    max_prompt_tokens=64,
    max_tokens=32,
    steps_per_call=16,
    prefill_tokens=64,
    max_stop_ids=2,
)
DRAFTING = dataclasses.replace(SIZES, guesses=3, guess_rows=64)
# Another shape, and a vocabulary that is padded further.
SMALL = ModelConfig(
    "llama", 48, 8, 12, 1, num_heads=4, num_kv_heads=2, head_dim=2, max_length=128
)
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=32),
    SamplingParams(temperature=0.4, max_tokens=27, stop_ids=(3,)),
    SamplingParams(top_p=0.8, top_k=9, max_tokens=20),
    SamplingParams(max_tokens=32, stop_strings=("7",)),
)


@pytest.fixture(scope="module")
def params():
    return tiny.shared()


def prompt(number, length):
    rng = np.random.default_rng([number, length])
    return tuple(rng.integers(0, 40, length).tolist())


def requests(samples=3):
    return [
        Request(number, prompt(number, 3 + 13 * number), samples, sampling=sampling)
        for number, sampling in enumerate(SAMPLINGS)
    ]


def make_engine(draft, sizes=DRAFTING, **options):
    """An engine that guesses, at every cost and gain."""
    engine = Engine(CONFIG, sizes, detokenize=detokenize, draft=draft, **options)
    engine.guessing.cost = -1.0
    return engine


def itself(params):
    """The sampled model as its own draft: every guess is right, if it sees all."""
    return Draft(CONFIG, params)


def passes(engine, work):
    """Forward passes, and the tokens that they sampled."""
    before = engine.guessing.passes, engine.guessing.tokens
    work()
    return engine.guessing.passes - before[0], engine.guessing.tokens - before[1]


@pytest.fixture(scope="module")
def expected(params):
    engine = Engine(CONFIG, SIZES, detokenize=detokenize)
    done = engine.generate(params, requests())
    assert {c.finish_reason for c in done} == {"length", "stop", "stop_string"}
    return done


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"steps_per_call": 3},
        # Samples wait and prompts come in chunks in test_ahead.py as well.
        pytest.param({"num_slots": 2}, marks=pytest.mark.all),
        pytest.param({"prefill_tokens": 16}, marks=pytest.mark.all),
    ],
    ids=str,
)
def test_samples_are_those_without_a_draft(params, expected, change):
    draft = Draft(SMALL, tiny.params(SMALL, seed=5))
    engine = make_engine(draft, dataclasses.replace(DRAFTING, **change))
    assert_same_samples(engine.generate(params, requests()), expected)
    assert engine.guessing.passes > 0
    assert engine.guessing.tokens < 2 * engine.guessing.passes


def test_a_draft_that_agrees_is_always_right(params):
    """So its keys are whole after every pass, for all earlier guesses."""
    engine = make_engine(itself(params))
    for sampling in (SAMPLINGS[0], SamplingParams(max_tokens=32), SAMPLINGS[2]):
        request = Request(1, prompt(1, 21), 4, sampling=sampling)
        found = passes(engine, lambda r=request: engine.generate(params, [r]))
        assert found == (4 * sampling.max_tokens / 4, 4 * sampling.max_tokens)


def test_what_was_sampled_without_guesses_is_made_up_for(params):
    """Too many rows at first; then the draft is fed with what it lacks."""
    sizes = dataclasses.replace(DRAFTING, num_slots=24, guess_rows=32)
    engine = make_engine(itself(params), sizes)
    short, long = (SamplingParams(max_tokens=count) for count in (16, 32))
    for number, sampling in enumerate([short, short, long]):
        engine.submit(Request(number, prompt(7, 40), 6, sampling=sampling))
    assert len(engine.collect()) == 0
    done = engine.step(params)
    assert engine.guessing.passes == 0
    assert len(done) == 12
    found = passes(engine, lambda: [engine.step(params) for _ in range(2)])
    # Sixteen tokens are left of each.
    assert not engine.busy
    assert found == (6 * 4, 6 * 16)


def test_guesses_that_stopped_within_a_page_go_on(params):
    """The draft has half of a page, and then needs it whole."""
    sizes = dataclasses.replace(DRAFTING, max_tokens=48, num_slots=24, guess_rows=32)
    engine = make_engine(itself(params), sizes)
    short, long = (SamplingParams(max_tokens=count) for count in (16, 48))
    engine.submit(Request(0, prompt(7, 40), 6, sampling=long))
    assert passes(engine, lambda: engine.step(params)) == (6 * 4, 6 * 16)
    for number in (1, 2):
        engine.submit(Request(number, prompt(7, 40), 6, sampling=short))
    # Eighteen rows are too many for guesses; twelve of them end.
    assert passes(engine, lambda: engine.step(params)) == (0, 0)
    assert len(engine.collect()) == 0
    assert passes(engine, lambda: engine.step(params)) == (6 * 4, 6 * 16)
    assert not engine.busy


def test_another_turn_and_another_prompt_with_the_same_beginning(params):
    """The draft needs what is new alone, of segments that were partly filled."""
    engine = make_engine(itself(params))
    sampling = SamplingParams(max_tokens=10)
    (first,) = engine.generate(params, [Request(1, prompt(1, 21), sampling=sampling)])
    fed = []
    functions = engine._functions.draft
    prefill = functions.prefill
    functions.__dict__["prefill"] = lambda params, pages, rows: (
        fed.append(int(rows.sizes.sum())) or prefill(params, pages, rows)
    )
    turn = (*prompt(1, 21), *ids(first), 4, 4, 4)
    found = passes(
        engine,
        lambda: engine.generate(
            params, [Request(2, turn, 2, sampling=SamplingParams(max_tokens=32))]
        ),
    )
    assert found == (2 * 8, 2 * 32)
    # The last token that was said, and the reply.
    assert fed == [4]
    begins_alike = (*prompt(1, 21)[:18], 9, 9)
    found = passes(
        engine,
        lambda: engine.generate(
            params, [Request(3, begins_alike, sampling=SamplingParams(max_tokens=32))]
        ),
    )
    assert found == (8, 32)


def test_cancelled_samples_go_on(params, expected):
    engine = make_engine(itself(params))
    request = Request(1, prompt(1, 21), 3, sampling=SamplingParams(max_tokens=32))
    whole = Engine(CONFIG, SIZES).generate(params, [request])
    engine.submit(request)
    engine.step(params)
    parts = sorted(engine.cancel(), key=lambda c: c.sample_index)
    assert {len(part.tokens) for part in parts} == {16}
    rest = [
        Request(
            1,
            (*request.prompt, *ids(part)),
            1,
            part.sample_index,
            SamplingParams(max_tokens=16),
            num_sampled=16,
        )
        for part in parts
    ]
    done = engine.generate(params, rest)
    joined = [
        dataclasses.replace(end, tokens=part.tokens + end.tokens)
        for part, end in zip(parts, done, strict=True)
    ]
    assert_same_samples(joined, whole)


def test_exact_log_probs_with_a_draft(params):
    plain = Engine(CONFIG, dataclasses.replace(SIZES, exact=8), detokenize=detokenize)
    engine = make_engine(
        Draft(SMALL, tiny.params(SMALL, seed=5)),
        dataclasses.replace(DRAFTING, exact=8),
    )
    expected = plain.generate(params, requests(2)[:2])
    for ours, other in zip(
        engine.generate(params, requests(2)[:2]), expected, strict=True
    ):
        assert ids(ours) == ids(other)
        np.testing.assert_array_equal(ours.tokens.logprobs, other.tokens.logprobs)


def test_with_a_cache_of_codes(params):
    options = {"dtype": jnp.dtype("int8"), "detokenize": detokenize}
    expected = Engine(CONFIG, SIZES, **options).generate(params, requests())
    engine = make_engine(itself(params), dtype=options["dtype"])
    assert_same_samples(engine.generate(params, requests()), expected)
    assert engine.guessing.tokens > 3 * engine.guessing.passes


@pytest.mark.meshes
# Slots and heads are divided on both; tests/sampler has other meshes in other files.
@pytest.mark.parametrize("spec", daily(["dp4,tp2", "fsdp2,tp4"], ["dp4,tp2"]))
def test_on_a_mesh(params, expected, spec):
    mesh = create_mesh(spec)
    placed = tiny.params(mesh=mesh)
    engine = make_engine(itself(placed), mesh=mesh)
    assert_same_samples(engine.generate(placed, requests()), expected)
    assert engine.guessing.tokens > 3 * engine.guessing.passes


def test_a_poor_draft_is_dropped_for_a_while(params):
    """It costs its own passes, four a pass here, on top of what lookups must gain."""
    draft = Draft(SMALL, tiny.params(SMALL, seed=5))
    engine = Engine(CONFIG, DRAFTING, detokenize=detokenize, draft=draft)
    # A pass reads a few rows of the embedding alone: neither model ties it to the head.
    counts = [
        sum(leaf.size for leaf in jax.tree.leaves(tree)) - tree.embedding.size
        for tree in (draft.params, params)
    ]
    assert engine.guessing.cost == pytest.approx(4 * counts[0] / counts[1])
    engine.generate(params, requests(6))
    assert engine.guessing.guesses(slots=8) == 0


def test_a_draft_must_bring_what_it_costs():
    for cost, expected in ((0.0, 3), (0.5, 0)):
        guessing = Guessing(count=3, max_rows=32, cost=cost)
        guessing.record(passes=100, tokens=150)
        assert guessing.guesses(slots=8) == expected


def test_a_draft_with_a_short_context_is_refused(params):
    short = dataclasses.replace(SMALL, max_length=64)
    with pytest.raises(ValueError, match="longer than the model's context of 64"):
        make_engine(Draft(short, tiny.params(short)))
