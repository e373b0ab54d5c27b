"""A cache of int8 or float8: near to the trainer, and the same in every batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels.decode_attention import CODE_DTYPES
from jaxrl_post.models import ModelConfig, forward, logits
from jaxrl_post.models.config import LatentAttention
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.sampler.test_engine import assert_same_samples, mixed_requests
from tests.tiers import daily

SIZES = EngineConfig(
    num_slots=8,
    max_prompt_tokens=32,
    max_tokens=32,
    steps_per_call=16,
    prefill_tokens=64,
    max_stop_ids=2,
)
LONGEST = 48
every_dtype = pytest.mark.parametrize("dtype", CODE_DTYPES)


@pytest.fixture(scope="module")
def params():
    """Half the weights: the tests' own model multiplies what is rounded."""
    return jax.tree.map(lambda x: x if x.ndim == 1 else x / 2, tiny.shared())


def drawn(config, params, dtype, sizes=SIZES, mesh=None):
    engine = Engine(config, sizes, dtype=jnp.dtype(dtype), mesh=mesh)
    return engine, engine.generate(params, mixed_requests())


def error(config, params, dtype):
    """Mean absolute difference of log-probs between sampler and trainer (nats)."""

    @jax.jit
    def score(tokens):
        positions = jnp.arange(LONGEST, dtype=jnp.int32)[None]
        hidden = forward(params, config, tokens[None], positions=positions)
        return logits(params, config, hidden[0])

    _, completions = drawn(config, params, dtype)
    found = []
    by_prompt = {request.prompt_id: request for request in mixed_requests()}
    for done in completions:
        request = by_prompt[done.prompt_id]
        begin, count = len(request.prompt), len(done.tokens)
        tokens = np.zeros(LONGEST, np.int32)
        tokens[: begin + count] = *request.prompt, *done.tokens.ids
        scores = score(tokens)[begin - 1 : begin - 1 + count]
        scores = jax.nn.log_softmax(scores / (request.sampling.temperature or 1.0))
        expected = np.asarray(scores)[np.arange(count), done.tokens.ids]
        found.append(np.abs(expected - done.tokens.logprobs))
    return float(np.concatenate(found).mean())


LATENT = ModelConfig(
    "deepseek_v3", 40, 16, 24, 2, num_heads=4, num_kv_heads=4, max_length=64,
    latent=LatentAttention(kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4),
)  # fmt: skip


def test_log_probs_are_near_to_the_trainers(params):
    plain = error(tiny.CONFIG, params, "float32")
    int8 = error(tiny.CONFIG, params, "int8")
    float8 = error(tiny.CONFIG, params, "float8_e4m3fn")
    # int8 has 7 bits below a token's largest value, float8 has 3 below its own.
    assert plain < 1e-6 < 1e-4 < int8 < float8 < 0.05


def test_latents_are_quantised_too(params):
    own = jax.tree.map(lambda x: x if x.ndim == 1 else x / 2, tiny.params(LATENT))
    engine, _ = drawn(LATENT, own, "int8")
    keys, values = engine.cache.keys[0], engine.cache.values[0]
    assert keys.codes.shape[-1] == 12
    assert values.shape[-1] == 0
    assert 1e-4 < error(LATENT, own, "int8") < 0.02


# The batch changes where codes lie, for every dtype alike.
@pytest.mark.parametrize("dtype", daily(CODE_DTYPES, CODE_DTYPES[:1]))
def test_samples_are_the_same_whatever_the_batch(params, dtype):
    """Slots, lengths of bursts, chunks of prompts and rows of a pass differ."""
    _, expected = drawn(tiny.CONFIG, params, dtype)
    for change in (
        {"num_slots": 2, "steps_per_call": 3, "prefill_tokens": 16},
        {"guesses": 3, "guess_rows": 64},
    ):
        sizes = dataclasses.replace(SIZES, **change)
        _, found = drawn(tiny.CONFIG, params, dtype, sizes)
        assert_same_samples(found, expected)


def test_another_turn_reads_the_codes_of_the_first(params):
    engine, _ = drawn(tiny.CONFIG, params, "int8")
    request = mixed_requests()[3]
    first = engine.generate(params, [request])[0]
    context = (*request.prompt, *first.tokens.ids.tolist())
    again = Request(7, context, 1, sampling=SamplingParams(max_tokens=8))
    before = engine.prefilled_tokens
    [found] = engine.generate(params, [again])
    assert engine.prefilled_tokens == before + 1
    fresh = Engine(tiny.CONFIG, SIZES, dtype=jnp.dtype("int8"))
    assert_same_samples([found], fresh.generate(params, [again]))


@pytest.mark.meshes
# Slots and heads are divided on both; tests/sampler has other meshes in other files.
@pytest.mark.parametrize("spec", daily(["dp4,tp2", "fsdp2,tp4"], ["dp4,tp2"]))
def test_a_mesh_changes_nothing(params, spec):
    mesh = create_mesh(spec)
    moved = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding),
        params,
        tiny.params(mesh=mesh),
    )
    _, expected = drawn(tiny.CONFIG, params, "int8")
    engine, found = drawn(tiny.CONFIG, moved, "int8", mesh=mesh)
    assert_same_samples(found, expected)
    split = engine.cache.keys[0].codes.sharding.shard_shape(
        engine.cache.keys[0].codes.shape
    )
    assert split[1] == tiny.CONFIG.num_kv_heads // mesh.shape["tp"]


def test_memory_is_as_arithmetic_says():
    config = dataclasses.replace(tiny.CONFIG, head_dim=64)

    def size(dtype):
        engine = Engine(config, SIZES, dtype=jnp.dtype(dtype))
        return sum(leaf.nbytes for leaf in jax.tree.leaves(engine.cache))

    # Four bytes an entry, or one, and four a head.
    for dtype in CODE_DTYPES:
        assert size(dtype) * (64 * 4) == size("float32") * (64 + 4)


def test_a_sample_whose_keys_are_nan_fails_alone(params):
    """NaN has no code; the scale carries it."""
    poisoned = params.replace(embedding=params.embedding.at[39].set(jnp.nan))
    engine = Engine(tiny.CONFIG, SIZES, dtype=jnp.dtype("int8"))
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    bad, good = (
        Request(number, ids, 1, sampling=sampling)
        for number, ids in enumerate([(2, 39, 4), (1, 7, 7)])
    )
    expected = engine.generate(params, [good])
    assert 39 not in expected[0].tokens.ids
    failed, found = engine.generate(poisoned, [bad, good])
    assert (failed.finish_reason, len(failed.tokens)) == ("failed", 0)
    assert_same_samples([found], expected)


def test_exact_mode_refuses_codes():
    with pytest.raises(ValueError, match="a cache of int8 is not exact"):
        Engine(
            tiny.CONFIG, dataclasses.replace(SIZES, exact=8), dtype=jnp.dtype("int8")
        )
