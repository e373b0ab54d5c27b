"""Experts that the sampler records, after any traffic, and the trainer takes again."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.data.packing import Sequence, pack, trees
from jaxrl_post.learner.learner import Scorer
from jaxrl_post.learner.step import Policy, predict
from jaxrl_post.models import (
    KVCache,
    LayerSpec,
    MixtureOfExperts,
    ModelConfig,
    ShortConvolution,
    forward_with_experts,
)
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.guessing import Draft
from jaxrl_post.sharding import create_mesh
from jaxrl_post.tokens import Tokens
from tests import tiny
from tests.tiers import daily

EXPERTS = MixtureOfExperts(num_experts=8, experts_per_token=2, expert_size=12)
CONFIGS = {
    # The first layer has no experts.
    "attention": dataclasses.replace(
        tiny.CONFIG,
        model_type="deepseek_v3",
        num_layers=3,
        experts=dataclasses.replace(EXPERTS, scoring="sigmoid", shared_size=8),
        layers=(LayerSpec(), LayerSpec(mlp="experts"), LayerSpec(mlp="experts")),
    ),
    "states": dataclasses.replace(
        tiny.CONFIG,
        model_type="lfm2_moe",
        qk_norm="head",
        tie_embeddings=True,
        experts=EXPERTS,
        recurrence=ShortConvolution(kernel=3),
        layers=(LayerSpec("recurrence", "experts"), LayerSpec(mlp="experts")),
    ),
}
SIZES = EngineConfig(
    num_slots=4, max_prompt_tokens=56, max_tokens=16, context_tokens=64,
    steps_per_call=4, prefill_tokens=32, max_stop_ids=2, experts=True,
)  # fmt: skip
SAMPLING = SamplingParams(max_tokens=12)


@functools.cache
def params_of(name: str) -> Any:
    return tiny.params(CONFIGS[name])


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, 40, length).tolist())


@functools.partial(jax.jit, static_argnums=0)
def chosen(config: ModelConfig, params: Any, tokens: Any) -> Any:
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    *_, found = forward_with_experts(
        params,
        config,
        tokens,
        positions=places.astype(jnp.int32),
        kv_view=KVCache.zeros(config, *tokens.shape, jnp.float32),
    )
    return found


def check(name: str, before: tuple[int, ...], tokens: Tokens) -> None:
    """Record and lead name the experts of the token before each token."""
    whole = [*before, *tokens.ids.tolist()]
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(whole)] = whole
    expected = np.asarray(chosen(CONFIGS[name], params_of(name), padded))
    expected = expected[0, : len(whole) - 1]
    assert len(tokens.lead) == len(before)
    assert (tokens.lead[0] == -1).all()
    found = np.concatenate([tokens.lead, tokens.experts])[1:]
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))


@pytest.fixture(params=daily(list(CONFIGS), {"attention"}))
def name(request):
    return request.param


# Where tokens are recorded otherwise: a state does not meet a prompt's last token.
every_model = pytest.mark.parametrize("name", list(CONFIGS), indirect=True)


def engine_of(name: str, **options: Any) -> Engine:
    sizes = dataclasses.replace(SIZES, **options)
    return Engine(CONFIGS[name], sizes, seed=3)


@every_model
def test_prompts_of_several_chunks_and_groups(name):
    requests = [
        Request(1, prompt(1, 40), 3, sampling=SAMPLING),
        Request(2, prompt(2, 1), 2, sampling=SAMPLING),
        Request(
            3, prompt(3, 17), sampling=dataclasses.replace(SAMPLING, stop_ids=(7,))
        ),
        # It begins with tokens of another one.
        Request(4, (*prompt(1, 40)[:33], 5, 6), sampling=SAMPLING),
    ]
    done = engine_of(name).generate(params_of(name), requests)
    by_id = {each.prompt_id: each for each in requests}
    for each in done:
        check(name, by_id[each.prompt_id].prompt, each.tokens)


def test_turns_that_find_what_earlier_ones_left(name):
    engine, said = engine_of(name), prompt(5, 20)
    for turn in range(3):
        request = Request(turn, said, 2, sampling=SamplingParams(max_tokens=6))
        one, other = engine.generate(params_of(name), [request])
        before = engine.prefilled_tokens
        for each in (one, other):
            check(name, said, each.tokens)
        said = (*said, *one.tokens.ids.tolist(), 3 + turn, 4)
    assert before < 60, "the cache was of no use"


def test_scored_prompts(name):
    sampling = SamplingParams(max_tokens=5, prompt_scores=True)
    (done,) = engine_of(name).generate(
        params_of(name), [Request(1, prompt(1, 40), sampling=sampling)]
    )
    check(name, prompt(1, 40), done.tokens)


def test_a_cancelled_sample_and_the_one_that_continues_it(name):
    engine, params = engine_of(name), params_of(name)
    request = Request(1, prompt(6, 21), sampling=SAMPLING)
    engine.submit(request)
    engine.step(params)
    (first,) = engine.cancel()
    assert 0 < len(first.tokens) < SAMPLING.max_tokens
    check(name, request.prompt, first.tokens)
    (rest,) = engine.generate(params, [request.rest(0, first.tokens.ids.tolist())])
    check(name, (*request.prompt, *first.tokens.ids.tolist()), rest.tokens)
    # The whole answer has the record of both, and the lead of the first.
    check(name, request.prompt, first.tokens + rest.tokens)


@pytest.mark.parametrize("recompute", [False, True])
def test_other_parameters_in_the_middle_of_a_sample(name, recompute):
    engine = engine_of(name, recompute_cache=recompute)
    engine.submit(Request(1, prompt(6, 21), sampling=SAMPLING))
    engine.step(params_of(name))
    (begun,) = engine.unfinished()
    check(name, prompt(6, 21), begun.tokens)
    other, done = tiny.params(CONFIGS[name], seed=9), []
    while engine.busy:
        done += engine.step(other)
    known, tokens = len(begun.tokens), done[0].tokens
    # Sampled tokens keep their record, and every token has one.
    np.testing.assert_array_equal(tokens.experts[:known], begun.tokens.experts)
    np.testing.assert_array_equal(tokens.lead, begun.tokens.lead)
    assert (tokens.experts >= 0).all()


@pytest.mark.parametrize("drafted", [False, True])
def test_guesses(name, drafted):
    # A draft model carries no states.
    draft = Draft(CONFIGS["attention"], params_of("attention")) if drafted else None
    sizes = dataclasses.replace(SIZES, guesses=3, max_tokens=32)
    engine = Engine(CONFIGS[name], sizes, seed=3, draft=draft)
    said = (4, 5, 6, 7) * 6
    greedy = SamplingParams(temperature=0.0, max_tokens=32)
    for each in engine.generate(
        params_of(name), [Request(1, said, 2, sampling=greedy)]
    ):
        check(name, said, each.tokens)
    # Another model guesses nothing of this one.
    wrong = drafted and name != "attention"
    assert (engine.guessing.tokens == engine.guessing.passes) == wrong


@pytest.mark.meshes
def test_a_mesh_records_the_same():
    config = CONFIGS["attention"]
    mesh = create_mesh("dp2,tp2", jax.devices()[:4])
    engine = Engine(config, SIZES, seed=3, mesh=mesh)
    params = tiny.params(config, mesh=mesh)
    for each in engine.generate(
        params, [Request(1, prompt(1, 40), 4, sampling=SAMPLING)]
    ):
        check("attention", prompt(1, 40), each.tokens)


def test_models_without_experts_and_exact_engines_are_refused():
    with pytest.raises(ValueError, match="experts is true, and llama has none"):
        Engine(tiny.CONFIG, SIZES)
    with pytest.raises(ValueError, match="an exact trainer chooses"):
        Engine(CONFIGS["attention"], dataclasses.replace(SIZES, exact=8))


def sequences(name: str) -> list[Sequence]:
    """Two answers to one prompt, another prompt's, and one of two turns."""
    engine, params = engine_of(name), params_of(name)
    requests = [
        Request(1, prompt(1, 24), 2, sampling=SamplingParams(max_tokens=6)),
        Request(2, prompt(2, 5), sampling=SamplingParams(max_tokens=6)),
    ]
    done = engine.generate(params, requests)
    parts = [
        (Tokens.context(requests[each.prompt_id - 1].prompt), each.tokens)
        for each in done
    ]
    whole = [context.read_before(said) + said.led_by(None) for context, said in parts]
    longer = (*whole[0].ids.tolist(), 8, 9, 10)
    (turn,) = engine.generate(
        params, [Request(3, longer, sampling=SamplingParams(max_tokens=6))]
    )
    reply = Tokens.context([8, 9, 10]).read_before(turn.tokens)
    whole.append(whole[0] + reply + turn.tokens.led_by(None))
    return [
        Sequence(each, np.full(len(each), 1.0 + i, np.float32))
        for i, each in enumerate(whole)
    ]


def packed(units: Any, rows: int = 1) -> Any:
    return pack(units, 64, rows)


def logprobs(policy: Policy, params: Any, batch: Any, mesh: Any = None) -> np.ndarray:
    if mesh is None:
        found = predict(policy, params, batch)
    else:
        found = Scorer(policy, mesh, 2).predict(params, batch)
    return np.asarray(found.logprobs)


def measured(policy: Policy, params: Any, batch: Any) -> dict[str, float]:
    metrics = predict(policy, params, batch).metrics or {}
    return {name: float(metric.mean()) for name, metric in metrics.items()}


@every_model
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "trees"])
def test_the_trainer_finds_its_own_choice_in_the_record(name, shared):
    """A record that is off by a token would change experts."""
    units = sequences(name)
    batch = packed(trees(units) if shared else units)
    policy, params = Policy(CONFIGS[name], replay=True), params_of(name)
    assert measured(policy, params, batch)["router/changed_experts"] == 0
    mask = batch.loss_mask
    np.testing.assert_allclose(
        logprobs(policy, params, batch)[mask], batch.behavior_logprobs[mask], atol=1e-4
    )
    known = (batch.experts >= 0).all(axis=(2, 3))
    # All but the last token of each sequence, which predicts nothing.
    ends = np.count_nonzero(batch.ends) - np.count_nonzero(known & (batch.ends > 0))
    assert ends == 4
    shifted = batch.replace(experts=np.roll(batch.experts, 1, axis=1))
    assert measured(policy, params, shifted)["router/changed_experts"] > 0.3


def test_a_policy_that_does_not_replay_ignores_the_record(name):
    batch = packed(sequences(name))
    other = batch.replace(experts=np.zeros_like(batch.experts))
    policy, params = Policy(CONFIGS[name]), params_of(name)
    np.testing.assert_array_equal(
        logprobs(policy, params, batch), logprobs(policy, params, other)
    )
    assert "router/changed_experts" not in measured(policy, params, batch)


@pytest.mark.meshes
@pytest.mark.parametrize("spec", ["dp2", "cp2", "ep2"])
def test_meshes_replay_the_same(spec):
    config = CONFIGS["attention"]
    batch = packed(trees(sequences("attention")), rows=2)
    # Experts that the routers would not choose, so that they matter.
    given = np.where(batch.experts >= 0, (batch.experts + 3) % 8, np.int16(-1))
    batch = batch.replace(experts=given)
    policy = Policy(config, replay=True)
    alone = create_mesh("dp1", jax.devices()[:1])
    expected, found, own = (
        logprobs(each, tiny.params(config, mesh=mesh), batch, mesh)[batch.loss_mask]
        for each, mesh in (
            (policy, alone),
            (policy, create_mesh(spec, jax.devices()[:2])),
            (Policy(config), alone),
        )
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(expected - own).max() > 0.1


def test_replay_takes_what_rounding_adds_to_the_mismatch():
    """The sampler in bfloat16, the trainer in float32."""
    config = dataclasses.replace(
        CONFIGS["attention"], experts=dataclasses.replace(EXPERTS, num_experts=64)
    )
    wide = tiny.params(config)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    sizes = dataclasses.replace(SIZES, num_slots=64)
    requests = [Request(i, prompt(i, 8), sampling=SamplingParams(max_tokens=16))
                for i in range(64)]  # fmt: skip
    done = Engine(config, sizes, seed=3, dtype=jnp.bfloat16).generate(narrow, requests)
    units = []
    for each in done:
        context = Tokens.context(requests[each.prompt_id].prompt)
        whole = context.read_before(each.tokens) + each.tokens.led_by(None)
        units.append(Sequence(whole, np.zeros(len(whole), np.float32)))
    batch = packed(units)
    gaps = {}
    for replay in (False, True):
        policy = Policy(config, replay=replay)
        gap = logprobs(policy, wide, batch) - batch.behavior_logprobs
        gap = gap[batch.loss_mask]
        gaps[replay] = float(np.abs(gap).mean())
    # 0.040 and 0.084 nats a token, when this was written.
    assert gaps[True] < 0.6 * gaps[False]
