"""The schedule of a pipeline, and microbatches that go through it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_post.sharding import DEFAULT_RULES, create_mesh, on_parts
from jaxrl_post.sharding.stages import (
    IDLE,
    STAGE_AXIS,
    Microbatches,
    Schedule,
    through_stages,
)

SCHEDULES = [(2, 1, 1), (2, 3, 2), (4, 1, 3), (4, 2, 1), (3, 5, 2)]


@pytest.mark.parametrize("sizes", SCHEDULES)
def test_every_chunk_of_every_microbatch_has_one_slot(sizes):
    schedule = Schedule(*sizes)
    stages, rounds, groups = sizes
    slots = schedule.slots
    assert slots.shape == (rounds * groups * stages + stages - 1, stages, 2)
    for stage in range(stages):
        busy = [tuple(slot) for slot in slots[:, stage].tolist() if slot[0] != IDLE]
        assert sorted(busy) == [
            (r, m) for r in range(rounds) for m in range(groups * stages)
        ]
    idle = (slots[:, 0, 0] == IDLE).mean()
    assert schedule.bubble == pytest.approx(idle)


@pytest.mark.parametrize("sizes", SCHEDULES)
def test_a_chunk_follows_the_one_before_it_in_the_next_tick(sizes):
    """So what a stage passes on is what the next one needs, and nothing waits."""
    schedule = Schedule(*sizes)
    stages, rounds, _ = sizes
    by_chunk = schedule.tick_of.reshape(rounds * stages, -1)
    np.testing.assert_array_equal(np.diff(by_chunk, axis=0), 1)


def test_bubbles_by_hand():
    """(stages - 1) / (rounds microbatches + stages - 1); Narayanan et al., 2.2."""
    assert Schedule(4, 1, 1).bubble == pytest.approx(3 / 7)
    assert Schedule(4, 1, 8).bubble == pytest.approx(3 / 35)
    assert Schedule(4, 20, 1).bubble == pytest.approx(3 / 83)


def test_a_drawing():
    assert Schedule(3, 1, 1).drawing() == (
        "stage 0  0a 1a 2a  .  .\nstage 1   . 0a 1a 2a  .\nstage 2   .  . 0a 1a 2a"
    )
    last = Schedule(2, 28, 1).drawing().splitlines()[0].split()
    assert (last[-2], last[-4]) == ("1ab", "1aa")


@pytest.mark.meshes
@pytest.mark.parametrize("sizes", SCHEDULES)
def test_microbatches_meet_all_chunks_in_order(sizes):
    """Values and gradients of x -> a tanh(x) + b, chunk after chunk."""
    schedule = Schedule(*sizes)
    stages, rounds, groups = sizes
    random = np.random.default_rng(0)
    weights = jnp.asarray(random.normal(size=(rounds * stages, 2)), jnp.float32)
    inputs = jnp.asarray(random.normal(size=(stages * groups * 2, 3)), jnp.float32)
    facts = jnp.arange(schedule.microbatches, dtype=jnp.float32)

    def one(weight, x):
        return weight[0] * jnp.tanh(x) + weight[1]

    def plainly(weights, inputs):
        for weight in weights:
            inputs = one(weight, inputs)
        return inputs

    def chunk(weights, facts, slot, x):
        return one(weights[slot.round], x), (facts[slot.microbatch], slot.round)

    def staged(weights, inputs):
        batch = Microbatches.of(len(inputs), stages, DEFAULT_RULES.without(STAGE_AXIS))
        assert batch.groups == groups
        weights = weights.reshape(rounds, stages, 2).swapaxes(0, 1)
        stream, told = through_stages(
            schedule, chunk, weights, facts, batch.stream(inputs)
        )
        return batch.joined(stream), told

    with jax.set_mesh(create_mesh(f"pp{stages},dp2", jax.devices()[: 2 * stages])):
        found, (numbers, turns) = jax.jit(staged)(weights, inputs)
        loss = lambda *arrays: jnp.sin(staged(*arrays)[0]).sum()  # noqa: E731
        grads = jax.jit(jax.grad(loss, (0, 1)))(weights, inputs)
    np.testing.assert_allclose(found, plainly(weights, inputs), rtol=1e-6, atol=1e-6)
    loss = lambda *arrays: jnp.sin(plainly(*arrays)).sum()  # noqa: E731
    for grad, expected in zip(
        grads, jax.grad(loss, (0, 1))(weights, inputs), strict=True
    ):
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)
    # A slot was told its own round and microbatch.
    busy = schedule.slots[..., 0].T != IDLE
    expected = schedule.slots.transpose(1, 0, 2)[busy]
    told = np.stack([turns, numbers.astype(np.int32)], axis=-1)[busy]
    np.testing.assert_array_equal(told, expected)


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("stages", "chunk", "inputs", "expected"),
    [
        # The derivative at 0 is infinite, as before the first microbatch comes.
        (2, jnp.sqrt, [1.0, 16.0], [1 / 4, 16**-0.75 / 4]),
        # Results that went through more chunks, in slots after the last, are infinite.
        (4, jnp.square, [10.0] * 4, [16 * 10.0**15] * 4),
    ],
)
def test_what_idle_slots_compute_reaches_no_gradient(stages, chunk, inputs, expected):
    schedule = Schedule(stages, 1, 1)

    def loss(inputs):
        batch = Microbatches.of(stages, stages, DEFAULT_RULES.without(STAGE_AXIS))
        stream, _ = through_stages(
            schedule,
            lambda w, f, slot, x: (chunk(x), ()),
            (),
            (),
            batch.stream(inputs),
        )
        return batch.joined(stream).sum()

    with jax.set_mesh(create_mesh(f"pp{stages}", jax.devices()[:stages])):
        grad = jax.jit(jax.grad(loss))(jnp.array(inputs))
    np.testing.assert_allclose(grad, expected, rtol=1e-6)


@pytest.mark.meshes
@pytest.mark.parametrize("sizes", [(2, 1, 1), (4, 1, 1), (4, 3, 1), (4, 1, 3)])
def test_the_bubble_takes_the_time_that_the_schedule_says(sizes):
    """Chunks that sleep, on devices that sleep at the same time."""
    schedule, pause, asleep = Schedule(*sizes), 0.03, []

    def sleep(x):
        time.sleep(pause)
        asleep.append(None)
        return x

    def chunk(weights, facts, slot, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        pausing = lambda x: jax.pure_callback(sleep, shape, x)  # noqa: E731
        return on_parts(pausing, in_specs=P(), out_specs=P())(x), ()

    @jax.jit
    def run(inputs):
        batch = Microbatches.of(
            len(inputs), schedule.stages, DEFAULT_RULES.without(STAGE_AXIS)
        )
        stream, _ = through_stages(schedule, chunk, (), (), batch.stream(inputs))
        return batch.joined(stream)

    inputs = jnp.ones((schedule.microbatches, 1))
    mesh = create_mesh(f"pp{schedule.stages}", jax.devices()[: schedule.stages])
    with jax.set_mesh(mesh):
        run(inputs).block_until_ready()
        asleep.clear()
        begin = time.perf_counter()
        run(inputs).block_until_ready()
        took = time.perf_counter() - begin
    # A busy machine only adds to it. All stages sleep in all ticks.
    busy = schedule.rounds * schedule.microbatches * pause
    assert took >= busy / (1 - schedule.bubble)
    assert len(asleep) == schedule.stages * schedule.ticks
