"""Sparse attention in the sampler: a token's log-prob is the trainer's.

Queries see 8 keys, and prompts have up to 56 tokens: a key of an indexer that is read
at a wrong place, or left by another sequence, shows in the log-probs.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import Indexer, LatentAttention, LayerSpec, ModelConfig
from jaxrl_post.sampler import Engine
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.sampler.test_states import SIZES, Model, ask, draw
from tests.tiers import daily

OWN, SHARED = LayerSpec(), LayerSpec(indexed=False)
CONFIG = ModelConfig(
    "glm_moe_dsa", 40, 16, 24, 3, num_heads=8, num_kv_heads=8, max_length=64,
    rms_norm_eps=0.01, rope_interleaved=True,
    latent=LatentAttention(
        kv_rank=8, nope_dim=4, rope_dim=4, value_dim=6, query_rank=8, norm_eps=0.01,
        indexer=Indexer(8, num_heads=4, head_dim=6, context=64, interleaved=True),
    ),
    layers=(OWN, SHARED, OWN),
)  # fmt: skip
MODEL = Model(CONFIG, tiny.params(CONFIG))
GUESSING = dataclasses.replace(SIZES, guesses=3, guess_rows=64)


@pytest.mark.parametrize("length", [1, 7, 9, 16, 33, 56])
def test_prompts_of_any_length(length):
    prompt = draw(random.Random(length), length)
    for done in MODEL.engine().generate(MODEL.params, [ask(1, prompt, 3)]):
        MODEL.check(prompt, done)


@pytest.mark.parametrize("chunk", [16, 64])
def test_a_prompt_in_chunks_is_the_whole_prompt(chunk):
    prompt = draw(random.Random(0), 50)
    sizes = dataclasses.replace(SIZES, prefill_tokens=chunk)
    [done] = MODEL.engine(sizes).generate(MODEL.params, [ask(1, prompt)])
    MODEL.check(prompt, done)


@pytest.mark.parametrize("sizes", [SIZES, GUESSING], ids=["plain", "guesses"])
@pytest.mark.parametrize("seed", daily(range(20), {0}))
def test_any_traffic(sizes, seed):
    """Prompts, branches, turns, stops and samples that are taken back, at random."""
    rng = random.Random(seed)
    sampler, texts, waiting = MODEL.engine(sizes), [draw(rng, 20)], {}
    for sent in range(40):
        if rng.random() < 0.6 and len(waiting) < 12:
            start = rng.choice(texts)
            prompt = start[: rng.randrange(len(start) + 1)]
            prompt = (*prompt, *draw(rng, rng.randrange(1, 20)))[:52]
            stops = {"stop_ids": (rng.randrange(4, 40),)} if rng.random() < 0.5 else {}
            heat = {"temperature": 1.0 if rng.random() < 0.7 else 0.0}
            count, most = rng.choice((1, 2, 5)), rng.randrange(1, 13)
            sampler.submit(ask(sent, prompt, count, most, **stops, **heat))
            waiting |= {(sent, index): prompt for index in range(count)}
        if rng.random() < 0.1 and waiting:
            for done in sampler.cancel({rng.choice([*waiting])}):
                prompt = waiting.pop((done.prompt_id, done.sample_index))
                if len(done.tokens):
                    MODEL.check(prompt, done)
        for done in sampler.step(MODEL.params):
            prompt = waiting.pop((done.prompt_id, done.sample_index))
            MODEL.check(prompt, done)
            texts.append((*prompt, *done.tokens.ids.tolist())[:50])
    assert len(texts) > 10


def test_scores_of_a_prompt_are_the_trainers():
    prompt = draw(random.Random(5), 40)
    request = ask(1, prompt, prompt_scores=True)
    [done] = MODEL.engine().generate(MODEL.params, [request])
    expected = MODEL.expected(prompt[:1], prompt[1:])[:39]
    np.testing.assert_allclose(done.prompt.logprobs, expected, atol=1e-4)


def test_short_samples_have_the_cache_and_the_bits_of_full_attention():
    sizes = dataclasses.replace(
        SIZES, max_prompt_tokens=5, max_tokens=3, context_tokens=0
    )
    engine = MODEL.engine(sizes)
    assert [values.shape[-1] for values in engine.cache.values] == [0, 0, 0]
    within = Engine(CONFIG.within(8), sizes, seed=3)
    found = [
        each.generate(MODEL.params, [ask(1, (5, 6, 7), 4, most=3)])
        for each in (engine, within)
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.tokens.ids, other.tokens.ids)
        np.testing.assert_array_equal(one.tokens.logprobs, other.tokens.logprobs)
    longer = dataclasses.replace(sizes, max_prompt_tokens=6)
    engine = MODEL.engine(longer)
    assert [values.shape[-1] for values in engine.cache.values] == [6, 0, 6]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_codes_choose_nearly_the_same_keys(dtype):
    """Another key is chosen where scores are close, so the mean is compared."""
    prompts = [draw(random.Random(seed), 40) for seed in range(8)]
    engine = MODEL.engine(dtype=jnp.dtype(dtype))
    gaps = []
    for done in engine.generate(MODEL.params, list(map(ask, range(8), prompts))):
        prompt = prompts[done.prompt_id]
        expected = MODEL.expected(prompt, done.tokens.ids.tolist())
        gaps.append(np.abs(expected - done.tokens.logprobs))
    assert 1e-4 < np.concatenate(gaps).mean() < 1.0


def test_exact_mode_keeps_the_limit():
    sizes = dataclasses.replace(SIZES, exact=8)
    with pytest.raises(ValueError, match=r"more than 8 tokens \(index_topk\)"):
        MODEL.engine(sizes)
    sizes = dataclasses.replace(
        sizes, max_prompt_tokens=5, max_tokens=3, context_tokens=0
    )
    [done] = MODEL.engine(sizes).generate(MODEL.params, [ask(1, (5, 6), most=3)])
    MODEL.check((5, 6), done)


@pytest.mark.meshes
@pytest.mark.parametrize("mesh", daily(["dp2", "tp2", "dp2,tp2"], {"dp2,tp2"}))
def test_a_mesh_changes_nothing(mesh):
    made = create_mesh(mesh, jax.devices()[: 4 if "," in mesh else 2])
    params, rng = tiny.params(CONFIG, mesh=made), random.Random(6)
    prompts = [draw(rng, length) for length in (5, 33, 20)]
    with jax.set_mesh(made):
        sampler = MODEL.engine(mesh=made)
        requests = [ask(n, prompt, 2) for n, prompt in enumerate(prompts)]
        for done in sampler.generate(params, requests):
            MODEL.check(prompts[done.prompt_id], done)
