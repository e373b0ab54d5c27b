"""Runs that train an adapter: what moves, what stays, what is saved."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import algorithms, models
from jaxrl_post.data import packing
from jaxrl_post.models.lora import merged
from jaxrl_post.models.peft_files import load_adapter
from jaxrl_post.sharding import create_mesh
from jaxrl_post.train.adapters import with_adapter
from jaxrl_post.train.config import ConfigError, UpdateConfig
from jaxrl_post.train.learner import begin_training
from jaxrl_post.train.lora_config import AdapterConfig
from jaxrl_post.train.publish import buffer_pointers
from jaxrl_post.train.reference import open_reference
from jaxrl_post.train.session import save_model
from jaxrl_post.train.state import OptimizerConfig
from tests.train.test_learner import sequences
from tests.train.trainers import make_model

RANK4 = AdapterConfig(rank=4, alpha=8.0)


@pytest.fixture(autouse=True)
def one_device():
    """Models are made on one device, whatever mesh a test set before."""
    before = jax.sharding.get_mesh()
    jax.set_mesh(create_mesh("dp1", jax.devices()[:1]))
    yield
    jax.set_mesh(before)


def batch_of():
    made = packing.pack([(each,) for each in sequences()], 32, 16)
    return made.replace(tokens=made.tokens % 64)


def begin(config, mesh="dp1", count=1):
    model = make_model()
    grid = create_mesh(mesh, jax.devices()[:count])
    jax.set_mesh(grid)
    params = models.initialize(jax.random.key(0), model.specs, jnp.float32, grid)
    model = dataclasses.replace(model, params=params, mesh=grid, preset=True)
    model = with_adapter(config, model, seed=0)
    learner, state = begin_training(
        model,
        algorithms.grpo(kl_coefficient=0.1).objective,
        OptimizerConfig(learning_rate=1e-2),
        UpdateConfig(microbatch_tokens=512),
        num_steps=10,
        row_tokens=32,
    )
    return model, learner, state


def scored(batch, model, learner, state):
    reference = open_reference(model, learner, None, "--algorithm.reference")
    found = reference.scorer.predict(reference.params, batch)
    return batch.replace(reference_logprobs=found.logprobs), reference


@pytest.mark.parametrize(
    "config",
    [
        RANK4,
        dataclasses.replace(RANK4, dora=True, rank_stabilized=True),
        dataclasses.replace(RANK4, quantize="int8"),
    ],
    ids=["lora", "dora", "int8"],
)
def test_only_the_adapter_moves_and_the_reference_is_the_base(config):
    model, learner, state = begin(config)
    before = jax.tree.map(np.asarray, model.base)
    pointers = buffer_pointers(model.base)
    batch, reference = scored(batch_of(), model, learner, state)
    assert buffer_pointers(reference.params) == pointers
    # At the start the policy is its reference.
    own = learner.scorer.predict(model.whole(state.params), batch)
    np.testing.assert_allclose(
        own.logprobs, batch.reference_logprobs, rtol=1e-5, atol=1e-5
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
    assert moments <= 2 * size + 2 < model.num_parameters
    losses = []
    for number in range(4):
        state, metrics = learner.update(state, batch, where=f"step {number}")
        losses.append(metrics["train/loss"])
    assert losses[-1] < losses[0]
    assert buffer_pointers(model.base) == pointers
    jax.tree.map(np.testing.assert_array_equal, model.base, before)
    # The sampler gets the base's own arrays, and what the trainer scores.
    whole = model.whole(state.params)
    assert set(pointers) <= set(buffer_pointers(whole))
    again = learner.scorer.predict(whole, batch)
    assert np.abs(again.logprobs - own.logprobs).max() > 1e-3


def test_meshes_agree():
    results = []
    for mesh, count in (("dp1", 1), ("dp2,fsdp2,tp2", 8)):
        model, learner, state = begin(RANK4, mesh, count)
        batch, _ = scored(batch_of(), model, learner, state)
        state, first = learner.update(state, batch, where="step 1")
        state, second = learner.update(state, batch, where="step 2")
        results.append((first["train/grad_norm"], second["train/loss"]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4)


def test_the_model_is_saved_merged_and_the_adapter_by_itself(tmp_path):
    model, learner, state = begin(RANK4)
    batch, _ = scored(batch_of(), model, learner, state)
    state, _ = learner.update(state, batch, where="step 1")
    save_model(tmp_path / "model", model, state.params)
    config, found = models.load_pretrained(tmp_path / "model")
    lora = model.adaptation.lora
    expected = merged(model.base, state.params, model.config, lora)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    same, adapter = load_adapter(tmp_path / "adapter", config)
    assert (same.rank, same.alpha) == (4, 8.0)
    jax.tree.map(np.testing.assert_array_equal, adapter, state.params)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AdapterConfig(alpha=3.0), "has no effect with a rank of 0; give --lora.rank"),
        (AdapterConfig(rank=2, targets=("router",)), r"--lora\.\*: .*targets must be"),
        (AdapterConfig(rank=2, targets=("kv_up",)), r"no layer of this llama has"),
    ],
)
def test_options_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        with_adapter(config, make_model(), seed=0)


def test_a_value_head_is_refused():
    model = make_model()
    model = dataclasses.replace(
        model, config=dataclasses.replace(model.config, head="value")
    )
    with pytest.raises(ConfigError, match="a value head is no part of an adapter"):
        with_adapter(RANK4, model, seed=0)
