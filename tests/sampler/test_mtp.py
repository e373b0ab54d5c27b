"""A layer for multi-token prediction guesses; samples stay as they are.

One forward pass over the whole sequence gives the same guesses, so the number of passes
is known: a key that is missing, or made from another token's hidden state, shows in it.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import forward, initialize, logits, param_specs
from jaxrl_post.models.mtp import MTPTokens, mtp_config, mtp_specs, with_mtp_layer
from jaxrl_post.sampler import Draft, Engine, Request, SamplingParams
from jaxrl_post.sampler import decode as device
from jaxrl_post.sharding import create_mesh, named_shardings
from tests import tiny
from tests.sampler.test_engine import assert_same_samples
from tests.sampler.test_guessed_states import GUESSING, MODELS, SIZES, echoing, requests
from tests.sampler.test_states import any_traffic, draw
from tests.tiers import daily

LONGEST = SIZES.max_length


def layer_of(model, seed=5):
    """A layer that often expects the last token again, and is moved by all it reads."""
    config = mtp_config(model.config)
    made = initialize(jax.random.key(seed), mtp_specs(config))
    width = config.hidden_size
    drawn = jax.random.normal(jax.random.key(seed + 1), (width, width))
    return Draft(
        config,
        made.replace(
            fusion=jnp.concatenate([jnp.eye(width), 0.5 * drawn]),
            layers=model.params.layers[-1:],
            final_norm=model.params.final_norm,
        ),
    )


@pytest.fixture(params=daily(["delta", "experts"], {"delta"}))
def model(request):
    return MODELS[request.param]


def guesser(model, sizes=GUESSING, **options):
    """An engine that guesses with a layer, at every cost and gain."""
    options = {"draft": layer_of(model)} | options
    engine = model.engine(sizes, **options)
    engine.guessing.cost = -1.0
    return engine


class Whole:
    """The passes that greedy samples take, by forward passes over whole sequences."""

    def __init__(self, model, draft):
        self._model, self._draft = model, draft
        self._decoder = with_mtp_layer(model.params, draft.params)
        self._run = jax.jit(self._forward)

    def _forward(self, tokens, before):
        given = MTPTokens(tokens, before, self._draft.params, self._draft.config)
        hidden = forward(self._decoder, self._draft.config, given)
        return hidden, logits(self._decoder, self._draft.config, hidden).argmax(-1)

    def guesses(self, known, states, count):
        """The guesses behind `known` tokens, with the model's hidden states."""
        tokens = np.zeros((1, LONGEST + 4), np.int32)
        tokens[0, : len(known)] = known
        before = np.zeros((1, LONGEST + 4, states.shape[-1]), np.float32)
        before[0, 1 : len(known)] = states[: len(known) - 1]
        found = []
        for at in range(len(known), len(known) + count):
            hidden, best = self._run(jnp.asarray(tokens), jnp.asarray(before))
            found.append(int(best[0, at - 1]))
            tokens[0, at], before[0, at] = found[-1], hidden[0, at - 1]
        return found

    def passes(self, prompt, ids, sizes):
        """Forward passes of the bursts that sample `ids`."""
        whole = [*prompt, *ids]
        padded = np.zeros((1, LONGEST + 4), np.int32)
        padded[0, : len(whole)] = whole
        padded = jnp.asarray(padded)
        states = np.asarray(forward(self._model.params, self._model.config, padded)[0])
        count, done, burst = 0, 0, 0
        while done < len(ids):
            known = whole[: len(prompt) + done]
            guessed = self.guesses(known, states, sizes.guesses)
            most = min(len(ids) - done, sizes.steps_per_call - burst)
            right = 0
            while right < most - 1 and guessed[right : right + 1] == [
                ids[done + right]
            ]:
                right += 1
            count, done, burst = count + 1, done + right + 1, burst + right + 1
            burst %= sizes.steps_per_call
        return count


def greedy(number, length, most=12):
    prompt = draw(random.Random(number), length)
    sampling = SamplingParams(temperature=0.0, max_tokens=most)
    return Request(number, prompt, 1, sampling=sampling)


def passes_of(engine, model, given):
    """The passes of a request, and its completion."""
    before = engine.guessing.passes
    [done] = engine.generate(model.params, [given])
    return engine.guessing.passes - before, done


@pytest.mark.parametrize(
    "sizes",
    [GUESSING, dataclasses.replace(GUESSING, guesses=1, steps_per_call=12)],
    ids=["three guesses", "one guess"],
)
def test_passes_are_those_of_whole_sequences(model, sizes):
    """Prompts of one token, of a page, of several chunks; then a further turn."""
    engine, whole = guesser(model, sizes), Whole(model, layer_of(model))
    seen = []
    for number, length in enumerate((1, 2, 16, 17, 33, 45)):
        given = greedy(number, length)
        passes, done = passes_of(engine, model, given)
        ids = done.tokens.ids.tolist()
        assert passes == whole.passes(given.prompt, ids, sizes)
        seen.append(len(ids) / passes)
        if len(given.prompt) + len(ids) + 4 < 40:
            longer = (*given.prompt, *ids, *draw(random.Random(9), 4))
            further = dataclasses.replace(greedy(50 + number, 1), prompt=longer)
            before = engine.prefilled_tokens
            passes, done = passes_of(engine, model, further)
            assert engine.prefilled_tokens - before <= 5
            ids = done.tokens.ids.tolist()
            assert passes == whole.passes(longer, ids, sizes)
    # Some guesses were right, and some were not.
    assert 1.1 < np.mean(seen) < sizes.guesses + 0.9


def test_the_layer_is_fed_without_guesses_too(model):
    """Bursts in a pause leave no holes."""
    engine, whole = guesser(model), Whole(model, layer_of(model))
    for number in range(4):
        given, before = greedy(number, 21), engine.guessing.passes
        engine.submit(given)
        engine.guessing._pause = 1
        engine.dispatch(model.params)
        assert not engine.settle()
        done = []
        while not done:
            done = engine.step(model.params)
        ids = done[0].tokens.ids.tolist()
        # The first two bursts had no guesses, 4 tokens each.
        assert engine.guessing.tokens == 4 * (number + 1)
        known = (*given.prompt, *ids[:8])
        passes = engine.guessing.passes - before
        assert passes == whole.passes(known, ids[8:], GUESSING)
    assert engine.guessing.passes < 16


@pytest.mark.parametrize("fault", ["no hidden state", "state of the call before"])
def test_the_control_fails(model, monkeypatch, fault):
    """Passes differ where the layer reads something else."""
    found, kept = device._without_hidden, device.write_states

    def nothing(view, params):
        before, view = found(view, params)
        return jnp.zeros_like(before), view

    def stale(specs, pages, new, slots, rules):
        if len(specs) == 1 and len(new) == 1:
            return pages.states
        return kept(specs, pages, new, slots, rules)

    if fault == "no hidden state":
        monkeypatch.setattr(device, "_without_hidden", nothing)
    else:
        monkeypatch.setattr(device, "write_states", stale)
    sizes = dataclasses.replace(GUESSING, max_stop_ids=7)
    engine, whole = guesser(model, sizes), Whole(model, layer_of(model))
    wrong = 0
    for number in range(6):
        given = greedy(number, 17 + number)
        passes, done = passes_of(engine, model, given)
        ids = done.tokens.ids.tolist()
        wrong += passes != whole.passes(given.prompt, ids, sizes)
    assert wrong


def test_samples_are_those_without_guesses(model):
    plain, engine = model.engine(SIZES), guesser(model)
    expected = plain.generate(model.params, requests())
    assert_same_samples(engine.generate(model.params, requests()), expected)
    stops = tuple({int(d.tokens.ids[4 + n % 4]) for n, d in enumerate(expected)})[:8]
    expected = plain.generate(model.params, requests(stops))
    assert_same_samples(engine.generate(model.params, requests(stops)), expected)
    assert {done.finish_reason for done in expected} == {"length", "stop"}
    assert 1.1 < engine.guessing.tokens / engine.guessing.passes < 3


# The layer changes no sample, and test_guessed_states.py has traffic with guesses.
@pytest.mark.parametrize("seed", daily(range(10), ()))
def test_any_traffic(model, seed):
    versions = model.params, echoing(model.config, seed=1)
    sizes = dataclasses.replace(GUESSING, cache_tokens=16 * 26)
    engine = any_traffic(
        *(model, sizes, seed, lambda version: versions[version % 2]),
        draft=layer_of(model),
    )
    assert engine.guessing.tokens >= engine.guessing.passes + 10


def test_a_quantised_cache(model):
    plain = model.engine(SIZES, dtype=jnp.int8)
    engine = guesser(model, dtype=jnp.int8)
    expected = plain.generate(model.params, requests())
    assert_same_samples(engine.generate(model.params, requests()), expected)
    assert engine.cache.states
    assert engine.guessing.tokens > 1.1 * engine.guessing.passes


@pytest.mark.meshes
@pytest.mark.parametrize("mesh", daily(["dp2", "tp2", "dp2,tp2"], {"dp2,tp2"}))
def test_on_a_mesh(model, mesh):
    expected = model.engine(SIZES).generate(model.params, requests())
    made = create_mesh(mesh, jax.devices()[: 4 if "," in mesh else 2])
    draft = layer_of(model)
    with jax.set_mesh(made):
        specs = mtp_specs(draft.config)
        placed = jax.device_put(draft.params, named_shardings(specs, made))
        engine = guesser(model, mesh=made, draft=Draft(draft.config, placed))
        shardings = named_shardings(param_specs(model.config), made)
        params = jax.device_put(model.params, shardings)
        assert_same_samples(engine.generate(params, requests()), expected)
    assert engine.guessing.tokens > 1.1 * engine.guessing.passes


def test_prompts_with_scores(model):
    """A call that scores a prompt feeds the layer too."""
    engine, whole = guesser(model), Whole(model, layer_of(model))
    given = greedy(4, 23)
    sampling = dataclasses.replace(given.sampling, prompt_scores=True)
    given = dataclasses.replace(given, sampling=sampling)
    passes, done = passes_of(engine, model, given)
    ids = done.tokens.ids.tolist()
    assert passes == whole.passes(given.prompt, ids, GUESSING)


def test_refused():
    model = MODELS["delta"]
    exact = dataclasses.replace(SIZES, exact=8)
    with pytest.raises(ValueError, match="neither in exact mode nor"):
        Engine(model.config, exact, draft=layer_of(model))
    config = tiny.CONFIG
    layer = mtp_config(config)
    draft = Draft(layer, initialize(jax.random.key(0), mtp_specs(layer)))
    with pytest.raises(ValueError, match=f"{config.model_type} has none"):
        Engine(config, dataclasses.replace(GUESSING, exact=0), draft=draft)
