"""Initial values: one draw per path, on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_post.models import ParamSpec, abstract, initialize, param_specs
from jaxrl_post.sharding import create_mesh
from tests import tiny

SPECS = {
    "matrix": ParamSpec((64, 32), ("embed", "ffn"), scale=0.5),
    "bias": ParamSpec((32,), ("ffn",), init="zeros"),
    "norm": ParamSpec((64,), ("norm",), init="ones"),
}


def test_each_initialiser():
    values = initialize(jax.random.key(0), SPECS)
    # 2048 draws: the deviation is known to 2 per cent, the mean to 0.01.
    np.testing.assert_allclose(values["matrix"].std(), 0.5, rtol=0.06)
    np.testing.assert_allclose(values["matrix"].mean(), 0.0, atol=0.04)
    np.testing.assert_array_equal(values["bias"], np.zeros(32))
    np.testing.assert_array_equal(values["norm"], np.ones(64))
    assert SPECS["matrix"].size == 2048


def test_values_depend_on_the_key_and_the_path_alone():
    base = initialize(jax.random.key(0), SPECS)["matrix"]
    alone = initialize(jax.random.key(0), {"matrix": SPECS["matrix"]})["matrix"]
    np.testing.assert_array_equal(base, alone)
    twice = initialize(jax.random.key(0), {"a": SPECS["matrix"], "b": SPECS["matrix"]})
    assert (twice["a"] != twice["b"]).mean() > 0.99
    assert (initialize(jax.random.key(1), SPECS)["matrix"] != base).mean() > 0.99


@pytest.mark.meshes
@pytest.mark.parametrize("spec", ["dp2,tp4", "fsdp8"])
def test_a_mesh_places_values_and_does_not_change_them(spec):
    mesh = create_mesh(spec)
    alone = initialize(jax.random.key(0), SPECS)
    spread = initialize(jax.random.key(0), SPECS, mesh=mesh)
    for name in SPECS:
        np.testing.assert_array_equal(alone[name], spread[name])
    expected = P(None, "tp") if spec == "dp2,tp4" else P("fsdp", None)
    assert spread["matrix"].sharding.spec == expected
    whole = SPECS["matrix"].size
    assert spread["matrix"].addressable_shards[0].data.size == whole // (
        4 if spec == "dp2,tp4" else 8
    )


def test_a_narrow_dtype_is_the_rounded_float32():
    wide = initialize(jax.random.key(0), SPECS)
    narrow = initialize(jax.random.key(0), SPECS, tiny.BF16)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(narrow))
    np.testing.assert_array_equal(narrow["matrix"], wide["matrix"].astype(jnp.bfloat16))


def test_abstract_describes_what_initialize_makes():
    mesh = create_mesh("dp2,tp4")
    config = dataclasses.replace(tiny.CONFIG, qkv_bias=True, num_layers=1)
    specs = param_specs(config)
    made = initialize(jax.random.key(0), specs, tiny.BF16, mesh)
    described = abstract(specs, tiny.BF16, mesh)
    assert jax.tree.structure(made) == jax.tree.structure(described)
    for array, struct in zip(
        jax.tree.leaves(made), jax.tree.leaves(described), strict=True
    ):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
        assert array.sharding == struct.sharding
    nowhere = abstract(specs, tiny.BF16)
    assert {leaf.sharding for leaf in jax.tree.leaves(nowhere)} == {None}


def test_optional_parameters_follow_the_config():
    plain = param_specs(tiny.CONFIG)
    assert plain.unembedding is not None
    assert plain.layers[0].attention.query_bias is None
    assert plain.layers[0].attention.query_norm is None
    rich = param_specs(
        dataclasses.replace(
            tiny.CONFIG, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm="head",
            tie_embeddings=True,
        )
    )  # fmt: skip
    assert rich.unembedding is None
    layer = rich.layers[1]
    assert layer.attention.key_bias.shape == (4, 4)
    assert layer.attention.output_bias.shape == layer.mlp.down_bias.shape == (16,)
    assert layer.attention.key_norm == ParamSpec((4,), ("head_dim",), init="ones")


def test_parameters_of_one_shape_share_a_program():
    """XLA took minutes for a program that drew hundreds of parameters of a GPU."""
    # No other test draws this shape, whose programs are kept.
    layer = {
        "up": ParamSpec((61, 3), ("embed", "ffn")),
        "bias": ParamSpec((61,), ("ffn",), init="zeros"),
        "norm": ParamSpec((61,), ("norm",), init="ones"),
    }
    programs = []

    def compiled(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(seconds)

    initialize(jax.random.key(0), {"warm": ParamSpec((3,), ("norm",))})
    jax.monitoring.register_event_duration_secs_listener(compiled)
    try:
        initialize(jax.random.key(0), {f"layer {i}": layer for i in range(20)})
    finally:
        jax.monitoring.unregister_event_duration_listener(compiled)
    assert len(programs) == 3
