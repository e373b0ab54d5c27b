"""Guesses for models whose layers carry a state: samples stay as they are.

The state after a pass is that after the tokens that counted. A state that met a wrong
guess, or missed a right one, shows in the log-probs of all later tokens.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post.models import MixtureOfExperts, ModelConfig, param_specs
from jaxrl_post.models.recurrent import closed
from jaxrl_post.sampler import Draft, Engine, Request, SamplingParams
from jaxrl_post.sharding import create_mesh, named_shardings
from tests import tiny
from tests.sampler.test_engine import assert_same_samples
from tests.sampler.test_states import (
    CONFIGS,
    SIZES,
    Model,
    any_traffic,
    ask,
    draw,
)
from tests.tiers import daily

SIZES = dataclasses.replace(SIZES, max_stop_ids=8)
GUESSING = dataclasses.replace(SIZES, guesses=3, guess_rows=64)
# A draft model of another shape, with keys alone.
SMALL = ModelConfig(
    "llama", 40, 16, 24, 1, num_heads=4, num_kv_heads=2, head_dim=4, max_length=64
)


def echoing(config, seed=0, likely=3.0):
    """Parameters of a model that often repeats its last token.

    Its layers change what it says, but less than the last token does.

    Args:
        config: of the model.
        seed: of the parameters.
        likely: factor of the logits.
    """
    made = tiny.params(config, seed=seed)

    written = "output", "outputs", "outputs_bias", "down"

    def quiet(path, leaf):
        return 0.05 * leaf if path[-1].name in written else leaf

    made = made.replace(
        layers=jax.tree_util.tree_map_with_path(quiet, made.layers),
        final_norm=jnp.full_like(made.final_norm, likely - config.norm_plus_one),
    )
    if made.unembedding is None:
        return made
    return made.replace(unembedding=made.embedding)


# The layers of Qwen3.5 with experts.
EXPERTS = dataclasses.replace(
    CONFIGS["delta"],
    model_type="qwen3_5_moe_text",
    experts=MixtureOfExperts(4, 2, 8, shared_size=8, shared_gate=True),
    layers=tuple(
        dataclasses.replace(layer, mlp="experts") for layer in CONFIGS["delta"].layers
    ),
)
MODELS = {
    name: Model(config, echoing(config))
    for name, config in (CONFIGS | {"experts": EXPERTS}).items()
}


# Its layers have a memory and the windows of convolutions.
@pytest.fixture(params=daily(list(MODELS), {"delta"}))
def model(request):
    return MODELS[request.param]


def guesser(model, sizes=GUESSING, **options):
    """An engine that guesses, at every cost and gain."""
    engine = model.engine(sizes, **options)
    engine.guessing.cost = -1.0
    return engine


def requests(stops=()):
    """Prompts of several chunks and pages; samples of two of them may stop."""
    rng = random.Random(0)
    samplings = (
        SamplingParams(max_tokens=12),
        SamplingParams(temperature=0.3, max_tokens=11, stop_ids=stops),
        SamplingParams(temperature=0.0, max_tokens=11),
        SamplingParams(temperature=1.6, top_p=0.9, max_tokens=12, stop_ids=stops),
    )
    return [
        Request(number, draw(rng, 5 + 15 * number), 3, sampling=sampling)
        for number, sampling in enumerate(samplings)
    ]


def test_samples_are_those_without_guesses(model):
    plain, engine = model.engine(SIZES), guesser(model)
    whole = plain.generate(model.params, requests())
    assert_same_samples(engine.generate(model.params, requests()), whole)
    # In the middle of passes, too.
    stops = tuple({int(done.tokens.ids[4 + n % 4]) for n, done in enumerate(whole)})
    expected = plain.generate(model.params, requests(stops[:8]))
    assert_same_samples(engine.generate(model.params, requests(stops[:8])), expected)
    # Some were stopped. Some guesses were right, and some were not.
    assert {done.finish_reason for done in expected} == {"length", "stop"}
    assert 1.1 < engine.guessing.tokens / engine.guessing.passes < 3
    # The slots hold states of other samples by now.
    assert_same_samples(engine.generate(model.params, requests()), whole)


@pytest.mark.parametrize("seed", daily(range(100), {0}))
@pytest.mark.parametrize("pages", daily([0, 26], {26}))
def test_any_traffic(model, seed, pages):
    versions = model.params, echoing(model.config, seed=1)
    sizes = dataclasses.replace(GUESSING, cache_tokens=16 * pages)
    engine = any_traffic(model, sizes, seed, lambda version: versions[version % 2])
    assert engine.guessing.tokens >= engine.guessing.passes + 10


def test_a_turn_after_a_pass_that_ended_early(model):
    """Neither guesses nor the last token of an answer are in the state that is kept."""
    rng = random.Random(1)
    for most in (1, 2, 3, 5, 6):
        engine, prompt = guesser(model), draw(rng, 20)
        [first] = engine.generate(model.params, [ask(1, prompt, most=most)])
        before = engine.prefilled_tokens
        longer = (*prompt, *first.tokens.ids.tolist(), *draw(rng, 5))
        [second] = engine.generate(model.params, [ask(2, longer)])
        assert engine.prefilled_tokens - before == 5
        model.check(longer, second)


def test_cancelled_samples_go_on(model):
    request = ask(1, draw(random.Random(2), 21), 3, most=12)
    whole = model.engine(SIZES).generate(model.params, [request])
    engine = guesser(model)
    engine.submit(request)
    engine.step(model.params)
    parts = sorted(engine.cancel(), key=lambda each: each.sample_index)
    assert [len(each.tokens) for each in parts] == [4, 4, 4]
    before = engine.prefilled_tokens
    rest = [
        dataclasses.replace(
            ask(1, (*request.prompt, *part.tokens.ids.tolist())),
            first_sample=part.sample_index,
            num_sampled=4,
        )
        for part in parts
    ]
    done = engine.generate(model.params, rest)
    joined = [
        dataclasses.replace(end, tokens=part.tokens + end.tokens)
        for part, end in zip(parts, done, strict=True)
    ]
    assert_same_samples(joined, whole)
    # Their states were kept where they stopped.
    assert engine.prefilled_tokens == before


def test_a_draft_model_guesses(model):
    """It has keys alone, and is fed with what the sampled model's states have met."""
    draft = Draft(SMALL, echoing(SMALL))
    expected = model.engine(SIZES).generate(model.params, requests())
    engine = guesser(model, draft=draft)
    assert_same_samples(engine.generate(model.params, requests()), expected)
    assert 1 < engine.guessing.tokens / engine.guessing.passes < 3.5
    versions = model.params, echoing(model.config, seed=1)
    any_traffic(model, GUESSING, 0, lambda version: versions[version % 2], draft=draft)


@pytest.mark.meshes
@pytest.mark.parametrize("mesh", daily(["dp2", "tp2", "dp2,tp2"], {"dp2,tp2"}))
@pytest.mark.parametrize("drafted", daily([False, True], {False}))
def test_on_a_mesh(model, mesh, drafted):
    expected = model.engine(SIZES).generate(model.params, requests())
    made = create_mesh(mesh, jax.devices()[: 4 if "," in mesh else 2])

    def placed(config, params):
        return jax.device_put(params, named_shardings(param_specs(config), made))

    with jax.set_mesh(made):
        draft = Draft(SMALL, placed(SMALL, echoing(SMALL))) if drafted else None
        engine = guesser(model, mesh=made, draft=draft)
        params = placed(model.config, model.params)
        assert_same_samples(engine.generate(params, requests()), expected)
    assert engine.guessing.tokens > engine.guessing.passes > 0


@pytest.mark.parametrize("fault", ["rewound", "met all"])
def test_a_wrong_state_shows(model, fault, monkeypatch):
    """States as they would be without the right tokens, or with wrong guesses."""
    count = {"rewound": 0, "met all": 4}[fault]
    monkeypatch.setattr(
        "jaxrl_post.sampler.decode.closed",
        lambda states, new: closed(states, jnp.full_like(new, count)),
    )
    sizes = dataclasses.replace(GUESSING, num_slots=5 + count)
    # A model that is less sure of its tokens, whose guesses are seldom right.
    model = Model(model.config, tiny.params(model.config))
    prompt = draw(random.Random(5), 20)
    [found] = guesser(model, sizes).generate(model.params, [ask(1, prompt)])
    with pytest.raises(AssertionError):
        model.check(prompt, found)


def test_drafts_with_states_and_guesses_in_exact_mode_are_refused():
    model = MODELS["convolution"]
    exact = dataclasses.replace(GUESSING, exact=8)
    with pytest.raises(ValueError, match=r"guesses is 3, and exact mode has no states"):
        model.engine(exact)
    with pytest.raises(ValueError, match=r"draft model is a lfm2, whose layers carry"):
        Engine(SMALL, GUESSING, draft=Draft(model.config, model.params))
