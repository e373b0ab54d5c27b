"""The sampler's own mesh and dtype: it samples what the trainer's parameters say."""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxrl_post import models
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner.model import Adaptation, Model
from jaxrl_post.models.adapters.lora import (
    LoRAConfig,
    adapter_specs,
    initialize_adapter,
)
from jaxrl_post.models.adapters.quantized import quantize
from jaxrl_post.models.matrix import dense, is_matrix, matrices
from jaxrl_post.programs.build.engine import engine_sizes
from jaxrl_post.programs.build.layouts import (
    gathered_bytes,
    sampler_layout,
    sampler_layouts,
)
from jaxrl_post.rollout.weights import buffer_pointers, bytes_over_links
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sharding import DEFAULT_RULES, MeshError, create_mesh, per_device_bytes
from tests import tiny
from tests.tiers import daily

pytestmark = pytest.mark.meshes

SIZES = EngineConfig(
    num_slots=8, max_prompt_tokens=8, max_tokens=8, steps_per_call=4, prefill_tokens=32
)
REQUEST = Request(
    3, (1, 2, 3), 8, sampling=SamplingParams(temperature=1.0, max_tokens=8)
)
# A block of 16 quantised values, as the model has no dimension of 64.
KINDS = {
    "plain": {},
    "lora": {"lora": LoRAConfig(rank=4)},
    "dora": {"lora": LoRAConfig(rank=4, dora=True)},
    "int8": {"lora": LoRAConfig(rank=4), "kind": "int8"},
    "nf4": {"lora": LoRAConfig(rank=4), "kind": "nf4"},
}


def make_model(mesh, lora=None, kind=None) -> Model:
    mesh = mesh if isinstance(mesh, Mesh) else create_mesh(mesh)
    config, specs = tiny.CONFIG, models.param_specs(tiny.CONFIG)
    params, adaptation = tiny.params(mesh=mesh), None
    if lora is not None:
        base = params if kind is None else quantize(params, kind, block=2)
        specs = adapter_specs(config, lora)
        params = initialize_adapter(
            jax.random.key(0), base, config, lora, mesh=mesh, rules=DEFAULT_RULES
        )
        # A new adapter changes nothing: B is zero.
        params = jax.tree.map(lambda leaf: leaf + 0.1, params)
        adaptation = Adaptation(base, lora)
    tokenizer = Tokenizer.train(["0123456789"], vocab_size=300)
    return Model(
        "tiny", config, specs, params, tokenizer, mesh, DEFAULT_RULES, preset=True,
        adaptation=adaptation,
    )  # fmt: skip


def sampled(model, rollout, params=None):
    """Completions, and what was published."""
    layout = sampler_layout(rollout, model)
    engine = Engine(model.config, SIZES, mesh=layout.mesh, dtype=layout.dtype, seed=7)
    # As in a run, whose mesh is set around everything.
    with jax.set_mesh(model.mesh):
        published = layout.publish(engine, model, params or model.params, 1)
        published.submit(REQUEST)
        done = []
        while published.busy:
            published.dispatch()
            done += published.collect()
    return sorted(done, key=lambda c: c.sample_index), published, layout


@pytest.mark.parametrize("kind", daily(KINDS, {"lora", "nf4"}))
def test_the_samples_are_those_of_the_trainers_own_arrays(kind):
    model = make_model("fsdp4,tp2", **KINDS[kind])
    expected, own, _ = sampled(model, RolloutConfig())
    found, moved, layout = sampled(model, RolloutConfig(mesh="dp2,tp4"))
    assert dict(layout.mesh.shape) == {
        "pp": 1,
        "dp": 2,
        "fsdp": 1,
        "ep": 1,
        "cp": 1,
        "tp": 4,
    }
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens.ids, other.tokens.ids)
        np.testing.assert_allclose(
            one.tokens.logprobs, other.tokens.logprobs, atol=1e-5, rtol=1e-4
        )
    assert own.bytes_moved == 0
    assert moved.bytes_moved > 0
    # Every array lies on the sampler's mesh, or is the same on all devices.
    for leaf in jax.tree.leaves(moved.params):
        assert "fsdp" not in str(leaf.sharding.spec)


def test_the_next_version_is_moved_and_the_frozen_base_is_not():
    model = make_model("fsdp8", **KINDS["lora"])
    layout = sampler_layout(RolloutConfig(mesh="dp2,tp4"), model)
    engine = Engine(model.config, SIZES, mesh=layout.mesh)
    first = layout.publish(engine, model, model.params, 1)
    base = first.params.layers[0].attention.query.base
    changed = jax.tree.map(lambda leaf: 2 * leaf, model.params)
    second = layout.publish(engine, model, changed, 2)
    query = second.params.layers[0].attention.query
    assert query.base is base
    np.testing.assert_array_equal(query.down, changed["layers.0.attention.query"].down)
    # A move once per process would tell a resumed run from one never stopped.
    assert 0 < second.bytes_moved == first.bytes_moved
    # An evaluation after the step publishes the same version again.
    assert layout.publish(engine, model, changed, 2).bytes_moved == 0


@pytest.mark.parametrize(
    ("kind", "weights"),
    [*itertools.product(KINDS, [None]), ("plain", "int8"), ("lora", "float8")],
)
def test_samplers_with_their_own_devices_get_the_same_values(kind, weights):
    own = create_mesh("dp2,tp2", jax.devices()[:4])
    model = make_model(own, **KINDS[kind])
    config = RLConfig(
        mesh="dp2,tp2", samplers=2, rollout=RolloutConfig(mesh="tp2", weights=weights)
    )
    changed = jax.tree.map(lambda leaf: 2 * leaf, model.params)
    values = {1: model.params, 2: changed}
    layouts = sampler_layouts(config, model)
    assert [[each.id for each in layout.mesh.devices.flat] for layout in layouts] == [
        [4, 5], [6, 7]
    ]  # fmt: skip
    for layout in layouts:
        engine = Engine(model.config, SIZES, mesh=layout.mesh)
        found = {
            version: layout.publish(engine, model, params, version)
            for version, params in values.items()
        }
        frozen = model.adaptation is not None
        assert 0 < found[2].bytes_moved == found[1].bytes_moved
        first, second = (jax.tree.leaves(found[each].params) for each in values)
        same = [one is other for one, other in zip(first, second, strict=True)]
        assert any(same) == frozen  # The base is copied once.
        for version, params in values.items():
            quantized = model
            if weights is not None and frozen:
                base = quantize(model.base, weights)
                adaptation = Adaptation(base, model.adaptation.lora)
                quantized = dataclasses.replace(model, adaptation=adaptation)
            elif weights is not None:
                params = quantize(params, weights)
            whole = quantized.whole(params)
            ours, theirs = map(jax.tree.leaves, (found[version].params, whole))
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(one, other)
                assert one.sharding.device_set <= {*layout.mesh.devices.flat}


# Each kind, mesh and format once or twice; what a format rounds does not depend on the
# mesh, and an adapter is not rounded.
@pytest.mark.parametrize(
    ("kind", "mesh", "weights"),
    daily(
        itertools.product(
            ["plain", "lora", "dora"], ["", "dp2,tp4"], ["int8", "float8"]
        ),
        [
            ("lora", "dp2,tp4", "float8"),
            ("dora", "", "int8"),
        ],
    ),
)
def test_a_byte_a_weight_samples_what_the_rounded_weights_say(kind, mesh, weights):
    model = make_model("fsdp4,tp2", **KINDS[kind])
    base = model.params if model.adaptation is None else model.adaptation.base
    rounded = jax.tree.map(
        lambda leaf: dense(leaf, jnp.float32),
        quantize(base, weights),
        is_leaf=is_matrix,
    )
    if model.adaptation is None:
        plain = dataclasses.replace(model, params=rounded)
    else:
        adaptation = dataclasses.replace(model.adaptation, base=rounded)
        plain = dataclasses.replace(model, adaptation=adaptation)
    expected, _, _ = sampled(plain, RolloutConfig())
    found, own, layout = sampled(model, RolloutConfig(mesh=mesh, weights=weights))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens.ids, other.tokens.ids)
        np.testing.assert_allclose(
            one.tokens.logprobs, other.tokens.logprobs, atol=1e-5, rtol=1e-4
        )
    # They are not the trainer's.
    trainers, _, _ = sampled(model, RolloutConfig())
    pairs = zip(found, trainers, strict=True)
    assert any(
        not np.allclose(one.tokens.logprobs[0], other.tokens.logprobs[0], atol=1e-4)
        for one, other in pairs
    )
    names = {leaf.dtype.name for leaf in jax.tree.leaves(own.params)}
    assert names == {"float32", {"int8": "int8", "float8": "float8_e4m3fn"}[weights]}
    if mesh:
        # Codes are moved, not the float32 matrices; an adapter is moved as it
        # is, each step, and its base once, before.
        _, moved, _ = sampled(model, RolloutConfig(mesh=mesh))
        if model.adaptation is None:
            assert own.bytes_moved < 0.7 * moved.bytes_moved
        else:
            assert own.bytes_moved == moved.bytes_moved
    else:
        assert own.bytes_moved == 0
        assert layout.trained is None
        # The run's report of its memory: a byte per weight, and the scales.
        held = sum(leaf.size for leaf in jax.tree.leaves(matrices(base)))
        scales = per_device_bytes([m.scales for m in layout.copies])
        assert per_device_bytes(layout.copies) == held // 8 + scales


def test_the_codes_of_the_last_version_are_deleted():
    model = make_model("dp8")
    layout = sampler_layout(RolloutConfig(weights="int8"), model)
    engine = Engine(model.config, SIZES, mesh=layout.mesh)
    first = layout.publish(engine, model, model.params, 1)
    query, table = first.params.layers[0].attention.query, first.params.embedding
    # An evaluation publishes the same version again.
    again = layout.publish(engine, model, model.params, 1)
    assert again.params.layers[0].attention.query is query
    changed = jax.tree.map(lambda leaf: 2 * leaf, model.params)
    second = layout.publish(engine, model, changed, 2)
    assert query.codes.is_deleted()
    assert query.scales.is_deleted()
    # Arrays that are not quantised are the trainer's.
    assert table is model.params.embedding
    assert not table.is_deleted()
    doubled = second.params.layers[0].attention.query
    np.testing.assert_allclose(
        dense(doubled, jnp.float32),
        changed.layers[0].attention.query,
        atol=float(doubled.scales.max()) / 2 + 1e-6,
    )


def test_another_dtype_is_close_and_the_same_layout_is_no_copy():
    model = make_model("dp2,tp4")
    expected, own, layout = sampled(model, RolloutConfig(mesh="tp4,dp2"))
    assert layout.mesh is model.mesh
    assert layout.copies is None
    assert buffer_pointers(own.params) == buffer_pointers(model.params)
    found, narrow, _ = sampled(model, RolloutConfig(dtype="bfloat16"))
    assert narrow.params.embedding.dtype == jnp.bfloat16
    # A cast sends nothing.
    assert narrow.bytes_moved == 0
    np.testing.assert_allclose(
        found[0].tokens.logprobs[0], expected[0].tokens.logprobs[0], atol=0.1
    )


def test_what_decoding_gathers_is_counted():
    split = make_model("fsdp8")
    params = jax.tree.leaves(split.params)
    total = sum(leaf.nbytes for leaf in params)
    whole = sum(leaf.nbytes for leaf in params if leaf.ndim == 1)  # The norms.
    assert gathered_bytes(split.params) == (total - whole) * 7 // 8
    # The embedding and the head among these are gathered once for many tokens.
    tables = split.params.embedding, split.params.unembedding
    layers = total - whole - sum(leaf.nbytes for leaf in jax.tree.leaves(tables))
    trainers = sampler_layout(RolloutConfig(), split)
    assert trainers.gathered_a_token(split) == layers * 7 // 8
    layout = sampler_layout(RolloutConfig(mesh="dp2,tp4"), split)
    assert gathered_bytes(layout.copies) == 0
    assert gathered_bytes(make_model("dp2,tp4").params) == 0


def test_a_mesh_that_does_not_fit_names_the_option():
    model = make_model("fsdp8")
    with pytest.raises(MeshError, match=r"--rollout\.mesh: 'tp3,dp2' needs 6 devices"):
        sampler_layout(RolloutConfig(mesh="tp3,dp2"), model)
    narrow = dataclasses.replace(tiny.CONFIG, intermediate_size=20)
    model = dataclasses.replace(model, specs=models.param_specs(narrow))
    with pytest.raises(MeshError, match=r"--rollout\.mesh: .*=20, which tp=8 does not"):
        sampler_layout(RolloutConfig(mesh="tp8"), model)


@pytest.mark.parametrize(
    ("trainer", "sampler"),
    [("fsdp8", "dp2,tp4"), ("fsdp4,tp2", "dp2,tp4"), ("fsdp4,tp2", "tp8"),
     ("fsdp2,tp4", "dp4,tp2"), ("dp2,fsdp2,tp2", "dp2,tp4")],
)  # fmt: skip
def test_devices_receive_what_they_lack_and_nothing_else(trainer, sampler):
    model = make_model(trainer)
    layout = sampler_layout(RolloutConfig(mesh=sampler), model)
    [targets] = layout.copies
    pairs = zip(jax.tree.leaves(model.params), jax.tree.leaves(targets), strict=True)
    lacked = sum(bytes_over_links(*pair) for pair in pairs)
    engine = Engine(model.config, SIZES, mesh=layout.mesh)
    assert layout.publish(engine, model, model.params, 1).bytes_moved == lacked > 0


TWELVE = """
import numpy as np, jax, jax.numpy as jnp
from jaxrl_post.models.spec import ParamSpec, abstract
from jaxrl_post.programs.build.layouts import same_devices
from jaxrl_post.rollout.weights import Relayout
from jaxrl_post.sharding import create_mesh, named_shardings
from tests.tiers import daily

specs = {"w": ParamSpec((12, 12), ("embed", "ffn"))}
trainer = create_mesh("dp3,fsdp2,tp2")
values = np.arange(144, dtype=np.float32).reshape(12, 12)
params = {"w": jax.device_put(values, named_shardings(specs, trainer)["w"])}
for text in ("tp6,dp2", "tp12", "tp4,dp3", "dp4,tp3"):
    targets = abstract(specs, jnp.dtype("float32"), same_devices(text, trainer))
    moved, _ = Relayout(targets)(params)
    for shard in moved["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])
    print(text)
"""


@pytest.mark.processes
def test_meshes_whose_sizes_have_no_common_factors():
    """Twelve devices: where no way can be planned, XLA finds one."""
    flags = "--xla_force_host_platform_device_count=12"
    finished = subprocess.run(
        [sys.executable, "-c", TWELVE],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["tp6,dp2", "tp12", "tp4,dp3", "dp4,tp3"]


def test_the_cache_of_a_run_holds_what_its_slots_need():
    """A prompt of two pages and a page a sample; or every sample's own."""
    single = RolloutConfig(
        prompts_per_step=4, samples_per_prompt=8, max_prompt_tokens=32, max_tokens=16
    )
    sizes = lambda **changes: engine_sizes(  # noqa: E731
        dataclasses.replace(single, **changes), 2, stop_ids=1
    )
    # In each half 16 slots: twice two prompts, and for each slot a page and one more.
    assert sizes().num_pages(2) == 2 * (2 * 2 * 2 + 16 * 2)
    # Two pages a prompt, one an answer, one more; two for each further turn.
    assert sizes(partial=1).num_pages(2) == 40 * (2 + 1 + 1)
    assert sizes(max_turns=3).num_pages(2) == 32 * (2 + 1 + 1 + 2 * 2)
    assert sizes(cache_tokens=128).num_pages(2) == 8
    with pytest.raises(
        ConfigError, match=r"^--rollout.cache-tokens: .* 2 parts .* at least 128$"
    ):
        sizes(cache_tokens=96)
