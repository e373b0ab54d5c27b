"""Samples of prompts with pictures, against the trainer's log-probs."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_post.data.packing import Sequence, pack, trees
from jaxrl_post.learner.learner import Scorer
from jaxrl_post.learner.step import Policy
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sharding import create_mesh
from jaxrl_post.tokens import Tokens
from tests.models.vision.rows_of_pictures import NAMES, drawn, seeing
from tests.tiers import daily

# Two programs compute these float32 log-probs.
TOLERANCE = 3e-5
# The fixtures' distributions are narrow, and a likely token's log-prob tells little.
HOT = 4.0
SIZES = EngineConfig(num_slots=8, max_prompt_tokens=40, max_tokens=16, steps_per_call=4)


def engine(config, **changes):
    return Engine(config, dataclasses.replace(SIZES, **changes))


def prompt_of(config):
    one, two = drawn(config, 2, 3, 0), drawn(config, 3, 2, 1)
    return (5, 6, *one.ids, 7, 8, *two.ids, 9)


def sampled(made, params, requests):
    """Prompts and completions by sample."""
    prompts = {request.prompt_id: request.prompt for request in requests}
    return {
        (each.prompt_id, each.sample_index): (prompts[each.prompt_id], each.tokens)
        for each in made.generate(params, requests)
    }


def gap(config, params, samples, *, grouped=True):
    """Largest difference between the sampler's log-probs and the trainer's."""
    units = [
        Sequence(
            Tokens.context(prompt) + tokens,
            np.ones(len(prompt) + len(tokens), np.float32),
        )
        for prompt, tokens in samples.values()
    ]
    batch = pack(trees(units) if grouped else units, 128, 1)
    found = Scorer(
        Policy(config, HOT), create_mesh("dp1", jax.devices()[:1]), 1
    ).predict(params, batch)
    differences = np.abs(found.logprobs - batch.behavior_logprobs)
    assert batch.loss_mask.sum() == sum(len(tokens) for _, tokens in samples.values())
    return differences[batch.loss_mask].max()


def requests_of(config, prompt):
    text = SamplingParams(HOT, max_tokens=6)
    return [
        Request(1, prompt, 4, sampling=SamplingParams(HOT, max_tokens=8)),
        Request(2, (5, 6, *drawn(config, 3, 2, 1).ids, 7), 2, sampling=text),
        Request(3, (5, 6, 7), 2, sampling=text),
    ]


@pytest.mark.parametrize(
    "name", daily(NAMES, {"qwen3_5_moe", "qwen3_vl", "qwen2_5_vl"})
)
def test_sampler_and_trainer_agree(name):
    config, params = seeing(name)
    samples = sampled(engine(config), params, requests_of(config, prompt_of(config)))
    assert gap(config, params, samples) < TOLERANCE
    assert gap(config, params, samples, grouped=False) < TOLERANCE
    # The control: with another picture of the same size they do not.
    other = drawn(config, 2, 3, 9).ids
    changed = {
        key: ((*prompt[:2], *other, *prompt[8:]), tokens)
        for key, (prompt, tokens) in samples.items()
        if key[0] == 1
    }
    assert gap(config, params, changed) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_chunks_that_cut_a_picture_change_nothing(name):
    config, params = seeing(name)
    # Chunks of 16 tokens end inside of the second picture.
    picture = drawn(config, 4, 5, 3)
    prompt = (5, 6, *drawn(config, 2, 3, 0).ids, 7, *picture.ids, 9)
    requests = [Request(1, prompt, 2, sampling=SamplingParams(HOT, max_tokens=8))]
    whole = sampled(engine(config), params, requests)
    parts = sampled(engine(config, prefill_tokens=16), params, requests)
    for key, (_, tokens) in whole.items():
        assert tokens.ids.tolist() == parts[key][1].ids.tolist()
        np.testing.assert_allclose(
            tokens.logprobs, parts[key][1].logprobs, atol=TOLERANCE
        )
    assert gap(config, params, parts) < TOLERANCE


def test_the_cache_holds_pictures_by_their_content():
    config, params = seeing("qwen3_vl")
    made = engine(config)
    picture, other = drawn(config, 4, 4, 3), drawn(config, 4, 4, 4)
    few = SamplingParams(HOT, max_tokens=4)
    made.generate(params, [Request(1, (5, *picture.ids, 7), sampling=few)])
    before = made.prefilled_tokens
    samples = sampled(
        made, params, [Request(2, (5, *picture.ids, 7, 8, 9), sampling=few)]
    )
    # The cache had 18 of 20 tokens: a whole page, and two more of the segment.
    assert made.prefilled_tokens - before == 2
    assert gap(config, params, samples) < TOLERANCE
    before = made.prefilled_tokens
    samples = sampled(
        made, params, [Request(3, (5, *other.ids, 7, 8, 9), sampling=few)]
    )
    assert made.prefilled_tokens - before == 20
    assert gap(config, params, samples) < TOLERANCE


def test_a_suspended_sample_goes_on():
    config, params = seeing("qwen3_vl")
    sampling = SamplingParams(max_tokens=12)
    request = Request(1, prompt_of(config), sampling=sampling)
    (whole,) = engine(config).generate(params, [request])
    made = engine(config)
    made.submit(request)
    made.step(params)
    (part,) = made.cancel()
    rest = request.rest(0, part.tokens.ids.tolist())
    (after,) = engine(config).generate(params, [rest])
    assert 0 < len(part.tokens) < 12
    joined = [*part.tokens.ids.tolist(), *after.tokens.ids.tolist()]
    assert joined == whole.tokens.ids.tolist()


def test_guesses_and_penalties_with_pictures():
    config, params = seeing("qwen3_vl")
    prompt = prompt_of(config)
    request = Request(1, prompt, 2, sampling=SamplingParams(max_tokens=12))
    plain = sampled(engine(config), params, [request])
    guessed = sampled(engine(config, guesses=3, guess_rows=64), params, [request])
    for key, (_, tokens) in plain.items():
        assert tokens.ids.tolist() == guessed[key][1].ids.tolist()
    penalized = SamplingParams(
        max_tokens=6, temperature=0.0, repetition_penalty=1.3, prompt_scores=True
    )
    (done,) = engine(config).generate(params, [Request(1, prompt, sampling=penalized)])
    assert len(done.tokens) == 6
    assert done.prompt is not None
    assert np.isfinite(done.prompt.logprobs).all()


def test_what_cannot_be_sampled_is_refused():
    config, _ = seeing("qwen3_vl")
    prompt, few = prompt_of(config), SamplingParams(HOT, max_tokens=4)
    made = engine(config)
    with pytest.raises(ValueError, match="must end with a token of text"):
        made.submit(Request(1, prompt[:-1], sampling=few))
    blind = Engine(dataclasses.replace(config, vision=None), SIZES)
    with pytest.raises(ValueError, match="does not see"):
        blind.submit(Request(1, prompt, sampling=few))
    with pytest.raises(ValueError, match="picture in memory has this one"):
        made.submit(Request(1, (5, -9, 6), sampling=few))
    with pytest.raises(ValueError, match="token ids must lie in 0"):
        blind.submit(Request(1, (5, -9, 6), sampling=few))
    assert not made.busy
