"""Guesses of the next tokens change the time of sampling and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import forward, logits
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.guessing import Guessing, look_up
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.sampler.test_engine import assert_same_samples, ids

SIZES = EngineConfig(
    num_slots=8,
    max_prompt_tokens=32,
    max_tokens=32,
    steps_per_call=16,
    prefill_tokens=32,
    max_stop_ids=1,
)
GUESSING = dataclasses.replace(SIZES, guesses=3, guess_rows=64)
# Greedy answers of a tiny model soon repeat themselves, hot ones do not.
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=32),
    SamplingParams(temperature=0.4, max_tokens=27, stop_ids=(3,)),
    SamplingParams(temperature=1.5, max_tokens=32),
)


@pytest.fixture(scope="module")
def params():
    return tiny.shared()


def markov(likely):
    """A model whose next token depends on the last one alone, and is often the same.

    Args:
        likely: factor of the logits.
    """
    made = tiny.params()
    layers = [
        layer.replace(
            attention=layer.attention.replace(
                output=jnp.zeros_like(layer.attention.output)
            ),
            mlp=layer.mlp.replace(down=jnp.zeros_like(layer.mlp.down)),
        )
        for layer in made.layers
    ]
    made = made.replace(
        layers=tuple(layers), final_norm=jnp.full_like(made.final_norm, likely)
    )
    return (
        made if made.unembedding is None else made.replace(unembedding=made.embedding)
    )


def requests():
    rng = np.random.default_rng(0)
    return [
        Request(number, tuple(rng.integers(0, 40, 9).tolist()), 3, sampling=sampling)
        for number, sampling in enumerate(SAMPLINGS)
    ]


def looked_up(history, count):
    """The same in plain Python."""
    size = len(history)
    for match in (3, 2):
        for at in range(size - 2, match - 2, -1):
            if history[at - match + 1 : at + 1] == history[size - match :]:
                found = history[at + 1 : at + 1 + count]
                return (found * count)[:count]
    return [-1] * count


def test_look_up_finds_what_followed():
    rng = np.random.default_rng(1)
    histories = [rng.integers(0, 4, size).tolist() for size in range(1, 25)]
    padded = np.full((len(histories), 24), 9, np.int32)
    for row, history in zip(padded, histories, strict=True):
        row[: len(history)] = history
    sizes = jnp.array([len(history) for history in histories], jnp.int32)
    found = np.asarray(look_up(jnp.asarray(padded), sizes, 4)).tolist()
    assert found == [looked_up(history, 4) for history in histories]
    assert sum(row[0] >= 0 for row in found) > 10


def test_samples_are_those_without_guesses(params):
    for each in (params, markov(0.4)):
        plain, guessing = Engine(tiny.CONFIG, SIZES), Engine(tiny.CONFIG, GUESSING)
        expected = plain.generate(each, requests())
        assert_same_samples(guessing.generate(each, requests()), expected)
        assert guessing.guessing.passes > 0
    # Some answers were stopped, and some guesses were right.
    assert {len(each.tokens) for each in expected} != {32}
    assert guessing.guessing.tokens > 1.2 * guessing.guessing.passes


def test_right_guesses_need_fewer_passes():
    """A model that repeats the last token: each pass samples four tokens."""
    engine = Engine(tiny.CONFIG, GUESSING)
    request = Request(5, (4, 4, 4), 1, sampling=SAMPLINGS[0])
    [done] = engine.generate(markov(1.0), [request])
    assert ids(done) == (4,) * 32
    assert engine.guessing.passes == 8


@pytest.mark.meshes
@pytest.mark.parametrize("spec", ["dp4,tp2"])
def test_on_a_mesh(spec):
    mesh = create_mesh(spec)
    params = tiny.params(mesh=mesh)
    sizes = dataclasses.replace(GUESSING, guess_rows=64)
    expected = Engine(tiny.CONFIG, SIZES, mesh=mesh).generate(params, requests())
    engine = Engine(tiny.CONFIG, sizes, mesh=mesh)
    assert_same_samples(engine.generate(params, requests()), expected)
    assert engine.guessing.passes > 0


def test_exact_log_probs_with_guesses(params):
    """In exact mode guesses change no bit, though passes have other rows."""
    plain = Engine(tiny.CONFIG, dataclasses.replace(SIZES, exact=8))
    guessing = Engine(tiny.CONFIG, dataclasses.replace(GUESSING, exact=8))
    expected = plain.generate(params, requests()[:2])
    found = guessing.generate(params, requests()[:2])
    assert guessing.guessing.passes > 0
    for ours, other in zip(found, expected, strict=True):
        assert ids(ours) == ids(other)
        np.testing.assert_array_equal(ours.tokens.logprobs, other.tokens.logprobs)


def test_guesses_pause_where_they_are_not_worth_it():
    guessing = Guessing(count=3, max_rows=32)
    assert guessing.guesses(slots=9) == 0
    guessing.record(passes=64, tokens=70)
    assert [guessing.guesses(slots=8) for _ in range(17)] == [0] * 16 + [3]
    guessing.record(passes=64, tokens=128)
    assert guessing.guesses(slots=8) == 3
    # Another policy is judged by its own passes alone.
    guessing.record(passes=64, tokens=64)
    assert guessing.guesses(slots=8) == 0
    guessing.restart()
    assert guessing.guesses(slots=8) == 3
    guessing.record(passes=64, tokens=100)
    assert guessing.guesses(slots=8) == 3


def test_drawn_tokens_follow_the_distribution():
    """Chi-square of the second tokens of 3,000 samples, drawn with guesses."""
    params = markov(0.5)
    sampling = SamplingParams(temperature=1.0, max_tokens=2)
    sizes = dataclasses.replace(GUESSING, num_slots=64, guess_rows=256, max_tokens=2)
    engine = Engine(tiny.CONFIG, sizes)
    request = Request(9, (4, 4, 4, 4), 3000, sampling=sampling)
    done = engine.generate(params, [request])
    # Many of the second tokens were guessed.
    assert engine.guessing.tokens > 1.4 * engine.guessing.passes > 0
    hidden = forward(params, tiny.CONFIG, jnp.arange(40, dtype=jnp.int32)[:, None])
    shares = jax.nn.softmax(logits(params, tiny.CONFIG, hidden[:, 0]))
    expected = 3000 * np.asarray(shares, np.float64)[4] @ np.asarray(shares)
    drawn = np.bincount([ids(each)[1] for each in done], minlength=40)
    assert expected.min() >= 5
    statistic = ((drawn - expected) ** 2 / expected).sum()
    # The 99.9 % quantile of chi-square with 39 degrees of freedom.
    assert statistic < 72.1
