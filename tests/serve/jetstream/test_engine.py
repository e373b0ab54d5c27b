"""The engine as JetStream's threads call it, without them."""

import dataclasses
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.programs.planning.hlo import collectives
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.serve.jetstream import jetstream_engine
from jaxrl_post.serve.jetstream.engine import PADDED
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.serve.jetstream.conftest import (
    CONFIG,
    SIZES,
    crc,
    expected,
    greedy,
    make_tokenizer,
    needs_jetstream,
    prompts,
)

pytestmark = needs_jetstream

STEPS = 6


def make_engine(config=CONFIG, params=None, stops=(), **options):
    made = {"num_slots": 2, "max_prompt_tokens": 40, "max_tokens": 24}
    drawn = {"temperature": 0.0}
    for name in [*options]:
        if name in EngineConfig.__dataclass_fields__:
            made[name] = options.pop(name)
        elif name in SamplingParams.__dataclass_fields__:
            drawn[name] = options.pop(name)
    return jetstream_engine(
        tiny.params(config) if params is None else params,
        config,
        make_tokenizer(*stops),
        EngineConfig(**made),
        SamplingParams(**drawn),
        **options,
    )


@pytest.fixture(scope="module")
def engine():
    return make_engine()


def prefilled(engine, prompt):
    padded = np.pad(prompt, (0, engine.max_prefill_length - len(prompt)))
    return engine.prefill(
        params=engine.load_params(), padded_tokens=padded, true_length=len(prompt)
    )


def drive(engine, wanted, steps=STEPS, *, sharding=None):
    """Tokens of as many prompts as there are slots."""
    state = engine.init_decode_state()
    for slot, prompt in enumerate(wanted):
        prefix = prefilled(engine, prompt)
        if sharding is not None:
            prefix = jax.device_put(prefix, sharding)
        state = engine.insert(prefix, state, slot)
    streams: list[list[int]] = [[] for _ in wanted]
    for _ in range(steps):
        state, results = engine.generate(engine.load_params(), state)
        results = results.convert_to_numpy()
        for slot, stream in enumerate(streams):
            data = results.get_result_at_slot(slot)
            if data.valid.item():
                stream.append(data.tokens.item())
            assert data.lengths.item() == len(stream)
    return [tuple(stream) for stream in streams]


def test_it_has_all_of_the_interface(engine):
    from jetstream.engine import (  # type: ignore[reportMissingImports]
        engine_api,
        tokenizer_api,
    )

    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    for base, made in (
        (engine_api.Engine, engine),
        (tokenizer_api.Tokenizer, tokenizer),
    ):
        assert isinstance(made, base)
        assert base.__abstractmethods__ <= {*dir(type(made))}
    assert engine.max_concurrent_decodes == 2
    assert engine.mesh.size == 1
    assert tokenizer.stop_tokens == {*make_tokenizer().stop_ids}
    padded, length = tokenizer.encode("user", max_prefill_length=64)
    assert padded.shape == (16,)
    assert tuple(padded[:length].tolist()) == make_tokenizer().encode("user")


def test_loading_jetstream_changes_nothing_else(engine):
    assert logging.getLogger().level == logging.WARNING
    assert not any(
        getattr(handler, "stream", None) is sys.stdout
        for handler in logging.getLogger().handlers
    )
    assert "seqio" not in sys.modules
    assert not hasattr(jax, "tree_map")


def test_a_slot_ends_with_the_maximum_of_the_engine():
    engine = make_engine(max_tokens=3)
    (stream, _) = drive(engine, prompts(2))
    assert len(stream) == 3


def test_a_slot_ends_with_a_stop_id(engine):
    one, other = drive(engine, prompts(2))
    assert one[2] not in (*one[:2], *other)
    assert drive(make_engine(stops=one[2:3]), prompts(2)) == [one[:3], other]


def test_a_long_prompt_is_prefilled_in_chunks():
    config = dataclasses.replace(CONFIG, max_length=1024)
    rng = np.random.default_rng(0)
    wanted = [tuple(rng.integers(2, 290, size).tolist()) for size in (513, 700)]
    options = {"num_slots": 2, "max_prompt_tokens": 700, "max_tokens": STEPS}
    engine = make_engine(config, **options)
    ours = Engine(config, EngineConfig(**options))
    requests = [
        Request(crc(prompt), prompt, sampling=greedy(make_tokenizer(), STEPS))
        for prompt in wanted
    ]
    done = ours.generate(tiny.params(config), requests)
    assert drive(engine, wanted) == [tuple(c.tokens.ids.tolist()) for c in done]


def test_a_cache_of_codes_is_that_of_our_engine():
    engine = make_engine(cache_dtype=jnp.int8)
    ours = Engine(CONFIG, SIZES, dtype=jnp.int8)
    requests = [
        Request(crc(prompt), prompt, sampling=greedy(make_tokenizer(), STEPS))
        for prompt in prompts()[-2:]
    ]
    done = ours.generate(tiny.params(CONFIG), requests)
    wanted = [tuple(c.tokens.ids.tolist()) for c in done]
    assert drive(engine, prompts()[-2:]) == wanted


def test_logits_that_are_not_finite_end_a_stream(engine):
    params = jax.tree.map(lambda leaf: leaf * jnp.nan, engine.load_params())
    sick = make_engine(params=params)
    assert drive(sick, prompts(2)) == [(), ()]
    # Their old entries in the pages do not reach the next prompt of the slot.
    state = sick.insert(prefilled(sick, prompts()[-1]), sick.init_decode_state(), 0)
    state, _ = sick.generate(params, state)
    state = engine.insert(prefilled(engine, prompts()[1]), state, 0)
    (wanted,) = expected(
        engine.load_params(), [prompts()[1]], greedy(make_tokenizer(), 2)
    )
    for token in wanted:
        state, results = engine.generate(engine.load_params(), state)
        assert results.get_result_at_slot(0).tokens.item() == token


def test_an_id_that_jetstream_puts_before_a_prompt_is_no_token(engine):
    prompt = prompts()[1]
    beginning = engine.build_tokenizer(engine.get_tokenizer()).bos_id
    found = prefilled(engine, [beginning, *prompt])
    assert (int(found.length), int(found.noise_id)) == (len(prompt), crc(prompt))


def test_prompts_whose_samples_are_counted_do_not_grow_without_end(engine, monkeypatch):
    monkeypatch.setattr("jaxrl_post.serve.jetstream.engine.MOST_COUNTED", 3)
    for _ in range(2):
        for prompt in prompts(5):
            prefilled(engine, prompt)
            assert len(engine._asked) <= 3


@pytest.mark.meshes
def test_on_a_mesh_no_parameter_is_gathered():
    mesh = create_mesh("tp2", jax.devices()[:2])
    params = tiny.params(CONFIG, mesh=mesh)
    engine = make_engine(params=params, mesh=mesh)
    assert engine.mesh is mesh
    for ours, theirs in zip(
        jax.tree.leaves(params), jax.tree.leaves(engine.load_params()), strict=True
    ):
        assert ours is theirs
    state = engine.init_decode_state()
    with jax.set_mesh(mesh):
        lowered = engine._slots.generate.lower(params, state, engine._key)
    found = collectives(lowered.compile().as_text())
    received = [c.bytes for c in found if c.kind != "all-reduce"]
    split = [
        leaf.nbytes
        for leaf in jax.tree.leaves(params)
        if leaf.addressable_shards[0].data.nbytes < leaf.nbytes
    ]
    assert "all-reduce" in {c.kind for c in found}
    assert max(received, default=0) < min(split), found
    # The reduced ones are activations: two slots of the hidden size.
    largest = max(c.bytes for c in found if c.kind == "all-reduce")
    assert largest <= 2 * CONFIG.hidden_size * 4, found


@pytest.mark.meshes
def test_a_prefix_moves_to_another_engine(engine):
    mesh = create_mesh("tp2", jax.devices()[:2])
    wanted = prompts(2)
    sampled = drive(engine, wanted, 1)
    here = engine.get_prefix_destination_sharding()
    assert drive(engine, wanted, 1, sharding=here) == sampled
    other = make_engine(params=tiny.params(CONFIG, mesh=mesh), mesh=mesh)
    state, there = other.init_decode_state(), other.get_prefix_destination_sharding()
    for slot, prompt in enumerate(wanted):
        prefix = jax.device_put(prefilled(engine, prompt), there)
        state = other.insert(prefix, state, slot)
    _, results = other.generate(other.load_params(), state)
    for slot, stream in enumerate(sampled):
        assert results.get_result_at_slot(slot).tokens.item() == stream[0]


@pytest.mark.meshes
@pytest.mark.parametrize("spec", ["dp2", "fsdp2,tp2", "cp2"])
def test_a_mesh_that_splits_the_batch_is_refused(spec):
    mesh = create_mesh(spec, jax.devices()[: 4 if "," in spec else 2])
    named = spec.split(",")[0]
    with pytest.raises(ValueError, match=rf"must not split the batch.*got {named}\."):
        make_engine(params=tiny.params(CONFIG), mesh=mesh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slots": 0}, "num_slots must be at least 1; got 0"),
        ({"max_tokens": 0}, "max_tokens must be >= 1|max_tokens must be at least 1"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1; got 0"),
        ({"max_prompt_tokens": PADDED[-1]}, "must be below 32768.*got 32768"),
        ({"max_prompt_tokens": 120}, "longer than the model's context of 128"),
        ({"temperature": -1.0}, r"temperature must be in \[0, 3.4e38\]; got -1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]; got 0"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(**options)


def test_what_does_not_fit_is_named(engine):
    params, state = engine.load_params(), engine.init_decode_state()
    prompt = np.asarray(prompts()[1])
    prefix = prefilled(engine, prompt)
    for slot in (-1, 2):
        with pytest.raises(ValueError, match=rf"slot must lie in 0\.\.1; got {slot}"):
            engine.insert(prefix, state, slot)
    with pytest.raises(ValueError, match="existing prefix; got one"):
        engine.prefill(
            params=params, existing_prefix=prefix, padded_tokens=prompt, true_length=5
        )
    with pytest.raises(ValueError, match=r"the shape \(5,\) and true_length=6"):
        engine.prefill(params=params, padded_tokens=prompt, true_length=6)
    with pytest.raises(ValueError, match="a prompt must have 1 to 40 tokens; got 41"):
        prefilled(engine, [5] * 41)
