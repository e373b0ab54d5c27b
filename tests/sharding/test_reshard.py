"""The way from one sharding to another: every value, by few and small steps."""

import math
import random

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.sharding import create_mesh
from jaxrl_post.sharding.reshard import as_target, plan_reshard, reshard

pytestmark = pytest.mark.meshes

MESHES = ("fsdp8", "dp2,tp4", "dp2,fsdp2,tp2", "tp8", "fsdp4,tp2", "pp2,ep2,tp2")


def moved(values, source, target):
    array = jax.device_put(values, source)
    plan = plan_reshard(array.shape, source, target)
    with jax.set_mesh(plan.mesh):
        program = jax.jit(lambda x: reshard(x, plan), out_shardings=plan.sharding)
        return as_target(program(array), target), plan


def drawn_sharding(rng, ndim):
    """Axes in any order, on any dimensions."""
    mesh = create_mesh(rng.choice(MESHES))
    if rng.random() < 0.5:
        # The same devices, in another order.
        count = len(mesh.axis_names)
        grid = np.asarray(mesh.devices).transpose(rng.sample(range(count), count))
        mesh = Mesh(grid.reshape(mesh.devices.shape), mesh.axis_names)
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    rng.shuffle(axes)
    entries = [[] for _ in range(ndim)]
    for axis in axes:
        if rng.random() < 0.8:
            entries[rng.randrange(ndim)].append(axis)
    return NamedSharding(mesh, P(*(tuple(entry) or None for entry in entries)))


@pytest.mark.parametrize("seed", range(40))
def test_every_device_gets_its_part(seed):
    rng = random.Random(seed)
    shape = tuple(rng.choice([8, 16, 24]) for _ in range(rng.choice([1, 2, 3])))
    source, target = (drawn_sharding(rng, len(shape)) for _ in range(2))
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    found, _ = moved(values, source, target)
    assert found.sharding == target
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])


def test_the_usual_way_is_one_exchange_and_one_gather():
    """From fsdp8 to dp2,tp4: rows to columns among four, then columns from the other.

    A device begins with 2 x 16 of 16 x 16 values. It exchanges three quarters of them,
    and gets as many again from the device with the other half of its columns.
    """
    source = NamedSharding(create_mesh("fsdp8"), P("fsdp"))
    target = NamedSharding(create_mesh("dp2,tp4"), P(None, "tp"))
    found, plan = moved(np.eye(16, dtype=np.float32), source, target)
    np.testing.assert_array_equal(found, np.eye(16))
    assert [step.kind for step in plan.steps] == ["move", "join"]
    assert plan.values_sent((16, 16)) == 8 * (32 * 3 // 4 + 32)
    assert plan.largest((16, 16)) == 64


def test_nothing_is_gathered_that_is_split_again():
    """From tp8 on columns to fsdp8 on rows: one exchange, no part grows."""
    source = NamedSharding(create_mesh("tp8"), P(None, "tp"))
    target = NamedSharding(create_mesh("fsdp8"), P("fsdp"))
    _, plan = moved(np.zeros((8, 16), np.float32), source, target)
    assert [step.kind for step in plan.steps] == ["move"]
    assert plan.largest((8, 16)) == 16


def test_another_order_of_devices_spares_a_detour():
    """tp2 becomes tp4 by splitting what each device has, if tp4 begins with tp2."""
    trainer = create_mesh("fsdp4,tp2")
    source = NamedSharding(trainer, P("fsdp", "tp"))
    plain = NamedSharding(create_mesh("dp2,tp4"), P(None, "tp"))
    grid = np.asarray(trainer.devices).reshape(2, 2, 2).transpose(0, 2, 1)
    ordered = Mesh(grid.reshape(1, 2, 1, 1, 1, 4), trainer.axis_names)
    target = NamedSharding(ordered, P(None, "tp"))
    values = np.arange(256, dtype=np.float32).reshape(16, 16)
    for sharding, kinds in (
        (plain, ["move", "join", "join", "move", "split", "move"]),
        (target, ["move", "join"]),
    ):
        found, plan = moved(values, source, sharding)
        np.testing.assert_array_equal(found, values)
        assert [step.kind for step in plan.steps] == kinds


def test_what_is_whole_is_split_without_communication():
    source = NamedSharding(create_mesh("dp8"), P())
    target = NamedSharding(create_mesh("dp2,tp4"), P("tp"))
    _, plan = moved(np.zeros((8, 4), np.float32), source, target)
    assert plan.values_sent((8, 4)) == 0


def test_no_plan_without_common_factors():
    devices = np.array(jax.devices()[:6])
    one, other = (
        NamedSharding(Mesh(devices.reshape(shape), ("a", "b")), P("a"))
        for shape in ((2, 3), (3, 2))
    )
    assert plan_reshard((6,), one, other) is None
    for order in ([5, 4, 3, 2, 1, 0], [0, 1, 2, 4, 3, 5]):
        irregular = Mesh(devices[order].reshape(2, 3), ("a", "b"))
        assert plan_reshard((6,), one, NamedSharding(irregular, P(("a", "b")))) is None
