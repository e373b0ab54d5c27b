"""States in the sampler: a token's log-prob is the trainer's after any traffic.

The model's middle layers carry states, so a state that is read at a wrong place, met by
a token twice, or left by another sequence shows in the log-probs.
"""

import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.models import (
    GatedDelta,
    LayerSpec,
    Mamba2,
    ModelConfig,
    ShortConvolution,
    forward,
    logits,
)
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sampler import pages as cache
from jaxrl_post.sampler.snapshots import Snapshots
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.tiers import daily

CONVOLUTION = ShortConvolution(kernel=3, bias=True)
CONFIGS = {
    "convolution": dataclasses.replace(
        tiny.CONFIG,
        model_type="lfm2",
        num_layers=4,
        qk_norm="head",
        tie_embeddings=True,
        recurrence=CONVOLUTION,
        layers=tuple(
            map(LayerSpec, ("recurrence", "recurrence", "attention", "recurrence"))
        ),
    ),
    "delta": dataclasses.replace(
        tiny.CONFIG,
        model_type="qwen3_5_text",
        qk_norm="head",
        norm_plus_one=True,
        # The norm of heads blows up an output of nearly 0, and so what rounding has
        # added to it: with 1e-6 one token of some thousands is off by 2e-4.
        rms_norm_eps=0.01,
        attention_gate=True,
        recurrence=GatedDelta(
            kernel=4,
            key_heads=2,
            value_heads=4,
            key_dim=16,
            value_dim=12,
        ),
        layers=(LayerSpec("recurrence"), LayerSpec("attention")),
    ),
    # Layers without an MLP, and one with an MLP alone, as in Nemotron-H.
    "mamba": dataclasses.replace(
        tiny.CONFIG,
        model_type="nemotron_h",
        num_layers=4,
        rms_norm_eps=0.01,
        activation="relu2",
        recurrence=Mamba2(
            kernel=4,
            key_heads=2,
            value_heads=4,
            key_dim=16,
            value_dim=12,
        ),
        layers=(
            LayerSpec("recurrence", None),
            LayerSpec(None),
            LayerSpec("attention", None, rotated=False),
            LayerSpec("recurrence", None),
        ),
    ),
}
# Prompts of several chunks and pages; samples of several bursts.
SIZES = EngineConfig(
    num_slots=4, max_prompt_tokens=56, max_tokens=12, context_tokens=64,
    steps_per_call=4, prefill_tokens=32, max_stop_ids=2,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    """A model whose layers have states of one kind."""

    config: ModelConfig
    params: Any

    def engine(self, sizes: EngineConfig = SIZES, **options) -> Engine:
        return Engine(self.config, sizes, seed=3, **options)

    def expected(self, prompt, ids, params=None) -> np.ndarray:
        """The log-probs of tokens after a prompt, by one forward pass."""
        whole = [*prompt, *ids]
        padded = np.zeros((1, SIZES.max_length), np.int32)
        padded[0, : len(whole)] = whole
        params = self.params if params is None else params
        found = np.asarray(log_probs(self.config, params, jnp.asarray(padded)))[0]
        at = np.arange(len(prompt) - 1, len(whole) - 1)
        return found[at, np.array(ids, np.int32)]

    def check(self, prompt, completion, params=None) -> None:
        ids = completion.tokens.ids.tolist()
        expected = self.expected(prompt, ids, params)
        np.testing.assert_allclose(completion.tokens.logprobs, expected, atol=1e-4)


MODELS = {name: Model(config, tiny.params(config)) for name, config in CONFIGS.items()}


# Delta nets stand for Mamba-2 each day: they share all but two functions.
@pytest.fixture(params=daily(list(MODELS), {"convolution", "delta"}))
def model(request):
    return MODELS[request.param]


@functools.partial(jax.jit, static_argnums=0)
def log_probs(config, params, tokens):
    return jax.nn.log_softmax(logits(params, config, forward(params, config, tokens)))


def draw(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4, 40) for _ in range(length))


def ask(number, prompt, samples=1, most=8, **options) -> Request:
    sampling = SamplingParams(max_tokens=most, **options)
    return Request(number, prompt, samples, sampling=sampling)


@pytest.mark.parametrize(
    "length",
    daily([1, 2, 3, 15, 16, 17, 31, 32, 33, 34, 48, 56], {1, 2, 16, 17, 33, 34, 56}),
)
def test_prompts_of_any_length(model, length):
    prompt = draw(random.Random(length), length)
    for done in model.engine().generate(model.params, [ask(1, prompt, 3)]):
        model.check(prompt, done)


@pytest.mark.parametrize("chunk", daily([16, 32, 64], {16}))
def test_a_prompt_in_chunks_is_the_whole_prompt(model, chunk):
    prompt = draw(random.Random(0), 50)
    sizes = dataclasses.replace(SIZES, prefill_tokens=chunk)
    [done] = model.engine(sizes).generate(model.params, [ask(1, prompt)])
    model.check(prompt, done)


def test_turns_prefill_what_is_new_alone(model):
    """After an answer, and after the end of a prompt that others continue."""
    sampler, rng = model.engine(), random.Random(1)
    prompt = draw(rng, 20)
    [first] = sampler.generate(model.params, [ask(1, prompt)])
    assert sampler.prefilled_tokens == 19
    answer = first.tokens.ids.tolist()
    longer = (*prompt, *answer, *draw(rng, 5))
    [second] = sampler.generate(model.params, [ask(2, longer)])
    # The last token of an answer has not been fed, nor the last one of the prompt.
    assert sampler.prefilled_tokens == 19 + 5
    model.check(longer, second)
    other = (*prompt, *draw(rng, 6))
    [third] = sampler.generate(model.params, [ask(3, other)])
    assert sampler.prefilled_tokens == 19 + 5 + 6
    model.check(other, third)


def test_a_prompt_that_begins_like_another_continues_after_a_chunk(model):
    sampler, rng = model.engine(), random.Random(2)
    prompt = draw(rng, 50)
    sampler.generate(model.params, [ask(1, prompt)])
    before = sampler.prefilled_tokens
    other = (*prompt[:40], *draw(rng, 10))
    [done] = sampler.generate(model.params, [ask(2, other)])
    # 32 of the 40 tokens end with a chunk.
    assert sampler.prefilled_tokens - before == 49 - 32
    model.check(other, done)


def test_new_parameters_begin_with_no_state_of_the_old(model):
    sampler, rng = model.engine(), random.Random(3)
    prompt = draw(rng, 30)
    sampler.generate(model.params, [ask(1, prompt)])
    others = tiny.params(model.config, seed=1)
    [done] = sampler.generate(others, [ask(2, prompt)], version=1)
    model.check(prompt, done, others)


def test_a_sample_that_is_taken_back_continues(model):
    sampler, rng = model.engine(), random.Random(4)
    prompt = draw(rng, 21)
    sampler.submit(ask(1, prompt, 3, most=12))
    sampler.step(model.params)
    taken = sampler.cancel()
    assert [len(each.tokens) for each in taken] == [8, 8, 8]
    before = sampler.prefilled_tokens
    for each in taken:
        so_far = each.tokens.ids.tolist()
        request = dataclasses.replace(
            ask(1, (*prompt, *so_far), most=4),
            first_sample=each.sample_index,
            num_sampled=len(so_far),
        )
        [done] = sampler.generate(model.params, [request])
        model.check(request.prompt, done)
    # Their states were kept where they stopped.
    assert sampler.prefilled_tokens == before


def test_a_stop_string_leaves_no_state_behind(model):
    """The device does not know of it: the next burst is running already."""
    rng = random.Random(8)
    prompt = draw(rng, 9)
    text = "".join
    [whole] = model.engine().generate(
        model.params, [ask(1, prompt, most=12, temperature=0.0)]
    )
    ids = whole.tokens.ids.tolist()
    sampler = model.engine(detokenize=lambda ids: text(chr(200 + each) for each in ids))
    stop = text(chr(200 + each) for each in ids[:2])
    request = ask(1, prompt, most=12, temperature=0.0, stop_strings=(stop,))
    [done] = sampler.generate(model.params, [request])
    assert done.finish_reason == "stop_string"
    # The tokens of the burst are in the cache, those behind the stop string too.
    longer = (*prompt, *ids[:4], 7)
    [after] = sampler.generate(model.params, [ask(2, longer)])
    model.check(longer, after)


def test_scores_of_a_prompt_are_the_trainers(model):
    for length in (1, 2, 33, 40):
        prompt = draw(random.Random(length), length)
        request = ask(1, prompt, prompt_scores=True)
        [done] = model.engine().generate(model.params, [request])
        assert done.prompt is not None
        found = done.prompt.logprobs
        assert len(found) == length - 1
        np.testing.assert_allclose(
            found, model.expected(prompt[:1], prompt[1:])[: length - 1], atol=1e-4
        )
        model.check(prompt, done)


def any_traffic(model, sizes, seed, params_of, **options) -> Engine:
    """Prompts, branches, turns and stops at random; all log-probs are the trainer's.

    Args:
        model: gives the config.
        sizes: of the engine.
        seed: of the traffic.
        params_of: the parameters of a version.
        **options: of the engine.
    """
    rng = random.Random(seed)
    sampler, texts = model.engine(sizes, **options), [draw(rng, 20)]
    sampler.guessing.cost = -1.0
    slots = [tree.states.room for tree in sampler.scheduler.trees]
    # States of delta nets are heavy here.
    assert slots == [20 if model.config.recurrence == CONVOLUTION else 10]
    waiting, sent = {}, 0
    version, params = 0, params_of(0)
    for _ in range(60):
        if rng.random() < 0.6 and len(waiting) < 12:
            start = rng.choice(texts)
            prompt = start[: rng.randrange(len(start) + 1)]
            prompt = (*prompt, *draw(rng, rng.randrange(1, 20)))[:52]
            stops = {"stop_ids": (rng.randrange(4, 40),)} if rng.random() < 0.5 else {}
            count, most = rng.choice((1, 1, 2, 5)), rng.randrange(1, 13)
            sampler.submit(ask(sent, prompt, count, most, **stops))
            for index in range(count):
                waiting[sent, index] = prompt
            sent += 1
        if rng.random() < 0.1 and waiting:
            for done in sampler.cancel({rng.choice([*waiting])}):
                prompt = waiting.pop((done.prompt_id, done.sample_index))
                if len(done.tokens):
                    model.check(prompt, done, params)
        if rng.random() < 0.05 and not waiting:
            version += 1
            params = params_of(version)
        for done in sampler.step(params, version=version):
            prompt = waiting.pop((done.prompt_id, done.sample_index))
            model.check(prompt, done, params)
            texts.append((*prompt, *done.tokens.ids.tolist())[:50])
    assert sent > 5
    sampler.cancel()
    # The states of the last chunks are given back before the next chunks.
    sampler.scheduler.prefill()
    # No slot is lost.
    assert [tree.states.room for tree in sampler.scheduler.trees] == slots
    return sampler


@pytest.mark.parametrize("seed", daily(range(100), {0}))
@pytest.mark.parametrize("pages", daily([0, 26], {26}))
def test_any_traffic(model, seed, pages):
    """In a cache that is full or not."""
    versions = model.params, tiny.params(model.config, seed=1)
    sizes = dataclasses.replace(SIZES, cache_tokens=16 * pages)
    any_traffic(model, sizes, seed, lambda version: versions[version % 2])


def wrong(name: str, patch: pytest.MonkeyPatch) -> None:
    """States as they would be with a fault."""
    read, write = cache.read_states, cache.write_states
    if name == "never read":
        patch.setattr(
            "jaxrl_post.sampler.decode.read_states",
            lambda *args: jax.tree.map(jnp.zeros_like, read(*args)),
        )
    elif name == "never written":
        patch.setattr(
            "jaxrl_post.sampler.decode.write_states",
            lambda config, pages, new, slots, rules: pages.states,
        )
    elif name == "given to two":
        patch.setattr(Snapshots, "take", _always_first(Snapshots.take))
    assert write


def _always_first(take):
    def same(pool):
        found = take(pool)
        found.slot = 0
        return found

    return same


@pytest.mark.parametrize("fault", ["never read", "never written", "given to two"])
def test_a_wrong_state_shows(model, fault, monkeypatch):
    wrong(fault, monkeypatch)
    sizes = dataclasses.replace(SIZES, num_slots=3 + len(fault))
    sampler, rng = model.engine(sizes), random.Random(5)
    prompts = [draw(rng, 40), draw(rng, 33)]
    requests = [ask(number, prompt) for number, prompt in enumerate(prompts)]
    found = sampler.generate(model.params, requests)
    # The first of the samples alone may have the state that all have.
    with pytest.raises(AssertionError):
        model.check(prompts[0], found[0])


@pytest.mark.meshes
@pytest.mark.parametrize("mesh", daily(["dp2", "tp2", "dp2,tp2"], {"dp2,tp2"}))
def test_a_mesh_changes_nothing(model, mesh):
    made = create_mesh(mesh, jax.devices()[: 4 if "," in mesh else 2])
    params = tiny.params(model.config, mesh=made)
    rng = random.Random(6)
    prompts = [draw(rng, length) for length in (5, 33, 20)]
    with jax.set_mesh(made):
        sampler = model.engine(mesh=made)
        requests = [ask(n, prompt, 2) for n, prompt in enumerate(prompts)]
        found = sampler.generate(params, requests)
        again = [
            ask(10, (*prompts[1], *found[2].tokens.ids.tolist(), 7)),
        ]
        [turn] = sampler.generate(params, again)
    for done in found:
        model.check(prompts[done.prompt_id], done)
    model.check(again[0].prompt, turn)
