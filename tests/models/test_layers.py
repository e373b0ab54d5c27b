"""Gradients of parameters that many tokens share are summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_post.models.layers import add_bias, embed
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from tests import tiny

TOKENS, VOCAB, WIDTH = 8192, 32, 16


def pulled_back(cotangent, table, ids):
    _, pull = jax.vjp(
        lambda table: embed(tiny.CONFIG, table, ids, DEFAULT_RULES), table
    )
    return pull(cotangent)[0]


@pytest.fixture
def batch():
    """Ids, half of them 3, and a cotangent of their embeddings, all positive."""
    rng = np.random.default_rng(0)
    ids = np.where(rng.random(TOKENS) < 0.5, 3, rng.integers(0, VOCAB, TOKENS))
    cotangent = jnp.asarray(rng.random((TOKENS, WIDTH)) + 0.5, jnp.bfloat16)
    expected = np.zeros((VOCAB, WIDTH))
    np.add.at(expected, ids, np.float64(cotangent))
    return jnp.asarray(ids, jnp.int32), cotangent, expected


def test_the_gradient_of_frequent_tokens_is_whole_in_bfloat16(batch):
    ids, cotangent, expected = batch
    table = jnp.ones((VOCAB, WIDTH), jnp.bfloat16)
    # A sum in bfloat16 would stop at 256 to 512; this one is above 4,000.
    assert expected[3].min() > 4000
    found = jax.jit(pulled_back)(cotangent, table, ids)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(found), expected, rtol=2**-8)


@pytest.mark.meshes
@pytest.mark.parametrize(
    ("mesh", "lies"),
    [("dp2,fsdp2,tp2", P("tp", "fsdp")), ("fsdp2,ep2,tp2", P("tp", ("fsdp", "ep")))],
)
def test_a_mesh_sums_it_in_float32_too_and_keeps_a_part_each(batch, mesh, lies):
    ids, cotangent, expected = batch
    with jax.set_mesh(create_mesh(mesh)) as _:
        sharding = NamedSharding(jax.sharding.get_mesh(), lies)
        table = jax.device_put(jnp.ones((VOCAB, WIDTH), jnp.bfloat16), sharding)
        found = jax.jit(pulled_back)(cotangent, table, ids)
    assert found.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(np.float64(found), expected, rtol=2**-8)


def test_the_gradient_of_a_bias_is_whole_in_bfloat16(batch):
    _, cotangent, _ = batch
    x, bias = jnp.zeros((TOKENS, WIDTH), jnp.bfloat16), jnp.ones(WIDTH, jnp.bfloat16)
    _, pull = jax.vjp(jax.jit(lambda bias: add_bias(x, bias)), bias)
    expected = np.float64(cotangent).sum(axis=0)
    np.testing.assert_allclose(np.float64(pull(cotangent)[0]), expected, rtol=2**-8)


def test_a_bias_is_added_as_in_its_own_dtype():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(64, WIDTH)), jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=WIDTH), jnp.bfloat16)
    np.testing.assert_array_equal(add_bias(x, bias), x + bias)
