"""Parameters in another layout: what arrives, what is sent, and what takes memory."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.models import param_specs
from jaxrl_post.models.spec import abstract
from jaxrl_post.rollout.weights import Relayout, buffer_pointers, bytes_over_links
from jaxrl_post.sharding import create_mesh
from tests import tiny
from tests.tiny import BF16, F32

pytestmark = pytest.mark.meshes

CONFIG = dataclasses.replace(tiny.CONFIG, num_layers=2)
SPECS = param_specs(CONFIG)
MESHES = ["fsdp8", "dp2,tp4", "dp2,fsdp2,tp2", "tp8", "dp8"]
SOURCES = [*MESHES[:3], "pp2,dp2,tp2", "pp2,fsdp4"]


def targets(mesh, dtype=F32):
    return abstract(SPECS, dtype, create_mesh(mesh))


def lies_as(tree, wanted):
    return all(
        leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim)
        and leaf.dtype == target.dtype
        for leaf, target in zip(
            jax.tree.leaves(tree), jax.tree.leaves(wanted), strict=True
        )
    )


def received(array, target):
    """Bytes that devices lack, counted value by value."""
    count, shape = 0, array.shape
    has = array.sharding.devices_indices_map(shape)
    for device, index in target.sharding.devices_indices_map(shape).items():
        wanted, own = np.zeros(shape, bool), np.zeros(shape, bool)
        wanted[index], own[has[device]] = True, True
        count += int((wanted & ~own).sum())
    return count * min(array.dtype.itemsize, target.dtype.itemsize)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", MESHES)
def test_every_value_arrives(source, target):
    params = tiny.params(CONFIG, mesh=create_mesh(source))
    wanted = targets(target)
    moved, sent = Relayout(wanted)(params)
    jax.tree.map(np.testing.assert_array_equal, moved, params)
    assert lies_as(moved, wanted)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True)
    lacked = sum(received(*pair) for pair in pairs)
    assert sent >= lacked
    assert (sent == 0) == (source == target)
    if source == "fsdp8" and "fsdp" not in target:
        # In these every collective brings a device what it lacks and nothing else.
        assert sent == lacked


def test_what_each_device_lacks_by_hand():
    """Rows split four ways, twice over, to columns split eight ways."""
    mesh = create_mesh("dp2,tp4")
    rows = jax.device_put(np.zeros((8, 16), np.float32), NamedSharding(mesh, P("tp")))
    columns = NamedSharding(mesh, P(None, ("dp", "tp")))
    target = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=columns)
    # A device has the 2 x 2 values of its own rows, out of 8 x 2.
    assert bytes_over_links(rows, target) == 8 * (16 - 4) * 4
    half = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=columns)
    assert bytes_over_links(rows, half) == 8 * (16 - 4) * 2


def test_another_dtype_is_a_rounded_copy():
    params = tiny.params(CONFIG, mesh=create_mesh("fsdp8"))
    moved, _ = Relayout(targets("dp2,tp4", BF16))(params)
    jax.tree.map(
        lambda found, given: np.testing.assert_array_equal(
            np.asarray(found), np.asarray(given).astype(found.dtype)
        ),
        moved,
        params,
    )
    assert moved.embedding.dtype == BF16


def test_arrays_that_lie_right_are_passed_on():
    mesh = create_mesh("dp2,fsdp2,tp2")
    params = tiny.params(CONFIG, mesh=mesh)
    moved, sent = Relayout(targets("dp2,fsdp2,tp2"))(params)
    assert sent == 0
    assert buffer_pointers(moved) == buffer_pointers(params)
    # Norms lie on all devices in both layouts; the others are copies.
    moved, _ = Relayout(targets("tp8"))(params)
    assert moved.final_norm is params.final_norm
    assert moved.embedding is not params.embedding


def test_the_next_version_takes_the_place_of_the_last():
    mesh = create_mesh("fsdp8")
    first, second = (tiny.params(CONFIG, seed=seed, mesh=mesh) for seed in (0, 1))
    relayout = Relayout(targets("dp2,tp4"))
    before, all_sent = relayout(first)
    after, sent = relayout(second)
    jax.tree.map(np.testing.assert_array_equal, after, second)
    assert sent == all_sent
    assert before.embedding.is_deleted()
    assert before.layers[0].attention.query.is_deleted()
    # The trainer's own arrays are never deleted, those that were passed on included.
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((first, second)))
    # Unchanged leaves, such as a frozen base, are not moved again.
    again, sent = relayout(second)
    assert sent == 0
    assert buffer_pointers(again) == buffer_pointers(after)


@pytest.mark.parametrize("target", ["dp2,tp4", "dp8"])
def test_smaller_groups_take_less_memory(target):
    params = tiny.params(CONFIG, mesh=create_mesh("fsdp8"))
    # On a device, in the target's layout.
    sizes = [
        math.prod(t.sharding.shard_shape(t.shape)) * 4
        for t in jax.tree.leaves(targets(target))
    ]
    single, whole = (
        Relayout(targets(target), group_bytes=size) for size in (max(sizes), sum(sizes))
    )
    assert single.temporary_bytes(params) <= 2 * max(sizes)
    assert single.temporary_bytes(params) < whole.temporary_bytes(params)
    few, many = (
        dict(enumerate(jax.tree.leaves(r(params)[0]))) for r in (whole, single)
    )
    for place, leaf in few.items():
        np.testing.assert_array_equal(leaf, many[place])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"group_bytes must be > 0, got 0"):
        Relayout(targets("tp8"), group_bytes=0)
    with pytest.raises(
        ValueError, match="tree: must have the structure of the targets"
    ):
        Relayout(targets("tp8"))({"w": jnp.ones(3)})
