"""A plan has the sampler's programs of an engine and of a relayout."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxrl_post import models
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.plan import PlanConfig, PlanError, PlannedRollout
from jaxrl_post.models import ModelConfig
from jaxrl_post.programs.planning.plan import programs
from jaxrl_post.programs.planning.sampling import make_sampler
from jaxrl_post.rollout.weights import Relayout
from jaxrl_post.sampler import Engine, Request, SamplingParams
from jaxrl_post.sharding import MeshError, create_mesh, per_device_bytes

pytestmark = pytest.mark.meshes

CONFIG = ModelConfig("llama", 128, 64, 128, 2, num_heads=8, num_kv_heads=4)
# 8 x 4 samples of 24 and 40 tokens, in two bursts of 20.
ROLLOUT = PlannedRollout(
    prompts_per_step=8, samples_per_prompt=4, max_prompt_tokens=24, max_tokens=40
)

MOVED = dataclasses.replace(ROLLOUT, mesh="dp2,tp4")


def planned(rollout: PlannedRollout = ROLLOUT, **options) -> PlanConfig:
    return PlanConfig("tiny", "v5e:2x4", row_tokens=128, rollout=rollout, **options)


def step(mesh: str, rollout: PlannedRollout = ROLLOUT, **options) -> dict:
    made = programs(planned(rollout, **options), CONFIG, create_mesh(mesh))
    return {program.name: program for program in made}


def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), tree)


def test_the_programs_of_a_step_in_order():
    found = step("fsdp8")
    assert {name: program.calls for name, program in found.items()} == {
        # A prompt on each of the eight devices, padded to two pages.
        "prefill 8 x 32": 1,
        # 40 tokens in two bursts of 20, of a prompt's two pages and three own ones.
        "decode 32 x 32 + 48": 2,
        "empty": 1,
        # 32 samples of 64 tokens, two in a row of 128: 16 rows, 8 of a microbatch.
        "accumulate": 2,
        "apply": 1,
    }


def test_a_step_reads_the_keys_that_there_are():
    sampler = make_sampler(planned(), CONFIG, create_mesh("fsdp8"))
    assert sampler is not None
    (burst,) = (p for p in sampler.programs((), ()) if p.name.startswith("decode"))
    assert burst.work is not None
    whole = sampler.work.decode(32, 48, 20, groups=8, members=8, shared=32)
    # Means of 10 own keys in the first burst and of 19 + 10 in the second, since the
    # last token's key comes with the next step; the view has 48. A device has four of
    # 32 samples.
    skipped = 20 * 4 * (48 - (10 + 29) / 2) * sampler.work.cache_bytes
    assert whole.bytes - burst.work.bytes == pytest.approx(skipped)
    # All of the view is copied all the same.
    assert sampler.view_bytes == (4 * 48 + 32) * sampler.work.cache_bytes


def test_more_samples_than_slots_take_turns():
    found = step("fsdp8", dataclasses.replace(ROLLOUT, num_slots=8))
    # One sample on each device, with its prompt: each of them is computed four times.
    assert found["decode 8 x 32 + 48"].calls == 4 * 2


def test_the_state_is_that_of_an_engine():
    own = create_mesh("dp2,fsdp2,tp2")
    sampler = make_sampler(planned(), CONFIG, own)
    assert sampler is not None
    engine = Engine(
        CONFIG, sampler.functions.sizes, mesh=own, dtype=jnp.dtype("bfloat16")
    )
    assert kinds(sampler.pages) == kinds(engine.cache)
    assert per_device_bytes(sampler.pages) == per_device_bytes(engine.cache)


@pytest.mark.parametrize("own", ["", "dp2,tp4"])
def test_a_byte_a_weight(own):
    mesh = create_mesh("fsdp8")
    rollout = dataclasses.replace(ROLLOUT, mesh=own, weights="int8")
    sampler = make_sampler(planned(rollout), CONFIG, mesh)
    assert sampler is not None
    query = sampler.params.layers[0].attention.query
    assert query.codes.dtype.name == "int8"
    _, held = sampler.resident
    matrices = sum(leaf.size for leaf in jax.tree.leaves(held) if leaf.dtype == "int8")
    found = per_device_bytes(held)
    if own:
        trained = models.abstract(
            models.param_specs(CONFIG), jnp.dtype("bfloat16"), mesh
        )
        names = [p.name.split()[0] for p in sampler.programs(trained, ())]
        assert names[0] == "publish"
        assert matrices // 4 < found
    else:
        assert matrices // 8 < found < matrices // 4


def test_a_cache_of_codes_is_smaller():
    own = create_mesh("dp2,fsdp2,tp2")
    whole, codes = (
        make_sampler(
            planned(dataclasses.replace(ROLLOUT, cache_dtype=dtype)), CONFIG, own
        )
        for dtype in (None, "int8")
    )
    assert whole is not None
    assert codes is not None
    sizes = [per_device_bytes(each.pages) for each in (whole, codes)]
    # Two bytes an entry in bfloat16; one in int8, and four for a head's scale.
    dim = CONFIG.head_dim
    assert sizes[1] * 2 * dim == sizes[0] * (dim + 4)
    assert codes.work.cache_bytes * 2 * dim == whole.work.cache_bytes * (dim + 4)


def test_the_arguments_are_those_of_an_engine():
    own = create_mesh("dp8")
    sampler = make_sampler(planned(), CONFIG, own)
    assert sampler is not None
    specs = models.param_specs(CONFIG)
    params = models.initialize(jax.random.key(0), specs, jnp.bfloat16, own)
    engine = Engine(
        CONFIG, sampler.functions.sizes, mesh=own, dtype=jnp.dtype("bfloat16")
    )
    called = dict[str, tuple]()

    def recorded(name, function):
        def call(*arguments, **static):
            called[name] = (jax.tree.map(jnp.shape, arguments), static)
            return function(*arguments, **static)

        return call

    for name in ("prefill", "decode"):
        function = getattr(engine._functions, name)
        engine._functions.__dict__[name] = recorded(name, function)
    for prompt in range(8):
        sampling = SamplingParams(max_tokens=1)
        engine.submit(Request(prompt, (prompt,) * 24, 4, sampling=sampling))
    with jax.set_mesh(own):
        engine.step(params)
    for program in sampler.programs(sampler.params, ()):
        name = program.name.split()[0]
        shapes = jax.tree.map(lambda leaf: leaf.shape, program.arguments)
        found, static = called[name]
        assert shapes == found
        assert program.static == static


def test_another_layout_is_published_as_in_a_run():
    mesh = create_mesh("fsdp8")
    sampler = make_sampler(planned(MOVED), CONFIG, mesh)
    assert sampler is not None
    assert dict(sampler.mesh.shape) == {
        "pp": 1,
        "dp": 2,
        "fsdp": 1,
        "ep": 1,
        "cp": 1,
        "tp": 4,
    }
    specs = models.param_specs(CONFIG)
    params = models.initialize(jax.random.key(0), specs, jnp.bfloat16, mesh)
    _, sent = Relayout(sampler.params)(params)
    found = step("fsdp8", MOVED)
    publish = [p for name, p in found.items() if name.startswith("publish")]
    assert sum(p.calls * p.received * mesh.size for p in publish) == sent > 0
    # Each group's arrays are arguments or results; all others stay.
    whole = per_device_bytes(params) + per_device_bytes(sampler.params)
    for program in publish:
        moved = per_device_bytes(program.arguments)
        others = per_device_bytes(program.beside[1])
        assert whole - others >= moved > 0


def test_small_groups_of_equal_arrays_are_one_program():
    sampler = make_sampler(planned(MOVED), CONFIG, create_mesh("fsdp8"))
    assert sampler is not None
    assert sampler.relayout is not None
    sampler.relayout._group_bytes = 1
    trained = models.abstract(
        models.param_specs(CONFIG), jnp.bfloat16, create_mesh("fsdp8")
    )
    made = list(sampler._publish(sampler.relayout, trained, ()))
    groups = sampler.relayout.groups(trained)
    assert sum(program.calls for program in made) == len(groups)
    # Two layers, and gate and up, are alike.
    assert len(made) < len(groups) / 2


def test_a_copy_stays_in_memory_while_the_trainer_works():
    own, copied = step("fsdp8"), step("fsdp8", MOVED)
    sampler = make_sampler(planned(MOVED), CONFIG, create_mesh("fsdp8"))
    assert sampler is not None
    for name in ("accumulate", "apply"):
        (pages, none), (moved, copy) = (made[name].beside[1] for made in (own, copied))
        assert none == ()
        assert per_device_bytes(copy) == per_device_bytes(sampler.params)
        # Four key/value heads over tp4, slots over dp2; before, slots over fsdp8.
        # Two parts hold as many prompts as eight, and tp4 splits their heads.
        assert pages.keys[0].shape == moved.keys[0].shape
        assert per_device_bytes(pages) == per_device_bytes(moved)


def test_a_sampler_elsewhere_takes_no_memory():
    found = step("fsdp8", PlannedRollout())
    assert list(found) == ["empty", "accumulate", "apply"]
    assert jax.tree.leaves(found["apply"].beside) == []


def test_what_cannot_be_planned():
    with pytest.raises(MeshError, match=r"^--rollout\.mesh: "):
        step("fsdp8", dataclasses.replace(ROLLOUT, mesh="dp3"))
    with pytest.raises(PlanError, match=r"of an adapter .* got 8 with --lora.rank 4"):
        step("fsdp8", lora=AdapterConfig(rank=4))
    long = PlannedRollout(prompts_per_step=1, max_prompt_tokens=100, max_tokens=40)
    with pytest.raises(PlanError, match=r"--row-tokens: .* completion, 140; got 128"):
        step("fsdp8", long)
    wide = dataclasses.replace(ROLLOUT, max_tokens=8192)
    with pytest.raises(ValueError, match=r"is 8216, longer than .* context of 4096"):
        step("fsdp8", wide)
