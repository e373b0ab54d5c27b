"""Master weights that begin between two roundings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.learner.state import between_roundings
from jaxrl_post.sharding import create_mesh


def every_value(dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    return jax.lax.bitcast_convert_type(jnp.asarray(bits), dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_value_is_what_its_master_rounds_to(dtype):
    values = every_value(dtype)
    # Subnormal values are 0 to some devices.
    kept = np.isfinite(values) & (jnp.abs(values) >= jnp.finfo(dtype).tiny)
    params = {str(i): jnp.asarray(np.asarray(values)[kept]) for i in range(20)}
    masters = jax.jit(between_roundings)(params)
    for name, param in params.items():
        np.testing.assert_array_equal(masters[name].astype(dtype), param)
    drawn = np.stack([*masters.values()])
    size = np.abs(params["0"].astype(np.float32))
    # Distances of smaller values are subnormal in float32.
    least = max(2 * jnp.finfo(dtype).tiny, 2**12 * jnp.finfo(jnp.float32).tiny)
    inner = (size > least) & (size < jnp.finfo(dtype).max)
    assert inner.mean() > 0.9
    assert (drawn != drawn[0]).any(axis=0)[inner].all()


def test_what_stays():
    params = {
        "zero": jnp.zeros(8, jnp.bfloat16),
        "wide": jnp.linspace(-1, 1, 8),
        "infinite": jnp.array([jnp.inf, -jnp.inf], jnp.bfloat16),
    }
    found = between_roundings(params)
    for name, param in params.items():
        assert found[name].dtype == jnp.float32
        np.testing.assert_array_equal(found[name], param.astype(jnp.float32))


@pytest.mark.parametrize("value", [0.12, -1.0, 3.0])
@pytest.mark.parametrize("towards", [1, -1])
def test_parameters_follow_steps_much_smaller_than_their_distance(value, towards):
    """The mean of many equal parameters does; one moves by a whole distance, or not."""
    param = jnp.full(200_000, value, jnp.bfloat16)
    at = float(param[0])
    gap = abs(float(jnp.nextafter(param[:1], jnp.zeros_like(param[:1]))[0]) - at)
    master = between_roundings({"w": param})["w"]
    for steps in (1, 5, 10):
        expected = towards * 0.02 * gap * steps
        moved = (master + expected).astype(jnp.bfloat16).astype(jnp.float32)
        change = float((moved - at).mean())
        assert change == pytest.approx(expected, rel=0.05)


@pytest.mark.meshes
def test_a_mesh_changes_nothing():
    param = jax.random.normal(jax.random.key(1), (16, 8)).astype(jnp.bfloat16)
    mesh = create_mesh("fsdp4,tp2")
    split = jax.device_put(param, NamedSharding(mesh, P("fsdp", "tp")))
    draw = jax.jit(between_roundings)
    np.testing.assert_array_equal(draw({"w": split})["w"], draw({"w": param})["w"])
