"""Publishing: the sampler decodes with the very arrays that the trainer updates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.algorithms.objective import Objective
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.data.packing import Sequence, pack
from jaxrl_post.learner import state as training
from jaxrl_post.learner.learner import Learner
from jaxrl_post.learner.step import Policy
from jaxrl_post.metrics import masked
from jaxrl_post.models import param_specs
from jaxrl_post.rollout.weights import Published, buffer_pointers
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from tests import tiny

CONFIG = dataclasses.replace(tiny.CONFIG, num_layers=1)
SPECS = param_specs(CONFIG)
SIZES = EngineConfig(
    num_slots=4, max_prompt_tokens=8, max_tokens=8, steps_per_call=4, prefill_tokens=32
)


def likelihood(predictions, batch):
    return Objective(masked(-predictions.logprobs, batch.loss_mask), {})


@pytest.fixture(scope="module", params=["", "dp2,fsdp2,tp2"], ids=["one", "mesh"])
def mesh(request):
    devices = jax.devices() if request.param else jax.devices()[:1]
    return create_mesh(request.param, devices)


@pytest.fixture(scope="module")
def learner(mesh):
    optimizer = training.make_optimizer(OptimizerConfig(learning_rate=0.1), SPECS, 10)
    layout = training.shardings(SPECS, optimizer, mesh, DEFAULT_RULES, narrow=False)
    return Learner(
        policy=Policy(CONFIG),
        objective=likelihood,
        optimizer=optimizer,
        max_grad_norm=1.0,
        layout=layout,
        mesh=mesh,
        microbatch_rows=4,
    )


@pytest.fixture(scope="module")
def engine(mesh):
    return Engine(CONFIG, SIZES, mesh=mesh)


def run(sampler, request):
    sampler.submit(request)
    done = []
    while sampler.busy:
        sampler.dispatch()
        done += sampler.collect()
    return done


@pytest.mark.meshes
def test_an_update_between_two_generations_copies_nothing(mesh, learner, engine):
    request = Request(
        1, (1, 2, 3), 4, sampling=SamplingParams(temperature=0.0, max_tokens=6)
    )
    batch = pack([Sequence.of([5, 6], [7, 8, 9])] * 4, length=5, row_multiple=4)
    with jax.set_mesh(mesh):
        params = tiny.params(CONFIG, mesh=mesh)
        state = training.create(params, learner.optimizer, learner.layout)
        for version in range(2):
            before = buffer_pointers(state.params)
            with jax.transfer_guard_device_to_device("disallow"):
                sampler = Published(engine, state.params, version)
                done = run(sampler, request)
            assert sampler.bytes_moved == 0
            assert sampler.params is state.params
            # Sampling neither moved nor took the trainer's arrays.
            assert buffer_pointers(state.params) == before
            assert [c.tokens.versions.tolist() for c in done] == [[version] * 6] * 4
            # Its samples are as these parameters say.
            logprobs = learner.scorer.predict(
                state.params,
                pack(
                    [Sequence.of(request.prompt, c.tokens.ids.tolist()) for c in done],
                    length=9,
                    row_multiple=4,
                ),
            ).logprobs
            np.testing.assert_allclose(
                logprobs[:, 3:], [c.tokens.logprobs for c in done], rtol=1e-5, atol=1e-5
            )
            old = state.params
            state, _ = learner.update(state, batch, where="step")
            assert old.embedding.is_deleted()  # donated: there never are two copies
            del sampler


def test_pointers_tell_a_copy_from_the_original():
    array = jnp.arange(4.0)
    assert buffer_pointers([array]) == buffer_pointers([array])
    assert buffer_pointers([array]) != buffer_pointers([jnp.copy(array)])
