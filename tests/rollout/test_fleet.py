"""Several samplers with devices of their own as one."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from jaxrl_post.models import abstract, param_specs
from jaxrl_post.rollout.fleet import Fleet, StoppedError
from jaxrl_post.rollout.weights import Published, Transfer
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams
from jaxrl_post.sharding import create_mesh
from tests import tiny

F32, SPECS = tiny.F32, param_specs(tiny.CONFIG)
SIZES = EngineConfig(
    num_slots=4, max_prompt_tokens=8, max_tokens=6, steps_per_call=2, exact=8
)


def fleet(count: int) -> Fleet:
    """Samplers on a device each, the last ones."""
    samplers = []
    for device in jax.devices()[-count:]:
        mesh = create_mesh("dp1", [device])
        params, _ = Transfer(abstract(SPECS, F32, mesh))(tiny.shared())
        engine = Engine(tiny.CONFIG, SIZES, seed=1, mesh=mesh)
        samplers.append(Published(engine, params, version=3))
    return Fleet(samplers, threading.Event())


def requests(count: int = 5) -> list[Request]:
    return [
        Request(i, (1 + i, 2, 3), 2, sampling=SamplingParams(max_tokens=6))
        for i in range(count)
    ]


def drained(sampler: Fleet) -> dict[tuple[int, int], tuple]:
    found = {}
    while sampler.busy:
        sampler.dispatch()
        for each in sampler.collect():
            key = each.prompt_id, each.sample_index
            tokens = each.tokens
            found[key] = tokens.ids.tolist(), tokens.logprobs.tobytes()
    return found


@pytest.mark.meshes
def test_exact_samples_depend_on_no_number_of_samplers():
    found = []
    for count in (1, 2, 3):
        sampler = fleet(count)
        for request in requests():
            sampler.submit(request)
        found.append(drained(sampler))
        assert not sampler.busy
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 10


@pytest.mark.meshes
def test_prompts_go_where_the_fewest_samples_are_and_stay_there():
    sampler = fleet(2)
    for request in requests(3):
        sampler.submit(request)
    first, second = sampler.samplers
    sampler.dispatch()

    def has(each: Published) -> set[int]:
        return {sample.prompt_id for sample in each.unfinished()}

    assert (has(first), has(second)) == ({0, 2}, {1})
    drained(sampler)
    # The next turns of their episodes.
    for request in requests(3)[::-1]:
        sampler.submit(dataclasses.replace(request, prompt=(9, 9)))
    sampler.dispatch()
    assert (has(first), has(second)) == ({0, 2}, {1})
    assert len(sampler.cancel([(1, 0)])) == 1
    assert len(sampler.cancel()) == 5
    assert not sampler.busy
    sampler.renew()
    sampler.submit(requests(2)[1])
    sampler.dispatch()
    assert (has(first), has(second)) == ({1}, set())
    sampler.cancel()


@pytest.mark.meshes
def test_a_fleet_that_is_stopped_raises():
    stop = threading.Event()
    sampler = Fleet(fleet(1).samplers, stop)
    sampler.submit(requests(1)[0])
    sampler.dispatch()
    stop.set()
    with pytest.raises(StoppedError):
        sampler.collect()
    with pytest.raises(StoppedError):
        sampler.dispatch()


@pytest.mark.meshes
def test_the_source_may_be_donated_once_the_copies_are_begun():
    source = create_mesh("dp2,tp2", jax.devices()[:4])
    target = create_mesh("tp2", jax.devices()[4:6])
    expected = jax.device_get(tiny.shared())
    change = jax.jit(
        lambda tree: jax.tree.map(lambda a: a * 2 + 1, tree), donate_argnums=0
    )
    transfer = Transfer(abstract(SPECS, F32, target))
    for _ in range(20):
        params = tiny.params(mesh=source)
        copies, sent = transfer(params)
        after = change(params)
        jax.block_until_ready(after)
        for copy, value in zip(
            jax.tree.leaves(copies), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(copy, value)
        assert sent >= sum(leaf.nbytes for leaf in jax.tree.leaves(copies))


@pytest.mark.meshes
def test_a_frozen_base_is_copied_once():
    mesh = create_mesh("dp1", jax.devices()[-1:])
    transfer = Transfer(abstract(SPECS, F32, mesh), once=True)
    first, sent = transfer(tiny.shared())
    again, later = transfer(tiny.shared())
    assert sent > 0
    assert later == 0
    assert first is again
