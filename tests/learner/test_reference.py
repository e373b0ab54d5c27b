"""A reference that follows the policy: what it becomes, and where it lies."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms, models, pretrained
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import UpdateConfig
from jaxrl_post.data import packing
from jaxrl_post.learner.adapters import with_adapter
from jaxrl_post.learner.learner import begin_training
from jaxrl_post.learner.memory import layout_table
from jaxrl_post.learner.model import Model
from jaxrl_post.learner.reference import Reference, Sync, open_reference
from jaxrl_post.models import ModelConfig
from jaxrl_post.rollout.weights import buffer_pointers
from jaxrl_post.sharding import create_mesh, named_shardings, per_device_bytes
from tests.learner.test_learner import CONFIG, sequences
from tests.programs.trainers import assert_same, host, make_model

OPTION = "--algorithm.reference"
NO_ADAPTER = AdapterConfig()
some_model = functools.cache(make_model)


@pytest.fixture(autouse=True)
def _mesh():
    before = jax.sharding.get_mesh()
    yield
    jax.set_mesh(before)


def begin(
    mesh: str = "dp1",
    count: int = 1,
    dtype=jnp.float32,
    lora: AdapterConfig = NO_ADAPTER,
    config: ModelConfig = CONFIG,
):
    grid = create_mesh(mesh, jax.devices()[:count])
    jax.set_mesh(grid)
    specs = models.param_specs(config)
    model: Model = dataclasses.replace(
        some_model(),
        config=config,
        specs=specs,
        params=models.initialize(jax.random.key(0), specs, dtype, grid),
        mesh=grid,
        preset=True,
    )
    model = with_adapter(lora, model, seed=0)
    learner, state = begin_training(
        model,
        algorithms.grpo(kl_coefficient=0.1).objective,
        OptimizerConfig(learning_rate=1e-2),
        UpdateConfig(microbatch_tokens=512),
        num_steps=10,
    )
    return model, learner, state


def moved(state, by: float = 0.01):
    """The state with other weights, and these weights in float64."""
    draw = np.random.default_rng(0)

    def shifted(leaf):
        noise = draw.normal(size=leaf.shape).astype(np.float32)
        return jnp.asarray(leaf, jnp.float32) + by * noise

    wide = jax.tree.map(shifted, state.params if state.master is None else state.master)
    params = jax.tree.map(lambda new, old: new.astype(old.dtype), wide, state.params)
    master = None if state.master is None else wide
    return state.replace(params=params, master=master), [
        each.astype(np.float64) for each in host(wide)
    ]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("mixup", [1.0, 0.25])
def test_the_reference_becomes_the_mixture_every_two_steps(dtype, mixup):
    model, learner, state = begin(dtype=dtype)
    reference = open_reference(
        model, learner, None, OPTION, longest=16, sync=Sync(2, mixup)
    )
    start = [each.astype(np.float64) for each in host(state.params)]
    state, weights = moved(state)
    for number in (1, 2):
        assert reference.follow(state, number) == {
            "reference/changed": 0.0,
            "reference/last_sync": 0.0,
        }
        assert_same(reference.whole(reference.params), model.params)
    assert reference.follow(state, 3) == {
        "reference/changed": 0.0,
        "reference/last_sync": 2.0,
    }
    mixed = [
        mixup * new + (1 - mixup) * old for new, old in zip(weights, start, strict=True)
    ]
    for found, expected in zip(host(reference.params), mixed, strict=True):
        if mixup < 1 or dtype == jnp.float32:
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
    if mixup == 1:
        assert_same(reference.params, state.params)
    whole = reference.whole(reference.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(whole)} == {jnp.dtype(dtype)}
    before = host(reference.params)
    assert reference.follow(state, 4) == {
        "reference/changed": 0.0,
        "reference/last_sync": 2.0,
    }
    assert_same(reference.params, before)


def test_small_shares_add_up_in_bfloat16():
    """One in a hundred of a small change is less than the last bit of a bfloat16."""
    model, learner, state = begin(dtype=jnp.bfloat16)
    reference = open_reference(
        model, learner, None, OPTION, longest=16, sync=Sync(1, 0.01)
    )
    start = [each.astype(np.float64) for each in host(state.params)]
    state, weights = moved(state, by=1e-3)
    for number in range(1, 102):
        reference.follow(state, number)
    left = 0.99**100
    for found, new, old in zip(host(reference.params), weights, start, strict=True):
        expected = new + left * (old - new)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.meshes
@pytest.mark.parametrize("mixup", [1.0, 0.5])
def test_a_new_reference_outlives_the_policy_and_replaces_the_old_one(mixup):
    model, learner, state = begin("dp2,fsdp2,tp2", 8)
    reference = open_reference(
        model, learner, None, OPTION, longest=16, sync=Sync(1, mixup)
    )
    state, _ = moved(state)
    state = state.replace(params=jax.device_put(state.params, learner.layout.params))
    old = jax.tree.leaves(reference.params)
    reference.follow(state, 2)
    assert all(leaf.is_deleted() for leaf in old), "no copy is held besides"
    shardings = [leaf.sharding for leaf in jax.tree.leaves(reference.params)]
    assert shardings == jax.tree.leaves(named_shardings(model.specs, model.mesh))
    assert not {*buffer_pointers(reference.params)} & {*buffer_pointers(state.params)}
    batch = packing.pack(sequences(), 16, 8)
    scored = reference.predict(batch).logprobs
    own = learner.scorer.predict(state.params, batch).logprobs
    assert (mixup == 1) == bool(np.allclose(scored, own, atol=1e-5))
    learner.update(state, batch.replace(reference_logprobs=scored), where="step 2")
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    np.testing.assert_array_equal(reference.predict(batch).logprobs, scored)


@pytest.mark.parametrize(
    "lora",
    [
        AdapterConfig(rank=4, alpha=8.0),
        AdapterConfig(rank=4, dora=True, quantize="int8"),
    ],
    ids=["lora", "dora-int8"],
)
def test_the_reference_of_an_adapter_is_a_copy_of_it_over_the_same_base(lora):
    model, learner, state = begin(lora=lora)
    reference = open_reference(model, learner, None, OPTION, longest=16, sync=Sync(1))
    base = buffer_pointers(model.base)
    batch = packing.pack(sequences(), 16, 8)

    def own(params):
        return np.asarray(learner.scorer.predict(model.whole(params), batch).logprobs)

    start = own(state.params)
    np.testing.assert_array_equal(reference.predict(batch).logprobs, start)
    state, _ = moved(state, by=0.1)
    np.testing.assert_array_equal(reference.predict(batch).logprobs, start)
    reference.follow(state, 2)
    scored = np.asarray(reference.predict(batch).logprobs)
    np.testing.assert_array_equal(scored, own(state.params))
    assert np.abs(scored - start).max() > 1e-3
    assert {*base} <= {*buffer_pointers(reference.whole(reference.params))}
    table = layout_table(
        model,
        UpdateConfig(),
        rows=1,
        row_tokens=16,
        optimizer=(),
        reference=reference.params,
    )
    (size,) = [size for name, _, size in table if name == "reference"]
    assert size == f"{per_device_bytes(state.params) / 2**20:,.1f}"


def in_directory(folder: Path, **changes) -> str:
    model = some_model()
    config = dataclasses.replace(model.config, **changes)
    params = models.initialize(jax.random.key(7), models.param_specs(config))
    pretrained.save(folder, config, params, tokenizer=model.tokenizer)
    return str(folder)


def open_beside(directory: str, *, sync: Sync, **changes):
    config = dataclasses.replace(some_model().config, **changes)
    model, learner, state = begin("dp8", 8, config=config)
    reference = open_reference(model, learner, directory, OPTION, longest=16, sync=sync)
    return reference, state


@pytest.mark.meshes
@pytest.mark.parametrize("head", ["lm", "lm+value"])
def test_a_reference_from_a_directory_follows_a_policy_of_its_kind(tmp_path, head):
    directory = in_directory(tmp_path / "other", max_length=128)
    reference, state = open_beside(directory, sync=Sync(1, 0.5), head=head)
    theirs = host(reference.params)
    assert np.abs(theirs[0] - host(state.params)[0]).max() > 1e-3
    reference.follow(state, 2)
    for found, new, old in zip(
        host(reference.params), host(state.params), theirs, strict=True
    ):
        np.testing.assert_allclose(found, (new + old) / 2, rtol=1e-6, atol=1e-8)


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2}, r"its num_layers is 2, the policy's 1"),
        ({"intermediate_size": 32}, r"its intermediate_size is 32, the policy's 24"),
        # The same shapes, but another function of them.
        ({"rms_norm_eps": 1e-3}, r"its rms_norm_eps is 0.001, the policy's 1e-06"),
        ({"tie_embeddings": True}, r"its tie_embeddings is True"),
    ],
)
def test_a_reference_of_another_kind_cannot_follow(tmp_path, changes, message):
    directory = in_directory(tmp_path / "other", **changes)
    reference, _ = open_beside(directory, sync=Sync())
    assert isinstance(reference, Reference)
    assert reference.saved is None
    with pytest.raises(ConfigError, match=f"^{OPTION}-sync-steps: .*{message}"):
        open_beside(directory, sync=Sync(1))
