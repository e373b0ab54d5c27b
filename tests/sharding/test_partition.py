"""Logical axes to partition specs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.models import abstract, param_specs
from jaxrl_post.sharding import (
    DEFAULT_RULES,
    MeshError,
    Rules,
    constrain,
    create_mesh,
    named_shardings,
    partition_spec,
    per_device_bytes,
)
from tests import tiny

MESH = create_mesh("dp2,fsdp2,tp2")


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((16, 24), ("embed", "ffn"), P("fsdp", "tp")),
        ((8, 32), ("batch", "length"), P(("dp", "fsdp"), None)),
        ((16,), ("norm",), P(None)),
        ((16, 8, 4), (None, "heads", "head_dim"), P(None, "tp", None)),
        ((), (), P()),
    ],
)
def test_dimensions_are_split_by_the_rules(shape, axes, expected):
    assert partition_spec(shape, axes, MESH) == expected


def test_axes_of_size_one_or_that_the_mesh_lacks_are_left_out():
    shape, axes = (8, 16, 24), ("batch", "length", "ffn")
    assert partition_spec(shape, axes, create_mesh("dp2,tp4")) == P("dp", None, "tp")
    assert partition_spec(shape, axes, create_mesh("fsdp8")) == P("fsdp", None, None)
    foreign = jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    assert partition_spec(shape, axes, foreign) == P(None, None, "tp")


def test_a_vocabulary_that_tp_does_not_divide_is_replicated():
    assert partition_spec((41, 16), ("vocab", "embed"), MESH) == P(None, "fsdp")
    assert partition_spec((42, 16), ("vocab", "embed"), MESH) == P("tp", "fsdp")


def test_any_other_dimension_that_does_not_divide_is_refused():
    message = (
        r"^mesh: tokens has batch=6, which dp=2 x fsdp=2 does not divide; "
        r"choose sizes whose product divides 6$"
    )
    with pytest.raises(MeshError, match=message):
        partition_spec((6, 3), ("batch", "length"), MESH, name="tokens")
    with pytest.raises(ValueError, match="zip"):
        partition_spec((8, 3), ("batch",), MESH)


def test_too_few_kv_heads_are_replicated():
    config = dataclasses.replace(tiny.CONFIG, num_kv_heads=2)
    found = named_shardings(param_specs(config), create_mesh("dp2,tp4"))
    attention = found.layers[0].attention
    assert "tp" not in jax.tree.leaves(tuple(attention.key.spec))
    assert "tp" in jax.tree.leaves(tuple(attention.query.spec))


def test_too_few_heads_name_the_parameter():
    config = dataclasses.replace(tiny.CONFIG, num_heads=6, num_kv_heads=2)
    message = r"layers\.0\.attention\.query has heads=6, which tp=4 does not divide"
    with pytest.raises(MeshError, match=message):
        named_shardings(param_specs(config), create_mesh("dp2,tp4"))


def test_an_array_alone_has_a_name():
    config = dataclasses.replace(tiny.CONFIG, num_heads=6, num_kv_heads=2)
    query = param_specs(config).layers[0].attention.query
    with pytest.raises(MeshError, match="mesh: array has heads=6, which tp=4"):
        named_shardings(query, create_mesh("dp2,tp4"))


def test_rules_are_a_table():
    rules = DEFAULT_RULES.replace(ffn=(), length=("tp",))
    assert rules.mesh_axes("ffn") == ()
    assert rules.mesh_axes("length") == ("tp",)
    assert rules.mesh_axes(None) == ()
    assert DEFAULT_RULES.mesh_axes("ffn") == ("tp",)
    assert hash(Rules.of(dict(rules.entries))) == hash(rules)
    # Renamed or added rows come last; the others keep their order.
    table = DEFAULT_RULES.replace(stages=("tp",)).table().splitlines()
    assert table[0].split(maxsplit=2) == ["logical", "axis", "mesh axes"]
    assert table[1].split(maxsplit=1) == ["batch", "pp, dp, fsdp, ep"]
    assert table[-1].split() == ["stages", "tp"]
    with pytest.raises(ValueError, match=r"logical axis 'exprts'; known: batch, leng"):
        rules.mesh_axes("exprts")


def test_constrain_without_a_mesh_is_the_identity():
    value = jnp.ones((3, 5))
    assert constrain(value, ("batch", "no such axis")) is value
    with jax.set_mesh(create_mesh("dp1", jax.devices()[:1])):
        assert constrain(value, ("batch", "hidden")) is value


@pytest.mark.meshes
def test_constrain_splits_what_the_mesh_divides():
    with jax.set_mesh(MESH):
        even = jax.jit(lambda x: constrain(2 * x, ("batch", "ffn")))(jnp.ones((8, 6)))
        odd = jax.jit(lambda x: constrain(2 * x, ("batch", "ffn")))(jnp.ones((6, 6)))
    assert even.sharding.shard_shape(even.shape) == (2, 3)
    assert odd.sharding.shard_shape(odd.shape) == (6, 3)
    np.testing.assert_array_equal(even, 2)


def test_bytes_of_one_device():
    split = NamedSharding(MESH, P("tp", ("dp", "fsdp")))
    tree = {
        "array": jax.device_put(jnp.zeros((4, 8), jnp.float32), split),  # 2 x 2
        "shape": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16, sharding=split),
        "host": np.zeros((3,), np.int8),
        "keys": jax.random.split(jax.random.key(0), 5),
    }
    assert per_device_bytes(tree) == 4 * 4 + 4 * 2 + 3 + 5 * 8
    # Parameters: fsdp and tp split matrices, norms are everywhere.
    config = dataclasses.replace(tiny.CONFIG, num_layers=1)
    norms, head = 3 * 16, 16 * 4
    matrices = 2 * 40 * 16 + (8 + 4 + 4 + 8) * head + 3 * 16 * 24
    shapes = abstract(param_specs(config), tiny.F32, MESH)
    assert per_device_bytes(shapes) == 4 * (norms + matrices // 4)
