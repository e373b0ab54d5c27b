"""Constraints, alternatives and noise ids: what a served request may ask for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from jaxrl_post.models import forward, logits
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.requests import MOST_ALTERNATIVES, ConstraintError
from jaxrl_post.sampler.sampling import SamplingArrays
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.sampler.test_sampling import drawn

SIZES = EngineConfig(
    num_slots=4,
    max_prompt_tokens=24,
    max_tokens=24,
    steps_per_call=4,
    prefill_tokens=64,
    max_stop_ids=2,
)
VOCAB = tiny.CONFIG.vocab_size
PROMPT = (5, 9, 2)


def bits(tokens, vocab=VOCAB):
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


class Alternating:
    """Even tokens, then odd ones, in turn; records what it saw."""

    def __init__(self):
        self.seen = []

    def allowed(self):
        return bits(range(len(self.seen) % 2, VOCAB, 2))

    def advance(self, token):
        assert token % 2 == len(self.seen) % 2
        self.seen.append(token)


class Failing(Alternating):
    """Cannot tell what may come after the second token."""

    def advance(self, token):
        super().advance(token)
        if len(self.seen) == 2:
            raise ConstraintError("it is too complex")


@pytest.fixture(scope="module")
def params():
    return tiny.shared()


@pytest.fixture(scope="module")
def engine():
    return Engine(tiny.CONFIG, SIZES)


def request(prompt_id, *, count=6, temperature=1.0, constrained=True, **fields):
    sampling = SamplingParams(temperature=temperature, max_tokens=count)
    given = {"sampling": sampling} | fields
    constrain = Alternating if constrained else None
    return Request(prompt_id, PROMPT, constrain=constrain, **given)


def ids(completion):
    return completion.tokens.ids.tolist()


def settings(rows, temperature=1.0, top_k=0):
    ones = np.ones(rows, np.float32)
    none = np.zeros(rows, np.int32)
    return SamplingArrays(ones * temperature, none + top_k, ones, ones * 0)


def one_row(scores, allowed, *, temperature=1.0, top_k=0, rows=4096):
    """`sample` of one row of logits at every uniform of a grid."""
    uniforms = (np.arange(rows, dtype=np.float32) + 0.5) / rows
    return drawn(
        jnp.tile(jnp.asarray(scores, jnp.float32), (rows, 1)),
        uniforms,
        settings(rows, temperature, top_k),
        truncate=top_k > 0,
        allowed=np.tile(bits(allowed, len(scores)), (rows, 1)),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_only_allowed_tokens_are_drawn_with_the_right_frequencies(temperature):
    scores = np.random.default_rng(0).normal(0, 2, 70)
    allowed = [0, 3, 31, 32, 33, 64, 69]
    out = one_row(scores, allowed, temperature=temperature)
    counts = np.bincount(np.asarray(out.tokens), minlength=70) / 4096
    whole = softmax(scores / temperature)
    mass = whole[allowed].sum()
    expected = np.zeros(70)
    expected[allowed] = whole[allowed] / mass
    np.testing.assert_allclose(counts, expected, atol=1e-3)
    # The log-prob is still over the whole softmax; the mass is over the allowed tokens.
    np.testing.assert_allclose(out.log_masses, np.log(mass), atol=1e-5)
    chosen = np.log(whole)[np.asarray(out.tokens)]
    np.testing.assert_allclose(out.logprobs, chosen, atol=1e-5)


def test_a_row_records_the_same_whatever_its_neighbours_do():
    scores = np.zeros((2, 40), np.float32)
    found = []
    for top_k in (0, 5):
        given = settings(2)._replace(top_k=jnp.array([0, top_k], jnp.int32))
        out = drawn(
            jnp.asarray(scores),
            jnp.array([0.3, 0.3]),
            given,
            truncate=True,
            kept_ids=8,
            allowed=np.stack([bits([0, 1, 2], 40), bits(range(40), 40)]),
        )
        found.append((out.kept[0].tolist(), float(out.log_masses[0])))
    assert found[0] == found[1]
    assert found[0][0] == [0, 1, 2, *[-1] * 5]


def test_the_allowed_tokens_are_recorded_and_none_where_all_are_or_too_many():
    scores = np.arange(40.0, dtype=np.float32)
    masks = [[7], [3, 9], range(40), range(5)]
    out = drawn(
        jnp.asarray(np.stack([scores] * 4)),
        jnp.full(4, 0.5),
        settings(4),
        truncate=False,
        kept_ids=4,
        allowed=np.stack([bits(mask, 40) for mask in masks]),
    )
    none = [-1] * 4
    assert out.kept.tolist() == [[7, -1, -1, -1], [9, 3, -1, -1], none, none]
    # A token that had to come has no choice in it: its log-prob among these is 0.
    assert float(out.logprobs[0] - out.log_masses[0]) == 0


def test_top_k_counts_allowed_tokens_only():
    scores = np.arange(10.0)
    out = one_row(scores, [0, 1, 2, 3], top_k=2)
    assert sorted(set(np.asarray(out.tokens).tolist())) == [2, 3]
    mass = softmax(scores)[[2, 3]].sum()
    np.testing.assert_allclose(out.log_masses, np.log(mass), atol=1e-5)


def test_greedy_takes_the_likeliest_allowed_token_and_records_the_allowed_mass():
    scores = np.arange(10.0)
    out = one_row(scores, [1, 4], temperature=0.0, rows=8)
    assert np.asarray(out.tokens).tolist() == [4] * 8
    mass = softmax(scores)[[1, 4]].sum()
    np.testing.assert_allclose(out.log_masses, np.log(mass), atol=1e-5)


def test_allowed_tokens_of_tiny_probability_can_be_drawn():
    # exp(-200) is 0 in float32: relative to the whole vocabulary nothing would be left.
    scores = np.array([200.0, 0.0, np.log(3.0), -5.0])
    out = one_row(scores, [1, 2])
    counts = np.bincount(np.asarray(out.tokens), minlength=4) / 4096
    np.testing.assert_allclose(counts, [0, 0.25, 0.75, 0], atol=1e-3)
    np.testing.assert_allclose(out.log_masses, np.log(4.0) - 200, rtol=1e-6)


def test_alternatives_are_the_likeliest_tokens():
    scores = np.random.default_rng(1).normal(0, 2, (3, 50)).astype(np.float32)
    out = drawn(
        scores, np.zeros(3, np.float32), settings(3), truncate=False, alternatives=5
    )
    expected = np.sort(log_softmax(np.float64(scores), axis=1))[:, ::-1][:, :5]
    np.testing.assert_allclose(out.alternatives_logprobs, expected, atol=1e-5)
    order = np.argsort(-scores, axis=1)[:, :5]
    np.testing.assert_array_equal(out.alternatives, order)


def test_a_vocabulary_smaller_than_the_alternatives_is_padded():
    out = drawn(
        np.zeros((1, 3), np.float32),
        np.zeros(1, np.float32),
        settings(1),
        truncate=False,
        alternatives=5,
    )
    assert np.isneginf(np.asarray(out.alternatives_logprobs)[0, 3:]).all()


def test_the_engine_obeys_a_constraint_from_token_to_token(engine, params):
    samples = engine.generate(params, [request(1, count=9)])
    tokens = samples[0].tokens.ids
    assert len(tokens) == 9
    assert (tokens % 2 == np.arange(9) % 2).all()
    assert (samples[0].tokens.log_masses < 0).all()


def test_greedy_tokens_are_those_of_whole_forwards(engine, params):
    found = engine.generate(params, [request(1, temperature=0.0)])[0].tokens
    row = list(PROMPT)
    for place in range(6):
        hidden = forward(params, tiny.CONFIG, jnp.asarray([row]))[0, -1]
        scores = np.asarray(logits(params, tiny.CONFIG, hidden), np.float64)
        parity = np.arange(place % 2, VOCAB, 2)
        best = int(parity[np.argmax(scores[parity])])
        assert found.ids[place] == best
        every = log_softmax(scores)
        np.testing.assert_allclose(found.logprobs[place], every[best], atol=1e-4)
        mass = np.log(np.exp(every[parity]).sum())
        np.testing.assert_allclose(found.log_masses[place], mass, atol=1e-4)
        row.append(best)


def test_neighbours_of_a_constrained_sample_keep_their_tokens(engine, params):
    plain = [request(n, constrained=False, count=11) for n in (2, 3)]
    alone = [ids(c) for c in engine.generate(params, plain)]
    beside = engine.generate(params, [request(1), *plain])
    assert [ids(c) for c in beside[1:]] == alone


def test_a_constrained_sample_is_the_same_beside_others(engine, params):
    alone = ids(engine.generate(params, [request(1)])[0])
    others = [request(n, constrained=n % 2 == 0) for n in range(2, 8)]
    assert ids(engine.generate(params, [*others, request(1)])[-1]) == alone


def test_a_constraint_that_fails_fails_its_own_sample(engine, params):
    alone = ids(engine.generate(params, [request(1)])[0])
    failing = dataclasses.replace(request(2), constrain=Failing)
    failed, other = engine.generate(params, [failing, request(1)])
    assert failed.finish_reason == "failed"
    assert failed.error == (
        "request 2, sample 0: the constraint failed after token 2: it is too complex"
    )
    assert len(failed.tokens) == 2
    assert ids(other) == alone
    # Its slot is free again.
    assert ids(engine.generate(params, [request(1)])[0]) == alone


def test_an_interrupted_constrained_sample_goes_on(engine, params):
    whole = engine.generate(params, [request(1)])[0].tokens
    engine.submit(request(1))
    for _ in range(2):
        engine.step(params)
    [cut] = engine.cancel()
    assert cut.finish_reason == "cancelled"
    assert 0 < len(cut.tokens) < 6
    rest = request(1, num_sampled=len(cut.tokens), count=6 - len(cut.tokens))
    rest = dataclasses.replace(rest, prompt=(*PROMPT, *cut.tokens.ids.tolist()))
    both = cut.tokens + engine.generate(params, [rest])[0].tokens
    assert both.ids.tolist() == whole.ids.tolist()


@pytest.mark.meshes
def test_constraints_and_alternatives_on_a_mesh_that_splits_the_vocabulary(params):
    mesh = create_mesh("dp2,tp2", jax.devices()[:4])
    engine = Engine(tiny.CONFIG, SIZES, mesh=mesh)
    asked = SamplingParams(max_tokens=6, alternatives=True)
    requests = [request(1, sampling=asked), request(2, constrained=False)]
    split = engine.generate(tiny.params(mesh=mesh), requests)
    alone = Engine(tiny.CONFIG, SIZES).generate(params, requests)
    for one, other in zip(split, alone, strict=True):
        np.testing.assert_array_equal(one.tokens.ids, other.tokens.ids)
    np.testing.assert_allclose(
        split[0].alternatives.logprobs, alone[0].alternatives.logprobs, atol=1e-5
    )


def test_alternatives_belong_to_the_tokens_of_the_completion(engine, params):
    asked = SamplingParams(max_tokens=7, alternatives=True)
    plain = SamplingParams(max_tokens=7)
    requests = [Request(1, PROMPT, sampling=asked), Request(2, PROMPT, sampling=plain)]
    with_, without = engine.generate(params, requests)
    assert without.alternatives is None
    assert with_.alternatives.ids.shape == (7, MOST_ALTERNATIVES)
    for place in range(7):
        row = [*PROMPT, *with_.tokens.ids[:place].tolist()]
        hidden = forward(params, tiny.CONFIG, jnp.asarray([row]))[0, -1]
        scores = np.asarray(logits(params, tiny.CONFIG, hidden), np.float64)
        every = log_softmax(scores)
        best = np.sort(every)[::-1][:MOST_ALTERNATIVES]
        np.testing.assert_allclose(with_.alternatives.logprobs[place], best, atol=1e-4)
    # Asking for them changes nothing else.
    again = engine.generate(params, [Request(1, PROMPT, sampling=plain)])
    assert ids(again[0]) == ids(with_)


def test_a_stop_string_cuts_the_alternatives_too(params):
    engine = Engine(tiny.CONFIG, SIZES, detokenize=lambda ids: "x" * len(ids))
    asked = SamplingParams(max_tokens=8, stop_strings=("xxx",), alternatives=True)
    [done] = engine.generate(params, [Request(1, PROMPT, sampling=asked)])
    assert done.finish_reason == "stop_string"
    assert len(done.tokens) == len(done.alternatives.ids) == 3


def test_requests_with_a_noise_id_in_common_sample_the_same_at_once(engine, params):
    requests = [request(n, constrained=False, noise_id=77) for n in (1, 2)]
    requests.append(request(77, constrained=False))
    requests.append(request(3, constrained=False))
    samples = engine.generate(params, requests)
    same = [ids(c) for c in samples]
    assert same[0] == same[1] == same[2]
    assert same[3] != same[0]


def test_a_noise_id_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"noise_id must lie in 0\.\.2\*\*32 - 1"):
        request(1, noise_id=2**32)


def test_unfinished_samples_are_beginnings_of_the_finished_ones(engine, params):
    engine.submit(request(1, constrained=False, count=20))
    seen, done = [], []
    while engine.busy:
        done += engine.step(params)
        seen += [u.tokens for u in engine.unfinished()]
    assert len(seen) > 1
    for tokens in seen:
        assert ids(done[0])[: len(tokens)] == tokens.ids.tolist()
