"""Biases, penalties, least lengths, bad words: what is drawn and what is recorded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from jaxrl_post.models import forward, logits
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.limits import LimitedTokens, changes_of, no_changes
from jaxrl_post.sampler.requests import ConstraintError
from jaxrl_post.sampler.sampling import Drawing, SamplingArrays, sample
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.sampler.test_constraints import bits

SIZES = EngineConfig(
    num_slots=4,
    max_prompt_tokens=16,
    max_tokens=16,
    steps_per_call=4,
    prefill_tokens=64,
    max_stop_ids=2,
)
VOCAB = tiny.CONFIG.vocab_size
PROMPT = (5, 9, 2)
ASKED = SamplingParams(
    logit_bias=((3, 2.0), (7, -100.0), (9, 0.5)),
    frequency_penalty=0.7,
    presence_penalty=-0.3,
    repetition_penalty=1.3,
)


def changed(scores, sampling, prompt, sampled):
    """The logits after bias and penalties, token by token."""
    scores = np.array(scores, np.float64)
    for token, value in sampling.logit_bias:
        scores[token] += value
    for token in {*prompt, *sampled}:
        factor = sampling.repetition_penalty
        scores[token] *= 1 / factor if scores[token] > 0 else factor
    for token in set(sampled):
        count = list(sampled).count(token)
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return scores


def settings(rows, temperature=1.0, top_k=0):
    ones = np.ones(rows, np.float32)
    none = np.zeros(rows, np.int32)
    return SamplingArrays(ones * temperature, none + top_k, ones, ones * 0)


draw = jax.jit(sample, static_argnames="drawing")


def in_rows(changes, rows, most=32):
    made = no_changes(rows, most)
    for whole, own in zip(made, changes, strict=True):
        whole[:, : len(own)] = own
    return made


@pytest.mark.parametrize("allowed", [None, range(0, 70, 3)])
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.6, 0), (1.0, 4)])
def test_the_frequencies_are_those_of_the_changed_logits(allowed, temperature, top_k):
    rng = np.random.default_rng(0)
    scores, rows = rng.normal(0, 2, 70).astype(np.float32), 4096
    said, prompt = [1, 1, 12, 30, 1], [30, 33, 60]
    own = changes_of(ASKED, prompt, said)
    out = draw(
        jnp.tile(scores, (rows, 1)),
        (np.arange(rows, dtype=np.float32) + 0.5) / rows,
        settings(rows, temperature, top_k),
        drawing=Drawing(top_k > 0, alternatives=5),
        allowed=None if allowed is None else np.tile(bits(allowed, 70), (rows, 1)),
        changes=in_rows(own, rows),
    )
    drawn = changed(scores, ASKED, prompt, said) / temperature
    if allowed is not None:
        drawn[np.setdiff1d(range(70), allowed)] = -np.inf
    if top_k:
        drawn[drawn < np.sort(drawn)[-top_k]] = -np.inf
    counts = np.bincount(np.asarray(out.tokens), minlength=70) / rows
    np.testing.assert_allclose(counts, softmax(drawn), atol=1e-3)
    # The model's own log-prob is recorded, and the drawn distribution's.
    tokens = np.asarray(out.tokens)
    every = log_softmax(np.float64(scores) / temperature)
    np.testing.assert_allclose(out.logprobs, every[tokens], atol=1e-5)
    np.testing.assert_allclose(
        out.logprobs - out.log_masses, log_softmax(drawn)[tokens], atol=2e-5
    )
    plain = np.sort(every if allowed is None else every[list(allowed)])[::-1][:5]
    np.testing.assert_allclose(out.alternatives_logprobs[0], plain, atol=1e-5)


def test_changes_are_of_their_own_row():
    scores = np.random.default_rng(1).normal(0, 2, (2, 40)).astype(np.float32)
    made = no_changes(2, 32)
    made.ids[1, 0], made.bias[1, 0] = 8, 50.0
    half = np.full(2, 0.4, np.float32)
    out = draw(scores, half, settings(2), drawing=Drawing(False), changes=made)
    alone = draw(scores[:1], half[:1], settings(1), drawing=Drawing(False))
    assert out.tokens[0] == alone.tokens[0]
    assert out.tokens[1] == 8
    np.testing.assert_allclose(out.log_masses[0], 0, atol=1e-6)


@pytest.fixture(scope="module")
def params():
    return tiny.shared()


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny.CONFIG, SIZES, detokenize=lambda ids: "x" * len(ids))


def next_logits(params, row):
    """Rows have one length; what comes behind a token changes nothing."""
    padded = jnp.asarray([[*row, *[0] * (24 - len(row))]], jnp.int32)
    hidden = forward(params, tiny.CONFIG, padded)[0, len(row) - 1]
    return np.asarray(logits(params, tiny.CONFIG, hidden), np.float64)


def ids(completion):
    return completion.tokens.ids.tolist()


def test_greedy_tokens_are_those_of_changed_whole_forwards(engine, params):
    asked = dataclasses.replace(ASKED, temperature=0.0, max_tokens=12)
    [done] = engine.generate(params, [Request(1, PROMPT, sampling=asked)])
    said = []
    for place in range(12):
        plain = next_logits(params, (*PROMPT, *said))
        scores = changed(plain, asked, PROMPT, said)
        token = int(scores.argmax())
        assert done.tokens.ids[place] == token
        own = log_softmax(plain)[token]
        np.testing.assert_allclose(done.tokens.logprobs[place], own, atol=1e-4)
        mass = own - log_softmax(scores)[token]
        np.testing.assert_allclose(done.tokens.log_masses[place], mass, atol=1e-4)
        said.append(token)
    [plainly] = engine.generate(
        params,
        [Request(1, PROMPT, sampling=SamplingParams(0.0, max_tokens=12))],
    )
    assert ids(plainly) != said


def test_neighbours_keep_their_tokens(engine, params):
    plain = [Request(n, PROMPT, sampling=SamplingParams(max_tokens=9)) for n in (2, 3)]
    alone = [ids(done) for done in engine.generate(params, plain)]
    for asked in (
        ASKED,
        SamplingParams(min_tokens=3),
        SamplingParams(bad_words=((4,),)),
    ):
        asked = dataclasses.replace(asked, max_tokens=7)
        beside = engine.generate(params, [Request(1, PROMPT, sampling=asked), *plain])
        assert [ids(done) for done in beside[1:]] == alone


def test_a_bias_alone_is_drawn_in_long_bursts(engine, params):
    asked = SamplingParams(logit_bias=((11, 100.0),), max_tokens=8)
    engine.submit(Request(1, PROMPT, sampling=asked))
    engine.step(params)
    [first] = engine.unfinished()
    assert len(first.tokens) == SIZES.steps_per_call
    [cut] = engine.cancel()
    assert set(ids(cut)) == {11}


def test_no_stop_before_the_least_tokens(engine, params):
    # Every token would stop.
    stops = SamplingParams(stop_ids=(3, 7), logit_bias=((3, 90.0), (7, 90.0)))
    asked = dataclasses.replace(stops, min_tokens=5, max_tokens=9)
    [done] = engine.generate(params, [Request(1, PROMPT, sampling=asked)])
    assert len(done.tokens) == 6
    assert done.finish_reason == "stop"
    assert not {3, 7} & set(ids(done)[:5])
    # The log-prob of what had to come is that among what could.
    assert np.isfinite(done.tokens.logprobs).all()


@pytest.mark.parametrize(("least", "length"), [(0, 3), (2, 3), (3, 6), (5, 8)])
def test_no_stop_string_before_the_least_tokens(engine, params, least, length):
    asked = SamplingParams(max_tokens=12, stop_strings=("xxx",), min_tokens=least)
    [done] = engine.generate(params, [Request(1, PROMPT, sampling=asked)])
    expected = next(n for n in range(3, 12) if n > least)
    assert len(done.tokens) == expected <= length


def test_bad_words_do_not_come(engine, params):
    greedy = SamplingParams(0.0, max_tokens=8)
    [plain] = engine.generate(params, [Request(1, PROMPT, sampling=greedy)])
    said = ids(plain)
    words = (tuple(said[2:4]), (said[0],))
    asked = dataclasses.replace(greedy, bad_words=words)
    [done] = engine.generate(params, [Request(1, PROMPT, sampling=asked)])
    found = []
    for _ in range(8):
        scores = next_logits(params, (*PROMPT, *found))
        scores[said[0]] = -np.inf
        if found[-1:] == [said[2]]:
            scores[said[3]] = -np.inf
        found.append(int(scores.argmax()))
    assert ids(done) == found


def test_limits_within_a_constraint():
    class Even:
        def allowed(self):
            return bits(range(0, 40, 2))

        def advance(self, token):
            assert token % 2 == 0

    limits = LimitedTokens(
        SamplingParams(min_tokens=1, stop_ids=(2,), bad_words=((4, 6), (8,))),
        Even(),
        VOCAB,
    )
    even = set(range(0, 40, 2))

    def allowed():
        return {t for t in range(64) if limits.allowed()[t // 32] >> (t % 32) & 1}

    assert allowed() == even - {2, 8}
    limits.advance(4)
    assert allowed() == even - {6, 8}
    limits.advance(4)
    limits.advance(10)
    assert allowed() == even - {8}
    assert not limits.over

    class Two(Even):
        def allowed(self):
            return bits([2])

    with pytest.raises(ConstraintError, match="no token is left"):
        LimitedTokens(SamplingParams(min_tokens=1, stop_ids=(2,)), Two(), VOCAB)


def test_an_interrupted_sample_goes_on(engine, params):
    asked = dataclasses.replace(ASKED, max_tokens=10, min_tokens=4, stop_ids=(3,))
    request = Request(1, PROMPT, sampling=asked)
    [whole] = engine.generate(params, [request])
    engine.submit(request)
    for _ in range(3):
        engine.step(params)
    [cut] = engine.cancel()
    count = len(cut.tokens)
    assert 0 < count < len(whole.tokens)
    rest = dataclasses.replace(
        request,
        prompt=(*PROMPT, *ids(cut)),
        num_sampled=count,
        sampling=dataclasses.replace(asked, max_tokens=10 - count),
    )
    [after] = engine.generate(params, [rest])
    assert ids(cut) + ids(after) == ids(whole)


@pytest.mark.meshes
def test_a_mesh_that_splits_the_vocabulary(params):
    mesh = create_mesh("dp2,tp2", jax.devices()[:4])
    asked = dataclasses.replace(ASKED, max_tokens=6, alternatives=True, min_tokens=2)
    requests = [
        Request(1, PROMPT, sampling=asked),
        Request(2, PROMPT, sampling=SamplingParams(max_tokens=6)),
    ]
    split = Engine(tiny.CONFIG, SIZES, mesh=mesh)
    found = split.generate(tiny.params(mesh=mesh), requests)
    alone = Engine(tiny.CONFIG, SIZES).generate(params, requests)
    for one, other in zip(found, alone, strict=True):
        assert ids(one) == ids(other)
        np.testing.assert_allclose(
            one.tokens.logprobs, other.tokens.logprobs, atol=1e-5
        )
        np.testing.assert_allclose(
            one.tokens.log_masses, other.tokens.log_masses, atol=1e-5
        )


def test_requests_that_change_nothing_are_decoded_as_before(params):
    engine = Engine(tiny.CONFIG, SIZES)
    engine.submit(Request(1, PROMPT, sampling=SamplingParams(max_tokens=2)))
    engine.scheduler.prefill()
    burst = engine.scheduler.burst()
    assert (burst.constrained, burst.single, burst.changes) == (False, False, 0)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"logit_bias": ((40, 1.0),)}, r"logit_bias ids must lie in 0\.\.39; got 40"),
        ({"bad_words": ((5, 40),)}, r"bad_words ids must lie in 0\.\.39; got 40"),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "min_tokens must be at most max_tokens, 4",
        ),
        ({"logit_bias": ((1, 0.1),) * 1025}, "at most 1024 tokens; got 1025"),
        ({"bad_words": tuple((t,) for t in range(40))}, "no token is left"),
    ],
)
def test_what_cannot_be_is_refused(engine, sampling, said):
    asked = SamplingParams(**({"max_tokens": 4} | sampling))
    with pytest.raises(ValueError, match=said):
        engine.submit(Request(1, PROMPT, sampling=asked))
    assert not engine.busy


@pytest.mark.parametrize(
    "sampling", [{"min_tokens": -1}, {"bad_words": ((),)}, {"repetition_penalty": 0.0}]
)
def test_parameters_out_of_range(sampling):
    with pytest.raises(ValueError, match=next(iter(sampling))):
        SamplingParams(**sampling)


def test_an_exact_engine_says_that_it_does_not():
    engine = Engine(tiny.CONFIG, dataclasses.replace(SIZES, exact=8))
    with pytest.raises(ValueError, match="an exact engine has no logit_bias"):
        engine.submit(
            Request(1, PROMPT, sampling=dataclasses.replace(ASKED, max_tokens=2))
        )
