"""Training in float8: whose products are rounded, and that it learns."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_post import algorithms
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import UpdateConfig
from jaxrl_post.data import packing
from jaxrl_post.learner.adapters import with_adapter
from jaxrl_post.learner.learner import begin_training
from jaxrl_post.learner.reference import open_reference
from jaxrl_post.programs.build.layouts import sampler_layout
from jaxrl_post.sampler import Engine, Request, SamplingParams
from tests.learner.test_adapters import batch_of, one_device
from tests.programs.test_layouts import SIZES
from tests.programs.trainers import make_model

__all__ = ["one_device"]

FLOAT8 = UpdateConfig(microbatch_tokens=512, precision="float8")


def begin(update, adapter=None):
    model = make_model()
    if adapter is not None:
        model = with_adapter(adapter, model, seed=0)
    learner, state = begin_training(
        model,
        algorithms.grpo(kl_coefficient=0.1).objective,
        OptimizerConfig(learning_rate=1e-2),
        update,
        num_steps=10,
    )
    return model, learner, state


@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=4, alpha=8.0)])
def test_it_learns_nearly_as_with_wide_products(adapter):
    plain = dataclasses.replace(FLOAT8, precision=None)
    losses = []
    for update in (plain, FLOAT8):
        model, learner, state = begin(update, adapter)
        reference = open_reference(
            model, learner, None, "--algorithm.reference", longest=32
        )
        assert reference.scorer.policy.float8 == learner.policy.float8
        batch = batch_of()
        found = reference.scorer.predict(reference.params, batch)
        # The reference is the policy at the start, to the last bit.
        own = learner.scorer.predict(model.whole(state.params), batch)
        np.testing.assert_array_equal(found.logprobs, own.logprobs)
        batch = batch.replace(reference_logprobs=found.logprobs)
        for step in range(6):
            state, metrics = learner.update(state, batch, where=f"step {step}")
            losses.append(metrics["train/loss"])
        # Parameters and moments stay float32.
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {
            "float32"
        }
    wide, narrow = np.array(losses).reshape(2, -1)
    assert wide[-1] < wide[0]
    assert narrow[-1] < narrow[0]
    fell = wide[0] - wide[-1]
    assert 1e-6 < np.abs(narrow - wide).max() < 0.2 * fell


def test_codes_of_an_adapters_base_are_not_rounded_again():
    message = "--update.precision: float8 rounds the matrices of the adapter's base"
    with pytest.raises(ConfigError, match=message):
        begin(FLOAT8, AdapterConfig(rank=4, quantize="int8"))


def sampled(rounds_inputs):
    """Largest difference of the sampler's log-probs from the trainer's."""
    model, learner, state = begin(FLOAT8)
    layout = sampler_layout(
        RolloutConfig(weights="float8"), model, rounds_inputs=rounds_inputs
    )
    engine = Engine(model.config, SIZES, mesh=layout.mesh, dtype=layout.dtype, seed=7)
    published = layout.publish(engine, model, state.params, 0)
    params = SamplingParams(temperature=1.0, max_tokens=8)
    prompt = (5, 9, 3)
    published.submit(Request(0, prompt, 8, sampling=params))
    done = []
    while published.busy:
        published.dispatch()
        done += published.collect()
    given = [
        packing.Sequence.of(
            list(prompt),
            list(each.tokens.ids),
            behavior_logprobs=list(each.tokens.logprobs),
            advantage=1.0,
        )
        for each in done
    ]
    batch = packing.pack([(each,) for each in given], 16, 8)
    own = learner.scorer.predict(model.whole(state.params), batch)
    change = np.asarray(own.logprobs) - batch.behavior_logprobs
    return np.abs(change)[np.asarray(batch.loss_mask) > 0].max()


def test_a_sampler_that_rounds_inputs_samples_what_is_trained_on():
    assert sampled(rounds_inputs=True) < 1e-5
    # By weights alone the two differ.
    assert sampled(rounds_inputs=False) > 1e-4
